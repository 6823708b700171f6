//! Domains, device memory, addresses and groups, using the functions called by programs.

#![allow(unsafe_code, reason = "a C interface is called")]
#![allow(unused_unsafe, reason = "calls have blocks of their own")]

mod library;

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::mem::zeroed;
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use library::*;
use riser_rdma_core_sys::bindings::*;

const SENDS: u32 = IBV_QP_EX_WITH_SEND;
const QKEY: u32 = 0x1111_1111;

/// Held while device memory is used. All tests share the memory of the process, and one test
/// allocates all of it.
static DEVICE_MEMORY: Mutex<()> = Mutex::new(());

#[test]
fn parent_domain_shares_protection_domain() {
    let device = Device::open("riser0");
    let table = device.table();
    // SAFETY: the pointers are valid, or must be rejected. All zeroes are valid attributes.
    unsafe {
        let mut td_attr = ibv_td_init_attr { comp_mask: 1 };
        let alloc_td = table.alloc_td.unwrap();
        assert!(alloc_td(device.context, &raw mut td_attr).is_null());
        assert_eq!(errno(), libc::EINVAL);
        td_attr.comp_mask = 0;
        let td = alloc_td(device.context, &raw mut td_attr);
        assert!(!td.is_null());

        let alloc = table.alloc_parent_domain.unwrap();
        let mut attr: ibv_parent_domain_init_attr = zeroed();
        assert!(alloc(device.context, &raw mut attr).is_null(), "no domain");
        attr.pd = device.pd;
        attr.td = td;
        attr.comp_mask = 1;
        let none = alloc(device.context, &raw mut attr);
        assert!(none.is_null(), "allocators that are none");
        attr.comp_mask = 2;
        let parent = alloc(device.context, &raw mut attr);
        assert!(!parent.is_null(), "{}", errno());
        attr.pd = parent;
        assert!(alloc(device.context, &raw mut attr).is_null(), "a parent's");

        // Objects of one domain can be used with objects of the other.
        let cq = device.create_cq(10);
        let real = device.pd;
        let device = Device {
            pd: parent,
            ..device
        };
        let pair = Pair::new(device, cq, SENDS);
        let mut memory = [7u8; 16];
        let (below, above) = {
            let below = Device {
                pd: real,
                ..pair.device
            };
            let below = below.register(&mut memory[..8]);
            (below, pair.device.register(&mut memory[8..]))
        };
        post_recv(pair.b, 2, Some(sge(below, 0, 8)));
        let qp = pair.builder();
        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_send.unwrap()(qp);
        let piece = sge(above, 0, 8);
        (*qp).wr_set_sge.unwrap()(qp, piece.lkey, piece.addr, piece.length);
        assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
        assert_eq!(completions(cq, 1)[0].status, IBV_WC_SUCCESS);

        let dealloc_pd = |pd| call!(ibv_dealloc_pd(pd => *mut ibv_pd) -> c_int);
        let dealloc_td = table.dealloc_td.unwrap();
        assert_eq!(dealloc_td(td), libc::EBUSY);
        assert_eq!(dealloc_pd(real), libc::EBUSY);
        assert_eq!(dealloc_pd(parent), 0);
        assert_eq!(dealloc_pd(parent), libc::EINVAL, "twice");
        assert_eq!(dealloc_td(td), 0);
        assert_eq!(dealloc_pd(real), libc::EBUSY, "it has regions");
        for qp in [pair.a, pair.b] {
            assert_eq!(call!(ibv_destroy_qp(qp => *mut ibv_qp) -> c_int), 0);
        }
        for mr in [below, above] {
            assert_eq!(call!(ibv_dereg_mr(mr => *mut ibv_mr) -> c_int), 0);
        }
        assert_eq!(dealloc_pd(real), 0);
    }
}

