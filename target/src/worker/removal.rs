//! Devices that are taken away, and that come back.
//!
//! ```text
//! open → gone: its sessions end without a word, its listeners are forgotten
//!   → the last session has let go of its buffers → closed, which the kernel may be waiting for
//!   → looked for now and then → open: listens
//! ```
//!
//! A device whose last portal the configuration has taken away is closed by all workers together,
//! once none of them has a session on it any more: see [`Places`](super::places::Places).

use std::time::{Duration, Instant};

use super::conns::Connection;
use super::fabrics::Input;
use super::stage::Unserved;
use super::{Phase, Worker};

/// How often portals are tried that were refused as their device came back.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

impl Worker {
    /// Ends what was on a device that has just gone.
    pub(super) fn check_removed(&mut self, device: usize) {
        if !self.devices.note_gone(device) {
            return;
        }
        tracing::warn!(addr = %self.devices.addr(device), "the RDMA device is gone");
        self.unwatch(device);
        self.listeners.retain(|(d, _), _| *d != device);
        self.lingering.retain(|(d, _, _)| *d != device);
        self.refused.retain(|(d, _)| *d != device);
        self.discovery[device] = None;
        for key in self.conns.keys(|conn| {
            let link = conn.fabric.rdma();
            link.is_some_and(|link| link.device == device)
        }) {
            let link = self.conns.get_mut(key).and_then(|c| c.fabric.rdma_mut());
            if let Some(link) = link {
                link.is_closed = true;
            }
            self.input(key, Input::DeviceGone);
        }
        self.drain_dirty();
    }

    /// Closes devices that nothing holds any more, and looks for those that may be back.
    pub(super) fn poll_returns(&mut self) {
        for device in 0..self.devices.len() {
            // Sessions whose block operations still run hold objects of the old device.
            if self.devices.is_gone(device) && !self.conns.uses(device) {
                self.devices.close(device, self.now);
            } else if self.phase == Phase::Serving && self.devices.look_for(device, self.now) {
                self.come_back(device);
            }
        }
        self.listen_again();
    }

    /// Closes devices without portals that nothing holds any more.
    pub(super) fn poll_unwanted(&mut self) {
        let mut place = 0;
        while place < self.unwanted.len() {
            let device = self.unwanted[place];
            let is_held =
                self.conns.uses(device) || self.lingering.iter().any(|(d, _, _)| *d == device);
            if !is_held && self.shared.places.is_over(device, self.index) {
                tracing::info!(addr = %self.devices.addr(device), "no portal is left; closed");
                self.close_device(device);
                self.unwanted.swap_remove(place);
                self.shared.places.closed(device);
            } else {
                place += 1;
            }
        }
    }

    /// Closes a device for good.
    pub(super) fn close_device(&mut self, device: usize) {
        self.stop_serving_on(device);
        self.devices.remove(device);
    }

    fn come_back(&mut self, device: usize) {
        let addr = self.devices.addr(device);
        match self.serve_on(device) {
            Ok(unserved) => {
                tracing::info!(%addr, "the RDMA device is back");
                for Unserved { portal, why } in &unserved {
                    tracing::warn!(%portal, why, "cannot be listened on; trying again");
                }
                if !unserved.is_empty() {
                    self.refused.push((device, self.now + LISTEN_AGAIN));
                }
            }
            Err(error) => {
                self.devices.close(device, self.now);
                tracing::warn!(%addr, %error, "the RDMA device is not usable");
            }
        }
    }

    /// When portals that were refused as their device came back are tried again.
    pub(super) fn listen_deadline(&self) -> Option<Instant> {
        // What is staged may listen there already.
        let may_listen = self.phase == Phase::Serving && self.staged.is_none();
        let at = self.refused.iter().map(|(_, at)| *at).min();
        at.filter(|_| may_listen)
    }

    /// Listens where that was refused when a device came back. What it serves elsewhere goes on meanwhile.
    fn listen_again(&mut self) {
        if self.listen_deadline().is_none_or(|at| at > self.now) {
            return;
        }
        let next = self.now + LISTEN_AGAIN;
        for (device, at) in std::mem::take(&mut self.refused) {
            if at > self.now {
                self.refused.push((device, at));
            } else if self.devices.is_open(device) && !self.listen_on(device).is_empty() {
                self.refused.push((device, next));
            }
        }
    }
}
