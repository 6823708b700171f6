//! The device without the socket: objects, queue pairs, received and sent packets, timers.
//!
//! A [`Nic`] must be driven by its owner:
//!
//! ```text
//! nic.handle_datagram(now, src, segment, bytes)   // received packets
//! nic.handle_timeouts(now)                        // after nic.deadline()
//! nic.poll_transmit(now, &mut batch, budget)      // packets to send
//! nic.poll_async_event(), nic.poll_cq(…), …       // results for the user
//! ```
//!
//! | module | description |
//! | --- | --- |
//! | `config` | [`NicConfig`], [`NicLimits`], and counters |
//! | `agents` | responses to MADs: device information and port counters |
//! | `hw_counters` | counters with their Linux names |
//! | `objects` | protection domains, completion queues, shared receive queues, address handles |
//! | `qpn` | allocates queue pair numbers |
//! | `xrc` | XRC domains, their shared receive queues and received packets |
//! | `qp` | creates, modifies and destroys queue pairs, posts work requests |
//! | `mcast` | multicast groups |
//! | `port` | port state and device removal |
//! | `migration` | alternate paths of connections |
//! | `rx` | dispatches received packets |
//! | `tx` | collects packets to send, and handles timers |
//! | `rate` | rate limits for queue pairs |
//! | `stream` | connections over byte streams, where the owner transfers the data |
//! | [`rdma_cm`] | RDMA CM calls and messages |
//!
//! # Invariants
//! - A packet must not change any state before its destination, source address, partition key and
//!   ICRC have been verified. After that, the queue pair will check the sequence number, keys,
//!   access rights and ranges.
//! - Timers and the transmit queue refer to queue pairs using handles with a generation, so they
//!   cannot be used after the queue pair has been destroyed (CVE-2026-45910).
//! - Queue pairs send packets in round-robin order, up to [`TURN`] packets at a time.
//!
//! # Bounds
//! The size of each table is set in [`NicLimits`]. Event queues contain a single entry per object
//! and event type. A peer address can have up to [`NicLimits::max_qps_per_peer`] queue pairs. For
//! each of these queue pairs, we store the packet numbering of up to [`PORTS_PER_QP`] source ports,
//! so that a peer can't evict the entries of another peer. Nothing is stored for strangers.
//!
//! # Addresses
//! A device can have multiple addresses, which are its GIDs ([`NicConfig::other_addrs`]). The
//! address vector contains the local address of a path ([`AhAttr::sgid_index`]), and a connection
//! only accepts packets for this address. Multicast groups and the connection manager use the first
//! address.
//!
//! Not implemented: multiple ports or partitions.

mod agents;
pub mod batch;
mod breakage;
mod config;
pub mod cq;
pub(crate) mod delegate;
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
pub mod srq;
mod stream;
#[cfg(test)]
mod tests;
mod tx;
pub mod ud;
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
use crate::nic::batch::TxBatch;
use crate::nic::cq::Cq;
use crate::nic::srq::Srq;
use crate::nic::ud::UdQp;
use crate::rc::{RcCounters, RcEvent, RcQp, RecvQueue, TxPacket};
use crate::rdmap::RdmapQp;
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

/// Max number of packets sent by a QP before the next QP can send.
pub const TURN: usize = 64;

/// Max number of queued acknowledgements for QPs which have been destroyed. Any more will be
/// dropped.
const MAX_LAST_ANSWERS: usize = 1024;

/// Number of source ports per connected QP for which we store the identification pattern. Linux
/// uses one port per QP.
const PORTS_PER_QP: usize = 4;

#[derive(Debug, Default)]
struct Pd {
    /// Number of QPs, SRQs, address handles and memory regions.
    users: u32,
}

#[derive(Debug)]
struct Ah {
    pd: PdId,
    attr: AhAttr,
}

#[derive(Debug, Default)]
struct Xrcd {
    /// Number of QPs and SRQs.
    users: u32,
}

#[derive(Debug)]
enum Machine {
    Rc(Box<RcQp>),
    /// Initiator or target of an extended reliable connection.
    Xrc(Box<RcQp>),
    Uc(Box<UcQp>),
    Ud(Box<UdQp>),
    /// Connection over a byte stream.
    Stream(Box<RdmapQp>),
}

