//! The software NIC without a wire: objects, queue pairs, received and sent packets, timers.
//!
//! A [`Device`] contains the object tables and queue pairs, which are used for all types of wires.
//! iWARP connections use it directly. A [`Nic`] is a device that sends packets, with a connection
//! manager. It must be driven by its owner:
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
//! | `device` | [`Device`]: objects and queue pairs |
//! | `tables` | object tables |
//! | [`cq`], [`srq`], `qp`, [`ud`] | a completion queue, a shared receive queue, a queue pair |
//! | `qpn` | allocates queue pair numbers |
//! | `rate` | rate limits for queue pairs |
//! | `received` | a received packet and its source |
//! | `rx`, `xrc`, `mcast` | dispatches received packets |
//! | `tx`, [`batch`] | collects packets to send |
//! | `agents` | responses to MADs: device information and port counters |
//! | `hw_counters` | counters with their Linux names |
//! | [`rdma_cm`] | RDMA CM calls and messages |
//! | `delegate` | implements the verbs traits for the types that contain a device |
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
//! each of these queue pairs, we store the packet numbering of a few source ports, so that a peer
//! can't evict the entries of another peer. Nothing is stored for strangers.
//!
//! # Addresses
//! A device can have multiple addresses, which are its GIDs ([`NicConfig::other_addrs`]). The
//! address vector contains the local address of a path ([`AhAttr::sgid_index`]), and a connection
//! only accepts packets for this address. Multicast groups and the connection manager use the first
//! address.
//!
//! Not implemented: multiple ports or partitions.
//!
//! [`AhAttr::sgid_index`]: crate::verbs::AhAttr::sgid_index

mod agents;
pub mod batch;
mod clock;
mod config;
pub mod cq;
pub(crate) mod delegate;
mod device;
mod hw_counters;
mod mcast;
mod qp;
mod qpn;
mod rate;
pub mod rdma_cm;
mod received;
mod rx;
pub mod srq;
mod tables;
#[cfg(test)]
mod tests;
mod tx;
pub mod ud;
mod xrc;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use chacha20::rand_core::Rng as _;

use crate::cm::{CmConfig, CmCounters};
use crate::verbs::{
    AltPath, CmError, CmEvent, CmId, CmOption, ConnParam, Gid, PortSpace, QpAttr, QpId, QpInitAttr,
    QpState, QpType, RdmaCm, Verbs, VerbsError,
};
use crate::wire::{Mad, ROCE_PORT};

use agents::Agents;
use batch::TxBatch;
use clock::Clock;
pub use config::{NicConfig, NicCounters, NicLimits, NicUsage, QpCounters, Wire, device_guid};
use delegate::{forward_to_agent, forward_verbs};
pub use device::{Breakage, Device};
pub use hw_counters::HwCounter;
use rdma_cm::CmAgent;
pub use received::IpFields;
pub(crate) use received::LinkPeer;

/// Max number of packets sent by a QP before the next QP can send.
pub const TURN: usize = 64;

/// Borrows the environment of a QP from the fields of its device.
macro_rules! with_env {
    ($device:expr, $qp:ident, $env:ident) => {
        let rq = match $qp.srq.and_then(|srq| $device.srqs.receives(srq)) {
            Some(receives) => receives,
            None => &mut $qp.rq,
        };
        #[allow(unused_mut, reason = "not every user changes it")]
        let mut $env = Env {
            mrs: &mut $device.memory.mrs,
            rq,
            out: &mut $device.out,
        };
    };
}
use with_env;

/// Packets sent to a local device address.
#[derive(Debug)]
struct OwnPackets {
    batch: TxBatch,
    /// Contiguous buffer for a train of packets, as it would be received from a socket.
    train: Vec<u8>,
}

/// A device that sends packets, with its connection manager. See the [module](self) documentation
/// for how to use it.
pub struct Nic {
    pub(crate) device: Device,
    pub(crate) cm: CmAgent,
    agents: Agents,
    /// Source address for messages to unverified addresses.
    to_strangers: SocketAddr,
    /// Packets to be looped back; `None` if this is disabled, and while they are being received.
    own: Option<Box<OwnPackets>>,
}

