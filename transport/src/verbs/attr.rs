//! Capabilities, attributes, states.

use std::net::IpAddr;
use std::time::Duration;

use bitflags::bitflags;
use num_enum::TryFromPrimitive;
use riser_memory::MemSlice;

use super::{
    CqId, Gid, Handle, LKey, MrId, MwId, PKey, PathMigState, PdId, QKey, QpId, RKey, RemoteAddr,
    SendOp, Sge, SrqId, XrcdId,
};

bitflags! {
    /// Rights to a memory region.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Access: u8 {
        /// The device may write it for local requests (receives, reads).
        const LOCAL_WRITE = 1;
        /// A peer may write it.
        const REMOTE_WRITE = 2;
        /// A peer may read it.
        const REMOTE_READ = 4;
        /// A peer may run atomics on it.
        ///
        /// No user yet.
        const REMOTE_ATOMIC = 8;
        /// Memory windows may be bound to it.
        ///
        /// No user yet.
        const MW_BIND = 16;
        /// Addresses count from 0 instead of from the virtual address.
        ///
        /// No user yet.
        const ZERO_BASED = 32;
        /// Pages need not be there before they are used. The software NIC pins none in any case;
        /// with this right it finds out at each access whether the range is mapped, and where it is
        /// not the access fails like one outside the region.
        ///
        /// No user yet.
        const ON_DEMAND = 64;
    }
}

impl Access {
    /// The rights that only peers use.
    pub const REMOTE: Self = Self::REMOTE_WRITE
        .union(Self::REMOTE_READ)
        .union(Self::REMOTE_ATOMIC);
}

/// The limits of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAttr {
    /// Name for people, such as `roce-127.0.0.1`.
    pub name: String,
    /// Name of the provider: `roce`, `rdma_core`, `shm`, `loopback`.
    pub provider: &'static str,
    /// The node's GUID, as the CM carries it.
    pub node_guid: u64,
    /// Largest number of protection domains.
    pub max_pd: u32,
    /// Largest number of memory regions.
    pub max_mr: u32,
    /// Longest region, in bytes.
    pub max_mr_size: u64,
    /// Largest number of memory windows; 0 where there are none.
    pub max_mw: u32,
    /// Memory can be registered [`Access::ON_DEMAND`].
    pub on_demand: bool,
    /// Most segments in one fast registration.
    pub max_fast_reg_segments: u32,
    /// Segments of a fast registration may start and end anywhere, or must meet at pages.
    pub sg_gaps: bool,
    /// The completion of a receive names the key that the peer's send invalidated. Where it
    /// does not, ask no peer to invalidate: nothing would report that a region is free again.
    pub reports_invalidation: bool,
    /// Largest number of completion queues.
    pub max_cq: u32,
    /// Most entries of a completion queue.
    pub max_cqe: u32,
    /// Number of completion vectors, which count from 0.
    pub comp_vectors: u32,
    /// Largest number of queue pairs.
    pub max_qp: u32,
    /// Most requests in a send or receive queue.
    pub max_qp_wr: u32,
    /// Most scatter-gather entries in a request.
    pub max_sge: u32,
    /// Most bytes of inline data.
    pub max_inline: u32,
    /// Most shared receive queues.
    pub max_srq: u32,
    /// Most requests in one of them.
    pub max_srq_wr: u32,
    /// Most incoming READs and atomics that a queue pair holds (responder resources).
    pub max_qp_rd_atom: u8,
    /// Most outgoing READs and atomics of a queue pair (initiator depth).
    pub max_qp_init_rd_atom: u8,
    /// Largest number of address handles.
    pub max_ah: u32,
    /// Most multicast groups with queue pairs of the device; 0 where it has no multicast.
    pub max_mcast_grp: u32,
    /// Most queue pairs that are attached to a group.
    pub max_mcast_qp_attach: u32,
    /// Least and largest rate limit of a queue pair, in kbit/s; 0 where it has none.
    pub min_rate_kbps: u32,
    /// See [`DeviceAttr::min_rate_kbps`].
    pub max_rate_kbps: u32,
    /// Number of ports, which count from 1.
    pub ports: u8,
    /// Connections may have an alternate path ([`QpAttr::alt_path`]).
    pub path_migration: bool,
}

