//! Capabilities, attributes and states.

use std::net::IpAddr;
use std::time::Duration;

use bitflags::bitflags;
use num_enum::TryFromPrimitive;
use riser_memory::MemSlice;

use super::{
    CqId, Gid, Handle, IntegrityCap, LKey, MrId, MwId, PKey, PathMigState, PdId, QKey, QpId, RKey,
    RemoteAddr, SendOp, Sge, SrqId, XrcdId,
};

bitflags! {
    /// Memory region access rights.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Access: u8 {
        /// The device can write to this region for local requests (receives, READs).
        const LOCAL_WRITE = 1;
        /// A peer can write to this region.
        const REMOTE_WRITE = 2;
        /// A peer can read from this region.
        const REMOTE_READ = 4;
        /// A peer can execute atomics on this region.
        ///
        /// Currently not used.
        const REMOTE_ATOMIC = 8;
        /// Memory windows can be bound to this region.
        ///
        /// Currently not used.
        const MW_BIND = 16;
        /// Use addresses starting at 0 instead of the virtual address.
        ///
        /// Currently not used.
        const ZERO_BASED = 32;
        /// Pages don't need to be mapped before they are used. The software NIC never pins any
        /// memory. If this is set, it will check on each access whether the range is mapped. If
        /// not, the access fails as if it were outside of the region.
        ///
        /// Currently not used.
        const ON_DEMAND = 64;
    }
}

impl Access {
    /// All rights for remote access.
    pub const REMOTE: Self = Self::REMOTE_WRITE
        .union(Self::REMOTE_READ)
        .union(Self::REMOTE_ATOMIC);
}

/// Device capabilities and limits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAttr {
    /// Display name, for example `roce-127.0.0.1`.
    pub name: String,
    /// Provider name: `roce`, `rdma_core`, `shm`, `loopback`.
    pub provider: &'static str,
    /// Node GUID, as used by the CM.
    pub node_guid: u64,
    /// Maximum number of protection domains.
    pub max_pd: u32,
    /// Maximum number of memory regions.
    pub max_mr: u32,
    /// Maximum size of a memory region in bytes.
    pub max_mr_size: u64,
    /// Maximum number of memory windows, or 0 if not supported.
    pub max_mw: u32,
    /// Set if [`Access::ON_DEMAND`] is supported.
    pub on_demand: bool,
    /// Maximum number of segments in a fast registration.
    pub max_fast_reg_segments: u32,
    /// Set if the segments of a fast registration can start and end at any address. Otherwise they
    /// must meet at page boundaries.
    pub sg_gaps: bool,
    /// Set if the completion for a receive contains the key invalidated by the peer. If not
    /// supported, don't request any invalidation from a peer, because you will not be notified when
    /// a region is available again.
    pub reports_invalidation: bool,
    /// Capabilities of integrity regions, or `None` if not supported.
    pub integrity: Option<IntegrityCap>,
    /// Maximum number of completion queues.
    pub max_cq: u32,
    /// Maximum number of entries in a completion queue.
    pub max_cqe: u32,
    /// Number of completion vectors, starting at 0.
    pub comp_vectors: u32,
    /// Maximum number of queue pairs.
    pub max_qp: u32,
    /// Maximum number of requests in a send or receive queue.
    pub max_qp_wr: u32,
    /// Maximum number of scatter/gather entries in a request.
    pub max_sge: u32,
    /// Maximum number of scatter/gather entries in a READ.
    pub max_sge_rd: u32,
    /// Set if the local memory of a READ must be a region with [`Access::REMOTE_WRITE`], as on iWARP
    /// adapters ([`ReadSinks`](crate::rdma_rw::ReadSinks)).
    pub registered_reads: bool,
    /// Maximum size of inline data in bytes.
    pub max_inline: u32,
    /// Maximum number of shared receive queues.
    pub max_srq: u32,
    /// Maximum number of requests in a shared receive queue.
    pub max_srq_wr: u32,
    /// Maximum number of incoming READs and atomics per queue pair (responder resources).
    pub max_qp_rd_atom: u8,
    /// Maximum number of outgoing READs and atomics per queue pair (initiator depth).
    pub max_qp_init_rd_atom: u8,
    /// Maximum number of address handles.
    pub max_ah: u32,
    /// Maximum number of multicast groups used by queue pairs of this device, or 0 if not
    /// supported.
    pub max_mcast_grp: u32,
    /// Maximum number of queue pairs attached to a multicast group.
    pub max_mcast_qp_attach: u32,
    /// Minimum rate limit for a queue pair in kbit/s, or 0 if not supported.
    pub min_rate_kbps: u32,
    /// Maximum rate limit for a queue pair in kbit/s, or 0 if not supported.
    pub max_rate_kbps: u32,
    /// Number of ports, starting at 1.
    pub ports: u8,
    /// Set if connections can use an alternate path ([`QpAttr::alt_path`]).
    pub path_migration: bool,
}

