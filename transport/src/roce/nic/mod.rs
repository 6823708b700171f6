//! The device, without its socket: objects, queue pairs, packets in, packets out, timers.
//!
//! A [`Nic`] is driven by its owner:
//!
//! ```text
//! nic.handle_datagram(now, src, segment, bytes)   // what came in
//! nic.handle_timeouts(now)                        // once nic.deadline() has passed
//! nic.poll_transmit(now, &mut batch, budget)      // what goes out
//! nic.poll_async_event(), nic.poll_cq(…), …       // what the user sees
//! ```
//!
//! | module | what it does |
//! | --- | --- |
//! | `config` | [`NicConfig`], [`NicLimits`], the counters |
//! | `agents` | answers to MADs: what the device is, and the counters of its port |
//! | `hw_counters` | counters by Linux's names |
//! | `objects` | protection domains, completion queues, shared receive queues, address handles |
//! | `qpn` | gives out queue-pair numbers |
//! | `xrc` | XRC domains, their shared receive queues, what arrives for these |
//! | `qp` | creates, modifies and destroys queue pairs, posts work |
//! | `mcast` | multicast groups |
//! | `port` | the state of the port, and the end of the device |
//! | `migration` | alternate paths of connections |
//! | `rx` | dispatches what comes in |
//! | `tx` | collects what goes out, and the timers |
//! | `rate` | rate limits of queue pairs |
//! | `stream` | connections over streams, whose owner moves the bytes |
//! | [`rdma_cm`] | the RDMA CM's calls and its messages |
//!
//! # Invariants
//! - A packet changes nothing before its destination, source address, partition key and ICRC have
//!   been checked; the queue pair then checks sequence, keys, rights and ranges.
//! - Timers and transmit turns name queue pairs by handles with a generation, so none outlives its
//!   queue pair (CVE-2026-45910).
//! - Queue pairs take turns in sending, [`TURN`] packets each.
//!
//! # Bounds
//! Every table has the limit of its [`NicLimits`]. The queues of events hold one entry for each
//! object and kind. A peer address has at most [`NicLimits::max_qps_per_peer`] queue pairs. How a
//! peer numbers its packets is remembered for [`PORTS_PER_QP`] ports for each of its queue pairs,
//! so no peer makes another one's be forgotten, and strangers have none.
//!
//! # Addresses
//! A device may have several addresses, which are its GIDs ([`NicConfig::other_addrs`]). A path begins
//! at the one that its address vector names ([`AhAttr::sgid_index`]), and a connection takes packets
//! at that one only. Multicast groups and the connection manager are at the first.
//!
//! Not implemented: several ports or partitions.

mod agents;
mod breakage;
mod config;
mod hw_counters;
mod mcast;
mod migration;
mod objects;
mod port;
mod qp;
mod qpn;
mod rate;
pub mod rdma_cm;
mod rx;
mod stream;
#[cfg(test)]
mod tests;
mod tx;
mod xrc;

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use riser_memory::fault;

use crate::cm::CmConfig;
use crate::mr::MrTable;
use crate::rc::{RcCounters, RcEvent, RcQp, RecvQueue, TxPacket};
use crate::rdmap::RdmapQp;
use crate::roce::batch::TxBatch;
use crate::roce::cq::Cq;
use crate::roce::srq::Srq;
use crate::roce::ud::UdQp;
use crate::table::Table;
use crate::uc::UcQp;
use crate::verbs::{
    AhAttr, AhId, AsyncEvent, CqId, DeviceAttr, Mtu, PathMigState, PdId, PortState, QpAttr, QpId,
    QpState, QpType, SrqId, XrcdId,
};
use crate::wire::{HeaderBuf, IcrcFlow, IcrcVerifier, Qpn, ROCE_PORT};

use agents::Agents;
pub use breakage::Breakage;
pub use config::{NicConfig, NicCounters, NicLimits, NicUsage, QpCounters, Wire, device_guid};
pub use hw_counters::HwCounter;
use migration::Alternate;
use qpn::{QpnAllocator, QpnMap};
use rdma_cm::CmAgent;
pub use rx::IpFields;
pub(crate) use rx::LinkPeer;

/// Packets that a queue pair sends before the next one has its turn.
pub const TURN: usize = 64;

/// Answers of queue pairs that have ended which wait to be sent; what comes beyond is lost.
const MAX_LAST_ANSWERS: usize = 1024;

