//! Extended completion queues and queue pairs, using the function tables that are used by the
//! header's inline functions.

#![allow(unsafe_code, reason = "a C interface is called")]
#![allow(unused_unsafe, reason = "calls have blocks of their own")]

mod library;

use std::ffi::c_int;
use std::mem::zeroed;
use std::thread;
use std::time::{Duration, Instant};

use library::*;
use riser_rdma_core_sys::bindings::*;

const STANDARD: u64 = 0x7f;
const TIMES: u64 =
    (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) as u64;

/// All operations of a reliable connection.
const ALL: u32 = IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | IBV_QP_EX_WITH_LOCAL_INV
    | IBV_QP_EX_WITH_SEND_WITH_INV;

fn cq_attr(wc_flags: u64) -> ibv_cq_init_attr_ex {
    ibv_cq_init_attr_ex {
        cqe: 100,
        wc_flags,
        ..ibv_cq_init_attr_ex::default()
    }
}

/// Returns the device's time.
fn raw_clock(device: &Device) -> u64 {
    // SAFETY: all zeroes is valid, and the pointers are valid.
    unsafe {
        let mut values: ibv_values_ex = zeroed();
        values.comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
        let query = device.table().query_rt_values.unwrap();
        assert_eq!(query(device.context, &raw mut values), 0);
        assert_eq!(values.comp_mask, IBV_VALUES_MASK_RAW_CLOCK);
        values.raw_clock.tv_nsec as u64
    }
}

#[test]
fn extended_poll_reads_completions_in_order() {
    let device = Device::open("riser0");
    let cq = device.create_cq_ex(&mut cq_attr(STANDARD | TIMES));
    assert!(!cq.is_null());
    let pair = Pair::new(device, cq.cast(), ALL);
    let before = raw_clock(&pair.device);
    let mut memory = [0u8; 64];
    let mr = pair.device.register(&mut memory);
    post_recv(pair.b, 7, Some(sge(mr, 0, 64)));
    let qp = pair.builder();
    // SAFETY: the objects are alive, and these are the functions that the header calls.
    unsafe {
        let start_poll = (*cq).start_poll.unwrap();
        let (next_poll, end_poll) = ((*cq).next_poll.unwrap(), (*cq).end_poll.unwrap());
        let mut attr = ibv_poll_cq_attr::default();
        assert_eq!(start_poll(cq, &raw mut attr), libc::ENOENT);
        assert_eq!(next_poll(cq), libc::EINVAL, "outside a batch");

        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_id = 5;
        (*qp).wr_flags = IBV_SEND_SIGNALED;
        (*qp).wr_send_imm.unwrap()(qp, 0x1234_5678u32.to_be());
        (*qp).wr_set_inline_data.unwrap()(qp, c"hello".as_ptr().cast_mut().cast(), 5);
        assert_eq!((*qp).wr_complete.unwrap()(qp), 0);

        // Both completions are in one batch if they are available.
        let start = Instant::now();
        let mut seen = Vec::new();
        while seen.len() < 2 {
            assert!(start.elapsed() < Duration::from_secs(20), "{seen:?}");
            let mut result = start_poll(cq, &raw mut attr);
            if result != 0 {
                assert_eq!(result, libc::ENOENT);
                continue;
            }
            assert_eq!(
                start_poll(cq, &raw mut attr),
                libc::EINVAL,
                "within a batch"
            );
            while result == 0 {
                assert_eq!((*cq).status, IBV_WC_SUCCESS);
                assert_eq!((*cq).read_vendor_err.unwrap()(cq), 0);
                let time = (*cq).read_completion_ts.unwrap()(cq);
                assert!((before..=raw_clock(&pair.device)).contains(&time));
                let wall = (*cq).read_completion_wallclock_ns.unwrap()(cq);
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                let age = now.unwrap().as_nanos().abs_diff(wall.into());
                assert!(age < 20_000_000_000, "{age}");
                let (opcode, number) = (
                    (*cq).read_opcode.unwrap()(cq),
                    (*cq).read_qp_num.unwrap()(cq),
                );
                if opcode == IBV_WC_RECV {
                    assert_eq!((*cq).read_byte_len.unwrap()(cq), 5);
                    assert_eq!((*cq).read_wc_flags.unwrap()(cq), IBV_WC_WITH_IMM);
                    assert_eq!((*cq).read_imm_data.unwrap()(cq), 0x1234_5678u32.to_be());
                }
                assert_eq!((*cq).read_src_qp.unwrap()(cq), 0);
                assert_eq!((*cq).read_slid.unwrap()(cq), 0);
                assert_eq!((*cq).read_sl.unwrap()(cq), 0);
                assert_eq!((*cq).read_dlid_path_bits.unwrap()(cq), 0);
                seen.push(((*cq).wr_id, opcode, number));
                result = next_poll(cq);
            }
            assert_eq!(result, libc::ENOENT);
            end_poll(cq);
        }
        seen.sort_unstable();
        let numbers = ((*pair.a).qp_num, (*pair.b).qp_num);
        assert_eq!(
            seen,
            [(5, IBV_WC_SEND, numbers.0), (7, IBV_WC_RECV, numbers.1)]
        );
        assert_eq!(&memory[..6], b"hello\0");
    }
}

