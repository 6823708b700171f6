//! Port state changes and device removal.
//!
//! ```text
//! active ⇄ down → removed
//!      └────────────↑
//! ```
//!
//! While the port is down, all state is kept, and requests are retransmitted until no retries are
//! left. When the device is removed, all requests are flushed. After that, objects can still be
//! destroyed and events can be polled, but all other calls return [`VerbsError::DeviceGone`].

use super::Device;
use crate::nic::config::PORT;
use crate::verbs::{AsyncEvent, PortState, VerbsError};

impl Device {
    /// Sets the port state. If it has changed, an event is generated.
    pub fn set_port_state(&mut self, state: PortState) {
        if !self.port.set_state(state) {
            return;
        }
        // Remove unread port events, so that the last event always matches the current state.
        self.events.forget(AsyncEvent::PortActive(PORT));
        self.events.forget(AsyncEvent::PortError(PORT));
        self.events.raise(match state {
            PortState::Active => AsyncEvent::PortActive(PORT),
            PortState::Down => AsyncEvent::PortError(PORT),
        });
    }

    /// Reports that the GID has changed since the port's address was added or removed.
    pub fn note_gid_change(&mut self) {
        self.events.raise(AsyncEvent::GidChange(PORT));
    }

    /// Verifies that the device has not been removed.
    ///
    /// # Errors
    /// [`VerbsError::DeviceGone`].
    pub(crate) fn check_present(&self) -> Result<(), VerbsError> {
        if self.is_removed {
            return Err(VerbsError::DeviceGone);
        }
        Ok(())
    }

    /// Removes the device: flushes all requests and reports this using events. After this, nothing
    /// is sent, and timers don't fire. Returns whether the device had not been removed before.
    pub(crate) fn remove(&mut self) -> bool {
        if std::mem::replace(&mut self.is_removed, true) {
            return false;
        }
        self.set_port_state(PortState::Down);
        for qp in self.qps.ids(|_| true) {
            self.fail_qp(qp);
        }
        self.events.raise(AsyncEvent::DeviceFatal);
        // Don't delay completion events any longer.
        self.cqs.stop_moderation();
        self.schedule.clear();
        true
    }
}
