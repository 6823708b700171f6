//! Behaviour specific to iWARP devices.

use riser_transport::verbs::{
    AsyncEvent, CmError, CmEventKind, PortCapabilities, PortSpace, PostReason, QpAttr, QpInitAttr,
    QpState, QpType, RemoteAddr, SendOp, SendWr, VerbsError, WcOpcode, WcStatus,
};

use riser_transport::verbs::{RdmaCm as _, Verbs as _};

use crate::suite::ops::ok;
use crate::suite::world::{End, Side, Wants, World, cm_event, connected, init_attr, objects};

fn is_unsupported<T: std::fmt::Debug>(r: Result<T, VerbsError>) {
    assert!(matches!(r, Err(VerbsError::Unsupported(_))), "{r:?}");
}

pub(crate) fn unsupported_iwarp_calls_are_rejected<W: World>(mut w: W) {
    let w = &mut w;
    let wants = Wants::default();
    let (pd, cq, _memory, _) = objects(w, End::A, &wants);
    let p = w.provider(End::A);
    for qp_type in [QpType::Ud, QpType::Uc, QpType::XrcIni, QpType::XrcTgt] {
        let init = QpInitAttr::new(pd, cq, qp_type, wants.cap);
        is_unsupported(p.create_qp(&init));
        let id = p.create_id_for(PortSpace::Tcp, qp_type);
        assert!(matches!(
            id,
            Err(CmError::Verbs(VerbsError::Unsupported(_)))
        ));
    }
    for space in [PortSpace::Udp, PortSpace::IpoIb] {
        assert!(p.create_id(space).is_err());
    }
    is_unsupported(p.open_xrcd());
    is_unsupported(p.local_mad(1, &[0; 256]));
    is_unsupported(p.modify_port(
        1,
        PortCapabilities::DEVICE_MANAGEMENT,
        PortCapabilities::empty(),
    ));
    assert_eq!(p.device_attr().max_mcast_grp, 0);
    // A queue pair can only reach RTS through its connection.
    let qp = p.create_qp(&init_attr(pd, cq, &wants)).unwrap();
    let id = p.create_id(PortSpace::Tcp).unwrap();
    p.listen(id, 1).unwrap();
    let init = p.init_qp_attr(id, QpState::Init).unwrap();
    p.modify_qp(qp, &init).unwrap();
    assert!(p.init_qp_attr(id, QpState::Rtr).is_err());
    let wr = SendWr::new(1, SendOp::SendImm(1), &[]);
    let (a, _b) = connected(w);
    let refused = w.provider(End::A).post_send(a.qp, &[wr]).unwrap_err();
    assert_eq!(
        (refused.index, refused.reason),
        (0, PostReason::InvalidOpcode)
    );
}

/// Checks that a connection is closed, that both sides are notified, and that requests are flushed.
fn is_over<W: World>(w: &mut W, sides: [&Side; 2]) {
    for side in sides {
        assert_eq!(cm_event(w, side.end).kind, CmEventKind::Disconnected);
        let state = w.provider(side.end).query_qp(side.qp).unwrap().state;
        assert_eq!(state, Some(QpState::Error));
    }
}

pub(crate) fn send_without_receive_closes_connection<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    a.recv(w, 1, 0, 8);
    a.send(w, 2, SendOp::Send, 0, 4);
    ok(w, &a, WcOpcode::Send, 2);
    assert_eq!(a.completion(w).status, WcStatus::WrFlushErr);
    assert_eq!(b.event(w), AsyncEvent::QpReqError(b.qp));
    assert_eq!(a.event(w), AsyncEvent::QpFatal(a.qp));
    is_over(w, [&a, &b]);
}

pub(crate) fn write_with_wrong_key_closes_connection<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let wrong = RemoteAddr {
        rkey: b.mr.rkey.next(),
        ..b.remote(0)
    };
    a.memory.fill(0, 100, 7);
    a.send(w, 1, SendOp::Write(wrong), 0, 100);
    a.send(w, 2, SendOp::Read(b.remote(0)), 0, 100);
    ok(w, &a, WcOpcode::Write, 1);
    assert_eq!(a.completion(w).status, WcStatus::WrFlushErr);
    assert_eq!(b.event(w), AsyncEvent::QpAccessError(b.qp));
    is_over(w, [&a, &b]);
    assert_eq!(b.bytes(0, 100), [0; 100]);
}

pub(crate) fn local_qp_error_closes_peer_connection<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let error = QpAttr::to(QpState::Error);
    w.provider(End::A).modify_qp(a.qp, &error).unwrap();
    is_over(w, [&a, &b]);
}

pub(crate) fn local_qp_reset_closes_peer_connection<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let reset = QpAttr::to(QpState::Reset);
    w.provider(End::A).modify_qp(a.qp, &reset).unwrap();
    for side in [&b, &a] {
        assert_eq!(cm_event(w, side.end).kind, CmEventKind::Disconnected);
    }
    let state = w.provider(End::B).query_qp(b.qp).unwrap().state;
    assert_eq!(state, Some(QpState::Error));
}