#[test]
fn device_memory_supports_copies_and_regions() {
    const ZERO_BASED: c_uint =
        IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    let _alone = DEVICE_MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open("riser0");
    let cq = device.create_cq(10);
    let pair = Pair::new(device, cq, IBV_QP_EX_WITH_RDMA_WRITE);
    let device = &pair.device;
    let table = device.table();
    // SAFETY: the pointers are valid, or must be rejected.
    unsafe {
        let alloc = |length, log_align_req, comp_mask| {
            let mut attr = ibv_alloc_dm_attr {
                length,
                log_align_req,
                comp_mask,
            };
            table.alloc_dm.unwrap()(device.context, &raw mut attr)
        };
        let mut attr: ibv_device_attr_ex = zeroed();
        let query = table.query_device_ex.unwrap();
        let size = size_of_val(&attr);
        assert_eq!(query(device.context, ptr::null(), &raw mut attr, size), 0);
        let most = attr.max_dm_size as usize;
        let refused = [
            (0, 0, 0, libc::EINVAL),
            (64, 13, 0, libc::EINVAL),
            (64, 0, 1, libc::EINVAL),
            (most + 1, 0, 0, libc::ENOMEM),
            (usize::MAX, 0, 0, libc::ENOMEM),
        ];
        for (length, align, mask, expected) in refused {
            assert!(alloc(length, align, mask).is_null());
            assert_eq!(errno(), expected, "{length} {align} {mask}");
        }
        let dm = alloc(64, 12, 0);
        assert!(!dm.is_null());
        assert!(alloc(most, 0, 0).is_null(), "together more than there is");

        let mut bytes = *b"by calls";
        let to = |offset, from: &[u8]| {
            (*dm).memcpy_to_dm.unwrap()(dm, offset, from.as_ptr().cast(), from.len())
        };
        let from = |offset, to: &mut [u8]| {
            (*dm).memcpy_from_dm.unwrap()(to.as_mut_ptr().cast(), dm, offset, to.len())
        };
        assert_eq!(to(8, &bytes), 0);
        assert_eq!(to(2, &bytes), libc::EFAULT);
        assert_eq!(to(0, &bytes[..3]), libc::EFAULT);
        assert_eq!(to(60, &bytes), libc::EFAULT);
        assert_eq!(to(u64::MAX - 3, &bytes), libc::EFAULT);
        assert_eq!(to(64, &[]), 0);
        assert_eq!(from(4, &mut bytes), 0);
        assert_eq!(&bytes, b"\0\0\0\0by c");
        assert_eq!(from(64, &mut bytes), libc::EFAULT);

        let register = |offset, length, access| {
            table.reg_dm_mr.unwrap()(device.pd, dm, offset, length, access)
        };
        for (offset, length, access) in [
            (0, 65, ZERO_BASED),
            (60, 8, ZERO_BASED),
            (u64::MAX, 2, ZERO_BASED),
            (0, 64, IBV_ACCESS_LOCAL_WRITE),
        ] {
            assert!(register(offset, length, access).is_null());
            assert_eq!(errno(), libc::EINVAL, "{offset} {length} {access}");
        }
        let empty = register(64, 0, ZERO_BASED);
        assert!(!empty.is_null(), "{}", errno());
        assert_eq!((*empty).length, 0);
        assert_eq!(call!(ibv_dereg_mr(empty => *mut ibv_mr) -> c_int), 0);
        let mr = register(32, 32, ZERO_BASED);
        assert!(!mr.is_null(), "{}", errno());
        let qp = pair.builder();
        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_flags = IBV_SEND_SIGNALED;
        (*qp).wr_rdma_write.unwrap()(qp, (*mr).rkey, 8);
        (*qp).wr_set_inline_data.unwrap()(qp, c"by peers".as_ptr().cast_mut().cast(), 8);
        assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
        assert_eq!(completions(cq, 1)[0].status, IBV_WC_SUCCESS);
        assert_eq!(from(40, &mut bytes), 0);
        assert_eq!(&bytes, b"by peers");

        let free = table.free_dm.unwrap();
        assert_eq!(free(dm), libc::EBUSY);
        assert_eq!(call!(ibv_dereg_mr(mr => *mut ibv_mr) -> c_int), 0);
        assert_eq!(free(dm), 0);
        assert_eq!(free(dm), libc::EINVAL, "twice");
        let whole = alloc(most, 0, 0);
        assert!(!whole.is_null(), "all is free again");
        assert_eq!(free(whole), 0);
    }
}

/// Creates a datagram queue pair in RTS.
fn datagrams(device: &Device, cq: *mut ibv_cq) -> *mut ibv_qp {
    let qp = device.create_qp_ex(&mut device.qp_attr(cq, IBV_QPT_UD, SENDS));
    assert!(!qp.is_null(), "{}", errno());
    to_rts(qp, device.gid(), 0);
    qp
}

/// Sends a datagram.
fn send(qp: *mut ibv_qp, ah: *mut ibv_ah, number: u32, data: &[u8]) {
    let qp = extended(qp);
    // SAFETY: the objects are alive.
    unsafe {
        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_send.unwrap()(qp);
        (*qp).wr_set_ud_addr.unwrap()(qp, ah, number, QKEY);
        (*qp).wr_set_inline_data.unwrap()(qp, data.as_ptr().cast_mut().cast(), data.len());
        assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
    }
}

fn create_ah(device: &Device, gid: ibv_gid) -> *mut ibv_ah {
    let mut attr = ah_attr(gid);
    // A flow label has 20 bits, and adapters ignore the other bits.
    attr.grh.flow_label = u32::MAX;
    let ah = call!(ibv_create_ah(device.pd => *mut ibv_pd, &raw mut attr => *mut ibv_ah_attr)
        -> *mut ibv_ah);
    assert!(!ah.is_null(), "{}", errno());
    ah
}

/// If the program does not request completions, it can't know when datagrams have completed. An
/// adapter would already have sent them when the queue pair is destroyed.
#[test]
fn destroying_queue_pair_sends_posted_requests() {
    const COUNT: usize = 8;
    let (one, two) = (Device::open("riser0"), Device::open("riser1"));
    let (cq_one, cq_two) = (one.create_cq(10), two.create_cq(10));
    let b = datagrams(&two, cq_two);
    // SAFETY: it is alive.
    let number = unsafe { (*b).qp_num };
    let mut memory = [0u8; 64];
    let place = sge(two.register(&mut memory), 0, 64);
    let ah = create_ah(&one, two.gid());
    for is_reset in [false, true] {
        for id in 0..COUNT {
            post_recv(b, id as u64, Some(place));
        }
        let a = datagrams(&one, cq_one);
        for _ in 0..COUNT {
            send(a, ah, number, b"last words");
        }
        if is_reset {
            // SAFETY: all zeroes is valid.
            let mut attr: ibv_qp_attr = unsafe { zeroed() };
            attr.qp_state = IBV_QPS_RESET;
            modify(a, &attr, IBV_QP_STATE);
        }
        assert_eq!(call!(ibv_destroy_qp(a => *mut ibv_qp) -> c_int), 0);
        completions(cq_two, COUNT);
    }
}

