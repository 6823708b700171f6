//! Device configuration and counters.

use std::hash::Hasher as _;
use std::iter;
use std::net::IpAddr;
use std::time::Duration;

use fnv::FnvHasher;

use super::rate::{MAX_RATE, MIN_RATE};
use super::ud::MAX_UD_SGE;
use crate::rc::RcCounters;
use crate::rdmap::RdmapCounters;
use crate::uc::UcCounters;
use crate::verbs::{
    DeviceAttr, GuardCap, IntegrityCap, Mtu, ProtectionCap, QpAttr, QpCap, QpType, VerbsError,
};

/// The only port number.
pub(super) const PORT: u8 = 1;

/// Limits for the tables and queues of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicLimits {
    /// Max number of protection domains.
    pub max_pd: u32,
    /// Max number of memory regions and windows, rounded up to a power of two.
    pub max_mr: u32,
    /// Max number of segments in a fast registration.
    pub max_fast_reg_segments: u32,
    /// Max number of CQs.
    pub max_cq: u32,
    /// Max number of entries in a CQ.
    pub max_cqe: u32,
    /// Number of completion vectors.
    pub comp_vectors: u32,
    /// Max number of QPs.
    pub max_qp: u32,
    /// Max number of work requests in a queue.
    pub max_qp_wr: u32,
    /// Max number of scatter-gather entries per request.
    pub max_sge: u32,
    /// Max inline data size per request in bytes.
    pub max_inline: u32,
    /// Max number of SRQs.
    pub max_srq: u32,
    /// Max number of work requests in an SRQ.
    pub max_srq_wr: u32,
    /// Max number of incoming READs and atomics per QP.
    pub max_qp_rd_atom: u8,
    /// Max number of outgoing READs and atomics per QP.
    pub max_qp_init_rd_atom: u8,
    /// Max number of address handles.
    pub max_ah: u32,
    /// Max number of multicast groups with attached QPs.
    pub max_mcast_grp: u32,
    /// Max number of QPs attached to a multicast group.
    pub max_mcast_qp_attach: u32,
    /// Max number of QPs connected to the same peer address.
    pub max_qps_per_peer: u32,
    /// Max number of RDMA CM ids.
    pub max_cm_ids: u32,
    /// Reports [`DeviceAttr::registered_reads`], so that a simulation has an iWARP adapter.
    pub registered_reads: bool,
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
            registered_reads: false,
        }
    }
}

impl NicLimits {
    /// Checks the queue sizes of a QP.
    pub(super) fn check_cap(&self, cap: &QpCap, qp_type: QpType) -> Result<(), VerbsError> {
        // For datagrams, the scatter list has a fixed position in the queue entry.
        let sge = match qp_type {
            QpType::Ud | QpType::Gsi => self.max_sge.min(MAX_UD_SGE as u32),
            _ => self.max_sge,
        };
        if cap.max_send_wr > self.max_qp_wr || cap.max_recv_wr > self.max_qp_wr {
            return Err(VerbsError::InvalidParameter("queue depth"));
        }
        if cap.max_send_sge > sge || cap.max_recv_sge > self.max_sge {
            return Err(VerbsError::InvalidParameter("scatter-gather entries"));
        }
        if cap.max_inline > self.max_inline {
            return Err(VerbsError::InvalidParameter("inline bytes"));
        }
        Ok(())
    }
}

/// Type of wire used by the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Network: packets have an ICRC, and a peer is identified by its IP address, which is also
    /// used as its GID.
    Network,
    /// Memory of this host. Packets don't need an ICRC. A peer is identified by the link used to
    /// reach it. Messages don't contain this name, since each side of a link uses its own name.
    Links,
    /// A separate byte stream for each QP (iWARP reliable connections). There are no packets, and
    /// other types of QPs are not supported.
    Streams,
}