/// Path used for packets of a connected QP.
#[derive(Clone, Copy, Debug)]
struct Peer {
    addr: SocketAddr,
    /// Index of the local address.
    from: u8,
    flow: IcrcFlow,
    /// Type of service, without the ECN bits.
    tos: u8,
    /// Set if this device is its own peer, so that packets don't leave the device.
    is_own: bool,
}

/// Loopback path for packets sent to a local device address.
#[derive(Debug)]
struct OwnWay {
    addrs: Box<[SocketAddr]>,
    worker_index: u32,
    worker_bits: u8,
    /// `None` while these packets are being received.
    packets: Option<Box<OwnPackets>>,
}

#[derive(Debug)]
struct OwnPackets {
    batch: TxBatch,
    /// Contiguous buffer for a train of packets, as it would be received from a socket.
    train: Vec<u8>,
}

#[derive(Debug)]
struct Qp {
    qpn: u32,
    pd: PdId,
    qp_type: QpType,
    machine: Machine,
    /// Receive queue. If an SRQ is used, the capacity is zero.
    rq: RecvQueue,
    /// SRQ. For an XRC target, this is the queue used by the last request.
    srq: Option<SrqId>,
    xrcd: Option<XrcdId>,
    send_cq: CqId,
    recv_cq: CqId,
    attr: QpAttr,
    peer: Option<Peer>,
    /// Path used after a migration.
    alternate: Option<Box<Alternate>>,
    mig_state: PathMigState,
    /// Set if the owner requested an event when the send queue is drained.
    notifies_drain: bool,
    /// UDP source port of the last in-sequence packet from the peer.
    source_port: Option<u16>,
    /// Set after accepting a connection, until the peer uses it.
    awaits_first_packet: bool,
    /// Set if the QP is waiting to send.
    is_queued: bool,
    /// Set if multicast packets sent by this QP should not be looped back to it.
    blocks_own_mcast: bool,
    limiter: Option<Box<rate::Limiter>>,
    /// Time of the valid entry in the timer heap.
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
    /// Returns whether packets to QP `qpn` at `dst` are handled by this device.
    fn accepts(&self, dst: SocketAddr, qpn: Qpn) -> bool {
        let is_ours = match qpn {
            // For QP1, the worker depends on the message.
            Qpn::GSI => self.worker_bits == 0,
            _ => qpn.value() & ((1 << self.worker_bits) - 1) == self.worker_index,
        };
        is_ours && self.addrs.contains(&dst)
    }
}

