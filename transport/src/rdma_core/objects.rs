//! Objects of an rdma-core device and their handles.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::time::Instant;

use riser_memory::MemSlice;
use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::{RdmaCore, ops};

use super::convert::{SockAddr, checked_cm, last_os_error, mtu};
use super::notices::{Arming, Notices};
use super::shared::{self, Occurrence, Seat};
use super::{OpenError, convert};
use crate::table::Table;
use crate::verbs::{
    Access, AhAttr, AhId, AsyncEvent, CmEvent, CmId, CmOption, CqId, DeviceAttr, Gid, Handle,
    Moderation, Mr, MrId, Mtu, MwId, MwType, PdId, QpId, QpType, RateLimit, SrqId, VerbsError,
    WcOpcode, WrId, XrcdId,
};

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
}

/// Queue used for a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotQueue {
    Send(QpId),
    Recv(QpId),
    Shared(SrqId),
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
    pub(super) qp: Option<QpId>,
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

/// An RDMA device using libibverbs, and librdmacm for connections.
pub struct RdmaCoreDevice {
    pub(super) core: RdmaCore,
    pub(super) context: *mut ibv_context,
    pub(super) channel: *mut rdma_event_channel,
    pub(super) comp: *mut ibv_comp_channel,
    /// Keeps the context open: librdmacm can close a device if it is not used by any id.
    probe: *mut rdma_cm_id,
    /// Seat of this device, in case the context is shared with other devices in this process.
    pub(super) seat: Seat,
    /// Buffer for events read from the seat.
    pub(super) occurrences: Vec<Occurrence>,
    pub(super) attr: DeviceAttr,
    pub(super) addr: IpAddr,
    pub(super) port: u8,
    /// Device clock frequency in kHz.
    pub(super) clock_khz: u64,
    pub(super) gone: bool,
    pub(super) pds: Table<PdId, Pd>,
    pub(super) xrcds: Table<XrcdId, Xrcd>,
    pub(super) regions: Table<MrId, Region>,
    pub(super) mws: Table<MwId, UserWindow>,
    /// Maps keys to windows. This is rarely used.
    pub(super) rkeys: HashMap<u32, MrId>,
    pub(super) cqs: Table<CqId, Cq>,
    pub(super) srqs: Table<SrqId, Srq>,
    pub(super) qps: Table<QpId, Qp>,
    pub(super) qpns: HashMap<u32, QpId>,
    pub(super) ahs: Table<AhId, Ah>,
    pub(super) ids: Table<CmId, Id>,
    pub(super) by_id: HashMap<usize, CmId>,
    pub(super) slots: Table<SlotId, Slot>,
    pub(super) notices: Notices,
    pub(super) async_events: VecDeque<AsyncEvent>,
    pub(super) cm_events: VecDeque<CmEvent>,
    pub(super) scratch: Scratch,
}

// SAFETY: both libraries can be used from any thread. Pointers are only owned by this value, and
// `&self` calls are either read-only or use the locks of the libraries. It is not `Sync`.
unsafe impl Send for RdmaCoreDevice {}

/// Max number of objects of each type.
const MANY: u32 = 1 << 20;

/// Parts used to create a device.
pub(super) struct Parts {
    pub(super) core: RdmaCore,
    pub(super) context: *mut ibv_context,
    pub(super) channel: *mut rdma_event_channel,
    pub(super) comp: *mut ibv_comp_channel,
    pub(super) probe: *mut rdma_cm_id,
    pub(super) seat: Seat,
    pub(super) port: u8,
}

