//! All operations, the order of completions, and errors.

use std::time::Duration;

use riser_transport::verbs::{
    Access, AsyncEvent, CqInitAttr, Moderation, Notify, PostReason, QpAttr, QpState, RKey, RecvWr,
    RemoteAddr, SendFlags, SendOp, SendWr, SrqAttr, VerbsError, WcOpcode, WcStatus, WrId,
};

use riser_transport::verbs::{Provider as _, Verbs as _};

use crate::suite::world::{
    End, Side, Wants, World, connect_on, connected, ended, init_attr, objects, pattern,
};

pub(crate) fn ok<W: World>(w: &mut W, side: &Side, opcode: WcOpcode, wr_id: u64) {
    let c = side.completion(w);
    assert_eq!(
        (c.status, c.opcode, c.wr_id),
        (WcStatus::Success, opcode, WrId(wr_id)),
        "{c:?}"
    );
}

/// Checks that a WRITE has completed, and that its bytes have arrived. With iWARP, this is verified
/// by a subsequent READ.
pub(crate) fn written<W: World>(w: &mut W, side: &Side, wr_id: u64) {
    ok(w, side, WcOpcode::Write, wr_id);
    if w.is_iwarp(side.end) {
        let nowhere = RemoteAddr {
            addr: 0,
            rkey: RKey(0),
        };
        side.send(w, 998, SendOp::Read(nowhere), 0, 0);
        ok(w, side, WcOpcode::Read, 998);
    }
}

pub(crate) fn sends_of_every_kind<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let data = pattern(1, 20_000);
    a.memory.write(0, &data);
    for n in 0..4 {
        b.recv(w, n, 100_000 * n as usize, 50_000);
    }
    a.send(w, 10, SendOp::Send, 0, 20_000);
    let imm = (!w.is_iwarp(End::A)).then_some(0xcafe_f00d);
    a.send(w, 11, imm.map_or(SendOp::Send, SendOp::SendImm), 7, 4096);
    a.send(w, 12, SendOp::Send, 0, 0);
    for n in 10..13 {
        ok(w, &a, WcOpcode::Send, n);
    }
    let got = b.completions(w, 3);
    assert!(
        got.iter()
            .all(|c| c.status.is_ok() && c.opcode == WcOpcode::Recv)
    );
    assert_eq!(
        got.iter().map(|c| c.byte_len).collect::<Vec<_>>(),
        [20_000, 4096, 0]
    );
    let number = w.provider(End::B).qp_num(b.qp).unwrap();
    assert!(got.iter().all(|c| c.qp_num == number));
    assert_eq!(
        got.iter().map(|c| c.imm).collect::<Vec<_>>(),
        [None, imm, None]
    );
    assert_eq!(b.bytes(0, 20_000), data);
    assert_eq!(b.bytes(100_000, 4096), data[7..4103]);
    // Use a scatter list on both sides.
    let sges = [a.sge(500, 3), a.sge(100, 5000), a.sge(9, 1)];
    let wr = SendWr::new(13, SendOp::Send, &sges);
    w.provider(End::A).post_send(a.qp, &[wr]).unwrap();
    ok(w, &a, WcOpcode::Send, 13);
    ok(w, &b, WcOpcode::Recv, 3);
    let want = [&data[500..503], &data[100..5100], &data[9..10]].concat();
    assert_eq!(b.bytes(300_000, 5004), want);
}

pub(crate) fn writes_and_reads<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let data = pattern(2, 300_001);
    a.memory.write(0, &data);
    a.send(w, 1, SendOp::Write(b.remote(1000)), 0, 300_001);
    ok(w, &a, WcOpcode::Write, 1);
    // With iWARP, only the response to the READ proves that the WRITE has arrived.
    a.send(w, 2, SendOp::Read(b.remote(1001)), 500_000, 300_000);
    let c = a.completion(w);
    assert_eq!(b.bytes(1000, 300_001), data);
    assert_eq!(
        (c.opcode, c.byte_len, c.status),
        (WcOpcode::Read, 300_000, WcStatus::Success)
    );
    assert_eq!(a.bytes(500_000, 300_000), data[1..]);
    if w.has_immediate_data() {
        b.recv(w, 9, 0, 8);
        a.send(w, 3, SendOp::WriteImm(b.remote(700_000), 77), 5, 10_000);
        ok(w, &a, WcOpcode::Write, 3);
        let c = b.completion(w);
        assert_eq!(
            (c.opcode, c.imm, c.byte_len, c.wr_id),
            (WcOpcode::RecvWriteImm, Some(77), 10_000, WrId(9))
        );
        assert_eq!(b.bytes(700_000, 10_000), data[5..10_005]);
    }
    // An empty WRITE does not check the key.
    let nowhere = RemoteAddr {
        addr: 0,
        rkey: RKey(0),
    };
    a.send(w, 4, SendOp::Write(nowhere), 0, 0);
    ok(w, &a, WcOpcode::Write, 4);
}