/// Source ports for each connected queue pair of a peer whose identification patterns are
/// remembered. Linux uses one for a queue pair.
const PORTS_PER_QP: usize = 4;

#[derive(Debug, Default)]
struct Pd {
    /// Queue pairs, shared receive queues, address handles and memory regions.
    users: u32,
}

#[derive(Debug)]
struct Ah {
    pd: PdId,
    attr: AhAttr,
}

#[derive(Debug, Default)]
struct Xrcd {
    /// Queue pairs and shared receive queues.
    users: u32,
}

#[derive(Debug)]
enum Machine {
    Rc(Box<RcQp>),
    /// An end of an extended reliable connection.
    Xrc(Box<RcQp>),
    Uc(Box<UcQp>),
    Ud(Box<UdQp>),
    /// A connection over a stream.
    Stream(Box<RdmapQp>),
}

/// Path of a connected queue pair's packets.
#[derive(Clone, Copy, Debug)]
struct Peer {
    addr: SocketAddr,
    /// Index of our address.
    from: u8,
    flow: IcrcFlow,
    /// Type of service of its packets, without ECN.
    tos: u8,
    /// It is this device, and its packets do not leave it.
    is_own: bool,
}

/// The way of packets to the device's own address, where they do not leave it.
#[derive(Debug)]
struct OwnWay {
    addrs: Box<[SocketAddr]>,
    worker_index: u32,
    worker_bits: u8,
    /// There are none while they are being received.
    packets: Option<Box<OwnPackets>>,
}

#[derive(Debug)]
struct OwnPackets {
    batch: TxBatch,
    /// A train of them in one piece, as a socket would hand it over.
    train: Vec<u8>,
}

#[derive(Debug)]
struct Qp {
    qpn: u32,
    pd: PdId,
    qp_type: QpType,
    machine: Machine,
    /// Its own receive queue; of no capacity with a shared one.
    rq: RecvQueue,
    /// Its shared one; of an XRC target, the one that the last request has named.
    srq: Option<SrqId>,
    xrcd: Option<XrcdId>,
    send_cq: CqId,
    recv_cq: CqId,
    attr: QpAttr,
    peer: Option<Peer>,
    /// The path that it takes when it migrates.
    alternate: Option<Box<Alternate>>,
    mig_state: PathMigState,
    /// Its owner wants to know when its send queue has drained.
    notifies_drain: bool,
    /// UDP port from which the peer's last packet in sequence came.
    source_port: Option<u16>,
    /// Its connection was accepted, and the peer has not used it yet.
    awaits_first_packet: bool,
    /// It waits for its turn to send.
    is_queued: bool,
    /// What it sends to a multicast group does not come back to it.
    blocks_own_mcast: bool,
    limiter: Option<Box<rate::Limiter>>,
    /// The earliest entry of the timer heap that is meant.
    armed: Option<Instant>,
    counters: QpCounters,
}

impl Qp {
    fn state(&self) -> QpState {
        match &self.machine {
            Machine::Rc(rc) | Machine::Xrc(rc) => rc.state(),
            Machine::Uc(uc) => uc.state(),
            Machine::Ud(ud) => ud.state(),
            Machine::Stream(stream) => stream.state(),
        }
    }
}

impl OwnWay {
    /// Whether packets to queue pair `qpn` at an address are for this device.
    fn takes(&self, dst: SocketAddr, qpn: Qpn) -> bool {
        let is_ours = match qpn {
            // Which worker gets a message for queue pair 1, its content says.
            Qpn::GSI => self.worker_bits == 0,
            _ => qpn.value() & ((1 << self.worker_bits) - 1) == self.worker_index,
        };
        is_ours && self.addrs.contains(&dst)
    }
}

