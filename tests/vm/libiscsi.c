/* libiscsi 1.19's iSER client has a thread for events of the RDMA connection manager. At its end it
 * neither disconnects nor waits for the thread, and frees what that uses. A target that ends the
 * connection after the logout, as it should, gives the thread an event just then, and the client dies of
 * it. Loaded before the client (LD_PRELOAD), this disconnects, and waits. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>

struct iscsi_context;
int iscsi_disconnect(struct iscsi_context *iscsi);

int iscsi_destroy_context(struct iscsi_context *iscsi)
{
    int (*destroy)(struct iscsi_context *) =
        (int (*)(struct iscsi_context *))dlsym(RTLD_NEXT, "iscsi_destroy_context");

    if (iscsi)
        iscsi_disconnect(iscsi);
    return destroy(iscsi);
}

int pthread_cancel(pthread_t thread)
{
    int (*cancel)(pthread_t) = (int (*)(pthread_t))dlsym(RTLD_NEXT, "pthread_cancel");
    int result = cancel(thread);

    if (result == 0)
        pthread_join(thread, NULL);
    return result;
}