/// Maximum send rate for a queue pair (`ibv_modify_qp_rate_limit(3)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimit {
    /// Maximum rate in kbit/s, including all data from the first header to the ICRC of a RoCE
    /// packet. Use 0 to disable the limit.
    pub rate_kbps: u32,
    /// Maximum burst size in bytes, at least one packet. Use 0 for the device default.
    pub max_burst: u32,
}

/// Attributes used to create a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqInitAttr {
    /// Minimum number of completions that can be stored.
    pub entries: u32,
    /// Completion vector used for events, below [`DeviceAttr::comp_vectors`]. If not set, the
    /// device selects it: devices opened by a process are distributed over the vectors.
    pub vector: Option<u32>,
    /// Enables timestamps. Completions must then be polled using
    /// [`Verbs::poll_cq_timed`](super::Verbs::poll_cq_timed).
    pub is_timed: bool,
}

impl CqInitAttr {
    /// Creates the attributes for a queue with `entries` completions, without a specific vector or
    /// timestamps.
    #[must_use]
    pub fn new(entries: u32) -> Self {
        Self {
            entries,
            vector: None,
            is_timed: false,
        }
    }
}

/// Event moderation: allows the event for an armed completion queue to be delayed for more
/// completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moderation {
    /// Number of matching completions after which the event is sent without further delay, or 0 to
    /// disable.
    pub count: u16,
    /// Maximum delay between the first completion and the event, or 0 for no delay.
    pub period: Duration,
}

/// Current attributes of a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqAttr {
    /// Number of completions that can be stored.
    pub entries: u32,
    /// Completion vector used for events.
    pub vector: u32,
    /// Set if completions have timestamps.
    pub is_timed: bool,
    /// Event moderation.
    pub moderation: Moderation,
}

/// Port state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// The link is down.
    Down,
    /// The port is ready for traffic.
    Active,
}

bitflags! {
    /// CapabilityMask of a port (IBTA 14.2.5.6).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct PortCapabilities: u32 {
        /// IsCommunicationManagementSupported: the port handles MADs of the CM.
        const COMMUNICATION_MANAGEMENT = 1 << 16;
        /// IsSNMPTunnelingSupported: a program handles MADs of the SNMP tunneling class.
        const SNMP_TUNNELING = 1 << 17;
        /// IsDeviceManagementSupported: a program handles MADs of the device management class.
        const DEVICE_MANAGEMENT = 1 << 19;
        /// IsVendorClassSupported: a program handles MADs of a vendor class.
        const VENDOR_CLASS = 1 << 20;
        /// Capabilities of other devices.
        const _ = !0;
    }
}

impl PortCapabilities {
    /// Capabilities provided by programs, which can be set and cleared.
    pub const OF_PROGRAMS: Self = Self::SNMP_TUNNELING
        .union(Self::DEVICE_MANAGEMENT)
        .union(Self::VENDOR_CLASS);
}

/// Port attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttr {
    /// Link state.
    pub state: PortState,
    /// Maximum path MTU supported by the port.
    pub max_mtu: Mtu,
    /// Current path MTU.
    pub active_mtu: Mtu,
    /// Maximum message size in bytes.
    pub max_msg_size: u32,
    /// Number of entries in the GID table.
    pub gid_table_len: u16,
    /// Number of entries in the P_Key table.
    pub pkey_table_len: u16,
    /// CapabilityMask of the port.
    pub capabilities: PortCapabilities,
    /// Port IP address.
    pub addr: IpAddr,
}

