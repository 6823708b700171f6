//! The InfiniBand communication manager (IBTA chapter 12) as one pure machine.
//!
//! [`Cm`] makes, keeps and ends connections between queue pairs by exchanging
//! MADs over queue pair 1. It owns no socket, clock or queue pair: MADs and the
//! time come in as arguments, MADs and events go out by polling, and moving
//! queue pairs through their states is the user's work, for which events carry
//! what is needed ([`QpPeer`]). Addresses, ports and the meaning of private data
//! belong to the layer above.
//!
//! # Calling order
//!
//! 1. [`Cm::handle_mad`] for every CM MAD that arrives, [`Cm::handle_timeout`]
//!    when [`Cm::poll_timeout`] says so, and the `send_*` calls at any time.
//! 2. After any of these: [`Cm::poll_event`] and [`Cm::poll_transmit`] until
//!    both are empty.
//!
//! # A connection
//!
//! [`CmState`] draws the states. The active side calls [`Cm::send_req`] and gets
//! `RepReceived`; it brings its queue pair to ready-to-send and calls
//! [`Cm::send_rtu`]. The passive side called [`Cm::listen`] and gets
//! `ReqReceived` with a new identifier; it brings its queue pair to
//! ready-to-receive, calls [`Cm::send_rep`] and gets `RtuReceived`; a receive
//! completion before that is as good, and [`Cm::establish`] says so. Either side
//! ends with [`Cm::send_dreq`], the other answers `DreqReceived` with
//! [`Cm::send_drep`], and after timewait the last event says that the
//! identifier is gone.
//!
//! # Lost and repeated messages
//!
//! REQ, REP, LAP, DREQ and SIDR_REQ are repeated until they are answered, at the interval and as
//! often as the messages themselves say (clamped by [`CmConfig`]), a DREQ sooner at first; an MRA
//! buys time once. Answers (MRA, REP, RTU, REJ, DREP, APR) are kept and sent again when the
//! question is. Messages that are illegal in the state of their connection, that come from another
//! address than the peer's, or that name another id of the peer's, change nothing.
//!
//! # Requests of strangers
//!
//! Anyone can send a REQ from a forged address, so a REQ alone ends nothing and
//! keeps little:
//!
//! - It is judged first. What can be accepted is offered to the user even if it
//!   names the communication id or the queue pair of a live connection with the
//!   same adapter (address and CA GUID), as that of a host that has rebooted
//!   does: `rdma_rxe` numbers queue pairs from 17 upwards every time. The
//!   connection of before ends ([`IbCmEventKind::StaleConnection`]) when the new
//!   one is established, because only the owner of the address can confirm our
//!   REP, which names an id from a CSPRNG. IBTA 12.9.8.3.1 refuses the REQ
//!   instead and ends the old connection at once; a peer that reconnects so is
//!   connected sooner here, and one that was only impersonated stays connected.
//! - The peer has [`CmConfig::max_half_open`] to confirm a REP, even if its REQ
//!   and its MRAs ask for longer. A REP is repeated by itself
//!   [`CmConfig::max_unproven_retries`] times at most to an address that has no
//!   connection with us. Beyond that it answers the REQ each time that it arrives:
//!   an address gets no more answers than requests come in its name, and these few.
//!   A peer that repeats its REQ has its time again, as often as the REQ says
//!   that it is repeated.
//! - A peer has a share of a listener's backlog
//!   ([`CmConfig::max_half_open_per_peer`]), beyond which it may go as long as
//!   as much is left to others. Where the backlog or the share is used up, the
//!   REQ takes the place of the listener's oldest one, or the peer's, whose REP
//!   has not been confirmed for [`CmConfig::half_open_grace`]. Without such a
//!   one it is dropped, and a peer that means it repeats it.
//! - No step looks at every connection.
//!
//! # Bounds
//!
//! Identifiers, half-open ones per listener (its backlog) and of those per peer
//! address, outgoing MADs and events: all are fixed at creation. Beyond
//! the first a request is refused for lack of resources, after the oldest
//! refusal that was kept for repetition has been given up.
//!
//! # Workers
//!
//! Several `Cm`s can share one queue pair 1: the low bits of every local
//! communication id are the worker's number, and [`worker_of`] returns which one a
//! MAD belongs to. Requests are spread by the peer's id, and so is the REJ by
//! which a peer withdraws a request that was not answered. A stale connection is
//! found only by the worker that gets the new request.
//!
//! # Not here
//!
//! Redirection, reliable datagram services, and ClassPortInfo. Alternate paths are refused unless
//! [`CmConfig`] says otherwise: Linux has none on RoCE.

