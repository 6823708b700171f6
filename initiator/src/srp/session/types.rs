//! Configuration and outputs of a session, and the parts of its state.

use std::time::{Duration, Instant};

use riser_scsi::srp::{MultiChannelAction, SHORT_IU_LEN, TSK_MGMT_LEN};
use riser_state::State;

#[cfg(doc)]
use super::SrpSession;
use crate::request::{RequestId, RequestResult};
use crate::session::{SessionEvent, SessionOutput, Timing, WritePolicy};
use crate::srp::channel::{ChannelConfig, ChannelState, InitiatorChannel};

/// Configuration of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionConfig {
    /// Channels wanted; the target may grant fewer.
    pub channels: u8,
    /// Of each channel. The multi-channel action is the session's to choose.
    pub channel: ChannelConfig,
    /// Requests taken and not yet completed at most, queued ones included.
    pub max_requests: usize,
    /// Waits and intervals of the session.
    pub timing: Timing,
    /// Silence of a target after which it is pinged.
    pub ping: Duration,
    /// Attempts at one request at most.
    pub max_attempts: u8,
    /// A connection that broke is made again. Without, the session ends with its connection, and
    /// its requests with [`RequestError::Closed`](crate::request::RequestError::Closed), for its
    /// user to repeat or not.
    pub reconnect: bool,
}

/// A channel's place in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelIndex(pub u8);

/// A request to the session's owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Find the path to the target, take [`SrpSession::begin_login`]'s request and connect with it.
    Connect(ChannelIndex),
    /// Make the request's memory known to the target, write the command with
    /// [`SrpSession::emit_command`] and send it, before anything else is done; or answer at once
    /// [`SrpSession::handle_no_room`] or [`SrpSession::handle_start_failed`].
    Start {
        /// The request to start.
        request: RequestId,
        /// Channel to send it on.
        channel: ChannelIndex,
        /// Send the data within the command instead.
        immediate: bool,
    },
    /// Take the request's memory back from the target, then [`SrpSession::handle_retired`].
    Retire {
        /// The request whose attempt is over.
        request: RequestId,
        /// Channel on which it was sent.
        channel: ChannelIndex,
    },
    /// Send a task-management request.
    SendTskMgmt(ChannelIndex, [u8; TSK_MGMT_LEN]),
    /// Send an answer, and post the receive it answers only after that.
    Answer(ChannelIndex, [u8; SHORT_IU_LEN]),
    /// Submit a command that every unit answers and that changes nothing
    /// ([`Retry::Probe`](crate::request::Retry::Probe)): SRP has no message to ask whether the
    /// target is there.
    Ping,
    /// Tear the channel down, after sending the logout if there is one; then
    /// [`SrpSession::handle_channel_gone`].
    Disconnect(ChannelIndex, Option<[u8; SHORT_IU_LEN]>),
    /// The request is over, and only its issuer can reach its memory.
    Complete(RequestId, RequestResult),
    /// Something that the session's user may want to know.
    Event(SessionEvent),
}

impl SessionOutput for Output {
    fn complete(request: RequestId, result: RequestResult) -> Self {
        Self::Complete(request, result)
    }

    fn event(event: SessionEvent) -> Self {
        Self::Event(event)
    }
}

/// The state of a channel's connection, as its owner drives it.
///
/// ```text
/// Free → Connecting → Established
///  ↑ ↑________│            │
///  │          ↓            │
///  └──── Disconnecting ←───┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnState {
    /// There is no connection.
    Free,
    /// Being made, until the given time.
    Connecting(Instant),
    /// Made, with the login accepted.
    Established,
    /// Being closed by the owner.
    Disconnecting,
}

impl ConnState {
    /// Returns whether the connection is still to be closed.
    pub(super) fn is_open(self) -> bool {
        matches!(self, Self::Connecting(_) | Self::Established)
    }
}

impl State for ConnState {
    fn may_become(&self, next: &Self) -> bool {
        use ConnState::{Connecting, Disconnecting, Established, Free};
        match self {
            Free => matches!(next, Connecting(_)),
            Connecting(_) => matches!(next, Established | Disconnecting | Free),
            Established => matches!(next, Disconnecting),
            Disconnecting => matches!(next, Free),
        }
    }
}

#[derive(Debug)]
pub(super) struct Member {
    pub(super) channel: InitiatorChannel,
    pub(super) conn: ConnState,
    /// Its connection had no room for a command, and the memory of no other has come back since.
    pub(super) is_full: bool,
    /// How the data of short writes travel.
    pub(super) writes: WritePolicy,
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
            conn: ConnState::Free,
            is_full: false,
            writes: WritePolicy::new(0),
        }
    }
}
