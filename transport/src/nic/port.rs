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

use super::Nic;
use super::objects::PORT;
use crate::verbs::{AsyncEvent, CqId, Moderation, PortState, QpId, VerbsError};

impl Nic {
    /// Sets the port state. If it has changed, an event is generated.
    pub fn set_port_state(&mut self, state: PortState) {
        if self.port_state == state {
            return;
        }
        self.port_state = state;
        let (now, before) = match state {
            PortState::Active => (AsyncEvent::PortActive(PORT), AsyncEvent::PortError(PORT)),
            PortState::Down => (AsyncEvent::PortError(PORT), AsyncEvent::PortActive(PORT)),
        };
        // Remove unread port events, so that the last event always matches the current state.
        self.async_events
            .retain(|event| ![now, before].contains(event));
        self.raise(now);
    }

    /// Reports that the GID has changed since the port's address was added or removed.
    pub fn note_gid_change(&mut self) {
        self.raise(AsyncEvent::GidChange(PORT));
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

    /// Removes the device: flushes all requests, closes all RDMA CM ids and reports this using
    /// events. After this, nothing is sent or received, and timers don't fire.
    pub fn remove(&mut self) {
        if std::mem::replace(&mut self.is_removed, true) {
            return;
        }
        self.set_port_state(PortState::Down);
        let qps: Vec<QpId> = self.qps.iter().map(|(id, _)| id).collect();
        for qp in qps {
            self.fail_qp(qp);
        }
        self.end_cm_ids();
        self.raise(AsyncEvent::DeviceFatal);
        // Don't delay completion events any longer.
        let cqs: Vec<CqId> = self.cqs.iter().map(|(id, _)| id).collect();
        for cq in cqs {
            // This can't fail because the queue exists.
            let _ = self.modify_cq(cq, Moderation::default());
        }
        self.ready.clear();
        self.timers.clear();
        self.last_answers.clear();
    }
}