/// The device. See the [module](self) documentation for how to use it.
pub struct Nic {
    config: NicConfig,
    /// Device addresses in GID table order.
    locals: Box<[SocketAddr]>,
    /// Source address for messages to unverified addresses.
    to_strangers: SocketAddr,
    attr: DeviceAttr,
    /// Creation time, used as the base of the device clock.
    start: Instant,
    now: Instant,
    random: ChaCha20Rng,
    own_way: Option<OwnWay>,
    /// Set once a datagram QP has been created, since its receives include the IP header.
    has_datagrams: bool,
    pds: Table<PdId, Pd>,
    mrs: MrTable,
    /// Number of failed memory accesses in this process already reported to the regions.
    faults: u64,
    cqs: Table<CqId, Cq>,
    srqs: Table<SrqId, Srq>,
    qps: Table<QpId, Qp>,
    ahs: Table<AhId, Ah>,
    xrcds: Table<XrcdId, Xrcd>,
    /// XRC SRQs by number.
    by_srqn: QpnMap<SrqId>,
    srqns: QpnAllocator,
    by_qpn: QpnMap<QpId>,
    qpns: QpnAllocator,
    /// QP1 of the application, if created.
    gsi: Option<QpId>,
    groups: Vec<mcast::Group>,
    /// Groups that the device owner needs to leave.
    left_groups: Vec<IpAddr>,
    /// QPs connected to each peer address.
    peers: HashMap<IpAddr, Vec<QpId>>,
    async_events: VecDeque<AsyncEvent>,
    cq_events: VecDeque<CqId>,
    port_state: PortState,
    is_removed: bool,
    agents: Agents,
    /// CQs with a delayed event, ordered by the time when it expires.
    moderated: BTreeSet<(Instant, CqId)>,
    /// QPs that may have something to send.
    ready: VecDeque<QpId>,
    /// Headers and destinations of the last acknowledgements from destroyed QPs.
    last_answers: VecDeque<(Peer, HeaderBuf)>,
    timers: BinaryHeap<Reverse<(Instant, QpId)>>,
    /// Packet numbering of connected peers, by address and source port.
    verifiers: HashMap<(IpAddr, rx::FlowPort), IcrcVerifier>,
    /// Source ports of each peer in this map, oldest first.
    verified_ports: HashMap<IpAddr, VecDeque<rx::FlowPort>>,
    counters: NicCounters,
    /// Sum of the counters of closed connections.
    past: RcCounters,
    pub(crate) cm: CmAgent,
    /// Event buffer, reused for each QP call.
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
    /// Creates a device. `now` is the current time.
    #[must_use]
    pub fn new(config: NicConfig, now: Instant) -> Self {
        let limits = config.limits;
        // All random values are generated from the same seed in this order, so that a simulation
        // with this seed always sends the same packets.
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
            // Packets are steered to workers using the QP number only.
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

    /// Returns the NIC configuration.
    #[must_use]
    pub fn config(&self) -> &NicConfig {
        &self.config
    }

    /// Changes the maximum path MTU for new connections. Existing connections keep their current
    /// value, because the path MTU of a connected QP can't be changed (IBTA 11.2.5.2).
    pub fn set_mtu(&mut self, mtu: Mtu) {
        self.config.mtu = mtu;
    }

    /// Returns the source address for messages to unverified addresses.
    pub(crate) fn stranger_addr(&self) -> SocketAddr {
        self.to_strangers
    }

    /// Changes the source port for messages to unverified addresses, which is covered by the ICRC.
    pub(crate) fn set_stranger_port(&mut self, port: u16) {
        self.to_strangers.set_port(port);
    }

    /// Returns whether a user needs the IP headers of received packets.
    pub(crate) fn has_datagrams(&self) -> bool {
        self.has_datagrams
    }

    /// Enables loopback of packets sent to the device's own address, which will be received using
    /// [`Nic::receive_own`]. Packets to a different worker at this address are not affected.
    pub(crate) fn keep_own_packets(&mut self, max_segments: usize) {
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

    /// Returns whether packets to QP `qpn` at `dst` should be looped back.
    fn keeps(&self, dst: SocketAddr, qpn: Qpn) -> bool {
        let own = self.own_way.as_ref();
        own.is_some_and(|own| own.accepts(dst, qpn))
    }

    /// Returns the first address with the RoCEv2 port.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.locals[0]
    }

    /// Returns all addresses in GID table order.
    #[must_use]
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.locals
    }

    /// Returns the counters since the device was created.
    #[must_use]
    pub fn counters(&self) -> &NicCounters {
        &self.counters
    }

    /// Returns the sum of the counters of all connections, including closed ones. This needs to
    /// iterate over all QPs.
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

    /// Returns the counters of the connection manager.
    #[must_use]
    pub fn cm_counters(&self) -> crate::cm::CmCounters {
        self.cm.counters()
    }

    /// Returns the number of objects of each type.
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

    /// Returns the current number of QPs.
    #[must_use]
    pub fn qp_count(&self) -> usize {
        self.qps.len()
    }

    /// Sets the current time for calls without a time parameter.
    pub fn set_now(&mut self, now: Instant) {
        // Time must not go backwards: the caller may have read the clock before the previous call.
        self.now = self.now.max(now);
    }

    /// Returns the current time, as last set.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Returns the device clock in nanoseconds, and the same time relative to the Unix epoch.
    #[must_use]
    pub fn clock(&self) -> (u64, Duration) {
        let time = self.now.duration_since(self.start);
        (time.as_nanos() as u64, self.config.wall_start + time)
    }

    /// Returns the random number generator used for all values that must not be predictable.
    pub(crate) fn random(&mut self) -> &mut ChaCha20Rng {
        &mut self.random
    }

    fn raise(&mut self, event: AsyncEvent) {
        // Only store a single entry per object and event type. This way, a peer cannot make the
        // queue grow, and no event is lost.
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
