//! Connections: establishing, rejecting, closing and timeouts.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use riser_transport::verbs::{
    CmError, CmEventKind, CmId, CmOption, ConnParam, Ece, MAX_CONNECT_PRIVATE_DATA, Mtu, PortSpace,
    QpAttr, QpState, RdmaCm as _, SendOp, Verbs as _, VerbsError, WcStatus,
};

use crate::suite::world::{
    End, Side, Wants, World, cm_event, connect_on, connect_to, connected, create_cm_qp, init_attr,
    listen, listen_in, objects, resolve, resolve_in,
};

fn param(data: &[u8]) -> ConnParam {
    ConnParam {
        private_data: data.to_vec(),
        responder_resources: 3,
        initiator_depth: 5,
        ..ConnParam::default()
    }
}

pub(crate) fn connection_exchanges_private_data<W: World>(mut w: W) {
    let w = &mut w;
    let listener = listen(w, End::B, 4000);
    let id = resolve(w, 4000);
    let qp_a = create_cm_qp(w, End::A, id);
    w.provider(End::A).connect(id, &param(b"hello")).unwrap();
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
    let local = w.provider(End::A).local_addr(id).unwrap();
    assert_eq!((peer, peer.ip()), (local, w.addr(End::A)));
    assert_eq!(w.provider(End::B).peer_addr(request.id), Some(peer));
    let here = SocketAddr::new(w.addr(End::B), 4000);
    assert_eq!(w.provider(End::B).local_addr(request.id), Some(here));
    assert_eq!(w.provider(End::A).peer_addr(id), Some(here));
    let is_iwarp = w.is_iwarp(End::A);
    if is_iwarp {
        assert_eq!(said.private_data, b"hello");
    } else {
        assert_eq!(said.private_data.len(), MAX_CONNECT_PRIVATE_DATA);
        assert_eq!(&said.private_data[..6], b"hello\0");
    }
    // The peer's depth corresponds to our resources, and vice versa.
    assert_eq!((said.responder_resources, said.initiator_depth), (5, 3));
    let (pd, cq, _m, _) = objects(w, End::B, &Wants::default());
    let init = init_attr(pd, cq, &Wants::default());
    let qp_b = w.provider(End::B).create_cm_qp(request.id, &init).unwrap();
    w.provider(End::B)
        .accept(request.id, &param(b"welcome"))
        .unwrap();
    let CmEventKind::Established { param: said } = cm_event(w, End::A).kind else {
        panic!("not established");
    };
    assert_eq!(said.private_data[..7], *b"welcome");
    // The reply must not exceed the offer of the request. siw keeps the resources requested by the
    // request.
    let held = if w.is_siw(End::B) { 5 } else { 3 };
    let depths = (said.responder_resources, said.initiator_depth);
    assert_eq!(depths, (3, held));
    if !w.has_immediate_data() {
        return;
    }
    assert!(matches!(
        cm_event(w, End::B).kind,
        CmEventKind::Established { .. }
    ));
    // Each side starts with the PSN that the other expects, and limits its READs to the other's
    // offer.
    let attr_a = w.provider(End::A).query_qp(qp_a).unwrap();
    let attr_b = w.provider(End::B).query_qp(qp_b).unwrap();
    assert_eq!(
        (attr_a.sq_psn, attr_a.rq_psn),
        (attr_b.rq_psn, attr_b.sq_psn)
    );
    for (end, attr) in [(End::A, attr_a), (End::B, attr_b)] {
        // rdma_rxe rounds this up to a power of two.
        let depth = Some(if w.is_rxe(end) { 4 } else { 3 });
        assert_eq!(
            (attr.max_rd_atomic, attr.max_dest_rd_atomic),
            (depth, depth)
        );
    }
    let number = w.provider(End::B).qp_num(qp_b).unwrap();
    // With iWARP, the TCP connection determines the peer's queue pair.
    assert_eq!(attr_a.dest_qp, (!is_iwarp).then_some(number));
}

pub(crate) fn rejection_contains_reason<W: World>(mut w: W) {
    let w = &mut w;
    let _listener = listen(w, End::B, 4000);
    let id = resolve(w, 4000);
    let qp = create_cm_qp(w, End::A, id);
    w.provider(End::A).connect(id, &param(b"")).unwrap();
    let request = cm_event(w, End::B).id;
    w.provider(End::B).reject(request, b"no thanks").unwrap();
    let CmEventKind::Rejected {
        reason,
        private_data,
    } = cm_event(w, End::A).kind
    else {
        panic!("not refused");
    };
    assert_eq!((reason, &private_data[..9]), (28, &b"no thanks"[..]));
    let state = w.provider(End::A).query_qp(qp).unwrap().state;
    assert!(state == Some(QpState::Error) || w.is_siw(End::A));
    let again = w.provider(End::B).reject(request, b"");
    assert!(matches!(again, Err(CmError::InvalidState(_))));
    w.provider(End::B).destroy_id(request).unwrap();
    w.provider(End::A).destroy_id(id).unwrap();
}

