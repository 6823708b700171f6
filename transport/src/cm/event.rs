//! Events for the user, and parameters for calls.

use thiserror::Error;

use super::{CmState, IbCmId, PeerAddr};
use crate::verbs::{Ece, Mtu, PKey, QpType};
use crate::wire::cm_msg::{
    AdditionalInfo, AprStatus, Bits, CmPath, CmTimeout, Failover, LapMsg, MraOf, PrivateData,
    RejOf, RejReason, RepMsg, ReqMsg, ServiceId, SidrRepMsg, SidrReqMsg, SidrStatus,
};
use crate::wire::ids::{Psn, Qpn};

/// Parameters for a REQ; see [`ReqMsg`] for the fields.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are those of ReqMsg")]
pub struct ReqParams {
    pub service_id: ServiceId,
    /// Type of our QP, which determines the transport service in the request: RC, UC or XRC
    /// initiator.
    pub qp_type: QpType,
    pub local_qpn: Qpn,
    /// Vendor options for our QP.
    pub ece: Ece,
    /// Starting PSN the peer should use for sending.
    pub starting_psn: Psn,
    pub primary: CmPath,
    /// Set to zero if not used.
    pub alternate: CmPath,
    pub path_mtu: Mtu,
    pub pkey: PKey,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: bool,
    pub srq: bool,
    pub retry_count: Bits<3>,
    pub rnr_retry_count: Bits<3>,
    /// Time we will wait for each response.
    pub remote_cm_timeout: CmTimeout,
    /// Maximum time we need to respond.
    pub local_cm_timeout: CmTimeout,
    /// Maximum number of times we will resend a message.
    pub max_cm_retries: Bits<4>,
    pub private_data: PrivateData<92>,
}

/// Parameters for a REP; see [`RepMsg`] for the fields.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are those of RepMsg")]
pub struct RepParams {
    pub local_qpn: Qpn,
    /// Vendor options for our QP.
    pub ece: Ece,
    /// Starting PSN the peer should use for sending.
    pub starting_psn: Psn,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub target_ack_delay: CmTimeout,
    pub failover: Failover,
    pub flow_control: bool,
    pub rnr_retry_count: Bits<3>,
    pub srq: bool,
    pub private_data: PrivateData<196>,
}

/// Parameters for a SIDR_REQ.
#[derive(Clone, Copy, Debug)]
pub struct SidrReqParams {
    /// Requested service ID.
    pub service_id: ServiceId,
    /// P_Key for the path.
    pub pkey: PKey,
    /// Traffic class for the request.
    pub traffic_class: u8,
    /// Time we will wait for each response.
    pub timeout: CmTimeout,
    /// Maximum number of times the request will be resent.
    pub max_cm_retries: Bits<4>,
    /// Private data.
    pub private_data: PrivateData<216>,
}

/// Parameters for a SIDR_REP.
#[derive(Clone, Copy, Debug)]
pub struct SidrRepParams {
    /// Status, which indicates if the service is available.
    pub status: SidrStatus,
    /// QP number of the service.
    pub qpn: Qpn,
    /// Q_Key for the QP.
    pub qkey: u32,
    /// Additional information for the response.
    pub info: AdditionalInfo,
    /// Private data.
    pub private_data: PrivateData<136>,
}

/// QP attributes based on the peer's message, used for the transitions to ready-to-receive and
/// ready-to-send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpPeer {
    /// Type of our QP.
    pub qp_type: QpType,
    /// The peer's QP number.
    pub dest_qpn: Qpn,
    /// First PSN we will send.
    pub sq_psn: Psn,
    /// Path MTU supported by both sides.
    pub path_mtu: Mtu,
    /// P_Key for the path.
    pub pkey: PKey,
    /// Path as seen from our side.
    pub path: CmPath,
    /// Number of READs and atomics that the peer can process concurrently. This is the limit for
    /// our initiator depth.
    pub responder_resources: u8,
    /// Maximum number of outstanding READs and atomics from the peer, which we need to support.
    pub initiator_depth: u8,
    /// Transport retry count, 0 to 7.
    pub retry_count: Bits<3>,
    /// RNR retry count; 7 means unlimited.
    pub rnr_retry_count: Bits<3>,
    /// Set if the peer uses end-to-end credits.
    pub flow_control: bool,
    /// Set if the peer's QP uses an SRQ.
    pub srq: bool,
}

/// Event for a communication ID.
#[derive(Clone, Debug, PartialEq)]
pub struct IbCmEvent {
    /// Communication ID.
    pub id: IbCmId,
    /// Event type with its data.
    pub kind: IbCmEventKind,
}

