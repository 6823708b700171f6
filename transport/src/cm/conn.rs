//! One communication identifier's memory.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::state::CmState;
use crate::wire::cm_msg::{CaGuid, CmPath, CommId, ReqMsg, ServiceId};
use crate::wire::ids::{Psn, Qpn};
use crate::wire::mad::{Mad, TransactionId};

/// The address of a remote NIC: the IP source address of its packets.
pub type PeerAddr = IpAddr;

/// Names an identifier.
///
/// It is the local communication id itself. Those come from a CSPRNG, so a
/// stale one names nothing rather than somebody else's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IbCmId(pub(super) CommId);

impl IbCmId {
    /// The id as peers see it.
    #[must_use]
    pub fn comm_id(self) -> CommId {
        self.0
    }
}

/// What makes a repeated REQ a duplicate rather than a new one from a peer that
/// chose the same communication id again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReqIdentity {
    transaction: TransactionId,
    qpn: Qpn,
    psn: Psn,
}

impl ReqIdentity {
    pub(super) fn new(transaction: TransactionId, req: &ReqMsg) -> Self {
        Self {
            transaction,
            qpn: req.qpn,
            psn: req.starting_psn,
        }
    }
}

/// A message that is sent again until it is answered.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    pub(super) mad: Mad,
    pub(super) retries_left: u8,
    pub(super) interval: Duration,
}

#[derive(Debug)]
pub(super) struct Conn {
    pub(super) state: CmState,
    pub(super) peer: PeerAddr,
    /// The listener that made a passive identifier.
    pub(super) listener: Option<IbCmId>,
    pub(super) service_id: ServiceId,
    /// Transaction of the message to answer: REQ, LAP, DREQ or SIDR_REQ.
    pub(super) transaction: TransactionId,
    pub(super) local_qpn: Qpn,
    pub(super) remote_qpn: Option<Qpn>,
    pub(super) remote_id: Option<CommId>,
    pub(super) remote_guid: Option<CaGuid>,
    /// Passive only: which REQ made this.
    pub(super) identity: Option<ReqIdentity>,
    /// Active only: what the queue pair will need with the REP.
    pub(super) req: Option<Box<ReqMsg>>,
    /// The message under way.
    pub(super) pending: Option<Box<Pending>>,
    /// The last answer, for when its question is repeated.
    pub(super) answer: Option<Box<Mad>>,
    pub(super) deadline: Option<Instant>,
    /// How long the peer takes to answer, and how often we ask.
    pub(super) interval: Duration,
    pub(super) max_retries: u8,
    pub(super) timewait: Duration,
    /// The user has let go: no more events.
    pub(super) is_orphan: bool,
}

impl Conn {
    pub(super) fn new(
        state: CmState,
        peer: PeerAddr,
        service_id: ServiceId,
        transaction: TransactionId,
    ) -> Self {
        Self {
            state,
            peer,
            listener: None,
            service_id,
            transaction,
            local_qpn: Qpn::default(),
            remote_qpn: None,
            remote_id: None,
            remote_guid: None,
            identity: None,
            req: None,
            pending: None,
            answer: None,
            deadline: None,
            interval: Duration::ZERO,
            max_retries: 0,
            timewait: Duration::ZERO,
            is_orphan: false,
        }
    }

    /// The peer's id as messages to it carry it.
    pub(super) fn remote(&self) -> CommId {
        self.remote_id.unwrap_or_default()
    }
}

/// The same path seen from the other end.
pub(super) fn reversed(path: &CmPath) -> CmPath {
    CmPath {
        local_lid: path.remote_lid,
        remote_lid: path.local_lid,
        local_gid: path.remote_gid,
        remote_gid: path.local_gid,
        ..*path
    }
}
