//! What a session is made with, what it asks for, and what it tells.

use std::time::{Duration, Instant};

use riser_scsi::iscsi::chap::{Algorithm, Credentials};
use riser_scsi::iscsi::frame::{Digests, FrameError};
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::ConnectionParams;
use riser_scsi::iscsi::name::{Found, IscsiName, TargetAddress};
use riser_scsi::iscsi::pdu::{PduError, RejectReason};
use riser_scsi::iscsi::text::TextError;
use riser_scsi::iscsi::{BHS_LEN, CmdSn, Isid, Itt, Ttt};
use riser_scsi::iser::IserError;
use riser_scsi::srp::WireLun;

#[cfg(doc)]
use super::Session;
use crate::request::table::Late;
use crate::request::{DataLen, RequestId, RequestResult};
use crate::session::{SessionEvent, Timing};

/// What a session is made with.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Who logs in.
    pub name: IscsiName,
    /// Where; none for a discovery session.
    pub target: Option<IscsiName>,
    /// With the name it makes the initiator port. A session with the same port is replaced.
    pub isid: Isid,
    /// The initiator's credentials.
    pub credentials: Option<Credentials>,
    /// What the target has to prove; only together with `credentials`.
    pub target_credentials: Option<Credentials>,
    /// Digests that it takes for CHAP, the best first.
    pub algorithms: Vec<Algorithm>,
    /// What the initiator agrees on.
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
    /// Whether a connection that broke is made again. Without, the session ends with its connection,
    /// and its requests with [`RequestError::Closed`](crate::request::RequestError::Closed): its user
    /// decides what becomes of them.
    pub reconnect: bool,
    /// Times.
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
    /// Data segment.
    pub data: Vec<u8>,
}

/// A command to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandPdu {
    /// Basic header segment; its lengths are set by who sends it.
    pub bhs: [u8; BHS_LEN],
    /// Additional header segments.
    pub ahs: Vec<u8>,
    /// Bytes of the data that go with the command.
    pub immediate: u32,
    /// The unsolicited data that follow it.
    pub unsolicited: Option<DataOrder>,
}

/// A sequence of Data-Out PDUs to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataOrder {
    /// Whose data.
    pub request: RequestId,
    /// Its tag.
    pub itt: Itt,
    /// The R2T that is answered, or none.
    pub ttt: Ttt,
    /// Logical unit.
    pub lun: WireLun,
    /// First byte of the data.
    pub offset: u32,
    /// How many bytes.
    pub len: u32,
}

/// Where data that have been announced go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Into the memory of that request, at that offset.
    Into(RequestId, u32),
    /// Nowhere: the command was given up.
    Discard,
}

/// What the owner is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Connect to the target's address, or to the one it has moved to; then
    /// [`Session::handle_connected`].
    Connect(Option<TargetAddress>),
    /// Send a PDU.
    Send(ControlPdu),
    /// The login is over: what is sent and received from now on goes by this.
    FullFeature(ConnectionParams),
    /// Make the request's memory ready, and send the command that [`Session::emit_command`] writes.
    Start(RequestId),
    /// Send data, after what was to be sent before; then [`Session::handle_data_sent`].
    SendData(DataOrder),
    /// See that neither target nor connection touches the request's memory any more, then
    /// [`Session::handle_retired`].
    Retire(RequestId),
    /// Close the connection, then [`Session::handle_gone`].
    Disconnect,
    /// The request is over, and nobody but its issuer can reach its memory.
    Complete(RequestId, RequestResult),
    /// The discovery is over: these targets there are.
    Found(Vec<Found>),
    /// Something that the session's user may want to know.
    Event(SessionEvent),
}

/// The target did what iSCSI does not allow, or a digest was wrong. The connection is to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The stream cannot be followed.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The first bytes are no answer to a login: a server of something else.
    #[error("the peer does not speak iSCSI")]
    NotIscsi,
    /// A PDU is malformed.
    #[error(transparent)]
    Pdu(#[from] PduError),
    /// A message of iSER is malformed.
    #[error(transparent)]
    Iser(#[from] IserError),
    /// Text is malformed.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Data were damaged on their way.
    #[error("the data digest is wrong")]
    DataDigest,
    /// A PDU came that this state does not allow.
    #[error("a PDU that is not expected: {0}")]
    Unexpected(&'static str),
    /// An answer names a task that there is not.
    #[error("a PDU with task tag {:#010x}, which is not outstanding", .0.0)]
    UnknownTask(Itt),
    /// Data-In with the wrong number, or not where the data before it ended.
    #[error("Data-In out of order")]
    DataOrder,
    /// More data than the command has room for.
    #[error("data beyond the command's buffer")]
    DataRange,
    /// An R2T that asks for what it may not ask for.
    #[error("an R2T for data that are not to be asked for")]
    R2t,
    /// A residual larger than the buffer it is about.
    #[error("a residual of {residual} bytes for a buffer of {len}")]
    Residual {
        /// The residual.
        residual: u32,
        /// The buffer's length.
        len: u32,
    },
    /// More PDUs that want an answer than answers can be sent.
    #[error("the target does not read the answers that it asks for")]
    Flood,
    /// The target refused something other than a command.
    #[error("target rejected a PDU ({0:?})")]
    Rejected(RejectReason),
}

/// The connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// None.
    Down,
    /// Being made, until the given time.
    Connecting(Instant),
    /// Made; logging in, until the given time.
    LoggingIn(Instant),
    /// In full-feature phase.
    Up,
    /// A logout is awaited, until the given time.
    LoggingOut(Instant),
    /// Being closed by the owner.
    Closing,
}

impl Link {
    /// Whether PDUs are of interest.
    pub(super) fn is_open(self) -> bool {
        matches!(self, Self::LoggingIn(_) | Self::Up | Self::LoggingOut(_))
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
    /// R2Ts not answered in full.
    pub(super) open_r2t: u16,
}

/// A place for a task; tags name it together with its generation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    pub(super) generation: u16,
    pub(super) task: Option<Task>,
}

/// What a task-management request is about, from the mildest to the strongest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TmfKind {
    /// That request.
    Abort(Late),
    /// Every request of the logical unit.
    LunReset(WireLun),
    /// Every request.
    TargetReset,
}