#[test]
fn extended_poll_is_exclusive() {
    let device = Device::open("riser0");
    let cq = device.create_cq_ex(&mut cq_attr(STANDARD));
    let pair = Pair::new(device, cq.cast(), ALL);
    let qp = pair.builder();
    // SAFETY: the objects are alive.
    unsafe {
        for wr_id in 0..2 {
            let mut byte = 0u8;
            post_recv(pair.b, 10 + wr_id, None);
            (*qp).wr_start.unwrap()(qp);
            (*qp).wr_id = wr_id;
            (*qp).wr_flags = 0;
            (*qp).wr_send.unwrap()(qp);
            (*qp).wr_set_inline_data.unwrap()(qp, (&raw mut byte).cast(), 0);
            assert_eq!((*qp).wr_complete.unwrap()(qp), 0);
        }
        let address = cq.expose_provenance();
        let take = move || {
            let cq = std::ptr::with_exposed_provenance_mut::<ibv_cq_ex>(address);
            let start = Instant::now();
            let mut attr = ibv_poll_cq_attr::default();
            while (*cq).start_poll.unwrap()(cq, &raw mut attr) == libc::ENOENT {
                assert!(start.elapsed() < Duration::from_secs(20));
            }
            let first = (*cq).wr_id;
            thread::sleep(Duration::from_millis(50));
            let is_same = first == (*cq).wr_id;
            (*cq).end_poll.unwrap()(cq);
            (first, is_same)
        };
        let other = thread::spawn(take);
        let mut both = [take(), other.join().unwrap()];
        both.sort_unstable();
        assert_eq!(both, [(10, true), (11, true)]);
    }
}

#[test]
fn unsupported_cq_attributes_are_rejected() {
    let device = Device::open("riser0");
    let with = |change: &dyn Fn(&mut ibv_cq_init_attr_ex)| {
        let mut attr = cq_attr(STANDARD);
        change(&mut attr);
        let cq = device.create_cq_ex(&mut attr);
        if cq.is_null() {
            return errno();
        }
        assert_eq!(call!(ibv_destroy_cq(cq.cast() => *mut ibv_cq) -> c_int), 0);
        0
    };
    let flags = |flags| {
        with(&move |attr| {
            attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
            attr.flags = flags;
        })
    };
    assert_eq!(flags(1), 0, "one thread");
    assert_eq!(flags(2), libc::EOPNOTSUPP, "overrun");
    assert_eq!(flags(4), libc::EINVAL);
    assert_eq!(with(&|attr| attr.flags = 2), 0, "flags without their bit");
    for unsupported in [
        IBV_WC_EX_WITH_CVLAN,
        IBV_WC_EX_WITH_FLOW_TAG,
        IBV_WC_EX_WITH_TM_INFO,
        1 << 12,
    ] {
        let result = with(&|attr| attr.wc_flags |= u64::from(unsupported));
        assert_eq!(result, libc::EOPNOTSUPP, "{unsupported:#x}");
    }
    assert_eq!(with(&|attr| attr.comp_mask = 4), libc::EINVAL);
    // SAFETY: the context is open.
    let vectors = unsafe { (*device.context).num_comp_vectors } as u32;
    assert_eq!(with(&|attr| attr.comp_vector = vectors - 1), 0);
    assert_eq!(with(&|attr| attr.comp_vector = vectors), libc::EINVAL);
    assert_eq!(with(&|attr| attr.cqe = 0), libc::EINVAL);
    assert_eq!(with(&|attr| attr.cqe = u32::MAX), libc::EINVAL);
    let no_domain = with(&|attr| attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD);
    assert_eq!(no_domain, libc::EINVAL);
}

