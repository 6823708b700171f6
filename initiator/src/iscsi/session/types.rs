//! Configuration and outputs of a session, and the parts of its state.

use std::time::{Duration, Instant};

use riser_scsi::iscsi::chap::{Algorithm, Credentials};
use riser_scsi::iscsi::frame::Digests;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::ConnectionParams;
use riser_scsi::iscsi::name::{Found, IscsiName, TargetAddress};
use riser_scsi::iscsi::pdu::Opcode;
use riser_scsi::iscsi::{BHS_LEN, CmdSn, Isid, Itt, Ttt};
use riser_scsi::lun::WireLun;
use riser_state::State;

#[cfg(doc)]
use super::IscsiSession;
use super::PING_TAG;
use crate::request::{DataLen, RequestId, RequestResult};
use crate::session::{SessionEvent, SessionOutput, Timing};

/// Configuration of a session.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Name of the initiator that logs in.
    pub name: IscsiName,
    /// Target to log in to; none for a discovery session.
    pub target: Option<IscsiName>,
    /// Target whose portals a discovery session requests, instead of all targets.
    pub sought: Option<IscsiName>,
    /// With the name it makes the initiator port. A session with the same port is replaced.
    pub isid: Isid,
    /// Credentials by which the initiator proves itself.
    pub credentials: Option<Credentials>,
    /// Credentials that the target has to prove; only together with `credentials`.
    pub target_credentials: Option<Credentials>,
    /// Digests that it takes for CHAP, the best first.
    pub algorithms: Vec<Algorithm>,
    /// Values that the initiator agrees on.
    pub offer: Offer,
    /// Keys that it offers, besides MaxRecvDataSegmentLength.
    pub keys: Vec<Key>,
    /// Digests without which there is no session.
    pub digests: Digests,
    /// Commands outstanding at most.
    pub queue_size: u16,
    /// Requests taken and not yet completed at most, queued ones included.
    pub max_requests: usize,
    /// Attempts at one request at most.
    pub max_attempts: u8,
    /// A connection that broke is made again. Without, the session ends with its connection, and
    /// its requests with [`RequestError::Closed`](crate::request::RequestError::Closed), for its
    /// user to repeat or not.
    pub reconnect: bool,
    /// Waits and intervals of the session.
    pub timing: Timing,
    /// After this span without a PDU the target is asked whether it is there, and it has as long
    /// again to answer.
    pub ping: Duration,
}

/// A PDU without a command's data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlPdu {
    /// Basic header segment; its lengths are set by who sends it.
    pub bhs: [u8; BHS_LEN],
    /// Data segment, without padding.
    pub data: Vec<u8>,
}

impl ControlPdu {
    /// The kind of the PDU, by its opcode and tag.
    #[must_use]
    pub fn kind(&self) -> ControlKind {
        match Opcode::of(&self.bhs) {
            Ok(Opcode::NopOut) if self.bhs[16..20] == PING_TAG.0.to_be_bytes() => ControlKind::Ping,
            Ok(Opcode::TmfRequest) => ControlKind::Function,
            _ => ControlKind::Other,
        }
    }
}

/// Kind of a [`ControlPdu`]. There is one ping and one function at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlKind {
    /// The NOP-Out that a silent target is to answer.
    Ping,
    /// A task-management function.
    Function,
    /// Any other, whose answer has no time of its own.
    Other,
}

/// A ping that is unanswered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ping {
    /// The target is left then.
    pub(super) until: Instant,
    /// The latest time for that.
    pub(super) limit: Instant,
}

/// A command to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandPdu {
    /// Basic header segment; its lengths are set by who sends it.
    pub bhs: [u8; BHS_LEN],
    /// Additional header segments, in whole words.
    pub ahs: Vec<u8>,
    /// Bytes of the data that go with the command.
    pub immediate: u32,
    /// The unsolicited data that follow it.
    pub unsolicited: Option<DataOrder>,
}

/// A sequence of Data-Out PDUs to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataOrder {
    /// Request whose data are sent.
    pub request: RequestId,
    /// Initiator Task Tag of the command.
    pub itt: Itt,
    /// The R2T that is answered, or none.
    pub ttt: Ttt,
    /// Logical unit of the command.
    pub lun: WireLun,
    /// First byte of the data.
    pub offset: u32,
    /// Length of the sequence, in bytes.
    pub len: u32,
}

/// Destination of data that have been announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Into the memory of that request, at that offset.
    Into(RequestId, u32),
    /// Nowhere: the command was given up.
    Discard,
}

/// A request to the session's owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Connect to the target's address, or to the one it has moved to; then
    /// [`IscsiSession::handle_connected`].
    Connect(Option<TargetAddress>),
    /// Send a PDU that carries no command's data.
    Send(ControlPdu),
    /// The login is over: what is sent and received from now on goes by this.
    FullFeature(ConnectionParams),
    /// Make the request's memory ready, and send the command that
    /// [`IscsiSession::emit_command`] writes.
    Start(RequestId),
    /// Send data, after what was to be sent before; then [`IscsiSession::handle_data_sent`].
    SendData(DataOrder),
    /// See that neither target nor connection touches the request's memory any more, then
    /// [`IscsiSession::handle_retired`].
    Retire(RequestId),
    /// Close the connection, then [`IscsiSession::handle_gone`].
    Disconnect,
    /// The request is over, and only its issuer can reach its memory.
    Complete(RequestId, RequestResult),
    /// The discovery is over: these targets there are.
    Found(Vec<Found>),
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

/// The connection's state, by the names of RFC 7143 clause 8.1.3.
///
/// ```text
/// Free → XptWait → InLogin → LoggedIn → InLogout
///  ↑ ↑______│ │        │         │          │
///  │          ↓        ↓         ↓          │
///  └───── CleanupWait ←┴─────────┴──────────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnState {
    /// S1: there is none.
    Free,
    /// S2: the transport's connection is being made, until the given time.
    XptWait(Instant),
    /// S4: logging in, until the given time.
    InLogin(Instant),
    /// S5: in full-feature phase.
    LoggedIn,
    /// S6: the answer to a logout is awaited, until the given time.
    InLogout(Instant),
    /// S8: being closed by the owner.
    CleanupWait,
}

impl ConnState {
    /// Returns whether PDUs are of interest.
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

/// A command that the target has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub(super) request: u32,
    pub(super) len: DataLen,
    pub(super) cmd_sn: CmdSn,
    /// Bytes received so far.
    pub(super) received: u32,
    /// Number of the next Data-In.
    pub(super) data_sn: u32,
    /// Bytes sent or asked for so far.
    pub(super) solicited: u32,
    /// Unsolicited data, in bytes: those that go with the command, and those after it.
    pub(super) unsolicited: (u32, u32),
    /// R2Ts not answered in full.
    pub(super) open_r2t: u16,
}

/// A place for a task; tags name it together with its generation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    pub(super) generation: u16,
    pub(super) task: Option<Task>,
}
