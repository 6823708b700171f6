//! Logins of iSCSI initiators to a target, and their ends.

use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use riser_scsi::iscsi::pdu::LoginStatus;

use super::Tally;

/// Event of a session that is counted at its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionEvent {
    /// It was logged out.
    LoggedOut,
    /// A connection of it was logged out, to end or to be recovered.
    LoggedOutInPart,
    /// A PDU had a wrong digest.
    DigestError,
    /// The initiator was silent for too long.
    TimedOut,
    /// A PDU was not legal.
    FormatError,
}

impl SessionEvent {
    /// Its name, as a label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::LoggedOut => "logout",
            Self::LoggedOutInPart => "partial_logout",
            Self::DigestError => "digest_error",
            Self::TimedOut => "timeout",
            Self::FormatError => "format_error",
        }
    }

    fn is_error(self) -> bool {
        !matches!(self, Self::LoggedOut | Self::LoggedOutInPart)
    }
}

/// A login that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Status of the login response.
    pub status: LoginStatus,
    /// Name of the initiator.
    pub initiator: String,
    /// Address of the initiator.
    pub address: IpAddr,
    /// Time of the refusal.
    pub at: Instant,
}

/// Counts of a target.
#[derive(Clone, Debug, Default)]
pub struct TargetCounts {
    /// Number of logins accepted.
    pub logins: u64,
    /// Logins refused, by the answer.
    pub refused: Tally<LoginStatus>,
    /// The last one of them.
    pub last_refused: Option<Refused>,
    /// Events of sessions, with their numbers.
    pub events: Tally<SessionEvent>,
    /// The last one that was an error, and to whom it happened.
    pub last_error: Option<(SessionEvent, String)>,
}

/// Counts of a target, which all workers share: nothing of this happens often.
#[derive(Debug, Default)]
pub struct TargetStats(Mutex<TargetCounts>);

impl TargetStats {
    fn lock(&self) -> MutexGuard<'_, TargetCounts> {
        // No count is half done, so poison is ignored.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A login was accepted.
    pub fn count_login(&self) {
        self.lock().logins += 1;
    }

    /// A login was refused.
    pub fn count_refused(&self, refused: Refused) {
        let mut counts = self.lock();
        counts.refused.count(refused.status);
        counts.last_refused = Some(refused);
    }

    /// Something has happened to an initiator's session.
    pub fn count_event(&self, event: SessionEvent, initiator: &str) {
        let mut counts = self.lock();
        counts.events.count(event);
        if event.is_error() {
            counts.last_error = Some((event, initiator.to_owned()));
        }
    }

    /// Returns all counts at this moment.
    #[must_use]
    pub fn counts(&self) -> TargetCounts {
        self.lock().clone()
    }
}