/// How fast a queue pair sends at most (`ibv_modify_qp_rate_limit(3)`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimit {
    /// Bits of RoCE packets, from their first header to their ICRC, in kbit/s; 0 is no limit.
    pub rate_kbps: u32,
    /// Bytes that may leave at once, at least a packet; 0 leaves it to the device.
    pub max_burst: u32,
}

/// Attributes that a completion queue is created with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqInitAttr {
    /// Completions that it has room for, at least.
    pub entries: u32,
    /// Completion vector that its events come by, below [`DeviceAttr::comp_vectors`].
    pub vector: u32,
    /// Completions are taken with their times, by
    /// [`Verbs::poll_cq_timed`](super::Verbs::poll_cq_timed).
    pub is_timed: bool,
}

impl CqInitAttr {
    /// A queue for `entries` completions, on the first vector, without times.
    #[must_use]
    pub fn new(entries: u32) -> Self {
        Self {
            entries,
            vector: 0,
            is_timed: false,
        }
    }
}

/// Time that the event of an armed completion queue may wait for further completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moderation {
    /// Completions that match, and with which the event waits no longer; 0 sets no number.
    pub count: u16,
    /// Time from the first of them to the event, at most; 0 lets no event wait.
    pub period: Duration,
}

/// Attributes of a completion queue at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqAttr {
    /// Completions that it has room for.
    pub entries: u32,
    /// Completion vector that its events come by.
    pub vector: u32,
    /// Completions have times.
    pub is_timed: bool,
    /// Time that its events may wait.
    pub moderation: Moderation,
}

/// State of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// There is no link.
    Down,
    /// The port is ready for traffic.
    Active,
}

/// Attributes of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttr {
    /// State of the link.
    pub state: PortState,
    /// Largest path MTU of the port.
    pub max_mtu: Mtu,
    /// Path MTU in use.
    pub active_mtu: Mtu,
    /// Longest message, in bytes.
    pub max_msg_size: u32,
    /// Entries of the GID table.
    pub gid_table_len: u16,
    /// Entries of the P_Key table.
    pub pkey_table_len: u16,
    /// IP address of the port.
    pub addr: IpAddr,
}

/// Path MTU: payload bytes of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, TryFromPrimitive)]
#[repr(u8)]
pub enum Mtu {
    /// Payload of 256 bytes.
    Mtu256 = 1,
    /// Payload of 512 bytes.
    Mtu512 = 2,
    /// Payload of 1024 bytes.
    Mtu1024 = 3,
    /// Payload of 2048 bytes.
    Mtu2048 = 4,
    /// Payload of 4096 bytes.
    Mtu4096 = 5,
}

impl Mtu {
    /// All path MTUs, smallest first.
    pub const ALL: [Self; 5] = [
        Self::Mtu256,
        Self::Mtu512,
        Self::Mtu1024,
        Self::Mtu2048,
        Self::Mtu4096,
    ];

    /// Largest payload of a packet, in bytes.
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

    /// The code that messages carry: 1 for 256 up to 5 for 4096 (IBTA 12.7).
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The MTU of a code.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::try_from(code).ok()
    }

    /// The largest MTU whose packets fit `payload` bytes of UDP payload: BTH, the longest extended
    /// headers of a packet that also carries payload (RETH and immediate), and ICRC take 36.
    #[must_use]
    pub fn for_udp_payload(payload: u32) -> Option<Self> {
        Self::ALL
            .into_iter()
            .rev()
            .find(|m| m.bytes() + 36 <= payload)
    }
}

/// A registered region: its handle, its keys and where its addresses start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mr {
    /// Handle of the region.
    pub id: MrId,
    /// Key for local scatter lists.
    pub lkey: LKey,
    /// Key for the peer; means nothing unless a remote right was given.
    pub rkey: RKey,
    /// Address of the first byte, as scatter lists and peers write it.
    pub addr: u64,
    /// Length of the region in bytes.
    pub length: u64,
}

impl Mr {
    /// The local segment of `length` bytes from `offset` on. It is not checked against the region.
    #[must_use]
    pub fn sge(&self, offset: usize, length: usize) -> Sge {
        Sge {
            addr: self.addr + offset as u64,
            length: length as u32,
            lkey: self.lkey,
        }
    }

    /// Where the peer finds the byte at `offset`.
    #[must_use]
    pub fn remote(&self, offset: usize) -> RemoteAddr {
        RemoteAddr {
            addr: self.addr + offset as u64,
            rkey: self.rkey,
        }
    }
}

