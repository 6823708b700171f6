//! Objects of an rdma-core device, by their handles.

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

/// Completions taken from the library in one call.
pub(super) const BATCH: usize = 32;

/// Names a posted request to the library.
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

/// A handle as one 64-bit number, and back.
pub(super) fn pack(h: Handle) -> u64 {
    h.index() as u64 | u64::from(h.generation()) << 32
}

pub(super) fn unpack(value: u64) -> Handle {
    Handle::new(value as u32, (value >> 32) as u32)
}

/// Request that was posted and has not completed.
pub(super) struct Slot {
    pub(super) wr_id: WrId,
    pub(super) opcode: WcOpcode,
    /// Queue that the request was posted to, whose order says which others are done with it.
    pub(super) queue: SlotQueue,
}

/// Queue that a request was posted to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotQueue {
    Send(QpId),
    Recv(QpId),
    Shared(SrqId),
}

/// Room in which chains are built; it keeps its capacity from post to post.
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
    /// Queue pairs and shared receive queues.
    pub(super) users: u32,
}

pub(super) struct Ah {
    pub(super) ptr: *mut ibv_ah,
    pub(super) attr: AhAttr,
}

pub(super) enum Region {
    /// Memory region over memory of ours.
    Plain {
        pd: PdId,
        ptr: *mut ibv_mr,
        access: Access,
        mr: Mr,
        memory: MemSlice,
        windows: u32,
    },
    /// A null region, which has no memory.
    Null { pd: PdId, ptr: *mut ibv_mr, mr: Mr },
    /// A memory window of type 2 in the place of a fast-registration region.
    Window(Window),
}

pub(super) struct Window {
    pub(super) pd: PdId,
    pub(super) ptr: *mut ibv_mw,
    pub(super) mr: Mr,
    pub(super) access: Access,
    /// Range of the next bind, and the region that it lies in.
    pub(super) mapped: Option<(MrId, MemSlice)>,
    pub(super) valid: bool,
}

/// A memory window that the user binds.
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

/// When a completion came into its queue.
#[derive(Clone, Copy, Default)]
pub(super) struct Times {
    /// Time by the device's clock, in its ticks.
    pub(super) ticks: u64,
    /// Nanoseconds since the Unix epoch.
    pub(super) wall: u64,
}

pub(super) struct Cq {
    /// The queue; an extended one where its completions have times.
    pub(super) ptr: *mut ibv_cq,
    pub(super) users: u32,
    pub(super) vector: u32,
    pub(super) overrun: bool,
    /// Room for what the library gives in one call, all zero between two calls, since of a failed
    /// request the library writes a few fields only. It is kept: a poll that finds nothing should
    /// not have to zero it.
    pub(super) batch: RefCell<Box<[ibv_wc]>>,
    /// Completions taken out of the library before the user polls for them.
    pub(super) peeked: RefCell<VecDeque<ibv_wc>>,
    /// The time of each of these, in a queue that has times.
    pub(super) times: Option<RefCell<VecDeque<Times>>>,
    pub(super) moderation: Moderation,
    /// One of them has come since the user asked for a notification.
    pub(super) has_new: Cell<bool>,
    pub(super) arming: Arming,
    /// Events taken from the channel and not acknowledged.
    pub(super) unacknowledged: u32,
}

impl Cq {
    /// A queue that the library is still to make.
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

    /// The oldest completion that was taken out of the library.
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
    /// Domain and completion queue of one of an XRC domain.
    pub(super) xrc: Option<(XrcdId, CqId)>,
    pub(super) users: u32,
    pub(super) posted: Vec<SlotId>,
}

pub(super) struct Qp {
    pub(super) ptr: *mut ibv_qp,
    pub(super) qpn: u32,
    pub(super) init: crate::verbs::QpInitAttr,
    pub(super) rate: RateLimit,
    /// Multicast groups, with their LIDs. The kernel does not destroy a queue pair that has some.
    pub(super) groups: Vec<(Gid, u16)>,
    /// The identifier whose queue pair it is; librdmacm frees it then.
    pub(super) owner: Option<CmId>,
    pub(super) sent: VecDeque<SlotId>,
    pub(super) received: VecDeque<SlotId>,
}

