//! Datagram identifiers: resolving the queue pair of a port (SIDR).

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use riser_transport::verbs::{
    AhAttr, CmError, CmEventKind, CmId, ConnParam, DATAGRAM_QKEY, Gid,
    MAX_DATAGRAM_CONNECT_PRIVATE_DATA, MAX_DATAGRAM_REPLY_PRIVATE_DATA, PortSpace, QpInitAttr,
    QpState, QpType, RdmaCm as _, SendOp, SendWr, UdDest, Verbs as _, VerbsError, mgid,
};

use crate::suite::world::{
    End, Side, Wants, World, cm_event, init_attr, listen, listen_in, objects, resolve_in,
};

/// Creates the objects of an identifier's end, and its datagram queue pair, which is ready
/// immediately.
fn with_qp<W: World>(w: &mut W, end: End, id: CmId) -> Side {
    let wants = Wants::default();
    let (pd, cq, memory, mr) = objects(w, end, &wants);
    let init = QpInitAttr {
        qp_type: QpType::Ud,
        ..init_attr(pd, cq, &wants)
    };
    let p = w.provider(end);
    let qp = p.create_cm_qp(id, &init).unwrap();
    let attr = p.query_qp(qp).unwrap();
    assert_eq!(
        (attr.state, attr.qkey),
        (Some(QpState::Rts), Some(DATAGRAM_QKEY))
    );
    Side {
        end,
        pd,
        cq,
        memory,
        mr,
        qp,
        id,
    }
}

fn param(data: &[u8]) -> ConnParam {
    ConnParam {
        private_data: data.to_vec(),
        ..ConnParam::default()
    }
}

/// Requests the queue pair for port 4000 of B; returns the identifier of the request there.
fn send_request<W: World>(w: &mut W, listener: CmId, id: CmId, data: &[u8]) -> CmId {
    w.provider(End::A).connect(id, &param(data)).unwrap();
    let request = cm_event(w, End::B);
    let CmEventKind::ConnectRequest {
        listener: l,
        peer,
        param: said,
    } = request.kind
    else {
        panic!("{request:?}");
    };
    assert_eq!(l, listener);
    assert_eq!(w.provider(End::A).local_addr(id), Some(peer));
    assert_eq!(w.provider(End::B).peer_addr(request.id), Some(peer));
    assert_eq!(said.private_data.len(), MAX_DATAGRAM_CONNECT_PRIVATE_DATA);
    assert_eq!(&said.private_data[..data.len()], data);
    request.id
}

pub(crate) fn sidr_resolves_queue_pair<W: World>(mut w: W) {
    let w = &mut w;
    let listener = listen_in(w, PortSpace::Udp, End::B, 4000);
    let id = resolve_in(w, PortSpace::Udp, 4000);
    let a = with_qp(w, End::A, id);
    let request = send_request(w, listener, id, &[7; MAX_DATAGRAM_CONNECT_PRIVATE_DATA]);
    let b = with_qp(w, End::B, request);
    b.recv(w, 1, 0, 100);
    w.provider(End::B)
        .accept(request, &param(b"welcome"))
        .unwrap();
    let CmEventKind::Established { param: said } = cm_event(w, End::A).kind else {
        panic!("not established");
    };
    assert_eq!(said.private_data.len(), MAX_DATAGRAM_REPLY_PRIVATE_DATA);
    assert_eq!(&said.private_data[..8], b"welcome\0");
    assert_eq!(said.qp_num, w.provider(End::B).qp_num(b.qp).unwrap());
    assert_eq!(said.qkey, Some(DATAGRAM_QKEY));
    let way: AhAttr = said.ah.unwrap();
    if w.provider(End::A).device_attr().provider != "shm" {
        // A shared memory device uses its own names for its peers.
        assert_eq!(way.dgid, Gid::from(w.addr(End::B)));
    }
    // The information in the reply is sufficient for sending to the peer.
    a.memory.write(0, b"datagram");
    let p = w.provider(End::A);
    let ah = p.create_ah(a.pd, way).unwrap();
    let sges = [a.sge(0, 8)];
    let wr = SendWr {
        ud: Some(UdDest {
            ah,
            qpn: said.qp_num,
            qkey: said.qkey.unwrap(),
        }),
        ..SendWr::new(2, SendOp::Send, &sges)
    };
    p.post_send(a.qp, &[wr]).unwrap();
    assert!(a.completion(w).status.is_ok());
    let received = b.completion(w);
    assert!(received.status.is_ok());
    assert_eq!(received.byte_len, 48);
    assert_eq!(received.src_qp, w.provider(End::A).qp_num(a.qp).unwrap());
    assert_eq!(b.bytes(40, 8), b"datagram");
    // There are no further events, and the identifiers can be destroyed independently.
    assert_eq!(w.provider(End::B).poll_cm_event(), None);
    w.provider(End::A).destroy_id(id).unwrap();
    w.pass(Duration::from_millis(20));
    assert_eq!(w.provider(End::B).poll_cm_event(), None);
    let state = w.provider(End::B).query_qp(b.qp).unwrap().state;
    assert_eq!(state, Some(QpState::Rts));
    w.provider(End::B).destroy_id(request).unwrap();
}