impl RdmaCoreDevice {
    /// Opens the device with this local address.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(addr: IpAddr) -> Result<Self, OpenError> {
        let core = RdmaCore::load()?;
        let failed = |call| {
            move || OpenError::Call {
                call,
                source: last_os_error(),
            }
        };
        // SAFETY: no preconditions.
        let channel = unsafe { (core.cm.rdma_create_event_channel)() };
        if channel.is_null() {
            return Err(failed("rdma_create_event_channel")());
        }
        let (probe, context, port) = match probe(&core, channel, addr) {
            Ok(found) => found,
            Err(source) => {
                // SAFETY: it was created above, and has no ids.
                unsafe { (core.cm.rdma_destroy_event_channel)(channel) };
                return Err(OpenError::NoDevice { addr, source });
            }
        };
        let seat = match Seat::create(context as usize) {
            Ok(seat) => seat,
            Err(error) => {
                // SAFETY: both were created above, and there are no other objects.
                unsafe {
                    (core.cm.rdma_destroy_id)(probe);
                    (core.cm.rdma_destroy_event_channel)(channel);
                }
                return Err(OpenError::Call {
                    call: "eventfd",
                    source: VerbsError::Os(error.raw_os_error().unwrap_or(0)),
                });
            }
        };
        // SAFETY: the context is open while the probe exists.
        let comp = unsafe { (core.verbs.ibv_create_comp_channel)(context) };
        // If anything fails after this, `Drop` will clean up.
        let parts = Parts {
            core,
            context,
            channel,
            comp,
            probe,
            seat,
            port,
        };
        let mut device = Self::of_parts(parts, addr);
        if comp.is_null() {
            return Err(failed("ibv_create_comp_channel")());
        }
        device.attr = device.query_device().map_err(|source| OpenError::Call {
            call: "ibv_query_device",
            source,
        })?;
        // SAFETY: the descriptors are owned by objects that are open.
        let fds = unsafe { [(*channel).fd, (*comp).fd, (*context).async_fd] };
        for fd in fds {
            set_non_blocking(fd).map_err(|source| OpenError::Call {
                call: "fcntl",
                source,
            })?;
        }
        Ok(device)
    }

    /// Creates a device without any objects. Its limits have not been queried yet.
    pub(super) fn of_parts(parts: Parts, addr: IpAddr) -> Self {
        let Parts {
            core,
            context,
            channel,
            comp,
            probe,
            seat,
            port,
        } = parts;
        Self {
            core,
            context,
            channel,
            comp,
            probe,
            seat,
            occurrences: Vec::new(),
            attr: DeviceAttr::default(),
            addr,
            port,
            clock_khz: 0,
            gone: false,
            pds: Table::new("protection domains", MANY),
            xrcds: Table::new("XRC domains", MANY),
            regions: Table::new("memory regions", MANY),
            mws: Table::new("memory windows", MANY),
            rkeys: HashMap::new(),
            cqs: Table::new("completion queues", MANY),
            srqs: Table::new("shared receive queues", MANY),
            qps: Table::new("queue pairs", MANY),
            qpns: HashMap::new(),
            ahs: Table::new("address handles", MANY),
            ids: Table::new("connection identifiers", MANY),
            by_id: HashMap::new(),
            slots: Table::new("work requests", MANY << 4),
            notices: Notices::new(Instant::now()),
            async_events: VecDeque::new(),
            cm_events: VecDeque::new(),
            scratch: Scratch::default(),
        }
    }

    /// Returns the address used to open the device.
    #[must_use]
    pub fn addr(&self) -> IpAddr {
        self.addr
    }

    /// Returns whether the device has been removed. If so, all further calls fail.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.gone
    }

    /// Returns the GID index for our address. RoCE version 2 is preferred over version 1.
    pub(super) fn gid_index(&self) -> Option<u16> {
        let wanted = Gid::from(self.addr);
        let port = self.port_attr(self.port).ok()?;
        (0..u16::try_from(port.gid_tbl_len).ok()?)
            .filter(|i| self.gid(self.port, *i).is_ok_and(|g| g == wanted))
            .min_by_key(|i| !self.is_roce_v2(*i))
    }

    fn is_roce_v2(&self, index: u16) -> bool {
        let path = format!(
            "/sys/class/infiniband/{}/ports/{}/gid_attrs/types/{index}",
            self.attr.name, self.port
        );
        std::fs::read_to_string(path).is_ok_and(|t| t.trim() == "RoCE v2")
    }

    pub(super) fn port_attr(&self, port: u8) -> Result<ibv_port_attr, VerbsError> {
        if port == 0 || port > self.attr.ports {
            return Err(VerbsError::InvalidPort(port));
        }
        let mut theirs = ibv_port_attr::default();
        // SAFETY: the context is open. The function supports two versions of this structure, and we
        // use the larger one.
        let r = unsafe {
            (self.core.verbs.ibv_query_port)(self.context, port, (&raw mut theirs).cast())
        };
        convert::checked(r).map(|()| theirs)
    }

    pub(super) fn gid(&self, port: u8, index: u16) -> Result<Gid, VerbsError> {
        let mut gid = ibv_gid::default();
        // SAFETY: the context is open.
        let r = unsafe {
            (self.core.verbs.ibv_query_gid)(self.context, port, i32::from(index), &raw mut gid)
        };
        if r != 0 {
            return Err(VerbsError::InvalidIndex(index));
        }
        // SAFETY: a GID is 16 bytes, and any value is valid.
        Ok(Gid(unsafe { gid.raw }))
    }

    /// Returns the maximum path MTU of the port.
    pub(super) fn active_mtu(theirs: &ibv_port_attr) -> Mtu {
        mtu(theirs.active_mtu).unwrap_or(Mtu::Mtu1024)
    }
}

