//! A fake device for unit tests. It implements all functions of both libraries that are used by the
//! provider for queues, and stores the state in a thread-local variable.
//!
//! All other functions of the two tables abort the test process.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::mem::{size_of, transmute, zeroed};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::RawFd;
use std::ptr;

use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::{Cm, RdmaCore, Verbs as Functions};

use super::context::{LINK_LAYER_ETHERNET, Parts, RdmaCoreDevice};
use super::shared::Seat;
use crate::verbs::{
    CqId, DeviceAttr, Gid, QpCap, QpId, QpInitAttr, QpType, RKey, RecvWr, RemoteAddr, SendFlags,
    SendOp, SendWr, Verbs, WrId,
};

/// State of the fake library, and a record of its calls.
#[derive(Default)]
pub(super) struct Library {
    /// CQs by address, with the available completions.
    cqs: Vec<(usize, VecDeque<ibv_wc>)>,
    /// Addresses of armed queues.
    armed: Vec<usize>,
    /// Addresses of queues with an event in the channel.
    events: VecDeque<usize>,
    comp_fd: RawFd,
    /// Posted work requests in order, using the library's numbers.
    pub(super) posted: Vec<u64>,
    /// For each send of a posted list, whether it is signaled.
    pub(super) signaled: Vec<bool>,
    /// Length of each posted list.
    pub(super) lists: Vec<usize>,
    /// Number of requests that can still be posted. The next request after that will be reported as
    /// bad.
    pub(super) room: usize,
    /// If set, polling returns one more completion than requested.
    pub(super) is_overlong: bool,
    /// Number of calls to arm a queue.
    pub(super) arms: usize,
    /// Number of events acknowledged by each call.
    pub(super) acknowledged: Vec<u32>,
    /// Completions to be added just before a queue is armed.
    pub(super) at_arming: Vec<ibv_wc>,
    /// GID index of the last address handle.
    pub(super) sgid_index: u8,
    /// GID table of the port.
    pub(super) gids: Vec<IpAddr>,
    pub(super) link_layer: u8,
    /// Number of windows that have been allocated.
    windows: u32,
}

thread_local! {
    static LIBRARY: RefCell<Library> = RefCell::default();
}

/// Calls `f` with the state of the library.
pub(super) fn library<T>(f: impl FnOnce(&mut Library) -> T) -> T {
    LIBRARY.with_borrow_mut(f)
}

impl Library {
    fn queue(&mut self, cq: usize) -> &mut VecDeque<ibv_wc> {
        let queue = self.cqs.iter_mut().find(|(at, _)| *at == cq);
        &mut queue.expect("a queue that exists").1
    }

    /// Adds a completion. If the queue is armed, also adds an event.
    fn complete(&mut self, cq: usize, wc: ibv_wc) {
        self.queue(cq).push_back(wc);
        if let Some(at) = self.armed.iter().position(|armed| *armed == cq) {
            self.armed.swap_remove(at);
            self.events.push_back(cq);
            let one = 1u64.to_ne_bytes();
            // SAFETY: the pointer is valid for eight bytes.
            unsafe { libc::write(self.comp_fd, one.as_ptr().cast(), one.len()) };
        }
    }

    /// Returns the number of events in the channel.
    pub(super) fn events(&self) -> usize {
        self.events.len()
    }

    /// Accepts a list of requests with these numbers. Returns the index of the first request that
    /// is not accepted.
    fn post_requests(&mut self, numbers: &[u64]) -> Option<usize> {
        self.lists.push(numbers.len());
        let taken = numbers.len().min(self.room);
        self.room -= taken;
        self.posted.extend(&numbers[..taken]);
        (taken < numbers.len()).then_some(taken)
    }
}

/// Accepts a list of requests using `next` as the iterator. Returns the result of the library call.
///
/// # Safety
/// The list must contain valid requests.
unsafe fn post<T>(
    mut wr: *mut T,
    bad: *mut *mut T,
    next: impl Fn(*mut T) -> (u64, *mut T),
) -> c_int {
    let (mut numbers, mut places) = (Vec::new(), Vec::new());
    while !wr.is_null() {
        let (number, behind) = next(wr);
        numbers.push(number);
        places.push(wr);
        wr = behind;
    }
    match library(|library| library.post_requests(&numbers)) {
        None => 0,
        Some(at) => {
            // SAFETY: the caller passes a valid output pointer.
            unsafe { *bad = places[at] };
            libc::ENOMEM
        }
    }
}

unsafe extern "C" fn post_send(
    _: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the provider passes a null-terminated list.
    unsafe {
        post(wr, bad, |wr| {
            let is_signaled = (*wr).send_flags & IBV_SEND_SIGNALED != 0;
            library(|library| library.signaled.push(is_signaled));
            ((*wr).wr_id, (*wr).next)
        })
    }
}