#[test]
fn address_handle_from_completion_reaches_sender() {
    let (one, two) = (Device::open("riser0"), Device::open("riser1"));
    let (cq_one, cq_two) = (one.create_cq(10), two.create_cq(10));
    let (a, b) = (datagrams(&one, cq_one), datagrams(&two, cq_two));
    let (mut at_a, mut at_b) = ([0u8; 64], [0u8; 64]);
    post_recv(a, 1, Some(sge(one.register(&mut at_a), 0, 64)));
    post_recv(b, 2, Some(sge(two.register(&mut at_b), 0, 64)));
    // SAFETY: the objects are alive.
    unsafe {
        send(a, create_ah(&one, two.gid()), (*b).qp_num, b"question");
        let mut wc = completions(cq_two, 1)[0];
        assert_eq!((wc.byte_len, wc.src_qp), (48, (*a).qp_num));
        assert_eq!(wc.sl, 0b1010, "an IPv4 header, over UDP");
        let grh = at_b.as_mut_ptr().cast::<c_void>();

        let mut attr: ibv_ah_attr = zeroed();
        let mut init = |wc: &mut ibv_wc, grh: *mut c_void, port| {
            call!(ibv_init_ah_from_wc(
                two.context => *mut ibv_context, port => u8, wc => *mut ibv_wc,
                grh => *mut c_void, &raw mut attr => *mut ibv_ah_attr,
            ) -> c_int)
        };
        assert_eq!(init(&mut wc, ptr::null_mut(), 1), -1);
        assert_eq!(init(&mut wc, grh, 2), -1, "no such port");
        assert_eq!(
            init(&mut wc, [0u8; 40].as_mut_ptr().cast(), 1),
            -1,
            "no header"
        );
        let mut without = wc;
        without.wc_flags &= !IBV_WC_GRH;
        assert_eq!(init(&mut without, grh, 1), -1);
        assert_eq!(init(&mut wc, grh, 1), 0);
        assert_eq!(attr.grh.dgid.raw, one.gid().raw);
        assert_eq!((attr.is_global, attr.port_num), (1, 1));

        let back = call!(ibv_create_ah_from_wc(
            two.pd => *mut ibv_pd, &raw mut wc => *mut ibv_wc, grh => *mut c_void, 1 => u8,
        ) -> *mut ibv_ah);
        assert!(!back.is_null(), "{}", errno());
        send(b, back, wc.src_qp, b"answer");
        let wc = completions(cq_one, 1)[0];
        assert_eq!((wc.wr_id, wc.byte_len), (1, 46));
    }
    assert_eq!(&at_a[40..46], b"answer");
}

#[test]
fn multicast_group_is_attached_and_detached() {
    let device = Device::open("riser0");
    let cq = device.create_cq(10);
    let qp = datagrams(&device, cq);
    let mut group = [0u8; 16];
    (group[10], group[11]) = (0xff, 0xff);
    group[12..].copy_from_slice(&[239, 1, 41, 7]);
    let mut gid = ibv_gid { raw: group };
    let attach = |qp, gid: *mut ibv_gid| call!(ibv_attach_mcast(qp => *mut ibv_qp, gid => *mut ibv_gid, 0 => u16) -> c_int);
    let detach = |qp, gid: *mut ibv_gid| call!(ibv_detach_mcast(qp => *mut ibv_qp, gid => *mut ibv_gid, 0 => u16) -> c_int);
    let connection = device.create_qp_ex(&mut device.qp_attr(cq, IBV_QPT_RC, SENDS));
    assert_eq!(attach(connection, &raw mut gid), libc::EINVAL);
    let mut own = device.gid();
    assert_eq!(attach(qp, &raw mut own), libc::EINVAL, "no group");
    assert_eq!(detach(qp, &raw mut gid), libc::EINVAL, "not attached");
    assert_eq!(attach(qp, &raw mut gid), 0);
    let destroy = |qp| call!(ibv_destroy_qp(qp => *mut ibv_qp) -> c_int);
    assert_eq!(destroy(qp), libc::EBUSY);
    assert_eq!(detach(qp, &raw mut gid), 0);
    assert_eq!(destroy(qp), 0);
}

#[test]
fn open_devices_are_listed() {
    let _device = Device::open("riser0");
    let mut count = 0;
    let list = call!(rdma_get_devices(&raw mut count => *mut c_int) -> *mut *mut ibv_context);
    assert!(!list.is_null());
    assert_eq!(count, 2);
    // SAFETY: the list has this number of contexts, each of which has a device with a name, and is
    // terminated by a null pointer.
    let names = unsafe {
        assert!((*list.add(2)).is_null());
        [0, 1].map(|i| CStr::from_ptr((*(**list.add(i)).device).name.as_ptr()).to_owned())
    };
    assert_eq!(names, [c"riser0".to_owned(), c"riser1".to_owned()]);
    call!(rdma_free_devices(list => *mut *mut ibv_context));
}