/// Device configuration.
#[derive(Clone, Debug)]
pub struct NicConfig {
    /// NIC address. The UDP port is 4791.
    pub addr: IpAddr,
    /// Additional addresses, which follow the first address in the GID table. They can be used as
    /// source or destination of QP paths, but the connection manager only uses the first address to
    /// establish connections.
    pub other_addrs: Vec<IpAddr>,
    /// Provider name.
    pub provider: &'static str,
    /// Maximum path MTU that will be negotiated.
    pub mtu: Mtu,
    /// Index of the worker that owns this NIC.
    pub worker_index: u32,
    /// Number of low bits in QP numbers and communication ids that contain the worker index.
    pub worker_bits: u8,
    /// Seed for all random numbers. Must be kept secret.
    pub seed: [u8; 32],
    /// Number of in-flight bytes that is always allowed for a QP.
    pub max_inflight_bytes: u32,
    /// Maximum number of in-flight bytes for all QPs with the same peer. It is divided equally
    /// between these QPs, unless the result would be less than [`NicConfig::max_inflight_bytes`].
    pub peer_inflight_bytes: u32,
    /// Creation time of the device, relative to the Unix epoch. Used for completion timestamps.
    pub wall_start: Duration,
    /// Type of wire used to send packets.
    pub wire: Wire,
    /// Limits for the objects of the NIC.
    pub limits: NicLimits,
}

impl NicConfig {
    /// Creates a configuration for a device at `addr` with default limits.
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

    /// Returns all addresses in GID table order.
    pub fn addrs(&self) -> impl Iterator<Item = IpAddr> {
        iter::once(self.addr).chain(self.other_addrs.iter().copied())
    }

    /// Returns whether packets need a valid ICRC. Otherwise the field is zero.
    #[must_use]
    pub fn has_icrc(&self) -> bool {
        self.wire == Wire::Network
    }

    /// Checks if the device supports packets, which are required for everything except reliable
    /// connections.
    ///
    /// # Errors
    /// [`VerbsError::Unsupported`] with this name.
    pub(super) fn check_packets(&self, what: &'static str) -> Result<(), VerbsError> {
        match self.wire {
            Wire::Network | Wire::Links => Ok(()),
            Wire::Streams => Err(VerbsError::Unsupported(what)),
        }
    }

