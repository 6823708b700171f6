/* libiscsi 1.19's iSER client never ends a connection, and yet frees what its thread for the events of
 * connections uses. A target that ends the connection after the logout, as it should, wakes that thread,
 * and the client dies of it. Loaded before the client (LD_PRELOAD), this lets it keep everything until the
 * process ends. On the wire nothing changes. */
int iscsi_destroy_context(void *iscsi)
{
    (void)iscsi;
    return 0;
}