/// The device. See the [module](self) for the calling order.
pub struct Nic {
    config: NicConfig,
    /// Its addresses, in the order of the GID table.
    locals: Box<[SocketAddr]>,
    /// From where messages go to addresses that may be made up.
    to_strangers: SocketAddr,
    attr: DeviceAttr,
    /// When it was made, from which its clock counts.
    start: Instant,
    now: Instant,
    random: ChaCha20Rng,
    own_way: Option<OwnWay>,
    /// There has been a datagram queue pair, whose receives report IP headers.
    has_datagrams: bool,
    pds: Table<PdId, Pd>,
    mrs: MrTable,
    /// Failed accesses to memory of this process that the regions are known by.
    faults: u64,
    cqs: Table<CqId, Cq>,
    srqs: Table<SrqId, Srq>,
    qps: Table<QpId, Qp>,
    ahs: Table<AhId, Ah>,
    xrcds: Table<XrcdId, Xrcd>,
    /// Shared receive queues of XRC domains, by their numbers.
    by_srqn: QpnMap<SrqId>,
    srqns: QpnAllocator,
    by_qpn: QpnMap<QpId>,
    qpns: QpnAllocator,
    /// The user's queue pair 1, if there is one.
    gsi: Option<QpId>,
    groups: Vec<mcast::Group>,
    /// Groups that the owner of the device is still to leave.
    left_groups: Vec<IpAddr>,
    /// Queue pairs that are connected with each address.
    peers: HashMap<IpAddr, Vec<QpId>>,
    async_events: VecDeque<AsyncEvent>,
    cq_events: VecDeque<CqId>,
    port_state: PortState,
    is_removed: bool,
    agents: Agents,
    /// Completion queues whose events wait for further completions, by the time at which they come.
    moderated: BTreeSet<(Instant, CqId)>,
    /// Queue pairs that may have something to send.
    ready: VecDeque<QpId>,
    /// Headers of the last answers of queue pairs that have ended, and where they go.
    last_answers: VecDeque<(Peer, HeaderBuf)>,
    timers: BinaryHeap<Reverse<(Instant, QpId)>>,
    /// Numbering of connected peers' packets, by address and source port.
    verifiers: HashMap<(IpAddr, rx::FlowPort), IcrcVerifier>,
    /// The ports of each peer among them, the oldest first.
    verified_ports: HashMap<IpAddr, VecDeque<rx::FlowPort>>,
    counters: NicCounters,
    /// Counters of closed connections.
    past: RcCounters,
    pub(in crate::roce) cm: CmAgent,
    /// Reused by every call into a queue pair.
    out: Vec<RcEvent>,
    tx: TxPacket,
}

impl std::fmt::Debug for Nic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nic")
            .field("locals", &self.locals)
            .field("qps", &self.qps.len())
            .finish_non_exhaustive()
    }
}

impl Nic {
    /// A device. `now` is when it begins to be.
    #[must_use]
    pub fn new(config: NicConfig, now: Instant) -> Self {
        let limits = config.limits;
        // All randomness comes from the one seed, drawn in this order, so that a simulation with
        // the same seed sends the same packets.
        let mut random = ChaCha20Rng::from_seed(config.seed);
        let mut key_seed = [0; 16];
        random.fill_bytes(&mut key_seed);
        let mrs = MrTable::new(limits.max_mr, limits.max_fast_reg_segments, key_seed);
        let mut cm_seed = [0; 32];
        random.fill_bytes(&mut cm_seed);
        let worker = (config.worker_index, config.worker_bits);
        let guid = device_guid(config.addr);
        Self {
            cm: CmAgent::new(
                CmConfig {
                    checks_gids: config.wire == Wire::Network,
                    ..CmAgent::cm_config(guid, limits.max_cm_ids)
                },
                limits.max_cm_ids,
                worker,
                cm_seed,
            ),
            locals: config
                .addrs()
                .map(|addr| SocketAddr::new(addr, ROCE_PORT))
                .collect(),
            to_strangers: SocketAddr::new(config.addr, ROCE_PORT),
            attr: config.device_attr(),
            start: now,
            now,
            own_way: None,
            has_datagrams: false,
            pds: Table::new("protection domain", limits.max_pd),
            mrs,
            faults: fault::count(),
            cqs: Table::new("completion queue", limits.max_cq),
            srqs: Table::new("shared receive queue", limits.max_srq),
            qps: Table::new("queue pair", limits.max_qp),
            ahs: Table::new("address handle", limits.max_ah),
            xrcds: Table::new("XRC domain", limits.max_pd),
            by_srqn: QpnMap::default(),
            // Packets find their worker by their queue pair alone.
            srqns: QpnAllocator::new(0, 0),
            by_qpn: QpnMap::default(),
            qpns: QpnAllocator::new(config.worker_index, config.worker_bits),
            gsi: None,
            groups: Vec::new(),
            left_groups: Vec::new(),
            peers: HashMap::new(),
            async_events: VecDeque::new(),
            cq_events: VecDeque::new(),
            port_state: PortState::Active,
            is_removed: false,
            agents: Agents::default(),
            moderated: BTreeSet::new(),
            ready: VecDeque::new(),
            last_answers: VecDeque::new(),
            timers: BinaryHeap::new(),
            verifiers: HashMap::new(),
            verified_ports: HashMap::new(),
            counters: NicCounters::default(),
            past: RcCounters::default(),
            out: Vec::with_capacity(256),
            tx: TxPacket::default(),
            random,
            config,
        }
    }