pub(crate) fn missing_listener_rejects_request<W: World>(mut w: W) {
    let w = &mut w;
    let id = resolve(w, 4001);
    create_cm_qp(w, End::A, id);
    let requested = w.provider(End::A).connect(id, &param(b""));
    if w.is_siw(End::A) && requested.is_err() {
        // siw waits for the TCP connection inside the call.
        return;
    }
    requested.unwrap();
    let CmEventKind::Rejected { reason, .. } = cm_event(w, End::A).kind else {
        panic!("not refused");
    };
    assert_eq!(reason, 8, "invalid service id");
}

pub(crate) fn disconnect_reaches_both_sides<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    b.recv(w, 1, 0, 8);
    a.send(w, 2, SendOp::Send, 0, 0);
    assert!(a.completion(w).status.is_ok() && b.completion(w).status.is_ok());
    a.recv(w, 3, 0, 8);
    b.recv(w, 4, 0, 8);
    w.provider(End::A).disconnect(a.id).unwrap();
    w.provider(End::A).disconnect(a.id).unwrap();
    for side in [&a, &b] {
        assert_eq!(cm_event(w, side.end).kind, CmEventKind::Disconnected);
        assert_eq!(side.completion(w).status, WcStatus::WrFlushErr);
        let state = w.provider(side.end).query_qp(side.qp).unwrap().state;
        // siw uses a different state.
        assert!(state == Some(QpState::Error) || w.is_siw(side.end));
    }
    for side in [&a, &b] {
        if !w.is_siw(side.end) {
            assert_eq!(cm_event(w, side.end).kind, CmEventKind::TimewaitExit);
        }
    }
    w.provider(End::B).disconnect(b.id).unwrap();
    w.provider(End::B).destroy_id(b.id).unwrap();
    let gone = w.provider(End::B).disconnect(b.id);
    assert!(matches!(gone, Err(CmError::InvalidState(_))));
}

pub(crate) fn simultaneous_disconnect_completes<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    w.provider(End::A).disconnect(a.id).unwrap();
    w.provider(End::B).disconnect(b.id).unwrap();
    for end in [End::A, End::B] {
        assert_eq!(cm_event(w, end).kind, CmEventKind::Disconnected);
    }
}

pub(crate) fn destroying_identifier_closes_connection<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    w.provider(End::A).destroy_id(a.id).unwrap();
    assert_eq!(cm_event(w, End::B).kind, CmEventKind::Disconnected);
    // The owner still has to destroy the queue pair.
    w.provider(End::A).destroy_qp(a.qp).unwrap();
    w.provider(End::B).destroy_qp(b.qp).unwrap();
    w.provider(End::B).destroy_id(b.id).unwrap();
}