pub(crate) fn atomics<W: World>(mut w: W) {
    let w = &mut w;
    if !w.has_immediate_data() {
        return;
    }
    let (a, b) = connected(w);
    // Atomics use the responder's byte order.
    b.memory.write(64, &40u64.to_ne_bytes());
    let remote = b.remote(64);
    a.send(w, 1, SendOp::FetchAdd { remote, add: 2 }, 0, 8);
    ok(w, &a, WcOpcode::FetchAdd, 1);
    assert_eq!(a.bytes(0, 8), 40u64.to_ne_bytes());
    let swap = |compare| SendOp::CmpSwap {
        remote,
        compare,
        swap: 7,
    };
    a.send(w, 2, swap(41), 8, 8);
    a.send(w, 3, swap(42), 16, 8);
    ok(w, &a, WcOpcode::CmpSwap, 2);
    ok(w, &a, WcOpcode::CmpSwap, 3);
    assert_eq!(a.bytes(8, 8), 42u64.to_ne_bytes());
    assert_eq!(a.bytes(16, 8), 42u64.to_ne_bytes());
    assert_eq!(b.bytes(64, 8), 7u64.to_ne_bytes());
}

pub(crate) fn inline_unsignaled_and_fenced<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    for n in 0..3 {
        b.recv(w, n, 1000 * n as usize, 64);
    }
    // This memory is not registered.
    let mut data = *b"inline data";
    let quiet = SendFlags::empty();
    let wr = SendWr::with_inline(1, SendOp::Send, &data).flags(quiet);
    w.provider(End::A).post_send(a.qp, &[wr]).unwrap();
    data.fill(0);
    b.memory.write(5000, b"what is read");
    let into = [a.sge(100, 12)];
    let from = [a.sge(100, 12)];
    let read = SendWr::new(2, SendOp::Read(b.remote(5000)), &into).flags(quiet);
    let send = SendWr::new(3, SendOp::Send, &from).flags(SendFlags::SIGNALED | SendFlags::FENCE);
    w.provider(End::A).post_send(a.qp, &[read, send]).unwrap();
    ok(w, &a, WcOpcode::Send, 3);
    ok(w, &b, WcOpcode::Recv, 0);
    ok(w, &b, WcOpcode::Recv, 1);
    assert_eq!(b.bytes(0, 11), b"inline data");
    assert_eq!(
        b.bytes(1000, 12),
        b"what is read",
        "the fence held the send back"
    );
    assert_eq!(w.provider(End::A).peek_cq(a.cq, 9), Ok(0));
}

pub(crate) fn chain_posts_until_first_bad_request<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    b.recv(w, 1, 0, 64);
    let good = [a.sge(0, 8)];
    let many = [a.sge(0, 1); 5];
    let chain = [
        SendWr::new(1, SendOp::Send, &good),
        SendWr::new(2, SendOp::Send, &many),
        SendWr::new(3, SendOp::Send, &good),
    ];
    let e = w.provider(End::A).post_send(a.qp, &chain).unwrap_err();
    assert_eq!((e.index, e.reason), (1, PostReason::TooManySges));
    ok(w, &a, WcOpcode::Send, 1);
    ok(w, &b, WcOpcode::Recv, 1);
    assert_eq!(w.provider(End::A).peek_cq(a.cq, 9), Ok(0));
    let wr = RecvWr {
        wr_id: WrId(0),
        sges: &[],
    };
    // A kernel's queues may be deeper than requested.
    let is_rxe = w.is_rxe(End::B);
    let all = vec![wr; 65 + if is_rxe { 1000 } else { 0 }];
    let e = w.provider(End::B).post_recv(b.qp, &all).unwrap_err();
    assert_eq!(e.reason, PostReason::QueueFull);
    assert!(if is_rxe { e.index >= 64 } else { e.index == 64 });
}

pub(crate) fn fast_registration_and_remote_invalidation<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let segments = w.provider(End::A).device_attr().max_fast_reg_segments;
    let pool_mr = w
        .provider(End::A)
        .alloc_fast_mr(a.pd, segments.min(4))
        .unwrap();
    // A window has a single segment.
    let parts = match segments {
        0..3 => vec![a.slice(5000, 4229)],
        _ => vec![a.slice(5000, 100), a.slice(100, 33), a.slice(9000, 4096)],
    };
    assert_eq!(w.provider(End::A).map_mr_sg(pool_mr.id, &parts), Ok(4229));
    let key = pool_mr.rkey.next();
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let reg = SendOp::RegMr {
        mr: pool_mr.id,
        key,
        access,
    };
    a.send(w, 1, reg, 0, 0);
    ok(w, &a, WcOpcode::RegMr, 1);
    let base = w.provider(End::A).query_mr(pool_mr.id).unwrap().mr.addr;
    let data = pattern(3, 4229);
    b.memory.write(0, &data);
    let there = RemoteAddr {
        addr: base,
        rkey: key,
    };
    a.recv(w, 5, 20_000, 64);
    b.send(w, 2, SendOp::Write(there), 0, 4229);
    b.send(w, 3, SendOp::SendInv(key), 0, 16);
    ok(w, &b, WcOpcode::Write, 2);
    ok(w, &b, WcOpcode::Send, 3);
    let c = a.completion(w);
    let is_reported = w.provider(End::A).device_attr().reports_invalidation;
    assert_eq!(
        (c.status, c.invalidated, c.wr_id),
        (WcStatus::Success, is_reported.then_some(key), WrId(5))
    );
    let got: Vec<_> = parts
        .iter()
        .flat_map(riser_memory::MemSlice::to_vec)
        .collect();
    assert_eq!(got, data);
    let attr = w.provider(End::A).query_mr(pool_mr.id).unwrap();
    assert_eq!(attr.valid, !is_reported);
    // The key has been invalidated.
    let op = if w.is_iwarp(End::B) {
        // Only requests with a response can be rejected.
        SendOp::Read(there)
    } else {
        SendOp::Write(there)
    };
    b.send(w, 4, op, 0, 8);
    let c = b.completion(w);
    assert_eq!((c.status, c.wr_id), (WcStatus::RemAccessErr, WrId(4)));
}

