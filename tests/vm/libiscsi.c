/* Workarounds that are required to use the iSER client of libiscsi 1.19 for tests, loaded with LD_PRELOAD.
 * They don't change anything on the wire. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>

/* The client never disconnects, but frees memory that is used by its thread for connection events. When the
 * target correctly closes the connection after the logout, this thread wakes up and the client crashes.
 * Therefore everything is kept until the process exits. */
int iscsi_destroy_context(void *iscsi)
{
    (void)iscsi;
    return 0;
}

/* Timeout in ms after which we expect no more events. */
#ifndef PATIENCE
#define PATIENCE 12000
#endif

/* The client waits for an event for one second, and treats a timeout as an error. A guest without KVM may
 * need more than a second for a response. Some tests wait for a response that the target must not send. Their
 * timeout must be less than 15 seconds, because riserd sends a ping after this time. After the first timeout,
 * there are no more responses. */
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