pub(crate) fn calls_out_of_turn_are_refused<W: World>(mut w: W) {
    let w = &mut w;
    let (here, there) = (w.addr(End::A), w.addr(End::B));
    let (pd, cq, _m, _) = objects(w, End::A, &Wants::default());
    let init = init_attr(pd, cq, &Wants::default());
    let p = w.provider(End::A);
    let wrong =
        |r: Result<(), CmError>| assert!(matches!(r, Err(CmError::InvalidState(_))), "{r:?}");
    let id = p.create_id(PortSpace::Tcp).unwrap();
    wrong(p.connect(id, &param(b"")));
    wrong(p.accept(id, &param(b"")));
    wrong(p.reject(id, b""));
    wrong(p.mra(id));
    wrong(p.disconnect(id));
    wrong(p.notify_established(id));
    wrong(p.resolve_route(id, Duration::ZERO));
    wrong(p.create_cm_qp(id, &init).map(drop));
    let port = |port| SocketAddr::new(here, port);
    let peer = SocketAddr::new(there, 1);
    // Skip a device that is its own peer.
    if there != here {
        assert_eq!(p.bind_addr(id, peer), Err(CmError::AddressNotAvailable));
    }
    p.bind_addr(id, port(700)).unwrap();
    wrong(p.bind_addr(id, port(701)));
    let other = p.create_id(PortSpace::Tcp).unwrap();
    assert_eq!(p.bind_addr(other, port(700)), Err(CmError::AddressInUse));
    p.bind_addr(other, port(0)).unwrap();
    assert!(p.local_addr(other).unwrap().port() >= 32_768);
    p.destroy_id(id).unwrap();
    let again = p.create_id(PortSpace::Tcp).unwrap();
    p.bind_addr(again, port(700)).unwrap();
    p.listen(again, 1).unwrap();
    wrong(p.listen(again, 1));
    wrong(p.resolve_addr(again, None, peer, Duration::ZERO));
    let lost = p.create_id(PortSpace::Tcp).unwrap();
    let unspecified = SocketAddr::new(
        if here.is_ipv4() {
            [0, 0, 0, 0].into()
        } else {
            std::net::Ipv6Addr::UNSPECIFIED.into()
        },
        9,
    );
    p.resolve_addr(lost, None, unspecified, Duration::ZERO)
        .unwrap();
    let event = cm_event(w, End::A);
    assert_eq!(event.kind, CmEventKind::AddrError(CmError::Unreachable));
    let wait = Duration::from_secs(2);
    let p = w.provider(End::A);
    p.resolve_addr(lost, None, peer, wait).unwrap();
    assert_eq!(cm_event(w, End::A).kind, CmEventKind::AddrResolved);
    w.provider(End::A).resolve_route(lost, wait).unwrap();
    assert_eq!(cm_event(w, End::A).kind, CmEventKind::RouteResolved);
    let p = w.provider(End::A);
    p.create_cm_qp(lost, &init).unwrap();
    let max = match p.device_attr().provider {
        "iwarp" => 508,
        _ => MAX_CONNECT_PRIVATE_DATA,
    };
    let too_long = p.connect(lost, &param(&vec![0; max + 1]));
    let len = max + 1;
    assert_eq!(too_long, Err(CmError::PrivateDataTooLong { len, max }));
}

/// Creates an identifier of A, with an optional option.
fn id_with<W: World>(w: &mut W, option: Option<CmOption>) -> CmId {
    let p = w.provider(End::A);
    let id = p.create_id(PortSpace::Tcp).unwrap();
    if let Some(option) = option {
        p.set_option(id, option).unwrap();
    }
    id
}

pub(crate) fn port_sharing_follows_owner_options<W: World>(mut w: W) {
    let w = &mut w;
    let here = SocketAddr::new(w.addr(End::A), 700);
    let share = Some(CmOption::ReuseAddress(true));
    let alone = id_with(w, None);
    let p = w.provider(End::A);
    p.bind_addr(alone, here).unwrap();
    // Each port space has separate ports.
    if p.device_attr().provider != "iwarp" {
        let other = p.create_id(PortSpace::Udp).unwrap();
        p.bind_addr(other, here).unwrap();
    }
    // Sharing must be enabled by both.
    let sharing = id_with(w, share);
    let p = w.provider(End::A);
    assert_eq!(p.bind_addr(sharing, here), Err(CmError::AddressInUse));
    p.destroy_id(alone).unwrap();
    p.bind_addr(sharing, here).unwrap();
    let second = id_with(w, share);
    let p = w.provider(End::A);
    p.bind_addr(second, here).unwrap();
    let third = id_with(w, None);
    let p = w.provider(End::A);
    assert_eq!(p.bind_addr(third, here), Err(CmError::AddressInUse));
    // A listener does not share its port.
    assert_eq!(p.listen(second, 1), Err(CmError::AddressInUse));
    p.destroy_id(sharing).unwrap();
    p.listen(second, 1).unwrap();
    let late = id_with(w, share);
    let p = w.provider(End::A);
    assert_eq!(p.bind_addr(late, here), Err(CmError::AddressInUse));
    p.destroy_id(second).unwrap();
    p.bind_addr(late, here).unwrap();
}

pub(crate) fn wildcards_match_device_address<W: World>(mut w: W) {
    let w = &mut w;
    if w.is_rdma_core(End::B) {
        // The provider binds to the address of its device instead.
        return;
    }
    let here = SocketAddr::new(w.addr(End::B), 4000);
    let any_v6 = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 4000);
    let any = match here.ip() {
        IpAddr::V4(_) => SocketAddr::from(([0, 0, 0, 0], 4000)),
        IpAddr::V6(_) => any_v6,
    };
    let p = w.provider(End::B);
    let specific = p.create_id(PortSpace::Tcp).unwrap();
    p.bind_addr(specific, here).unwrap();
    let wild = p.create_id(PortSpace::Tcp).unwrap();
    // The listener for a request would be ambiguous.
    assert_eq!(p.bind_addr(wild, any), Err(CmError::AddressNotAvailable));
    p.destroy_id(specific).unwrap();
    if here.is_ipv4() {
        let only = CmOption::AddressFamilyOnly(true);
        p.set_option(wild, only).unwrap();
        let not_ours = p.bind_addr(wild, any_v6);
        assert_eq!(not_ours, Err(CmError::AddressNotAvailable));
        let both = CmOption::AddressFamilyOnly(false);
        p.set_option(wild, both).unwrap();
    }
    p.bind_addr(wild, any_v6).unwrap();
    assert_eq!(p.local_addr(wild), Some(here));
    let specific = p.create_id(PortSpace::Tcp).unwrap();
    assert_eq!(
        p.bind_addr(specific, here),
        Err(CmError::AddressNotAvailable)
    );
    p.listen(wild, 8).unwrap();
    let _ = connect_to(w, 4000, &Wants::default(), &Wants::default());
}