pub(crate) fn sender_waits_for_receiver<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    a.memory.write(0, b"late");
    a.send(w, 1, SendOp::Send, 0, 4);
    w.pass(std::time::Duration::from_millis(20));
    assert_eq!(w.provider(End::A).peek_cq(a.cq, 1), Ok(0));
    b.recv(w, 2, 0, 64);
    ok(w, &a, WcOpcode::Send, 1);
    ok(w, &b, WcOpcode::Recv, 2);
    assert_eq!(b.bytes(0, 4), b"late");
}

pub(crate) fn not_ready_for_too_long<W: World>(mut w: W) {
    let w = &mut w;
    // Each side specifies the retry count of the other in its message.
    let b_wants = Wants {
        param: riser_transport::verbs::ConnParam {
            rnr_retry_count: 2,
            ..Default::default()
        },
        ..Wants::default()
    };
    let (a, b) = connect_on(w, 5000, &Wants::default(), &b_wants);
    a.send(w, 1, SendOp::Send, 0, 4);
    a.send(w, 2, SendOp::Write(b.remote(0)), 0, 4);
    let c = a.completions(w, 2);
    assert_eq!(c[0].status, WcStatus::RnrRetryExcErr);
    assert_eq!(c[1].status, WcStatus::WrFlushErr);
    let state = w.provider(End::A).query_qp(a.qp).unwrap().state;
    assert_eq!(state, Some(QpState::Error));
}

pub(crate) fn keys_rights_and_ranges<W: World>(mut w: W) {
    type Op = fn(RemoteAddr) -> SendOp;
    let w = &mut w;
    let ops: [(Op, Access); 3] = [
        (SendOp::Write, Access::REMOTE_WRITE),
        (SendOp::Read, Access::REMOTE_READ),
        (
            |remote| SendOp::FetchAdd { remote, add: 1 },
            Access::REMOTE_ATOMIC,
        ),
    ];
    // With iWARP, a WRITE completes before it is rejected.
    let first = usize::from(w.is_iwarp(End::A));
    let last = if w.has_immediate_data() { 3 } else { 2 };
    for (n, (op, right)) in ops.into_iter().enumerate().take(last).skip(first) {
        for case in 0..3 {
            let port = 5000 + (n * 3 + case) as u16;
            let (a, b) = connect_on(w, port, &Wants::default(), &Wants::default());
            let without = (Access::LOCAL_WRITE | Access::REMOTE) - right;
            let other = w
                .provider(End::B)
                .reg_mr(b.pd, &b.memory.whole(), without)
                .unwrap();
            let remote = match case {
                0 => RemoteAddr {
                    rkey: b.mr.rkey.next(),
                    ..b.remote(0)
                },
                1 => b.remote(b.memory.len() - 7 + 7 * usize::from(n == 2)),
                _ => RemoteAddr {
                    rkey: other.rkey,
                    addr: other.addr,
                },
            };
            a.send(w, 1, op(remote), 0, 8);
            let c = a.completion(w);
            assert_eq!(
                c.status,
                WcStatus::RemAccessErr,
                "operation {n} case {case}"
            );
            if w.is_rxe(End::B) {
                // rdma_rxe does not raise an event for this.
                w.until("the error state", |w| {
                    let state = w.provider(End::B).query_qp(b.qp).unwrap().state;
                    (state == Some(QpState::Error)).then_some(())
                });
                continue;
            }
            assert_eq!(b.event(w), AsyncEvent::QpAccessError(b.qp));
            ended(w);
            let state = w.provider(End::B).query_qp(b.qp).unwrap().state;
            assert_eq!(state, Some(QpState::Error));
        }
    }
}