#[test]
fn default_partition_has_index_0() {
    let device = Device::open("riser0");
    let index = |port: u8, pkey: u16| {
        call!(ibv_get_pkey_index(device.context => *mut ibv_context, port => u8,
            pkey.to_be() => u16) -> c_int)
    };
    assert_eq!(index(1, 0xffff), 0);
    assert_eq!(
        index(1, 0x7fff),
        0,
        "a limited member is in the same partition"
    );
    assert_eq!(index(1, 0x8001), -1);
    assert_eq!(index(2, 0xffff), -1);
}

/// Bytes with the alignment of the kernel's structures.
#[repr(align(8))]
struct Aligned<const N: usize>([u8; N]);

#[test]
fn kernel_structures_are_converted() {
    // Bytes with the layout of the kernel's headers, all of them different.
    let aligned = Aligned::<144>(std::array::from_fn(|i| i as u8));
    let bytes = &aligned.0;
    let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
    // SAFETY: all zeroes is valid for the structures, and the kernel's structures have the same
    // sizes as the buffers.
    unsafe {
        let mut attr: ibv_qp_attr = zeroed();
        attr.rate_limit = 5;
        call!(ibv_copy_qp_attr_from_kern(&raw mut attr => *mut ibv_qp_attr,
            bytes.as_ptr() => *const u8));
        assert_eq!((attr.qp_state, attr.qp_access_flags), (word(4), word(36)));
        assert_eq!(attr.ah_attr.grh.dgid.raw, bytes[40..56]);
        assert_eq!(
            (attr.ah_attr.grh.sgid_index, attr.ah_attr.port_num),
            (60, 70)
        );
        assert_eq!(
            (attr.alt_ah_attr.grh.flow_label, attr.alt_ah_attr.sl),
            (word(88), 98)
        );
        assert_eq!(
            (attr.cap.max_send_wr, attr.cap.max_inline_data),
            (word(104), word(120))
        );
        assert_eq!((attr.en_sqd_async_notify, attr.alt_timeout), (128, 138));
        assert_eq!(attr.rate_limit, 5);

        let mut path: ibv_sa_path_rec = zeroed();
        let mut aligned = (Aligned([0u8; 64]), Aligned([0u8; 64]));
        let (back, record) = (&mut aligned.0.0, &mut aligned.1.0);
        record.copy_from_slice(&bytes[..64]);
        // In the other structure, the MTU has one byte, and there is one byte of padding.
        record[48..52].copy_from_slice(&4u32.to_ne_bytes());
        call!(ibv_copy_path_rec_from_kern(&raw mut path => *mut ibv_sa_path_rec,
            record.as_ptr() => *const u8));
        assert_eq!((path.mtu, path.hop_limit, path.preference), (4, 54, 63));
        call!(ibv_copy_path_rec_to_kern(back.as_mut_ptr() => *mut u8,
            &raw const path => *const ibv_sa_path_rec));
        assert_eq!(back, record);
    }
}

