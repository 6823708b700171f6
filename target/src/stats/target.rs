//! Login, logout and session events of iSCSI initiators for a target.

use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use riser_scsi::iscsi::pdu::LoginStatus;

use super::Tally;

/// Session event counted by the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionEvent {
    /// The session was logged out.
    LoggedOut,
    /// A connection of the session was logged out, to be closed or recovered.
    LoggedOutInPart,
    /// A PDU had an invalid digest.
    DigestError,
    /// The initiator did not respond in time.
    TimedOut,
    /// A PDU was malformed.
    FormatError,
}

impl SessionEvent {
    /// Returns the name, to be used as a label.
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

/// A refused login.
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

/// Event counters for a target.
#[derive(Clone, Debug, Default)]
pub struct TargetCounts {
    /// Number of accepted logins.
    pub logins: u64,
    /// Refused logins by status.
    pub refused: Tally<LoginStatus>,
    /// Last refused login.
    pub last_refused: Option<Refused>,
    /// Session events by kind.
    pub events: Tally<SessionEvent>,
    /// Last session event that was an error, with the initiator.
    pub last_error: Option<(SessionEvent, String)>,
}

/// Event counters for a target, shared by all workers because these events are rare.
#[derive(Debug, Default)]
pub struct TargetStats(Mutex<TargetCounts>);

impl TargetStats {
    fn lock(&self) -> MutexGuard<'_, TargetCounts> {
        // Updates can't be partial, so ignore poisoning.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an accepted login.
    pub fn count_login(&self) {
        self.lock().logins += 1;
    }

    /// Counts a refused login.
    pub fn count_refused(&self, refused: Refused) {
        let mut counts = self.lock();
        counts.refused.count(refused.status);
        counts.last_refused = Some(refused);
    }

    /// Counts an event for a session of an initiator.
    pub fn count_event(&self, event: SessionEvent, initiator: &str) {
        let mut counts = self.lock();
        counts.events.count(event);
        if event.is_error() {
            counts.last_error = Some((event, initiator.to_owned()));
        }
    }

    /// Returns the current counters.
    #[must_use]
    pub fn counts(&self) -> TargetCounts {
        self.lock().clone()
    }
}