pub(super) struct Id {
    /// Null before one whose type its port space does not say is bound.
    pub(super) ptr: *mut rdma_cm_id,
    /// Options that were set before that.
    pub(super) early: Vec<CmOption>,
    /// Type of its queue pairs.
    pub(super) qp_type: QpType,
    pub(super) qp: Option<QpId>,
    pub(super) state: IdState,
    /// READs and atomics that the peer's request offers to hold at once.
    pub(super) offered: u8,
    /// Destroyed by the user while its queue pair lives; goes with that.
    pub(super) zombie: bool,
}

/// State of an identifier, kept here because the library permits calls that the contract refuses.
///
/// ```text
/// Idle → Bound → Listening
///   └─────┴→ AddrResolved → RouteResolved → Connected ⇄ Responded → Closed
///                              Requested ↗──────────────────────────↗
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdState {
    /// Made, or its address could not be resolved.
    Idle,
    /// Has a local address.
    Bound,
    /// Listens for connection requests.
    Listening,
    /// Knows the device and the peer's GID.
    AddrResolved,
    /// The path to the peer is known.
    RouteResolved,
    /// The peer has accepted, and the owner of the queue pair has a part of its own to do.
    Responded,
    /// A peer's request, to be accepted or rejected.
    Requested,
    /// Asked for or accepted a connection, established or not.
    Connected,
    /// Refused, by either side, or never answered.
    Closed,
}

/// An RDMA device behind libibverbs, with librdmacm for its connections.
pub struct RdmaCoreDevice {
    pub(super) core: RdmaCore,
    pub(super) context: *mut ibv_context,
    pub(super) channel: *mut rdma_event_channel,
    pub(super) comp: *mut ibv_comp_channel,
    /// Holds the context: librdmacm may close a device that no identifier uses.
    probe: *mut rdma_cm_id,
    /// Its place among the devices of this process at this context.
    pub(super) seat: Seat,
    /// Buffer for the events of the seat.
    pub(super) occurrences: Vec<Occurrence>,
    pub(super) attr: DeviceAttr,
    pub(super) addr: IpAddr,
    pub(super) port: u8,
    /// Frequency of the device's clock, in kHz.
    pub(super) clock_khz: u64,
    pub(super) gone: bool,
    pub(super) pds: Table<PdId, Pd>,
    pub(super) xrcds: Table<XrcdId, Xrcd>,
    pub(super) regions: Table<MrId, Region>,
    pub(super) mws: Table<MwId, UserWindow>,
    /// Keys of windows, for the rare look-ups by key.
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

// SAFETY: both libraries may be called from any thread; the pointers are owned by this value alone,
// and `&self` calls only read or go through the libraries' own locks. It is not `Sync`.
unsafe impl Send for RdmaCoreDevice {}

/// Most objects of a kind that we keep track of.
const MANY: u32 = 1 << 20;

/// What a device is made of.
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
    /// Opens the device that has a local address.
    ///
    /// # Errors
    /// [`OpenError`] says what is missing.
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
                // SAFETY: made above, with no identifier left on it.
                unsafe { (core.cm.rdma_destroy_event_channel)(channel) };
                return Err(OpenError::NoDevice { addr, source });
            }
        };
        let seat = match Seat::take(context as usize) {
            Ok(seat) => seat,
            Err(error) => {
                // SAFETY: both were made above, and nothing else was.
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
        // SAFETY: the context is open as long as the probe exists.
        let comp = unsafe { (core.verbs.ibv_create_comp_channel)(context) };
        // From here on the value's `Drop` tears down what a failure leaves.
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
        // SAFETY: the three descriptors belong to objects that are open.
        let fds = unsafe { [(*channel).fd, (*comp).fd, (*context).async_fd] };
        for fd in fds {
            set_non_blocking(fd).map_err(|source| OpenError::Call {
                call: "fcntl",
                source,
            })?;
        }
        Ok(device)
    }

    /// A device without objects. Its limits are still to be asked for.
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

    /// The address that it was opened at.
    #[must_use]
    pub fn addr(&self) -> IpAddr {
        self.addr
    }

    /// Whether the device has gone away; everything on it fails from now on.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.gone
    }

    /// Index of the GID that stands for our address, RoCE version 2 before version 1.
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
        // SAFETY: the context is open; the structure is the larger of the two the function knows.
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
        // SAFETY: every bit pattern of a GID is 16 bytes.
        Ok(Gid(unsafe { gid.raw }))
    }

    /// The largest path MTU that the port uses.
    pub(super) fn active_mtu(theirs: &ibv_port_attr) -> Mtu {
        mtu(theirs.active_mtu).unwrap_or(Mtu::Mtu1024)
    }
}

