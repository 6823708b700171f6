//! Configuration, outputs and reports of paths.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use riser_scsi::lun::WireLun;
use riser_scsi::srp::TargetPortId;
use riser_state::State;
use serde::{Deserialize, Serialize};

use super::Access;
#[cfg(doc)]
use super::Paths;
use crate::request::{Effect, RequestId, RequestResult, RequestSpec};
use crate::session::{Down, SessionEvent, Timing};
use crate::unit::Snapshot;

/// Configuration of the paths to a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathsConfig {
    /// Number of paths to the unit.
    pub paths: u8,
    /// Maximum number of accepted, incomplete requests.
    pub max_requests: usize,
    /// Timeouts of logins, and waits between them.
    pub timing: Timing,
    /// Interval for checking the access states of a unit with asymmetric access.
    pub recheck: Duration,
}

/// Index of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathIndex(pub u8);

/// Target port of a session. There is at most one session per initiator port and target port: a new
/// one replaces the old one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortTag {
    /// A portal group of the target, for iSCSI, and the address if the login was redirected to it:
    /// several hosts may report the same group.
    Group(u16, Option<SocketAddr>),
    /// A target port, for SRP, and its address if the login was redirected to it: several ports may
    /// report the same identifier.
    Port(TargetPortId, Option<SocketAddr>),
}

impl PortTag {
    /// Returns whether the login was redirected to another address.
    #[must_use]
    pub fn is_redirected(&self) -> bool {
        self.redirect().is_some()
    }

    /// Returns the address to which the login was redirected, if any.
    pub(super) fn redirect(&self) -> Option<SocketAddr> {
        match self {
            Self::Group(_, redirect) | Self::Port(_, redirect) => *redirect,
        }
    }
}

/// Report for a unit on a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitReport {
    /// Identity of the unit.
    pub unit: Snapshot,
    /// Access on this path; `None` if the unit treats all paths equally.
    pub access: Option<Access>,
}

/// State of a path, for users.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PathState {
    /// Not usable yet.
    Connecting,
    /// In use for requests.
    Live,
    /// Usable, but the unit prefers another path.
    Standby,
    /// Not usable; connecting is retried.
    Lost,
    /// Leads to a different logical unit.
    OtherUnit,
}

/// State of a path, and its history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathView {
    /// State of the path.
    pub state: PathState,
    /// Number of losses while live.
    pub losses: u64,
    /// Reason for not being live, now or most recently.
    pub why: Option<Down>,
}

/// An instruction for the owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Open a session of the path's own initiator port, at the portal of the path `through`, with
    /// this timeout; then call [`Paths::handle_live`] or [`Paths::handle_closed`].
    Open {
        /// Path with the initiator port to use.
        path: PathIndex,
        /// Path with the portal to log in to.
        through: PathIndex,
        /// Timeout of the login.
        patience: Duration,
    },
    /// Identify the unit and its access state on the path, then call [`Paths::handle_checked`].
    Check(PathIndex),
    /// Close the path's session, then call [`Paths::handle_closed`].
    Close(PathIndex),
    /// Submit the request on the path's session, then call [`Paths::handle_completed`].
    Start {
        /// The request to submit.
        request: RequestId,
        /// Path for the request.
        path: PathIndex,
    },
    /// Requests wait for the commands of the path's lost session to complete: log this.
    Settling {
        /// Path of the lost session.
        path: PathIndex,
        /// Time for their completion.
        settle: Duration,
        /// Address to which the login that has started this time was redirected, if any.
        redirect: Option<SocketAddr>,
    },
    /// The request is complete.
    Complete(RequestId, RequestResult),
    /// [`Paths::views`] has changed.
    Changed,
    /// An event for the user of the paths.
    Event(SessionEvent),
}

/// State of a path; see the diagram in the documentation of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// No session until this time.
    Idle { until: Instant },
    /// Opening a session through the portal of this path.
    Opening { through: usize },
    /// Logged in; the unit is being identified.
    Checking,
    /// The unit is the expected one.
    Live,
    /// The session has failed or is being closed; waiting until it has closed.
    Closing,
    /// Closed together with all other paths.
    Over,
}

impl State for Stage {
    fn may_become(&self, next: &Self) -> bool {
        use Stage::{Checking, Closing, Idle, Live, Opening, Over};
        match self {
            Idle { .. } => matches!(next, Opening { .. } | Over),
            Opening { .. } => matches!(next, Checking | Closing),
            Checking => matches!(next, Live | Closing),
            Live => matches!(next, Closing),
            Closing => matches!(next, Idle { .. } | Opening { .. } | Over),
            Over => false,
        }
    }
}

/// Login that proves that the commands of a lost session have completed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    /// A login to this target port, the port of the lost session.
    At(Option<PortTag>),
    /// A login through the path's own portal, because the target port of the lost session is
    /// unknown.
    Own,
    /// None: sessions with several target ports were lost. A login shows that the target responds
    /// again, and starts the settle time.
    Several,
    /// None: a session of a killed process was lost, at a port to which its login was redirected or
    /// together with a later session.
    None,
}

