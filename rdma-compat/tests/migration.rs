//! Path migration and draining of a send queue, using the C interface. There is only one test in
//! this file, because a device's additional addresses can only be used by one process at a time.

#![allow(unsafe_code, reason = "a C interface is called")]
#![allow(unused_unsafe, reason = "calls have blocks of their own")]

mod library;

use std::ffi::c_int;
use std::mem::zeroed;
use std::thread;
use std::time::{Duration, Instant};

use library::*;
use riser_rdma_core_sys::bindings::*;
use rustix::event::{PollFd, PollFlags, Timespec};

/// A device with a queue pair, which is connected to the queue pair of the other device.
struct Side {
    device: Device,
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
    memory: Vec<u8>,
    mr: *mut ibv_mr,
}

impl Side {
    fn new(name: &str) -> Self {
        let device = Device::open(name);
        let cq = device.create_cq(16);
        let mut memory = vec![0; 1 << 16];
        let mr = device.register(&mut memory);
        let qp =
            device.create_qp_ex(&mut device.qp_attr(cq, IBV_QPT_RC, IBV_QP_EX_WITH_RDMA_WRITE));
        assert!(!qp.is_null(), "{}", errno());
        Self {
            device,
            cq,
            qp,
            memory,
            mr,
        }
    }

    fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive.
        unsafe { (*self.qp).qp_num }
    }

    fn gid(&self, index: c_int) -> ibv_gid {
        // SAFETY: all zeroes is valid.
        let mut gid: ibv_gid = unsafe { zeroed() };
        let result = call!(ibv_query_gid(self.device.context => *mut ibv_context, 1 => u8,
            index => c_int, &raw mut gid => *mut ibv_gid) -> c_int);
        assert_eq!(result, 0, "{index}");
        gid
    }

    fn try_modify(&self, attr: &ibv_qp_attr, mask: u32) -> c_int {
        call!(ibv_modify_qp(self.qp => *mut ibv_qp, attr => *const ibv_qp_attr,
            mask as c_int => c_int) -> c_int)
    }

    fn query(&self) -> ibv_qp_attr {
        // SAFETY: all zeroes is valid.
        let (mut attr, mut init): (ibv_qp_attr, ibv_qp_init_attr) = unsafe { zeroed() };
        let mask = IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE | IBV_QP_AV | IBV_QP_STATE;
        let result = call!(ibv_query_qp(self.qp => *mut ibv_qp, &raw mut attr => *mut ibv_qp_attr,
            mask as c_int => c_int, &raw mut init => *mut ibv_qp_init_attr) -> c_int);
        assert_eq!(result, 0);
        attr
    }

    /// Writes the second half of its memory to the peer's memory, and waits for completion.
    fn write_to(&self, other: &Self) {
        self.post_write(other);
        assert_eq!(completions(self.cq, 1)[0].status, IBV_WC_SUCCESS);
        let half = self.memory.len() / 2;
        assert_eq!(self.memory[half..], other.memory[..half]);
    }

    fn post_write(&self, other: &Self) {
        let half = self.memory.len() / 2;
        let qp = extended(self.qp);
        let (key, addr) = remote(other.mr, 0);
        let from = sge(self.mr, half, half as u32);
        // SAFETY: the objects are alive.
        unsafe {
            (*qp).wr_start.unwrap()(qp);
            (*qp).wr_flags = IBV_SEND_SIGNALED;
            (*qp).wr_rdma_write.unwrap()(qp, key, addr);
            (*qp).wr_set_sge.unwrap()(qp, from.lkey, from.addr, from.length);
            assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
        }
    }

    /// Returns whether there is an asynchronous event before a timeout.
    fn has_event(&self, wait: Duration) -> bool {
        // SAFETY: the context and its descriptor are open.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw((*self.device.context).async_fd) };
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        let wait = Timespec::try_from(wait).unwrap();
        rustix::event::poll(&mut fds, Some(&wait)).unwrap() > 0
    }

    /// Waits for the next asynchronous event, which must be for its queue pair.
    fn event(&self) -> ibv_event_type {
        assert!(self.has_event(Duration::from_secs(20)), "no event");
        // SAFETY: all zeroes is valid, and the event is for a queue pair.
        unsafe {
            let mut event: ibv_async_event = zeroed();
            let result = call!(ibv_get_async_event(self.device.context => *mut ibv_context,
                &raw mut event => *mut ibv_async_event) -> c_int);
            assert_eq!(result, 0);
            assert_eq!(event.element.qp, self.qp);
            call!(ibv_ack_async_event(&raw mut event => *mut ibv_async_event));
            event.event_type
        }
    }
}