#[test]
fn xrc_request_selects_receive_queue() {
    let device = Device::open("riser0");
    let table = device.table();
    let cq = device.create_cq(10);
    // SAFETY: the pointers are valid, or must be rejected. All zeroes are valid attributes.
    unsafe {
        let open = |fd, oflags| {
            let mut attr = ibv_xrcd_init_attr {
                comp_mask: 3,
                fd,
                oflags,
            };
            table.open_xrcd.unwrap()(device.context, &raw mut attr)
        };
        let close = table.close_xrcd.unwrap();
        assert!(open(-1, 0).is_null());
        let file = libc::memfd_create(c"xrcd".as_ptr(), 0);
        assert!(open(file, 0).is_null(), "it does not exist yet");
        let xrcd = open(file, libc::O_CREAT);
        assert!(!xrcd.is_null(), "{}", errno());
        assert!(open(file, libc::O_CREAT | libc::O_EXCL).is_null());
        let same = open(file, 0);
        assert!(!same.is_null());

        let mut attr: ibv_srq_init_attr_ex = zeroed();
        attr.attr.max_wr = 4;
        attr.attr.max_sge = 1;
        attr.pd = device.pd;
        attr.srq_type = IBV_SRQT_XRC;
        attr.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
        let create_srq = table.create_srq_ex.unwrap();
        let none = create_srq(device.context, &raw mut attr);
        assert!(none.is_null(), "without a domain");
        attr.xrcd = same;
        attr.cq = cq;
        attr.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
        let srq = create_srq(device.context, &raw mut attr);
        assert!(!srq.is_null(), "{}", errno());
        let mut number = 0;
        assert_eq!(table.get_srq_num.unwrap()(srq, &raw mut number), 0);

        let mut attr: ibv_qp_init_attr_ex = zeroed();
        attr.qp_type = IBV_QPT_XRC_RECV;
        assert!(device.create_qp_ex(&mut attr).is_null(), "without a domain");
        attr.xrcd = xrcd;
        attr.comp_mask = IBV_QP_INIT_ATTR_XRCD;
        let target = device.create_qp_ex(&mut attr);
        assert!(!target.is_null(), "{}", errno());
        let mut attr = device.qp_attr(cq, IBV_QPT_XRC_SEND, SENDS);
        attr.recv_cq = ptr::null_mut();
        let initiator = device.create_qp_ex(&mut attr);
        assert!(!initiator.is_null(), "{}", errno());
        to_rts(target, device.gid(), (*initiator).qp_num);
        to_rts(initiator, device.gid(), (*target).qp_num);

        let mut wr: ibv_recv_wr = zeroed();
        wr.wr_id = 3;
        let mut bad = ptr::null_mut();
        let post = (*device.context).ops.post_srq_recv.unwrap();
        assert_eq!(post(srq, &raw mut wr, &raw mut bad), 0);
        let qp = extended(initiator);
        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_send.unwrap()(qp);
        assert_eq!((*qp).wr_complete.unwrap()(qp), libc::EINVAL, "to no queue");
        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_send.unwrap()(qp);
        (*qp).wr_set_xrc_srqn.unwrap()(qp, number);
        assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
        let wc = completions(cq, 1)[0];
        assert_eq!((wc.wr_id, wc.status), (3, IBV_WC_SUCCESS));

        // Another structure of the target, which exists until both are destroyed.
        let open_target = |change: &dyn Fn(&mut ibv_qp_open_attr)| {
            let mut attr = ibv_qp_open_attr {
                // Number, domain and type.
                comp_mask: 1 | 2 | 8,
                qp_num: (*target).qp_num,
                xrcd: same,
                qp_context: ptr::null_mut(),
                qp_type: IBV_QPT_XRC_RECV,
            };
            change(&mut attr);
            let qp = table.open_qp.unwrap()(device.context, &raw mut attr);
            if qp.is_null() { Err(errno()) } else { Ok(qp) }
        };
        let invalid = Err(libc::EINVAL);
        assert_eq!(open_target(&|attr| attr.qp_num ^= 1), invalid);
        assert_eq!(open_target(&|attr| attr.qp_type = IBV_QPT_RC), invalid);
        assert_eq!(open_target(&|attr| attr.comp_mask &= !1), invalid);
        assert_eq!(open_target(&|attr| attr.xrcd = ptr::null_mut()), invalid);
        let unknown = open_target(&|attr| attr.comp_mask |= 1 << 10);
        assert_eq!(unknown, Err(libc::EOPNOTSUPP));
        let other = open_target(&|_| {}).unwrap();
        assert_eq!((*other).qp_num, (*target).qp_num);
        assert_eq!((*other).state, IBV_QPS_RTS);
        assert_eq!(call!(ibv_destroy_qp(target => *mut ibv_qp) -> c_int), 0);
        assert_eq!(post(srq, &raw mut wr, &raw mut bad), 0);
        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_send.unwrap()(qp);
        (*qp).wr_set_xrc_srqn.unwrap()(qp, number);
        assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
        assert_eq!(completions(cq, 1)[0].status, IBV_WC_SUCCESS);

        assert_eq!(close(same), 0);
        assert_eq!(close(xrcd), libc::EBUSY, "it has queues");
        for qp in [other, initiator] {
            assert_eq!(call!(ibv_destroy_qp(qp => *mut ibv_qp) -> c_int), 0);
        }
        assert_eq!(call!(ibv_destroy_srq(srq => *mut ibv_srq) -> c_int), 0);
        assert_eq!(close(xrcd), 0);
        assert_eq!(close(xrcd), libc::EINVAL, "twice");
    }
}

const PAGE: usize = 4096;

/// Three registered pages of the program. The middle one can be unmapped.
struct Pages {
    mr: *mut ibv_mr,
    at: *mut u8,
}

impl Pages {
    fn new(device: &Device) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let all = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: this is a new mapping, which is never unmapped.
        let pages = unsafe {
            let at = libc::mmap(ptr::null_mut(), 3 * PAGE, all, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            std::slice::from_raw_parts_mut(at.cast::<u8>(), 3 * PAGE)
        };
        pages.fill(1);
        let mr = device.register(pages);
        let at = pages.as_mut_ptr();
        Self { mr, at }
    }

    /// Unmaps the middle page, so that nothing else can be mapped there.
    fn tear(&self) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: this is a page of the mapping, which is only accessed via pointers by the library
        // and by the test.
        let hole = unsafe {
            let middle = self.at.add(PAGE).cast();
            libc::mmap(middle, PAGE, libc::PROT_NONE, flags, -1, 0)
        };
        assert_ne!(hole, libc::MAP_FAILED);
    }

    fn byte(&self, at: usize) -> u8 {
        // SAFETY: the page is mapped.
        unsafe { self.at.add(at).read_volatile() }
    }
}

/// Creates a queue pair on each device, connected to each other. Returns the first queue pair and
/// its completion queue.
fn connect(a: &Device, b: &Device) -> (*mut ibv_qp_ex, *mut ibv_cq) {
    let ops = IBV_QP_EX_WITH_RDMA_WRITE
        | IBV_QP_EX_WITH_SEND
        | IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    let make = |device: &Device| {
        let cq = device.create_cq(10);
        let qp = device.create_qp_ex(&mut device.qp_attr(cq, IBV_QPT_RC, ops));
        assert!(!qp.is_null(), "{}", errno());
        (qp, cq)
    };
    let ((first, cq), (second, _)) = (make(a), make(b));
    // SAFETY: both are alive.
    let numbers = unsafe { ((*first).qp_num, (*second).qp_num) };
    to_rts(first, b.gid(), numbers.1);
    to_rts(second, a.gid(), numbers.0);
    (extended(first), cq)
}

