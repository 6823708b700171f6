//! One communication identifier's memory.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::state::CmState;
use crate::verbs::QpType;
use crate::wire::cm_msg::{CaGuid, CmPath, CommId, ReqMsg, ServiceId};
use crate::wire::ids::Qpn;
use crate::wire::mad::{Mad, TransactionId};

/// The address of a remote NIC: the IP source address of its packets.
pub type PeerAddr = IpAddr;

/// Way of a connection's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmRoute {
    /// Address of the peer.
    pub peer: PeerAddr,
    /// Index of our address in the GID table.
    pub gid_index: u8,
    /// Traffic class of the messages.
    pub traffic_class: u8,
}

/// Names an identifier.
///
/// It is the local communication id itself. Those come from a CSPRNG, so a
/// stale one names nothing rather than another connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IbCmId(pub(super) CommId);

impl IbCmId {
    /// The id as peers see it.
    #[must_use]
    pub fn comm_id(self) -> CommId {
        self.0
    }
}

/// Key by which a repeated REQ is a duplicate rather than a new one from a peer that
/// chose the same communication id again.
///
/// The adapter and its communication id come first, so that the requests with one id lie side by
/// side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ReqIdentity {
    ca_guid: CaGuid,
    comm_id: CommId,
    transaction: u64,
    qpn: Qpn,
    psn: u32,
}

impl ReqIdentity {
    pub(super) fn new(transaction: TransactionId, req: &ReqMsg) -> Self {
        Self {
            ca_guid: req.ca_guid,
            comm_id: req.local_comm_id,
            transaction: transaction.0,
            qpn: req.qpn,
            psn: req.starting_psn.value(),
        }
    }

    /// All requests of an adapter with a communication id.
    pub(super) fn all_of(ca_guid: CaGuid, comm_id: CommId) -> std::ops::RangeInclusive<Self> {
        let with = |transaction, qpn, psn| Self {
            ca_guid,
            comm_id,
            transaction,
            qpn,
            psn,
        };
        with(0, Qpn::new(0), 0)..=with(u64::MAX, Qpn::new(0x00ff_ffff), u32::MAX)
    }
}

/// Claim of a connection at the peer's adapter: at most one live connection has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Claim {
    CommId(CommId),
    Qpn(Qpn),
}

/// Limits of half-open connections: the listener's backlog, and the peer's share of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Holder {
    Listener(IbCmId),
    Peer(IbCmId, PeerAddr),
}

/// A message that is sent again until it is answered.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    pub(super) mad: Mad,
    pub(super) retries_left: u8,
    pub(super) interval: Duration,
}

/// A REP that the peer has not confirmed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unconfirmed {
    /// Its number among all REPs: their order.
    pub(super) number: u64,
    /// Time at which it was sent first.
    pub(super) sent: Instant,
    /// Time by which it must have been confirmed.
    pub(super) until: Instant,
    /// Time that the peer has after each of its requests.
    pub(super) patience: Duration,
    /// Repetitions of its request that still renew that time.
    pub(super) renewals_left: u8,
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
    /// Kind of our queue pair.
    pub(super) qp_type: QpType,
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
    /// Time that the peer takes to answer, and number of times that we ask.
    pub(super) interval: Duration,
    pub(super) max_retries: u8,
    pub(super) timewait: Duration,
    /// Traffic class of the path, which the request names.
    pub(super) traffic_class: u8,
    /// The path that its queue pair has migrated to.
    pub(super) migrated: Option<CmRoute>,
    /// Half open and accepted.
    pub(super) unconfirmed: Option<Unconfirmed>,
    /// It is or was connected, which its peer cannot do from an address that is not its own.
    pub(super) is_proven: bool,
    /// The user has released it: no further events.
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
            qp_type: QpType::Rc,
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
            traffic_class: 0,
            migrated: None,
            unconfirmed: None,
            is_proven: false,
            is_orphan: false,
        }
    }

    /// Way of our messages.
    pub(super) fn route(&self) -> CmRoute {
        self.migrated.unwrap_or(CmRoute {
            peer: self.peer,
            gid_index: 0,
            traffic_class: self.traffic_class,
        })
    }

    /// Whether its peer's messages come from an address. The peer may migrate later than we do.
    pub(super) fn is_with(&self, from: PeerAddr) -> bool {
        self.peer == from || self.migrated.is_some_and(|route| route.peer == from)
    }

    /// Its claim at the peer's adapter, as far as that is known.
    pub(super) fn claims(&self) -> impl Iterator<Item = (PeerAddr, CaGuid, Claim)> {
        let (peer, guid) = (self.peer, self.remote_guid);
        let claims = [
            self.remote_id.map(Claim::CommId),
            self.remote_qpn.map(Claim::Qpn),
        ];
        let known = claims.into_iter().flatten();
        known.filter_map(move |claim| Some((peer, guid?, claim)))
    }

    /// Limits that a half-open connection counts towards.
    pub(super) fn holders(&self) -> impl Iterator<Item = Holder> + use<> {
        let peer = self.peer;
        let of = move |id| [Holder::Peer(id, peer), Holder::Listener(id)];
        self.listener.into_iter().flat_map(of)
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
