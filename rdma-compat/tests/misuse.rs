//! Invalid calls, and fork, signals and unloading in processes that use the library.

#![allow(unsafe_code, reason = "a C interface is called")]
#![allow(unused_unsafe, reason = "calls have blocks of their own")]

mod library;

use std::ffi::{CString, c_int, c_void};
use std::mem::zeroed;
use std::os::fd::RawFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs, ptr};

use library::*;
use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::ops;

const SENDS: u32 = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE;

/// An unaligned scatter list, as in a packed structure.
#[repr(C, packed)]
struct Packed {
    odd: u8,
    list: [ibv_sge; 2],
}

/// Returns an address of the library's devices.
fn socket_address(last: u8, port: u16) -> sockaddr_in {
    // SAFETY: all zeroes is valid.
    let mut addr: sockaddr_in = unsafe { zeroed() };
    addr.sin_family = libc::AF_INET as u16;
    addr.sin_port = port.to_be();
    addr.sin_addr.s_addr = u32::from_be_bytes([127, 0, 41, last]).to_be();
    addr
}

fn create_channel() -> *mut rdma_event_channel {
    let channel = call!(rdma_create_event_channel() -> *mut rdma_event_channel);
    assert!(!channel.is_null(), "{}", errno());
    channel
}

fn create_id(channel: *mut rdma_event_channel) -> *mut rdma_cm_id {
    let mut id = ptr::null_mut();
    let result = call!(rdma_create_id(channel => *mut rdma_event_channel,
        &raw mut id => *mut *mut rdma_cm_id, ptr::null_mut() => *mut c_void,
        RDMA_PS_TCP => rdma_port_space) -> c_int);
    assert_eq!(result, 0, "{}", errno());
    id
}

fn bind(id: *mut rdma_cm_id, mut addr: sockaddr_in) -> c_int {
    call!(rdma_bind_addr(id => *mut rdma_cm_id, &raw mut addr => *mut sockaddr_in) -> c_int)
}

fn destroy_id(id: *mut rdma_cm_id) -> c_int {
    call!(rdma_destroy_id(id => *mut rdma_cm_id) -> c_int)
}

fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    call!(ibv_destroy_qp(qp => *mut ibv_qp) -> c_int)
}

fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    call!(ibv_destroy_cq(cq => *mut ibv_cq) -> c_int)
}

fn set_nonblocking(fd: RawFd) {
    // SAFETY: the descriptor is open.
    let result = unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
    assert_eq!(result, 0);
}

/// Calls `part` in a forked process. Returns its result.
fn forked(part: impl FnOnce() -> c_int) -> c_int {
    load();
    // SAFETY: the child calls `part` and exits without running the test harness.
    unsafe {
        match libc::fork() {
            0 => {
                libc::alarm(10);
                let code = part();
                libc::_exit(code)
            }
            child => {
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                assert!(libc::WIFEXITED(status), "status {status:#x}");
                libc::WEXITSTATUS(status)
            }
        }
    }
}

#[test]
fn missing_attributes_are_rejected() {
    let device = Device::open("riser0");
    let cq = device.create_cq(4);
    let qp = device.create_qp_ex(&mut device.qp_attr(cq, IBV_QPT_RC, SENDS));
    let pd = device.pd;
    assert!(
        call!(ibv_create_qp(pd => *mut ibv_pd, ptr::null_mut() => *mut c_void) -> *mut ibv_qp)
            .is_null()
    );
    assert_eq!(errno(), libc::EINVAL);
    assert!(
        call!(ibv_create_srq(pd => *mut ibv_pd, ptr::null_mut() => *mut c_void) -> *mut ibv_srq)
            .is_null()
    );
    assert_eq!(errno(), libc::EINVAL);
    assert!(
        call!(ibv_create_ah(pd => *mut ibv_pd, ptr::null_mut() => *mut c_void) -> *mut ibv_ah)
            .is_null()
    );
    assert_eq!(errno(), libc::EINVAL);
    let modified = call!(ibv_modify_qp(qp => *mut ibv_qp, ptr::null_mut() => *mut c_void, 1 => c_int) -> c_int);
    assert_eq!(modified, libc::EINVAL);
    let table = device.table();
    // SAFETY: the objects are alive. The null pointers must be rejected.
    unsafe {
        assert!(table.create_srq_ex.unwrap()(device.context, ptr::null_mut()).is_null());
        assert_eq!(errno(), libc::EINVAL);
        let mw = (*device.context).ops.alloc_mw.unwrap()(pd, IBV_MW_TYPE_1);
        assert!(!mw.is_null());
        let bind = (*device.context).ops.bind_mw.unwrap();
        assert_eq!(bind(qp, mw, ptr::null_mut()), libc::EINVAL);
        assert_eq!((*device.context).ops.dealloc_mw.unwrap()(mw), 0);
    }
    let channel = create_channel();
    let id = create_id(channel);
    assert_eq!(bind(id, socket_address(1, 0)), 0, "{}", errno());
    let result = call!(rdma_init_qp_attr(id => *mut rdma_cm_id, ptr::null_mut() => *mut c_void,
        ptr::null_mut() => *mut c_int) -> c_int);
    assert_eq!((result, errno()), (-1, libc::EINVAL));
    let result = call!(rdma_create_srq(id => *mut rdma_cm_id, pd => *mut ibv_pd,
        ptr::null_mut() => *mut c_void) -> c_int);
    assert_eq!((result, errno()), (-1, libc::EINVAL));
    assert_eq!(destroy_id(id), 0);
    call!(rdma_destroy_event_channel(channel => *mut rdma_event_channel));
    assert_eq!(destroy_qp(qp), 0);
    assert_eq!(destroy_qp(qp), libc::EINVAL, "twice");
    assert_eq!(destroy_cq(cq), 0);
    assert_eq!(destroy_cq(cq), libc::EINVAL, "twice");
}