pub(crate) fn unbound_listener_is_assigned_port<W: World>(mut w: W) {
    let w = &mut w;
    let addr = w.addr(End::B);
    let p = w.provider(End::B);
    let listener = p.create_id(PortSpace::Tcp).unwrap();
    p.listen(listener, 8).unwrap();
    let at = p.local_addr(listener).unwrap();
    assert_eq!(at.ip(), addr);
    assert_ne!(at.port(), 0);
    let (a, _b) = connect_to(w, at.port(), &Wants::default(), &Wants::default());
    assert_eq!(w.provider(End::A).peer_addr(a.id), Some(at));
}

pub(crate) fn options_are_set_in_time<W: World>(mut w: W) {
    let w = &mut w;
    let here = SocketAddr::new(w.addr(End::A), 0);
    let p = w.provider(End::A);
    let wrong =
        |r: Result<(), CmError>| assert!(matches!(r, Err(CmError::InvalidState(_))), "{r:?}");
    let id = p.create_id(PortSpace::Tcp).unwrap();
    for share in [true, false] {
        p.set_option(id, CmOption::ReuseAddress(share)).unwrap();
    }
    p.bind_addr(id, here).unwrap();
    p.set_option(id, CmOption::ReuseAddress(true)).unwrap();
    wrong(p.set_option(id, CmOption::ReuseAddress(false)));
    p.set_option(id, CmOption::AddressFamilyOnly(true)).unwrap();
    p.set_option(id, CmOption::TypeOfService(0x20)).unwrap();
    p.listen(id, 1).unwrap();
    wrong(p.set_option(id, CmOption::ReuseAddress(true)));
    wrong(p.set_option(id, CmOption::AddressFamilyOnly(true)));
    p.destroy_id(id).unwrap();
    wrong(p.set_option(id, CmOption::TypeOfService(0)));
    let invalid = Err(VerbsError::InvalidParameter("ACK timeout").into());
    let id = p.create_id(PortSpace::Tcp).unwrap();
    assert_eq!(p.set_option(id, CmOption::AckTimeout(32)), invalid);
    if p.device_attr().provider != "iwarp" {
        let datagrams = p.create_id(PortSpace::Udp).unwrap();
        assert_eq!(p.set_option(datagrams, CmOption::AckTimeout(16)), invalid);
    }
}

pub(crate) fn ack_timeout_is_proposed_to_peer<W: World>(mut w: W) {
    let w = &mut w;
    if w.is_rxe(End::A) || w.is_rxe(End::B) {
        // Kernels add the delay of the adapter, and more.
        return;
    }
    let _listener = listen(w, End::B, 4000);
    let id = resolve(w, 4000);
    let (pd, cq, _m, _) = objects(w, End::A, &Wants::default());
    let init = init_attr(pd, cq, &Wants::default());
    let p = w.provider(End::A);
    let qp_a = p.create_cm_qp(id, &init).unwrap();
    p.set_option(id, CmOption::AckTimeout(18)).unwrap();
    p.connect(id, &param(b"")).unwrap();
    assert!(matches!(
        p.set_option(id, CmOption::AckTimeout(19)),
        Err(CmError::InvalidState(_))
    ));
    let request = cm_event(w, End::B).id;
    let (pd, cq, _m, _) = objects(w, End::B, &Wants::default());
    let init = init_attr(pd, cq, &Wants::default());
    let p = w.provider(End::B);
    let qp_b = p.create_cm_qp(request, &init).unwrap();
    p.accept(request, &param(b"")).unwrap();
    for end in [End::A, End::B] {
        let event = cm_event(w, end);
        assert!(matches!(event.kind, CmEventKind::Established { .. }));
    }
    for (end, qp) in [(End::A, qp_a), (End::B, qp_b)] {
        let attr = w.provider(end).query_qp(qp).unwrap();
        assert_eq!(attr.timeout, Some(18));
    }
}

