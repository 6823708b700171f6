//! A device without hardware, for unit tests: the functions of both libraries that the provider
//! calls for queues, on lists of the test's thread.
//!
//! Every other function of the two tables ends the test's process.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::mem::{size_of, transmute, zeroed};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::RawFd;
use std::ptr;

use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::{Cm, RdmaCore, Verbs as Functions};

use super::objects::{Parts, RdmaCoreDevice};
use super::shared::Seat;
use crate::verbs::{
    CqId, DeviceAttr, QpCap, QpId, QpInitAttr, QpType, RKey, RecvWr, RemoteAddr, SendFlags, SendOp,
    SendWr, Verbs, WrId,
};

/// State behind the functions, and what they were called with.
#[derive(Default)]
pub(super) struct Library {
    /// Completion queues, by address, with what waits in them.
    cqs: Vec<(usize, VecDeque<ibv_wc>)>,
    /// Queues that are armed, by address.
    armed: Vec<usize>,
    /// Events in the channel, by queue.
    events: VecDeque<usize>,
    comp_fd: RawFd,
    /// Work requests that the posts took, in order, by the library's number.
    pub(super) posted: Vec<u64>,
    /// Lengths of the lists that were posted.
    pub(super) lists: Vec<usize>,
    /// Requests that posts still take; the one after that is named as bad.
    pub(super) room: usize,
    /// Polls answer one more than they are asked for.
    pub(super) is_overlong: bool,
    /// Calls that have armed a queue.
    pub(super) arms: usize,
    /// Numbers of events acknowledged by each call.
    pub(super) acknowledged: Vec<u32>,
    /// Completions that come between the decision to arm a queue and the arming.
    pub(super) at_arming: Vec<ibv_wc>,
}

thread_local! {
    static LIBRARY: RefCell<Library> = RefCell::default();
}

/// Works with the library's state.
pub(super) fn library<T>(f: impl FnOnce(&mut Library) -> T) -> T {
    LIBRARY.with_borrow_mut(f)
}

impl Library {
    fn queue(&mut self, cq: usize) -> &mut VecDeque<ibv_wc> {
        let queue = self.cqs.iter_mut().find(|(at, _)| *at == cq);
        &mut queue.expect("a queue that exists").1
    }

    /// Adds a completion, and an event if the queue is armed.
    fn complete(&mut self, cq: usize, wc: ibv_wc) {
        self.queue(cq).push_back(wc);
        if let Some(at) = self.armed.iter().position(|armed| *armed == cq) {
            self.armed.swap_remove(at);
            self.events.push_back(cq);
            let one = 1u64.to_ne_bytes();
            // SAFETY: eight bytes of memory of ours.
            unsafe { libc::write(self.comp_fd, one.as_ptr().cast(), one.len()) };
        }
    }

    /// Events in the channel.
    pub(super) fn events(&self) -> usize {
        self.events.len()
    }

    /// Takes requests of a list with these numbers; the index of the first that it does not take.
    fn take(&mut self, numbers: &[u64]) -> Option<usize> {
        self.lists.push(numbers.len());
        let taken = numbers.len().min(self.room);
        self.room -= taken;
        self.posted.extend(&numbers[..taken]);
        (taken < numbers.len()).then_some(taken)
    }
}

/// Takes a list of requests, which `next` follows; the library's answer.
///
/// # Safety
/// The list is one of live requests.
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
    match library(|library| library.take(&numbers)) {
        None => 0,
        Some(at) => {
            // SAFETY: the caller gives a place for the answer.
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
    // SAFETY: the provider gives a list that ends with null.
    unsafe { post(wr, bad, |wr| ((*wr).wr_id, (*wr).next)) }
}

unsafe extern "C" fn post_recv(
    _: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as above.
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
            // SAFETY: the provider has room, with values in it, for as many as it asks for.
            let place = unsafe { &mut *wc.add(at) };
            *place = match found.status {
                IBV_WC_SUCCESS => found,
                // No more than ibv_poll_cq(3) promises.
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
        // SAFETY: room for eight bytes; the caller gives places for both results, and a queue lives
        // as long as it has events.
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
    _: c_int,
    cq_context: *mut c_void,
    _: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    // SAFETY: the structure is numbers and pointers, for all of which zeros are a value.
    let mut cq: Box<ibv_cq> = Box::new(unsafe { zeroed() });
    (cq.context, cq.cq_context) = (context, cq_context);
    let cq = Box::into_raw(cq);
    library(|library| library.cqs.push((cq as usize, VecDeque::new())));
    cq
}

unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    library(|library| library.cqs.retain(|(at, _)| *at != cq as usize));
    // SAFETY: it came from `create_cq`, and its owner forgets it.
    drop(unsafe { Box::from_raw(cq) });
    0
}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    Box::into_raw(Box::new(ibv_pd { context, handle: 0 }))
}

unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: it came from `alloc_pd`, and its owner forgets it.
    drop(unsafe { Box::from_raw(pd) });
    0
}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: as in `create_cq`; the domain is alive.
    let mut qp: Box<ibv_qp> = Box::new(unsafe { zeroed() });
    // SAFETY: as above; the caller gives the attributes.
    (qp.context, qp.qp_type) = unsafe { ((*pd).context, (*init).qp_type) };
    Box::into_raw(qp)
}

unsafe extern "C" fn query_qp(
    _: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _: c_int,
    _: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller gives a place for the answer.
    unsafe { (*attr).qp_state = IBV_QPS_RTS };
    0
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: it came from `create_qp`, and its owner forgets it.
    drop(unsafe { Box::from_raw(qp) });
    0
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: made by `RdmaCoreDevice::fake`, and its owner forgets it.
    drop(unsafe { Box::from_raw(channel) });
    0
}