/// Path MTU: maximum payload size of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, TryFromPrimitive)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    Mtu256 = 1,
    /// 512 bytes.
    Mtu512 = 2,
    /// 1024 bytes.
    Mtu1024 = 3,
    /// 2048 bytes.
    Mtu2048 = 4,
    /// 4096 bytes.
    Mtu4096 = 5,
}

impl Mtu {
    /// All path MTUs, in ascending order.
    pub const ALL: [Self; 5] = [
        Self::Mtu256,
        Self::Mtu512,
        Self::Mtu1024,
        Self::Mtu2048,
        Self::Mtu4096,
    ];

    /// Returns the maximum payload size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Mtu256 => 256,
            Self::Mtu512 => 512,
            Self::Mtu1024 => 1024,
            Self::Mtu2048 => 2048,
            Self::Mtu4096 => 4096,
        }
    }

    /// Returns the wire code: 1 for 256 up to 5 for 4096 (IBTA 12.7).
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the MTU for a wire code.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::try_from(code).ok()
    }

    /// Returns the largest MTU for which all packets fit into `payload` bytes of UDP payload. The
    /// BTH, the ICRC and the longest extended headers of a packet with payload (RETH and immediate
    /// data) need 36 bytes.
    #[must_use]
    pub fn for_udp_payload(payload: u32) -> Option<Self> {
        Self::ALL
            .into_iter()
            .rev()
            .find(|m| m.bytes() + 36 <= payload)
    }
}

/// Memory region with its handle, keys and address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mr {
    /// Region handle.
    pub id: MrId,
    /// Key for local scatter lists.
    pub lkey: LKey,
    /// Key for the peer, only valid if remote access is enabled.
    pub rkey: RKey,
    /// Start address, as used in scatter lists and by peers.
    pub addr: u64,
    /// Region size in bytes.
    pub length: u64,
}

impl Mr {
    /// Returns a scatter list entry for `length` bytes at `offset`. Note that this doesn't check
    /// the region size.
    #[must_use]
    pub fn sge(&self, offset: usize, length: usize) -> Sge {
        Sge {
            addr: self.addr + offset as u64,
            length: length as u32,
            lkey: self.lkey,
        }
    }

    /// Returns the remote address for `offset`.
    #[must_use]
    pub fn remote(&self, offset: usize) -> RemoteAddr {
        RemoteAddr {
            addr: self.addr + offset as u64,
            rkey: self.rkey,
        }
    }
}

/// Region attributes to be changed (IBTA 11.2.8.6). Use `None` to keep the current value.
#[derive(Clone, Copy, Debug, Default)]
pub struct MrChange<'a> {
    /// New memory, and the start address to use for the region.
    pub translation: Option<(&'a MemSlice, u64)>,
    /// New protection domain.
    pub pd: Option<PdId>,
    /// New access rights.
    pub access: Option<Access>,
}

/// Memory window type (IBTA 10.6.7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MwType {
    /// The key can be used via any queue pair in the protection domain. The window can be bound
    /// repeatedly, and is unbound using a zero-length bind.
    Type1,
    /// Type 2B: the key can only be used via the queue pair that bound the window. Like a
    /// fast-registration region, it must be invalidated before it can be bound again.
    Type2,
}

/// Memory window: a key for a part of a region, as specified by a
/// [`SendOp::BindMw`](super::SendOp::BindMw).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mw {
    /// Window handle.
    pub id: MwId,
    /// Initial key, which is not valid. Later keys only differ in the low byte.
    pub rkey: RKey,
    /// Window type.
    pub mw_type: MwType,
}

/// Memory window binding (IBTA 11.4.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MwBind {
    /// Window to bind.
    pub mw: MwId,
    /// New key: the index of the current key with a different low byte.
    pub key: RKey,
    /// Region, which must have [`Access::MW_BIND`].
    pub mr: MrId,
    /// Start address, as used in scatter lists for this region.
    pub addr: u64,
    /// Size in bytes, or 0 to unbind a type 1 window.
    pub length: u64,
    /// Access rights for peers. Write access requires [`Access::LOCAL_WRITE`] for the region. If
    /// [`Access::ZERO_BASED`] is set for a type 2 window, peers must use addresses starting at 0.
    pub access: Access,
}