#[test]
fn huge_values_are_rejected() {
    let device = Device::open("riser0");
    let register = |addr: usize, length: usize, iova: u64| {
        call!(ibv_reg_mr_iova(device.pd => *mut ibv_pd,
            ptr::without_provenance_mut(addr) => *mut c_void, length => usize,
            iova => u64, IBV_ACCESS_LOCAL_WRITE as c_int => c_int) -> *mut ibv_mr)
    };
    assert!(register(1, usize::MAX - 1, 0).is_null());
    assert_eq!(errno(), libc::EFAULT);
    assert!(register(4096, usize::MAX, 0).is_null());
    assert_eq!(errno(), libc::EFAULT);
    let memory = [0u8; 64];
    let at_end = register(memory.as_ptr().addr(), 64, u64::MAX - 3);
    assert!(
        at_end.is_null(),
        "a region past the end of the address space"
    );
    assert_eq!(errno(), libc::EINVAL);

    let create = |entries: c_int| {
        call!(ibv_create_cq(device.context => *mut ibv_context, entries => c_int,
            ptr::null_mut() => *mut c_void, ptr::null_mut() => *mut c_void, 0 => c_int)
            -> *mut ibv_cq)
    };
    for entries in [c_int::MAX, 0, -1, c_int::MIN] {
        assert!(create(entries).is_null(), "{entries}");
        assert_eq!(errno(), libc::EINVAL, "{entries}");
    }
    // Libraries request this number, which is sufficient for all potential peers.
    let cq = device.create_cq(200_000);
    assert_eq!(destroy_cq(cq), 0);
    let cq = device.create_cq(4);
    let resize = |n: c_int| call!(ibv_resize_cq(cq => *mut ibv_cq, n => c_int) -> c_int);
    assert_eq!(resize(c_int::MAX), libc::EINVAL);
    assert_eq!(resize(-1), libc::EINVAL);
    let with = |change: &dyn Fn(&mut ibv_qp_cap)| {
        let mut attr = device.qp_attr(cq, IBV_QPT_RC, SENDS);
        change(&mut attr.cap);
        let qp = device.create_qp_ex(&mut attr);
        assert!(qp.is_null());
        assert_eq!(errno(), libc::EINVAL);
    };
    with(&|cap| cap.max_send_wr = u32::MAX);
    with(&|cap| cap.max_recv_wr = u32::MAX);
    with(&|cap| cap.max_send_sge = u32::MAX);
    with(&|cap| cap.max_recv_sge = u32::MAX);
    with(&|cap| cap.max_inline_data = u32::MAX);
}