unsafe extern "C" fn post_recv(
    _: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: same as above.
    unsafe { post(wr, bad, |wr| ((*wr).wr_id, (*wr).next)) }
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    library(|library| {
        if library.is_overlong {
            return entries + 1;
        }
        let queue = library.queue(cq as usize);
        let count = queue.len().min(entries as usize);
        for (at, found) in queue.drain(..count).enumerate() {
            // SAFETY: the provider passes an initialized array of the requested size.
            let place = unsafe { &mut *wc.add(at) };
            *place = match found.status {
                IBV_WC_SUCCESS => found,
                // Only set the fields documented in ibv_poll_cq(3).
                _ => ibv_wc {
                    wr_id: found.wr_id,
                    status: found.status,
                    vendor_err: found.vendor_err,
                    qp_num: found.qp_num,
                    ..*place
                },
            };
        }
        count as c_int
    })
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, _: c_int) -> c_int {
    library(|library| {
        library.arms += 1;
        for wc in std::mem::take(&mut library.at_arming) {
            library.complete(cq as usize, wc);
        }
        library.armed.push(cq as usize);
    });
    0
}

unsafe extern "C" fn get_cq_event(
    _: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    context: *mut *mut c_void,
) -> c_int {
    library(|library| {
        let Some(at) = library.events.pop_front() else {
            return -1;
        };
        let mut one = [0u8; 8];
        // SAFETY: there is space for eight bytes. The caller passes valid output pointers, and a
        // queue is alive while it has events.
        unsafe {
            libc::read(library.comp_fd, one.as_mut_ptr().cast(), one.len());
            *cq = at as *mut ibv_cq;
            *context = (*(at as *mut ibv_cq)).cq_context;
        }
        0
    })
}

unsafe extern "C" fn ack_cq_events(_: *mut ibv_cq, count: u32) {
    if count > 0 {
        library(|library| library.acknowledged.push(count));
    }
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cq_context: *mut c_void,
    _: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    // SAFETY: all fields are numbers and pointers, for which zero is a valid value.
    let mut cq: Box<ibv_cq> = Box::new(unsafe { zeroed() });
    (cq.context, cq.cq_context, cq.cqe) = (context, cq_context, entries);
    let cq = Box::into_raw(cq);
    library(|library| library.cqs.push((cq as usize, VecDeque::new())));
    cq
}

unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    library(|library| library.cqs.retain(|(at, _)| *at != cq as usize));
    // SAFETY: it was created by `create_cq`, and the owner does not use it after this.
    drop(unsafe { Box::from_raw(cq) });
    0
}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    Box::into_raw(Box::new(ibv_pd { context, handle: 0 }))
}

unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: it was created by `alloc_pd`, and the owner does not use it after this.
    drop(unsafe { Box::from_raw(pd) });
    0
}

unsafe extern "C" fn query_port(
    _: *mut ibv_context,
    _: u8,
    attr: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: the provider passes the larger version of this structure.
    let attr = unsafe { &mut *attr.cast::<ibv_port_attr>() };
    library(|library| {
        attr.gid_tbl_len = library.gids.len() as c_int;
        attr.link_layer = library.link_layer;
    });
    0
}

unsafe extern "C" fn query_gid(
    _: *mut ibv_context,
    _: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    let addr = library(|library| library.gids[index as usize]);
    // SAFETY: the caller passes a valid output pointer.
    unsafe { (*gid).raw = Gid::from(addr).0 };
    0
}

unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the caller passes valid attributes.
    library(|library| library.sgid_index = unsafe { (*attr).grh.sgid_index });
    // SAFETY: same as in `create_cq`; the domain is valid.
    let mut ah: Box<ibv_ah> = Box::new(unsafe { zeroed() });
    // SAFETY: same as above.
    (ah.context, ah.pd) = unsafe { ((*pd).context, pd) };
    Box::into_raw(ah)
}

unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: it was created by `create_ah`, and the owner does not use it after this.
    drop(unsafe { Box::from_raw(ah) });
    0
}

unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    _: c_int,
) -> *mut ibv_mr {
    // SAFETY: same as in `create_cq`; the domain is valid.
    let mut mr: Box<ibv_mr> = Box::new(unsafe { zeroed() });
    // SAFETY: same as above.
    (mr.context, mr.pd) = unsafe { ((*pd).context, pd) };
    (mr.addr, mr.length) = (addr, length);
    Box::into_raw(mr)
}

unsafe extern "C" fn reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    _: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: guaranteed by the caller.
    unsafe { reg_mr(pd, addr, length, access) }
}

unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: it was created by `reg_mr`, and the owner does not use it after this.
    drop(unsafe { Box::from_raw(mr) });
    0
}

unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, mw_type: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: same as in `create_cq`; the domain is valid.
    let mut mw: Box<ibv_mw> = Box::new(unsafe { zeroed() });
    // SAFETY: same as above.
    (mw.context, mw.pd) = unsafe { ((*pd).context, pd) };
    mw.type_ = mw_type;
    mw.rkey = library(|library| {
        library.windows += 1;
        library.windows << 8
    });
    Box::into_raw(mw)
}

unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: it was created by `alloc_mw`, and the owner does not use it after this.
    drop(unsafe { Box::from_raw(mw) });
    0
}

unsafe extern "C" fn create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: same as in `create_cq`; the domain is valid.
    let mut srq: Box<ibv_srq> = Box::new(unsafe { zeroed() });
    // SAFETY: same as above; the caller passes valid attributes.
    (srq.context, srq.srq_context) = unsafe { ((*pd).context, (*init).srq_context) };
    Box::into_raw(srq)
}

unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: it was created by `create_srq`, and the owner does not use it after this.
    drop(unsafe { Box::from_raw(srq) });
    0
}

unsafe extern "C" fn post_srq_recv(
    _: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: same as in `post_send`.
    unsafe { post(wr, bad, |wr| ((*wr).wr_id, (*wr).next)) }
}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: same as in `create_cq`; the domain is valid.
    let mut qp: Box<ibv_qp> = Box::new(unsafe { zeroed() });
    // SAFETY: same as above; the caller passes valid attributes.
    (qp.context, qp.qp_type) = unsafe { ((*pd).context, (*init).qp_type) };
    Box::into_raw(qp)
}

unsafe extern "C" fn query_qp(
    _: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _: c_int,
    _: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller passes a valid output pointer.
    unsafe { (*attr).qp_state = IBV_QPS_RTS };
    0
}

unsafe extern "C" fn modify_qp(_: *mut ibv_qp, _: *mut ibv_qp_attr, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: it was created by `create_qp`, and the owner doesn't use it after this.
    drop(unsafe { Box::from_raw(qp) });
    0
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: it was created by `RdmaCoreDevice::fake`, and the owner does not use it after this.
    drop(unsafe { Box::from_raw(channel) });
    0
}

unsafe extern "C" fn destroy_id(_: *mut rdma_cm_id) -> c_int {
    0
}

unsafe extern "C" fn destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: it was created by `RdmaCoreDevice::fake`, and the owner doesn't use it after this.
    drop(unsafe { Box::from_raw(channel) });
}

/// Used for all functions that are not implemented by the fake device.
unsafe extern "C" fn unexpected() {
    std::process::abort();
}

/// Returns both function tables with the functions from this module.
fn core() -> RdmaCore {
    const VERBS: usize = size_of::<Functions>() / size_of::<usize>();
    const CM: usize = size_of::<Cm>() / size_of::<usize>();
    type Any = unsafe extern "C" fn();
    // SAFETY: the tables only contain function pointers. This function can be called using any of
    // them, because it ignores its arguments and never returns.
    let (mut verbs, mut cm) = unsafe {
        (
            transmute::<[Any; VERBS], Functions>([unexpected; VERBS]),
            transmute::<[Any; CM], Cm>([unexpected; CM]),
        )
    };
    verbs.ibv_get_cq_event = get_cq_event;
    verbs.ibv_ack_cq_events = ack_cq_events;
    verbs.ibv_create_cq = create_cq;
    verbs.ibv_destroy_cq = destroy_cq;
    verbs.ibv_alloc_pd = alloc_pd;
    verbs.ibv_dealloc_pd = dealloc_pd;
    verbs.ibv_query_port = query_port;
    verbs.ibv_query_gid = query_gid;
    verbs.ibv_create_ah = create_ah;
    verbs.ibv_destroy_ah = destroy_ah;
    verbs.ibv_reg_mr = reg_mr;
    verbs.ibv_reg_mr_iova = reg_mr_iova;
    verbs.ibv_dereg_mr = dereg_mr;
    verbs.ibv_create_srq = create_srq;
    verbs.ibv_destroy_srq = destroy_srq;
    verbs.ibv_create_qp = create_qp;
    verbs.ibv_query_qp = query_qp;
    verbs.ibv_modify_qp = modify_qp;
    verbs.ibv_destroy_qp = destroy_qp;
    verbs.ibv_destroy_comp_channel = destroy_comp_channel;
    cm.rdma_destroy_id = destroy_id;
    cm.rdma_destroy_event_channel = destroy_event_channel;
    RdmaCore { verbs, cm }
}