/// Returns the completion status of an operation built by `build`.
fn status(
    (qp, cq): (*mut ibv_qp_ex, *mut ibv_cq),
    build: impl FnOnce(&mut ibv_qp_ex),
) -> ibv_wc_status {
    // SAFETY: the queue pair is alive, and these are the functions that the header calls.
    unsafe {
        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_flags = IBV_SEND_SIGNALED;
        build(&mut *qp);
        assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
    }
    completions(cq, 1)[0].status
}

#[test]
fn unmapped_region_does_not_crash_process() {
    let (a, other) = (Device::open("riser0"), Device::open("riser1"));
    // Within a device, and using sockets.
    for b in [&a, &other] {
        let own = Pages::new(&a);
        let write = |to: &Pages, offset, length| {
            let ((key, addr), from) = (remote(to.mr, offset), sge(own.mr, 0, length));
            move |qp: &mut ibv_qp_ex| {
                // SAFETY: these are functions of a queue pair that is alive.
                unsafe {
                    qp.wr_rdma_write.unwrap()(qp, key, addr);
                    qp.wr_set_sge.unwrap()(qp, from.lkey, from.addr, from.length);
                }
            }
        };
        let read = |from: &Pages, offset, length| {
            let ((key, addr), to) = (remote(from.mr, offset), sge(own.mr, 0, length));
            move |qp: &mut ibv_qp_ex| {
                // SAFETY: as above.
                unsafe {
                    qp.wr_rdma_read.unwrap()(qp, key, addr);
                    qp.wr_set_sge.unwrap()(qp, to.lkey, to.addr, to.length);
                }
            }
        };
        let pages = Pages::new(b);
        let pair = connect(&a, b);
        assert_eq!(status(pair, read(&pages, PAGE, 4000)), IBV_WC_SUCCESS);
        pages.tear();
        // No data is sent that could not be read.
        let gone = status(pair, read(&pages, PAGE - 2000, 4000));
        assert_eq!(gone, IBV_WC_REM_ACCESS_ERR);
        assert_eq!(own.byte(3000), 1, "no response data yet");
        // The remaining pages can still be used.
        let pair = connect(&a, b);
        assert_eq!(status(pair, write(&pages, 0, 4000)), IBV_WC_SUCCESS);
        assert_eq!(status(pair, read(&pages, 2 * PAGE, 4000)), IBV_WC_SUCCESS);
        assert_eq!(status(pair, write(&pages, PAGE, 8)), IBV_WC_REM_ACCESS_ERR);

        let pages = Pages::new(b);
        pages.tear();
        let pair = connect(&a, b);
        // As with an adapter, the peer can't tell that the bytes of the first packets are lost.
        let first = status(pair, write(&pages, PAGE, 500));
        let second = match first {
            IBV_WC_SUCCESS => status(pair, write(&pages, 2 * PAGE - 1, 2)),
            other => other,
        };
        assert_eq!(second, IBV_WC_REM_ACCESS_ERR);

        let pages = Pages::new(b);
        pages.tear();
        let pair = connect(&a, b);
        let (key, addr) = remote(pages.mr, PAGE + 8);
        let atomic = status(pair, |qp| {
            let result = sge(own.mr, 0, 8);
            // SAFETY: as above.
            unsafe {
                qp.wr_atomic_fetch_add.unwrap()(qp, key, addr, 5);
                qp.wr_set_sge.unwrap()(qp, result.lkey, result.addr, 8);
            }
        });
        assert_eq!(atomic, IBV_WC_REM_ACCESS_ERR);

        let pages = Pages::new(b);
        own.tear();
        let pair = connect(&a, b);
        let own_gone = status(pair, |qp| {
            let ((key, addr), from) = (remote(pages.mr, 0), sge(own.mr, PAGE, 4000));
            // SAFETY: as above.
            unsafe {
                qp.wr_rdma_write.unwrap()(qp, key, addr);
                qp.wr_set_sge.unwrap()(qp, from.lkey, from.addr, from.length);
            }
        });
        assert_eq!(own_gone, IBV_WC_LOC_PROT_ERR);
        assert_eq!(pages.byte(0), 1);
    }
}

/// Returns the inode number of an open file.
fn inode(fd: c_int) -> Option<u64> {
    // SAFETY: all zeroes is valid, and the call initializes the structure.
    unsafe {
        let mut stat: libc::stat = zeroed();
        (libc::fstat(fd, &raw mut stat) == 0).then_some(stat.st_ino)
    }
}