mod calls;
mod conn;
mod event;
mod handle;
mod other;
mod state;
mod table;
#[cfg(test)]
mod tests;
mod timer;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use chacha20::ChaCha12Rng;
use chacha20::rand_core::SeedableRng;

use conn::{Claim, Conn, Holder, Pending, ReqIdentity};
use table::Listener;

pub use conn::{CmRoute, IbCmId, PeerAddr};
pub use event::{
    IbCmError, IbCmEvent, IbCmEventKind, QpPeer, RepParams, ReqParams, SidrRepParams, SidrReqParams,
};
pub use state::CmState;

use crate::wire::cm_msg::{
    CaGuid, CommId, FIRST_ID_OFFSET, ReqMsg, ServiceId, receiver_id, routing_id,
};
use crate::wire::mad::Mad;

/// Limits and identity of one [`Cm`].
#[derive(Clone, Copy, Debug)]
pub struct CmConfig {
    /// GUID of our channel adapter.
    pub ca_guid: CaGuid,
    /// Identifiers, listeners and those in timewait included.
    pub max_ids: usize,
    /// Places of a listener's backlog that one peer address may have in any case, and that it must
    /// leave to others when it has more: a host that connects many times at once may use the rest
    /// of an empty backlog.
    pub max_half_open_per_peer: usize,
    /// The longest time that a peer may take to confirm a REP after it has sent or repeated its
    /// REQ, even if that asks for longer.
    pub max_half_open: Duration,
    /// Time that a peer has to confirm a REP before its place may go to a newer REQ.
    pub half_open_grace: Duration,
    /// Repetitions of a REP, without a repeated REQ, to an address that has no connection with us:
    /// it may be made up, and its owner should not be flooded with answers.
    pub max_unproven_retries: u8,
    /// Outgoing MADs that wait to be polled.
    pub max_outbox: usize,
    /// Events that wait to be polled, beyond which no request is taken.
    pub max_events: usize,
    /// The shortest time between repetitions, for any value that the peer asks for.
    pub min_interval: Duration,
    /// The longest time between repetitions, for any value that the peer asks for.
    pub max_interval: Duration,
    /// The most that an MRA buys.
    pub max_service_timeout: Duration,
    /// The longest timewait, for any ACK timeout of the peer's.
    pub max_timewait: Duration,
    /// Alternate paths may be loaded.
    pub alternate_paths: bool,
    /// The GID of a request's sender is the address that the request came from; others are refused.
    pub checks_gids: bool,
}

impl CmConfig {
    /// Limits that suit a storage server.
    #[must_use]
    pub fn new(ca_guid: CaGuid) -> Self {
        Self {
            ca_guid,
            max_ids: 16 * 1024,
            max_half_open_per_peer: 64,
            // Four repetitions of a Linux host's REQ, which it sends every 4.3 s.
            max_half_open: Duration::from_secs(18),
            half_open_grace: Duration::from_millis(20),
            max_unproven_retries: 3,
            max_outbox: 1024,
            max_events: 4096,
            min_interval: Duration::from_millis(10),
            max_interval: Duration::from_secs(20),
            max_service_timeout: Duration::from_mins(5),
            max_timewait: Duration::from_secs(10),
            alternate_paths: false,
            checks_gids: true,
        }
    }
}

/// Counters of a [`Cm`] since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CmCounters {
    /// Number of MADs handed in.
    pub received: u64,
    /// Of these, no CM messages.
    pub malformed: u64,
    /// Messages that their connection's state, address or ids forbid.
    pub illegal: u64,
    /// Messages about connections that there are not, or no longer.
    pub unknown: u64,
    /// Messages that had been seen before.
    pub duplicates: u64,
    /// Messages of ours that were repeated.
    pub retries: u64,
    /// Requests refused without asking the user.
    pub refused: u64,
    /// Requests and outgoing MADs lost to a full queue or limit.
    pub dropped: u64,
    /// Half-open connections that gave their place to a newer request.
    pub displaced: u64,
}

/// Number of the worker, of `1 << worker_bits`, that a MAD of the CM class belongs to; `None` if
/// it is too short or of another class.
#[must_use]
pub fn worker_of(mad: &[u8], worker_bits: u32) -> Option<u32> {
    routing_id(mad).map(|id| id.0 & worker_mask(worker_bits))
}

/// Outgoing MADs whose memory is kept while none waits.
const KEPT_OUTBOX: usize = 64;

