//! The common part of every protocol's sessions: times, events, life cycle, and reasons to be down.

#![forbid(unsafe_code)]

mod core;
mod fault;
mod functions;
mod lifecycle;
mod machine;
mod task_manager;
mod writes;

use std::time::Duration;

use riser_scsi::lun::WireLun;

pub(crate) use self::core::{Core, CoreConfig, SessionOutput};
pub use self::fault::{ConnectError, Down, IscsiFault, SrpFault, SrpLoginError};
pub(crate) use self::functions::{FunctionEnd, TaskFunction};
pub(crate) use self::lifecycle::Lifecycle;
pub use self::lifecycle::SessionState;
pub use self::machine::Machine;
pub(crate) use self::task_manager::TaskManager;
pub(crate) use self::writes::WritePolicy;

/// Silence of a target after which it is asked whether it is there.
pub(crate) const PING: Duration = Duration::from_secs(5);

/// Waits of a session, and intervals between its attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Longest wait for a command's answer before the command is aborted, and then for its memory
    /// before the connection is left. On TCP it begins again as long as data of the command move.
    pub attempt: Duration,
    /// Longest wait for the answer to a task-management function.
    pub tsk_mgmt: Duration,
    /// Longest first attempt to connect and log in.
    pub login: Duration,
    /// Longest attempt of all: after one that was not answered in time, the next waits twice as
    /// long, since a target that has much to clean up first would never be heard otherwise.
    pub login_max: Duration,
    /// Wait before the first try to reconnect; doubles with every failure.
    pub backoff_min: Duration,
    /// Longest wait between tries to reconnect.
    pub backoff_max: Duration,
    /// Wait before a command is repeated that the target was too busy for; doubles with every
    /// attempt.
    pub busy: Duration,
    /// Time in which commands of a lost session may still be carried out, at a target that does not
    /// show when they are over. The default is the time after which Linux's SRP initiator gives a
    /// lost port's commands back for others to repeat (`fast_io_fail_tmo`).
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

/// An event of a session, for its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionEvent {
    /// Logged in; requests flow.
    Live,
    /// The connection broke for this reason; a new one is being made.
    Reconnecting(Down),
    /// A logical unit reported an event.
    UnitEvent {
        /// Logical unit that reports it.
        lun: WireLun,
        /// The event, as sense data.
        sense: Box<[u8]>,
        /// It is the report of a reset by our own task management.
        is_own_reset: bool,
    },
    /// Task management of the session has reset a unit, or every unit.
    UnitReset(Option<WireLun>),
    /// The target has sent something about a command that had ended. Once for a command that was
    /// aborted is no mistake: its answer may cross the abort.
    Stale,
    /// The session is over, for this reason. Every request has been completed.
    Closed(Down),
}

/// Reason for a request not to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// There are as many as the session takes.
    #[error("session has as many requests as it takes")]
    Full,
    /// The session is over.
    #[error("session is closed")]
    Closed,
}