#[derive(Debug)]
pub(super) struct Path {
    pub(super) stage: Stage,
    /// Target port of the last session through the path's own portal.
    pub(super) port: Option<PortTag>,
    pub(super) access: Access,
    /// Number of requests passed to the session.
    pub(super) outstanding: u32,
    /// Commands of a lost session may still be executed.
    pub(super) unfenced: bool,
    /// Login that proves that they have completed, while [`Self::unfenced`].
    pub(super) proof: Proof,
    /// Time at which they are assumed to have completed without a proof; `None` if a proof is
    /// required.
    pub(super) settled_at: Option<Instant>,
    /// Its session was in use and is being closed.
    pub(super) is_ending: bool,
    /// The target terminates a session's commands before it responds to the login that replaces the
    /// session.
    pub(super) is_trusted: bool,
    /// Effects of abandoned requests, on one unit or on all units. Bound: the number of outstanding
    /// requests when the path was lost, and one for a killed process.
    pub(super) ghosts: Vec<(Option<WireLun>, Effect)>,
    pub(super) backoff: Duration,
    /// Wait before the next login, as requested by the target of the last session.
    pub(super) time2wait: Duration,
    /// Earliest time of the next login.
    pub(super) login_at: Option<Instant>,
    /// Timeout of the next login.
    pub(super) patience: Duration,
    /// The next attempt uses the path's own portal, even if a fence is required.
    pub(super) own_next: bool,
    /// The path was live, or an attempt has failed.
    pub(super) is_decided: bool,
    /// Time for checking the unit's access state.
    pub(super) recheck: Option<Instant>,
    pub(super) is_foreign: bool,
    pub(super) was_live: bool,
    pub(super) losses: u64,
    pub(super) why: Option<Down>,
}

impl Path {
    pub(super) fn new(config: &PathsConfig) -> Self {
        Self {
            stage: Stage::Closing,
            port: None,
            access: Access::Optimized,
            outstanding: 0,
            unfenced: false,
            proof: Proof::None,
            settled_at: None,
            is_ending: false,
            is_trusted: false,
            ghosts: Vec::new(),
            backoff: config.timing.backoff_min,
            time2wait: Duration::ZERO,
            login_at: None,
            patience: config.timing.login,
            own_next: false,
            is_decided: false,
            recheck: None,
            is_foreign: false,
            was_live: false,
            losses: 0,
            why: None,
        }
    }

    /// Returns whether a login to this target port, through the path's own portal or another one,
    /// proves that no request of the lost session can be executed anymore. An SRP session may
    /// belong to a single port of the target's device, which is only reachable through its own
    /// portal.
    pub(super) fn is_proved(&self, port: Option<&PortTag>, is_own: bool) -> bool {
        let is_kept = match port {
            Some(PortTag::Group(..)) => true,
            Some(PortTag::Port(..)) | None => is_own && self.is_trusted,
        };
        is_kept
            && match &self.proof {
                Proof::At(lost) => lost.as_ref() == port,
                // The killed process's session may have used another group, or the portal itself
                // before it redirected logins.
                Proof::Own => {
                    is_own && self.is_trusted && !port.is_some_and(PortTag::is_redirected)
                }
                Proof::Several | Proof::None => false,
            }
    }

    /// Returns whether this target port is in the portal group of the lost session, or of the last
    /// of several, possibly at another address, where the host may not know about that session.
    pub(super) fn is_in_group(&self, port: Option<&PortTag>) -> bool {
        let lost = match &self.proof {
            Proof::At(lost) => lost.as_ref(),
            Proof::Several => self.port.as_ref(),
            Proof::Own | Proof::None => None,
        };
        match (lost, port) {
            (Some(PortTag::Group(lost, _)), Some(PortTag::Group(group, _))) => lost == group,
            _ => false,
        }
    }

    pub(super) fn is_usable(&self) -> bool {
        self.stage == Stage::Live && self.access != Access::None
    }

    pub(super) fn view(&self) -> PathView {
        let state = match self.stage {
            Stage::Live if self.access == Access::None => PathState::Standby,
            Stage::Live => PathState::Live,
            _ if self.is_foreign => PathState::OtherUnit,
            _ if self.was_live || self.is_decided => PathState::Lost,
            _ => PathState::Connecting,
        };
        PathView {
            state,
            losses: self.losses,
            why: self.why,
        }
    }
}

/// Assignment of a request to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Assignment {
    /// In the queue, without a path.
    Waiting,
    /// Submitted on the session of this path.
    On(PathIndex),
}

/// A request for the unit, on any path.
#[derive(Debug)]
pub(super) struct PathRequest {
    pub(super) spec: RequestSpec,
    pub(super) seq: u64,
    pub(super) assignment: Assignment,
    /// Path that lost the request, and must be fenced before a retry.
    pub(super) behind: Option<PathIndex>,
}
