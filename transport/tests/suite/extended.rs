//! Extended reliable connections (XRC), which are established manually except for one.

use riser_memory::Memory;
use riser_transport::verbs::{
    Access, AhAttr, AsyncEvent, CmEventKind, Completion, ConnParam, CqId, Handle, Mr, Mtu, PdId,
    PostReason, QpAttr, QpCap, QpId, QpInitAttr, QpState, QpType, RecvWr, RemoteAddr, SendOp,
    SendWr, SrqAttr, SrqId, VerbsError, WcOpcode, WcStatus, WrId, XrcdId,
};

use riser_transport::verbs::{RdmaCm as _, Verbs as _};

use crate::suite::world::{
    End, Side, Wants, World, cm_event, init_attr, listen_for, objects, pattern, resolve_for,
};

/// A shared receive queue at B, with a separate completion queue and memory.
struct Queue {
    srq: SrqId,
    number: u32,
    cq: CqId,
    memory: Memory,
    mr: Mr,
}

impl Queue {
    fn new<W: World>(w: &mut W, xrcd: XrcdId) -> Self {
        let (pd, cq, memory, mr) = objects(w, End::B, &Wants::default());
        let attr = SrqAttr {
            max_wr: 16,
            max_sge: 2,
            limit: 0,
        };
        let p = w.provider(End::B);
        let srq = p.create_xrc_srq(pd, xrcd, cq, attr).unwrap();
        let number = p.srq_num(srq).unwrap();
        Self {
            srq,
            number,
            cq,
            memory,
            mr,
        }
    }

    fn recv<W: World>(&self, w: &mut W, wr_id: u64, offset: usize, length: usize) {
        let sges = [self.mr.sge(offset, length)];
        let wr_id = WrId(wr_id);
        let wr = RecvWr { wr_id, sges: &sges };
        w.provider(End::B).post_srq_recv(self.srq, &[wr]).unwrap();
    }

    fn completion<W: World>(&self, w: &mut W) -> Completion {
        let mut out = Vec::new();
        w.until("a completion", |w| {
            w.provider(End::B).poll_cq(self.cq, 1, &mut out).unwrap();
            out.pop()
        })
    }

    fn bytes(&self, offset: usize, length: usize) -> Vec<u8> {
        self.memory.slice(offset..offset + length).unwrap().to_vec()
    }

    fn remote(&self, offset: usize) -> RemoteAddr {
        self.mr.remote(offset)
    }
}

/// Opens an XRC domain at B; returns `None` if either device does not support it.
fn domain<W: World>(w: &mut W) -> Option<XrcdId> {
    for end in [End::A, End::B] {
        if w.is_rxe(end) {
            let refused = w.provider(end).open_xrcd();
            assert!(matches!(refused, Err(VerbsError::Unsupported(_))));
            return None;
        }
    }
    Some(w.provider(End::B).open_xrcd().unwrap())
}

/// Connects A to a domain of B; returns A's side and the queue pair at B.
fn connect<W: World>(w: &mut W, xrcd: XrcdId) -> (Side, QpId) {
    let wants = Wants::default();
    let (pd, cq, memory, mr) = objects(w, End::A, &wants);
    let init = QpInitAttr {
        qp_type: QpType::XrcIni,
        ..init_attr(pd, cq, &wants)
    };
    let qp = w.provider(End::A).create_qp(&init).unwrap();
    let target = QpInitAttr::xrc_target(xrcd);
    let target = w.provider(End::B).create_qp(&target).unwrap();
    bring_up(w, (End::A, qp), (End::B, target), [700, 900]);
    bring_up(w, (End::B, target), (End::A, qp), [900, 700]);
    let side = Side {
        end: End::A,
        pd,
        cq,
        memory,
        mr,
        qp,
        id: Handle::new(u32::MAX, 0).into(),
    };
    (side, target)
}

/// Moves an end to RTS; `psn` contains the initial PSNs of its own packets and its peer's.
fn bring_up<W: World>(w: &mut W, own: (End, QpId), peer: (End, QpId), psn: [u32; 2]) {
    let is_target = own.0 == End::B;
    let dest = w.provider(peer.0).qp_num(peer.1).unwrap();
    let dgid = w.addr(peer.0).into();
    let p = w.provider(own.0);
    let mtu = p.query_port(1).unwrap().active_mtu.min(Mtu::Mtu1024);
    let init = QpAttr {
        pkey_index: Some(0),
        port: Some(1),
        access: Some(Access::REMOTE),
        ..QpAttr::to(QpState::Init)
    };
    let rtr = QpAttr {
        ah: Some(AhAttr {
            dgid,
            sgid_index: 0,
            flow_label: 0,
            hop_limit: 64,
            traffic_class: 0,
            port: 1,
        }),
        path_mtu: Some(mtu),
        dest_qp: Some(dest),
        rq_psn: Some(psn[1]),
        max_dest_rd_atomic: is_target.then_some(4),
        min_rnr_timer: is_target.then_some(1),
        ..QpAttr::to(QpState::Rtr)
    };
    let rts = QpAttr {
        sq_psn: Some(psn[0]),
        timeout: Some(14),
        max_rd_atomic: (!is_target).then_some(4),
        retry_cnt: (!is_target).then_some(7),
        rnr_retry: (!is_target).then_some(7),
        ..QpAttr::to(QpState::Rts)
    };
    for step in [init, rtr, rts] {
        p.modify_qp(own.1, &step).unwrap();
    }
}