impl std::fmt::Debug for Nic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nic")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Nic {
    /// Creates a device. `now` is the current time.
    #[must_use]
    pub fn new(config: NicConfig, now: Instant) -> Self {
        let (addr, wire) = (config.addr, config.wire);
        let max_ids = config.limits.max_cm_ids;
        let worker = (config.worker_index, config.worker_bits);
        let mut device = Device::new(config, now);
        let mut cm_seed = [0; 32];
        device.random.fill_bytes(&mut cm_seed);
        let cm_config = CmConfig {
            checks_gids: wire == Wire::Network,
            ..CmAgent::cm_config(device_guid(addr), max_ids)
        };
        Self {
            cm: CmAgent::new(cm_config, max_ids, worker, cm_seed),
            device,
            agents: Agents::default(),
            to_strangers: SocketAddr::new(addr, ROCE_PORT),
            own: None,
        }
    }

    /// Returns the source address for messages to unverified addresses.
    pub(crate) fn stranger_addr(&self) -> SocketAddr {
        self.to_strangers
    }

    /// Changes the source port for messages to unverified addresses, which is covered by the ICRC.
    pub(crate) fn set_stranger_port(&mut self, port: u16) {
        self.to_strangers.set_port(port);
    }

    /// Enables loopback of packets sent to the device's own address, which will be received using
    /// [`Nic::receive_own`]. Packets to a different worker at this address are not affected.
    pub(crate) fn keep_own_packets(&mut self, max_segments: usize) {
        self.device.keep_own_packets();
        self.own = Some(Box::new(OwnPackets {
            batch: TxBatch::new(max_segments),
            train: Vec::new(),
        }));
    }

    /// Returns the counters of the connection manager.
    #[must_use]
    pub fn cm_counters(&self) -> CmCounters {
        self.cm.counters()
    }

    /// Returns the number of objects of each type.
    #[must_use]
    pub fn usage(&self) -> NicUsage {
        NicUsage {
            cm_ids: self.cm.id_count(),
            ..self.device.usage()
        }
    }

    /// Returns whether events from the device or the connection manager are available.
    #[must_use]
    pub fn has_events(&self) -> bool {
        !self.device.events.is_empty() || self.cm.has_events()
    }

    /// Removes the device: flushes all requests, closes all RDMA CM ids and reports this using
    /// events. After this, nothing is sent or received, and timers don't fire.
    pub fn remove(&mut self) {
        if self.device.remove() {
            self.cm.end_ids();
        }
    }

    /// Called when a peer is known to be dead, and not just since it doesn't respond. All
    /// connections, QPs and requests of this peer are closed immediately.
    pub(crate) fn lose_peer(&mut self, now: Instant, peer: IpAddr) {
        self.device.set_now(now);
        self.cm.lose_peer(&mut self.device, peer);
        // This includes QPs which no longer have a connection id.
        let with_peer = |qp: &qp::Qp| qp.peer.is_some_and(|it| it.addr.ip() == peer);
        for qp in self.device.qps.ids(with_peer) {
            self.device.fail_qp(qp);
        }
    }

    /// Passes the new paths of migrated connections to the connection manager.
    fn follow_migrations(&mut self) {
        while let Some((qp, route)) = self.device.poll_migrated() {
            self.cm.migrate_qp(qp, route);
        }
    }
}

impl Verbs for Nic {
    forward_verbs!(device device);

    fn local_mad(&mut self, port: u8, mad: &Mad) -> Result<Option<Mad>, VerbsError> {
        self.device.check_present()?;
        self.agents.process_local(&self.device, port, mad)
    }

    fn modify_qp(&mut self, qp: QpId, attr: &QpAttr) -> Result<(), VerbsError> {
        self.device.check_present()?;
        let modified = self.device.modify_qp(qp, attr);
        self.follow_migrations();
        modified
    }

    fn destroy_qp(&mut self, qp: QpId) -> Result<(), VerbsError> {
        self.device.destroy_qp(qp)?;
        self.cm.forget_qp(qp);
        Ok(())
    }

    /// Attaches a QP to a group, which must have been joined by the owner of the wire. To find out
    /// whether it has to be joined, call [`Device::attach_group`] instead.
    fn attach_mcast(&mut self, qp: QpId, mgid: Gid, _mlid: u16) -> Result<(), VerbsError> {
        self.device.check_present()?;
        self.device.attach_group(qp, mgid).map(drop)
    }

    fn detach_mcast(&mut self, qp: QpId, mgid: Gid, _mlid: u16) -> Result<(), VerbsError> {
        self.device.detach_group(qp, mgid)
    }
}

impl RdmaCm for Nic {
    forward_to_agent! {
        @live create_id_for(space: PortSpace, qp_type: QpType) -> CmId;
        @live bind_addr(id: CmId, addr: SocketAddr) -> ();
        @live resolve_addr(id: CmId, src: Option<SocketAddr>, dst: SocketAddr, timeout: Duration) -> ();
        @live create_cm_qp(id: CmId, init: &QpInitAttr) -> QpId;
        @live listen(id: CmId, backlog: u32) -> ();
        @live connect(id: CmId, param: &ConnParam) -> ();
        @live accept(id: CmId, param: &ConnParam) -> ();
        @live establish(id: CmId) -> ();
        @live reject_ece(id: CmId, private_data: &[u8]) -> ();
        @live redirect(id: CmId, to: IpAddr) -> ();
        @live reject(id: CmId, private_data: &[u8]) -> ();
        @live mra(id: CmId) -> ();
        @live load_alternate_path(id: CmId, path: &AltPath) -> ();
        @live notify_established(id: CmId) -> ();
        @live disconnect(id: CmId) -> ();
        @live join_multicast(id: CmId, group: IpAddr, send_only: bool) -> ();
        destroy_id(id: CmId) -> ();
    }

    fn set_option(&mut self, id: CmId, option: CmOption) -> Result<(), CmError> {
        self.device.check_present()?;
        self.cm.set_option(id, option)
    }

    fn resolve_route(&mut self, id: CmId, timeout: Duration) -> Result<(), CmError> {
        self.device.check_present()?;
        self.cm.resolve_route(id, timeout)
    }

    fn init_qp_attr(&self, id: CmId, state: QpState) -> Result<QpAttr, CmError> {
        self.device.check_present()?;
        self.cm.init_qp_attr(&self.device, id, state)
    }

    fn leave_multicast(&mut self, id: CmId, group: IpAddr) -> Result<(), CmError> {
        self.cm.leave_multicast(id, group)
    }

    fn local_addr(&self, id: CmId) -> Option<SocketAddr> {
        self.cm.local_addr(id)
    }

    fn peer_addr(&self, id: CmId) -> Option<SocketAddr> {
        self.cm.peer_addr(id)
    }

    fn poll_cm_event(&mut self) -> Option<CmEvent> {
        self.cm.poll_event()
    }
}
