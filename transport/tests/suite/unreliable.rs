//! Unreliable connections, which are established manually except for one.

use std::time::Duration;

use riser_transport::verbs::{
    Access, AhAttr, AsyncEvent, CmEventKind, CmId, ConnParam, Handle, Mtu, PostReason, QpAttr,
    QpInitAttr, QpState, QpType, RKey, RecvWr, RemoteAddr, SendOp, SendWr, SrqAttr, VerbsError,
    WcOpcode, WcStatus, WrId,
};

use riser_transport::verbs::{RdmaCm as _, Verbs as _};

use crate::suite::world::{
    End, Side, Wants, World, cm_event, init_attr, listen_for, objects, pattern, resolve_for,
};

/// Initial PSN of each end.
const PSN: [u32; 2] = [0x00ff_fff0, 77];

/// Creates a queue pair in RESET, with its objects.
fn side<W: World>(w: &mut W, end: End, wants: &Wants) -> Side {
    let (pd, cq, memory, mr) = objects(w, end, wants);
    let init = QpInitAttr {
        qp_type: QpType::Uc,
        ..init_attr(pd, cq, wants)
    };
    let qp = w.provider(end).create_qp(&init).unwrap();
    Side {
        end,
        pd,
        cq,
        memory,
        mr,
        qp,
        // There is no identifier.
        id: CmId(Handle::new(u32::MAX, 0)),
    }
}

/// Moves a queue pair to RTS; `psn` contains the initial PSNs of its own packets and its peer's.
fn bring_up<W: World>(w: &mut W, side: &Side, peer: &Side, psn: [u32; 2]) {
    let dest = w.provider(peer.end).qp_num(peer.qp).unwrap();
    let dgid = w.addr(peer.end).into();
    // A kernel adds a link-local address first.
    let own = w.addr(side.end).into();
    let p = w.provider(side.end);
    let port = p.query_port(1).unwrap();
    let sgid_index = (0..port.gid_table_len)
        .rev()
        .find(|i| p.query_gid(1, *i) == Ok(own));
    let steps = [
        QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            access: Some(Access::REMOTE_WRITE),
            ..QpAttr::to(QpState::Init)
        },
        QpAttr {
            ah: Some(AhAttr {
                dgid,
                sgid_index: sgid_index.unwrap(),
                flow_label: 0,
                hop_limit: 64,
                traffic_class: 0,
                port: 1,
            }),
            path_mtu: Some(port.active_mtu.min(Mtu::Mtu1024)),
            dest_qp: Some(dest),
            rq_psn: Some(psn[1]),
            ..QpAttr::to(QpState::Rtr)
        },
        QpAttr {
            sq_psn: Some(psn[0]),
            ..QpAttr::to(QpState::Rts)
        },
    ];
    for step in steps {
        p.modify_qp(side.qp, &step).unwrap();
    }
}

fn connect<W: World>(w: &mut W, a: &Side, b: &Side) {
    bring_up(w, a, b, PSN);
    bring_up(w, b, a, [PSN[1], PSN[0]]);
}

fn connected<W: World>(w: &mut W, a: &Wants, b: &Wants) -> (Side, Side) {
    let (a, b) = (side(w, End::A, a), side(w, End::B, b));
    connect(w, &a, &b);
    (a, b)
}

/// Establishes a connection with default parameters.
pub(crate) fn plain<W: World>(w: &mut W) -> (Side, Side) {
    connected(w, &Wants::default(), &Wants::default())
}

