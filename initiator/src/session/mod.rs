//! Common part of the sessions of all protocols: timeouts, events, life cycle, and reasons to be
//! down.

#![forbid(unsafe_code)]

mod core;
mod fault;
mod functions;
mod lifecycle;
mod machine;
mod task_manager;
mod writes;

use std::net::SocketAddr;
use std::time::Duration;

use riser_scsi::lun::WireLun;

pub(crate) use self::core::{Core, CoreConfig, SessionOutput};
pub use self::fault::{ConnectError, Down, IscsiFault, SrpFault, SrpLoginError};
pub(crate) use self::functions::{FunctionOutcome, TaskFunction};
pub(crate) use self::lifecycle::Lifecycle;
pub use self::lifecycle::SessionState;
pub use self::machine::Machine;
pub(crate) use self::task_manager::TaskManager;
pub(crate) use self::writes::WritePolicy;

/// Time without a message from the target after which it is pinged.
pub(crate) const PING: Duration = Duration::from_secs(5);

/// Timeouts of a session, and intervals between its attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Timeout for the response to a command before it is aborted, and then for retiring its memory
    /// before the connection is closed. On TCP, it restarts whenever data of the command is
    /// transferred.
    pub attempt: Duration,
    /// Timeout of a task-management function.
    pub tsk_mgmt: Duration,
    /// Timeout of the first attempt to connect and log in.
    pub login: Duration,
    /// Maximum login timeout: after an attempt that timed out, the timeout of the next one is
    /// doubled, because otherwise we might never be able to reach a target that needs a long
    /// cleanup first.
    pub login_max: Duration,
    /// Delay before the first reconnect; doubles with each failure.
    pub backoff_min: Duration,
    /// Maximum delay between reconnects.
    pub backoff_max: Duration,
    /// Delay before a retry if the target is busy; doubles with each attempt.
    pub busy: Duration,
    /// Time during which commands of a lost session may still be executed, if a target does not
    /// prove that they have completed. The default is the time after which Linux's SRP initiator
    /// returns the commands of a lost port for retries on other paths (`fast_io_fail_tmo`).
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
    /// Returns short timeouts for scripted sessions.
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

/// Returns the log message for a wait for writes of a lost session, after a login that was redirected
/// to this address, if any.
pub(crate) fn settle_message(settle: Duration, redirect: Option<SocketAddr>) -> String {
    let cause = redirect.map(|to| format!(": the login was redirected to {to}"));
    format!(
        "waiting {} s for writes of the lost session{}",
        settle.as_secs(),
        cause.unwrap_or_default()
    )
}

/// An event of a session, for its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionEvent {
    /// Logged in and ready for requests.
    Live,
    /// The connection broke for this reason, and a new one is being established.
    Reconnecting(Down),
    /// A logical unit reported an event.
    UnitEvent {
        /// Logical unit that reported it.
        lun: WireLun,
        /// The event, as sense data.
        sense: Box<[u8]>,
        /// The event reports a reset by our own task management.
        is_own_reset: bool,
    },
    /// Task management of the session has reset a unit or all units.
    UnitReset(Option<WireLun>),
    /// The target sent a message for a completed command. This is correct once for an aborted
    /// command, because its response may cross the abort.
    Stale,
    /// The session is closed for this reason. All requests have completed.
    Closed(Down),
}

/// Reason for rejecting a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The session has the maximum number of requests.
    #[error("too many outstanding requests in the session")]
    Full,
    /// The session is closed.
    #[error("session is closed")]
    Closed,
}

#[cfg(test)]
pub(crate) mod tests;