pub(crate) fn connections_work_in_all_port_spaces<W: World>(mut w: W) {
    let w = &mut w;
    for space in [PortSpace::Tcp, PortSpace::IbIp] {
        // Use the same port in both port spaces, with a separate listener in each.
        let listener = listen_in(w, space, End::B, 4000);
        let id = resolve_in(w, space, 4000);
        create_cm_qp(w, End::A, id);
        w.provider(End::A).connect(id, &param(b"hello")).unwrap();
        let request = cm_event(w, End::B);
        let CmEventKind::ConnectRequest {
            listener: l,
            param: said,
            ..
        } = request.kind
        else {
            panic!("{request:?}");
        };
        assert_eq!(l, listener);
        assert_eq!(&said.private_data[..6], b"hello\0");
        w.provider(End::B).reject(request.id, b"").unwrap();
        let event = cm_event(w, End::A);
        assert!(matches!(
            event.kind,
            CmEventKind::Rejected { reason: 28, .. }
        ));
    }
}

pub(crate) fn bare_service_id_allows_full_private_data<W: World>(mut w: W) {
    let w = &mut w;
    if w.is_rdma_core(End::A) || w.is_rdma_core(End::B) {
        // Kernels do not support bare service ids on RoCE, and return an error.
        let end = if w.is_rdma_core(End::A) {
            End::A
        } else {
            End::B
        };
        let space = PortSpace::Ib {
            service_id: 1,
            mask: !0,
        };
        let refused = w.provider(end).create_id(space);
        assert_eq!(refused, Err(CmError::AddressNotAvailable));
        return;
    }
    let service = 0x1000_0000_1234_5600;
    let space = PortSpace::Ib {
        service_id: service,
        mask: !0xff,
    };
    let listener = w.provider(End::B).create_id(space).unwrap();
    w.provider(End::B).listen(listener, 4).unwrap();
    let dst = SocketAddr::new(w.addr(End::B), 0);
    let requested = PortSpace::Ib {
        service_id: service | 0x42,
        mask: !0,
    };
    let p = w.provider(End::A);
    let id = p.create_id(requested).unwrap();
    p.resolve_addr(id, None, dst, Duration::ZERO).unwrap();
    p.resolve_route(id, Duration::ZERO).unwrap();
    let (pd, cq, _m, _) = objects(w, End::A, &Wants::default());
    let init = init_attr(pd, cq, &Wants::default());
    let p = w.provider(End::A);
    p.create_cm_qp(id, &init).unwrap();
    p.connect(id, &param(&[7; 92])).unwrap();
    let request = cm_event(w, End::B);
    let CmEventKind::ConnectRequest {
        listener: l,
        param: said,
        ..
    } = request.kind
    else {
        panic!("{request:?}");
    };
    assert_eq!((l, said.private_data), (listener, vec![7; 92]));
    w.provider(End::B).reject(request.id, b"").unwrap();
}

pub(crate) fn address_header_is_optional<W: World>(mut w: W) {
    let w = &mut w;
    if w.is_rdma_core(End::A) || w.is_rdma_core(End::B) {
        let end = if w.is_rdma_core(End::A) {
            End::A
        } else {
            End::B
        };
        let p = w.provider(end);
        let id = p.create_id(PortSpace::Tcp).unwrap();
        let refused = p.set_option(id, CmOption::BareRequests(true));
        let unsupported = VerbsError::Unsupported("AF_IB address");
        assert_eq!(refused, Err(unsupported.into()));
        return;
    }
    let bare = CmOption::BareRequests(true);
    let here = SocketAddr::new(w.addr(End::B), 4000);
    let p = w.provider(End::B);
    let listener = p.create_id(PortSpace::Tcp).unwrap();
    p.set_option(listener, bare).unwrap();
    p.bind_addr(listener, here).unwrap();
    let late = p.set_option(listener, CmOption::BareRequests(false));
    assert!(matches!(late, Err(CmError::InvalidState(_))));
    p.listen(listener, 4).unwrap();
    let p = w.provider(End::A);
    let id = p.create_id(PortSpace::Tcp).unwrap();
    p.set_option(id, bare).unwrap();
    p.resolve_addr(id, None, here, Duration::ZERO).unwrap();
    p.resolve_route(id, Duration::ZERO).unwrap();
    for _ in 0..2 {
        cm_event(w, End::A);
    }
    let p = w.provider(End::A);
    p.set_option(id, CmOption::PathMtu(Mtu::Mtu512)).unwrap();
    let own = ConnParam {
        qp_num: 77,
        ..param(&[7; 92])
    };
    p.connect(id, &own).unwrap();
    let late = p.set_option(id, CmOption::PathMtu(Mtu::Mtu256));
    assert!(matches!(late, Err(CmError::InvalidState(_))));
    let request = cm_event(w, End::B);
    let CmEventKind::ConnectRequest { peer, param, .. } = request.kind else {
        panic!("{request:?}");
    };
    // The peer's port is unknown.
    assert_eq!(peer, SocketAddr::new(w.addr(End::A), 0));
    assert_eq!(param.private_data, vec![7; 92]);
    let attr = w.provider(End::B).init_qp_attr(request.id, QpState::Rtr);
    assert_eq!(attr.unwrap().path_mtu, Some(Mtu::Mtu512));
    w.provider(End::B).reject(request.id, b"").unwrap();
}

