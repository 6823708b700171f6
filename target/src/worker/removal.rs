//! Devices that are taken away, and that come back.
//!
//! ```text
//! serves → gone: its sessions end without a word, its listeners are forgotten
//!   → the last session has let go of its buffers → looked for every [`RETRY`] → opened, listens
//! ```

use std::time::Duration;

use super::Worker;
use crate::srp::Channel;

/// How often a device that was taken away is looked for.
const RETRY: Duration = Duration::from_millis(500);

impl Worker {
    /// Ends what was on a device that has just gone.
    pub(super) fn check_removed(&mut self, device: usize) {
        if self.returns[device].is_some() || !self.devices[device].is_gone() {
            return;
        }
        tracing::warn!(addr = %self.addrs[device], "the RDMA device is gone");
        self.returns[device] = Some(self.now);
        self.listeners.retain(|(d, _), _| *d != device);
        self.lingering.retain(|(d, _, _)| *d != device);
        self.discovery[device] = None;
        let sessions = self.sessions.iter();
        let keys: Vec<usize> = sessions
            .filter(|(_, s)| s.device == device)
            .map(|(key, _)| key)
            .collect();
        for key in keys {
            self.sessions[key].is_closed = true;
            self.with_channel(key, Channel::handle_device_gone);
        }
        self.drain_dirty();
    }

    /// Looks for devices that were taken away.
    pub(super) fn poll_returns(&mut self) {
        for device in 0..self.devices.len() {
            let due = self.returns[device].is_some_and(|at| at <= self.now);
            // Sessions whose block operations still run hold objects of the old device.
            let held = self.sessions.iter().any(|(_, s)| s.device == device);
            if !due {
                continue;
            }
            self.returns[device] = Some(self.now + RETRY);
            if held || self.phase != super::Phase::Serving {
                continue;
            }
            if let Some(opened) = self.devices[device].reopen(self.addrs[device]) {
                self.devices[device] = opened;
                self.come_back(device);
            }
        }
    }

    fn come_back(&mut self, device: usize) {
        let listens = self.listen_on(device).and_then(|()| self.watch(device));
        match listens {
            Ok(()) => {
                self.returns[device] = None;
                tracing::info!(addr = %self.addrs[device], "the RDMA device is back");
            }
            Err(error) => {
                self.listeners.retain(|(d, _), _| *d != device);
                tracing::warn!(addr = %self.addrs[device], %error, "the RDMA device is not usable");
            }
        }
    }
}