pub(crate) fn sidr_request_is_rejected<W: World>(mut w: W) {
    let w = &mut w;
    let listener = listen_in(w, PortSpace::Udp, End::B, 4000);
    for by_call in [true, false] {
        let id = resolve_in(w, PortSpace::Udp, 4000);
        let a = with_qp(w, End::A, id);
        let request = send_request(w, listener, id, b"hello");
        let p = w.provider(End::B);
        if by_call {
            p.reject(request, b"no thanks").unwrap();
            let again = p.reject(request, b"");
            assert!(matches!(again, Err(CmError::InvalidState(_))));
            p.destroy_id(request).unwrap();
        } else {
            // Destroying the identifier sends a response, because nothing else would.
            p.destroy_id(request).unwrap();
        }
        let CmEventKind::Rejected {
            reason,
            private_data,
        } = cm_event(w, End::A).kind
        else {
            panic!("not refused");
        };
        assert_eq!(reason, 2, "refused");
        let said: &[u8] = if by_call { b"no thanks\0" } else { &[0; 10] };
        assert_eq!(&private_data[..10], said);
        // The queue pair may have other uses.
        let state = w.provider(End::A).query_qp(a.qp).unwrap().state;
        assert_eq!(state, Some(QpState::Rts));
    }
}

pub(crate) fn sidr_without_service_is_rejected<W: World>(mut w: W) {
    let w = &mut w;
    // Ports for connections are separate.
    let _listener = listen(w, End::B, 4001);
    let id = resolve_in(w, PortSpace::Udp, 4001);
    w.provider(End::A).connect(id, &param(b"")).unwrap();
    let CmEventKind::Rejected { reason, .. } = cm_event(w, End::A).kind else {
        panic!("not refused");
    };
    assert_eq!(reason, 1, "unsupported service id");
}

pub(crate) fn datagram_calls_out_of_turn_are_refused<W: World>(mut w: W) {
    let w = &mut w;
    let listener = listen_in(w, PortSpace::Udp, End::B, 4000);
    let wrong =
        |r: Result<(), CmError>| assert!(matches!(r, Err(CmError::InvalidState(_))), "{r:?}");
    let (pd, cq, _m, _) = objects(w, End::A, &Wants::default());
    let id = resolve_in(w, PortSpace::Udp, 4000);
    let p = w.provider(End::A);
    let reliable = init_attr(pd, cq, &Wants::default());
    assert_eq!(
        p.create_cm_qp(id, &reliable),
        Err(CmError::Verbs(VerbsError::WrongQpType(
            "connection identifier"
        )))
    );
    wrong(p.accept(id, &param(b"")));
    wrong(p.reject(id, b""));
    wrong(p.disconnect(id));
    let len = MAX_DATAGRAM_CONNECT_PRIVATE_DATA + 1;
    assert_eq!(
        p.connect(id, &param(&[0; MAX_DATAGRAM_CONNECT_PRIVATE_DATA + 1])),
        Err(CmError::PrivateDataTooLong { len, max: len - 1 })
    );
    let request = send_request(w, listener, id, b"");
    let p = w.provider(End::B);
    // A reply requires a queue pair.
    wrong(p.accept(request, &param(b"")));
    let len = MAX_DATAGRAM_REPLY_PRIVATE_DATA + 1;
    let too_long = param(&[0; MAX_DATAGRAM_REPLY_PRIVATE_DATA + 1]);
    let b = with_qp(w, End::B, request);
    let p = w.provider(End::B);
    assert_eq!(
        p.accept(request, &too_long),
        Err(CmError::PrivateDataTooLong { len, max: len - 1 })
    );
    p.accept(request, &param(b"")).unwrap();
    wrong(p.accept(request, &param(b"")));
    wrong(p.disconnect(request));
    assert!(matches!(
        cm_event(w, End::A).kind,
        CmEventKind::Established { .. }
    ));
    // An identifier can only have one queue pair.
    let again = QpInitAttr {
        qp_type: QpType::Ud,
        ..init_attr(b.pd, b.cq, &Wants::default())
    };
    wrong(w.provider(End::B).create_cm_qp(request, &again).map(drop));
    let here = SocketAddr::new(w.addr(End::A), 0);
    wrong(w.provider(End::A).bind_addr(id, here));
}