/// Advice for a memory range (`ibv_advise_mr(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MrAdvice {
    /// Prefetch pages for reading.
    Prefetch,
    /// Prefetch pages for writing.
    PrefetchWrite,
}

/// Current attributes of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MrAttr {
    /// Protection domain.
    pub pd: PdId,
    /// Keys, address and size.
    pub mr: Mr,
    /// Access rights for local and remote keys.
    pub access: Access,
    /// Set if the keys are valid. Not set for a fast-registration region that is not registered.
    pub valid: bool,
}

/// Current attributes of a memory window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MwAttr {
    /// Protection domain.
    pub pd: PdId,
    /// Key of the last bind, or the initial key. On the host's devices, this is the key of the last
    /// bind posted.
    pub rkey: RKey,
    /// Window type.
    pub mw_type: MwType,
}

/// Shared receive queue attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqAttr {
    /// Maximum number of receives.
    pub max_wr: u32,
    /// Maximum number of scatter/gather entries in a receive.
    pub max_sge: u32,
    /// Limit: if the number of remaining receives falls below this value, a limit event is
    /// generated once. Set to 0 to disable.
    pub limit: u32,
}

/// Queue pair type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpType {
    /// Reliable connection (IBTA 9.7).
    Rc,
    /// Unreliable connection (IBTA 9.8.2).
    ///
    /// Currently not used.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Initiator of an extended reliable connection. Each request specifies a shared receive queue
    /// of the peer (IBTA annex A14). There is only a send queue.
    ///
    /// Currently not used.
    XrcIni,
    /// Target of an extended reliable connection, which belongs to an XRC domain. There are no
    /// queues: messages use the shared receive queues of the domain and their completion queues.
    /// Keys are looked up in the protection domain of the queue specified in the request.
    ///
    /// Currently not used.
    XrcTgt,
    /// General services interface: queue pair 1, used to send and receive MADs as datagrams. There
    /// is one per device. The connection manager handles the messages it receives.
    Gsi,
    /// Subnet management interface: queue pair 0. This is not supported by any device, as RoCE has
    /// no subnet management (annex A16).
    Smi,
    /// Raw Ethernet packets. This is not supported by any device: the software NIC uses UDP.
    RawPacket,
}

impl QpType {
    /// Returns whether a send operation is supported for this queue pair type (IBTA 9.4, 9.5).
    /// Posting an unsupported operation returns an error.
    #[must_use]
    pub fn has_operation(self, op: &SendOp) -> bool {
        match self {
            Self::Rc | Self::XrcIni => true,
            Self::XrcTgt | Self::Smi | Self::RawPacket => false,
            // There are no responses on an unreliable connection, and no invalidation.
            Self::Uc => !matches!(
                op,
                SendOp::SendInv(_)
                    | SendOp::Read(_)
                    | SendOp::CmpSwap { .. }
                    | SendOp::FetchAdd { .. }
            ),
            Self::Ud | Self::Gsi => matches!(op, SendOp::Send | SendOp::SendImm(_)),
        }
    }
}

/// Queue pair queue sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpCap {
    /// Maximum number of requests in the send queue.
    pub max_send_wr: u32,
    /// Maximum number of requests in the receive queue. Ignored if a shared receive queue is used.
    pub max_recv_wr: u32,
    /// Maximum number of scatter/gather entries in a send request.
    pub max_send_sge: u32,
    /// Maximum number of scatter/gather entries in a receive.
    pub max_recv_sge: u32,
    /// Maximum size of inline data in bytes.
    pub max_inline: u32,
}

impl QpCap {
    /// Creates queue sizes with a single scatter/gather entry per request and no inline data.
    #[must_use]
    pub fn new(max_send_wr: u32, max_recv_wr: u32) -> Self {
        Self {
            max_send_wr,
            max_recv_wr,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        }
    }
}

/// Order in which a queue pair consumes its own receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecvOrder {
    /// In the order they were posted. All receives are used in turn, so all of their memory will be
    /// resident.
    #[default]
    OldestFirst,
    /// Last posted receive first. A peer will only touch as many receives as it has messages in
    /// flight, so that their memory will stay in the cache. This is only a hint: a device that
    /// consumes receives in order ignores it, so the owner must only rely on the IDs in the
    /// completions.
    NewestFirst,
}

