//! Events for the user, and parameters of the user's calls.

use thiserror::Error;

use super::{CmState, IbCmId, PeerAddr};
use crate::verbs::{Ece, Mtu, PKey, QpType};
use crate::wire::cm_msg::{
    AdditionalInfo, AprStatus, Bits, CmPath, CmTimeout, Failover, LapMsg, MraOf, PrivateData,
    RejOf, RejReason, RepMsg, ReqMsg, ServiceId, SidrRepMsg, SidrReqMsg, SidrStatus,
};
use crate::wire::ids::{Psn, Qpn};

/// Parameters of a REQ; see [`ReqMsg`] for the fields.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are those of ReqMsg")]
pub struct ReqParams {
    pub service_id: ServiceId,
    /// Kind of our queue pair, whose transport service the request names: RC, UC or XRC initiator.
    pub qp_type: QpType,
    pub local_qpn: Qpn,
    /// Vendor options of our queue pair.
    pub ece: Ece,
    /// The PSN with which the peer shall begin to send.
    pub starting_psn: Psn,
    pub primary: CmPath,
    /// All zero for none.
    pub alternate: CmPath,
    pub path_mtu: Mtu,
    pub pkey: PKey,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: bool,
    pub srq: bool,
    pub retry_count: Bits<3>,
    pub rnr_retry_count: Bits<3>,
    /// Time that we wait for each answer.
    pub remote_cm_timeout: CmTimeout,
    /// Time in which we promise to answer.
    pub local_cm_timeout: CmTimeout,
    /// Repetitions of a message before we give up.
    pub max_cm_retries: Bits<4>,
    pub private_data: PrivateData<92>,
}

/// Parameters of a REP; see [`RepMsg`] for the fields.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are those of RepMsg")]
pub struct RepParams {
    pub local_qpn: Qpn,
    /// Vendor options of our queue pair.
    pub ece: Ece,
    /// The PSN with which the peer shall begin to send.
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

/// Parameters of a SIDR_REQ.
#[derive(Clone, Copy, Debug)]
pub struct SidrReqParams {
    /// ServiceID that is asked for.
    pub service_id: ServiceId,
    /// Partition key of the path.
    pub pkey: PKey,
    /// Traffic class of the question.
    pub traffic_class: u8,
    /// Time that we wait for each answer.
    pub timeout: CmTimeout,
    /// Repetitions of the question.
    pub max_cm_retries: Bits<4>,
    /// Private data of the user.
    pub private_data: PrivateData<216>,
}

/// Parameters of a SIDR_REP.
#[derive(Clone, Copy, Debug)]
pub struct SidrRepParams {
    /// Result of the query: whether there is such a service.
    pub status: SidrStatus,
    /// The queue pair that serves it.
    pub qpn: Qpn,
    /// Queue key of the service's queue pair.
    pub qkey: u32,
    /// More about the answer.
    pub info: AdditionalInfo,
    /// Private data of the user.
    pub private_data: PrivateData<136>,
}

/// Attributes of our queue pair from the peer's message, for the
/// transitions to ready-to-receive and ready-to-send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpPeer {
    /// Kind of our queue pair.
    pub qp_type: QpType,
    /// Number of the peer's queue pair.
    pub dest_qpn: Qpn,
    /// The first PSN we send.
    pub sq_psn: Psn,
    /// Path MTU that both sides carry.
    pub path_mtu: Mtu,
    /// Partition key of the path.
    pub pkey: PKey,
    /// The path, seen from our side.
    pub path: CmPath,
    /// READs and atomics the peer can answer at a time: bounds ours.
    pub responder_resources: u8,
    /// READs and atomics the peer may have outstanding: what we must hold.
    pub initiator_depth: u8,
    /// Our transport retries, from 0 to 7.
    pub retry_count: Bits<3>,
    /// Our RNR retries; 7 is without end.
    pub rnr_retry_count: Bits<3>,
    /// The peer sends end-to-end credits.
    pub flow_control: bool,
    /// The peer's queue pair uses a shared receive queue.
    pub srq: bool,
}

/// Something that happened to an identifier.
#[derive(Clone, Debug, PartialEq)]
pub struct IbCmEvent {
    /// Identifier that the event is about.
    pub id: IbCmId,
    /// Kind of the event, with its data.
    pub kind: IbCmEventKind,
}