pub(crate) fn groups_are_joined_and_left<W: World>(mut w: W) {
    let w = &mut w;
    if w.is_rxe(End::A) || w.provider(End::A).device_attr().provider == "shm" {
        // Linux does not join IPv6 groups on RoCEv2, and requires a multicast route for IPv4
        // groups. Shared memory only reaches hosts, not groups.
        return;
    }
    let here = SocketAddr::new(w.addr(End::A), 0);
    let group = |n: u8| -> IpAddr {
        match here.is_ipv4() {
            true => [239, 1, 2, n].into(),
            false => [0xff0e, 0, 0, 0, 0, 0, 1, n.into()].into(),
        }
    };
    let other: IpAddr = match here.is_ipv4() {
        true => [0xff0e, 0, 0, 0, 0, 0, 0, 1].into(),
        false => [239, 1, 2, 3].into(),
    };
    let p = w.provider(End::A);
    let id = p.create_id(PortSpace::Udp).unwrap();
    let wrong =
        |r: Result<(), CmError>| assert!(matches!(r, Err(CmError::InvalidState(_))), "{r:?}");
    wrong(p.join_multicast(id, group(1), false));
    // Before joining a group, a program resolves its address or binds a local one.
    p.resolve_addr(id, None, SocketAddr::new(group(1), 0), Duration::ZERO)
        .unwrap();
    assert_eq!(cm_event(w, End::A).kind, CmEventKind::AddrResolved);
    for (n, send_only) in [(1, false), (2, true)] {
        let p = w.provider(End::A);
        p.join_multicast(id, group(n), send_only).unwrap();
        let CmEventKind::MulticastJoin { param } = cm_event(w, End::A).kind else {
            panic!("not joined");
        };
        assert_eq!(param.ah.unwrap().dgid, mgid(group(n)).unwrap());
        assert_eq!(param.qp_num, 0x00ff_ffff);
        assert_eq!(param.qkey, Some(DATAGRAM_QKEY));
    }
    let p = w.provider(End::A);
    let again = p.join_multicast(id, group(1), false);
    assert_eq!(again, Err(CmError::AddressInUse));
    let unicast = p.join_multicast(id, here.ip(), false);
    assert_eq!(
        unicast,
        Err(VerbsError::InvalidParameter("multicast group").into())
    );
    let unreachable = p.join_multicast(id, other, false);
    assert_eq!(unreachable, Err(CmError::Unreachable));
    p.leave_multicast(id, group(1)).unwrap();
    let gone = p.leave_multicast(id, group(1));
    assert_eq!(gone, Err(CmError::AddressNotAvailable));
    // Join and leave before the event is consumed.
    p.join_multicast(id, group(1), false).unwrap();
    p.leave_multicast(id, group(1)).unwrap();
    assert_eq!(p.poll_cm_event(), None);
    for n in 3..=65 {
        p.join_multicast(id, group(n), true).unwrap();
    }
    let beyond = p.join_multicast(id, group(66), true);
    let limits = [
        VerbsError::InsufficientResources("multicast groups"),
        // The error number returned by libraries.
        VerbsError::Os(libc::ENOMEM),
    ];
    assert!(
        limits.map(|limit| Err(limit.into())).contains(&beyond),
        "{beyond:?}"
    );
    p.resolve_route(id, Duration::ZERO).unwrap();
    let mut joined = Vec::new();
    loop {
        match cm_event(w, End::A).kind {
            CmEventKind::MulticastJoin { param } => joined.push(param.ah.unwrap().dgid),
            kind => {
                assert_eq!(kind, CmEventKind::RouteResolved);
                break;
            }
        }
    }
    let all: Vec<_> = (3..=65).map(|n| mgid(group(n)).unwrap()).collect();
    assert_eq!(joined, all);
    let p = w.provider(End::A);
    assert_eq!(
        p.connect(id, &param(b"")),
        Err(CmError::Unreachable),
        "no queue pair is behind a group"
    );
    p.destroy_id(id).unwrap();
    assert_eq!(p.poll_cm_event(), None);
    let reliable = p.create_id(PortSpace::Tcp).unwrap();
    p.bind_addr(reliable, here).unwrap();
    wrong(p.join_multicast(reliable, group(1), false));
}
