//! Messages that a target sends of its own accord: T_LOGOUT, CRED_REQ, AER_REQ.

use std::collections::VecDeque;
use std::time::Instant;

use riser_scsi::lun::WireLun;
use riser_scsi::sense::SenseData;
use riser_scsi::srp::Tag;

/// A message of our own: at most one of each kind is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    CredReq,
    AerReq,
    Logout,
}

/// State of a message of our own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Slot {
    /// Its send has not completed.
    pub(super) sending: bool,
    /// Its answer has not come.
    pub(super) unanswered: Option<Tag>,
}

impl Slot {
    pub(super) fn is_idle(self) -> bool {
        !self.sending && self.unanswered.is_none()
    }
}

/// Messages of our own.
#[derive(Debug, Default)]
pub(super) struct OwnMessages {
    pub(super) slots: [Slot; 3],
    pub(super) next_tag: u64,
    pub(super) events: VecDeque<(WireLun, SenseData)>,
    /// Until when commands under way may finish before the logout.
    pub(super) stopping: Option<Instant>,
}

impl OwnMessages {
    /// None of them will complete.
    pub(super) fn forget_sends(&mut self) {
        for slot in &mut self.slots {
            slot.sending = false;
        }
    }

    pub(super) fn is_sending(&self) -> bool {
        self.slots.iter().any(|s| s.sending)
    }
}
