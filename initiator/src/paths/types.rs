//! Configuration, outputs and reports of paths.

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
    /// Requests taken and not yet completed at most.
    pub max_requests: usize,
    /// Times: of logins and of the waits between them.
    pub timing: Timing,
    /// Interval at which a unit that offers asymmetric access is asked about it.
    pub recheck: Duration,
}

/// A path's place among all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathIndex(pub u8);

/// Target port of a session. Two sessions of one initiator port with the same are never there at
/// once: the later takes the place of the earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortTag {
    /// A portal group of the target, for iSCSI.
    Group(u16),
    /// A target port, for SRP.
    Port(TargetPortId),
}

/// Report of a unit on a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Identity of the unit.
    pub unit: Snapshot,
    /// Access to it there; `None` where the unit makes no difference among paths.
    pub access: Option<Access>,
}

/// State of a path, for users.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PathState {
    /// It has not been usable yet.
    Connecting,
    /// In use for requests.
    Live,
    /// It works, but the unit wants to be used by another.
    Standby,
    /// It cannot be used; it is tried again and again.
    Lost,
    /// It leads to another logical unit.
    OtherUnit,
}

/// State of a path, and its history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathView {
    /// State of the path.
    pub state: PathState,
    /// Losses after it had been live.
    pub losses: u64,
    /// Reason for not being live, now or the last time.
    pub why: Option<Down>,
}

/// A request to the owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Make a session of the path's own initiator port, at the portal of the path `through`, in the
    /// given time; then [`Paths::handle_live`] or [`Paths::handle_closed`].
    Open {
        /// Path whose initiator port logs in.
        path: PathIndex,
        /// Path whose portal is logged in to.
        through: PathIndex,
        /// Longest duration of the login.
        patience: Duration,
    },
    /// Identify the unit and its access state on the path, then [`Paths::handle_checked`].
    Check(PathIndex),
    /// Close the path's session; [`Paths::handle_closed`] reports the end.
    Close(PathIndex),
    /// Hand the request to the path's session, then [`Paths::handle_ended`].
    Start {
        /// The request to submit.
        request: RequestId,
        /// Path by which it goes.
        path: PathIndex,
    },
    /// The request is over.
    Complete(RequestId, RequestResult),
    /// Another [`Paths::views`] than before.
    Changed,
    /// Something that the user of the paths may want to know.
    Event(SessionEvent),
}

/// A path's state; see the diagram of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// No session, until the given time.
    Idle { until: Instant },
    /// A session is being made through the portal of that path.
    Opening { through: usize },
    /// Logged in; the unit is being identified.
    Checking,
    /// The unit is the right one.
    Live,
    /// The session is over or being closed; its end is awaited.
    Closing,
    /// Closed with all the others.
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

/// Login that shows that the commands of a lost session are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    /// One at that target port, which the session was with.
    At(Option<PortTag>),
    /// One by the own portal: which target port the session was with is not known.
    Own,
    /// None: sessions with several target ports were lost.
    None,
}

#[derive(Debug)]
pub(super) struct Path {
    pub(super) stage: Stage,
    /// Target port of the last session through the own portal.
    pub(super) port: Option<PortTag>,
    pub(super) access: Access,
    /// Requests handed to the session.
    pub(super) outstanding: u32,
    /// Commands of a lost session may still be carried out.
    pub(super) unfenced: bool,
    /// Login that shows that they are over, while [`Self::unfenced`].
    pub(super) proof: Proof,
    /// Time at which they are taken to be over without a proof; `None` where one is waited for.
    pub(super) settled_at: Option<Instant>,
    /// Its session was in use, and its end is awaited.
    pub(super) is_ending: bool,
    /// The target ends a session's commands before it answers the login that takes its place.
    pub(super) is_trusted: bool,
    /// Effects of those of them that are no requests any more, on a unit or on all of them. Bound:
    /// the requests that were outstanding when the path was lost, and one of a dead process.
    pub(super) ghosts: Vec<(Option<WireLun>, Effect)>,
    pub(super) backoff: Duration,
    /// Wait that the target of the last session demands before the next login.
    pub(super) time2wait: Duration,
    /// No login before that time.
    pub(super) login_at: Option<Instant>,
    /// Longest duration of the next login.
    pub(super) patience: Duration,
    /// The next attempt goes to the own portal, even if there is something to fence.
    pub(super) own_next: bool,
    /// It has been live, or an attempt has failed.
    pub(super) is_decided: bool,
    /// Time at which the unit is asked about its access again.
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

    /// Returns whether a login at that target port, by the own portal or another one, shows that
    /// nothing of the lost session can be carried out any more. A session of SRP may belong to
    /// one port of the target's device, so that only its own portal leads to it.
    pub(super) fn is_proved(&self, port: Option<PortTag>, is_own: bool) -> bool {
        let is_kept = match port {
            Some(PortTag::Group(_)) => true,
            Some(PortTag::Port(_)) | None => is_own && self.is_trusted,
        };
        is_kept
            && match self.proof {
                Proof::At(lost) => lost == port,
                // The group of the dead process's session may have been another one.
                Proof::Own => is_own && self.is_trusted,
                Proof::None => false,
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
    /// With no path, in the queue.
    Waiting,
    /// With the session of that path.
    On(PathIndex),
}

/// A request for the unit, whichever path it takes.
#[derive(Debug)]
pub(super) struct PathRequest {
    pub(super) spec: RequestSpec,
    pub(super) seq: u64,
    pub(super) assignment: Assignment,
    /// It was lost with that path, which must be fenced before it may start again.
    pub(super) behind: Option<PathIndex>,
}