/// The most bits of a communication id that a worker's number takes.
pub const MAX_WORKER_BITS: u32 = 8;

fn worker_mask(worker_bits: u32) -> u32 {
    assert!(worker_bits <= MAX_WORKER_BITS, "too many workers");
    (1 << worker_bits) - 1
}

/// The communication manager; see the [module](self).
#[derive(Debug)]
pub struct Cm {
    config: CmConfig,
    worker_index: u32,
    worker_mask: u32,
    random: ChaCha12Rng,
    listeners: BTreeMap<IbCmId, Listener>,
    conns: BTreeMap<IbCmId, Conn>,
    /// Passive connections by peer and request, those in timewait included.
    by_req: BTreeMap<(PeerAddr, ReqIdentity), IbCmId>,
    /// Claims of connections at their peers, without those in timewait. Requests of strangers may
    /// claim the same as a connection that is alive.
    claims: BTreeSet<(PeerAddr, CaGuid, Claim, IbCmId)>,
    /// Questions by peer and its request id.
    by_sidr: BTreeMap<(PeerAddr, CommId), IbCmId>,
    /// Half-open connections by listener and peer.
    half_open: BTreeMap<(IbCmId, PeerAddr), usize>,
    /// Half-open connections whose REP was sent, the oldest of each holder first.
    unconfirmed: BTreeMap<(Holder, u64), IbCmId>,
    /// REPs sent so far: their order.
    reps: u64,
    /// Number of connections of an address that are or were connected.
    proven: BTreeMap<PeerAddr, usize>,
    /// Connections in timewait that their user has released, by the end of it.
    finished: BTreeSet<(Instant, IbCmId)>,
    timers: BTreeSet<(Instant, IbCmId)>,
    outbox: VecDeque<(PeerAddr, Mad)>,
    events: VecDeque<IbCmEvent>,
    counters: CmCounters,
}

impl Cm {
    /// Memory of one identifier at its largest, in bytes: its record, the
    /// message under way, the last answer, the request, and its entries in the
    /// indices.
    pub const BYTES_PER_ID: usize = size_of::<Conn>()
        + size_of::<Pending>()
        + size_of::<Mad>()
        + size_of::<ReqMsg>()
        + size_of::<((PeerAddr, ReqIdentity), IbCmId)>()
        + 2 * size_of::<(PeerAddr, CaGuid, Claim, IbCmId)>()
        + 2 * size_of::<((Holder, u64), IbCmId)>()
        + 2 * size_of::<(PeerAddr, usize)>()
        + 2 * size_of::<(Instant, IbCmId)>();

    /// A CM for worker `worker_index` of `1 << worker_bits`. Communication ids
    /// and transaction ids come from `seed`, which must be secret and fresh.
    ///
    /// # Panics
    ///
    /// If `worker_bits` exceeds [`MAX_WORKER_BITS`] or `worker_index` needs more.
    #[must_use]
    pub fn new(config: CmConfig, worker_index: u32, worker_bits: u32, seed: [u8; 32]) -> Self {
        let worker_mask = worker_mask(worker_bits);
        assert!(
            worker_index <= worker_mask,
            "the worker's number fits its bits"
        );
        Self {
            config,
            worker_index,
            worker_mask,
            random: ChaCha12Rng::from_seed(seed),
            listeners: BTreeMap::new(),
            conns: BTreeMap::new(),
            by_req: BTreeMap::new(),
            claims: BTreeSet::new(),
            by_sidr: BTreeMap::new(),
            half_open: BTreeMap::new(),
            unconfirmed: BTreeMap::new(),
            reps: 0,
            proven: BTreeMap::new(),
            finished: BTreeSet::new(),
            timers: BTreeSet::new(),
            outbox: VecDeque::new(),
            events: VecDeque::new(),
            counters: CmCounters::default(),
        }
    }

    /// The next MAD to send, and where to.
    pub fn poll_transmit(&mut self) -> Option<(PeerAddr, Mad)> {
        let next = self.outbox.pop_front();
        if self.outbox.is_empty() {
            // A socket that took nothing for a while leaves no memory behind.
            self.outbox.shrink_to(KEPT_OUTBOX);
        }
        next
    }