#[test]
fn device_and_objects_can_be_imported() {
    let _alone = DEVICE_MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    let device = Device::open("riser0");
    let mut memory = [7u8; 64];
    let mr = device.register(&mut memory);
    // SAFETY: the objects are alive, and all zeroes are valid attributes.
    unsafe {
        let import_device = |fd: c_int| call!(ibv_import_device(fd => c_int) -> *mut ibv_context);
        for fd in [-1, 1 << 20, (*device.context).async_fd] {
            assert!(import_device(fd).is_null());
            assert_eq!(errno(), libc::EINVAL);
        }
        let fd = libc::dup((*device.context).cmd_fd);
        let context = import_device(fd);
        assert!(!context.is_null(), "{}", errno());
        let import_pd = |context: *mut ibv_context, handle: u32| call!(ibv_import_pd(context => *mut ibv_context, handle => u32) -> *mut ibv_pd);
        let import_mr = |pd: *mut ibv_pd, handle: u32| call!(ibv_import_mr(pd => *mut ibv_pd, handle => u32) -> *mut ibv_mr);
        let pd = import_pd(context, (*device.pd).handle);
        assert!(!pd.is_null(), "{}", errno());
        assert!(import_pd(context, 1 << 20).is_null());
        assert_eq!(errno(), libc::ENOENT);
        let same = import_mr(pd, (*mr).handle);
        assert!(!same.is_null(), "{}", errno());
        assert_eq!(((*same).lkey, (*same).rkey), ((*mr).lkey, (*mr).rkey));
        assert_eq!(((*same).addr, (*same).length), (ptr::null_mut(), 64));
        // Handles of objects can't be used in an unrelated context.
        let other = Device::open("riser0");
        assert!(import_pd(other.context, (*device.pd).handle).is_null());
        assert!(import_mr(other.pd, (*mr).handle).is_null());
        assert_eq!(errno(), libc::ENOENT);

        // A queue pair in the imported domain can use the region.
        let imported = Device { context, pd };
        let (qp, cq) = connect(&imported, &other);
        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_flags = IBV_SEND_SIGNALED;
        let mut there = [0u8; 64];
        let (key, addr) = remote(other.register(&mut there), 0);
        (*qp).wr_rdma_write.unwrap()(qp, key, addr);
        let from = memory.as_ptr().addr() as u64;
        (*qp).wr_set_sge.unwrap()(qp, (*same).lkey, from, 64);
        assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
        assert_eq!(completions(cq, 1)[0].status, IBV_WC_SUCCESS);
        assert_eq!(there, [7; 64]);
        let qp = qp.cast::<ibv_qp>();
        assert_eq!(call!(ibv_destroy_qp(qp => *mut ibv_qp) -> c_int), 0);

        let mut attr: ibv_alloc_dm_attr = zeroed();
        attr.length = 64;
        let dm = device.table().alloc_dm.unwrap()(device.context, &raw mut attr);
        let import_dm = |context: *mut ibv_context, handle: u32| call!(ibv_import_dm(context => *mut ibv_context, handle => u32) -> *mut ibv_dm);
        assert!(import_dm(other.context, (*dm).handle).is_null());
        let shared = import_dm(context, (*dm).handle);
        assert!(!shared.is_null(), "{}", errno());
        let mut bytes = *b"both";
        let to = (*dm).memcpy_to_dm.unwrap();
        assert_eq!(to(dm, 8, bytes.as_ptr().cast(), 4), 0);
        bytes = [0; 4];
        let from = (*shared).memcpy_from_dm.unwrap();
        assert_eq!(from(bytes.as_mut_ptr().cast(), shared, 8, 4), 0);
        assert_eq!(&bytes, b"both");

        // Objects that were destroyed by one context can only be unimported by other contexts.
        assert_eq!(imported.table().free_dm.unwrap()(shared), 0);
        assert_eq!(device.table().free_dm.unwrap()(dm), libc::ENOENT);
        call!(ibv_unimport_dm(dm => *mut ibv_dm));
        assert_eq!(call!(ibv_dereg_mr(same => *mut ibv_mr) -> c_int), 0);
        assert_eq!(
            call!(ibv_dereg_mr(mr => *mut ibv_mr) -> c_int),
            libc::EINVAL
        );
        call!(ibv_unimport_mr(mr => *mut ibv_mr));
        assert_eq!(call!(ibv_dealloc_pd(device.pd => *mut ibv_pd) -> c_int), 0);
        call!(ibv_unimport_pd(pd => *mut ibv_pd));
        assert_eq!(
            call!(ibv_dealloc_pd(pd => *mut ibv_pd) -> c_int),
            libc::EINVAL
        );
        assert_eq!(
            call!(ibv_close_device(context => *mut ibv_context) -> c_int),
            0
        );
        // Its number may already be used for another file.
        assert_ne!(inode(fd), inode((*device.context).cmd_fd), "it is closed");
    }
}

