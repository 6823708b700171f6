//! Objects of an rdma-core device and their handles.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ptr;

use riser_memory::MemSlice;
use riser_rdma_core_sys::bindings::*;

use super::notices::Arming;
use crate::verbs::{
    Access, AhAttr, CmId, CmOption, CqId, Gid, Handle, Moderation, Mr, MrId, MwType, PdId, QpId,
    QpType, RateLimit, SrqId, WcOpcode, WrId, XrcdId,
};

/// Max number of objects of each type.
pub(super) const MANY: u32 = 1 << 20;

/// Max number of completions to get from the library in a single call.
pub(super) const BATCH: usize = 32;

/// Identifies a posted request in the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotId(pub(super) Handle);

impl From<Handle> for SlotId {
    fn from(h: Handle) -> Self {
        Self(h)
    }
}

impl From<SlotId> for Handle {
    fn from(id: SlotId) -> Self {
        id.0
    }
}

/// Converts a handle to a 64-bit number.
pub(super) fn pack(h: Handle) -> u64 {
    h.index() as u64 | u64::from(h.generation()) << 32
}

pub(super) fn unpack(value: u64) -> Handle {
    Handle::new(value as u32, (value >> 32) as u32)
}

/// A posted request that has not completed yet.
pub(super) struct Slot {
    pub(super) wr_id: WrId,
    pub(super) opcode: WcOpcode,
    /// Queue used for this request. Requests in a queue complete in order, so this determines which
    /// of them have completed.
    pub(super) queue: SlotQueue,
    /// Set if only the provider signals this request. Its successful completion is not reported.
    pub(super) is_quiet: bool,
}

/// Queue used for a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotQueue {
    Send(QpId),
    Recv(QpId),
    Shared(SrqId),
    /// Shared queue, and the receive was used by a QP before it was reset or destroyed.
    Orphaned(SrqId),
}

/// Scratch buffers used to build request chains. Their capacity is kept for the next post.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) sges: Vec<ibv_sge>,
    pub(super) sends: Vec<ibv_send_wr>,
    pub(super) recvs: Vec<ibv_recv_wr>,
    pub(super) slots: Vec<SlotId>,
}

pub(super) struct Pd {
    pub(super) ptr: *mut ibv_pd,
    pub(super) users: u32,
}

pub(super) struct Xrcd {
    pub(super) ptr: *mut ibv_xrcd,
    /// Number of QPs and SRQs.
    pub(super) users: u32,
}

pub(super) struct Ah {
    pub(super) ptr: *mut ibv_ah,
    pub(super) pd: PdId,
    pub(super) attr: AhAttr,
}

pub(super) enum Region {
    /// Region that uses our memory.
    Plain {
        pd: PdId,
        ptr: *mut ibv_mr,
        access: Access,
        mr: Mr,
        memory: MemSlice,
        windows: u32,
    },
    /// Null region without memory.
    Null { pd: PdId, ptr: *mut ibv_mr, mr: Mr },
    /// Type 2 memory window used as a fast-registration region.
    Window(Window),
}

pub(super) struct Window {
    pub(super) pd: PdId,
    pub(super) ptr: *mut ibv_mw,
    pub(super) mr: Mr,
    pub(super) access: Access,
    /// Range to use for the next bind, and the region containing it.
    pub(super) mapped: Option<(MrId, MemSlice)>,
    pub(super) valid: bool,
}

/// Memory window to be bound by the application.
pub(super) struct UserWindow {
    pub(super) pd: PdId,
    pub(super) ptr: *mut ibv_mw,
    pub(super) mw_type: MwType,
}

impl Region {
    pub(super) fn pd(&self) -> PdId {
        match self {
            Self::Plain { pd, .. } | Self::Null { pd, .. } => *pd,
            Self::Window(w) => w.pd,
        }
    }
}

/// Timestamps of a completion.
#[derive(Clone, Copy, Default)]
pub(super) struct Times {
    /// Device clock ticks.
    pub(super) ticks: u64,
    /// Nanoseconds since the Unix epoch.
    pub(super) wall: u64,
}