    /// Way of a MAD of ours to a peer: that of its connection, or one of our first address where there
    /// is none any more.
    #[must_use]
    pub fn route(&self, to: PeerAddr, mad: &Mad) -> CmRoute {
        // The first id is ours, but for an answer to a question of the peer's, which has no path.
        let id = mad[FIRST_ID_OFFSET..]
            .first_chunk()
            .map(|id| u32::from_be_bytes(*id));
        let conn = id.and_then(|id| self.conns.get(&IbCmId(CommId(id))));
        let route = conn.map(Conn::route).filter(|route| route.peer == to);
        route.unwrap_or(CmRoute {
            peer: to,
            gid_index: 0,
            traffic_class: 0,
        })
    }

    /// The queue pair of a connection has migrated: our messages take its path from now on. The
    /// peer's are taken from either path, since it may migrate later.
    pub fn migrate(&mut self, id: IbCmId, route: CmRoute) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.migrated = Some(route);
        }
    }

    /// Takes the oldest event.
    pub fn poll_event(&mut self) -> Option<IbCmEvent> {
        self.events.pop_front()
    }

    /// Counters since the start.
    #[must_use]
    pub fn counters(&self) -> CmCounters {
        self.counters
    }

    /// Identifiers in use: listeners, connections, timewait.
    #[must_use]
    pub fn id_count(&self) -> usize {
        self.listeners.len() + self.conns.len()
    }

    /// The state of an identifier; `Idle` for those that are gone.
    #[must_use]
    pub fn state(&self, id: IbCmId) -> CmState {
        // Listeners and connections share the numbers, so an id names one of them at most.
        if self.listeners.contains_key(&id) {
            return CmState::Listen;
        }
        self.conns.get(&id).map_or(CmState::Idle, |conn| conn.state)
    }

    /// Take requests for the service ids that equal `service_id` in the bits of
    /// `mask`. `backlog` bounds the requests that are not connections yet.
    ///
    /// # Errors
    ///
    /// [`IbCmError::ServiceIdInUse`] if another listener takes some of them,
    /// [`IbCmError::TooManyIds`].
    pub fn listen(
        &mut self,
        service_id: ServiceId,
        mask: u64,
        backlog: usize,
    ) -> Result<IbCmId, IbCmError> {
        // With two listeners for a service id, their random ids would decide which one gets a
        // REQ.
        if self
            .listeners
            .values()
            .any(|other| other.overlaps(service_id, mask))
        {
            return Err(IbCmError::ServiceIdInUse);
        }
        self.make_room()?;
        let id = self.new_id();
        self.listeners.insert(
            id,
            Listener {
                service_id,
                mask,
                backlog,
                half_open: 0,
            },
        );
        Ok(id)
    }

    fn listener_of(&self, service_id: ServiceId) -> Option<IbCmId> {
        // A walk: there are a handful of listeners, and one may take a range of service ids.
        self.listeners
            .iter()
            .find(|(_, listener)| listener.takes(service_id))
            .map(|(id, _)| *id)
    }

    /// Returns whether a MAD that came from `from` names a connection with that peer. A sender that
    /// names one has seen a message of ours; requests, which anyone can make, name none.
    #[must_use]
    pub fn knows(&self, from: PeerAddr, mad: &[u8]) -> bool {
        // The source address as well: an id alone might be seen, or guessed, by another host.
        let conn = receiver_id(mad).and_then(|id| self.conns.get(&IbCmId(id)));
        conn.is_some_and(|conn| conn.is_with(from.to_canonical()))
    }

    /// Whether an address has proved that it receives what is sent to it: it has a connection with
    /// us, or had one until recently.
    #[must_use]
    pub fn is_proven(&self, peer: PeerAddr) -> bool {
        self.proven.contains_key(&peer)
    }

    fn has_room_for(&self, listener: IbCmId, from: PeerAddr) -> bool {
        // Both limits, since a peer within its share may still meet a full backlog.
        let holders = [Holder::Peer(listener, from), Holder::Listener(listener)];
        !holders.into_iter().any(|holder| self.is_full(holder))
    }

    /// Returns whether there is room for the events of another request.
    fn may_tell_more(&self) -> bool {
        self.events.len() < self.config.max_events
    }

    fn is_full(&self, holder: Holder) -> bool {
        let (Holder::Listener(id) | Holder::Peer(id, _)) = holder;
        let listener = &self.listeners[&id];
        let free = listener.backlog.saturating_sub(listener.half_open);
        match holder {
            Holder::Listener(_) => free == 0,
            // Beyond its share a peer may go while a whole share is left to others, so a host
            // that opens many channels at once is not held back at an idle target.
            Holder::Peer(_, addr) => {
                let count = self.half_open.get(&(id, addr)).copied().unwrap_or(0);
                let share = self.config.max_half_open_per_peer;
                count >= share && free <= share
            }
        }
    }
}