fn eventfd() -> RawFd {
    let flags = libc::EFD_CLOEXEC | libc::EFD_NONBLOCK | libc::EFD_SEMAPHORE;
    // SAFETY: simple system call. The descriptor is leaked until the test process exits.
    let fd = unsafe { libc::eventfd(0, flags) };
    assert!(fd >= 0);
    fd
}

impl RdmaCoreDevice {
    /// Creates a fake device. There can only be one per thread.
    pub(super) fn fake() -> Self {
        let comp_fd = eventfd();
        library(|library| {
            *library = Library {
                comp_fd,
                room: usize::MAX,
                gids: vec![Ipv4Addr::LOCALHOST.into()],
                link_layer: LINK_LAYER_ETHERNET,
                ..Library::default()
            }
        });
        // SAFETY: all fields are numbers, pointers and optional functions, for which zero is a
        // valid value.
        let (mut context, mut comp): (Box<ibv_context>, Box<ibv_comp_channel>) =
            unsafe { (Box::new(zeroed()), Box::new(zeroed())) };
        // SAFETY: same as above.
        context.device = Box::into_raw(Box::new(unsafe { zeroed() }));
        context.ops.poll_cq = Some(poll_cq);
        context.ops.req_notify_cq = Some(req_notify_cq);
        context.ops.post_send = Some(post_send);
        context.ops.post_recv = Some(post_recv);
        context.ops.post_srq_recv = Some(post_srq_recv);
        context.async_fd = eventfd();
        comp.fd = comp_fd;
        let channel = Box::new(rdma_event_channel { fd: eventfd() });
        // A context is owned by the library, so we don't free it here.
        let context = Box::into_raw(context);
        let parts = Parts {
            core: core(),
            context,
            channel: Box::into_raw(channel),
            comp: Box::into_raw(comp),
            probe: ptr::null_mut(),
            seat: Seat::create(context as usize).unwrap(),
            port: 1,
        };
        let mut device = Self::of_parts(parts, IpAddr::V4(Ipv4Addr::LOCALHOST));
        device.attr = DeviceAttr {
            max_cqe: 1 << 10,
            max_qp_wr: 1 << 10,
            max_sge: 4,
            ports: 1,
            ..DeviceAttr::default()
        };
        device
    }

    /// Adds support for memory windows.
    pub(super) fn fake_windows(&mut self) {
        self.attr.max_fast_reg_segments = 1;
        // SAFETY: the context is valid and only used by this thread.
        let ops = unsafe { &mut (*self.context).ops };
        ops.alloc_mw = Some(alloc_mw);
        ops.dealloc_mw = Some(dealloc_mw);
    }

    /// Creates a CQ, and a QP using it.
    pub(super) fn fake_queues(&mut self) -> (CqId, QpId) {
        let pd = self.alloc_pd().unwrap();
        let cq = self.create_cq(64).unwrap();
        let cap = QpCap::new(64, 64);
        let qp = self.create_qp(&QpInitAttr::new(pd, cq, QpType::Rc, cap));
        (cq, qp.unwrap())
    }

    /// Completes the request with this library number.
    pub(super) fn fake_completion(&mut self, cq: CqId, wr_id: u64) {
        self.fake_end(cq, completion(wr_id));
    }

    /// Adds a completion.
    pub(super) fn fake_end(&mut self, cq: CqId, wc: ibv_wc) {
        let at = self.cqs.ptr(cq).unwrap() as usize;
        library(|library| library.complete(at, wc));
    }

    /// Posts a receive and returns its library number.
    pub(super) fn fake_receive(&mut self, qp: QpId, wr_id: u64) -> u64 {
        let recv = receive(wr_id);
        self.post_recv(qp, &[recv]).unwrap();
        library(|library| *library.posted.last().unwrap())
    }

    /// Posts and completes a receive.
    pub(super) fn fake_message(&mut self, cq: CqId, qp: QpId, wr_id: u64) {
        let number = self.fake_receive(qp, wr_id);
        self.fake_completion(cq, number);
    }
}

/// Returns a completion for the request with this library number.
pub(super) fn completion(wr_id: u64) -> ibv_wc {
    ibv_wc {
        wr_id,
        status: IBV_WC_SUCCESS,
        ..ibv_wc::default()
    }
}

/// Returns an empty receive request.
pub(super) fn receive(wr_id: u64) -> RecvWr<'static> {
    RecvWr {
        wr_id: WrId(wr_id),
        sges: &[],
    }
}

/// Returns an empty write request.
pub(super) fn write(wr_id: u64, flags: SendFlags) -> SendWr<'static> {
    let rkey = RKey(0);
    let remote = RemoteAddr { addr: 0, rkey };
    SendWr::new(wr_id, SendOp::Write(remote), &[]).flags(flags)
}