unsafe extern "C" fn destroy_id(_: *mut rdma_cm_id) -> c_int {
    0
}

unsafe extern "C" fn destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: made by `RdmaCoreDevice::fake`, and its owner forgets it.
    drop(unsafe { Box::from_raw(channel) });
}

/// Stands for every function that the fake device lacks.
unsafe extern "C" fn unexpected() {
    std::process::abort();
}

/// Both tables, in which the functions above stand for the libraries'.
fn core() -> RdmaCore {
    const VERBS: usize = size_of::<Functions>() / size_of::<usize>();
    const CM: usize = size_of::<Cm>() / size_of::<usize>();
    type Any = unsafe extern "C" fn();
    // SAFETY: the tables are function pointers and nothing else, and this function may be called
    // through any of them: it reads no arguments and does not return.
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
    verbs.ibv_create_qp = create_qp;
    verbs.ibv_query_qp = query_qp;
    verbs.ibv_destroy_qp = destroy_qp;
    verbs.ibv_destroy_comp_channel = destroy_comp_channel;
    cm.rdma_destroy_id = destroy_id;
    cm.rdma_destroy_event_channel = destroy_event_channel;
    RdmaCore { verbs, cm }
}

fn eventfd() -> RawFd {
    let flags = libc::EFD_CLOEXEC | libc::EFD_NONBLOCK | libc::EFD_SEMAPHORE;
    // SAFETY: a plain system call. The descriptor is left to the end of the test's process.
    let fd = unsafe { libc::eventfd(0, flags) };
    assert!(fd >= 0);
    fd
}

impl RdmaCoreDevice {
    /// A device behind the functions of this module. One at a time in a thread.
    pub(super) fn fake() -> Self {
        let comp_fd = eventfd();
        library(|library| {
            *library = Library {
                comp_fd,
                room: usize::MAX,
                ..Library::default()
            }
        });
        // SAFETY: the structures are numbers, pointers and optional functions, for all of which
        // zeros are a value.
        let (mut context, mut comp): (Box<ibv_context>, Box<ibv_comp_channel>) =
            unsafe { (Box::new(zeroed()), Box::new(zeroed())) };
        context.ops.poll_cq = Some(poll_cq);
        context.ops.req_notify_cq = Some(req_notify_cq);
        context.ops.post_send = Some(post_send);
        context.ops.post_recv = Some(post_recv);
        context.async_fd = eventfd();
        comp.fd = comp_fd;
        let channel = Box::new(rdma_event_channel { fd: eventfd() });
        // The library owns a context, so nothing here frees it.
        let context = Box::into_raw(context);
        let parts = Parts {
            core: core(),
            context,
            channel: Box::into_raw(channel),
            comp: Box::into_raw(comp),
            probe: ptr::null_mut(),
            seat: Seat::take(context as usize).unwrap(),
            port: 1,
        };
        let mut device = Self::of_parts(parts, IpAddr::V4(Ipv4Addr::LOCALHOST));
        device.attr = DeviceAttr {
            max_cqe: 1 << 10,
            max_qp_wr: 1 << 10,
            max_sge: 4,
            ..DeviceAttr::default()
        };
        device
    }

    /// A completion queue and a queue pair on it.
    pub(super) fn fake_queues(&mut self) -> (CqId, QpId) {
        let pd = self.alloc_pd().unwrap();
        let cq = self.create_cq(64).unwrap();
        let cap = QpCap::new(64, 64);
        let qp = self.create_qp(&QpInitAttr::new(pd, cq, QpType::Rc, cap));
        (cq, qp.unwrap())
    }

    /// Completes a request, by the number that the library has for it.
    pub(super) fn fake_completion(&mut self, cq: CqId, wr_id: u64) {
        self.fake_end(cq, completion(wr_id));
    }

    /// Adds a completion.
    pub(super) fn fake_end(&mut self, cq: CqId, wc: ibv_wc) {
        let at = self.cqs.get(cq).unwrap().ptr as usize;
        library(|library| library.complete(at, wc));
    }

    /// Posts a receive; the number that the library has for it.
    pub(super) fn fake_receive(&mut self, qp: QpId, wr_id: u64) -> u64 {
        let recv = receive(wr_id);
        self.post_recv(qp, &[recv]).unwrap();
        library(|library| *library.posted.last().unwrap())
    }

    /// Posts a receive, and completes it.
    pub(super) fn fake_message(&mut self, cq: CqId, qp: QpId, wr_id: u64) {
        let number = self.fake_receive(qp, wr_id);
        self.fake_completion(cq, number);
    }
}

/// A completion of a request with this number of the library's.
pub(super) fn completion(wr_id: u64) -> ibv_wc {
    ibv_wc {
        wr_id,
        status: IBV_WC_SUCCESS,
        ..ibv_wc::default()
    }
}

/// A receive of nothing.
pub(super) fn receive(wr_id: u64) -> RecvWr<'static> {
    RecvWr {
        wr_id: WrId(wr_id),
        sges: &[],
    }
}

/// A write of nothing, signaled or not.
pub(super) fn write(wr_id: u64, flags: SendFlags) -> SendWr<'static> {
    let rkey = RKey(0);
    let remote = RemoteAddr { addr: 0, rkey };
    SendWr::new(wr_id, SendOp::Write(remote), &[]).flags(flags)
}