/// Returns attributes that load the path between the additional addresses.
fn rearm(gid: ibv_gid) -> ibv_qp_attr {
    // SAFETY: all zeroes is valid.
    let mut attr: ibv_qp_attr = unsafe { zeroed() };
    attr.alt_ah_attr = ah_attr(gid);
    attr.alt_ah_attr.grh.sgid_index = 1;
    attr.alt_port_num = 1;
    attr.alt_timeout = 15;
    attr.path_mig_state = IBV_MIG_REARM;
    attr
}

fn check_gids(side: &Side) {
    // SAFETY: all zeroes is valid.
    let mut attr: ibv_device_attr = unsafe { zeroed() };
    let result = call!(ibv_query_device(side.device.context => *mut ibv_context,
        &raw mut attr => *mut ibv_device_attr) -> c_int);
    assert_eq!(result, 0);
    assert_ne!(attr.device_cap_flags & IBV_DEVICE_AUTO_PATH_MIG, 0);
    // SAFETY: all zeroes is valid.
    let mut entries: [ibv_gid_entry; 4] = unsafe { zeroed() };
    let mut table = |max: usize| {
        call!(_ibv_query_gid_table(side.device.context => *mut ibv_context,
            entries.as_mut_ptr() => *mut ibv_gid_entry, max => usize, 0 => u32,
            size_of::<ibv_gid_entry>() => usize) -> isize)
    };
    assert_eq!(table(1), -(libc::EINVAL as isize));
    assert_eq!(table(4), 2);
    for (index, entry) in entries[..2].iter().enumerate() {
        // SAFETY: a GID is 16 bytes, and all bit patterns are valid.
        let (listed, queried) = unsafe { (entry.gid.raw, side.gid(index as c_int).raw) };
        assert_eq!((entry.gid_index as usize, listed), (index, queried));
    }
}

fn check_refusals(side: &Side, good: &ibv_qp_attr) {
    let refused = |mask, change: &dyn Fn(&mut ibv_qp_attr)| {
        let mut attr = *good;
        change(&mut attr);
        assert_eq!(side.try_modify(&attr, mask), libc::EINVAL, "{mask:#x}");
    };
    refused(IBV_QP_PATH_MIG_STATE, &|_| {});
    refused(IBV_QP_PATH_MIG_STATE, &|a| a.path_mig_state = IBV_MIG_ARMED);
    refused(IBV_QP_PATH_MIG_STATE, &|a| a.path_mig_state = 7);
    refused(IBV_QP_ALT_PATH, &|a| a.alt_port_num = 2);
    refused(IBV_QP_ALT_PATH, &|a| a.alt_pkey_index = 1);
    refused(IBV_QP_ALT_PATH, &|a| a.alt_timeout = 32);
    refused(IBV_QP_ALT_PATH, &|a| a.alt_ah_attr.is_global = 0);
    refused(IBV_QP_ALT_PATH, &|a| a.alt_ah_attr.grh.sgid_index = 2);
    let now = side.query();
    assert_eq!(now.path_mig_state, IBV_MIG_MIGRATED);
    assert_eq!(now.alt_ah_attr.is_global, 0, "nothing was loaded");
}