/// Creates the objects of a side whose owner transitions the queue pair.
fn with_own_qp<W: World>(w: &mut W, end: End, id: CmId) -> (Side, u32) {
    let wants = Wants::default();
    let (pd, cq, memory, mr) = objects(w, end, &wants);
    let p = w.provider(end);
    let qp = p.create_qp(&init_attr(pd, cq, &wants)).unwrap();
    let number = p.qp_num(qp).unwrap();
    let side = Side {
        end,
        pd,
        cq,
        memory,
        mr,
        qp,
        id,
    };
    to_state(w, &side, QpState::Init);
    (side, number)
}

fn to_state<W: World>(w: &mut W, side: &Side, state: QpState) {
    let p = w.provider(side.end);
    let attr = p.init_qp_attr(side.id, state).unwrap();
    assert_eq!(attr.state, Some(state));
    p.modify_qp(side.qp, &attr).unwrap();
}

pub(crate) fn owner_can_transition_qp_states<W: World>(mut w: W) {
    let w = &mut w;
    let _listener = listen(w, End::B, 4000);
    let id = resolve(w, 4000);
    let wrong =
        |r: Result<(), CmError>| assert!(matches!(r, Err(CmError::InvalidState(_))), "{r:?}");
    let p = w.provider(End::A);
    // The identifier has no queue pair, and no number was passed.
    wrong(p.connect(id, &param(b"")));
    wrong(p.init_qp_attr(id, QpState::Rtr).map(drop));
    wrong(p.establish(id));
    let none = p.init_qp_attr(id, QpState::Sqd);
    assert_eq!(
        none,
        Err(VerbsError::InvalidParameter("queue pair state").into())
    );
    let (a, number_a) = with_own_qp(w, End::A, id);
    let numbered = |qp_num, data: &[u8]| ConnParam {
        qp_num,
        ..param(data)
    };
    w.provider(End::A)
        .connect(id, &numbered(number_a, b"hello"))
        .unwrap();
    let request = cm_event(w, End::B);
    let CmEventKind::ConnectRequest { param: said, .. } = request.kind else {
        panic!("{request:?}");
    };
    assert_eq!(said.qp_num, number_a);
    wrong(w.provider(End::B).accept(request.id, &param(b"")));
    let (b, number_b) = with_own_qp(w, End::B, request.id);
    for state in [QpState::Rtr, QpState::Rts] {
        to_state(w, &b, state);
    }
    w.provider(End::B)
        .accept(request.id, &numbered(number_b, b"welcome"))
        .unwrap();
    let event = cm_event(w, End::A);
    let CmEventKind::ConnectResponse { param: said } = event.kind else {
        panic!("{event:?}");
    };
    assert_eq!((said.qp_num, event.id), (number_b, id));
    assert_eq!(&said.private_data[..8], b"welcome\0");
    // This exceeds the default response timeout of the passive side.
    w.pass(Duration::from_secs(1));
    assert_eq!(w.provider(End::B).poll_cm_event(), None);
    for state in [QpState::Rtr, QpState::Rts] {
        to_state(w, &a, state);
    }
    w.provider(End::A).establish(id).unwrap();
    wrong(w.provider(End::A).establish(id));
    let event = cm_event(w, End::B);
    assert!(matches!(event.kind, CmEventKind::Established { .. }));
    assert_eq!(w.provider(End::A).poll_cm_event(), None);
    b.recv(w, 1, 0, 8);
    a.send(w, 2, SendOp::Send, 0, 8);
    assert!(a.completion(w).status.is_ok() && b.completion(w).status.is_ok());
    w.provider(End::B).disconnect(request.id).unwrap();
    for (end, id) in [(End::A, id), (End::B, request.id)] {
        let event = cm_event(w, end);
        assert_eq!((event.id, event.kind), (id, CmEventKind::Disconnected));
        // Only its owner transitions the queue pair.
        let qp = if end == End::A { a.qp } else { b.qp };
        let state = w.provider(end).query_qp(qp).unwrap().state;
        assert_eq!(state, Some(QpState::Rts));
    }
    for end in [End::A, End::B] {
        assert_eq!(cm_event(w, end).kind, CmEventKind::TimewaitExit);
    }
}