/// Sends and writes from one end to the other, and checks the data that arrive. Messages fit into a
/// burst, so that no socket drops them.
fn exchange<W: World>(w: &mut W, a: &Side, b: &Side) {
    let data = pattern(1, 20_000);
    a.memory.write(0, &data);
    for n in 0..4 {
        b.recv(w, n, 400_000 + 50_000 * n as usize, 50_000);
    }
    a.send(w, 10, SendOp::Send, 0, 20_000);
    a.send(w, 11, SendOp::SendImm(0xcafe_f00d), 7, 1024);
    a.send(w, 12, SendOp::Send, 0, 0);
    a.send(w, 13, SendOp::Write(b.remote(300_000)), 3, 9_001);
    a.send(w, 14, SendOp::WriteImm(b.remote(320_000), 5), 0, 12_000);
    let mut sent = Vec::new();
    let mut received = Vec::new();
    w.until("all of them", |w| {
        let mut out = Vec::new();
        for side in [a, b] {
            w.provider(side.end).poll_cq(side.cq, 16, &mut out).unwrap();
        }
        for c in out {
            assert_eq!(c.status, WcStatus::Success, "{c:?}");
            if c.opcode.is_recv() {
                received.push((c.wr_id.0, c.opcode, c.byte_len, c.imm));
            } else {
                sent.push((c.wr_id.0, c.opcode));
            }
        }
        (sent.len() == 5 && received.len() == 4).then_some(())
    });
    assert_eq!(
        sent,
        [
            (10, WcOpcode::Send),
            (11, WcOpcode::Send),
            (12, WcOpcode::Send),
            (13, WcOpcode::Write),
            (14, WcOpcode::Write),
        ]
    );
    assert_eq!(
        received,
        [
            (0, WcOpcode::Recv, 20_000, None),
            (1, WcOpcode::Recv, 1024, Some(0xcafe_f00d)),
            (2, WcOpcode::Recv, 0, None),
            (3, WcOpcode::RecvWriteImm, 12_000, Some(5)),
        ]
    );
    assert_eq!(b.bytes(400_000, 20_000), data);
    assert_eq!(b.bytes(450_000, 1024), data[7..1031]);
    assert_eq!(b.bytes(300_000, 9_001), data[3..9_004]);
    assert_eq!(b.bytes(320_000, 12_000), data[..12_000]);
}

pub(crate) fn uc_sends_and_writes<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = plain(w);
    exchange(w, &a, &b);
    exchange(w, &b, &a);
}

pub(crate) fn uc_connects_within_device<W: World>(mut w: W) {
    let w = &mut w;
    let a = side(w, End::A, &Wants::default());
    let b = side(w, End::A, &Wants::default());
    connect(w, &a, &b);
    exchange(w, &a, &b);
    exchange(w, &b, &a);
    // Connect a queue pair to itself.
    let own = side(w, End::A, &Wants::default());
    bring_up(w, &own, &own, [5, 5]);
    own.recv(w, 1, 0, 64);
    own.memory.write(5000, b"to myself");
    own.send(w, 2, SendOp::Send, 5000, 9);
    let c = own.completions(w, 2);
    assert!(c.iter().all(|c| c.status.is_ok()), "{c:?}");
    assert_eq!(own.bytes(0, 9), b"to myself");
}

pub(crate) fn uc_rejects_reads<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = plain(w);
    let remote = b.remote(0);
    let swap = SendOp::CmpSwap {
        remote,
        compare: 0,
        swap: 1,
    };
    let refused = [
        SendOp::Read(remote),
        SendOp::FetchAdd { remote, add: 1 },
        swap,
        SendOp::SendInv(RKey(1)),
    ];
    let sges = [a.sge(0, 8)];
    for op in refused {
        let wr = SendWr::new(1, op, &sges);
        let error = w.provider(a.end).post_send(a.qp, &[wr]).unwrap_err();
        assert_eq!(error.reason, PostReason::InvalidOpcode, "{op:?}");
    }
    exchange(w, &a, &b);
}