/// Attributes used to create a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpInitAttr {
    /// Protection domain.
    pub pd: PdId,
    /// Completion queue for sends.
    pub send_cq: CqId,
    /// Completion queue for receives. This can be the same as for sends.
    pub recv_cq: CqId,
    /// Shared receive queue to be used instead of a separate one.
    pub srq: Option<SrqId>,
    /// XRC domain, only used for [`QpType::XrcTgt`].
    pub xrcd: Option<XrcdId>,
    /// Transport service.
    pub qp_type: QpType,
    /// Queue sizes.
    pub cap: QpCap,
    /// If set, all sends generate a completion even if they are not signaled.
    pub sq_sig_all: bool,
    /// Order in which receives are consumed.
    pub recv_order: RecvOrder,
    /// If set, multicast datagrams sent by this queue pair are not looped back, even if it
    /// is attached to the group. They are still received by all other members.
    pub block_self_mcast: bool,
}

impl QpInitAttr {
    /// Creates attributes for a queue pair with a single completion queue for both directions, a
    /// separate receive queue, and completions for signaled sends only.
    #[must_use]
    pub fn new(pd: PdId, cq: CqId, qp_type: QpType, cap: QpCap) -> Self {
        Self {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            xrcd: None,
            qp_type,
            cap,
            sq_sig_all: false,
            recv_order: RecvOrder::OldestFirst,
            block_self_mcast: false,
        }
    }

    /// Creates attributes for the target of an extended reliable connection. It has neither a
    /// protection domain nor completion queues, and uses the ones from its shared receive queues.
    #[must_use]
    pub fn xrc_target(xrcd: XrcdId) -> Self {
        let none = Handle::new(0, 0);
        Self {
            xrcd: Some(xrcd),
            ..Self::new(none.into(), none.into(), QpType::XrcTgt, QpCap::new(0, 0))
        }
    }
}

/// Queue pair state (IBTA 10.3.1).
///
/// ```text
///  RESET → INIT → RTR → RTS ⇄ SQD
///    ↑                   ↓  ↘
///    └── any state      SQE   ERROR ← any state
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpState {
    /// Initial state: no requests can be posted.
    Reset,
    /// Receives can be posted, but no packets are sent or processed.
    Init,
    /// Ready to receive: packets are processed, but no requests are sent.
    Rtr,
    /// Ready to send: fully operational.
    Rts,
    /// Send queue drained: current requests are completed, but no new requests are started.
    Sqd,
    /// Send queue error: sending a datagram has failed, but receiving still works.
    Sqe,
    /// Error: all requests are flushed.
    Error,
}

/// Address for a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AhAttr {
    /// Peer GID.
    pub dgid: Gid,
    /// Index of our GID.
    pub sgid_index: u16,
    /// IP hop limit. The software NIC only uses this for multicast. It always uses 255 for a single
    /// host, which allows the host to verify that the packet was not forwarded by a router (RFC
    /// 5082).
    pub hop_limit: u8,
    /// IP traffic class. The lowest two bits are used for ECN and set by the device.
    pub traffic_class: u8,
    /// IPv6 flow label, 20 bits. The software NIC uses 0.
    pub flow_label: u32,
    /// Local port number.
    pub port: u8,
}

impl AhAttr {
    /// Creates a path from our first GID to a peer, with a hop limit of 64 and no traffic class or
    /// flow label.
    #[must_use]
    pub fn new(dgid: Gid) -> Self {
        Self {
            dgid,
            sgid_index: 0,
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
            port: 1,
        }
    }
}

/// Alternate path of a connection, used after a migration (IBTA 17.2.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AltPath {
    /// Path address, including the local port to use.
    pub ah: AhAttr,
    /// P_Key index.
    pub pkey_index: u16,
    /// ACK timeout for this path: 4.096 µs × 2^n, *n* up to 31, or 0 to wait forever.
    pub timeout: u8,
}