fn migrate(one: &Side, two: &Side) {
    let (to_two, to_one) = (rearm(two.gid(1)), rearm(one.gid(1)));
    check_refusals(one, &to_two);
    let both = IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE;
    assert_eq!(one.try_modify(&to_two, both), 0);
    assert_eq!(one.query().path_mig_state, IBV_MIG_REARM);
    assert_eq!(two.try_modify(&to_one, both), 0);
    one.write_to(two);
    let until = Instant::now() + Duration::from_secs(20);
    while [one, two]
        .iter()
        .any(|s| s.query().path_mig_state != IBV_MIG_ARMED)
    {
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(1));
    }
    let now = one.query();
    assert_eq!((now.alt_port_num, now.alt_timeout), (1, 15));
    assert_eq!(now.alt_ah_attr.grh.sgid_index, 1);
    // SAFETY: a GID is 16 bytes, and all bit patterns are valid.
    unsafe { assert_eq!(now.alt_ah_attr.grh.dgid.raw, two.gid(1).raw) };

    let mut migrated = to_one;
    migrated.path_mig_state = IBV_MIG_MIGRATED;
    assert_eq!(two.try_modify(&migrated, IBV_QP_PATH_MIG_STATE), 0);
    assert_eq!(two.event(), IBV_EVENT_PATH_MIG);
    assert_eq!(one.event(), IBV_EVENT_PATH_MIG);
    for (side, peer) in [(one, two), (two, one)] {
        let now = side.query();
        assert_eq!(now.path_mig_state, IBV_MIG_MIGRATED);
        assert_eq!((now.ah_attr.grh.sgid_index, now.timeout), (1, 15));
        // SAFETY: as above.
        unsafe { assert_eq!(now.ah_attr.grh.dgid.raw, peer.gid(1).raw) };
    }
    one.write_to(two);
}

fn drain(side: &Side, other: &Side) {
    // SAFETY: all zeroes is valid.
    let mut attr: ibv_qp_attr = unsafe { zeroed() };
    attr.qp_state = IBV_QPS_SQD;
    attr.en_sqd_async_notify = 1;
    modify(side.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY);
    assert_eq!(side.event(), IBV_EVENT_SQ_DRAINED);
    assert_eq!(side.query().sq_draining, 0);
    attr.timeout = 16;
    attr.retry_cnt = 3;
    attr.rnr_retry = 2;
    attr.max_rd_atomic = 2;
    attr.max_dest_rd_atomic = 2;
    attr.min_rnr_timer = 5;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    modify(
        side.qp,
        &attr,
        IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_MAX_QP_RD_ATOMIC
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER
            | IBV_QP_ACCESS_FLAGS,
    );
    let now = side.query();
    assert_eq!((now.timeout, now.retry_cnt, now.rnr_retry), (16, 3, 2));
    assert_eq!((now.max_rd_atomic, now.max_dest_rd_atomic), (2, 2));
    // Requests that are posted now wait for RTS.
    side.post_write(other);
    thread::sleep(Duration::from_millis(20));
    assert!(poll(side.cq).is_empty());
    attr.qp_state = IBV_QPS_RTS;
    modify(side.qp, &attr, IBV_QP_STATE);
    assert_eq!(completions(side.cq, 1)[0].status, IBV_WC_SUCCESS);
    // The event was not requested.
    attr.qp_state = IBV_QPS_SQD;
    modify(side.qp, &attr, IBV_QP_STATE);
    attr.en_sqd_async_notify = 0;
    attr.qp_state = IBV_QPS_RTS;
    modify(side.qp, &attr, IBV_QP_STATE);
    attr.qp_state = IBV_QPS_SQD;
    modify(side.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY);
    assert!(!side.has_event(Duration::from_millis(50)));
    attr.qp_state = IBV_QPS_RTS;
    modify(side.qp, &attr, IBV_QP_STATE);
}

#[test]
fn connection_migrates_to_second_address() {
    // SAFETY: no other thread is reading the environment yet.
    unsafe {
        std::env::set_var(
            "RISER_TEST_DEVICES",
            "riser0=127.0.44.1,127.0.45.1,riser1=127.0.44.2,127.0.45.2",
        );
    }
    let (mut one, mut two) = (Side::new("riser0"), Side::new("riser1"));
    check_gids(&one);
    for (seed, side) in [&mut one, &mut two].into_iter().enumerate() {
        let bytes = side.memory.iter_mut().enumerate();
        bytes.for_each(|(i, byte)| *byte = (i * 7 + seed) as u8);
    }
    to_rts(one.qp, two.gid(0), two.number());
    to_rts(two.qp, one.gid(0), one.number());
    migrate(&one, &two);
    drain(&one, &two);
    one.write_to(&two);
}