/// Messages that the peer does not allow are silently lost, but later messages are not.
pub(crate) fn uc_messages_without_receive_are_lost<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = plain(w);
    a.send(w, 1, SendOp::Send, 0, 5000);
    let wrong = RemoteAddr {
        rkey: b.mr.rkey.next(),
        ..b.remote(0)
    };
    a.send(w, 2, SendOp::Write(wrong), 0, 5000);
    let c = a.completions(w, 2);
    assert!(c.iter().all(|c| c.status.is_ok()), "{c:?}");
    w.pass(Duration::from_millis(5));
    b.recv(w, 9, 0, 4999);
    a.send(w, 3, SendOp::Send, 0, 5000);
    assert!(a.completion(w).status.is_ok());
    if w.is_rxe(b.end) {
        // rdma_rxe completes the receive that is too short.
        assert_eq!(b.completion(w).wr_id, WrId(9));
        return;
    }
    w.pass(Duration::from_millis(5));
    assert_eq!(w.provider(b.end).peek_cq(b.cq, 9), Ok(0));
    a.memory.write(0, b"short");
    a.send(w, 4, SendOp::Send, 0, 5);
    let c = b.completion(w);
    assert_eq!(
        (c.wr_id, c.status, c.byte_len),
        (WrId(9), WcStatus::Success, 5)
    );
    assert_eq!(b.bytes(0, 5), b"short");
}

pub(crate) fn uc_connections_share_receives<W: World>(mut w: W) {
    let w = &mut w;
    // Use one domain for all, because keys of a shared queue are looked up in the domain of the
    // queue pair.
    let first = side(w, End::B, &Wants::default());
    let attr = SrqAttr {
        max_wr: 16,
        max_sge: 1,
        limit: 0,
    };
    let srq = w.provider(End::B).create_srq(first.pd, attr).unwrap();
    let shared = Wants {
        srq: Some(srq),
        ..Wants::default()
    };
    let qps = [(); 2].map(|()| {
        let init = QpInitAttr {
            qp_type: QpType::Uc,
            ..init_attr(first.pd, first.cq, &shared)
        };
        w.provider(End::B).create_qp(&init).unwrap()
    });
    let sides = qps.map(|qp| Side {
        qp,
        memory: first.memory.clone(),
        ..first
    });
    for n in 0..4u64 {
        let sges = [first.sge(1000 * n as usize, 1000)];
        let wr_id = WrId(n);
        let wr = RecvWr { wr_id, sges: &sges };
        w.provider(End::B).post_srq_recv(srq, &[wr]).unwrap();
    }
    let refused = w.provider(End::B).post_recv(qps[0], &[]).unwrap_err();
    assert_eq!(refused.reason, PostReason::InvalidOpcode);
    let peers = [(); 2].map(|()| side(w, End::A, &Wants::default()));
    for (side, peer) in sides.iter().zip(&peers) {
        connect(w, peer, side);
    }
    for n in 0..4u32 {
        let (peer, side) = (&peers[n as usize % 2], &sides[n as usize % 2]);
        peer.memory.write(0, &pattern(n.into(), 900));
        peer.send(w, 1, SendOp::SendImm(n), 0, 900);
        assert!(peer.completion(w).status.is_ok());
        let c = side.completion(w);
        assert_eq!((c.status, c.imm), (WcStatus::Success, Some(n)));
        assert_eq!((c.qp, c.wr_id), (side.qp, WrId(n.into())));
        assert_eq!(side.bytes(1000 * n as usize, 900), pattern(n.into(), 900));
    }
    let busy = w.provider(End::B).destroy_srq(srq);
    assert!(matches!(busy, Err(VerbsError::ResourceBusy(_))));
    if !w.is_rxe(End::B) {
        let p = w.provider(End::B);
        p.modify_qp(qps[0], &QpAttr::to(QpState::Error)).unwrap();
        assert_eq!(sides[0].event(w), AsyncEvent::QpLastWqeReached(qps[0]));
    }
}