impl RdmaCoreDevice {
    /// Detaches a QP from all groups before it is destroyed. Errors are ignored because destroying
    /// the QP would fail as well.
    pub(super) fn leave_groups(&self, qp: &Qp) {
        for (mgid, mlid) in &qp.groups {
            let gid = ibv_gid { raw: mgid.0 };
            // SAFETY: the QP is alive, and the library makes a copy of the GID.
            unsafe { (self.core.verbs.ibv_detach_mcast)(qp.ptr, &raw const gid, *mlid) };
        }
    }
}

impl Drop for RdmaCoreDevice {
    /// Destroys all objects in the order of their dependencies. If the device was removed, its
    /// context is closed, because the kernel is waiting for this.
    fn drop(&mut self) {
        let (verbs, cm) = (self.core.verbs, self.core.cm);
        // SAFETY: all pointers in the tables are valid and are only freed here. They can't be used
        // after this, and the order is based on the dependencies.
        unsafe {
            // QPs must be destroyed before their ids, queues and domain. If they were created by
            // librdmacm, it also needs to destroy them.
            for (_, qp) in self.qps.iter() {
                self.leave_groups(qp);
                match qp.owner.and_then(|id| self.ids.get(id).ok()) {
                    Some(id) => (cm.rdma_destroy_qp)(id.ptr),
                    None => drop((verbs.ibv_destroy_qp)(qp.ptr)),
                }
            }
            for (_, id) in self.ids.iter().filter(|(_, id)| !id.ptr.is_null()) {
                (cm.rdma_destroy_id)(id.ptr);
            }
            for (_, srq) in self.srqs.iter() {
                (verbs.ibv_destroy_srq)(srq.ptr);
            }
            for (_, xrcd) in self.xrcds.iter() {
                ops::ibv_close_xrcd(xrcd.ptr);
            }
            for (_, ah) in self.ahs.iter() {
                (verbs.ibv_destroy_ah)(ah.ptr);
            }
            // Windows must be destroyed before the regions they are bound to.
            for (_, mw) in self.mws.iter() {
                ops::ibv_dealloc_mw(mw.ptr);
            }
            for (_, region) in self.regions.iter() {
                if let Region::Window(w) = region {
                    ops::ibv_dealloc_mw(w.ptr);
                }
            }
            for (_, region) in self.regions.iter() {
                if let Region::Plain { ptr, .. } | Region::Null { ptr, .. } = region {
                    (verbs.ibv_dereg_mr)(*ptr);
                }
            }
            for (_, cq) in self.cqs.iter() {
                // The library waits until all events of a queue have been acknowledged.
                (verbs.ibv_ack_cq_events)(cq.ptr, cq.unacknowledged);
                (verbs.ibv_destroy_cq)(cq.ptr);
            }
            for (_, pd) in self.pds.iter() {
                (verbs.ibv_dealloc_pd)(pd.ptr);
            }
            if !self.comp.is_null() {
                (verbs.ibv_destroy_comp_channel)(self.comp);
            }
            // This must be done before destroying the probe, since the library can free the context
            // after that.
            if self.gone {
                self.seat.leave(|| shared::close_context(self.context));
            }
            (cm.rdma_destroy_id)(self.probe);
            (cm.rdma_destroy_event_channel)(self.channel);
        }
    }
}

type ProbedId = (*mut rdma_cm_id, *mut ibv_context, u8);

/// Binds an id to an address, so that librdmacm opens the device.
fn probe(
    core: &RdmaCore,
    channel: *mut rdma_event_channel,
    addr: IpAddr,
) -> Result<ProbedId, crate::verbs::CmError> {
    let mut id = ptr::null_mut();
    // SAFETY: the channel is open, and the id is an output parameter.
    checked_cm(unsafe {
        (core.cm.rdma_create_id)(channel, &raw mut id, ptr::null_mut(), RDMA_PS_TCP)
    })?;
    let mut at = SockAddr::new(SocketAddr::new(addr, 0));
    // SAFETY: the id has just been created, and the address is valid.
    let bound = checked_cm(unsafe { (core.cm.rdma_bind_addr)(id, at.as_mut_ptr()) });
    // SAFETY: the id is alive.
    let (context, port) = unsafe { ((*id).verbs, (*id).port_num) };
    // A local address without an RDMA device can also be bound, but there won't be a context.
    if bound.is_err() || context.is_null() {
        // SAFETY: it was created above and is not used after this.
        unsafe { (core.cm.rdma_destroy_id)(id) };
        return Err(bound
            .err()
            .unwrap_or(crate::verbs::CmError::AddressNotAvailable));
    }
    Ok((id, context, port))
}

fn set_non_blocking(fd: i32) -> Result<(), VerbsError> {
    // SAFETY: simple system calls using an open descriptor.
    let r = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)
    };
    if r < 0 { Err(last_os_error()) } else { Ok(()) }
}
