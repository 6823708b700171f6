//! Configuration and counters of a device.

use std::hash::Hasher as _;
use std::iter;
use std::net::IpAddr;
use std::time::Duration;

use fnv::FnvHasher;

use super::rate::{MAX_RATE, MIN_RATE};
use crate::rc::RcCounters;
use crate::rdmap::RdmapCounters;
use crate::uc::UcCounters;
use crate::verbs::{DeviceAttr, Mtu, VerbsError};

/// Limits of a device's tables and queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicLimits {
    /// Number of protection domains.
    pub max_pd: u32,
    /// Memory regions and windows; rounded up to a power of two.
    pub max_mr: u32,
    /// Segments of a fast registration.
    pub max_fast_reg_segments: u32,
    /// Number of completion queues.
    pub max_cq: u32,
    /// Entries of a completion queue.
    pub max_cqe: u32,
    /// Number of completion vectors.
    pub comp_vectors: u32,
    /// Number of queue pairs.
    pub max_qp: u32,
    /// Requests of a queue.
    pub max_qp_wr: u32,
    /// Scatter-gather entries of a request.
    pub max_sge: u32,
    /// Inline data of a request, in bytes.
    pub max_inline: u32,
    /// Number of shared receive queues.
    pub max_srq: u32,
    /// Requests of a shared receive queue.
    pub max_srq_wr: u32,
    /// Incoming READs and atomics of a queue pair.
    pub max_qp_rd_atom: u8,
    /// Outgoing READs and atomics of a queue pair.
    pub max_qp_init_rd_atom: u8,
    /// Number of address handles.
    pub max_ah: u32,
    /// Multicast groups with queue pairs.
    pub max_mcast_grp: u32,
    /// Queue pairs of a multicast group.
    pub max_mcast_qp_attach: u32,
    /// Connected queue pairs towards one peer address.
    pub max_qps_per_peer: u32,
    /// Identifiers of the RDMA CM.
    pub max_cm_ids: u32,
}

impl Default for NicLimits {
    fn default() -> Self {
        Self {
            max_pd: 4096,
            max_mr: 1 << 14,
            max_fast_reg_segments: 512,
            max_cq: 4096,
            max_cqe: 1 << 17,
            comp_vectors: 8,
            max_qp: 4096,
            max_qp_wr: 1 << 14,
            max_sge: 32,
            max_inline: 512,
            max_srq: 256,
            max_srq_wr: 1 << 15,
            max_qp_rd_atom: 32,
            max_qp_init_rd_atom: 32,
            max_ah: 1024,
            max_mcast_grp: 64,
            max_mcast_qp_attach: 64,
            max_qps_per_peer: 1024,
            max_cm_ids: 8192,
        }
    }
}

/// What carries the packets of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// A network: packets have an ICRC, and a peer is named by its IP address, which is also its
    /// GID.
    Network,
    /// Memory of this host. Packets need no ICRC. A peer is named by the link that it is reached
    /// over; its messages do not have that name, since each end has its own for a link.
    Links,
    /// A stream of bytes for each queue pair, which is a reliable connection of iWARP. There are no
    /// packets, and no other queue pairs.
    Streams,
}

/// Configuration of a device.
#[derive(Clone, Debug)]
pub struct NicConfig {
    /// Address of the NIC, on UDP port 4791.
    pub addr: IpAddr,
    /// Further addresses: the GID table has them behind the first one. Queue pairs have paths from
    /// and to them; the connection manager makes its connections at the first.
    pub other_addrs: Vec<IpAddr>,
    /// Name of the provider.
    pub provider: &'static str,
    /// Largest path MTU that is agreed to.
    pub mtu: Mtu,
    /// Number of the worker that has this NIC.
    pub worker_index: u32,
    /// Low bits of queue-pair numbers and communication ids that name the worker.
    pub worker_bits: u8,
    /// From where all its random numbers come. Secret.
    pub seed: [u8; 32],
    /// Bytes that a queue pair may have on the way in any case.
    pub max_inflight_bytes: u32,
    /// Bytes that the queue pairs with one peer may have on the way together. Each may have an
    /// equal share of them, if that is more than [`NicConfig::max_inflight_bytes`].
    pub peer_inflight_bytes: u32,
    /// Time since the Unix epoch at which the device is made, for the times of completions.
    pub wall_start: Duration,
    /// What carries its packets.
    pub wire: Wire,
    /// Limits on the objects of the NIC.
    pub limits: NicLimits,
}

impl NicConfig {
    /// A device at `addr` with the default limits.
    #[must_use]
    pub fn new(addr: IpAddr, seed: [u8; 32]) -> Self {
        Self {
            addr,
            other_addrs: Vec::new(),
            provider: "roce",
            mtu: Mtu::Mtu4096,
            worker_index: 0,
            worker_bits: 0,
            seed,
            max_inflight_bytes: 128 * 1024,
            peer_inflight_bytes: 0,
            wall_start: Duration::ZERO,
            wire: Wire::Network,
            limits: NicLimits::default(),
        }
    }

    /// All its addresses, in the order of the GID table.
    pub fn addrs(&self) -> impl Iterator<Item = IpAddr> {
        iter::once(self.addr).chain(self.other_addrs.iter().copied())
    }

    /// Whether packets carry an ICRC, which is checked. Otherwise the field is zero.
    #[must_use]
    pub fn has_icrc(&self) -> bool {
        self.wire == Wire::Network
    }