fn send<W: World>(w: &mut W, a: &Side, srqn: u32, op: SendOp, at: (usize, usize)) {
    let sges = [a.sge(at.0, at.1)];
    let wr = SendWr {
        remote_srqn: Some(srqn),
        ..SendWr::new(1, op, &sges)
    };
    w.provider(End::A).post_send(a.qp, &[wr]).unwrap();
}

pub(crate) fn xrc_messages_select_their_srq<W: World>(mut w: W) {
    let w = &mut w;
    let Some(xrcd) = domain(w) else { return };
    let queues = [Queue::new(w, xrcd), Queue::new(w, xrcd)];
    let (a, target) = connect(w, xrcd);
    let qp_num = w.provider(End::B).qp_num(target).unwrap();
    for n in 0..6u32 {
        let queue = &queues[n as usize % 2];
        let data = pattern(n.into(), 5000);
        a.memory.write(0, &data);
        // The first request finds no receive yet.
        if n > 0 {
            queue.recv(w, n.into(), 100_000, 5000);
        }
        send(w, &a, queue.number, SendOp::SendImm(n), (0, 5000));
        if n == 0 {
            w.pass(std::time::Duration::from_millis(2));
            queue.recv(w, n.into(), 100_000, 5000);
        }
        let c = queue.completion(w);
        assert_eq!((c.status, c.wr_id), (WcStatus::Success, WrId(n.into())));
        assert_eq!((c.imm, c.byte_len), (Some(n), 5000));
        assert_eq!((c.qp, c.qp_num), (target, qp_num));
        assert!(queue.bytes(100_000, 5000) == data);
        assert!(a.completion(w).status.is_ok());
    }
    // Send a train of messages to different queues.
    for n in 0..8u64 {
        queues[n as usize % 2].recv(w, n, 1000 * n as usize, 64);
    }
    for n in 0..8u32 {
        let number = queues[n as usize % 2].number;
        let op = SendOp::WriteImm(queues[n as usize % 2].remote(200_000), n);
        send(w, &a, number, op, (0, 64));
    }
    for n in 0..8u32 {
        let c = queues[n as usize % 2].completion(w);
        assert_eq!((c.opcode, c.imm), (WcOpcode::RecvWriteImm, Some(n)));
        assert_eq!(c.wr_id, WrId(n.into()));
    }
    let c = a.completions(w, 8);
    assert!(c.iter().all(|c| c.status.is_ok()));
}

pub(crate) fn xrc_reads_writes_and_atomics<W: World>(mut w: W) {
    let w = &mut w;
    let Some(xrcd) = domain(w) else { return };
    let queues = [Queue::new(w, xrcd), Queue::new(w, xrcd)];
    let (a, target) = connect(w, xrcd);
    let data = pattern(9, 40_000);
    a.memory.write(0, &data);
    for queue in &queues {
        send(
            w,
            &a,
            queue.number,
            SendOp::Write(queue.remote(7)),
            (0, 40_000),
        );
        let read = SendOp::Read(queue.remote(7));
        send(w, &a, queue.number, read, (100_000, 40_000));
        queue.memory.write(80_000, &40u64.to_ne_bytes());
        let remote = queue.remote(80_000);
        let add = SendOp::FetchAdd { remote, add: 2 };
        send(w, &a, queue.number, add, (200_000, 8));
        let c = a.completions(w, 3);
        assert!(c.iter().all(|c| c.status.is_ok()), "{c:?}");
        assert!(queue.bytes(7, 40_000) == data);
        assert!(a.bytes(100_000, 40_000) == data);
        assert_eq!(a.bytes(200_000, 8), 40u64.to_ne_bytes());
        assert_eq!(queue.bytes(80_000, 8), 42u64.to_ne_bytes());
        a.memory.fill(100_000, 40_000, 0);
    }
    // The key belongs to a different protection domain than the queue.
    let wrong = SendOp::Write(queues[1].remote(0));
    send(w, &a, queues[0].number, wrong, (0, 8));
    assert_eq!(a.completion(w).status, WcStatus::RemAccessErr);
    let event = w.until("an event", |w| w.provider(End::B).poll_async_event());
    assert_eq!(event, AsyncEvent::QpAccessError(target));
}