#[test]
fn invalid_scatter_lists_are_not_read() {
    let device = Device::open("riser0");
    let cq = device.create_cq(10);
    let pair = Pair::new(device, cq, SENDS);
    // SAFETY: all zeroes is valid. Lists that are too long must not be read.
    unsafe {
        // The list is at the end of a page, and the following page is not mapped, so reading past
        // its end would crash the process.
        let map = |flags| {
            libc::mmap(
                ptr::null_mut(),
                8192,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        let pages = map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        assert_eq!(libc::munmap(pages.byte_add(4096), 4096), 0);
        let list = pages
            .byte_add(4096 - size_of::<ibv_sge>())
            .cast::<ibv_sge>();
        let mut wr: ibv_send_wr = zeroed();
        wr.opcode = IBV_WR_SEND;
        wr.sg_list = list;
        let mut bad = ptr::null_mut();
        for flags in [0, IBV_SEND_INLINE] {
            wr.send_flags = flags;
            for count in [c_int::MAX, 4, -1, c_int::MIN] {
                wr.num_sge = count;
                assert_eq!(
                    ops::ibv_post_send(pair.a, &raw mut wr, &raw mut bad),
                    libc::EINVAL
                );
                assert_eq!(bad, &raw mut wr, "{flags} {count}");
            }
        }
        wr.num_sge = 1;
        wr.sg_list = ptr::null_mut();
        assert_eq!(
            ops::ibv_post_send(pair.a, &raw mut wr, &raw mut bad),
            libc::EINVAL
        );
        let mut recv: ibv_recv_wr = zeroed();
        let mut bad_recv = ptr::null_mut();
        recv.sg_list = list;
        for count in [c_int::MAX, 2, -1] {
            recv.num_sge = count;
            assert_eq!(
                ops::ibv_post_recv(pair.b, &raw mut recv, &raw mut bad_recv),
                libc::EINVAL
            );
        }

        // An empty piece doesn't need an address.
        post_recv(pair.b, 1, None);
        let mut nothing: ibv_sge = zeroed();
        wr.sg_list = &raw mut nothing;
        wr.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
        assert_eq!(ops::ibv_post_send(pair.a, &raw mut wr, &raw mut bad), 0);
        assert!(
            completions(cq, 2)
                .iter()
                .all(|wc| wc.status == IBV_WC_SUCCESS)
        );

        let qp = pair.builder();
        let refused = |part: &dyn Fn()| {
            (*qp).wr_start.unwrap()(qp);
            (*qp).wr_send.unwrap()(qp);
            part();
            assert_eq!((*qp).wr_complete.unwrap()(qp), libc::EINVAL);
        };
        refused(&|| (*qp).wr_set_sge_list.unwrap()(qp, usize::MAX, list));
        refused(&|| (*qp).wr_set_inline_data_list.unwrap()(qp, usize::MAX, list.cast()));
        refused(&|| (*qp).wr_set_inline_data.unwrap()(qp, list.cast(), usize::MAX));
        libc::munmap(pages, 4096);
    }
}

#[test]
fn unaligned_scatter_lists_are_supported() {
    let device = Device::open("riser0");
    let cq = device.create_cq(100);
    let pair = Pair::new(device, cq, SENDS);
    let mut bytes = *b"first and second.  there and elsewhere";
    let mr = pair.device.register(&mut bytes);
    let piece = |at, length| sge(mr, at, length);
    let packed = |list| Packed { odd: 0, list };
    let mut from = [
        packed([piece(0, 4), piece(10, 2)]),
        packed([piece(4, 2), piece(12, 2)]),
    ];
    let mut to = [
        packed([piece(20, 4), piece(24, 2)]),
        packed([piece(30, 4), piece(34, 1)]),
    ];
    // SAFETY: all zeroes is valid. The lists and the region are alive until all requests have
    // completed.
    unsafe {
        let mut bad = ptr::null_mut();
        let mut receives: [ibv_recv_wr; 2] = zeroed();
        receives[0].next = &raw mut receives[1];
        for (recv, list) in receives.iter_mut().zip(&mut to) {
            recv.sg_list = (&raw mut list.list).cast();
            // One piece, because the queue doesn't support more.
            recv.num_sge = 1;
        }
        let first = &raw mut receives[0];
        assert_eq!(ops::ibv_post_recv(pair.b, first, &raw mut bad), 0);
        let mut bad = ptr::null_mut();
        let mut sends: [ibv_send_wr; 2] = zeroed();
        sends[0].next = &raw mut sends[1];
        sends[1].send_flags = IBV_SEND_INLINE;
        for (send, list) in sends.iter_mut().zip(&mut from) {
            send.opcode = IBV_WR_SEND;
            send.send_flags |= IBV_SEND_SIGNALED;
            send.sg_list = (&raw mut list.list).cast();
            send.num_sge = 1 + c_int::from(send.send_flags & IBV_SEND_INLINE != 0);
        }
        let first = &raw mut sends[0];
        assert_eq!(ops::ibv_post_send(pair.a, first, &raw mut bad), 0);
    }
    let all = completions(cq, 4);
    assert!(all.iter().all(|wc| wc.status == IBV_WC_SUCCESS));
    assert_eq!(&bytes[20..24], b"firs");
    assert_eq!(&bytes[30..34], b"t co");
    // SAFETY: these are functions of the builder, with a list as above.
    unsafe {
        let qp = pair.builder();
        post_recv(pair.b, 1, Some(piece(20, 8)));
        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_flags = IBV_SEND_SIGNALED;
        (*qp).wr_send.unwrap()(qp);
        let list = (&raw const from[0].list).cast();
        (*qp).wr_set_sge_list.unwrap()(qp, 2, list);
        assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
        completions(cq, 2);
        assert_eq!(&bytes[20..26], b"firsse");
    }
}

#[test]
fn objects_of_other_device_are_rejected() {
    let (one, two) = (Device::open("riser0"), Device::open("riser1"));
    let (cq_one, cq_two) = (one.create_cq(10), two.create_cq(10));
    let mut attr = one.qp_attr(cq_one, IBV_QPT_UD, IBV_QP_EX_WITH_SEND);
    attr.recv_cq = cq_two;
    assert!(one.create_qp_ex(&mut attr).is_null());
    assert_eq!(errno(), libc::EINVAL);
    attr.send_cq = cq_two;
    attr.recv_cq = cq_one;
    assert!(one.create_qp_ex(&mut attr).is_null());
    // SAFETY: all zeroes is valid, and the objects are alive.
    unsafe {
        let mut srq_attr: ibv_srq_init_attr = zeroed();
        srq_attr.attr.max_wr = 4;
        srq_attr.attr.max_sge = 1;
        let srq = call!(ibv_create_srq(two.pd => *mut ibv_pd, &raw mut srq_attr => *mut ibv_srq_init_attr) -> *mut ibv_srq);
        attr.send_cq = cq_one;
        attr.srq = srq;
        assert!(one.create_qp_ex(&mut attr).is_null());
        assert_eq!(errno(), libc::EINVAL);
        attr.srq = ptr::null_mut();
        let qp = one.create_qp_ex(&mut attr);
        assert!(!qp.is_null());
        to_rts(qp, one.gid(), 0);

        let mut path = ah_attr(two.gid());
        let ah = call!(ibv_create_ah(two.pd => *mut ibv_pd, &raw mut path => *mut ibv_ah_attr) -> *mut ibv_ah);
        let mut wr: ibv_send_wr = zeroed();
        wr.opcode = IBV_WR_SEND;
        wr.wr.ud.ah = ah;
        let mut bad = ptr::null_mut();
        assert_eq!(
            ops::ibv_post_send(qp, &raw mut wr, &raw mut bad),
            libc::EINVAL
        );
        let ex = extended(qp);
        (*ex).wr_start.unwrap()(ex);
        (*ex).wr_send.unwrap()(ex);
        (*ex).wr_set_ud_addr.unwrap()(ex, ah, 5, 5);
        assert_eq!((*ex).wr_complete.unwrap()(ex), libc::EINVAL);

        let mut memory = [0u8; 16];
        let mr = one.register(&mut memory);
        let moved = call!(ibv_rereg_mr(mr => *mut ibv_mr, IBV_REREG_MR_CHANGE_PD as c_int => c_int,
            two.pd => *mut ibv_pd, ptr::null_mut() => *mut c_void, 0 => usize, 0 => c_int) -> c_int);
        assert!(moved < 0);
        assert_eq!(errno(), libc::EINVAL);
        let channel = create_channel();
        let id = create_id(channel);
        assert_eq!(bind(id, socket_address(1, 0)), 0, "{}", errno());
        let result = call!(rdma_create_srq(id => *mut rdma_cm_id, two.pd => *mut ibv_pd,
            &raw mut srq_attr => *mut ibv_srq_init_attr) -> c_int);
        assert_eq!((result, errno()), (-1, libc::EINVAL));
        assert_eq!(destroy_id(id), 0);
    }
}

/// Creates an identifier and destroys its channel. Returns an event descriptor that has the number
/// of the channel's descriptor, as in a program that uses the number again.
fn identifier_without_channel() -> (*mut rdma_cm_id, c_int) {
    // Other tests may use the number first.
    for _ in 0..50 {
        let channel = create_channel();
        let id = create_id(channel);
        // SAFETY: the channel is alive.
        let fd = unsafe { (*channel).fd };
        call!(rdma_destroy_event_channel(channel => *mut rdma_event_channel));
        // SAFETY: no pointers are passed, and only our own descriptors are closed.
        unsafe {
            let event = libc::eventfd(0, libc::EFD_NONBLOCK);
            if event == fd {
                return (id, event);
            }
            let copy = libc::fcntl(event, libc::F_DUPFD, fd);
            libc::close(event);
            if copy == fd {
                return (id, copy);
            }
            libc::close(copy);
        }
        assert_eq!(destroy_id(id), 0);
    }
    panic!("the descriptor of a destroyed channel is still open");
}

#[test]
fn channel_can_be_destroyed_before_identifiers() {
    let (id, theirs) = identifier_without_channel();
    let mut addr = socket_address(2, 7);
    let resolved = call!(rdma_resolve_addr(id => *mut rdma_cm_id, ptr::null_mut() => *mut c_void,
        &raw mut addr => *mut sockaddr_in, 100 => c_int) -> c_int);
    assert_eq!(resolved, 0, "{}", errno());
    thread::sleep(Duration::from_millis(300));
    let mut count = 0u64;
    // SAFETY: the buffer is large enough for the counter.
    let n = unsafe { libc::read(theirs, (&raw mut count).cast(), 8) };
    assert_eq!(
        n, -1,
        "an event was written to a descriptor of the program's"
    );
    // SAFETY: the descriptor belongs to the test.
    unsafe {
        libc::close(theirs);
    }
    assert_eq!(destroy_id(id), 0);
}

#[test]
fn synchronous_identifier_migrates_to_channel() {
    let id = create_id(ptr::null_mut());
    let mut addr = socket_address(2, 7);
    let resolved = call!(rdma_resolve_addr(id => *mut rdma_cm_id, ptr::null_mut() => *mut c_void,
        &raw mut addr => *mut sockaddr_in, 1000 => c_int) -> c_int);
    assert_eq!(resolved, 0, "{}", errno());
    // SAFETY: the identifier is alive, and so is the event that it keeps.
    unsafe {
        assert_eq!((*(*id).event).event, RDMA_CM_EVENT_ADDR_RESOLVED);
        let channel = create_channel();
        // The program does not acknowledge this event, so the call must not wait for it.
        let moved = call!(rdma_migrate_id(id => *mut rdma_cm_id,
            channel => *mut rdma_event_channel) -> c_int);
        assert_eq!(moved, 0, "{}", errno());
        assert!((*id).event.is_null());
        assert_eq!((*id).channel, channel);
        set_nonblocking((*channel).fd);
        call!(rdma_resolve_route(id => *mut rdma_cm_id, 1000 => c_int) -> c_int);
        assert_eq!(next_event(channel), Some(RDMA_CM_EVENT_ROUTE_RESOLVED));
        assert_eq!(destroy_id(id), 0);
        call!(rdma_destroy_event_channel(channel => *mut rdma_event_channel));
    }
}

#[test]
fn identifier_on_all_devices_shows_none() {
    let channel = create_channel();
    let id = create_id(channel);
    let mut any = socket_address(0, 0);
    any.sin_addr.s_addr = 0;
    assert_eq!(bind(id, any), 0, "{}", errno());
    // SAFETY: the identifier is alive.
    unsafe {
        assert!((*id).verbs.is_null());
        assert!((*id).pd.is_null());
        let port = call!(rdma_get_src_port(id => *mut rdma_cm_id) -> u16);
        assert_ne!(port, 0);
        let mut addr = socket_address(2, 7);
        set_nonblocking((*channel).fd);
        call!(rdma_resolve_addr(id => *mut rdma_cm_id, ptr::null_mut() => *mut c_void,
            &raw mut addr => *mut sockaddr_in, 1000 => c_int) -> c_int);
        assert_eq!(next_event(channel), Some(RDMA_CM_EVENT_ADDR_RESOLVED));
        assert!(!(*id).verbs.is_null(), "it has the device of its route");
        assert_eq!(destroy_id(id), 0);
    }
    call!(rdma_destroy_event_channel(channel => *mut rdma_event_channel));
}

/// Returns the next event of a non-blocking channel, or `None` after a timeout.
fn next_event(channel: *mut rdma_event_channel) -> Option<rdma_cm_event_type> {
    let mut event: *mut rdma_cm_event = ptr::null_mut();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(1) {
        if call!(rdma_get_cm_event(channel => *mut rdma_event_channel,
            &raw mut event => *mut *mut rdma_cm_event) -> c_int)
            == 0
        {
            // SAFETY: the event belongs to the program until it is acknowledged.
            let kind = unsafe { (*event).event };
            call!(rdma_ack_cm_event(event => *mut rdma_cm_event) -> c_int);
            return Some(kind);
        }
        assert_eq!(errno(), libc::EAGAIN);
        thread::sleep(Duration::from_millis(1));
    }
    None
}

/// Requests a connection to a listener.
fn connect_to(channel: *mut rdma_event_channel, mut addr: sockaddr_in) -> *mut rdma_cm_id {
    // SAFETY: the channel is alive.
    unsafe { set_nonblocking((*channel).fd) };
    let client = create_id(channel);
    call!(rdma_resolve_addr(client => *mut rdma_cm_id, ptr::null_mut() => *mut c_void,
        &raw mut addr => *mut sockaddr_in, 1000 => c_int) -> c_int);
    assert_eq!(next_event(channel), Some(RDMA_CM_EVENT_ADDR_RESOLVED));
    call!(rdma_resolve_route(client => *mut rdma_cm_id, 1000 => c_int) -> c_int);
    assert_eq!(next_event(channel), Some(RDMA_CM_EVENT_ROUTE_RESOLVED));
    // SAFETY: all zeroes is valid.
    let mut param: rdma_conn_param = unsafe { zeroed() };
    param.qp_num = 77;
    let connected = call!(rdma_connect(client => *mut rdma_cm_id,
        &raw mut param => *mut rdma_conn_param) -> c_int);
    assert_eq!(connected, 0, "{}", errno());
    client
}

/// A kernel would also do this when it cleans up after a process.
#[test]
fn exiting_process_closes_connections() {
    // SAFETY: the child has nothing to drop.
    let status = close_connection_by(|| unsafe { libc::exit(0) });
    assert_eq!(status, 0);
}

#[test]
fn killed_process_closes_connections() {
    let status = close_connection_by(|| {
        // The confirmation of the connection might be sent later.
        thread::sleep(Duration::from_millis(200));
        // SAFETY: it terminates the child.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    });
    assert_eq!(status, libc::SIGKILL);
}

/// Waits for the end of a connection that is established by a child process, which then calls a
/// function. Returns the exit status of the child.
fn close_connection_by(exit: impl FnOnce()) -> c_int {
    let channel = create_channel();
    // SAFETY: the channel is alive.
    unsafe { set_nonblocking((*channel).fd) };
    let listener = create_id(channel);
    assert_eq!(bind(listener, socket_address(1, 0)), 0, "{}", errno());
    let listening = call!(rdma_listen(listener => *mut rdma_cm_id, 4 => c_int) -> c_int);
    assert_eq!(listening, 0);
    let port = u16::from_be(call!(rdma_get_src_port(listener => *mut rdma_cm_id) -> u16));
    // SAFETY: the child only runs this test, and exits like a program.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe { libc::alarm(10) };
        let events = create_channel();
        let client = connect_to(events, socket_address(1, port));
        assert_eq!(next_event(events), Some(RDMA_CM_EVENT_CONNECT_RESPONSE));
        let done = call!(rdma_establish(client => *mut rdma_cm_id) -> c_int);
        assert_eq!(done, 0, "{}", errno());
        exit();
        unreachable!("the child has exited");
    }
    let mut event: *mut rdma_cm_event = ptr::null_mut();
    let mut accepted = ptr::null_mut();
    let start = Instant::now();
    let mut kinds = Vec::new();
    while kinds.last() != Some(&RDMA_CM_EVENT_DISCONNECTED) {
        assert!(start.elapsed() < Duration::from_secs(5), "{kinds:?}");
        if call!(rdma_get_cm_event(channel => *mut rdma_event_channel,
            &raw mut event => *mut *mut rdma_cm_event) -> c_int)
            != 0
        {
            thread::sleep(Duration::from_millis(1));
            continue;
        }
        // SAFETY: the event belongs to the program until it is acknowledged. All zeroes is valid.
        unsafe {
            kinds.push((*event).event);
            accepted = (*event).id;
            let is_request = (*event).event == RDMA_CM_EVENT_CONNECT_REQUEST;
            call!(rdma_ack_cm_event(event => *mut rdma_cm_event) -> c_int);
            if is_request {
                let mut param: rdma_conn_param = zeroed();
                param.qp_num = 78;
                let result = call!(rdma_accept(accepted => *mut rdma_cm_id,
                    &raw mut param => *mut rdma_conn_param) -> c_int);
                assert_eq!(result, 0, "{}", errno());
            }
        }
    }
    let all = [
        RDMA_CM_EVENT_CONNECT_REQUEST,
        RDMA_CM_EVENT_ESTABLISHED,
        RDMA_CM_EVENT_DISCONNECTED,
    ];
    assert_eq!(kinds, all);
    let mut status = 0;
    // SAFETY: this is a child of this process.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    for id in [accepted, listener] {
        assert_eq!(destroy_id(id), 0);
    }
    call!(rdma_destroy_event_channel(channel => *mut rdma_event_channel));
    status
}

/// Creates a listener with a request that was cancelled by its peer. The program has not received
/// either event yet.
fn listener_with_request(
    at_server: *mut rdma_event_channel,
    at_client: *mut rdma_event_channel,
) -> *mut rdma_cm_id {
    let listener = create_id(at_server);
    assert_eq!(bind(listener, socket_address(2, 0)), 0, "{}", errno());
    let listening = call!(rdma_listen(listener => *mut rdma_cm_id, 4 => c_int) -> c_int);
    assert_eq!(listening, 0);
    let port = u16::from_be(call!(rdma_get_src_port(listener => *mut rdma_cm_id) -> u16));
    let client = connect_to(at_client, socket_address(2, port));
    thread::sleep(Duration::from_millis(100));
    // The client cancels its request.
    assert_eq!(destroy_id(client), 0);
    thread::sleep(Duration::from_millis(100));
    listener
}

#[test]
fn listener_destroys_pending_requests() {
    let (at_server, at_client, other) = (create_channel(), create_channel(), create_channel());
    // SAFETY: the channels are alive.
    unsafe {
        set_nonblocking((*at_server).fd);
        set_nonblocking((*other).fd);
    }
    let listener = listener_with_request(at_server, at_client);
    assert_eq!(destroy_id(listener), 0);
    assert_eq!(next_event(at_server), None, "its identifier is gone");

    let listener = listener_with_request(at_server, at_client);
    let migrated = call!(rdma_migrate_id(listener => *mut rdma_cm_id,
        other => *mut rdma_event_channel) -> c_int);
    assert_eq!(migrated, 0, "{}", errno());
    assert_eq!(next_event(at_server), None, "all has come along");
    assert_eq!(destroy_id(listener), 0);
    assert_eq!(next_event(other), None, "its identifier is gone");
    assert_eq!(next_event(at_server), None);
    for channel in [at_server, at_client, other] {
        call!(rdma_destroy_event_channel(channel => *mut rdma_event_channel));
    }
}

#[test]
fn ipv4_and_ipv6_listeners_share_port() {
    let channel = create_channel();
    // SAFETY: all zeroes is valid.
    let mut any: sockaddr_in = unsafe { zeroed() };
    any.sin_family = libc::AF_INET as u16;
    any.sin_port = 3260_u16.to_be();
    // SAFETY: as above.
    let mut any_6: sockaddr_in6 = unsafe { zeroed() };
    any_6.sin6_family = libc::AF_INET6 as u16;
    any_6.sin6_port = 3260_u16.to_be();
    let mut bind_6 = |id| call!(rdma_bind_addr(id => *mut rdma_cm_id, &raw mut any_6 => *mut sockaddr_in6) -> c_int);
    let stay = |id| {
        let mut only: c_int = 1;
        call!(rdma_set_option(id => *mut rdma_cm_id, RDMA_OPTION_ID as c_int => c_int,
            RDMA_OPTION_ID_AFONLY as c_int => c_int, &raw mut only => *mut c_int,
            size_of::<c_int>() => usize) -> c_int)
    };
    let listen = |id| call!(rdma_listen(id => *mut rdma_cm_id, 4 => c_int) -> c_int);
    let ipv4 = create_id(channel);
    assert_eq!(bind(ipv4, any), 0, "{}", errno());
    assert_eq!(listen(ipv4), 0, "{}", errno());
    let both = create_id(channel);
    assert_eq!(bind_6(both), -1);
    assert_eq!(errno(), libc::EADDRNOTAVAIL, "IPv4's are taken");
    // No device has an IPv6 address, so no requests will be received.
    let ipv6 = create_id(channel);
    assert_eq!(stay(ipv6), 0, "{}", errno());
    assert_eq!(bind_6(ipv6), 0, "{}", errno());
    assert_eq!(bind_6(ipv6), -1);
    assert_eq!(errno(), libc::EINVAL, "it is bound");
    assert_eq!(listen(ipv6), 0, "{}", errno());
    let port = u16::from_be(call!(rdma_get_src_port(ipv6 => *mut rdma_cm_id) -> u16));
    assert_eq!(port, 3260);
    for id in [ipv4, both, ipv6] {
        assert_eq!(destroy_id(id), 0);
    }
    call!(rdma_destroy_event_channel(channel => *mut rdma_event_channel));
}

#[test]
fn closing_device_destroys_queue_pairs() {
    let device = Device::open("riser0");
    let cq = device.create_cq(10);
    let pair = Pair::new(device, cq, SENDS);
    let other = Device::open("riser0");
    let close = |context| call!(ibv_close_device(context => *mut ibv_context) -> c_int);
    assert_eq!(close(pair.device.context), 0);
    assert_eq!(close(pair.device.context), -1, "twice");
    // Its memory is reused for the next context, which must not get their events.
    let next = Device::open("riser0");
    assert_eq!(destroy_qp(pair.a), libc::EINVAL, "it went with its context");
    assert_ne!(next.context, other.context);
}

#[test]
fn library_threads_block_signals() {
    let _device = Device::open("riser0");
    // A thread sets its name when it starts to run.
    thread::sleep(Duration::from_millis(200));
    let mut found = 0;
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else {
            continue;
        };
        let line = |key: &str| {
            let found = status.lines().find_map(|line| line.strip_prefix(key));
            found.unwrap().trim().to_owned()
        };
        if line("Name:").starts_with("riser-") {
            let blocked = u64::from_str_radix(&line("SigBlk:"), 16).unwrap();
            for signal in [
                libc::SIGTERM,
                libc::SIGINT,
                libc::SIGUSR1,
                libc::SIGALRM,
                libc::SIGCHLD,
            ] {
                assert!(blocked & 1 << (signal - 1) != 0, "signal {signal}");
            }
            found += 1;
        }
    }
    assert!(found > 0);
}

#[test]
fn process_survives_unloading_library() {
    let test = env::current_exe().unwrap();
    let status = Command::new(test)
        .args(["--exact", "unload", "--nocapture"])
        .env("UNLOAD", "1")
        .status();
    assert!(status.unwrap().success());
}

/// Runs in a separate process, see above.
#[test]
fn unload() {
    if env::var_os("UNLOAD").is_none() {
        return;
    }
    let path = env::current_exe()
        .unwrap()
        .with_file_name("libriser_drop_in.so");
    let path = CString::new(path.into_os_string().into_encoded_bytes()).unwrap();
    // SAFETY: no other thread reads the environment, and the functions have these signatures.
    unsafe {
        env::set_var("RISER_DEVICES", "riser0=127.0.41.3");
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        let find = |name: &std::ffi::CStr| libc::dlsym(library, name.as_ptr());
        type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device;
        type Open = unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context;
        let list = std::mem::transmute::<*mut c_void, List>(find(c"ibv_get_device_list"));
        let open = std::mem::transmute::<*mut c_void, Open>(find(c"ibv_open_device"));
        assert!(!open(*list(ptr::null_mut())).is_null(), "{}", errno());
        libc::dlclose(library);
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn child_does_not_affect_parent_objects() {
    let device = Device::open("riser0");
    let channel = call!(ibv_create_comp_channel(device.context => *mut ibv_context)
        -> *mut ibv_comp_channel);
    let cq = call!(ibv_create_cq(device.context => *mut ibv_context, 10 => c_int,
        ptr::null_mut() => *mut c_void, channel => *mut ibv_comp_channel, 0 => c_int)
        -> *mut ibv_cq);
    let pair = Pair::new(device, cq, SENDS);
    let events = create_channel();
    let id = create_id(events);
    assert_eq!(bind(id, socket_address(1, 0)), 0, "{}", errno());
    let port = u16::from_be(call!(rdma_get_src_port(id => *mut rdma_cm_id) -> u16));
    // SAFETY: the objects are alive.
    unsafe {
        set_nonblocking((*channel).fd);
        assert_eq!(ops::ibv_req_notify_cq(cq, false), 0);
        post_recv(pair.b, 1, None);
        let mut wr: ibv_send_wr = zeroed();
        wr.opcode = IBV_WR_SEND;
        wr.send_flags = IBV_SEND_SIGNALED;
        let mut bad = ptr::null_mut();
        assert_eq!(ops::ibv_post_send(pair.a, &raw mut wr, &raw mut bad), 0);
        completions(cq, 2);
    }
    let code = forked(|| {
        if destroy_qp(pair.a) != 0 || destroy_qp(pair.b) != 0 || destroy_cq(cq) != 0 {
            return 2;
        }
        if destroy_id(id) != 0 {
            return 3;
        }
        let id = create_id(create_channel());
        match bind(id, socket_address(1, port)) {
            0 => 4,
            _ if errno() == libc::EADDRINUSE => 0,
            _ => errno(),
        }
    });
    assert_eq!(code, 0);
    let (mut from, mut context) = (ptr::null_mut(), ptr::null_mut());
    let get = || {
        call!(ibv_get_cq_event(channel => *mut ibv_comp_channel,
            &raw mut from => *mut *mut ibv_cq, &raw mut context => *mut *mut c_void) -> c_int)
    };
    let mut get = get;
    assert_eq!(get(), 0, "{}", errno());
    assert_eq!((get(), errno()), (-1, libc::EAGAIN));
    assert_eq!(from, cq);
    call!(ibv_ack_cq_events(cq => *mut ibv_cq, 1 => u32));
    assert_eq!(destroy_id(id), 0);
}

/// A WRITE to a process arrives even if the process posts requests but never polls.
#[test]
fn posts_do_not_delay_packets() {
    let (one, two) = (Device::open("riser0"), Device::open("riser1"));
    let (cq_one, cq_two) = (one.create_cq(10), two.create_cq(10));
    let a = one.create_qp_ex(&mut one.qp_attr(cq_one, IBV_QPT_RC, SENDS));
    let b = two.create_qp_ex(&mut two.qp_attr(cq_two, IBV_QPT_RC, SENDS));
    let mut memory = [0u8; 8];
    let mut memory_two = [0u8; 8];
    let (mr, mr_two) = (one.register(&mut memory), two.register(&mut memory_two));
    // SAFETY: it is only written by peers, and lives as long as the test.
    let arrived = unsafe { AtomicU8::from_ptr(memory.as_mut_ptr()) };
    // SAFETY: the objects are alive.
    unsafe {
        to_rts(a, two.gid(), (*b).qp_num);
        to_rts(b, one.gid(), (*a).qp_num);
        let done = AtomicBool::new(false);
        let number = a.expose_provenance();
        thread::scope(|scope| {
            // This repeatedly drives the device, but only for sending.
            scope.spawn(|| {
                let mut attr: ibv_qp_attr = zeroed();
                attr.min_rnr_timer = 2;
                while !done.load(Ordering::Relaxed) {
                    modify(
                        ptr::with_exposed_provenance_mut(number),
                        &attr,
                        IBV_QP_MIN_RNR_TIMER,
                    );
                    thread::sleep(Duration::from_micros(50));
                }
            });
            let mut waited = Vec::new();
            for n in 1..=5 {
                // After this number of polls with completions, the device expects the program to
                // continue polling.
                for _ in 0..100 {
                    let (own, key) = (extended(a), remote(mr_two, 0));
                    (*own).wr_start.unwrap()(own);
                    (*own).wr_flags = IBV_SEND_SIGNALED;
                    (*own).wr_rdma_write.unwrap()(own, key.0, key.1);
                    assert_eq!((*own).wr_complete.unwrap()(own), 0);
                    completions(cq_one, 1);
                }
                thread::sleep(Duration::from_millis(20));
                let qp = extended(b);
                let (key, at) = remote(mr, 0);
                (*qp).wr_start.unwrap()(qp);
                (*qp).wr_flags = IBV_SEND_SIGNALED;
                (*qp).wr_rdma_write.unwrap()(qp, key, at);
                (*qp).wr_set_inline_data.unwrap()(qp, (&raw const n).cast_mut().cast(), 1);
                assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
                let start = Instant::now();
                while arrived.load(Ordering::Relaxed) != n
                    && start.elapsed() < Duration::from_millis(500)
                {
                    thread::sleep(Duration::from_micros(100));
                }
                waited.push(start.elapsed());
            }
            done.store(true, Ordering::Relaxed);
            waited.sort();
            assert!(waited[2] < Duration::from_millis(100), "{waited:?}");
        });
    }
}

#[test]
fn socket_calls_fail_with_eopnotsupp() {
    let socket = call!(rsocket(libc::AF_INET => c_int, libc::SOCK_STREAM => c_int, 0 => c_int)
        -> c_int);
    assert_eq!((socket, errno()), (-1, libc::EOPNOTSUPP));
    let mut byte = 0u8;
    let length = call!(rrecv(0 => c_int, (&raw mut byte).cast() => *mut c_void, 1 => usize,
        0 => c_int) -> isize);
    assert_eq!((length, errno()), (-1, libc::EOPNOTSUPP));
    let offset = call!(riomap(0 => c_int, (&raw mut byte).cast() => *mut c_void, 1 => usize,
        0 => c_int, 0 => c_int, -1 => i64) -> i64);
    assert_eq!((offset, errno()), (-1, libc::EOPNOTSUPP));
}

/// Maps memory with these access rights, at an address chosen by the kernel.
fn mapped(length: usize, rights: c_int) -> *mut c_void {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: this is a new mapping.
    let memory = unsafe { libc::mmap(ptr::null_mut(), length, rights, flags, -1, 0) };
    assert_ne!(memory, libc::MAP_FAILED);
    memory
}

#[test]
fn protected_memory_is_not_registered() {
    const LENGTH: usize = 3 * 4096;
    let device = Device::open("riser0");
    let register = |memory: *mut c_void, access: u32| {
        call!(ibv_reg_mr(device.pd => *mut ibv_pd, memory => *mut c_void, LENGTH => usize,
            access as c_int => c_int) -> *mut ibv_mr)
    };
    let local = IBV_ACCESS_LOCAL_WRITE;
    let remote = local | IBV_ACCESS_REMOTE_WRITE;
    let constant = mapped(LENGTH, libc::PROT_READ);
    for access in [local, remote] {
        assert!(register(constant, access).is_null(), "{access}");
        assert_eq!(errno(), libc::EFAULT);
    }
    let mr = register(constant, IBV_ACCESS_REMOTE_READ);
    assert!(!mr.is_null(), "{}", errno());
    let change = IBV_REREG_MR_CHANGE_ACCESS as c_int;
    let changed = call!(ibv_rereg_mr(mr => *mut ibv_mr, change => c_int,
        ptr::null_mut() => *mut ibv_pd, ptr::null_mut() => *mut c_void, 0 => usize,
        remote as c_int => c_int) -> c_int);
    assert_ne!(changed, 0);
    assert_eq!(errno(), libc::EFAULT);
    let hidden = mapped(LENGTH, libc::PROT_NONE);
    assert!(register(hidden, 0).is_null());
    assert_eq!(errno(), libc::EFAULT);
    let mut writable = mapped(LENGTH, libc::PROT_READ | libc::PROT_WRITE);
    let mr = register(writable, remote);
    assert!(!mr.is_null(), "{}", errno());
    // Only change the last page.
    writable = writable.wrapping_byte_add(LENGTH - 4096);
    // SAFETY: the memory belongs to the test.
    let result = unsafe { libc::mprotect(writable, 4096, libc::PROT_READ) };
    assert_eq!(result, 0);
    let writable = writable.wrapping_byte_sub(LENGTH - 4096);
    assert!(register(writable, remote).is_null());
    assert_eq!(errno(), libc::EFAULT);
}

#[test]
fn rereg_keeps_region_on_demand() {
    let device = Device::open("riser0");
    let memory = mapped(8192, libc::PROT_READ | libc::PROT_WRITE);
    let access = (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND) as c_int;
    let mr = call!(ibv_reg_mr(device.pd => *mut ibv_pd, memory => *mut c_void, 4096 => usize,
        access => c_int) -> *mut ibv_mr);
    assert!(!mr.is_null(), "{}", errno());
    // This page is not mapped before the region is used.
    // SAFETY: the memory belongs to the test.
    let result = unsafe { libc::munmap(memory.wrapping_byte_add(4096), 4096) };
    assert_eq!(result, 0);
    let change = IBV_REREG_MR_CHANGE_TRANSLATION as c_int;
    let changed = call!(ibv_rereg_mr(mr => *mut ibv_mr, change => c_int,
        ptr::null_mut() => *mut ibv_pd, memory => *mut c_void, 8192 => usize, 0 => c_int) -> c_int);
    assert_eq!(changed, 0, "{}", errno());
}

/// Returns the number of sockets below a descriptor number.
fn sockets_below(limit: c_int) -> c_int {
    let mut count = 0;
    for fd in 0..limit {
        // SAFETY: all zeroes is valid for the structure, which is initialized by the call.
        unsafe {
            let mut stat: libc::stat = zeroed();
            let is_open = libc::fstat(fd, &raw mut stat) == 0;
            count += c_int::from(is_open && stat.st_mode & libc::S_IFMT == libc::S_IFSOCK);
        }
    }
    count
}

#[test]
fn forked_child_closes_sockets_despite_full_table() {
    const LIMIT: c_int = 256;
    let left = forked(|| {
        let limit = libc::rlimit {
            rlim_cur: LIMIT as libc::rlim_t,
            rlim_max: LIMIT as libc::rlim_t,
        };
        // SAFETY: the limit only affects this process.
        let result = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
        assert_eq!(result, 0);
        let before = sockets_below(LIMIT);
        let device = Device::open("riser0");
        let channel = call!(ibv_create_comp_channel(device.context => *mut ibv_context)
            -> *mut ibv_comp_channel);
        assert!(!channel.is_null());
        // SAFETY: standard error is open.
        while unsafe { libc::dup(2) } >= 0 {}
        assert!(sockets_below(LIMIT) > before);
        forked(|| sockets_below(LIMIT) - before)
    });
    assert_eq!(left, 0, "sockets of the parent that the child has");
}

#[test]
fn forked_child_has_own_xrc_domains() {
    let device = Device::open("riser0");
    // SAFETY: this creates a new file.
    let file = unsafe { libc::memfd_create(c"xrcd".as_ptr(), 0) };
    let open = |device: &Device, oflags: c_int| {
        let mut attr = ibv_xrcd_init_attr {
            comp_mask: 3,
            fd: file,
            oflags,
        };
        // SAFETY: the context is open.
        unsafe { device.table().open_xrcd.unwrap()(device.context, &raw mut attr) }
    };
    assert!(!open(&device, libc::O_CREAT).is_null(), "{}", errno());
    let failed = forked(|| {
        let device = Device::open("riser0");
        if !open(&device, 0).is_null() || errno() != libc::EAGAIN {
            return 1;
        }
        c_int::from(open(&device, libc::O_CREAT | libc::O_EXCL).is_null())
    });
    assert_eq!(failed, 0);
}

/// Stops the threads of a test, even on panic.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn forked_child_of_busy_parent_creates_objects() {
    let done = AtomicBool::new(false);
    load();
    thread::scope(|scope| {
        let _stop = Stop(&done);
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    call!(rdma_destroy_event_channel(create_channel() => *mut rdma_event_channel));
                }
            });
        }
        for _ in 0..300 {
            let failed = forked(|| {
                let channel = create_channel();
                call!(rdma_destroy_event_channel(channel => *mut rdma_event_channel));
                0
            });
            assert_eq!(failed, 0);
        }
    });
}