pub(super) struct Cq {
    /// Pointer to the queue. This is an extended queue if timestamps are enabled.
    pub(super) ptr: *mut ibv_cq,
    pub(super) users: u32,
    pub(super) vector: u32,
    pub(super) overrun: bool,
    /// Output buffer for polling the library. It is all zeros between two calls, since the library
    /// only sets a few fields for failed requests. The buffer is reused so that we don't need to
    /// zero it if there are no completions.
    pub(super) batch: RefCell<Box<[ibv_wc]>>,
    /// Completions already removed from the library, but not yet polled by the application.
    pub(super) peeked: RefCell<VecDeque<ibv_wc>>,
    /// Timestamps of these completions, if enabled.
    pub(super) times: Option<RefCell<VecDeque<Times>>>,
    pub(super) moderation: Moderation,
    /// Set if there are new completions since the application requested a notification.
    pub(super) has_new: Cell<bool>,
    pub(super) arming: Arming,
    /// Number of events read from the channel but not acknowledged.
    pub(super) unacknowledged: u32,
}

impl Cq {
    /// Creates a queue which has not been created in the library yet.
    pub(super) fn new(vector: u32, is_timed: bool) -> Self {
        Self {
            ptr: ptr::null_mut(),
            times: is_timed.then(RefCell::default),
            moderation: Moderation::default(),
            vector,
            users: 0,
            overrun: false,
            batch: RefCell::new([ibv_wc::default(); BATCH].into()),
            peeked: RefCell::default(),
            has_new: Cell::new(false),
            arming: Arming::Idle,
            unacknowledged: 0,
        }
    }

    /// Returns the oldest completion already removed from the library.
    pub(super) fn next(&mut self) -> Option<(ibv_wc, Times)> {
        let wc = self.peeked.get_mut().pop_front()?;
        let times = self.times.as_mut();
        let times = times.and_then(|times| times.get_mut().pop_front());
        Some((wc, times.unwrap_or_default()))
    }
}

pub(super) struct Srq {
    pub(super) ptr: *mut ibv_srq,
    pub(super) pd: PdId,
    /// XRC domain and CQ, if this is an XRC queue.
    pub(super) xrc: Option<(XrcdId, CqId)>,
    pub(super) users: u32,
    pub(super) posted: Vec<SlotId>,
}

pub(super) struct Qp {
    pub(super) ptr: *mut ibv_qp,
    pub(super) qpn: u32,
    pub(super) init: crate::verbs::QpInitAttr,
    pub(super) rate: RateLimit,
    /// Multicast groups and their LIDs. The kernel cannot destroy a QP while it is attached to a
    /// group.
    pub(super) groups: Vec<(Gid, u16)>,
    /// Connection id owning this QP. If set, the QP is destroyed by librdmacm.
    pub(super) owner: Option<CmId>,
    pub(super) sent: VecDeque<SlotId>,
    pub(super) received: VecDeque<SlotId>,
}

pub(super) struct Id {
    /// Null before bind, if the QP type does not match the port space.
    pub(super) ptr: *mut rdma_cm_id,
    /// Options set while the pointer was null.
    pub(super) early: Vec<CmOption>,
    /// QP type.
    pub(super) qp_type: QpType,
    /// QP and its number.
    pub(super) qp: Option<(QpId, u32)>,
    pub(super) state: IdState,
    /// Number of incoming READs and atomics offered in the peer's request.
    pub(super) offered: u8,
    /// Destroyed by the application, but we need to keep it until the QP is destroyed.
    pub(super) zombie: bool,
}

/// State of an id. We need to track this because the library allows calls that should be rejected.
///
/// ```text
/// Idle → Bound → Listening
///   └─────┴→ AddrResolved → RouteResolved → Connected ⇄ Responded → Closed
///                              Requested ↗──────────────────────────↗
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdState {
    /// Created, or the address could not be resolved.
    Idle,
    /// Has a local address.
    Bound,
    /// Listening for connection requests.
    Listening,
    /// The device and the peer's GID are known.
    AddrResolved,
    /// The path to the peer is known.
    RouteResolved,
    /// Accepted by the peer, waiting for the application that manages the QP.
    Responded,
    /// Received a request, waiting for accept or reject.
    Requested,
    /// A connection was requested or accepted, but is not necessarily established.
    Connected,
    /// Closed, rejected by either side, or timed out.
    Closed,
}
