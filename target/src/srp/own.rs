//! Messages initiated by the target: T_LOGOUT, CRED_REQ, AER_REQ.

use std::collections::VecDeque;
use std::time::Instant;

use riser_scsi::lun::WireLun;
use riser_scsi::sense::SenseData;
use riser_scsi::srp::Tag;

/// The type of a message. At most one message of each type is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    CredReq,
    AerReq,
    Logout,
}

/// State of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Slot {
    /// Set until the send has completed.
    pub(super) sending: bool,
    /// Tag of the message until the response is received.
    pub(super) unanswered: Option<Tag>,
}

impl Slot {
    pub(super) fn is_idle(self) -> bool {
        !self.sending && self.unanswered.is_none()
    }
}

/// Messages initiated by the target.
#[derive(Debug, Default)]
pub(super) struct OwnMessages {
    pub(super) slots: [Slot; 3],
    pub(super) next_tag: u64,
    pub(super) events: VecDeque<(WireLun, SenseData)>,
    /// If set, commands in flight can complete until then, followed by a logout.
    pub(super) stopping: Option<Instant>,
}

impl OwnMessages {
    /// Marks all sends as completed, because their completions will never arrive.
    pub(super) fn forget_sends(&mut self) {
        for slot in &mut self.slots {
            slot.sending = false;
        }
    }

    pub(super) fn is_sending(&self) -> bool {
        self.slots.iter().any(|s| s.sending)
    }
}