pub(crate) fn bad_local_key_completes_with_error<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let mut bad = a.sge(0, 8);
    bad.lkey.0 ^= 1;
    let bad = [bad];
    let good = [a.sge(0, 8)];
    let wrs = [
        SendWr::new(1, SendOp::Write(b.remote(0)), &good).flags(SendFlags::empty()),
        SendWr::new(2, SendOp::Write(b.remote(0)), &bad).flags(SendFlags::empty()),
        SendWr::new(3, SendOp::Write(b.remote(0)), &good).flags(SendFlags::empty()),
    ];
    w.provider(End::A).post_send(a.qp, &wrs).unwrap();
    if w.is_rxe(End::A) {
        // rdma_rxe also flushes requests that would otherwise have completed before the error.
        let c = a.completions(w, 3);
        assert_eq!([c[0].wr_id.0, c[1].wr_id.0, c[2].wr_id.0], [1, 2, 3]);
        assert!(c.iter().all(|c| !c.status.is_ok()), "{c:?}");
        return;
    }
    let c = a.completions(w, 2);
    assert_eq!((c[0].wr_id, c[0].status), (WrId(2), WcStatus::LocProtErr));
    assert_eq!((c[1].wr_id, c[1].status), (WrId(3), WcStatus::WrFlushErr));
}

pub(crate) fn message_exceeding_receive_fails<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    b.recv(w, 5, 0, 5000);
    b.recv(w, 6, 0, 5000);
    a.send(w, 1, SendOp::Send, 0, 5001);
    let c = a.completion(w);
    // rdma_rxe reports a local error. With iWARP, the SEND has already completed.
    let (refused, local) = match (w.is_rxe(End::B), w.is_iwarp(End::B)) {
        (true, _) => (WcStatus::RemOpErr, WcStatus::LocQpOpErr),
        (false, true) => (WcStatus::Success, WcStatus::LocLenErr),
        (false, false) => (WcStatus::RemInvReqErr, WcStatus::LocLenErr),
    };
    assert_eq!(c.status, refused);
    let c = b.completions(w, 2);
    assert_eq!((c[0].wr_id, c[0].status), (WrId(5), local));
    assert_eq!((c[1].wr_id, c[1].status), (WrId(6), WcStatus::WrFlushErr));
}

pub(crate) fn flushes_in_order<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    for n in 0..10 {
        a.recv(w, 100 + n, 0, 64);
    }
    for n in 0..10 {
        // The peer has no receive, so none of these completes normally.
        a.send(w, n, SendOp::Send, 0, 8);
    }
    let error = QpAttr::to(QpState::Error);
    w.provider(End::A).modify_qp(a.qp, &error).unwrap();
    let c = a.completions(w, 20);
    assert!(c.iter().all(|c| c.status == WcStatus::WrFlushErr));
    let ids = |recv| {
        c.iter()
            .filter(|c| c.opcode.is_recv() == recv)
            .map(|c| c.wr_id.0)
            .collect::<Vec<_>>()
    };
    assert_eq!(ids(false), (0..10).collect::<Vec<_>>());
    assert_eq!(ids(true), (100..110).collect::<Vec<_>>());
    // Requests posted now are flushed immediately. This is used to drain a queue pair.
    a.recv(w, 200, 0, 8);
    a.send(w, 201, SendOp::Send, 0, 8);
    let c = a.completions(w, 2);
    let mut drained: Vec<_> = c.iter().map(|c| c.wr_id.0).collect();
    if w.is_rxe(End::A) {
        // There is no order between the two queues of a queue pair.
        drained.sort_unstable();
    }
    assert_eq!(drained, [200, 201]);
    assert_eq!(w.provider(End::B).peek_cq(b.cq, 1), Ok(0));
}

pub(crate) fn srq_limit_raises_event<W: World>(mut w: W) {
    let w = &mut w;
    let (pd, _, memory, mr) = objects(w, End::B, &Wants::default());
    let attr = SrqAttr {
        max_wr: 16,
        max_sge: 2,
        limit: 0,
    };
    let srq = w.provider(End::B).create_srq(pd, attr).unwrap();
    let shared = Wants {
        srq: Some(srq),
        ..Wants::default()
    };
    let (a1, b1) = connect_on(w, 5000, &Wants::default(), &shared);
    let (a2, b2) = connect_on(w, 5001, &Wants::default(), &shared);
    // Keys of a shared queue are looked up in the domain of the queue pair that consumes the
    // receive.
    let (mr1, mr2) = (b1.mr, b2.mr);
    assert!(mr.rkey != mr1.rkey && mr1.rkey != mr2.rkey);
    drop(memory);
    for n in 0..4u64 {
        let wr = RecvWr {
            wr_id: WrId(n),
            sges: &[],
        };
        w.provider(End::B).post_srq_recv(srq, &[wr]).unwrap();
    }
    let refused = w.provider(End::B).post_recv(b1.qp, &[]);
    assert_eq!(refused.unwrap_err().reason, PostReason::InvalidOpcode);
    w.provider(End::B).modify_srq(srq, None, Some(3)).unwrap();
    for a in [&a1, &a2] {
        a.send(w, 7, SendOp::Send, 0, 0);
        ok(w, a, WcOpcode::Send, 7);
    }
    let (c1, c2) = (b1.completion(w), b2.completion(w));
    assert_eq!(
        (c1.wr_id, c1.qp, c2.wr_id, c2.qp),
        (WrId(0), b1.qp, WrId(1), b2.qp)
    );
    assert_eq!(b1.event(w), AsyncEvent::SrqLimitReached(srq));
    assert_eq!(w.provider(End::B).query_srq(srq).unwrap().limit, 0);
    let busy = w.provider(End::B).destroy_srq(srq);
    assert!(matches!(busy, Err(VerbsError::ResourceBusy(_))));
    let error = QpAttr::to(QpState::Error);
    w.provider(End::B).modify_qp(b1.qp, &error).unwrap();
    assert_eq!(b1.event(w), AsyncEvent::QpLastWqeReached(b1.qp));
    for qp in [b1.qp, b2.qp] {
        w.provider(End::B).destroy_qp(qp).unwrap();
    }
    w.provider(End::B).destroy_srq(srq).unwrap();
}

