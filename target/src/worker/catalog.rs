//! Follows what is served: attaches backends, opens and closes portals, hands sessions their new
//! units.

use std::sync::Arc;

use super::Worker;

impl Worker {
    /// Takes over the registry's catalog, if it is another one than the worker's.
    pub(super) fn follow_catalog(&mut self) {
        let new = self.shared.registry.catalog();
        if Arc::ptr_eq(&new, &self.catalog) {
            return;
        }
        let old = std::mem::replace(&mut self.catalog, Arc::clone(&new));
        // Backends before everything else: sessions may send commands to new units as soon as they
        // have them.
        self.blocks.follow(&mut self.ring, &old, &new);
        let sockets = self.portals.follow(&mut self.devices, &new);
        self.sockets.add(&mut self.ring, self.now, sockets);
        let tcp: Vec<_> = new.tcp_portals().collect();
        let is_over = |address| !tcp.contains(&address);
        self.sockets.close(&mut self.ring, is_over);
        // Last, since it logs out those whose portal has just been closed.
        self.follow_sessions();
    }
}