/// The events. After those for which [`Self::is_last`] holds the identifier is
/// gone and the CM will not mention it again.
#[derive(Clone, Debug, PartialEq)]
pub enum IbCmEventKind {
    /// Passive: a peer wants to connect. The identifier is new; answer with
    /// `send_rep`, `send_mra` or `send_rej`.
    ReqReceived {
        /// The listener that matched.
        listener: IbCmId,
        /// Address of the peer.
        peer: PeerAddr,
        /// Attributes for our queue pair.
        qp: QpPeer,
        /// Message as it was received.
        req: Box<ReqMsg>,
    },
    /// Active: the REQ was not answered. Last.
    ReqTimeout,
    /// Active: the peer accepted. Answer with `send_rtu`, `send_mra` or
    /// `send_rej`.
    RepReceived {
        /// Attributes for our queue pair.
        qp: QpPeer,
        /// Message as it was received.
        rep: Box<RepMsg>,
    },
    /// Passive: no RTU came. In timewait.
    RepTimeout,
    /// Passive: the connection is established.
    RtuReceived {
        /// Private data of the peer.
        private_data: Box<PrivateData<224>>,
    },
    /// The peer ends the connection. Answer with `send_drep`.
    DreqReceived {
        /// Private data of the peer.
        private_data: Box<PrivateData<220>>,
    },
    /// Our DREQ was not answered. In timewait.
    DreqTimeout,
    /// The peer agreed to our DREQ, or sent its own. In timewait.
    DrepReceived {
        /// The peer's data; empty where both sides sent a DREQ.
        private_data: Box<PrivateData<224>>,
    },
    /// The peer has our message and needs time.
    MraReceived {
        /// Message that the peer acknowledges.
        message: MraOf,
        /// Time that the peer needs in addition.
        service_timeout: CmTimeout,
        /// Private data of the peer.
        private_data: Box<PrivateData<222>>,
    },
    /// The peer refused, or gave up.
    RejReceived {
        /// Message that the peer refused.
        message: RejOf,
        /// Reason of the refusal.
        reason: RejReason,
        /// Additional reject information of the reason.
        info: Box<AdditionalInfo>,
        /// Private data of the peer.
        private_data: Box<PrivateData<148>>,
        /// The identifier is in timewait; if not, this is the last.
        timewait: bool,
    },
    /// A new REQ or REP shows that the peer forgot this connection. In
    /// timewait.
    StaleConnection,
    /// The peer proposes another alternate path. Answer with `send_apr` or
    /// `send_mra`.
    LapReceived {
        /// The whole message; the path is the peer's view.
        lap: Box<LapMsg>,
    },
    /// The peer's answer to our LAP. Connected as before.
    AprReceived {
        /// Status of the answer.
        status: AprStatus,
        /// Additional information of the status.
        info: Box<AdditionalInfo>,
        /// Private data of the peer.
        private_data: Box<PrivateData<148>>,
    },
    /// Our LAP was not answered. Connected as before.
    LapTimeout,
    /// A peer asks for a datagram service. The identifier is new; answer with
    /// `send_sidr_rep`.
    SidrReqReceived {
        /// The listener that matched.
        listener: IbCmId,
        /// Address of the peer.
        peer: PeerAddr,
        /// Message as it was received.
        req: Box<SidrReqMsg>,
    },
    /// The answer to our SIDR_REQ. Last.
    SidrRepReceived {
        /// Message as it was received.
        rep: Box<SidrRepMsg>,
    },
    /// Our SIDR_REQ was not answered. Last.
    SidrReqTimeout,
    /// Timewait is over: the queue pair's number may be used again. Last.
    TimewaitExit,
}

impl IbCmEventKind {
    /// Whether the identifier is gone.
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

/// Reason why a call was refused; nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum IbCmError {
    /// There is no such identifier (any more).
    #[error("no such communication identifier")]
    NoSuchId,
    /// Not in this state.
    #[error("not possible in state {state:?}")]
    State {
        /// The state it is in.
        state: CmState,
    },
    /// As many identifiers as were configured.
    #[error("too many communication identifiers")]
    TooManyIds,
    /// Another listener takes some of these service ids.
    #[error("service id is taken")]
    ServiceIdInUse,
    /// Alternate paths are switched off.
    #[error("alternate paths are not supported")]
    AlternatePaths,
}
