//! Objects and queue pairs of a device. Packets are received and sent by the [`Nic`](super::Nic),
//! and byte streams by the owner of the device.
//!
//! | module | description |
//! | --- | --- |
//! | `objects` | calls that involve several tables |
//! | `qps` | creates, modifies and destroys queue pairs, posts work requests |
//! | `migration` | alternate paths of connections |
//! | `turn` | completions, events and timers of queue pairs |
//! | `removal` | port state and device removal |
//! | `stream` | connections over byte streams, where the owner transfers the data |
//! | `breakage` | failures for use by the simulator |

mod breakage;
mod migration;
mod objects;
mod qps;
mod removal;
mod stream;
mod turn;

use std::net::SocketAddr;
use std::time::Instant;

use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng as _, SeedableRng};

use super::clock::Clock;
use super::config::{self, NicConfig, NicCounters, NicUsage};
use super::qp::Machine;
use super::tables::{
    AddressHandles, AsyncEvents, CompletionQueues, Groups, MemoryTables, Peers, Port, QueuePairs,
    Schedule, SharedQueues,
};
use crate::cm::CmRoute;
use crate::rc::{RcCounters, RcEvent, TxPacket};
use crate::verbs::{DeviceAttr, Mtu, PortAttr, QpId, VerbsError};
use crate::wire::Qpn;

pub use breakage::Breakage;

/// Path for packets sent to a local device address.
#[derive(Debug)]
pub(super) struct OwnPath {
    addrs: Box<[SocketAddr]>,
    worker_index: u32,
    worker_bits: u8,
}

impl OwnPath {
    /// Returns whether packets to QP `qpn` at `dst` are handled by this device.
    pub(super) fn accepts(&self, dst: SocketAddr, qpn: Qpn) -> bool {
        let is_ours = match qpn {
            // For QP1, the worker depends on the message.
            Qpn::GSI => self.worker_bits == 0,
            _ => qpn.value() & ((1 << self.worker_bits) - 1) == self.worker_index,
        };
        is_ours && self.addrs.contains(&dst)
    }
}

/// Objects and queue pairs of a device. See the [module](self) documentation.
pub struct Device {
    pub(super) config: NicConfig,
    attr: DeviceAttr,
    /// NodeDescription (IBTA 14.2.5.2), which is shown by management programs, by default the name
    /// of the device. At most 64 bytes.
    pub(super) description: String,
    pub(crate) clock: Clock,
    pub(super) random: ChaCha20Rng,
    pub(crate) port: Port,
    pub(crate) memory: MemoryTables,
    pub(crate) cqs: CompletionQueues,
    pub(crate) srqs: SharedQueues,
    pub(crate) ahs: AddressHandles,
    pub(super) qps: QueuePairs,
    pub(crate) groups: Groups,
    pub(crate) events: AsyncEvents,
    pub(super) peers: Peers,
    pub(crate) schedule: Schedule,
    /// Set if packets to the device's own addresses are looped back.
    pub(super) own_path: Option<OwnPath>,
    /// Connections that have migrated, and their current path, until reported to the CM.
    migrated: Vec<(QpId, CmRoute)>,
    /// Set once a datagram QP has been created, since its receives include the IP header.
    has_datagrams: bool,
    is_removed: bool,
    pub(crate) counters: NicCounters,
    /// Sum of the counters of closed connections.
    past: RcCounters,
    /// Event buffer, reused for each QP call.
    pub(super) out: Vec<RcEvent>,
    /// Packet buffer, reused for each packet.
    pub(super) tx: TxPacket,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("locals", &self.port.addrs())
            .field("qps", &self.qps.len())
            .finish_non_exhaustive()
    }
}

impl Device {
    /// Creates a device. `now` is the current time.
    pub(crate) fn new(config: NicConfig, now: Instant) -> Self {
        // All random values are generated from the same seed in this order, so that a simulation
        // with this seed always sends the same packets.
        let mut random = ChaCha20Rng::from_seed(config.seed);
        let mut key_seed = [0; 16];
        random.fill_bytes(&mut key_seed);
        let limits = &config.limits;
        let attr = config.device_attr();
        Self {
            description: attr.name.clone(),
            attr,
            clock: Clock::new(now),
            random,
            port: Port::new(&config),
            memory: MemoryTables::new(limits, key_seed),
            cqs: CompletionQueues::new(&config),
            srqs: SharedQueues::new(limits),
            ahs: AddressHandles::new(limits.max_ah),
            qps: QueuePairs::new(&config),
            groups: Groups::default(),
            events: AsyncEvents::default(),
            peers: Peers::default(),
            schedule: Schedule::default(),
            own_path: None,
            migrated: Vec::new(),
            has_datagrams: false,
            is_removed: false,
            counters: NicCounters::default(),
            past: RcCounters::default(),
            out: Vec::with_capacity(256),
            tx: TxPacket::default(),
            config,
        }
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &NicConfig {
        &self.config
    }

    /// Changes the maximum path MTU for new connections. Existing connections keep their current
    /// value, because the path MTU of a connected QP can't be changed (IBTA 11.2.5.2).
    pub fn set_mtu(&mut self, mtu: Mtu) {
        self.config.mtu = mtu;
    }

    /// Returns the device attributes.
    #[must_use]
    pub fn device_attr(&self) -> &DeviceAttr {
        &self.attr
    }

    pub(crate) fn query_port(&self, port: u8) -> Result<PortAttr, VerbsError> {
        self.port.query(port, self.config.mtu)
    }

    /// Returns whether a user needs the IP headers of received packets.
    pub(crate) fn has_datagrams(&self) -> bool {
        self.has_datagrams
    }

    /// Enables loopback of packets sent to the device's own addresses. Packets to a different
    /// worker at such an address are not affected.
    pub(super) fn keep_own_packets(&mut self) {
        self.own_path = Some(OwnPath {
            addrs: self.port.addrs().into(),
            worker_index: self.config.worker_index,
            worker_bits: self.config.worker_bits,
        });
    }

    /// Returns whether packets to QP `qpn` at `dst` should be looped back.
    pub(super) fn keeps(&self, dst: SocketAddr, qpn: Qpn) -> bool {
        let own = self.own_path.as_ref();
        own.is_some_and(|own| own.accepts(dst, qpn))
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

    /// Returns the number of objects of each type, except for RDMA CM ids.
    #[must_use]
    pub fn usage(&self) -> NicUsage {
        NicUsage {
            qps: self.qps.len(),
            cqs: self.cqs.len(),
            mrs: self.memory.mrs.len(),
            pds: self.memory.pd_count(),
            cm_ids: 0,
        }
    }

    /// Sets the current time for calls without a time parameter.
    #[inline]
    pub fn set_now(&mut self, now: Instant) {
        self.clock.set_now(now);
    }

    /// Returns the current time, as last set.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Returns the next connection that has migrated, and its current path.
    pub(super) fn poll_migrated(&mut self) -> Option<(QpId, CmRoute)> {
        self.migrated.pop()
    }
}