#[test]
fn cq_events_can_be_moderated() {
    let device = Device::open("riser0");
    let cq = device.create_cq(10);
    let modify = |mask| {
        let mut attr = ibv_modify_cq_attr {
            attr_mask: mask,
            moderate: ibv_moderate_cq {
                cq_count: 2,
                cq_period: u16::MAX,
            },
        };
        // SAFETY: the pointers are valid.
        unsafe { device.table().modify_cq.unwrap()(cq, &raw mut attr) }
    };
    assert_eq!(modify(1), 0);
    assert_eq!(modify(0), libc::EINVAL);
    assert_eq!(modify(3), libc::EINVAL);
}

#[test]
fn built_requests_are_executed() {
    let device = Device::open("riser0");
    let cq = device.create_cq(100);
    let pair = Pair::new(device, cq, ALL);
    let mut here = [1u64; 16];
    let mut there = [100u64; 16];
    let here_mr = pair.device.register(&mut here);
    let there_mr = pair.device.register(&mut there);
    post_recv(pair.b, 50, Some(sge(there_mr, 120, 8)));
    post_recv(pair.b, 51, None);
    let qp = pair.builder();
    // SAFETY: the objects are alive.
    unsafe {
        let set_sge = (*qp).wr_set_sge.unwrap();
        let set = move |piece: ibv_sge| set_sge(qp, piece.lkey, piece.addr, piece.length);
        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_flags = IBV_SEND_SIGNALED;
        (*qp).wr_id = 1;
        let (key, addr) = remote(there_mr, 0);
        (*qp).wr_rdma_write.unwrap()(qp, key, addr);
        let list = [sge(here_mr, 0, 8), sge(here_mr, 64, 8)];
        (*qp).wr_set_sge_list.unwrap()(qp, 2, list.as_ptr());
        (*qp).wr_id = 2;
        (*qp).wr_rdma_read.unwrap()(qp, key, addr + 16);
        set(sge(here_mr, 16, 8));
        (*qp).wr_id = 3;
        (*qp).wr_atomic_fetch_add.unwrap()(qp, key, addr + 24, 11);
        set(sge(here_mr, 24, 8));
        (*qp).wr_id = 4;
        (*qp).wr_atomic_cmp_swp.unwrap()(qp, key, addr + 24, 111, 222);
        set(sge(here_mr, 32, 8));
        (*qp).wr_id = 5;
        let mut data = [9u64, 8];
        let pieces = data.each_mut().map(|number| ibv_data_buf {
            addr: std::ptr::from_mut(number).cast(),
            length: 8,
        });
        (*qp).wr_rdma_write.unwrap()(qp, key, addr + 64);
        (*qp).wr_set_inline_data_list.unwrap()(qp, 2, pieces.as_ptr());
        // The setter has copied it.
        data.fill(0);
        (*qp).wr_id = 6;
        (*qp).wr_send.unwrap()(qp);
        set(sge(here_mr, 8, 8));
        (*qp).wr_id = 7;
        (*qp).wr_rdma_write_imm.unwrap()(qp, key, addr + 80, 77u32.to_be());
        set(sge(here_mr, 0, 8));
        assert_eq!((*qp).wr_complete.unwrap()(qp), 0);

        let all = completions(cq, 9);
        assert!(all.iter().all(|wc| wc.status == IBV_WC_SUCCESS));
        let of = |qp: *mut ibv_qp| -> Vec<_> {
            let own = all.iter().filter(|wc| wc.qp_num == (*qp).qp_num);
            own.map(|wc| (wc.wr_id, wc.opcode)).collect()
        };
        assert_eq!(
            of(pair.a),
            [
                (1, IBV_WC_RDMA_WRITE),
                (2, IBV_WC_RDMA_READ),
                (3, IBV_WC_FETCH_ADD),
                (4, IBV_WC_COMP_SWAP),
                (5, IBV_WC_RDMA_WRITE),
                (6, IBV_WC_SEND),
                (7, IBV_WC_RDMA_WRITE),
            ]
        );
        let receives = [(50, IBV_WC_RECV), (51, IBV_WC_RECV_RDMA_WITH_IMM)];
        assert_eq!(of(pair.b), receives);
    }
    assert_eq!(here[..6], [1, 1, 100, 100, 111, 1]);
    assert_eq!(there[..4], [1, 1, 100, 222]);
    assert_eq!(there[8..11], [9, 8, 1]);
    assert_eq!(there[15], 1);
}