/// Changes of a region (IBTA 11.2.8.6); `None` leaves something as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct MrChange<'a> {
    /// The memory, and the address from which those of the region count.
    pub translation: Option<(&'a MemSlice, u64)>,
    /// Protection domain of the region.
    pub pd: Option<PdId>,
    /// Access rights of its keys.
    pub access: Option<Access>,
}

/// Kind of a memory window (IBTA 10.6.7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MwType {
    /// Any queue pair of the protection domain serves its key. It is bound again and again, and
    /// unbound by a bind of no bytes.
    Type1,
    /// Type 2B: only the queue pair that bound it serves its key. It is invalidated like a
    /// fast-registration region, before it can be bound again.
    Type2,
}

/// A memory window: a key for a part of a region, which a [`SendOp::BindMw`](super::SendOp::BindMw)
/// names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mw {
    /// Handle of the window.
    pub id: MwId,
    /// Its key at first, which works for nothing. Later ones differ from it in the low byte.
    pub rkey: RKey,
    /// Kind of the window.
    pub mw_type: MwType,
}

/// Binding of a memory window (IBTA 11.4.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MwBind {
    /// The window.
    pub mw: MwId,
    /// Its key from now on: the index of its present key with another low byte.
    pub key: RKey,
    /// The region, which needs [`Access::MW_BIND`].
    pub mr: MrId,
    /// First byte, as scatter lists write it for the region.
    pub addr: u64,
    /// Length in bytes; 0 unbinds a window of type 1.
    pub length: u64,
    /// Rights of peers. Those to write need [`Access::LOCAL_WRITE`] of the region, others none.
    /// With [`Access::ZERO_BASED`], for a window of type 2, peers count addresses from 0.
    pub access: Access,
}

/// What to do with a range of a region before it is used (`ibv_advise_mr(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MrAdvice {
    /// Bring its pages in, for reading.
    Prefetch,
    /// Bring its pages in, for writing.
    PrefetchWrite,
}

/// A region's attributes at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MrAttr {
    /// Protection domain of the object.
    pub pd: PdId,
    /// Keys, address and length.
    pub mr: Mr,
    /// Access rights of local and remote keys.
    pub access: Access,
    /// Its keys work: false for a fast-registration region that is not registered.
    pub valid: bool,
}

/// Capacity of a shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqAttr {
    /// Number of receives that it holds.
    pub max_wr: u32,
    /// Scatter-gather entries of a request.
    pub max_sge: u32,
    /// Threshold: when fewer requests than this remain, one limit event is raised; 0 is unarmed.
    pub limit: u32,
}

/// Kind of queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpType {
    /// Reliable connection (IBTA 9.7).
    Rc,
    /// Unreliable connection (IBTA 9.8.2).
    ///
    /// No user yet.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// The sending end of an extended reliable connection: each request names one of the peer's
    /// shared receive queues (IBTA annex A14). It has a send queue only.
    ///
    /// No user yet.
    XrcIni,
    /// The receiving end of an extended reliable connection, of an XRC domain. It has no queues:
    /// messages go to the shared receive queues of its domain, and to their completion queues. Keys
    /// are looked up in the protection domain of the queue that a request names.
    ///
    /// No user yet.
    XrcTgt,
    /// The general service interface: queue pair 1, a datagram queue pair for MADs. A device has
    /// one, and its connection manager answers what it gets itself.
    Gsi,
    /// The subnet management interface: queue pair 0. RoCE has no subnet management, and so every
    /// device here refuses it (annex A16).
    Smi,
    /// Raw packets of Ethernet. Every device here refuses them: the software NIC sends UDP.
    RawPacket,
}

