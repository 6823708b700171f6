//! The port of the NIC as it comes and goes, and the end of the device.
//!
//! ```text
//! active ⇄ down → removed
//!      └────────────↑
//! ```
//!
//! While the port is down everything stays as it is: requests are repeated until their retries are
//! used up. A device that is removed has flushed all requests. From then on its objects can be
//! destroyed and asked for what has happened, and every other call fails
//! ([`VerbsError::DeviceGone`]).

use super::Nic;
use super::objects::PORT;
use crate::verbs::{AsyncEvent, CqId, Moderation, PortState, QpId, VerbsError};

impl Nic {
    /// Sets the state of the port; an event reports a change.
    pub fn set_port_state(&mut self, state: PortState) {
        if self.port_state == state {
            return;
        }
        self.port_state = state;
        let (now, before) = match state {
            PortState::Active => (AsyncEvent::PortActive(PORT), AsyncEvent::PortError(PORT)),
            PortState::Down => (AsyncEvent::PortError(PORT), AsyncEvent::PortActive(PORT)),
        };
        // The last event is that of the present state, however many have not been taken.
        self.async_events
            .retain(|event| ![now, before].contains(event));
        self.raise(now);
    }

    /// Reports that the address has come or gone, which is the port's GID.
    pub fn note_gid_change(&mut self) {
        self.raise(AsyncEvent::GidChange(PORT));
    }

    /// Whether the device is there: it was not removed.
    ///
    /// # Errors
    /// [`VerbsError::DeviceGone`].
    pub(crate) fn check_present(&self) -> Result<(), VerbsError> {
        if self.is_removed {
            return Err(VerbsError::DeviceGone);
        }
        Ok(())
    }

    /// Ends the device: flushes all requests, ends all identifiers of the RDMA CM, and says so by
    /// events. Nothing is to be sent, received or fired any more.
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
        // Events of completion queues wait for nothing any longer.
        let cqs: Vec<CqId> = self.cqs.iter().map(|(id, _)| id).collect();
        for cq in cqs {
            // It exists.
            let _ = self.modify_cq(cq, Moderation::default());
        }
        self.ready.clear();
        self.timers.clear();
        self.last_answers.clear();
    }
}