pub(crate) fn cq_overrun_raises_event<W: World>(mut w: W) {
    let w = &mut w;
    let small = Wants {
        cqe: 3,
        ..Wants::default()
    };
    let (a, b) = connect_on(w, 5000, &small, &Wants::default());
    for n in 0..4 {
        a.send(w, n, SendOp::Write(b.remote(0)), 0, 8);
    }
    assert_eq!(a.event(w), AsyncEvent::CqError(a.cq));
    let mut out = Vec::new();
    let polled = w.provider(End::A).poll_cq(a.cq, 9, &mut out);
    assert_eq!(polled, Err(VerbsError::CqOverrun));
    // With rdma_rxe, the user has to destroy the queue pair.
    if w.is_rxe(End::A) {
        return;
    }
    let state = w.provider(End::A).query_qp(a.qp).unwrap().state;
    assert_eq!(state, Some(QpState::Error));
}

pub(crate) fn notifications_come_when_armed<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    for n in 0..6 {
        b.recv(w, n, 0, 8);
    }
    assert_eq!(
        w.provider(End::B).req_notify_cq(b.cq, Notify::Solicited),
        Ok(false)
    );
    a.send(w, 1, SendOp::Send, 0, 8);
    ok(w, &a, WcOpcode::Send, 1);
    ok(w, &b, WcOpcode::Recv, 0);
    assert_eq!(w.provider(End::B).poll_cq_event(), None);
    let sges = [a.sge(0, 8)];
    let flags = SendFlags::SIGNALED | SendFlags::SOLICITED;
    let wr = SendWr::new(2, SendOp::Send, &sges).flags(flags);
    w.provider(End::A).post_send(a.qp, &[wr]).unwrap();
    let fired = w.until("a notification", |w| w.provider(End::B).poll_cq_event());
    assert_eq!(fired, b.cq);
    let entries = w.provider(End::B).query_cq(b.cq).unwrap().entries;
    for count in [0, entries + 1] {
        let refused = w.provider(End::B).req_notify_cq(b.cq, Notify::Count(count));
        assert!(matches!(refused, Err(VerbsError::InvalidParameter(_))));
    }
    assert_eq!(
        w.provider(End::B).req_notify_cq(b.cq, Notify::Count(2)),
        Ok(true)
    );
    ok(w, &b, WcOpcode::Recv, 1);
    for n in 3..5 {
        a.send(w, n, SendOp::Send, 0, 8);
    }
    let fired = w.until("a notification", |w| w.provider(End::B).poll_cq_event());
    assert_eq!(fired, b.cq);
    let b_cq = b.cq;
    // A host device already fires at the first completion.
    if w.is_rdma_core(End::B) {
        w.until("both", |w| {
            (w.provider(End::B).peek_cq(b_cq, 9) == Ok(2)).then_some(())
        });
    }
    assert_eq!(w.provider(End::B).peek_cq(b_cq, 9), Ok(2));
    w.provider(End::B).resize_cq(b_cq, 2).unwrap();
    assert!(w.provider(End::B).resize_cq(b_cq, 1).is_err());
}

pub(crate) fn events_wait_for_further_completions<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let set = |w: &mut W, count, millis| {
        let period = Duration::from_millis(millis);
        w.provider(End::A)
            .modify_cq(a.cq, Moderation { count, period })
    };
    if w.is_rxe(End::A) {
        assert!(set(w, 3, 1).is_err());
        return;
    }
    let write = |w: &mut W, n: u64| {
        a.send(w, n, SendOp::Write(b.remote(0)), 0, 8);
        ok(w, &a, WcOpcode::Write, n);
    };
    // The period is very long, so the event only waits for the third completion.
    set(w, 3, 1_000_000).unwrap();
    let attr = w.provider(End::A).query_cq(a.cq).unwrap();
    assert_eq!((attr.moderation.count, attr.entries), (3, 256));
    if w.is_rdma_core(End::A) {
        // The library uses 16 bits for the microseconds.
        assert_eq!(attr.moderation.period, Duration::from_micros(0xffff));
        a_library_lets_events_wait(w, &a, &b);
        return;
    }
    for round in 0..2 {
        w.provider(End::A)
            .req_notify_cq(a.cq, Notify::Next)
            .unwrap();
        for n in 0..3 {
            assert_eq!(w.provider(End::A).poll_cq_event(), None, "{round} {n}");
            write(w, n);
        }
        assert_eq!(w.provider(End::A).poll_cq_event(), Some(a.cq));
    }
    // Disabling moderation delivers a pending event.
    w.provider(End::A)
        .req_notify_cq(a.cq, Notify::Next)
        .unwrap();
    write(w, 1);
    assert_eq!(w.provider(End::A).poll_cq_event(), None);
    set(w, 0, 0).unwrap();
    assert_eq!(w.provider(End::A).poll_cq_event(), Some(a.cq));
    // The period is timed by the device.
    set(w, 100, 30).unwrap();
    w.provider(End::A)
        .req_notify_cq(a.cq, Notify::Next)
        .unwrap();
    let before = w.now();
    write(w, 1);
    let deadline = w.provider(End::A).deadline();
    assert!(deadline.is_some_and(|at| at <= w.now() + Duration::from_millis(30)));
    let fired = w.until("a notification", |w| w.provider(End::A).poll_cq_event());
    assert_eq!(fired, a.cq);
    assert!(w.now() - before >= Duration::from_millis(30));
    // Destroying a queue removes its event.
    w.provider(End::A)
        .req_notify_cq(a.cq, Notify::Next)
        .unwrap();
    write(w, 1);
    w.provider(End::A).destroy_qp(a.qp).unwrap();
    w.provider(End::A).destroy_cq(a.cq).unwrap();
    w.pass(Duration::from_millis(40));
    assert_eq!(w.provider(End::A).poll_cq_event(), None);
}