impl QpType {
    /// Returns whether queue pairs of this kind carry out an operation of the send queue (IBTA
    /// 9.4, 9.5). What they do not is refused when it is posted.
    #[must_use]
    pub fn has_operation(self, op: &SendOp) -> bool {
        match self {
            Self::Rc | Self::XrcIni => true,
            Self::XrcTgt | Self::Smi | Self::RawPacket => false,
            // Nothing comes back from the peer of an unreliable connection, and it invalidates
            // nothing.
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

/// Depths of a queue pair's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpCap {
    /// Requests in the send queue.
    pub max_send_wr: u32,
    /// Requests in the receive queue; ignored with a shared one.
    pub max_recv_wr: u32,
    /// Scatter-gather entries of a send request.
    pub max_send_sge: u32,
    /// Scatter-gather entries of a receive.
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline: u32,
}

impl QpCap {
    /// Queues of these lengths, whose requests have one scatter-gather entry each and no inline
    /// data.
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

/// Order in which the receives of a queue pair's own queue are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RecvOrder {
    /// As posted. All of them are used in turn, and so the memory of all becomes resident.
    #[default]
    OldestFirst,
    /// The one that was posted last, so that a peer touches the memory of no more receives than it
    /// has messages under way, and that memory is in the cache. This is a wish: a device that takes
    /// receives in order ignores it, so the owner relies on the ids of completions only.
    NewestFirst,
}

/// Attributes that a queue pair is created with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpInitAttr {
    /// Protection domain of the object.
    pub pd: PdId,
    /// Completion queue of sends.
    pub send_cq: CqId,
    /// Completion queue of receives; may be the same.
    pub recv_cq: CqId,
    /// A shared receive queue instead of its own.
    pub srq: Option<SrqId>,
    /// XRC domain of a [`QpType::XrcTgt`]; others have none.
    pub xrcd: Option<XrcdId>,
    /// Transport service of the queue pair.
    pub qp_type: QpType,
    /// Depths of its queues.
    pub cap: QpCap,
    /// Every send completes visibly, signaled or not.
    pub sq_sig_all: bool,
    /// Order of its own receives.
    pub recv_order: RecvOrder,
    /// Datagrams that it sends to a multicast group do not come back to it, although it is attached
    /// to the group. Others get them.
    pub block_self_mcast: bool,
}

impl QpInitAttr {
    /// A queue pair with one completion queue for both directions and a receive queue of its own,
    /// whose sends complete visibly where they are signaled.
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

    /// The receiving end of an extended reliable connection. It has neither a protection domain nor
    /// completion queues: those of its shared receive queues count.
    #[must_use]
    pub fn xrc_target(xrcd: XrcdId) -> Self {
        let none = Handle::new(0, 0);
        Self {
            xrcd: Some(xrcd),
            ..Self::new(none.into(), none.into(), QpType::XrcTgt, QpCap::new(0, 0))
        }
    }
}

/// State of a queue pair (IBTA 10.3.1).
///
/// ```text
///  RESET → INIT → RTR → RTS ⇄ SQD
///    ↑                   ↓  ↘
///    └── any state      SQE   ERROR ← any state
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpState {
    /// As created: takes no requests.
    Reset,
    /// Takes receives; sends and packets do nothing yet.
    Init,
    /// Ready to receive: answers packets, does not send.
    Rtr,
    /// Ready to send: fully operational.
    Rts,
    /// Send queue drained: finishes what it began, starts nothing new.
    Sqd,
    /// Send queue error: a datagram send failed; receives go on.
    Sqe,
    /// Error: all requests complete as flushed.
    Error,
}

/// An address for a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AhAttr {
    /// GID of the peer.
    pub dgid: Gid,
    /// Index of our own GID.
    pub sgid_index: u16,
    /// Hop limit of the IP header. The software NIC sends it to multicast groups; a single host
    /// gets 255, by which it may know that no router had the packet (RFC 5082).
    pub hop_limit: u8,
    /// Traffic class of the IP header. The lowest two bits are those of ECN, which the device sets.
    pub traffic_class: u8,
    /// Flow label of the IPv6 header, of 20 bits. The software NIC sends 0.
    pub flow_label: u32,
    /// Number of our port.
    pub port: u8,
}

impl AhAttr {
    /// A path from our first GID to a peer's, of hop limit 64, without traffic class and flow label.
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

/// Alternate path of a connection, which it takes when it migrates (IBTA 17.2.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AltPath {
    /// Address of the path. Its port is the one that the path leaves by.
    pub ah: AhAttr,
    /// Index into the P_Key table.
    pub pkey_index: u16,
    /// ACK timeout on this path: 4.096 µs × 2^n, *n* up to 31; 0 waits for ever.
    pub timeout: u8,
}

