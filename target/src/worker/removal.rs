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
        if !self.devices.note_gone(device) {
            return;
        }
        tracing::warn!(addr = %self.devices.addr(device), "RDMA device was removed");
        self.devices.unwatch(&mut self.ring, device);
        self.portals.listeners.remove_device(device);
        // These identifiers were destroyed with the device, and there can be no replies.
        self.disconnects.remove_device(device);
        // Don't notify the peers, because nothing can be sent any more.
        for key in self.conns.keys(|conn| {
            let link = conn.fabric.rdma();
            link.is_some_and(|link| link.device == device)
        }) {
            let link = self.conns.get_mut(key).and_then(|c| c.fabric.rdma_mut());
            if let Some(link) = link {
                link.is_closed = true;
            }
            self.input(key, Input::QueuesGone);
        }
        self.drain_dirty();
    }

    /// Closes removed devices that are no longer in use, and tries to open closed devices again.
    pub(super) fn poll_returns(&mut self) {
        for device in 0..self.devices.len() {
            // Sessions with pending block operations still use objects of the removed device.
            if self.devices.is_gone(device) && !self.conns.uses(device) {
                self.devices.close(device, self.now);
            } else if self.phase == Phase::Serving && self.devices.look_for(device, self.now) {
                self.reopen_device(device);
            }
        }
        if self.phase == Phase::Serving {
            let (devices, catalog) = (&mut self.devices, &self.catalog);
            self.portals.listen_again(devices, catalog, self.now);
        }
    }

    /// Closes devices without portals that are no longer in use.
    pub(super) fn poll_unwanted(&mut self) {
        for device in 0..self.devices.len() {
            let is_held = || self.conns.uses(device) || self.disconnects.uses(device);
            if self.devices.is_unwanted(device)
                && !is_held()
                && self.shared.device_slots.is_over(device, self.index)
            {
                tracing::info!(addr = %self.devices.addr(device), "closed RDMA device without portals");
                let (ring, devices) = (&mut self.ring, &mut self.devices);
                self.portals.close_device(ring, devices, device);
                self.shared.device_slots.closed(device);
            }
        }
    }

    fn reopen_device(&mut self, device: usize) {
        let addr = self.devices.addr(device);
        let devices = &mut self.devices;
        match self.portals.serve_on(devices, device, &self.catalog) {
            Ok(unserved) => {
                tracing::info!(%addr, "RDMA device is available again");
                for Unserved { portal, why } in &unserved {
                    tracing::warn!(%portal, why, "cannot listen on the RDMA device; retrying");
                }
                if !unserved.is_empty() {
                    self.portals.note_refused(device, self.now);
                }
            }
            Err(error) => {
                self.devices.close(device, self.now);
                tracing::warn!(%addr, %error, "cannot use the RDMA device");
            }
        }
    }
}