/// Queue pair attributes, set by `modify_qp` (use `None` to keep the current value) and returned by
/// `query_qp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct QpAttr {
    /// New state, or `None` to change attributes only.
    pub state: Option<QpState>,
    /// P_Key index.
    pub pkey_index: Option<u16>,
    /// Port number, starting at 1.
    pub port: Option<u8>,
    /// Access rights for peers using this queue pair. Only remote rights are used.
    pub access: Option<Access>,
    /// Q_Key, for datagram queue pairs.
    pub qkey: Option<QKey>,
    /// Path to the peer.
    pub ah: Option<AhAttr>,
    /// Path MTU.
    pub path_mtu: Option<Mtu>,
    /// The peer's queue pair number.
    pub dest_qp: Option<u32>,
    /// First PSN we expect to receive.
    pub rq_psn: Option<u32>,
    /// First PSN we will send.
    pub sq_psn: Option<u32>,
    /// Maximum number of incoming READs and atomics (responder resources).
    pub max_dest_rd_atomic: Option<u8>,
    /// Maximum number of outgoing READs and atomics (initiator depth).
    pub max_rd_atomic: Option<u8>,
    /// Delay requested by our RNR NAKs, as a code (IBTA table 45).
    pub min_rnr_timer: Option<u8>,
    /// ACK timeout: 4.096 µs × 2^n, or 0 to wait forever.
    pub timeout: Option<u8>,
    /// Retry count for a timeout or sequence NAK, up to 7. The software NIC doesn't use a retry for
    /// a sequence NAK, because this proves that the peer is alive.
    pub retry_cnt: Option<u8>,
    /// Retry count for RNR NAKs; 7 means unlimited.
    pub rnr_retry: Option<u8>,
    /// Alternate path. Returned as `None` once it is in use.
    pub alt_path: Option<AltPath>,
    /// Path migration state. [`PathMigState::Rearm`] can be set if there is an alternate path.
    /// [`PathMigState::Migrated`] can always be set, and will migrate an armed connection.
    /// [`PathMigState::Armed`] is only returned.
    pub path_mig_state: Option<PathMigState>,
    /// Requests [`AsyncEvent::SqDrained`] when the send queue has been drained. Set together with
    /// the transition to [`QpState::Sqd`], and never returned.
    pub en_sqd_async_notify: Option<bool>,
    /// Set if requests that were started before the transition to [`QpState::Sqd`] are not yet
    /// complete. Only returned.
    pub sq_draining: Option<bool>,
    /// P_Key of the queue pair. Only returned.
    pub pkey: Option<PKey>,
}

impl QpAttr {
    /// Creates attributes that only change the state.
    #[must_use]
    pub fn to(state: QpState) -> Self {
        Self {
            state: Some(state),
            ..Self::default()
        }
    }
}

/// Asynchronous event for a device or one of its objects (IBTA 11.6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A completion was lost because the queue was full. All queue pairs using it enter the error
    /// state.
    CqError(CqId),
    /// The queue pair has entered the error state for a reason that is not reported by a
    /// completion.
    QpFatal(QpId),
    /// An invalid request was received from the peer.
    QpReqError(QpId),
    /// A request from the peer used an invalid key or access right.
    QpAccessError(QpId),
    /// The first packet was received by a queue pair in RTR.
    CommEstablished(QpId),
    /// The send queue was drained after a transition to SQD with this event enabled.
    SqDrained(QpId),
    /// The connection has migrated to its alternate path.
    PathMig(QpId),
    /// The peer of an armed connection has migrated to a path that is not our alternate path.
    /// Packets sent via this path are dropped.
    PathMigError(QpId),
    /// A queue pair in the error state has returned its last receive from a shared queue.
    QpLastWqeReached(QpId),
    /// The number of receives in a shared receive queue is below the limit.
    SrqLimitReached(SrqId),
    /// The port is now active.
    PortActive(u8),
    /// The port is now down.
    PortError(u8),
    /// The GID table was changed.
    GidChange(u8),
    /// The device is being removed.
    DeviceFatal,
}

/// A key consists of an index assigned by the device and a low byte that can be set by its owner
/// (IBTA 10.6.3.2). The low byte should be changed each time the region is reused.
impl RKey {
    /// Returns the same key with a different low byte, as required for fast registration.
    #[must_use]
    pub fn with_key_byte(self, byte: u8) -> Self {
        Self((self.0 & !0xff) | u32::from(byte))
    }

    /// Returns the next key for a fast-registration region, with the low byte incremented
    /// (wrapping).
    #[must_use]
    pub fn next(self) -> Self {
        self.with_key_byte((self.0 as u8).wrapping_add(1))
    }
}