    /// Checks the values of QP attributes.
    pub(super) fn check_attr(&self, attr: &QpAttr) -> Result<(), VerbsError> {
        let l = &self.limits;
        // The partition key table and the port table only have a single entry.
        if let Some(index) = attr.pkey_index.filter(|&i| i != 0) {
            return Err(VerbsError::InvalidIndex(index));
        }
        if let Some(port) = attr.port.filter(|&p| p != PORT) {
            return Err(VerbsError::InvalidPort(port));
        }
        // Return an error if a value is too large for its field, because truncating it would change
        // its meaning.
        let within = |value: Option<u32>, max: u32, name| match value {
            Some(v) if v > max => Err(VerbsError::InvalidParameter(name)),
            _ => Ok(()),
        };
        let byte = |v: Option<u8>| v.map(u32::from);
        within(attr.dest_qp, 0x00ff_ffff, "dest_qp")?;
        within(attr.rq_psn, 0x00ff_ffff, "rq_psn")?;
        within(attr.sq_psn, 0x00ff_ffff, "sq_psn")?;
        within(byte(attr.min_rnr_timer), 31, "min_rnr_timer")?;
        within(byte(attr.timeout), 31, "timeout")?;
        within(byte(attr.retry_cnt), 7, "retry_cnt")?;
        within(byte(attr.rnr_retry), 7, "rnr_retry")?;
        within(
            byte(attr.max_dest_rd_atomic),
            l.max_qp_rd_atom.into(),
            "max_dest_rd_atomic",
        )?;
        within(
            byte(attr.max_rd_atomic),
            l.max_qp_init_rd_atom.into(),
            "max_rd_atomic",
        )?;
        // If the packets were larger than the interface MTU, they would all be lost, and the QP
        // would run out of retries.
        if attr.path_mtu.is_some_and(|m| m > self.mtu) {
            return Err(VerbsError::InvalidParameter("path_mtu"));
        }
        Ok(())
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
            // Windows and regions use the same table.
            max_mw: l.max_mr,
            on_demand: true,
            max_fast_reg_segments: l.max_fast_reg_segments,
            // Segments don't need to be page-aligned or have the same length: the key table
            // searches them individually.
            sg_gaps: true,
            reports_invalidation: true,
            integrity: Some(IntegrityCap {
                protection: ProtectionCap::all(),
                guard: GuardCap::all(),
            }),
            max_cq: l.max_cq,
            max_cqe: l.max_cqe,
            comp_vectors: l.comp_vectors,
            max_qp: l.max_qp,
            max_qp_wr: l.max_qp_wr,
            max_sge: l.max_sge,
            max_sge_rd: match l.registered_reads {
                true => 1,
                false => l.max_sge,
            },
            registered_reads: l.registered_reads,
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

/// Returns the GUID for a device address. It is locally administered, the same for each run and
/// each worker, and different addresses get different GUIDs (FNV-1a hash of the address).
#[must_use]
pub fn device_guid(addr: IpAddr) -> u64 {
    let bytes = match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let mut hash = FnvHasher::default();
    hash.write(&bytes);
    // Like an EUI-64, set the flags for a locally administered unicast address.
    hash.finish() & !(0x03 << 56) | 0x02 << 56
}

/// Device counters since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicCounters {
    /// Received packets.
    pub rx_packets: u64,
    /// Bytes in received packets.
    pub rx_bytes: u64,
    /// Sent packets.
    pub tx_packets: u64,
    /// Bytes in sent packets.
    pub tx_bytes: u64,
    /// Malformed packets.
    pub rx_malformed: u64,
    /// Packets with an invalid ICRC.
    pub rx_icrc_errors: u64,
    /// Packets with an unknown QP, or with the wrong service type for this QP.
    pub rx_unknown_qp: u64,
    /// Packets with a source address other than the peer of the QP.
    pub rx_wrong_source: u64,
    /// Connections that have migrated to their alternate path.
    pub migrations: u64,
    /// Packets for other partitions.
    pub rx_wrong_pkey: u64,
    /// MADs dropped because no agent was found.
    pub rx_dropped_mads: u64,
    /// Received multicast packets, also included in the total.
    pub rx_multicast: u64,
    /// Sent multicast packets, also included in the total.
    pub tx_multicast: u64,
    /// Completions lost because the CQ was full.
    pub cq_overruns: u64,
    /// QPs rejected because the peer exceeds its limit.
    pub refused_qps: u64,
}

/// Number of objects of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NicUsage {
    /// QPs.
    pub qps: usize,
    /// CQs.
    pub cqs: usize,
    /// Memory regions, including fast registration regions.
    pub mrs: usize,
    /// Protection domains.
    pub pds: usize,
    /// RDMA CM ids, including listeners.
    pub cm_ids: usize,
}

/// QP counters since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCounters {
    /// Reliable connection counters; zero for any other QP type.
    pub rc: RcCounters,
    /// Unreliable connection counters; zero for any other QP type.
    pub uc: UcCounters,
    /// Stream connection counters; zero for any other QP type.
    pub rdmap: RdmapCounters,
    /// Received packets with a wrong source address.
    pub wrong_source: u64,
    /// Datagrams dropped by the QP.
    pub dropped_datagrams: u64,
}

/// Adds the counters of a QP to a sum.
pub(super) fn add_rc(sum: &mut RcCounters, c: &RcCounters) {
    macro_rules! add {
        ($($field:ident)*) => { $(sum.$field += c.$field;)* };
    }
    add!(tx_packets tx_bytes rx_packets rx_bytes retransmits timeouts implied_naks rx_nak_sequence
        rx_rnr_naks rx_nak_invalid rx_nak_access rx_nak_operation tx_nak_sequence tx_rnr_naks
        tx_nak_invalid tx_nak_access tx_nak_operation rx_marked tx_cnps rx_cnps duplicates out_of_order stale_responses
        dropped);
}
