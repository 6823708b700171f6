/*
 * Messages between the ranks of an MPI job, each of which is checked, with times like those of the
 * OSU benchmarks: `cargo xtask verbs mpi`.
 *
 * A byte of a message depends on its place, its sender and the round, so one that comes from another
 * message, or is left from the last, is noticed. A wrong byte ends the job with status 1.
 */
#include <mpi.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Longest message: well beyond the size at which libraries change to a rendezvous. */
enum { LONGEST = 1 << 20, WINDOW = 16 };

static int rank, ranks;

static void fail(const char *what, long at)
{
	fprintf(stderr, "rank %d: %s is wrong at %ld\n", rank, what, at);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

static unsigned char byte_at(long at, int sender, int round)
{
	return (unsigned char)(at * 7 + at / 251 + sender * 31 + round * 101 + 1);
}

static void fill(unsigned char *data, long size, int sender, int round)
{
	for (long i = 0; i < size; i++)
		data[i] = byte_at(i, sender, round);
}

static void check(const char *what, unsigned char *data, long size, int sender, int round)
{
	for (long i = 0; i < size; i++)
		if (data[i] != byte_at(i, sender, round))
			fail(what, i);
	/* The next message must not pass by what this one has left. */
	memset(data, 0, size);
}

/* Each rank sends to the next one, and takes what the last one sends. */
static void ring(unsigned char *mine, unsigned char *theirs, int rounds)
{
	int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;

	for (long size = 1; size <= LONGEST; size *= 8) {
		for (int round = 0; round < rounds; round++) {
			fill(mine, size, rank, round);
			MPI_Sendrecv(mine, size, MPI_BYTE, next, round, theirs, size, MPI_BYTE, last,
				     round, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			check("ring", theirs, size, last, round);
		}
	}
	if (rank == 0)
		printf("ring of %d ranks: ok\n", ranks);
}

/* Ping-pong of ranks 0 and 1; the others wait in the barrier. */
static void latency(unsigned char *mine, unsigned char *theirs, int rounds)
{
	MPI_Barrier(MPI_COMM_WORLD);
	for (long size = 1; size <= LONGEST && rank < 2; size *= 32) {
		double start = MPI_Wtime();

		for (int round = 0; round < rounds; round++) {
			if (rank == 0) {
				fill(mine, size, 0, round);
				MPI_Send(mine, size, MPI_BYTE, 1, 1, MPI_COMM_WORLD);
			}
			MPI_Recv(theirs, size, MPI_BYTE, 1 - rank, 1, MPI_COMM_WORLD,
				 MPI_STATUS_IGNORE);
			check("ping-pong", theirs, size, 1 - rank, round);
			if (rank == 1) {
				fill(mine, size, 1, round);
				MPI_Send(mine, size, MPI_BYTE, 0, 1, MPI_COMM_WORLD);
			}
		}
		if (rank == 0)
			printf("latency of %ld bytes: %.2f us, with checks\n", size,
			       (MPI_Wtime() - start) * 1e6 / (2 * rounds));
	}
	MPI_Barrier(MPI_COMM_WORLD);
}

/* Windows of messages from rank 0 to rank 1, each with a buffer of its own. */
static void bandwidth(unsigned char *all, int rounds)
{
	MPI_Request requests[WINDOW];

	for (long size = 64; size <= LONGEST / WINDOW && rank < 2; size *= 32) {
		double start = MPI_Wtime();

		for (int round = 0; round < rounds; round++) {
			for (int i = 0; i < WINDOW; i++) {
				unsigned char *at = all + i * size;

				if (rank == 0) {
					fill(at, size, i, round);
					MPI_Isend(at, size, MPI_BYTE, 1, i, MPI_COMM_WORLD,
						  &requests[i]);
				} else {
					/* Asked for backwards: only their tags say which is which. */
					MPI_Irecv(all + (WINDOW - 1 - i) * size, size, MPI_BYTE, 0,
						  WINDOW - 1 - i, MPI_COMM_WORLD, &requests[i]);
				}
			}
			MPI_Waitall(WINDOW, requests, MPI_STATUSES_IGNORE);
			for (int i = 0; rank == 1 && i < WINDOW; i++)
				check("window", all + i * size, size, i, round);
		}
		if (rank == 0)
			MPI_Recv(all, 1, MPI_BYTE, 1, 99, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		else
			MPI_Send(all, 1, MPI_BYTE, 0, 99, MPI_COMM_WORLD);
		if (rank == 0)
			printf("bandwidth of %ld bytes: %.1f MB/s, with checks\n", size,
			       (double)size * WINDOW * rounds / (MPI_Wtime() - start) / 1e6);
	}
	MPI_Barrier(MPI_COMM_WORLD);
}

static void reduce(int rounds)
{
	enum { COUNT = 1 << 15 };
	static long long terms[COUNT], sums[COUNT];

	for (int count = 1; count <= COUNT; count *= 8) {
		for (int round = 0; round < rounds; round++) {
			for (int i = 0; i < count; i++)
				terms[i] = (long long)(rank + 1) * (i + round);
			MPI_Allreduce(terms, sums, count, MPI_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
			for (int i = 0; i < count; i++)
				if (sums[i] != (long long)ranks * (ranks + 1) / 2 * (i + round))
					fail("sum", i);
		}
	}
	if (rank == 0)
		printf("allreduce: ok\n");
}

/* All ranks write into, read from and count in the memory of the next one. */
static void one_sided(unsigned char *mine, unsigned char *theirs, int rounds)
{
	struct shared {
		unsigned char data[1 << 16];
		long long count;
	} *shared;
	MPI_Win window;
	int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
	long size = sizeof(shared->data);
	long long one = 1, before;

	MPI_Win_allocate(sizeof(*shared), 1, MPI_INFO_NULL, MPI_COMM_WORLD, &shared, &window);
	memset(shared, 0, sizeof(*shared));
	MPI_Barrier(MPI_COMM_WORLD);
	for (int round = 0; round < rounds; round++) {
		fill(mine, size, rank, round);
		MPI_Win_lock(MPI_LOCK_EXCLUSIVE, next, 0, window);
		MPI_Put(mine, size, MPI_BYTE, next, 0, size, MPI_BYTE, window);
		MPI_Win_unlock(next, window);
		MPI_Win_lock(MPI_LOCK_SHARED, next, 0, window);
		MPI_Get(theirs, size, MPI_BYTE, next, 0, size, MPI_BYTE, window);
		MPI_Win_unlock(next, window);
		check("what was read back", theirs, size, rank, round);
		MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, window);
		MPI_Fetch_and_op(&one, &before, MPI_LONG_LONG, 0, offsetof(struct shared, count),
				 MPI_SUM, window);
		MPI_Win_unlock(0, window);
		if (before < round || before >= (long long)ranks * rounds)
			fail("count before", before);
		MPI_Barrier(MPI_COMM_WORLD);
		MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, window);
		check("what was written", shared->data, size, last, round);
		MPI_Win_unlock(rank, window);
		MPI_Barrier(MPI_COMM_WORLD);
	}
	if (rank == 0) {
		MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, window);
		if (shared->count != (long long)ranks * rounds)
			fail("count", shared->count);
		MPI_Win_unlock(0, window);
		printf("one-sided: ok\n");
	}
	MPI_Win_free(&window);
}

int main(int argc, char **argv)
{
	unsigned char *mine = malloc(LONGEST), *theirs = malloc(LONGEST);
	int rounds = argc > 1 ? atoi(argv[1]) : 20;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (!mine || !theirs || ranks < 2 || rounds < 1)
		fail("the job", ranks);
	ring(mine, theirs, rounds);
	latency(mine, theirs, rounds);
	bandwidth(mine, rounds);
	reduce(rounds);
	one_sided(mine, theirs, rounds);
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank == 0)
		printf("all is right\n");
	MPI_Finalize();
	return 0;
}
