//! Calls that wait for a notification. They drive the device instead of its thread.

#![allow(unsafe_code, reason = "a C interface is called")]
#![allow(unused_unsafe, reason = "calls have blocks of their own")]

mod library;

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use library::*;
use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::ops;

const SENDS: u32 = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE;

/// Longer than the interval at which the device's thread checks for calls.
const LONG: Duration = Duration::from_millis(20);

/// A completion queue with a separate channel. It is used by one thread at a time.
#[derive(Clone, Copy)]
struct Notified {
    channel: *mut ibv_comp_channel,
    cq: *mut ibv_cq,
}

// SAFETY: objects of the library can be used by any thread.
unsafe impl Send for Notified {}

impl Notified {
    fn new(device: &Device) -> Self {
        let channel = call!(ibv_create_comp_channel(device.context => *mut ibv_context)
            -> *mut ibv_comp_channel);
        let cq = call!(ibv_create_cq(device.context => *mut ibv_context, 100 => c_int,
            ptr::null_mut() => *mut c_void, channel => *mut ibv_comp_channel, 0 => c_int)
            -> *mut ibv_cq);
        assert!(!cq.is_null(), "{}", errno());
        Self { channel, cq }
    }

    /// Waits for a completion like a program that doesn't spin: arms, polls, and waits.
    fn complete(self) {
        loop {
            // SAFETY: the queue is alive.
            assert_eq!(unsafe { ops::ibv_req_notify_cq(self.cq, false) }, 0);
            let found = poll(self.cq);
            if !found.is_empty() {
                assert_eq!((found.len(), found[0].status), (1, IBV_WC_SUCCESS));
                return;
            }
            self.wait();
        }
    }

    fn wait(self) {
        let (mut from, mut context) = (ptr::null_mut(), ptr::null_mut());
        let result = call!(ibv_get_cq_event(self.channel => *mut ibv_comp_channel,
            &raw mut from => *mut *mut ibv_cq, &raw mut context => *mut *mut c_void) -> c_int);
        assert_eq!((result, from), (0, self.cq), "{}", errno());
        call!(ibv_ack_cq_events(self.cq => *mut ibv_cq, 1 => u32));
    }
}

/// A queue pair of another thread.
#[derive(Clone, Copy)]
struct Sender(*mut ibv_qp);

// SAFETY: objects of the library can be used by any thread.
unsafe impl Send for Sender {}

impl Sender {
    /// Posts a SEND without data, or a WRITE of one byte to a peer's memory.
    fn post(self, write: Option<((u32, u64), u8)>) {
        let qp = extended(self.0);
        // SAFETY: the queue pair is alive.
        unsafe {
            (*qp).wr_start.unwrap()(qp);
            (*qp).wr_flags = IBV_SEND_SIGNALED;
            match write {
                None => (*qp).wr_send.unwrap()(qp),
                Some(((key, at), mut byte)) => {
                    (*qp).wr_rdma_write.unwrap()(qp, key, at);
                    (*qp).wr_set_inline_data.unwrap()(qp, (&raw mut byte).cast(), 1);
                }
            }
            assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
        }
    }
}

/// Creates connected queue pairs on two devices, each with its own completion queue.
fn connect(one: &Device, cq_one: *mut ibv_cq, two: &Device, cq_two: *mut ibv_cq) -> [Sender; 2] {
    let a = one.create_qp_ex(&mut one.qp_attr(cq_one, IBV_QPT_RC, SENDS));
    let b = two.create_qp_ex(&mut two.qp_attr(cq_two, IBV_QPT_RC, SENDS));
    // SAFETY: both are alive.
    let (number_a, number_b) = unsafe { ((*a).qp_num, (*b).qp_num) };
    to_rts(a, two.gid(), number_b);
    to_rts(b, one.gid(), number_a);
    [Sender(a), Sender(b)]
}

#[test]
fn peer_wakes_waiting_call_and_thread_resumes() {
    let (one, two) = (Device::open("riser0"), Device::open("riser1"));
    let (own, other) = (Notified::new(&one), two.create_cq(100));
    let [a, b] = connect(&one, own.cq, &two, other);
    let mut memory = [0u8; 8];
    let mr = one.register(&mut memory);
    let to = remote(mr, 0);
    // SAFETY: it is only written by the peer, and lives as long as the test.
    let arrived = unsafe { AtomicU8::from_ptr(memory.as_mut_ptr()) };
    for round in 1..=20u8 {
        post_recv(a.0, 0, None);
        thread::scope(|scope| {
            scope.spawn(move || {
                let b = b;
                // Some calls wait for a long time, others for a short time.
                thread::sleep(LONG * u32::from(round % 3));
                b.post(None);
            });
            own.complete();
        });
        completions(other, 1);
        // No call drives the device when this arrives.
        if round % 2 == 0 {
            thread::sleep(LONG);
        }
        b.post(Some((to, round)));
        let start = Instant::now();
        while arrived.load(Ordering::Relaxed) != round {
            assert!(start.elapsed() < PATIENCE, "round {round}");
            thread::sleep(Duration::from_micros(100));
        }
        completions(other, 1);
    }
}

#[test]
fn posts_during_wait_are_sent() {
    let (one, two) = (Device::open("riser0"), Device::open("riser1"));
    let (own, other) = (Notified::new(&one), two.create_cq(100));
    let [a, b] = connect(&one, own.cq, &two, other);
    for round in 0..5 {
        thread::scope(|scope| {
            scope.spawn(move || {
                let (a, b) = (a, b);
                thread::sleep(LONG);
                // The peer is not ready at first, so the wait is ended by a timer.
                a.post(None);
                thread::sleep(LONG * (round % 2));
                post_recv(b.0, 0, None);
            });
            own.complete();
        });
        completions(other, 1);
    }
}

#[test]
fn signal_interrupts_wait() {
    extern "C" fn nothing(_: c_int) {}
    load();
    // This runs in a separate process, because signal handlers affect all threads.
    // SAFETY: the child only uses its own objects, and exits here.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: all zeroes is valid, and the handler does nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            libc::sigaction(libc::SIGALRM, &raw const action, ptr::null_mut());
        }
        let own = Notified::new(&Device::open("riser0"));
        let (mut from, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the call only changes a timer.
        unsafe { libc::alarm(1) };
        let result = call!(ibv_get_cq_event(own.channel => *mut ibv_comp_channel,
            &raw mut from => *mut *mut ibv_cq, &raw mut context => *mut *mut c_void) -> c_int);
        let is_ended = result == -1 && errno() == libc::EINTR;
        // SAFETY: the child exits without running its parent's handlers.
        unsafe { libc::_exit(c_int::from(!is_ended)) };
    }
    let mut status = 0;
    // SAFETY: this is a child of this process.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
}

#[test]
fn calls_can_wait_concurrently() {
    let (one, two) = (Device::open("riser0"), Device::open("riser1"));
    let (first, second) = (Notified::new(&one), Notified::new(&one));
    let other = two.create_cq(100);
    let [a, b] = connect(&one, first.cq, &two, other);
    let [c, d] = connect(&one, second.cq, &two, other);
    for round in 0..10 {
        post_recv(a.0, 0, None);
        post_recv(c.0, 0, None);
        thread::scope(|scope| {
            for own in [first, second] {
                scope.spawn(move || {
                    let own = own;
                    own.complete();
                });
            }
            thread::sleep(LONG * (round % 2));
            let order = if round % 4 < 2 { [b, d] } else { [d, b] };
            for sender in order {
                sender.post(None);
                thread::sleep(LONG * (round % 3));
            }
        });
        completions(other, 2);
    }
}