/// Builds a batch using `build`, and completes it.
fn batch(qp: *mut ibv_qp_ex, build: impl FnOnce()) -> c_int {
    // SAFETY: the queue pair is alive.
    unsafe {
        (*qp).wr_start.unwrap()(qp);
        (*qp).wr_flags = IBV_SEND_SIGNALED;
        build();
        (*qp).wr_complete.unwrap()(qp)
    }
}

/// Builds sends without data.
fn sends(qp: *mut ibv_qp_ex, ids: std::ops::Range<u64>) {
    for wr_id in ids {
        // SAFETY: the queue pair is alive.
        unsafe {
            (*qp).wr_id = wr_id;
            (*qp).wr_send.unwrap()(qp);
        }
    }
}

#[test]
fn batch_is_posted_atomically() {
    let device = Device::open("riser0");
    let cq = device.create_cq(100);
    let pair = Pair::new(device, cq, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_READ);
    let qp = pair.builder();
    let mut memory = [0u8; 8];
    // SAFETY: the queue pair is alive. No receive is posted, so sends stay in the queue, which has
    // 20 entries.
    unsafe {
        let set_sge = (*qp).wr_set_sge.unwrap();
        assert_eq!(batch(qp, || sends(qp, 0..2)), 0);
        // There is no space for the last request. There are more requests than are posted at a
        // time.
        assert_eq!(batch(qp, || sends(qp, 90..109)), libc::ENOMEM);
        assert_eq!(batch(qp, || sends(qp, 90..120)), libc::ENOMEM);
        let inline = (*qp).wr_set_inline_data.unwrap();
        let bytes = memory.as_mut_ptr().cast();
        let mistakes: [(&str, &dyn Fn()); 9] = [
            ("no request", &|| set_sge(qp, 0, 0, 0)),
            ("unknown operation", &|| {
                (*qp).wr_rdma_write.unwrap()(qp, 0, 0);
            }),
            ("data twice", &|| {
                (*qp).wr_send.unwrap()(qp);
                set_sge(qp, 0, 0, 0);
                set_sge(qp, 0, 0, 0);
            }),
            ("inline data of a READ", &|| {
                (*qp).wr_rdma_read.unwrap()(qp, 0, 0);
                inline(qp, bytes, 4);
            }),
            ("too much inline data", &|| {
                (*qp).wr_send.unwrap()(qp);
                inline(qp, bytes, 65);
            }),
            ("a piece of no address", &|| {
                (*qp).wr_send.unwrap()(qp);
                inline(qp, std::ptr::null_mut(), usize::MAX);
            }),
            ("too many pieces", &|| {
                let list = [ibv_sge::default(); 4];
                (*qp).wr_send.unwrap()(qp);
                (*qp).wr_set_sge_list.unwrap()(qp, 4, list.as_ptr());
            }),
            ("a batch within a batch", &|| (*qp).wr_start.unwrap()(qp)),
            ("an address handle", &|| {
                (*qp).wr_send.unwrap()(qp);
                (*qp).wr_set_ud_addr.unwrap()(qp, std::ptr::null_mut(), 1, 1);
            }),
        ];
        for (mistake, build) in mistakes {
            let result = batch(qp, || {
                sends(qp, 80..81);
                if mistake == "no request" {
                    (*qp).wr_abort.unwrap()(qp);
                    (*qp).wr_start.unwrap()(qp);
                }
                build();
                sends(qp, 81..82);
            });
            assert_eq!(result, libc::EINVAL, "{mistake}");
        }
        (*qp).wr_start.unwrap()(qp);
        sends(qp, 70..75);
        (*qp).wr_abort.unwrap()(qp);
        assert_eq!((*qp).wr_complete.unwrap()(qp), libc::EINVAL, "no batch");

        assert_eq!(batch(qp, || sends(qp, 2..20)), 0);
        for _ in 0..20 {
            post_recv(pair.b, 1000, None);
        }
        let all = completions(cq, 40);
        assert!(all.iter().all(|wc| wc.status == IBV_WC_SUCCESS));
        let sent = all.iter().map(|wc| wc.wr_id).filter(|&id| id != 1000);
        assert_eq!(sent.collect::<Vec<_>>(), (0..20).collect::<Vec<_>>());
        assert!(poll(cq).is_empty());
    }
}