pub(crate) fn qp_owner_can_reject_reply<W: World>(mut w: W) {
    let w = &mut w;
    let _listener = listen(w, End::B, 4000);
    for by_call in [true, false] {
        let id = resolve(w, 4000);
        let own = ConnParam {
            qp_num: 77,
            ..param(b"")
        };
        w.provider(End::A).connect(id, &own).unwrap();
        let request = cm_event(w, End::B).id;
        create_cm_qp(w, End::B, request);
        w.provider(End::B).accept(request, &param(b"")).unwrap();
        let event = cm_event(w, End::A);
        assert!(matches!(event.kind, CmEventKind::ConnectResponse { .. }));
        let p = w.provider(End::A);
        match by_call {
            true => p.reject(id, b"no thanks").unwrap(),
            false => p.disconnect(id).unwrap(),
        }
        let event = cm_event(w, End::B);
        assert!(
            matches!(event.kind, CmEventKind::Rejected { .. }),
            "{event:?}"
        );
    }
}

pub(crate) fn vendor_options_reach_peer<W: World>(mut w: W) {
    let w = &mut w;
    let _listener = listen(w, End::B, 4000);
    let id = resolve(w, 4000);
    let ece = |options| Ece {
        vendor_id: 0x00ab_cdef,
        options,
    };
    let own = ConnParam {
        qp_num: 77,
        ece: ece(0xf0f0_0001),
        ..param(b"")
    };
    w.provider(End::A).connect(id, &own).unwrap();
    let request = cm_event(w, End::B);
    let CmEventKind::ConnectRequest { param: said, .. } = request.kind else {
        panic!("{request:?}");
    };
    assert_eq!(said.ece, own.ece);
    let reply = ConnParam {
        qp_num: 78,
        ece: ece(1),
        ..param(b"")
    };
    w.provider(End::B).accept(request.id, &reply).unwrap();
    let event = cm_event(w, End::A);
    let CmEventKind::ConnectResponse { param: said } = event.kind else {
        panic!("{event:?}");
    };
    assert_eq!(said.ece, reply.ece);
}

pub(crate) fn vendor_options_are_rejected_with_reason<W: World>(mut w: W) {
    let w = &mut w;
    let _listener = listen(w, End::B, 4000);
    let id = resolve(w, 4000);
    create_cm_qp(w, End::A, id);
    w.provider(End::A).connect(id, &param(b"")).unwrap();
    let request = cm_event(w, End::B).id;
    w.provider(End::B).reject_ece(request, b"other").unwrap();
    let CmEventKind::Rejected {
        reason,
        private_data,
    } = cm_event(w, End::A).kind
    else {
        panic!("not refused");
    };
    assert_eq!((reason, &private_data[..6]), (35, &b"other\0"[..]));
    let datagrams = w.provider(End::A).create_id(PortSpace::Udp).unwrap();
    let refused = w.provider(End::A).reject_ece(datagrams, b"");
    assert!(matches!(refused, Err(CmError::InvalidState(_))));
}

pub(crate) fn timewait_only_follows_connection<W: World>(mut w: W) {
    let w = &mut w;
    let _listener = listen(w, End::B, 4000);
    let id = resolve(w, 4000);
    create_cm_qp(w, End::A, id);
    w.provider(End::A).connect(id, &param(b"")).unwrap();
    let request = cm_event(w, End::B).id;
    create_cm_qp(w, End::B, request);
    w.provider(End::B).accept(request, &param(b"")).unwrap();
    // Cancel before the other side has received the request.
    w.provider(End::A).destroy_id(id).unwrap();
    let event = cm_event(w, End::B);
    if w.is_rdma_core(End::A) && matches!(event.kind, CmEventKind::Established { .. }) {
        // A library thread has replied first.
        return;
    }
    assert!(
        matches!(
            event.kind,
            CmEventKind::Rejected { .. } | CmEventKind::Unreachable
        ),
        "{event:?}"
    );
    w.pass(Duration::from_secs(3));
    for end in [End::A, End::B] {
        assert_eq!(w.provider(end).poll_cm_event(), None);
    }
}