#[test]
fn forked_child_of_busy_parent_uses_objects() {
    let done = AtomicBool::new(false);
    load();
    let port = call!(umad_open_port(ptr::null() => *const i8, 1 => c_int) -> c_int);
    assert!(port >= 0, "{}", errno());
    let channels =
        [create_channel(), create_channel()].map(<*mut rdma_event_channel>::expose_provenance);
    let id = create_id(ptr::with_exposed_provenance_mut(channels[0])).addr();
    thread::scope(|scope| {
        let _stop = Stop(&done);
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let agent = call!(umad_register(port => c_int, 3 => c_int, 2 => c_int, 0 => u8,
                    ptr::null_mut() => *mut i64) -> c_int);
                call!(umad_unregister(port => c_int, agent => c_int) -> c_int);
            }
        });
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for channel in channels {
                    call!(rdma_migrate_id(id => usize, channel => usize) -> c_int);
                }
            }
        });
        for _ in 0..300 {
            let failed = forked(|| {
                call!(rdma_destroy_id(id => usize) -> c_int);
                call!(umad_close_port(port => c_int) -> c_int)
            });
            assert_eq!(failed, 0);
        }
    });
    assert_eq!(call!(rdma_destroy_id(id => usize) -> c_int), 0);
    for channel in channels {
        call!(rdma_destroy_event_channel(channel => usize));
    }
    assert_eq!(call!(umad_close_port(port => c_int) -> c_int), 0);
}
