/* What libiscsi 1.19's iSER client needs to be a test client, loaded before it (LD_PRELOAD). On the wire
 * nothing changes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>

/* The client never ends a connection, and yet frees what its thread for the events of connections uses. A
 * target that ends the connection after the logout, as it should, wakes that thread, and the client dies of
 * it. So everything is kept until the process ends. */
int iscsi_destroy_context(void *iscsi)
{
    (void)iscsi;
    return 0;
}

/* Time in ms after which no event will come. */
#ifndef PATIENCE
#define PATIENCE 12000
#endif

/* The client waits a second for an event, and takes silence for an error. A guest without KVM may need
 * more than a second for an answer. Some tests wait for one that the target must not give: riserd asks after
 * 15 seconds whether they are there, so they have to take less for silence. After that none will come. */
int poll(struct pollfd *fds, nfds_t count, int timeout)
{
    static int (*real)(struct pollfd *, nfds_t, int);
    static int is_silent;
    int is_patient = timeout == 1000 && !is_silent;
    int ready;

    if (!real)
        real = dlsym(RTLD_NEXT, "poll");
    ready = real(fds, count, is_patient ? PATIENCE : timeout);
    if (is_patient && ready == 0)
        is_silent = 1;
    return ready;
}