    /// Configuration of the NIC.
    #[must_use]
    pub fn config(&self) -> &NicConfig {
        &self.config
    }

    /// Changes the largest path MTU of new connections. Those that exist keep theirs, which a queue
    /// pair cannot change while it is connected (IBTA 11.2.5.2).
    pub fn set_mtu(&mut self, mtu: Mtu) {
        self.config.mtu = mtu;
    }

    /// From where messages go to addresses that may be made up.
    pub(in crate::roce) fn stranger_addr(&self) -> SocketAddr {
        self.to_strangers
    }

    /// Makes messages to addresses that may be made up leave from another port, which the ICRC
    /// covers.
    pub(in crate::roce) fn set_stranger_port(&mut self, port: u16) {
        self.to_strangers.set_port(port);
    }

    /// Returns whether the IP headers of received packets are of interest to a user.
    pub(in crate::roce) fn has_datagrams(&self) -> bool {
        self.has_datagrams
    }

    /// Keeps packets to the device's own address, for [`Nic::receive_own`], from now on. Those to
    /// another worker at this address are sent as before.
    pub(in crate::roce) fn keep_own_packets(&mut self, max_segments: usize) {
        self.own_way = Some(OwnWay {
            addrs: self.locals.clone(),
            worker_index: self.config.worker_index,
            worker_bits: self.config.worker_bits,
            packets: Some(Box::new(OwnPackets {
                batch: TxBatch::new(max_segments),
                train: Vec::new(),
            })),
        });
    }

    /// Whether packets to queue pair `qpn` at an address do not leave the device.
    fn keeps(&self, dst: SocketAddr, qpn: Qpn) -> bool {
        let own = self.own_way.as_ref();
        own.is_some_and(|own| own.takes(dst, qpn))
    }

    /// Its first address and the port of RoCEv2.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.locals[0]
    }

    /// All its addresses, in the order of the GID table.
    #[must_use]
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.locals
    }

    /// Counters since the start.
    #[must_use]
    pub fn counters(&self) -> &NicCounters {
        &self.counters
    }

    /// Counters of all its connections together, closed ones included. Looks at every
    /// queue pair.
    #[must_use]
    pub fn rc_counters(&self) -> RcCounters {
        let mut sum = self.past;
        for (_, qp) in self.qps.iter() {
            if let Machine::Rc(rc) | Machine::Xrc(rc) = &qp.machine {
                config::add_rc(&mut sum, rc.counters());
            }
        }
        sum
    }

    /// Counters of its connection manager.
    #[must_use]
    pub fn cm_counters(&self) -> crate::cm::CmCounters {
        self.cm.counters()
    }

    /// Numbers of its objects.
    #[must_use]
    pub fn usage(&self) -> NicUsage {
        NicUsage {
            qps: self.qps.len(),
            cqs: self.cqs.len(),
            mrs: self.mrs.len(),
            pds: self.pds.len(),
            cm_ids: self.cm.id_count(),
        }
    }

    /// Queue pairs that exist.
    #[must_use]
    pub fn qp_count(&self) -> usize {
        self.qps.len()
    }

    /// Sets the time, for calls that have no such argument.
    pub fn set_now(&mut self, now: Instant) {
        // Time never goes back: a caller may have taken its time before the last call.
        self.now = self.now.max(now);
    }

    /// The latest time that it was given.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Time of the device's clock, in nanoseconds, and the same since the Unix epoch.
    #[must_use]
    pub fn clock(&self) -> (u64, Duration) {
        let time = self.now.duration_since(self.start);
        (time.as_nanos() as u64, self.config.wall_start + time)
    }

    /// The generator behind everything that must not be guessed.
    pub(in crate::roce) fn random(&mut self) -> &mut ChaCha20Rng {
        &mut self.random
    }

    fn raise(&mut self, event: AsyncEvent) {
        // One entry for each object and kind. So a peer cannot make the queue grow, and no event
        // is lost.
        if !self.async_events.contains(&event) {
            self.async_events.push_back(event);
        }
    }

    fn fire(&mut self, cq: CqId) {
        if !self.cq_events.contains(&cq) {
            self.cq_events.push_back(cq);
        }
    }
}