/// Attributes of a queue pair: given to `modify_qp` (what is `None` stays as it is) and answered by
/// `query_qp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct QpAttr {
    /// State to go to; `None` changes attributes only.
    pub state: Option<QpState>,
    /// Index into the P_Key table.
    pub pkey_index: Option<u16>,
    /// Port number, which counts from 1.
    pub port: Option<u8>,
    /// Rights of peers through this queue pair (the remote ones only).
    pub access: Option<Access>,
    /// Queue key, datagram queue pairs.
    pub qkey: Option<QKey>,
    /// Path to the peer.
    pub ah: Option<AhAttr>,
    /// Path MTU of the connection.
    pub path_mtu: Option<Mtu>,
    /// The peer's queue pair number.
    pub dest_qp: Option<u32>,
    /// First PSN that we expect.
    pub rq_psn: Option<u32>,
    /// First PSN that we send.
    pub sq_psn: Option<u32>,
    /// Incoming READs and atomics held at once (responder resources).
    pub max_dest_rd_atomic: Option<u8>,
    /// Outgoing READs and atomics at once (initiator depth).
    pub max_rd_atomic: Option<u8>,
    /// Code of the delay that our RNR NAK asks for (IBTA table 45).
    pub min_rnr_timer: Option<u8>,
    /// ACK timeout is 4.096 µs × 2^n; 0 waits for ever.
    pub timeout: Option<u8>,
    /// Retries after a timeout or a sequence NAK, up to 7. The software NIC spends none on a
    /// sequence NAK, which proves that the peer lives.
    pub retry_cnt: Option<u8>,
    /// Retries after an RNR NAK; 7 is without end.
    pub rnr_retry: Option<u8>,
    /// Alternate path of a connection; answered as `None` after it was taken.
    pub alt_path: Option<AltPath>,
    /// State of path migration. [`PathMigState::Rearm`] can be set where there is an alternate
    /// path, [`PathMigState::Migrated`] always: an armed connection migrates by it.
    /// [`PathMigState::Armed`] is answered only.
    pub path_mig_state: Option<PathMigState>,
    /// [`AsyncEvent::SqDrained`] reports the end of draining. Set with the move to
    /// [`QpState::Sqd`], never answered.
    pub en_sqd_async_notify: Option<bool>,
    /// Requests that had begun before a move to [`QpState::Sqd`] are not complete yet. Answered
    /// only.
    pub sq_draining: Option<bool>,
    /// The queue pair's partition key, answered only.
    pub pkey: Option<PKey>,
}

impl QpAttr {
    /// A change of the state alone.
    #[must_use]
    pub fn to(state: QpState) -> Self {
        Self {
            state: Some(state),
            ..Self::default()
        }
    }
}

/// Something that happened to a device or one of its objects, outside any request (IBTA 11.6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A completion was lost: the queue was full. Its queue pairs go to the error state.
    CqError(CqId),
    /// The queue pair went to the error state for a reason that no completion reports.
    QpFatal(QpId),
    /// The peer sent a request that the transport had to refuse as invalid.
    QpReqError(QpId),
    /// The peer's request violated a key or a right.
    QpAccessError(QpId),
    /// The first packet arrived on a queue pair in RTR.
    CommEstablished(QpId),
    /// The send queue has drained after a move to SQD that asked for this event.
    SqDrained(QpId),
    /// The connection has taken its alternate path.
    PathMig(QpId),
    /// The peer of an armed connection has migrated to a path that is not the alternate path here:
    /// what it sends there is dropped.
    PathMigError(QpId),
    /// The last receive of a shared queue that an erroneous queue pair held is back.
    QpLastWqeReached(QpId),
    /// A shared receive queue has fewer requests than its limit.
    SrqLimitReached(SrqId),
    /// A port came up.
    PortActive(u8),
    /// A port went down.
    PortError(u8),
    /// The GID table changed.
    GidChange(u8),
    /// The device is going away.
    DeviceFatal,
}

/// A key is an index of the device's and a low byte of its owner's (IBTA 10.6.3.2). The low byte
/// changes from one use of a region to the next.
impl RKey {
    /// The same key with another low byte, as fast registration requires.
    #[must_use]
    pub fn with_key_byte(self, byte: u8) -> Self {
        Self((self.0 & !0xff) | u32::from(byte))
    }

    /// The next key of a fast-registration region: the low byte counts on, wrapping.
    #[must_use]
    pub fn next(self) -> Self {
        self.with_key_byte((self.0 as u8).wrapping_add(1))
    }
}