pub(crate) fn full_backlog_delays_requests<W: World>(mut w: W) {
    let w = &mut w;
    let addr = SocketAddr::new(w.addr(End::B), 4000);
    let p = w.provider(End::B);
    let listener = p.create_id(PortSpace::Tcp).unwrap();
    p.bind_addr(listener, addr).unwrap();
    p.listen(listener, 1).unwrap();
    let mut ids = Vec::new();
    for _ in 0..2 {
        let id = resolve(w, 4000);
        let (pd, cq, m, _) = objects(w, End::A, &Wants::default());
        let init = init_attr(pd, cq, &Wants::default());
        w.provider(End::A).create_cm_qp(id, &init).unwrap();
        w.provider(End::A).connect(id, &param(b"")).unwrap();
        ids.push((id, m));
    }
    let first = cm_event(w, End::B).id;
    w.pass(Duration::from_millis(50));
    if w.is_rdma_core(End::B) {
        // A kernel only counts requests that it has not reported yet, and so does our own library.
        return;
    }
    assert_eq!(w.poll_cm_event(End::B), None);
    w.provider(End::B).reject(first, b"").unwrap();
    // The second request is retransmitted, and now there is room.
    let second = cm_event(w, End::B);
    assert!(matches!(second.kind, CmEventKind::ConnectRequest { .. }));
    w.provider(End::B).mra(second.id).unwrap();
    w.provider(End::B).destroy_id(second.id).unwrap();
    for _ in 0..2 {
        let event = cm_event(w, End::A);
        assert!(
            matches!(event.kind, CmEventKind::Rejected { .. }),
            "{event:?}"
        );
    }
}

pub(crate) fn destroying_listener_rejects_pending_requests<W: World>(mut w: W) {
    let w = &mut w;
    let listener = listen(w, End::B, 4000);
    let id = resolve(w, 4000);
    create_cm_qp(w, End::A, id);
    w.provider(End::A).connect(id, &param(b"")).unwrap();
    w.pass(Duration::from_millis(20));
    w.provider(End::B).destroy_id(listener).unwrap();
    assert_eq!(w.poll_cm_event(End::B), None);
    let event = cm_event(w, End::A);
    assert!(
        matches!(event.kind, CmEventKind::Rejected { .. }),
        "{event:?}"
    );
}

/// Checks that all resources are released in each cycle.
pub(crate) fn connections_come_and_go<W: World>(mut w: W) {
    let w = &mut w;
    let _listener = listen(w, End::B, 4000);
    let wants = Wants {
        region: 4096,
        ..Wants::default()
    };
    let mut numbers = std::collections::HashSet::new();
    for cycle in 0..100 {
        let (a, b) = connect_to(w, 4000, &wants, &wants);
        let number = w.provider(End::A).qp_num(a.qp).unwrap();
        assert!(
            numbers.insert(number) || w.is_siw(End::A),
            "a number was reused"
        );
        b.recv(w, 1, 0, 64);
        a.send(w, 1, SendOp::Send, 0, 64);
        assert!(a.completion(w).status.is_ok() && b.completion(w).status.is_ok());
        let (first, second) = if cycle % 2 == 0 { (&a, &b) } else { (&b, &a) };
        w.provider(first.end).disconnect(first.id).unwrap();
        assert_eq!(cm_event(w, second.end).kind, CmEventKind::Disconnected);
        assert_eq!(cm_event(w, first.end).kind, CmEventKind::Disconnected);
        for side in [a, b] {
            let p = w.provider(side.end);
            p.destroy_id(side.id).unwrap();
            p.destroy_qp(side.qp).unwrap();
            p.dereg_mr(side.mr.id).unwrap();
            p.destroy_cq(side.cq).unwrap();
            p.dealloc_pd(side.pd).unwrap();
        }
    }
}

pub(crate) fn data_before_rtu_establishes<W: World>(mut w: W) {
    // The active side may send as soon as it is connected. In either order, both sides are notified
    // exactly once.
    let w = &mut w;
    for port in 4000..4010 {
        let (a, b) = connect_on(w, port, &Wants::default(), &Wants::default());
        b.recv(w, 1, 0, 8);
        a.send(w, 1, SendOp::Send, 0, 8);
        assert!(b.completion(w).status.is_ok());
        assert_eq!(w.poll_cm_event(End::B), None);
    }
}

pub(crate) fn local_qp_error_keeps_peer_connected<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let error = QpAttr::to(QpState::Error);
    w.provider(End::A).modify_qp(a.qp, &error).unwrap();
    w.pass(Duration::from_millis(20));
    assert_eq!(w.poll_cm_event(End::B), None);
    w.provider(End::A).disconnect(a.id).unwrap();
    assert_eq!(cm_event(w, End::B).kind, CmEventKind::Disconnected);
    let _ = b;
}