/// The part of this test that does not depend on the timing of a library thread.
fn a_library_lets_events_wait<W: World>(w: &mut W, a: &Side, b: &Side) {
    let set = |w: &mut W, count, millis| {
        let period = Duration::from_millis(millis);
        let p = w.provider(End::A);
        p.modify_cq(a.cq, Moderation { count, period }).unwrap();
        p.req_notify_cq(a.cq, Notify::Next).unwrap();
        let before = w.now();
        a.send(w, 1, SendOp::Write(b.remote(0)), 0, 8);
        let fired = w.until("a notification", |w| w.provider(End::A).poll_cq_event());
        assert_eq!(fired, a.cq);
        assert!(a.completion(w).status.is_ok());
        w.now() - before
    };
    assert!(set(w, 100, 40) >= Duration::from_millis(40));
    set(w, 0, 0);
    let attr = w.provider(End::A).query_cq(a.cq).unwrap();
    assert_eq!(attr.moderation, Moderation::default());
}

pub(crate) fn completions_with_their_times<W: World>(mut w: W) {
    let w = &mut w;
    let p = w.provider(End::A);
    let vectors = p.device_attr().comp_vectors.max(1);
    let timed = CqInitAttr {
        vector: Some(vectors - 1),
        is_timed: true,
        ..CqInitAttr::new(16)
    };
    let beyond = CqInitAttr {
        vector: Some(vectors),
        ..CqInitAttr::new(16)
    };
    let invalid = |r: Result<(), VerbsError>| {
        assert!(matches!(r, Err(VerbsError::InvalidParameter(_))), "{r:?}");
    };
    invalid(p.create_cq_with(&beyond).map(drop));
    let plain = p.create_cq(16).unwrap();
    invalid(p.poll_cq_timed(plain, 1, &mut Vec::new()).map(drop));
    if w.is_rxe(End::A) {
        let refused = w.provider(End::A).create_cq_with(&timed);
        assert!(matches!(refused, Err(VerbsError::Unsupported(_))));
        return;
    }
    let p = w.provider(End::A);
    let cq = p.create_cq_with(&timed).unwrap();
    let attr = p.query_cq(cq).unwrap();
    assert_eq!((attr.vector, attr.is_timed), (vectors - 1, true));
    let pd = p.alloc_pd().unwrap();
    let qp = p.create_qp(&init_attr(pd, cq, &Wants::default())).unwrap();
    let init = QpAttr {
        pkey_index: Some(0),
        port: Some(1),
        access: Some(Access::empty()),
        ..QpAttr::to(QpState::Init)
    };
    p.modify_qp(qp, &init).unwrap();
    p.modify_qp(qp, &QpAttr::to(QpState::Error)).unwrap();
    let receive = |w: &mut W, n: u64| {
        let wr = RecvWr {
            wr_id: WrId(n),
            sges: &[],
        };
        // In ERROR, it is flushed immediately.
        w.provider(End::A).post_recv(qp, &[wr]).unwrap();
    };
    receive(w, 1);
    // Wait longer than the expected minimum, because an idle device may use an outdated time.
    w.pass(Duration::from_millis(20));
    receive(w, 2);
    // The queue can grow and shrink with pending entries.
    w.provider(End::A).resize_cq(cq, 2).unwrap();
    assert!(w.provider(End::A).resize_cq(cq, 1).is_err());
    w.provider(End::A).resize_cq(cq, 64).unwrap();
    let mut got = Vec::new();
    assert_eq!(w.provider(End::A).poll_cq_timed(cq, 9, &mut got), Ok(2));
    assert_eq!(got[0].completion.wr_id, WrId(1));
    assert_eq!(got[0].completion.status, WcStatus::WrFlushErr);
    let apart = Duration::from_nanos(got[1].device_time - got[0].device_time);
    // A library's device reads the clock in its thread.
    let is_library = w.is_rdma_core(End::A);
    assert!(is_library || apart >= Duration::from_millis(4), "{apart:?}");
    assert_eq!(got[1].wall_time - got[0].wall_time, apart);
    receive(w, 3);
    let mut out = Vec::new();
    assert_eq!(w.provider(End::A).poll_cq(cq, 9, &mut out), Ok(1));
}

