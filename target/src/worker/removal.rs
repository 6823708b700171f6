//! Hot removal of devices, and adding them again.
//!
//! ```text
//! open → removed: sessions are closed without notification, listeners are removed
//!   → all sessions have released their buffers → closed, which the kernel may be waiting for
//!   → check periodically → open: listening
//! ```
//!
//! If the last portal of a device is removed from the configuration, the device is closed by all
//! workers together when there are no more sessions using it: see
//! [`DeviceSlots`](super::device_slots::DeviceSlots).

use super::conns::Connection;
use super::fabrics::Input;
use super::portals::Unserved;
use super::{Phase, Worker};

impl Worker {
    /// Closes all sessions on a device that was removed.
    pub(super) fn check_removed(&mut self, device: usize) {
        if !self.group.devices.note_gone(device) {
            return;
        }
        tracing::warn!(addr = %self.group.devices.addr(device), "RDMA device was removed");
        self.group.devices.unwatch(&mut self.group.ring, device);
        self.group.portals.listeners.remove_device(device);
        // These identifiers were destroyed with the device, and there can be no replies.
        self.group.disconnects.remove_device(device);
        // Don't notify the peers, because nothing can be sent any more.
        for key in self.group.conns.keys(|conn| {
            let link = conn.fabric.rdma();
            link.is_some_and(|link| link.device == device)
        }) {
            let link = self
                .group
                .conns
                .get_mut(key)
                .and_then(|c| c.fabric.rdma_mut());
            if let Some(link) = link {
                link.is_closed = true;
            }
            self.group.input(key, Input::QueuesGone);
        }
        self.group.drain_dirty();
    }

    /// Closes removed devices that are no longer in use, and tries to open closed devices again.
    pub(super) fn poll_returns(&mut self) {
        for device in 0..self.group.devices.len() {
            // Sessions with pending block operations still use objects of the removed device.
            if self.group.devices.is_gone(device) && !self.group.conns.uses(device) {
                self.group.devices.close(device, self.group.now);
            } else if self.phase == Phase::Serving
                && self.group.devices.look_for(device, self.group.now)
            {
                self.reopen_device(device);
            }
        }
        if self.phase == Phase::Serving {
            let (devices, catalog) = (&mut self.group.devices, &self.group.catalog);
            self.group
                .portals
                .listen_again(devices, catalog, self.group.now);
        }
    }

    /// Closes devices without portals that are no longer in use.
    pub(super) fn poll_unwanted(&mut self) {
        for device in 0..self.group.devices.len() {
            let is_held = || self.group.conns.uses(device) || self.group.disconnects.uses(device);
            if self.group.devices.is_unwanted(device)
                && !is_held()
                && self
                    .group
                    .shared
                    .device_slots
                    .is_over(device, self.group.index)
            {
                tracing::info!(addr = %self.group.devices.addr(device), "closed RDMA device without portals");
                let (ring, devices) = (&mut self.group.ring, &mut self.group.devices);
                self.group.portals.close_device(ring, devices, device);
                self.group.shared.device_slots.closed(device);
            }
        }
    }

    fn reopen_device(&mut self, device: usize) {
        let addr = self.group.devices.addr(device);
        let devices = &mut self.group.devices;
        match self
            .group
            .portals
            .serve_on(devices, device, &self.group.catalog)
        {
            Ok(unserved) => {
                tracing::info!(%addr, "RDMA device is available again");
                for Unserved { portal, why } in &unserved {
                    tracing::warn!(%portal, why, "cannot listen on the RDMA device; retrying");
                }
                if !unserved.is_empty() {
                    self.group.portals.note_refused(device, self.group.now);
                }
            }
            Err(error) => {
                self.group.devices.close(device, self.group.now);
                tracing::warn!(%addr, %error, "cannot use the RDMA device");
            }
        }
    }
}
