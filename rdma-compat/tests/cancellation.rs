//! Cancellation of threads that wait for events. These calls are cancellation points in rdma-core.

#![allow(unsafe_code, reason = "a C interface is called")]
#![allow(unused_unsafe, reason = "calls have blocks of their own")]

mod library;

use std::ffi::{c_int, c_void};
use std::mem::{transmute, zeroed};
use std::ptr;
use std::thread;
use std::time::Duration;

use library::*;
use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::ops;

/// Selects addresses that are not used by other test binaries.
fn begin() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: other tests are waiting, and the library is not loaded yet.
        unsafe {
            std::env::set_var(
                "RISER_TEST_DEVICES",
                "riser0=127.0.41.61,riser1=127.0.41.62",
            );
        };
        load();
    });
}

unsafe extern "C-unwind" {
    fn pthread_testcancel();
    fn pthread_timedjoin_np(
        thread: libc::pthread_t,
        value: *mut *mut c_void,
        until: *const libc::timespec,
    ) -> c_int;
}

type Start = extern "C-unwind" fn(*mut c_void) -> *mut c_void;

/// A call with up to four arguments of one word each.
struct Call {
    function: unsafe extern "C-unwind" fn(usize, usize, usize, usize) -> c_int,
    arguments: [usize; 4],
}

impl Call {
    fn new(name: &str, arguments: [usize; 4]) -> Self {
        // SAFETY: the functions take integers and pointers, in registers of this width.
        let function = unsafe {
            transmute::<*mut c_void, unsafe extern "C-unwind" fn(usize, usize, usize, usize) -> c_int>(
                address(name),
            )
        };
        Self {
            function,
            arguments,
        }
    }
}

extern "C-unwind" fn execute(call: *mut c_void) -> *mut c_void {
    // SAFETY: the call is alive as long as the thread.
    unsafe {
        let Call {
            function,
            arguments: [a, b, c, d],
        } = *call.cast::<Call>();
        function(a, b, c, d);
    }
    ptr::null_mut()
}

/// Executes a call in a thread, cancels the thread, and joins it.
fn cancel(mut call: Call) {
    // SAFETY: no frame of the thread has anything to drop, so it may be cancelled.
    unsafe {
        let start = transmute::<Start, extern "C" fn(*mut c_void) -> *mut c_void>(execute);
        let mut thread = 0;
        let created =
            libc::pthread_create(&raw mut thread, ptr::null(), start, (&raw mut call).cast());
        assert_eq!(created, 0);
        thread::sleep(Duration::from_millis(300));
        assert_eq!(libc::pthread_cancel(thread), 0);
        let mut until: libc::timespec = zeroed();
        libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut until);
        until.tv_sec += 5;
        let mut value = ptr::null_mut();
        let joined = pthread_timedjoin_np(thread, &raw mut value, &raw const until);
        assert_eq!(joined, 0, "a cancelled thread ends");
        assert_eq!(value.addr(), usize::MAX, "PTHREAD_CANCELED");
    }
}

#[test]
fn cancelled_completion_wait_keeps_traffic() {
    begin();
    let (one, two) = (Device::open("riser0"), Device::open("riser1"));
    let channel = call!(ibv_create_comp_channel(one.context => *mut ibv_context)
        -> *mut ibv_comp_channel);
    let armed = call!(ibv_create_cq(one.context => *mut ibv_context, 100 => c_int,
        ptr::null_mut() => *mut c_void, channel => *mut ibv_comp_channel, 0 => c_int)
        -> *mut ibv_cq);
    assert!(!armed.is_null());
    let (mut cq, mut context) = (ptr::null_mut::<ibv_cq>(), ptr::null_mut::<c_void>());
    let places = [
        (&raw mut cq).expose_provenance(),
        (&raw mut context).expose_provenance(),
    ];
    let channel_at = channel.expose_provenance();
    cancel(Call::new(
        "ibv_get_cq_event",
        [channel_at, places[0], places[1], 0],
    ));
    // The device's thread drives the NIC again: it executes a peer's WRITE although no call is
    // waiting.
    let other = two.create_cq(100);
    let sends = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let a = one.create_qp_ex(&mut one.qp_attr(armed, IBV_QPT_RC, sends));
    let b = two.create_qp_ex(&mut two.qp_attr(other, IBV_QPT_RC, sends));
    // SAFETY: both are alive.
    let (number_a, number_b) = unsafe { ((*a).qp_num, (*b).qp_num) };
    to_rts(a, two.gid(), number_b);
    to_rts(b, one.gid(), number_a);
    let mut memory = [0u8; 8];
    let mr = one.register(&mut memory);
    let (key, at) = remote(mr, 0);
    let qp = extended(b);
    let mut byte = 7u8;
    // SAFETY: the queue pair is alive.
    unsafe {
        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_flags = IBV_SEND_SIGNALED;
        (*qp).wr_rdma_write.unwrap()(qp, key, at);
        (*qp).wr_set_inline_data.unwrap()(qp, (&raw mut byte).cast(), 1);
        assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
    }
    assert_eq!(completions(other, 1)[0].status, IBV_WC_SUCCESS);
    // The next call waits and is notified.
    // SAFETY: the queue is alive.
    assert_eq!(unsafe { ops::ibv_req_notify_cq(armed, false) }, 0);
    post_recv(a, 1, None);
    thread::scope(|scope| {
        let sender = qp.expose_provenance();
        scope.spawn(move || {
            thread::sleep(Duration::from_millis(50));
            let qp = ptr::with_exposed_provenance_mut::<ibv_qp_ex>(sender);
            let mut byte = 8u8;
            // SAFETY: as above.
            unsafe {
                (*qp).wr_start.unwrap()(qp);
                (*qp).wr_flags = IBV_SEND_SIGNALED;
                (*qp).wr_rdma_write_imm.unwrap()(qp, key, at, 9);
                (*qp).wr_set_inline_data.unwrap()(qp, (&raw mut byte).cast(), 1);
                assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
            }
        });
        let result = call!(ibv_get_cq_event(channel => *mut ibv_comp_channel,
            &raw mut cq => *mut *mut ibv_cq, &raw mut context => *mut *mut c_void) -> c_int);
        assert_eq!((result, cq), (0, armed));
        call!(ibv_ack_cq_events(cq => *mut ibv_cq, 1 => u32));
    });
}