#[test]
fn queue_pair_respects_rate_limit() {
    const MESSAGE: u32 = 1000;
    const COUNT: u32 = 200;
    const BURST: u32 = 5000;
    let device = Device::open("riser0");
    let mut memory = [5u8; MESSAGE as usize];
    let mr = device.register(&mut memory);
    let mut memory = [0u8; MESSAGE as usize + 40];
    let room = device.register(&mut memory);
    // SAFETY: the objects are alive, and all zeroes are valid attributes.
    unsafe {
        let mut attr: ibv_device_attr_ex = zeroed();
        let query = device.table().query_device_ex.unwrap();
        let size = size_of::<ibv_device_attr_ex>();
        assert_eq!(query(device.context, ptr::null(), &raw mut attr, size), 0);
        let caps = attr.packet_pacing_caps;
        assert_ne!(caps.supported_qpts & 1 << IBV_QPT_RC, 0);
        let limit = |qp: *mut ibv_qp, rate_limit: u32, comp_mask| {
            let mut attr = ibv_qp_rate_limit_attr {
                rate_limit,
                max_burst_sz: BURST,
                typical_pkt_sz: 0,
                comp_mask,
            };
            device.table().modify_qp_rate_limit.unwrap()(qp, &raw mut attr)
        };
        for qp_type in [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD] {
            let cq = device.create_cq(300);
            let mut attr = device.qp_attr(cq, qp_type, SENDS);
            attr.cap.max_send_wr = COUNT;
            attr.cap.max_recv_wr = COUNT;
            let sender = device.create_qp_ex(&mut attr);
            attr.recv_cq = device.create_cq(300);
            let receiver = device.create_qp_ex(&mut attr);
            assert_eq!(limit(sender, 8000, 0), libc::EINVAL, "in RESET");
            let numbers = ((*sender).qp_num, (*receiver).qp_num);
            to_rts(sender, device.gid(), numbers.1);
            to_rts(receiver, device.gid(), numbers.0);
            assert_eq!(limit(sender, caps.qp_rate_limit_min - 1, 0), libc::EINVAL);
            assert_eq!(limit(sender, 8000, 1), libc::EINVAL);
            // One byte per quarter of a microsecond.
            assert_eq!(limit(sender, 32_000, 0), 0);
            let (mut now, mut init) = (zeroed::<ibv_qp_attr>(), zeroed::<ibv_qp_init_attr>());
            let queried = call!(ibv_query_qp(sender => *mut ibv_qp, &raw mut now => *mut ibv_qp_attr,
                0 => c_int, &raw mut init => *mut ibv_qp_init_attr) -> c_int);
            assert_eq!((queried, now.rate_limit), (0, 32_000));
            // The same using another call.
            modify(sender, &now, IBV_QP_RATE_LIMIT);
            now.rate_limit = 1;
            let result = call!(ibv_modify_qp(sender => *mut ibv_qp, &raw mut now => *mut ibv_qp_attr,
                IBV_QP_RATE_LIMIT as c_int => c_int) -> c_int);
            assert_eq!(result, libc::EINVAL);
            assert_eq!(limit(sender, 32_000, 0), 0);
            let ah = create_ah(&device, device.gid());
            for _ in 0..COUNT {
                post_recv(receiver, 0, Some(sge(room, 0, MESSAGE + 40)));
            }
            let start = Instant::now();
            let qp = extended(sender);
            for _ in 0..COUNT {
                (*qp).wr_start.unwrap()(qp);
                (*qp).wr_flags = IBV_SEND_SIGNALED;
                (*qp).wr_send.unwrap()(qp);
                let piece = sge(mr, 0, MESSAGE);
                (*qp).wr_set_sge.unwrap()(qp, piece.lkey, piece.addr, piece.length);
                if qp_type == IBV_QPT_UD {
                    (*qp).wr_set_ud_addr.unwrap()(qp, ah, 1, QKEY);
                }
                assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
            }
            let mut left = COUNT as usize;
            while left > 0 {
                left -= poll(cq).len();
                assert!(start.elapsed() < Duration::from_secs(20), "{left} are left");
            }
            let least = Duration::from_nanos(u64::from(COUNT * MESSAGE - BURST) * 250);
            assert!(
                start.elapsed() > least,
                "{:?} of {qp_type}",
                start.elapsed()
            );
            assert_eq!(limit(sender, 0, 0), 0, "no limit");
        }
    }
}

#[test]
fn destination_resolves_to_ethernet_address() {
    let device = Device::open("riser0");
    let resolve = |change: &dyn Fn(&mut ibv_ah_attr)| {
        let mut attr = ah_attr(device.gid());
        change(&mut attr);
        let (mut mac, mut vlan) = ([1u8; 6], 0u16);
        let result = call!(ibv_resolve_eth_l2_from_gid(device.context => *mut ibv_context,
            &raw mut attr => *mut ibv_ah_attr, mac.as_mut_ptr() => *mut u8,
            &raw mut vlan => *mut u16) -> c_int);
        if result == 0 {
            Ok((mac, vlan))
        } else {
            Err(result)
        }
    };
    // The loopback interface has no MAC address.
    assert_eq!(resolve(&|_| {}), Ok(([0; 6], 0xffff)));
    let group = resolve(&|attr| {
        attr.grh.dgid = ibv_gid {
            raw: *b"\0\0\0\0\0\0\0\0\0\0\xff\xff\xef\x81\x02\x03",
        };
    });
    assert_eq!(group, Ok(([1, 0, 0x5e, 1, 2, 3], 0xffff)));
    assert_eq!(resolve(&|attr| attr.is_global = 0), Err(libc::EINVAL));
    assert_eq!(resolve(&|attr| attr.grh.sgid_index = 9), Err(libc::EINVAL));
    assert_eq!(resolve(&|attr| attr.port_num = 2), Err(libc::EINVAL));
}