pub(crate) fn xrc_requests_to_wrong_srq_fail<W: World>(mut w: W) {
    let w = &mut w;
    let Some(xrcd) = domain(w) else { return };
    let good = Queue::new(w, xrcd);
    let other = w.provider(End::B).open_xrcd().unwrap();
    let foreign = Queue::new(w, other);
    for queue in [&good, &foreign] {
        queue.recv(w, 1, 0, 64);
    }
    for number in [foreign.number, good.number ^ 1, 0] {
        let (a, target) = connect(w, xrcd);
        send(w, &a, number, SendOp::Send, (0, 64));
        assert_eq!(a.completion(w).status, WcStatus::RemInvReqErr);
        let mut seen = Vec::new();
        w.until("an event", |w| {
            seen.extend(w.provider(End::B).poll_async_event());
            seen.contains(&AsyncEvent::QpReqError(target)).then_some(())
        });
        let state = w.provider(End::B).query_qp(target).unwrap().state;
        assert_eq!(state, Some(QpState::Error));
        // Destroying a connection does not flush a shared queue.
        w.provider(End::B).destroy_qp(target).unwrap();
        w.provider(End::A).destroy_qp(a.qp).unwrap();
    }
    let (a, _) = connect(w, xrcd);
    send(w, &a, good.number, SendOp::Send, (0, 64));
    assert_eq!(good.completion(w).wr_id, WrId(1));
    assert_eq!(w.provider(End::B).peek_cq(foreign.cq, 1), Ok(0));
    // The queue has been destroyed.
    w.provider(End::B).destroy_srq(good.srq).unwrap();
    assert!(a.completion(w).status.is_ok());
    send(w, &a, good.number, SendOp::Send, (0, 64));
    assert_eq!(a.completion(w).status, WcStatus::RemInvReqErr);
}

pub(crate) fn xrc_connections_share_srq<W: World>(mut w: W) {
    let w = &mut w;
    let Some(xrcd) = domain(w) else { return };
    let queue = Queue::new(w, xrcd);
    let ends = [connect(w, xrcd), connect(w, xrcd), connect(w, xrcd)];
    for n in 0..12u64 {
        queue.recv(w, n, 10_000 * n as usize, 10_000);
    }
    for n in 0..12u32 {
        let (a, _) = &ends[n as usize % 3];
        a.memory
            .write(10_000 * n as usize, &pattern(n.into(), 10_000));
        let at = (10_000 * n as usize, 10_000);
        send(w, a, queue.number, SendOp::SendImm(n), at);
    }
    let mut seen = Vec::new();
    for _ in 0..12 {
        let c = queue.completion(w);
        let n = c.imm.unwrap();
        assert_eq!(
            (c.status, c.qp),
            (WcStatus::Success, ends[n as usize % 3].1)
        );
        let at = 10_000 * c.wr_id.0 as usize;
        assert!(queue.bytes(at, 10_000) == pattern(n.into(), 10_000));
        seen.push(n);
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..12).collect::<Vec<_>>());
}

pub(crate) fn objects_of_xrc_domains<W: World>(mut w: W) {
    let w = &mut w;
    let Some(xrcd) = domain(w) else { return };
    let queue = Queue::new(w, xrcd);
    let (a, target) = connect(w, xrcd);
    let busy = |r: Result<(), VerbsError>| assert!(matches!(r, Err(VerbsError::ResourceBusy(_))));
    let p = w.provider(End::B);
    busy(p.close_xrcd(xrcd));
    busy(p.destroy_cq(queue.cq));
    let nothing = RecvWr {
        wr_id: WrId(1),
        sges: &[],
    };
    let refused = p.post_recv(target, &[nothing]).unwrap_err();
    assert_eq!(refused.reason, PostReason::InvalidOpcode);
    let wr = SendWr {
        remote_srqn: Some(1),
        ..SendWr::new(1, SendOp::Send, &[])
    };
    let refused = p.post_send(target, &[wr]).unwrap_err();
    assert_eq!(refused.reason, PostReason::InvalidOpcode);
    // Only a target has a domain, and it has no other objects.
    let cap = QpCap::new(1, 1);
    let none: PdId = Handle::new(0, 0).into();
    let (pd, cq, _memory, _) = objects(w, End::B, &Wants::default());
    let p = w.provider(End::B);
    let rc = QpInitAttr::new(pd, cq, QpType::Rc, cap);
    let wrong = [
        QpInitAttr {
            xrcd: None,
            ..QpInitAttr::xrc_target(xrcd)
        },
        QpInitAttr {
            xrcd: Some(xrcd),
            ..rc
        },
        QpInitAttr {
            srq: Some(queue.srq),
            ..rc
        },
        QpInitAttr { pd: none, ..rc },
    ];
    for init in wrong {
        assert!(p.create_qp(&init).is_err(), "{init:?}");
    }
    let attr = SrqAttr {
        max_wr: 1,
        max_sge: 1,
        limit: 0,
    };
    let plain = p.create_srq(pd, attr).unwrap();
    assert!(p.srq_num(plain).is_err());
    // The initiator must name a queue in its requests, and cannot post receives.
    let p = w.provider(End::A);
    let unnamed = SendWr::new(2, SendOp::Send, &[]);
    let refused = p.post_send(a.qp, &[wr, unnamed]).unwrap_err();
    assert_eq!(refused.index, 1);
    assert!(matches!(refused.reason, PostReason::InvalidRequest(_)));
    let refused = p.post_recv(a.qp, &[nothing]).unwrap_err();
    assert_eq!(refused.reason, PostReason::InvalidOpcode);
    p.destroy_qp(a.qp).unwrap();
    let p = w.provider(End::B);
    p.destroy_qp(target).unwrap();
    busy(p.close_xrcd(xrcd));
    p.destroy_srq(queue.srq).unwrap();
    p.destroy_cq(queue.cq).unwrap();
    p.close_xrcd(xrcd).unwrap();
    let gone = p.close_xrcd(xrcd);
    assert!(matches!(gone, Err(VerbsError::InvalidHandle(_))));
}