#[test]
fn cm_event_wait_is_cancelled() {
    begin();
    let channel = call!(rdma_create_event_channel() -> *mut rdma_event_channel);
    let mut event = ptr::null_mut::<rdma_cm_event>();
    let arguments = [
        channel.expose_provenance(),
        (&raw mut event).expose_provenance(),
        0,
        0,
    ];
    cancel(Call::new("rdma_get_cm_event", arguments));
    call!(rdma_destroy_event_channel(channel => *mut rdma_event_channel));
}

#[test]
fn async_event_wait_is_cancelled() {
    begin();
    let device = Device::open("riser0");
    // SAFETY: all zeroes is valid.
    let mut event: ibv_async_event = unsafe { zeroed() };
    let arguments = [
        device.context.expose_provenance(),
        (&raw mut event).expose_provenance(),
        0,
        0,
    ];
    cancel(Call::new("ibv_get_async_event", arguments));
}

#[test]
fn management_wait_is_cancelled() {
    begin();
    let port = call!(umad_open_port(ptr::null() => *const i8, 1 => c_int) -> c_int);
    assert!(port >= 0, "{port}");
    let (mut datagram, mut length) = ([0u64; 64], 256 as c_int);
    let arguments = [
        port as usize,
        (&raw mut datagram).expose_provenance(),
        (&raw mut length).expose_provenance(),
        usize::MAX,
    ];
    cancel(Call::new("umad_recv", arguments));
    cancel(Call::new("umad_poll", [port as usize, usize::MAX, 0, 0]));
    assert_eq!(call!(umad_close_port(port => c_int) -> c_int), 0);
}

/// A completion queue and a number of polls.
struct Polls {
    poll: unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int,
    cq: *mut ibv_cq,
    count: u32,
}

extern "C-unwind" fn poll_while_cancelled(polls: *mut c_void) -> *mut c_void {
    // SAFETY: the value is alive as long as the thread.
    unsafe {
        let polls = polls.cast::<Polls>();
        libc::pthread_cancel(libc::pthread_self());
        while (*polls).count < 100 {
            let mut wc: ibv_wc = zeroed();
            ((*polls).poll)((*polls).cq, 1, &raw mut wc);
            (*polls).count += 1;
        }
        pthread_testcancel();
    }
    ptr::null_mut()
}

#[test]
fn pending_cancellation_spares_polling_thread() {
    begin();
    let device = Device::open("riser0");
    let cq = device.create_cq(10);
    // SAFETY: the queue is alive.
    let poll = unsafe { (*(*cq).context).ops.poll_cq.unwrap() };
    let mut polls = Polls { poll, cq, count: 0 };
    // SAFETY: no frame of the thread has anything to drop, so it may be cancelled.
    let value = unsafe {
        let start =
            transmute::<Start, extern "C" fn(*mut c_void) -> *mut c_void>(poll_while_cancelled);
        let (mut thread, mut value) = (0, ptr::null_mut());
        let argument = (&raw mut polls).cast();
        assert_eq!(
            libc::pthread_create(&raw mut thread, ptr::null(), start, argument),
            0
        );
        assert_eq!(libc::pthread_join(thread, &raw mut value), 0);
        value
    };
    assert_eq!((value.addr(), polls.count), (usize::MAX, 100));
}
