//! Configuration and outputs of a session, and parts of its state.

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
    /// Requested number of channels; the target may grant fewer.
    pub channels: u8,
    /// Configuration of each channel. The multi-channel action is set by the session.
    pub channel: ChannelConfig,
    /// Maximum number of accepted, incomplete requests, including queued ones.
    pub max_requests: usize,
    /// Timeouts and intervals of the session.
    pub timing: Timing,
    /// Time without a message from the target after which it is pinged.
    pub ping: Duration,
    /// Maximum number of attempts per request.
    pub max_attempts: u8,
    /// Reconnect a broken connection. Otherwise, the session closes with its connection, and its
    /// requests fail with [`RequestError::Closed`](crate::request::RequestError::Closed), so its
    /// user must decide about retrying them.
    pub reconnect: bool,
}

/// Index of a channel in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelIndex(pub u8);

/// An instruction for the session's owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Resolve the path to the target, call [`SrpSession::begin_login`] and connect with this
    /// login.
    Connect(ChannelIndex),
    /// Advertise the request's memory to the target, encode the command with
    /// [`SrpSession::emit_command`], and send it before doing anything else. Alternatively, call
    /// [`SrpSession::handle_no_room`] or [`SrpSession::handle_start_failed`] immediately.
    Start {
        /// The request to start.
        request: RequestId,
        /// Channel to send it on.
        channel: ChannelIndex,
        /// Send the data within the command.
        immediate: bool,
    },
    /// Revoke the target's access to the request's memory, then call
    /// [`SrpSession::handle_retired`].
    Retire {
        /// Request whose attempt has finished.
        request: RequestId,
        /// Channel of the attempt.
        channel: ChannelIndex,
    },
    /// Send a task-management request.
    SendTskMgmt(ChannelIndex, [u8; TSK_MGMT_LEN]),
    /// Send a response, and only then repost the receive.
    Reply(ChannelIndex, [u8; SHORT_IU_LEN]),
    /// Submit a command that all units support and that has no effect
    /// ([`Retry::Probe`](crate::request::Retry::Probe)): SRP has no message for checking that the
    /// target is alive.
    Ping,
    /// Close the channel, after sending the logout if there is one; then call
    /// [`SrpSession::handle_channel_closed`].
    Disconnect(ChannelIndex, Option<[u8; SHORT_IU_LEN]>),
    /// The request is complete, and only its issuer can access its memory.
    Complete(RequestId, RequestResult),
    /// An event for the session's user.
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

/// State of a channel's connection, as driven by its owner.
///
/// ```text
/// Free → Connecting → Established
///  ↑ ↑________│            │
///  │          ↓            │
///  └──── Disconnecting ←───┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnState {
    /// No connection.
    Free,
    /// Connecting, with this timeout.
    Connecting(Instant),
    /// Established, with an accepted login.
    Established,
    /// Being closed by the owner.
    Disconnecting,
}

impl ConnState {
    /// Returns whether the connection must still be closed.
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
    /// The connection had no room for a command, and no memory of another command was retired
    /// since.
    pub(super) is_full: bool,
    /// Policy for the data of short writes.
    pub(super) writes: WritePolicy,
}

impl Member {
    /// Creates channel `index` of a session, not connected.
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
