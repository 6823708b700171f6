/*
 * A stand-in for NETLINK_RDMA, preloaded into a port mapper: its socket is connected to the Unix
 * socket that RISER_TEST_NETLINK names, where a test plays the kernel. With RISER_TEST_NO_IPV6 the
 * host has no IPv6.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/netlink.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int stand_in = -1;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void put(struct sockaddr *addr, socklen_t *len, unsigned int port)
{
	struct sockaddr_nl nl = { .nl_family = AF_NETLINK, .nl_pid = port };

	if (!addr || !len)
		return;
	memcpy(addr, &nl, *len < sizeof(nl) ? *len : sizeof(nl));
	*len = sizeof(nl);
}

int socket(int domain, int type, int protocol)
{
	const char *path = getenv("RISER_TEST_NETLINK");
	struct sockaddr_un un = { .sun_family = AF_UNIX };
	int flags = type & (SOCK_NONBLOCK | SOCK_CLOEXEC);

	if (domain == AF_INET6 && getenv("RISER_TEST_NO_IPV6")) {
		errno = EAFNOSUPPORT;
		return -1;
	}
	if (domain != AF_NETLINK || protocol != NETLINK_RDMA || !path)
		return REAL(socket)(domain, type, protocol);
	stand_in = REAL(socket)(AF_UNIX, SOCK_SEQPACKET | flags, 0);
	strncpy(un.sun_path, path, sizeof(un.sun_path) - 1);
	if (connect(stand_in, (struct sockaddr *)&un, sizeof(un)))
		abort();
	return stand_in;
}

int bind(int fd, const struct sockaddr *addr, socklen_t len)
{
	return fd == stand_in ? 0 : REAL(bind)(fd, addr, len);
}

int getsockname(int fd, struct sockaddr *addr, socklen_t *len)
{
	if (fd != stand_in)
		return REAL(getsockname)(fd, addr, len);
	put(addr, len, getpid());
	return 0;
}

ssize_t sendto(int fd, const void *bytes, size_t size, int flags, const struct sockaddr *addr,
	       socklen_t len)
{
	if (fd == stand_in)
		return send(fd, bytes, size, flags | MSG_NOSIGNAL);
	return REAL(sendto)(fd, bytes, size, flags, addr, len);
}

ssize_t recvfrom(int fd, void *bytes, size_t size, int flags, struct sockaddr *addr, socklen_t *len)
{
	ssize_t received;

	if (fd != stand_in)
		return REAL(recvfrom)(fd, bytes, size, flags, addr, len);
	received = recv(fd, bytes, size, flags);
	/* The end of the test: a netlink socket has no end. */
	if (received == 0)
		_exit(0);
	put(addr, len, 0);
	return received;
}

/* Debian's programs call this one where they know the size of the buffer. */
ssize_t __recvfrom_chk(int fd, void *bytes, size_t size, size_t room, int flags,
		       struct sockaddr *addr, socklen_t *len)
{
	if (size > room)
		abort();
	return recvfrom(fd, bytes, size, flags, addr, len);
}