impl RdmaCoreDevice {
    /// Detaches a queue pair from its groups before it goes. What fails here lets that fail.
    pub(super) fn leave_groups(&self, qp: &Qp) {
        for (mgid, mlid) in &qp.groups {
            let gid = ibv_gid { raw: mgid.0 };
            // SAFETY: the queue pair is alive, and the library copies the GID.
            unsafe { (self.core.verbs.ibv_detach_mcast)(qp.ptr, &raw const gid, *mlid) };
        }
    }
}

impl Drop for RdmaCoreDevice {
    /// Tears everything down, users before what they use. A device that was taken away is released:
    /// the kernel waits for that.
    fn drop(&mut self) {
        let (verbs, cm) = (self.core.verbs, self.core.cm);
        // SAFETY: every pointer in the tables is alive, is freed here once, and nothing can use it
        // afterwards; the order is that of the objects' dependencies.
        unsafe {
            // Queue pairs before their identifiers, queues and domain; librdmacm frees those that
            // it made.
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
            // Windows before the regions that they are bound to.
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
                // The library waits for the acknowledgement of each event of the queue.
                (verbs.ibv_ack_cq_events)(cq.ptr, cq.unacknowledged);
                (verbs.ibv_destroy_cq)(cq.ptr);
            }
            for (_, pd) in self.pds.iter() {
                (verbs.ibv_dealloc_pd)(pd.ptr);
            }
            if !self.comp.is_null() {
                (verbs.ibv_destroy_comp_channel)(self.comp);
            }
            // Before the probe goes, since without it the library may free the context.
            if self.gone {
                self.seat.leave(|| shared::close_context(self.context));
            }
            (cm.rdma_destroy_id)(self.probe);
            (cm.rdma_destroy_event_channel)(self.channel);
        }
    }
}

type Probed = (*mut rdma_cm_id, *mut ibv_context, u8);

/// Binds an identifier to the address, which makes librdmacm open the device.
fn probe(
    core: &RdmaCore,
    channel: *mut rdma_event_channel,
    addr: IpAddr,
) -> Result<Probed, crate::verbs::CmError> {
    let mut id = ptr::null_mut();
    // SAFETY: the channel is open; the identifier is written.
    checked_cm(unsafe {
        (core.cm.rdma_create_id)(channel, &raw mut id, ptr::null_mut(), RDMA_PS_TCP)
    })?;
    let mut at = SockAddr::new(SocketAddr::new(addr, 0));
    // SAFETY: the identifier was just made, the address is one.
    let bound = checked_cm(unsafe { (core.cm.rdma_bind_addr)(id, at.as_mut_ptr()) });
    // SAFETY: the identifier is alive.
    let (context, port) = unsafe { ((*id).verbs, (*id).port_num) };
    // An address of this host without an RDMA device can be bound as well, and has no context.
    if bound.is_err() || context.is_null() {
        // SAFETY: made above and not used again.
        unsafe { (core.cm.rdma_destroy_id)(id) };
        return Err(bound
            .err()
            .unwrap_or(crate::verbs::CmError::AddressNotAvailable));
    }
    Ok((id, context, port))
}

fn set_non_blocking(fd: i32) -> Result<(), VerbsError> {
    // SAFETY: plain system calls on a descriptor that is open.
    let r = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)
    };
    if r < 0 { Err(last_os_error()) } else { Ok(()) }
}