pub(crate) fn xrc_connects_through_cm<W: World>(mut w: W) {
    let w = &mut w;
    let Some(xrcd) = domain(w) else { return };
    let _listener = listen_for(w, QpType::XrcTgt);
    let queue = Queue::new(w, xrcd);
    let id = resolve_for(w, QpType::XrcIni);
    let wants = Wants::default();
    let (pd, cq, memory, mr) = objects(w, End::A, &wants);
    let init = QpInitAttr {
        qp_type: QpType::XrcIni,
        ..init_attr(pd, cq, &wants)
    };
    let qp = w.provider(End::A).create_cm_qp(id, &init).unwrap();
    let param = ConnParam {
        responder_resources: 2,
        initiator_depth: 3,
        retry_count: 5,
        rnr_retry_count: 4,
        ..ConnParam::default()
    };
    w.provider(End::A).connect(id, &param).unwrap();
    let request = cm_event(w, End::B).id;
    let target = QpInitAttr::xrc_target(xrcd);
    let target = w.provider(End::B).create_cm_qp(request, &target).unwrap();
    // The reply contains the queue number.
    let response = ConnParam {
        private_data: queue.number.to_be_bytes().to_vec(),
        rnr_retry_count: 6,
        ..param.clone()
    };
    w.provider(End::B).accept(request, &response).unwrap();
    let CmEventKind::Established { param: said } = cm_event(w, End::A).kind else {
        panic!("not established");
    };
    assert_eq!(said.qp_num, w.provider(End::B).qp_num(target).unwrap());
    let number = said.private_data.first_chunk().unwrap();
    let number = u32::from_be_bytes(*number);
    let kind = cm_event(w, End::B).kind;
    assert!(matches!(kind, CmEventKind::Established { .. }), "{kind:?}");
    // Each end only has the attributes of its type.
    let own = w.provider(End::A).query_qp(qp).unwrap();
    assert_eq!((own.max_rd_atomic, own.max_dest_rd_atomic), (Some(2), None));
    assert_eq!((own.retry_cnt, own.rnr_retry), (Some(5), Some(6)));
    let peer = w.provider(End::B).query_qp(target).unwrap();
    assert_eq!(
        (peer.max_rd_atomic, peer.max_dest_rd_atomic),
        (None, Some(2))
    );
    assert_eq!((peer.retry_cnt, own.rq_psn), (None, peer.sq_psn));
    assert_eq!(own.sq_psn, peer.rq_psn);
    let a = Side {
        end: End::A,
        pd,
        cq,
        memory,
        mr,
        qp,
        id,
    };
    queue.recv(w, 7, 0, 5000);
    let data = pattern(3, 5000);
    a.memory.write(0, &data);
    send(w, &a, number, SendOp::Send, (0, 5000));
    let c = queue.completion(w);
    assert_eq!((c.status, c.wr_id), (WcStatus::Success, WrId(7)));
    assert!(queue.bytes(0, 5000) == data);
    assert!(a.completion(w).status.is_ok());
    w.provider(End::A).disconnect(id).unwrap();
    for end in [End::A, End::B] {
        assert_eq!(cm_event(w, end).kind, CmEventKind::Disconnected);
    }
    let state = w.provider(End::B).query_qp(target).unwrap().state;
    assert_eq!(state, Some(QpState::Error));
}
