//! Catalog updates: attaches backends, opens and closes portals, and sends new LUN maps to
//! sessions.

use std::sync::Arc;

use super::PollGroup;

impl PollGroup {
    /// Updates the worker if the registry has a new catalog.
    pub(super) fn follow_catalog(&mut self) {
        let new = self.shared.registry.catalog();
        if Arc::ptr_eq(&new, &self.catalog) {
            return;
        }
        let old = std::mem::replace(&mut self.catalog, Arc::clone(&new));
        // This has to be first, because a session can send commands to a new unit as soon as it has
        // access.
        self.blocks.follow(&mut self.ring, &old, &new);
        self.pool.set_units(new.live_units());
        let sockets = self.portals.follow(&mut self.devices, &new);
        self.sockets.add(&mut self.ring, self.now, sockets);
        let tcp: Vec<_> = new.tcp_portals().collect();
        let is_over = |address| !tcp.contains(&address);
        self.sockets.close(&mut self.ring, is_over);
        // This has to be last, because it will log out the sessions of closed portals.
        self.follow_sessions();
    }
}