pub(crate) fn send_queue_drains<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    a.send(w, 1, SendOp::Write(b.remote(0)), 0, 100_000);
    w.step();
    let drain = QpAttr {
        en_sqd_async_notify: Some(true),
        ..QpAttr::to(QpState::Sqd)
    };
    w.provider(End::A).modify_qp(a.qp, &drain).unwrap();
    a.send(w, 2, SendOp::Write(b.remote(0)), 0, 8);
    assert_eq!(a.event(w), AsyncEvent::SqDrained(a.qp));
    let before = w.provider(End::A).peek_cq(a.cq, 9).unwrap();
    assert!(before <= 1, "what had not begun waits");
    let attr = w.provider(End::A).query_qp(a.qp).unwrap();
    assert_eq!(
        (attr.state, attr.sq_draining),
        (Some(QpState::Sqd), Some(false))
    );
    let changed = QpAttr {
        timeout: Some(15),
        retry_cnt: Some(5),
        rnr_retry: Some(4),
        max_rd_atomic: Some(2),
        max_dest_rd_atomic: Some(3),
        min_rnr_timer: Some(9),
        ..QpAttr::to(QpState::Sqd)
    };
    w.provider(End::A).modify_qp(a.qp, &changed).unwrap();
    let attr = w.provider(End::A).query_qp(a.qp).unwrap();
    assert_eq!(
        (attr.timeout, attr.retry_cnt, attr.rnr_retry),
        (changed.timeout, changed.retry_cnt, changed.rnr_retry)
    );
    assert_eq!(
        (attr.max_rd_atomic, attr.min_rnr_timer),
        (changed.max_rd_atomic, changed.min_rnr_timer)
    );
    // rdma_rxe drains the queue again, and can't resume it before this is complete.
    w.until("a drained send queue", |w| {
        let attr = w.provider(End::A).query_qp(a.qp).unwrap();
        (attr.sq_draining == Some(false)).then_some(())
    });
    w.provider(End::A)
        .modify_qp(a.qp, &QpAttr::to(QpState::Rts))
        .unwrap();
    let mut waiting = 2;
    if w.is_rxe(End::A) {
        // rdma_rxe only resumes when a request is posted.
        a.send(w, 3, SendOp::Write(b.remote(0)), 0, 8);
        waiting = 3;
    }
    let c = a.completions(w, waiting);
    assert!(c.iter().all(|c| c.status.is_ok()));
}

pub(crate) fn long_messages<W: World>(mut w: W) {
    const LEN: usize = 64 << 20;
    let w = &mut w;
    let wants = Wants {
        region: LEN,
        ..Wants::default()
    };
    let (a, b) = connect_on(w, 5000, &wants, &wants);
    let data = pattern(5, LEN);
    a.memory.write(0, &data);
    a.send(w, 1, SendOp::Write(b.remote(0)), 0, LEN);
    written(w, &a, 1);
    assert!(b.bytes(0, LEN) == data, "64 MiB written");
    a.memory.fill(0, LEN, 0);
    a.send(w, 2, SendOp::Read(b.remote(0)), 0, LEN);
    ok(w, &a, WcOpcode::Read, 2);
    assert!(a.bytes(0, LEN) == data, "64 MiB read");
    b.memory.fill(0, LEN, 0);
    b.recv(w, 3, 0, LEN);
    a.send(w, 3, SendOp::Send, 0, LEN);
    ok(w, &a, WcOpcode::Send, 3);
    ok(w, &b, WcOpcode::Recv, 3);
    assert!(b.bytes(0, LEN) == data, "64 MiB sent");
}

/// Tests operations without data in both directions.
pub(crate) fn empty_messages<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    for (from, to) in [(&a, &b), (&b, &a)] {
        to.recv(w, 3, 0, 8);
        from.send(w, 1, SendOp::Write(to.remote(0)), 0, 0);
        from.send(w, 2, SendOp::Read(to.remote(0)), 0, 0);
        let imm = (!w.is_iwarp(from.end)).then_some(5);
        from.send(w, 3, imm.map_or(SendOp::Send, SendOp::SendImm), 0, 0);
        ok(w, from, WcOpcode::Write, 1);
        ok(w, from, WcOpcode::Read, 2);
        ok(w, from, WcOpcode::Send, 3);
        let c = to.completion(w);
        assert_eq!((c.status, c.byte_len, c.imm), (WcStatus::Success, 0, imm));
    }
}