pub(crate) fn uc_qp_transitions_through_states<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = (
        side(w, End::A, &Wants::default()),
        side(w, End::B, &Wants::default()),
    );
    let early = w
        .provider(End::A)
        .modify_qp(a.qp, &QpAttr::to(QpState::Rts));
    assert!(matches!(early, Err(VerbsError::InvalidTransition { .. })));
    bring_up(w, &a, &b, PSN);
    let p = w.provider(End::A);
    // This type has no attributes for acknowledgements and READs.
    let reliable = QpAttr {
        min_rnr_timer: Some(3),
        ..QpAttr::default()
    };
    let attribute = "min_rnr_timer";
    let state = QpState::Rts;
    assert_eq!(
        p.modify_qp(a.qp, &reliable),
        Err(VerbsError::ForbiddenAttribute {
            to: state,
            attribute
        })
    );
    assert_eq!(p.query_qp(a.qp).unwrap().state, Some(QpState::Rts));
    // Receives can be posted in INIT, but packets are only accepted starting with RTR.
    bring_up(w, &b, &a, [PSN[1], PSN[0]]);
    exchange(w, &a, &b);
    for n in 0..3 {
        a.recv(w, n, 0, 64);
    }
    let p = w.provider(End::A);
    p.modify_qp(a.qp, &QpAttr::to(QpState::Error)).unwrap();
    let c = a.completions(w, 3);
    assert!(c.iter().all(|c| c.status == WcStatus::WrFlushErr));
    a.send(w, 7, SendOp::Send, 0, 8);
    assert_eq!(a.completion(w).status, WcStatus::WrFlushErr);
    let p = w.provider(End::A);
    p.modify_qp(a.qp, &QpAttr::to(QpState::Reset)).unwrap();
    // Repeat all states.
    bring_up(w, &a, &b, [PSN[0] - 9, PSN[1]]);
    exchange(w, &a, &b);
}

pub(crate) fn uc_connects_through_cm<W: World>(mut w: W) {
    let w = &mut w;
    let listener = listen_for(w, QpType::Uc);
    // A listener only accepts requests of its type.
    let other = resolve_for(w, QpType::Rc);
    let (pd, cq, _m, _) = objects(w, End::A, &Wants::default());
    let p = w.provider(End::A);
    let init = init_attr(pd, cq, &Wants::default());
    p.create_cm_qp(other, &init).unwrap();
    p.connect(other, &ConnParam::default()).unwrap();
    let CmEventKind::Rejected { reason, .. } = cm_event(w, End::A).kind else {
        panic!("not refused");
    };
    // A kernel uses the same reason for all requests that it rejects itself.
    if !w.is_rxe(End::B) {
        assert_eq!(reason, 9, "invalid transport type");
    }
    let id = resolve_for(w, QpType::Uc);
    let refused = w.provider(End::A).create_cm_qp(id, &init);
    let wrong = VerbsError::WrongQpType("connection identifier");
    assert_eq!(refused, Err(wrong.into()));
    let make = |w: &mut W, end, id| {
        let (pd, cq, memory, mr) = objects(w, end, &Wants::default());
        let init = QpInitAttr {
            qp_type: QpType::Uc,
            ..init_attr(pd, cq, &Wants::default())
        };
        let qp = w.provider(end).create_cm_qp(id, &init).unwrap();
        Side {
            end,
            pd,
            cq,
            memory,
            mr,
            qp,
            id,
        }
    };
    let a = make(w, End::A, id);
    let param = ConnParam::default();
    w.provider(End::A).connect(id, &param).unwrap();
    let request = cm_event(w, End::B).id;
    let b = make(w, End::B, request);
    w.provider(End::B).accept(request, &param).unwrap();
    for end in [End::A, End::B] {
        let kind = cm_event(w, end).kind;
        assert!(matches!(kind, CmEventKind::Established { .. }), "{kind:?}");
    }
    exchange(w, &a, &b);
    w.provider(End::B).disconnect(b.id).unwrap();
    for end in [End::A, End::B] {
        assert_eq!(cm_event(w, end).kind, CmEventKind::Disconnected);
    }
    w.provider(End::B).destroy_id(listener).unwrap();
}