/// Event types. If [`Self::is_last`] returns true, the ID has been removed and there will be no
/// more events for it.
#[derive(Clone, Debug, PartialEq)]
pub enum IbCmEventKind {
    /// Passive side: connection request from a peer. This creates a new ID; the user must call
    /// `send_rep`, `send_mra` or `send_rej`.
    ReqReceived {
        /// Listener for the service ID.
        listener: IbCmId,
        /// Peer address.
        peer: PeerAddr,
        /// Attributes for our QP.
        qp: QpPeer,
        /// Received message.
        req: Box<ReqMsg>,
    },
    /// Active side: timed out waiting for a response to the REQ. Last event.
    ReqTimeout,
    /// Active side: the peer accepted the request. The user must call `send_rtu`, `send_mra` or
    /// `send_rej`.
    RepReceived {
        /// Attributes for our QP.
        qp: QpPeer,
        /// Received message.
        rep: Box<RepMsg>,
    },
    /// Passive side: timed out waiting for the RTU. Enters timewait.
    RepTimeout,
    /// Passive side: the connection is established.
    RtuReceived {
        /// Private data from the peer.
        private_data: Box<PrivateData<224>>,
    },
    /// The peer has closed the connection. The user must call `send_drep`.
    DreqReceived {
        /// Private data from the peer.
        private_data: Box<PrivateData<220>>,
    },
    /// Timed out waiting for a response to our DREQ. Enters timewait.
    DreqTimeout,
    /// The peer has responded to our DREQ, or has also sent a DREQ. Enters timewait.
    DrepReceived {
        /// Private data from the peer, empty if both sides sent a DREQ.
        private_data: Box<PrivateData<224>>,
    },
    /// The peer has received our message but needs more time.
    MraReceived {
        /// Message acknowledged by the peer.
        message: MraOf,
        /// Additional time needed by the peer.
        service_timeout: CmTimeout,
        /// Private data from the peer.
        private_data: Box<PrivateData<222>>,
    },
    /// The peer has rejected or abandoned the connection.
    RejReceived {
        /// Message rejected by the peer.
        message: RejOf,
        /// Reject reason.
        reason: RejReason,
        /// Additional information for the reason.
        info: Box<AdditionalInfo>,
        /// Private data from the peer.
        private_data: Box<PrivateData<148>>,
        /// Set if the ID is in timewait. If not set, this is the last event.
        timewait: bool,
    },
    /// A new REQ or REP shows that the peer doesn't know this connection anymore. Enters timewait.
    StaleConnection,
    /// The peer has proposed a new alternate path. The user must call `send_apr` or `send_mra`.
    LapReceived {
        /// Received message, with the path as seen by the peer.
        lap: Box<LapMsg>,
    },
    /// Response to our LAP. The connection remains established.
    AprReceived {
        /// Response status.
        status: AprStatus,
        /// Additional information for the status.
        info: Box<AdditionalInfo>,
        /// Private data from the peer.
        private_data: Box<PrivateData<148>>,
    },
    /// Timed out waiting for a response to our LAP. The connection remains established.
    LapTimeout,
    /// Request for a datagram service. This creates a new ID; the user must call `send_sidr_rep`.
    SidrReqReceived {
        /// Listener for the service ID.
        listener: IbCmId,
        /// Peer address.
        peer: PeerAddr,
        /// Received message.
        req: Box<SidrReqMsg>,
    },
    /// Response to our SIDR_REQ. Last event.
    SidrRepReceived {
        /// Received message.
        rep: Box<SidrRepMsg>,
    },
    /// Timed out waiting for a response to our SIDR_REQ. Last event.
    SidrReqTimeout,
    /// Timewait is over and the QP number can be reused. Last event.
    TimewaitExit,
}

impl IbCmEventKind {
    /// Returns whether the ID has been removed.
    #[must_use]
    pub fn is_last(&self) -> bool {
        match self {
            Self::ReqTimeout
            | Self::SidrRepReceived { .. }
            | Self::SidrReqTimeout
            | Self::TimewaitExit => true,
            Self::RejReceived { timewait, .. } => !timewait,
            _ => false,
        }
    }
}

/// Error returned for a failed call. The state is not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum IbCmError {
    /// The ID doesn't exist or has been removed.
    #[error("unknown communication identifier")]
    NoSuchId,
    /// The call is not valid in this state.
    #[error("invalid state {state:?}")]
    State {
        /// Current state.
        state: CmState,
    },
    /// The configured number of IDs is exceeded.
    #[error("too many communication identifiers")]
    TooManyIds,
    /// Some of these service IDs are already used by a different listener.
    #[error("service id already in use")]
    ServiceIdInUse,
    /// Alternate paths are disabled.
    #[error("alternate paths are not supported")]
    AlternatePaths,
}
