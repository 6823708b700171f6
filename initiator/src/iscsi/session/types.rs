//! Configuration and outputs of a session, and parts of its state.

use std::time::{Duration, Instant};

use riser_scsi::iscsi::chap::{Algorithm, Credentials};
use riser_scsi::iscsi::frame::Digests;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::ConnectionParams;
use riser_scsi::iscsi::name::{DiscoveredTarget, IscsiName, TargetAddress};
use riser_scsi::iscsi::pdu::Opcode;
use riser_scsi::iscsi::{BHS_LEN, Isid, Itt, Ttt};
use riser_scsi::lun::WireLun;
use riser_state::State;

#[cfg(doc)]
use super::IscsiSession;
use super::PING_TAG;
use crate::request::{RequestId, RequestResult};
use crate::session::{SessionEvent, SessionOutput, Timing};

/// Configuration of a session.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Name of the initiator.
    pub name: IscsiName,
    /// Target to log in to; `None` for a discovery session.
    pub target: Option<IscsiName>,
    /// Target whose portals a discovery session requests, instead of all targets.
    pub sought: Option<IscsiName>,
    /// Identifies the initiator port together with the name. A login replaces an existing session
    /// with the same port.
    pub isid: Isid,
    /// Credentials for authenticating the initiator.
    pub credentials: Option<Credentials>,
    /// Credentials for authenticating the target; only valid together with `credentials`.
    pub target_credentials: Option<Credentials>,
    /// Accepted digests for CHAP, in order of preference.
    pub algorithms: Vec<Algorithm>,
    /// Values that the initiator offers.
    pub offer: Offer,
    /// Keys that the initiator offers in addition to MaxRecvDataSegmentLength.
    pub keys: Vec<Key>,
    /// Required digests.
    pub digests: Digests,
    /// Maximum number of outstanding commands.
    pub queue_size: u16,
    /// Maximum number of accepted, incomplete requests, including queued ones.
    pub max_requests: usize,
    /// Maximum number of attempts per request.
    pub max_attempts: u8,
    /// Reconnect a broken connection. Otherwise, the session closes with its connection, and its
    /// requests fail with [`RequestError::Closed`](crate::request::RequestError::Closed), so its
    /// user must decide about retrying them.
    pub reconnect: bool,
    /// Timeouts and intervals of the session.
    pub timing: Timing,
    /// Interval without a received PDU after which the target is pinged; also the timeout for the
    /// response.
    pub ping: Duration,
}

/// A PDU without a command's data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlPdu {
    /// Basic header segment; its lengths are set by the sender.
    pub bhs: [u8; BHS_LEN],
    /// Data segment, without padding.
    pub data: Vec<u8>,
}

impl ControlPdu {
    /// Returns the kind of the PDU according to its opcode and tag.
    #[must_use]
    pub fn kind(&self) -> ControlKind {
        match Opcode::of(&self.bhs) {
            Ok(Opcode::NopOut) if self.bhs[16..20] == PING_TAG.0.to_be_bytes() => ControlKind::Ping,
            Ok(Opcode::TmfRequest) => ControlKind::Function,
            _ => ControlKind::Other,
        }
    }
}

/// Kind of a [`ControlPdu`]. There is at most one ping and one function at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlKind {
    /// The NOP-Out for a silent target.
    Ping,
    /// A task-management function.
    Function,
    /// Any other PDU, whose response has no separate timeout.
    Other,
}

/// A command to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandPdu {
    /// Basic header segment; its lengths are set by the sender.
    pub bhs: [u8; BHS_LEN],
    /// Additional header segments, padded to words.
    pub ahs: Vec<u8>,
    /// Length of the immediate data.
    pub immediate: u32,
    /// Unsolicited data after the command.
    pub unsolicited: Option<DataOrder>,
}

/// A sequence of Data-Out PDUs to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataOrder {
    /// Request that owns the data.
    pub request: RequestId,
    /// Initiator Task Tag of the command.
    pub itt: Itt,
    /// Tag of the R2T that solicited the data, or none.
    pub ttt: Ttt,
    /// Logical unit of the command.
    pub lun: WireLun,
    /// Offset of the data.
    pub offset: u32,
    /// Length of the sequence in bytes.
    pub len: u32,
}

/// Destination for the data of a Data-In.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The memory of this request, at this offset.
    Into(RequestId, u32),
    /// None: the command was aborted.
    Discard,
}

/// An instruction for the session's owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Connect to the target's address, or to the address it moved to: call
    /// [`IscsiSession::set_peer`], then [`IscsiSession::handle_connected`].
    Connect(Option<TargetAddress>),
    /// Send a PDU without a command's data.
    Send(ControlPdu),
    /// The login is complete. These parameters apply to all further PDUs.
    FullFeature(ConnectionParams),
    /// Prepare the request's memory, and send the command encoded by
    /// [`IscsiSession::emit_command`].
    Start(RequestId),
    /// Send data after all queued PDUs, then call [`IscsiSession::handle_data_sent`].
    SendData(DataOrder),
    /// Ensure that neither the target nor the connection accesses the request's memory, then call
    /// [`IscsiSession::handle_retired`].
    Retire(RequestId),
    /// Close the connection, then call [`IscsiSession::handle_disconnected`].
    Disconnect,
    /// The request is complete, and only its issuer can access its memory.
    Complete(RequestId, RequestResult),
    /// The discovery found these targets.
    Found(Vec<DiscoveredTarget>),
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

/// State of the connection, named as in RFC 7143 clause 8.1.3.
///
/// ```text
/// Free → XptWait → InLogin → LoggedIn → InLogout
///  ↑ ↑______│ │        │         │          │
///  │          ↓        ↓         ↓          │
///  └───── CleanupWait ←┴─────────┴──────────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnState {
    /// S1: no connection.
    Free,
    /// S2: connecting, with this timeout.
    XptWait(Instant),
    /// S4: logging in, with this timeout.
    InLogin(Instant),
    /// S5: in full-feature phase.
    LoggedIn,
    /// S6: waiting for the response to a logout, with this timeout.
    InLogout(Instant),
    /// S8: being closed by the owner.
    CleanupWait,
}

impl ConnState {
    /// Returns whether received PDUs are handled.
    pub(super) fn is_open(self) -> bool {
        matches!(self, Self::InLogin(_) | Self::LoggedIn | Self::InLogout(_))
    }
}

impl State for ConnState {
    fn may_become(&self, next: &Self) -> bool {
        use ConnState::{CleanupWait, Free, InLogin, InLogout, LoggedIn, XptWait};
        match self {
            Free => matches!(next, XptWait(_)),
            XptWait(_) => matches!(next, InLogin(_) | CleanupWait | Free),
            InLogin(_) => matches!(next, LoggedIn | CleanupWait),
            LoggedIn => matches!(next, InLogout(_) | CleanupWait),
            InLogout(_) => matches!(next, CleanupWait),
            CleanupWait => matches!(next, Free),
        }
    }
}
