//! What a session is made with, what it asks for, and what it tells.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use riser_scsi::srp::{MultiChannelAction, SHORT_IU_LEN, TLogoutReason, TSK_MGMT_LEN, WireLun};

#[cfg(doc)]
use super::Session;
use crate::srp::channel::{
    ChannelConfig, ChannelFault, ChannelState, InitiatorChannel, LoginError,
};
use crate::srp::request::{RequestId, RequestResult};

/// What a session is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionConfig {
    /// Channels wanted; the target may grant fewer.
    pub channels: u8,
    /// Of each channel. The multi-channel action is the session's to choose.
    pub channel: ChannelConfig,
    /// Requests taken and not yet completed at most, queued ones included.
    pub max_requests: usize,
    /// Times.
    pub timing: Timing,
    /// Attempts at one request at most.
    pub max_attempts: u8,
}

/// A session's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How long a command may go unanswered before it is aborted.
    pub attempt: Duration,
    /// How long task management may go unanswered.
    pub tsk_mgmt: Duration,
    /// How long connecting and logging in may take.
    pub login: Duration,
    /// Wait before the first try to reconnect; doubles with every failure.
    pub backoff_min: Duration,
    /// Longest wait between tries to reconnect.
    pub backoff_max: Duration,
    /// Wait before a command is repeated that the target was too busy for; doubles with every
    /// attempt.
    pub busy: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            attempt: Duration::from_secs(30),
            tsk_mgmt: Duration::from_secs(5),
            login: Duration::from_secs(10),
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            busy: Duration::from_millis(5),
        }
    }
}

/// A channel's place in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelIndex(pub u8);

/// What the owner is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Find the path to the target, take [`Session::begin_login`]'s request and connect with it.
    Connect(ChannelIndex),
    /// Make the request's memory known to the target, write the command with
    /// [`Session::emit_command`] and send it.
    Start {
        /// The request.
        request: RequestId,
        /// Where to send it.
        channel: ChannelIndex,
        /// Send the data within the command instead.
        immediate: bool,
    },
    /// Take the request's memory back from the target, then [`Session::handle_retired`].
    Retire {
        /// The request.
        request: RequestId,
        /// Where it was sent.
        channel: ChannelIndex,
    },
    /// Send a task-management request.
    SendTskMgmt(ChannelIndex, [u8; TSK_MGMT_LEN]),
    /// Send an answer, and post the receive it answers only after that.
    Answer(ChannelIndex, [u8; SHORT_IU_LEN]),
    /// Tear the channel down, after sending the logout if there is one; then
    /// [`Session::handle_channel_gone`].
    Disconnect(ChannelIndex, Option<[u8; SHORT_IU_LEN]>),
    /// The request is over, and nobody but its issuer can reach its memory.
    Complete(RequestId, RequestResult),
    /// Something that the session's user may want to know.
    Event(SessionEvent),
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
    /// The target violated the protocol.
    #[error(transparent)]
    Fault(#[from] ChannelFault),
    /// The target logged us out.
    #[error("target logged out ({0:?})")]
    Logout(TLogoutReason),
    /// The connection was closed by the peer, or broke.
    #[error("connection lost")]
    ConnectionLost,
    /// Commands were not answered and could not be aborted.
    #[error("target does not answer")]
    Unresponsive,
    /// It was closed from this side.
    #[error("closed")]
    Closed,
}

/// Why a connection could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The target's address cannot be reached from this device.
    #[error("address cannot be reached: {0}")]
    Address(riser_transport::verbs::CmError),
    /// The target did not answer.
    #[error("target does not answer")]
    Unreachable,
    /// Login refused.
    #[error(transparent)]
    Login(LoginError),
    /// It took too long.
    #[error("connecting timed out")]
    TimedOut,
    /// A local resource could not be had.
    #[error("local resources: {0}")]
    Local(riser_transport::verbs::VerbsError),
    /// A CM call failed.
    #[error("connection manager: {0}")]
    Cm(riser_transport::verbs::CmError),
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

/// A channel's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// None.
    Down,
    /// Being made, until the given time.
    Connecting(Instant),
    /// Made.
    Up,
    /// Being closed by the owner.
    Closing,
}

/// What a task-management request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TskMgmtKind {
    /// The request of that place and sequence number.
    Abort(u32, u64),
    /// Every request of the logical unit.
    LunReset(WireLun),
}

#[derive(Debug)]
pub(super) struct Member {
    pub(super) channel: InitiatorChannel,
    pub(super) link: Link,
    pub(super) tmf: Option<(TskMgmtKind, Instant)>,
    /// Requests that wait for their ABORT TASK. Bound: the channel's queue size.
    pub(super) aborts: VecDeque<(u32, u64)>,
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

impl Member {
    /// Channel `index` of a session, not connected.
    pub(super) fn new(config: &SessionConfig, index: u8) -> Self {
        let multi_channel = if index == 0 {
            MultiChannelAction::Single
        } else {
            MultiChannelAction::Multi
        };
        let channel = InitiatorChannel::new(ChannelConfig {
            multi_channel,
            ..config.channel
        });
        debug_assert_eq!(channel.state(), ChannelState::Connecting);
        Self {
            channel,
            link: Link::Down,
            tmf: None,
            aborts: VecDeque::new(),
        }
    }
}