#[test]
fn queue_pair_type_limits_operations() {
    let device = Device::open("riser0");
    let cq = device.create_cq(10);
    let create = |qp_type, ops| {
        let qp = device.create_qp_ex(&mut device.qp_attr(cq, qp_type, ops));
        if qp.is_null() { Err(errno()) } else { Ok(qp) }
    };
    for operation in (0..13).map(|bit| 1 << bit) {
        let is_send = operation & (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM) != 0;
        let datagrams = create(IBV_QPT_UD, operation).map(drop);
        let expected = if is_send {
            Ok(())
        } else {
            Err(libc::EOPNOTSUPP)
        };
        assert_eq!(datagrams, expected, "{operation:#x}");
        if operation & ALL != 0 {
            create(IBV_QPT_RC, operation).unwrap();
        }
    }
    for unsupported in [IBV_QP_EX_WITH_TSO, IBV_QP_EX_WITH_ATOMIC_WRITE] {
        let connection = create(IBV_QPT_RC, unsupported).map(drop);
        assert_eq!(connection, Err(libc::EOPNOTSUPP));
    }
    let mut plain = device.qp_attr(cq, IBV_QPT_RC, 0);
    plain.comp_mask = IBV_QP_INIT_ATTR_PD;
    let plain = device.create_qp_ex(&mut plain);
    assert!(!plain.is_null());
    let none = call!(ibv_qp_to_qp_ex(plain => *mut ibv_qp) -> *mut ibv_qp_ex);
    assert!(none.is_null());
}

#[test]
fn built_datagram_is_sent_to_address() {
    let device = Device::open("riser0");
    let cq = device.create_cq(10);
    let create = || {
        let attr = &mut device.qp_attr(cq, IBV_QPT_UD, IBV_QP_EX_WITH_SEND);
        let qp = device.create_qp_ex(attr);
        assert!(!qp.is_null());
        to_rts(qp, device.gid(), 0);
        qp
    };
    let (a, b) = (create(), create());
    let mut memory = [0u8; 64];
    let mr = device.register(&mut memory);
    let mut address = ah_attr(device.gid());
    let ah = call!(ibv_create_ah(device.pd => *mut ibv_pd, &raw mut address => *mut ibv_ah_attr)
        -> *mut ibv_ah);
    assert!(!ah.is_null());
    post_recv(b, 9, Some(sge(mr, 0, 64)));
    let qp = extended(a);
    let text = c"datagram".as_ptr().cast_mut().cast();
    // SAFETY: the objects are alive.
    unsafe {
        let no_address = batch(qp, || {
            sends(qp, 0..1);
            (*qp).wr_set_inline_data.unwrap()(qp, text, 8);
        });
        assert_eq!(no_address, libc::EINVAL);
        let result = batch(qp, || {
            sends(qp, 1..2);
            (*qp).wr_set_ud_addr.unwrap()(qp, ah, (*b).qp_num, 0x1111_1111);
            (*qp).wr_set_inline_data.unwrap()(qp, text, 8);
        });
        assert_eq!(result, 0);
        let mut all = completions(cq, 2);
        all.sort_by_key(|wc| wc.wr_id);
        assert_eq!((all[0].wr_id, all[1].wr_id), (1, 9));
        assert_eq!((all[1].src_qp, all[1].byte_len), ((*a).qp_num, 48));
    }
    assert_eq!(&memory[40..48], b"datagram");
}
