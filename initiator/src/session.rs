//! What the sessions of every protocol have in common: times, states, events, and why they end.

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use riser_scsi::iscsi::login::LoginError as IscsiLoginError;
use riser_scsi::srp::{TLogoutReason, WireLun};
use riser_transport::verbs::{CmError, VerbsError};

use crate::iscsi::session::Fault;
use crate::srp::channel::{ChannelFault, LoginError};

/// How long a target may be silent before it is asked whether it is there.
pub(crate) const PING: Duration = Duration::from_secs(5);

/// A session's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How long a command may go unanswered before it is aborted.
    pub attempt: Duration,
    /// How long task management may go unanswered.
    pub tsk_mgmt: Duration,
    /// How long connecting and logging in may take, the first time.
    pub login: Duration,
    /// How long it may take at most: when it was not answered in time, the next attempt waits twice
    /// as long, since a target that has much to clean up first would never be heard otherwise.
    pub login_max: Duration,
    /// Wait before the first try to reconnect; doubles with every failure.
    pub backoff_min: Duration,
    /// Longest wait between tries to reconnect.
    pub backoff_max: Duration,
    /// Wait before a command is repeated that the target was too busy for; doubles with every
    /// attempt.
    pub busy: Duration,
    /// How long commands of a lost session may still be carried out, at a target that does not show when
    /// they are over. The default is the time after which Linux's SRP initiator gives a lost port's
    /// commands back for others to repeat (`fast_io_fail_tmo`).
    pub settle: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            attempt: Duration::from_secs(30),
            tsk_mgmt: Duration::from_secs(5),
            login: Duration::from_secs(10),
            login_max: Duration::from_secs(60),
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            busy: Duration::from_millis(5),
            settle: Duration::from_secs(15),
        }
    }
}

#[cfg(test)]
impl Timing {
    /// Short times, for scripts of a session.
    pub(crate) fn of_tests() -> Self {
        Self {
            attempt: Duration::from_secs(10),
            tsk_mgmt: Duration::from_secs(1),
            login: Duration::from_secs(5),
            login_max: Duration::from_secs(15),
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_millis(400),
            busy: Duration::from_millis(5),
            settle: Duration::from_secs(15),
        }
    }
}

/// What happened to a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionEvent {
    /// Logged in; requests flow.
    Live,
    /// The connection broke for this reason; a new one is being made.
    Reconnecting(Down),
    /// A logical unit reported an event.
    UnitEvent {
        /// Logical unit.
        lun: WireLun,
        /// What happened, as sense data.
        sense: Box<[u8]>,
    },
    /// The session is over, for this reason. Every request has been completed.
    Closed(Down),
}

/// Why a session is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Down {
    /// The connection could not be made.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The target violated SRP.
    #[error(transparent)]
    Fault(#[from] ChannelFault),
    /// The target violated iSCSI.
    #[error(transparent)]
    IscsiFault(#[from] Fault),
    /// The target logged us out.
    #[error("target logged out ({0:?})")]
    Logout(TLogoutReason),
    /// The target asked for a logout, or said that it will drop the connection.
    #[error("target asked for a logout")]
    LogoutRequested,
    /// The connection was closed by the peer, or broke.
    #[error("connection lost")]
    ConnectionLost,
    /// Commands or pings were not answered, and commands could not be aborted.
    #[error("target does not answer")]
    Unresponsive,
    /// It was closed from this side.
    #[error("closed")]
    Closed,
    /// Another logical unit is there than before, or than on the other paths.
    #[error("the portal leads to another logical unit")]
    OtherUnit,
    /// The logical unit has less capacity than before.
    #[error("the logical unit has become smaller")]
    Shrunk,
    /// The logical unit reports no identity, or is not there, so two paths cannot be proved to lead
    /// to the same one.
    #[error("the logical unit does not say which one it is, or is not there")]
    NoIdentity,
    /// The logical unit did not answer the check of its identity.
    #[error("the logical unit does not answer")]
    UnitSilent,
}

/// Why a connection could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The target's address cannot be reached from this device.
    #[error("address cannot be reached: {0}")]
    Address(CmError),
    /// The target did not answer.
    #[error("target does not answer")]
    Unreachable,
    /// Login refused.
    #[error(transparent)]
    Login(LoginError),
    /// iSCSI login failed.
    #[error(transparent)]
    IscsiLogin(IscsiLoginError),
    /// The target has moved, to where it cannot be followed.
    #[error("target has moved to an address that cannot be followed")]
    Redirected,
    /// It took too long.
    #[error("connecting timed out")]
    TimedOut,
    /// A local resource could not be had.
    #[error("local resources: {0}")]
    Local(VerbsError),
    /// A CM call failed.
    #[error("connection manager: {0}")]
    Cm(CmError),
    /// A TCP connection could not be made; the value is the operating system's error.
    #[error("TCP connection: {}", std::io::Error::from_raw_os_error(*.0))]
    Tcp(i32),
}

/// Where a session is in its life.
///
/// ```text
/// LoggingIn → Live → TearingDown → Backoff → LoggingIn
///     │                  ↓
///     └────────────→  Closed
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionState {
    /// The first channel is being connected.
    LoggingIn,
    /// At least one channel is live.
    Live,
    /// Every channel is being closed; then a new login, or the end.
    TearingDown {
        /// Why.
        why: Down,
        /// Whether it is the end.
        last: bool,
    },
    /// Waits to try again.
    Backoff {
        /// Until then.
        until: Instant,
    },
    /// Over.
    Closed,
}

/// Why a request was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// There are as many as the session takes.
    #[error("session has as many requests as it takes")]
    Full,
    /// The session is over.
    #[error("session is closed")]
    Closed,
}