    /// Whether the device has the services of packets: all but reliable connections.
    ///
    /// # Errors
    /// [`VerbsError::Unsupported`] by this name.
    pub(super) fn check_packets(&self, what: &'static str) -> Result<(), VerbsError> {
        match self.wire {
            Wire::Network | Wire::Links => Ok(()),
            Wire::Streams => Err(VerbsError::Unsupported(what)),
        }
    }

    pub(super) fn device_attr(&self) -> DeviceAttr {
        let l = &self.limits;
        DeviceAttr {
            name: format!("{}-{}", self.provider, self.addr),
            provider: self.provider,
            node_guid: device_guid(self.addr),
            max_pd: l.max_pd,
            max_mr: l.max_mr,
            max_mr_size: u64::MAX,
            // They are in the table of the regions.
            max_mw: l.max_mr,
            on_demand: true,
            max_fast_reg_segments: l.max_fast_reg_segments,
            // Segments need no page alignment or equal lengths: the key table looks them up one
            // by one.
            sg_gaps: true,
            reports_invalidation: true,
            max_cq: l.max_cq,
            max_cqe: l.max_cqe,
            comp_vectors: l.comp_vectors,
            max_qp: l.max_qp,
            max_qp_wr: l.max_qp_wr,
            max_sge: l.max_sge,
            max_inline: l.max_inline,
            max_srq: l.max_srq,
            max_srq_wr: l.max_srq_wr,
            max_qp_rd_atom: l.max_qp_rd_atom,
            max_qp_init_rd_atom: l.max_qp_init_rd_atom,
            max_ah: if self.wire == Wire::Streams {
                0
            } else {
                l.max_ah
            },
            max_mcast_grp: if self.has_icrc() { l.max_mcast_grp } else { 0 },
            max_mcast_qp_attach: l.max_mcast_qp_attach,
            min_rate_kbps: if self.wire == Wire::Streams {
                0
            } else {
                MIN_RATE
            },
            max_rate_kbps: if self.wire == Wire::Streams {
                0
            } else {
                MAX_RATE
            },
            ports: 1,
            path_migration: self.wire == Wire::Network,
        }
    }
}

/// The GUID of a device at an address: locally administered, the same in every run and for every
/// worker, different for different addresses (FNV-1a of the address).
#[must_use]
pub fn device_guid(addr: IpAddr) -> u64 {
    let bytes = match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let mut hash = FnvHasher::default();
    hash.write(&bytes);
    // As in an EUI-64: not a group, and locally administered.
    hash.finish() & !(0x03 << 56) | 0x02 << 56
}

/// Counters of a device since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicCounters {
    /// Packets that came in.
    pub rx_packets: u64,
    /// Bytes of the packets received.
    pub rx_bytes: u64,
    /// Number of packets handed out to be sent.
    pub tx_packets: u64,
    /// Bytes of the packets handed out.
    pub tx_bytes: u64,
    /// Packets whose structure is wrong.
    pub rx_malformed: u64,
    /// Packets whose ICRC is wrong.
    pub rx_icrc_errors: u64,
    /// Packets for a queue pair that does not exist, or is not of the packet's kind.
    pub rx_unknown_qp: u64,
    /// Packets that came from another address than the queue pair's peer.
    pub rx_wrong_source: u64,
    /// Connections that have taken their alternate path.
    pub migrations: u64,
    /// Packets of another partition.
    pub rx_wrong_pkey: u64,
    /// MADs without a taker.
    pub rx_dropped_mads: u64,
    /// Packets to multicast groups among those that came in.
    pub rx_multicast: u64,
    /// Packets to multicast groups among those handed out.
    pub tx_multicast: u64,
    /// Completions lost because their queue was full.
    pub cq_overruns: u64,
    /// Queue pairs refused because their peer has too many.
    pub refused_qps: u64,
}

/// Numbers of a device's objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicUsage {
    /// Number of queue pairs.
    pub qps: usize,
    /// Number of completion queues.
    pub cqs: usize,
    /// Memory regions, those for fast registration included.
    pub mrs: usize,
    /// Number of protection domains.
    pub pds: usize,
    /// Identifiers of the RDMA CM, listeners included.
    pub cm_ids: usize,
}

/// Counters of a queue pair since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCounters {
    /// Counters of a reliable connection; zero on other queue pairs.
    pub rc: RcCounters,
    /// Counters of an unreliable connection; zero on other queue pairs.
    pub uc: UcCounters,
    /// Counters of a connection over a stream; zero on other queue pairs.
    pub rdmap: RdmapCounters,
    /// Packets for it that came from a wrong address.
    pub wrong_source: u64,
    /// Datagrams that were lost at the queue pair.
    pub dropped_datagrams: u64,
}

/// Adds what a queue pair has counted to a sum.
pub(super) fn add_rc(sum: &mut RcCounters, c: &RcCounters) {
    macro_rules! add {
        ($($field:ident)*) => { $(sum.$field += c.$field;)* };
    }
    add!(tx_packets tx_bytes rx_packets rx_bytes retransmits timeouts implied_naks rx_nak_sequence
        rx_rnr_naks rx_nak_invalid rx_nak_access rx_nak_operation tx_nak_sequence tx_rnr_naks
        tx_nak_invalid tx_nak_access tx_nak_operation rx_marked tx_cnps rx_cnps duplicates out_of_order stale_responses
        dropped);
}