/// Both sides write, read and send concurrently; all bytes are checked. No operation is empty,
/// because `rdma_rxe` (6.12) drops a retransmitted empty READ if the previous request used a higher
/// address.
pub(crate) fn mixed_traffic<W: World>(mut w: W) {
    const SLOT: usize = 48_000;
    const ROUNDS: u64 = 60;
    let w = &mut w;
    let (a, b) = connected(w);
    let sides = [&a, &b];
    for (i, side) in sides.into_iter().enumerate() {
        // Slots 0 to 7 are sources, 8 to 11 receives, 12 to 15 READ targets; the peer writes to
        // slots from 16.
        for slot in 0..8 {
            let data = pattern((i * 100 + slot) as u64, SLOT);
            side.memory.write(slot * SLOT, &data);
        }
        for n in 0..4 {
            side.recv(w, n, (8 + n as usize) * SLOT, SLOT);
        }
    }
    let mut posted = [0u64; 2];
    let mut completed = [0u64; 2];
    let mut received = [0u64; 2];
    let imm = (!w.is_iwarp(End::A)).then_some(());
    // siw completes a SEND before previously posted READs.
    let last = match w.has_immediate_data() {
        true => SendFlags::SIGNALED,
        false => SendFlags::SIGNALED | SendFlags::FENCE,
    };
    let len = |n: u64| 1 + (n * 7919 % (SLOT as u64 - 1)) as usize;
    let mut out = Vec::new();
    while completed != [ROUNDS; 2] {
        for i in 0..2 {
            let (me, other) = (sides[i], sides[1 - i]);
            // Run one round at a time, so that each slot can be checked after its round. With
            // iWARP, a SEND completes before the other side has received it, so wait for its check.
            let is_over = posted[i] == completed[i] && posted[i] == received[1 - i];
            if is_over && posted[i] < ROUNDS {
                let n = posted[i];
                let source = (n % 8) as usize * SLOT;
                let write = SendOp::Write(other.remote(16 * SLOT));
                let chain = [
                    (write, me.sge(source, len(n))),
                    (
                        SendOp::Read(other.remote(source)),
                        me.sge(12 * SLOT, len(n)),
                    ),
                    (
                        imm.map_or(SendOp::Send, |()| SendOp::SendImm(n as u32)),
                        me.sge(source, len(n)),
                    ),
                ];
                for (op, sge) in chain {
                    let sges = [sge];
                    let flags = match op {
                        SendOp::SendImm(_) | SendOp::Send => last,
                        _ => SendFlags::empty(),
                    };
                    let wr = SendWr::new(n, op, &sges).flags(flags);
                    w.provider(me.end).post_send(me.qp, &[wr]).unwrap();
                }
                posted[i] += 1;
            }
            out.clear();
            w.provider(me.end).poll_cq(me.cq, 16, &mut out).unwrap();
            for c in &out {
                assert!(c.status.is_ok(), "{c:?}");
                if c.opcode.is_recv() {
                    let n = received[i];
                    received[i] += 1;
                    assert_eq!(c.imm, imm.map(|()| n as u32));
                    assert_eq!(c.byte_len as usize, len(n));
                    let want = pattern((1 - i) as u64 * 100 + n % 8, SLOT);
                    let slot = 8 + c.wr_id.0 as usize;
                    assert!(me.bytes(slot * SLOT, len(n)) == want[..len(n)]);
                    assert!(me.bytes(16 * SLOT, len(n)) == want[..len(n)]);
                    me.recv(w, c.wr_id.0, slot * SLOT, SLOT);
                } else {
                    let n = c.wr_id.0;
                    let want = pattern((1 - i) as u64 * 100 + n % 8, SLOT);
                    assert!(me.bytes(12 * SLOT, len(n)) == want[..len(n)]);
                    completed[i] += 1;
                }
            }
        }
        w.step();
    }
}

/// Uses many connections at the same time, each with a READ and a WRITE always in flight.
pub(crate) fn many_connections<W: World>(mut w: W) {
    const SESSIONS: usize = 64;
    const ROUNDS: usize = 20;
    const LEN: usize = 60_000;
    let w = &mut w;
    let wants = Wants {
        region: 4 * LEN,
        cqe: 16,
        ..Wants::default()
    };
    let mut sessions = Vec::new();
    for n in 0..SESSIONS {
        let (a, b) = connect_on(w, 6000 + n as u16, &wants, &wants);
        a.memory.write(0, &pattern(n as u64, LEN));
        b.memory.write(0, &pattern(n as u64 + 1000, LEN));
        sessions.push((a, b, 0, 0));
    }
    let mut out = Vec::new();
    while sessions.iter().any(|s| s.3 < 2 * ROUNDS) {
        for (a, b, posted, done) in &mut sessions {
            if posted == done && *posted < 2 * ROUNDS {
                a.send(w, 1, SendOp::Write(b.remote(2 * LEN)), 0, LEN);
                a.send(w, 2, SendOp::Read(b.remote(0)), 2 * LEN, LEN);
                *posted += 2;
            }
            out.clear();
            w.provider(End::A).poll_cq(a.cq, 16, &mut out).unwrap();
            for c in &out {
                assert!(c.status.is_ok(), "{c:?}");
                *done += 1;
            }
        }
        w.step();
    }
    for (n, (a, b, ..)) in sessions.iter().enumerate() {
        assert!(b.bytes(2 * LEN, LEN) == pattern(n as u64, LEN));
        assert!(a.bytes(2 * LEN, LEN) == pattern(n as u64 + 1000, LEN));
    }
}
