//! Scripts for each state: inputs, expected outputs and explicit time.

use super::*;
use crate::wire::cm_msg::{CmAttribute, MraOf};

fn rej(pair: &mut Pair, id: IbCmId, passive: bool, reason: RejReason) {
    let (info, data) = (
        AdditionalInfo::default(),
        PrivateData::new(&[0xdd]).unwrap(),
    );
    let cm = if passive { &mut pair.p } else { &mut pair.a };
    cm.send_rej(pair.now, id, reason, info, data).unwrap();
}

/// Returns the single MAD in the outbox.
fn only(cm: &mut Cm) -> (PeerAddr, CmMessage, Mad) {
    let (to, mad) = cm.poll_transmit().expect("a MAD");
    assert_eq!(cm.poll_transmit(), None);
    (to, CmMessage::parse(&mad).unwrap().1, mad)
}

const INTERVAL: Duration = Duration::from_nanos(4096 << 15);
const TIMEWAIT: Duration = Duration::from_nanos(4096 << 14);

#[test]
fn watched_connection_reports_its_dreq() {
    let mut pair = Pair::new();
    pair.a.watch_connections();
    let ids = pair.established();
    assert_eq!(pair.p.poll_connection(), None);
    let (id, dreq) = pair.a.poll_connection().unwrap();
    assert_eq!(id, ids.a.comm_id());
    // Another process sends it.
    let (to, dreq) = dreq.unwrap();
    assert_eq!(to, addr(2));
    pair.p.handle_mad(pair.now, addr(1), &dreq).unwrap();
    assert!(matches!(pair.p_event(), IbCmEventKind::DreqReceived { .. }));
    // A connection that is closed before it is polled is not reported as established.
    let mut pair = Pair::new();
    pair.a.watch_connections();
    let ids = pair.established();
    pair.a.destroy(pair.now, ids.a).unwrap();
    for _ in 0..2 {
        let closed = Some((ids.a.comm_id(), None));
        assert_eq!(pair.a.poll_connection(), closed);
    }
    assert_eq!(pair.a.poll_connection(), None);
}

#[test]
pub(super) fn connection_is_established_and_closed() {
    let mut pair = Pair::new();
    let ids = pair.established();
    pair.a
        .send_dreq(pair.now, ids.a, PrivateData::new(&[1]).unwrap())
        .unwrap();
    assert_eq!(pair.states(ids), (CmState::DreqSent, CmState::Established));
    pair.a_to_p();
    let IbCmEventKind::DreqReceived { private_data } = pair.p_event() else {
        panic!()
    };
    assert_eq!(
        (private_data[0], pair.p.state(ids.p)),
        (1, CmState::DreqRcvd)
    );
    pair.p
        .send_drep(pair.now, ids.p, PrivateData::new(&[2]).unwrap())
        .unwrap();
    pair.p_to_a();
    let IbCmEventKind::DrepReceived { private_data } = pair.a_event() else {
        panic!()
    };
    assert_eq!(private_data[0], 2);
    assert_eq!(pair.states(ids), (CmState::Timewait, CmState::Timewait));
    pair.pass(TIMEWAIT - Duration::from_nanos(1));
    assert_eq!(pair.states(ids), (CmState::Timewait, CmState::Timewait));
    pair.pass(Duration::from_nanos(1));
    assert_eq!(
        (pair.a_event(), pair.p_event()),
        (IbCmEventKind::TimewaitExit, IbCmEventKind::TimewaitExit)
    );
    pair.assert_clean();
}

#[test]
pub(super) fn events_contain_qp_attributes() {
    let mut pair = Pair::new();
    pair.req_sent();
    pair.a_to_p();
    let event = pair.p.poll_event().unwrap();
    let IbCmEventKind::ReqReceived { peer, qp, req, .. } = event.kind else {
        panic!()
    };
    assert_eq!(
        (peer, qp.dest_qpn.value(), qp.sq_psn.value()),
        (addr(1), 0x11, 0x111)
    );
    assert_eq!(
        (
            qp.path_mtu,
            qp.retry_count.value(),
            qp.rnr_retry_count.value()
        ),
        (Mtu::Mtu1024, 6, 3)
    );
    assert_eq!((qp.responder_resources, qp.initiator_depth), (4, 5));
    assert_eq!(
        (qp.path.local_gid.ip(), qp.path.remote_gid.ip()),
        (addr(2), addr(1))
    );
    assert_eq!(
        (qp.path.ack_timeout.exponent(), qp.flow_control, qp.srq),
        (14, true, false)
    );
    assert_eq!(req.private_data[0], 0x11);

    pair.p
        .send_rep(pair.now, event.id, &rep_params(0x22))
        .unwrap();
    pair.p_to_a();
    let IbCmEventKind::RepReceived { qp, rep } = pair.a_event() else {
        panic!()
    };
    assert_eq!((qp.dest_qpn.value(), qp.sq_psn.value()), (0x22, 0x222));
    assert_eq!(
        (
            qp.path_mtu,
            qp.retry_count.value(),
            qp.rnr_retry_count.value()
        ),
        (Mtu::Mtu1024, 6, 5)
    );
    assert_eq!((qp.responder_resources, qp.initiator_depth), (2, 3));
    assert_eq!(
        (qp.path.local_gid.ip(), qp.path.remote_gid.ip()),
        (addr(1), addr(2))
    );
    assert_eq!((rep.private_data[0], qp.srq), (0xbb, true));
}

#[test]
pub(super) fn xrc_connection_matches_linux() {
    let mut pair = Pair::new();
    let params = ReqParams {
        qp_type: QpType::XrcIni,
        ..req_params(1, 2, ACTIVE_QPN)
    };
    let a = pair.a.send_req(pair.now, addr(2), &params).unwrap();
    let (_, message, mad) = only(&mut pair.a);
    let CmMessage::Req(req) = message else {
        panic!("{message:?}")
    };
    // The initiator doesn't process any requests, and the target doesn't send any.
    assert_eq!(
        (req.transport, req.extended_transport.value()),
        (TransportType::Extended, 1)
    );
    assert_eq!((req.responder_resources, req.initiator_depth), (0, 5));
    assert_eq!(
        (req.retry_count.value(), req.rnr_retry_count.value()),
        (0, 0)
    );
    pair.p.handle_mad(pair.now, addr(1), &mad).unwrap();
    let event = pair.p.poll_event().unwrap();
    let IbCmEventKind::ReqReceived { qp, .. } = event.kind else {
        panic!()
    };
    assert_eq!(
        (qp.qp_type, qp.dest_qpn.value()),
        (QpType::XrcTgt, ACTIVE_QPN)
    );
    let rep = rep_params(PASSIVE_QPN);
    pair.p.send_rep(pair.now, event.id, &rep).unwrap();
    let (_, message, mad) = only(&mut pair.p);
    let CmMessage::Rep(rep) = message else {
        panic!("{message:?}")
    };
    // The number uses the field for the context of a reliable datagram service.
    assert_eq!((rep.qpn.value(), rep.eecn.value()), (0, PASSIVE_QPN));
    assert_eq!((rep.responder_resources, rep.initiator_depth), (2, 0));
    assert!(rep.srq && !rep.flow_control);
    pair.a.handle_mad(pair.now, addr(2), &mad).unwrap();
    let IbCmEventKind::RepReceived { qp, .. } = pair.a_event() else {
        panic!()
    };
    // The retry counts are set by the caller.
    assert_eq!(
        (qp.qp_type, qp.dest_qpn.value()),
        (QpType::XrcIni, PASSIVE_QPN)
    );
    assert_eq!((qp.retry_count.value(), qp.responder_resources), (6, 2));
    pair.a.send_rtu(a, PrivateData::default()).unwrap();
    pair.a_to_p();
    assert!(matches!(pair.p_event(), IbCmEventKind::RtuReceived { .. }));
    // A DREQ contains the target's number.
    pair.a
        .send_dreq(pair.now, a, PrivateData::default())
        .unwrap();
    pair.a_to_p();
    assert!(matches!(pair.p_event(), IbCmEventKind::DreqReceived { .. }));
}

#[test]
pub(super) fn vendor_options_are_exchanged() {
    let mut pair = Pair::new();
    let ece = |options| Ece {
        vendor_id: 0x15b3,
        options,
    };
    let params = ReqParams {
        ece: ece(0xdead_beef),
        ..req_params(1, 2, ACTIVE_QPN)
    };
    pair.a.send_req(pair.now, addr(2), &params).unwrap();
    pair.a_to_p();
    let event = pair.p.poll_event().unwrap();
    let IbCmEventKind::ReqReceived { req, .. } = event.kind else {
        panic!()
    };
    assert_eq!(
        (req.vendor_id.value(), req.vendor_options),
        (0x15b3, 0xdead_beef)
    );
    let params = RepParams {
        ece: ece(0xbeef),
        ..rep_params(PASSIVE_QPN)
    };
    pair.p.send_rep(pair.now, event.id, &params).unwrap();
    pair.p_to_a();
    let IbCmEventKind::RepReceived { rep, .. } = pair.a_event() else {
        panic!()
    };
    assert_eq!(
        (rep.vendor_id.value(), rep.vendor_options),
        (0x15b3, 0xbeef)
    );
}

#[test]
pub(super) fn req_is_retried_then_times_out() {
    let mut pair = Pair::new();
    let id = pair.req_sent();
    let (_, _, first) = only(&mut pair.a);
    for _ in 0..3 {
        pair.pass(INTERVAL - Duration::from_nanos(1));
        assert_eq!(pair.a.poll_transmit(), None);
        pair.pass(Duration::from_nanos(1));
        assert_eq!(only(&mut pair.a).2, first);
    }
    pair.pass(INTERVAL);
    let (_, CmMessage::Rej(rej), _) = only(&mut pair.a) else {
        panic!()
    };
    assert_eq!(
        (rej.reason, rej.local_comm_id, rej.remote_comm_id),
        (RejReason::Timeout, id.comm_id(), CommId(0))
    );
    assert_eq!(*rej.info, [0, 0, 0, 0, 0, 0, 0, 1]);
    assert_eq!(pair.a_event(), IbCmEventKind::ReqTimeout);
    pair.assert_clean();
}

#[test]
pub(super) fn timed_out_peer_cancels_request() {
    let mut pair = Pair::new();
    let ids = pair.req_rcvd();
    pair.pass(4 * INTERVAL);
    pair.pass(4 * INTERVAL);
    pair.pass(4 * INTERVAL);
    pair.pass(4 * INTERVAL);
    assert_eq!(pair.a_event(), IbCmEventKind::ReqTimeout);
    pair.a_to_p();
    let IbCmEventKind::RejReceived {
        reason, timewait, ..
    } = pair.p_event()
    else {
        panic!()
    };
    assert_eq!(
        (reason, timewait, pair.p.state(ids.p)),
        (RejReason::Timeout, false, CmState::Idle)
    );
    pair.assert_clean();
}

#[test]
pub(super) fn missing_listener_rejects_request() {
    let mut pair = Pair::new();
    let mut params = req_params(1, 2, 0x11);
    params.service_id = ServiceId(0x0106_0001);
    pair.a.send_req(pair.now, addr(2), &params).unwrap();
    pair.a_to_p();
    pair.p_to_a();
    let IbCmEventKind::RejReceived {
        message,
        reason,
        timewait,
        ..
    } = pair.a_event()
    else {
        panic!()
    };
    assert_eq!(
        (message, reason, timewait),
        (RejOf::Req, RejReason::InvalidServiceId, false)
    );
    pair.assert_clean();
}

#[test]
pub(super) fn listener_masks_select_service_ids() {
    let mut cm = machine(1, 1);
    let range = cm
        .listen(ServiceId(0x0106_0000), 0xffff_ffff_ffff_0000, 1)
        .unwrap();
    assert_eq!(
        cm.listen(ServiceId(0x0106_1234), u64::MAX, 1),
        Err(IbCmError::ServiceIdInUse)
    );
    let other = cm.listen(ServiceId(0x0107_1234), u64::MAX, 1).unwrap();
    assert_eq!(cm.listeners.find(ServiceId(0x0106_ffff)), Some(range));
    assert_eq!(cm.listeners.find(ServiceId(0x0107_1234)), Some(other));
    assert_eq!(cm.listeners.find(ServiceId(0x0107_1235)), None);
    assert_eq!(cm.state(range), CmState::Listen);
    cm.destroy(Instant::now(), range).unwrap();
    assert_eq!(
        (cm.listeners.find(ServiceId(0x0106_ffff)), cm.state(range)),
        (None, CmState::Idle)
    );
    assert_eq!(cm.destroy(Instant::now(), range), Err(IbCmError::NoSuchId));
}

#[test]
fn unused_service_ids_are_assigned() {
    let mut cm = machine(1, 1);
    let [first, second] = [(); 2].map(|()| cm.listen(ServiceId::ASSIGN, 0, 1).unwrap());
    let ids = [first, second].map(|id| cm.service_id(id).unwrap());
    assert_ne!(ids[0], ids[1]);
    for (listener, (service_id, mask)) in [first, second].into_iter().zip(ids) {
        assert_eq!((service_id.0 >> 56, mask), (2, u64::MAX));
        assert_ne!(service_id, ServiceId::ASSIGN);
        assert_eq!(cm.listeners.find(service_id), Some(listener));
        let again = cm.listen(service_id, u64::MAX, 1);
        assert_eq!(again, Err(IbCmError::ServiceIdInUse));
    }
    cm.destroy(Instant::now(), first).unwrap();
    assert_eq!(cm.service_id(first), Err(IbCmError::NoSuchId));
    // An ID of this kind can also be selected by its user.
    let selected = ServiceId(ServiceId::ASSIGN.0 | 7);
    let listener = cm.listen(selected, u64::MAX, 1).unwrap();
    assert_eq!(cm.service_id(listener), Ok((selected, u64::MAX)));
}

#[test]
pub(super) fn invalid_reqs_are_rejected_with_reason() {
    let refused = |change: &dyn Fn(&mut ReqMsg)| {
        let mut pair = Pair::new();
        pair.req_sent();
        let (_, CmMessage::Req(mut req), _) = only(&mut pair.a) else {
            panic!()
        };
        change(&mut req);
        pair.p
            .handle_mad(
                pair.now,
                addr(1),
                &CmMessage::Req(req).emit(TransactionId(7)),
            )
            .unwrap();
        assert_eq!(pair.p.id_count(), 1);
        let (_, CmMessage::Rej(rej), _) = only(&mut pair.p) else {
            panic!()
        };
        assert_eq!(
            (rej.message, rej.remote_comm_id),
            (RejOf::Req, req.local_comm_id)
        );
        rej.reason
    };
    assert_eq!(refused(&|req| req.path_mtu = None), RejReason::InvalidMtu);
    assert_eq!(
        refused(&|req| req.transport = TransportType::Rd),
        RejReason::InvalidTransportType
    );
    assert_eq!(
        refused(&|req| req.primary.local_gid = Gid::from(addr(9))),
        RejReason::InvalidGid
    );
    assert_eq!(refused(&|req| req.qpn = Qpn::GSI), RejReason::Unsupported);
}

#[test]
pub(super) fn rej_is_repeated_for_duplicate_req() {
    let mut pair = Pair::new();
    let ids = pair.req_rcvd();
    rej(&mut pair, ids.p, true, RejReason::ConsumerDefined);
    assert_eq!(
        pair.p.send_rep(pair.now, ids.p, &rep_params(1)),
        Err(IbCmError::NoSuchId)
    );
    let (_, _, lost) = only(&mut pair.p);
    pair.pass(INTERVAL);
    assert_eq!(pair.a_to_p(), 1);
    let (_, _, again) = only(&mut pair.p);
    assert_eq!(lost, again);
    pair.a.handle_mad(pair.now, addr(2), &again).unwrap();
    let IbCmEventKind::RejReceived {
        reason,
        private_data,
        ..
    } = pair.a_event()
    else {
        panic!()
    };
    assert_eq!(
        (reason, private_data[0]),
        (RejReason::ConsumerDefined, 0xdd)
    );
    pair.pass(2 * INTERVAL);
    pair.assert_clean();
}

#[test]
pub(super) fn rep_can_be_rejected_and_canceled() {
    let mut pair = Pair::new();
    let ids = pair.rep_rcvd();
    rej(&mut pair, ids.a, false, RejReason::NoResources);
    pair.a_to_p();
    let IbCmEventKind::RejReceived {
        message, timewait, ..
    } = pair.p_event()
    else {
        panic!()
    };
    assert_eq!(
        (message, timewait, pair.p.state(ids.p)),
        (RejOf::Rep, true, CmState::Timewait)
    );
    pair.pass(2 * INTERVAL);
    assert_eq!(pair.p_event(), IbCmEventKind::TimewaitExit);
    pair.assert_clean();

    let ids = pair.rep_rcvd();
    rej(&mut pair, ids.p, true, RejReason::ConsumerDefined);
    pair.p_to_a();
    let IbCmEventKind::RejReceived {
        message, timewait, ..
    } = pair.a_event()
    else {
        panic!()
    };
    assert_eq!((message, timewait), (RejOf::NoMessage, true));
    pair.pass(2 * INTERVAL);
    assert_eq!(pair.a_event(), IbCmEventKind::TimewaitExit);
    pair.assert_clean();
}

#[test]
pub(super) fn mra_extends_timeout_on_both_sides() {
    let mut pair = Pair::new();
    let ids = pair.req_rcvd();
    let service = CmTimeout::new(20);
    pair.p
        .send_mra(ids.p, service, PrivateData::default())
        .unwrap();
    assert_eq!(pair.p.state(ids.p), CmState::MraReqSent);
    pair.p_to_a();
    assert_eq!(pair.a.state(ids.a), CmState::MraReqRcvd);
    assert!(matches!(
        pair.a_event(),
        IbCmEventKind::MraReceived {
            message: MraOf::Req,
            ..
        }
    ));
    assert_eq!(
        pair.a.poll_timeout(),
        Some(pair.now + service.duration() + INTERVAL)
    );
    pair.pass(service.duration());
    assert_eq!(pair.a.poll_transmit(), None);
    // After the timeout, both the request and the MRA are sent again, but the MRA is ignored.
    pair.pass(INTERVAL);
    assert_eq!(pair.a_to_p(), 1);
    assert_eq!(pair.p_to_a(), 1);
    assert_eq!(pair.a.poll_timeout(), Some(pair.now + INTERVAL));

    pair.p
        .send_rep(pair.now, ids.p, &rep_params(PASSIVE_QPN))
        .unwrap();
    pair.p_to_a();
    assert!(matches!(pair.a_event(), IbCmEventKind::RepReceived { .. }));
    pair.a
        .send_mra(ids.a, service, PrivateData::default())
        .unwrap();
    assert_eq!(pair.a.state(ids.a), CmState::MraRepSent);
    pair.a_to_p();
    assert!(matches!(
        pair.p_event(),
        IbCmEventKind::MraReceived {
            message: MraOf::Rep,
            ..
        }
    ));
    assert_eq!(pair.p.state(ids.p), CmState::MraRepRcvd);
    pair.a.send_rtu(ids.a, PrivateData::default()).unwrap();
    pair.a_to_p();
    assert!(matches!(pair.p_event(), IbCmEventKind::RtuReceived { .. }));
    assert_eq!(
        pair.states(ids),
        (CmState::Established, CmState::Established)
    );
}

#[test]
pub(super) fn lost_rep_is_repeated_for_duplicate_req() {
    let mut pair = Pair::new();
    let ids = pair.rep_sent();
    let (_, _, lost) = only(&mut pair.p);
    // Only advance the time on the active side.
    pair.now += INTERVAL;
    pair.a.handle_timeout(pair.now);
    pair.a_to_p();
    assert_eq!(only(&mut pair.p).2, lost);
    assert_eq!(pair.p.state(ids.p), CmState::RepSent);
}

#[test]
pub(super) fn lost_rtu_is_repeated_for_duplicate_rep() {
    let mut pair = Pair::new();
    let ids = pair.rep_rcvd();
    pair.a.send_rtu(ids.a, PrivateData::default()).unwrap();
    let (_, _, lost) = only(&mut pair.a);
    pair.pass(INTERVAL);
    assert_eq!(pair.p_to_a(), 1);
    assert_eq!(only(&mut pair.a).2, lost);
    pair.p.handle_mad(pair.now, addr(1), &lost).unwrap();
    assert!(matches!(pair.p_event(), IbCmEventKind::RtuReceived { .. }));
    pair.p.handle_mad(pair.now, addr(1), &lost).unwrap();
    assert_eq!(
        (pair.p.poll_event(), pair.states(ids).1),
        (None, CmState::Established)
    );
}

#[test]
pub(super) fn data_before_rtu_establishes_connection() {
    let mut pair = Pair::new();
    let ids = pair.rep_rcvd();
    pair.a.send_rtu(ids.a, PrivateData::default()).unwrap();
    pair.p.establish(pair.now, ids.p).unwrap();
    assert_eq!(pair.p.state(ids.p), CmState::Established);
    assert_eq!(pair.p.poll_timeout(), None);
    assert_eq!(
        pair.p.establish(pair.now, ids.p),
        Err(IbCmError::State {
            state: CmState::Established
        })
    );
    pair.a_to_p();
    assert_eq!(pair.p.poll_event(), None);
}

#[test]
pub(super) fn passive_side_without_rtu_times_out() {
    let mut pair = Pair::new();
    let ids = pair.rep_rcvd();
    pair.a.send_rtu(ids.a, PrivateData::default()).unwrap();
    pair.a.poll_transmit();
    for _ in 0..3 {
        pair.pass(INTERVAL);
        assert_eq!(only(&mut pair.p).1.attribute(), CmAttribute::Rep);
    }
    pair.pass(INTERVAL);
    assert_eq!(
        (pair.p_event(), pair.p.state(ids.p)),
        (IbCmEventKind::RepTimeout, CmState::Timewait)
    );
    pair.p_to_a();
    let IbCmEventKind::RejReceived {
        reason, timewait, ..
    } = pair.a_event()
    else {
        panic!()
    };
    assert_eq!(
        (reason, timewait, pair.a.state(ids.a)),
        (RejReason::Timeout, true, CmState::Timewait)
    );
    pair.pass(TIMEWAIT);
    pair.a_event();
    pair.p_event();
    pair.assert_clean();
}

#[test]
pub(super) fn dreq_before_rtu_is_handled() {
    let mut pair = Pair::new();
    let ids = pair.rep_rcvd();
    pair.a.send_rtu(ids.a, PrivateData::default()).unwrap();
    pair.a.poll_transmit();
    pair.a
        .send_dreq(pair.now, ids.a, PrivateData::default())
        .unwrap();
    pair.a_to_p();
    assert!(matches!(pair.p_event(), IbCmEventKind::DreqReceived { .. }));
    assert_eq!(pair.p.state(ids.p), CmState::DreqRcvd);
}

#[test]
pub(super) fn simultaneous_dreqs_close_connection() {
    let mut pair = Pair::new();
    let ids = pair.established();
    pair.a
        .send_dreq(pair.now, ids.a, PrivateData::default())
        .unwrap();
    pair.p
        .send_dreq(pair.now, ids.p, PrivateData::default())
        .unwrap();
    pair.a_to_p();
    pair.p_to_a();
    pair.a_to_p();
    assert!(matches!(pair.a_event(), IbCmEventKind::DrepReceived { .. }));
    assert!(matches!(pair.p_event(), IbCmEventKind::DrepReceived { .. }));
    assert_eq!(pair.states(ids), (CmState::Timewait, CmState::Timewait));
    pair.pass(TIMEWAIT);
    pair.a_event();
    pair.p_event();
    pair.assert_clean();
}

#[test]
pub(super) fn lost_drep_is_repeated_even_if_removed() {
    let mut pair = Pair::new();
    let ids = pair.established();
    pair.a
        .send_dreq(pair.now, ids.a, PrivateData::default())
        .unwrap();
    pair.a_to_p();
    pair.p_event();
    pair.p
        .send_drep(pair.now, ids.p, PrivateData::new(&[9]).unwrap())
        .unwrap();
    let (_, _, lost) = only(&mut pair.p);
    pair.now += INTERVAL;
    pair.a.handle_timeout(pair.now);
    pair.a_to_p();
    assert_eq!(only(&mut pair.p).2, lost);
    // The passive side has removed the connection but must still respond to a DREQ.
    pair.now += INTERVAL;
    pair.p.handle_timeout(pair.now);
    assert_eq!(pair.p.state(ids.p), CmState::Idle);
    pair.a.handle_timeout(pair.now);
    pair.a_to_p();
    pair.p_to_a();
    assert!(matches!(pair.a_event(), IbCmEventKind::DrepReceived { .. }));
}

#[test]
pub(super) fn dreq_uses_shorter_retry_interval() {
    let mut pair = Pair::new();
    let ids = pair.established();
    pair.a.conn_mut(ids.a).interval = Duration::from_millis(1500);
    pair.a
        .send_dreq(pair.now, ids.a, PrivateData::default())
        .unwrap();
    for wait in [250, 500, 1000] {
        only(&mut pair.a);
        let wait = Duration::from_millis(wait);
        assert_eq!(pair.a.poll_timeout(), Some(pair.now + wait));
        pair.pass(wait);
    }
    only(&mut pair.a);
    let longest = Duration::from_millis(1500);
    assert_eq!(pair.a.poll_timeout(), Some(pair.now + longest));
}

#[test]
pub(super) fn unanswered_dreq_closes_connection() {
    let mut pair = Pair::new();
    let ids = pair.established();
    pair.a
        .send_dreq(pair.now, ids.a, PrivateData::default())
        .unwrap();
    for _ in 0..4 {
        assert_eq!(only(&mut pair.a).1.attribute(), CmAttribute::Dreq);
        pair.pass(INTERVAL);
    }
    assert_eq!(
        (pair.a_event(), pair.a.state(ids.a)),
        (IbCmEventKind::DreqTimeout, CmState::Timewait)
    );
}

/// Sends a request from host 1 using the same values as one of its old connections until it is
/// established. Returns the new connection on the passive side.
fn reconnect(pair: &mut Pair, old: Ids, mad: &Mad, reborn: &mut Cm) -> IbCmId {
    pair.p.handle_mad(pair.now, addr(1), mad).unwrap();
    let event = pair.p.poll_event().unwrap();
    assert!(matches!(event.kind, IbCmEventKind::ReqReceived { .. }));
    pair.p
        .send_rep(pair.now, event.id, &rep_params(0x23))
        .unwrap();
    // The REQ may be forged at this point.
    assert_eq!(pair.p.state(old.p), CmState::Established);
    let (_, rep) = pair.p.poll_transmit().unwrap();
    reborn.handle_mad(pair.now, addr(2), &rep).unwrap();
    let id = reborn.poll_event().unwrap().id;
    reborn.send_rtu(id, PrivateData::default()).unwrap();
    let (_, rtu) = reborn.poll_transmit().unwrap();
    pair.p.handle_mad(pair.now, addr(1), &rtu).unwrap();
    assert_eq!(pair.p.state(event.id), CmState::Established);
    event.id
}

#[test]
pub(super) fn restarted_peer_reconnects_and_old_becomes_stale() {
    let mut pair = Pair::new();
    let ids = pair.established();
    // The peer was restarted and uses new IDs but the same QP number.
    let mut reborn = machine(1, 77);
    reborn
        .send_req(pair.now, addr(2), &req_params(1, 2, ACTIVE_QPN))
        .unwrap();
    let (_, req) = reborn.poll_transmit().unwrap();
    reconnect(&mut pair, ids, &req, &mut reborn);
    assert_eq!(
        (pair.p_event(), pair.p.state(ids.p)),
        (IbCmEventKind::StaleConnection, CmState::Timewait)
    );
    assert!(matches!(pair.p_event(), IbCmEventKind::RtuReceived { .. }));
}

#[test]
pub(super) fn restarted_peer_with_same_id_reconnects() {
    let mut pair = Pair::new();
    let ids = pair.established();
    // With the same seed, the communication ID is the same but the transaction and QP are
    // different.
    let mut reborn = machine(1, 1);
    let mut params = req_params(1, 2, 0x99);
    params.starting_psn = Psn::new(1);
    let id = reborn.send_req(pair.now, addr(2), &params).unwrap();
    assert_eq!(id, ids.a);
    let (_, req) = reborn.poll_transmit().unwrap();
    reconnect(&mut pair, ids, &req, &mut reborn);
    assert_eq!(
        (pair.p_event(), pair.p.state(ids.p)),
        (IbCmEventKind::StaleConnection, CmState::Timewait)
    );
}

#[test]
pub(super) fn data_before_rtu_closes_stale_connection() {
    let mut pair = Pair::new();
    let ids = pair.established();
    let mut reborn = machine(1, 77);
    reborn
        .send_req(pair.now, addr(2), &req_params(1, 2, ACTIVE_QPN))
        .unwrap();
    let (_, req) = reborn.poll_transmit().unwrap();
    pair.p.handle_mad(pair.now, addr(1), &req).unwrap();
    let id = pair.p.poll_event().unwrap().id;
    pair.p.send_rep(pair.now, id, &rep_params(0x23)).unwrap();
    pair.p.establish(pair.now, id).unwrap();
    assert_eq!(pair.p_event(), IbCmEventKind::StaleConnection);
    assert_eq!(pair.p.state(ids.p), CmState::Timewait);
}

#[test]
pub(super) fn other_adapter_at_address_closes_nothing() {
    let mut pair = Pair::new();
    let ids = pair.established();
    let mut other = Cm::new(CmConfig::new(CaGuid(0xbad)), 0, 0, [77; 32]);
    other
        .send_req(pair.now, addr(2), &req_params(1, 2, ACTIVE_QPN))
        .unwrap();
    let (_, req) = other.poll_transmit().unwrap();
    reconnect(&mut pair, ids, &req, &mut other);
    assert!(matches!(pair.p_event(), IbCmEventKind::RtuReceived { .. }));
    assert_eq!(pair.p.state(ids.p), CmState::Established);
}

#[test]
pub(super) fn simultaneous_requests_both_connect() {
    let mut pair = Pair::new();
    pair.a.listen(SERVICE, u64::MAX, 8).unwrap();
    let from_a = pair.req_sent();
    let from_p = pair
        .p
        .send_req(pair.now, addr(1), &req_params(2, 1, 0x33))
        .unwrap();
    pair.a_to_p();
    pair.p_to_a();
    let at_p = pair.p.poll_event().unwrap();
    let at_a = pair.a.poll_event().unwrap();
    pair.p
        .send_rep(pair.now, at_p.id, &rep_params(0x44))
        .unwrap();
    pair.a
        .send_rep(pair.now, at_a.id, &rep_params(0x55))
        .unwrap();
    pair.p_to_a();
    pair.a_to_p();
    pair.a.send_rtu(from_a, PrivateData::default()).unwrap();
    pair.p.send_rtu(from_p, PrivateData::default()).unwrap();
    pair.a_to_p();
    pair.p_to_a();
    for (cm, id) in [
        (&pair.a, from_a),
        (&pair.p, from_p),
        (&pair.p, at_p.id),
        (&pair.a, at_a.id),
    ] {
        assert_eq!(cm.state(id), CmState::Established);
    }
}

#[test]
pub(super) fn rep_for_unknown_request_is_rejected() {
    let mut pair = Pair::new();
    let ids = pair.rep_sent();
    pair.a.destroy(pair.now, ids.a).unwrap();
    pair.a.poll_transmit();
    pair.p_to_a();
    pair.a_to_p();
    let IbCmEventKind::RejReceived { reason, .. } = pair.p_event() else {
        panic!()
    };
    assert_eq!(
        (reason, pair.p.state(ids.p)),
        (RejReason::InvalidCommId, CmState::Timewait)
    );
}

#[test]
pub(super) fn messages_from_wrong_address_are_ignored() {
    let mut pair = Pair::new();
    let ids = pair.rep_rcvd();
    pair.a.send_rtu(ids.a, PrivateData::default()).unwrap();
    let (_, _, rtu) = only(&mut pair.a);
    pair.p.handle_mad(pair.now, addr(3), &rtu).unwrap();
    assert_eq!(
        (pair.p.state(ids.p), pair.p.counters().illegal),
        (CmState::RepSent, 1)
    );
    let (_, CmMessage::Rtu(mut forged)) = CmMessage::parse(&rtu).unwrap() else {
        panic!()
    };
    forged.local_comm_id.0 ^= 1;
    let forged = CmMessage::Rtu(forged).emit(TransactionId(0));
    pair.p.handle_mad(pair.now, addr(1), &forged).unwrap();
    assert_eq!(
        (pair.p.state(ids.p), pair.p.counters().illegal),
        (CmState::RepSent, 2)
    );
    pair.p.handle_mad(pair.now, addr(1), &rtu).unwrap();
    assert_eq!(pair.p.state(ids.p), CmState::Established);

    pair.a
        .send_dreq(pair.now, ids.a, PrivateData::default())
        .unwrap();
    let (_, CmMessage::Dreq(mut dreq), _) = only(&mut pair.a) else {
        panic!()
    };
    dreq.remote_qpn = Qpn::new(dreq.remote_qpn.value() + 1);
    pair.p
        .handle_mad(
            pair.now,
            addr(1),
            &CmMessage::Dreq(dreq).emit(TransactionId(0)),
        )
        .unwrap();
    assert_eq!(
        (pair.p.state(ids.p), pair.p.counters().illegal),
        (CmState::Established, 3)
    );
}

#[test]
pub(super) fn limits_hold() {
    let now = Instant::now();
    let mut config = CmConfig::new(CaGuid(2));
    config.max_ids = 6;
    config.max_half_open_per_peer = 3;
    let mut p = Cm::new(config, 0, 0, [2; 32]);
    p.listen(SERVICE, u64::MAX, 4).unwrap();
    let send_request = |p: &mut Cm, host: u8, qpn: u32| {
        let mut a = machine(host, qpn as u8);
        a.send_req(now, addr(2), &req_params(host, 2, qpn)).unwrap();
        let (_, mad) = a.poll_transmit().unwrap();
        p.handle_mad(now, addr(host), &mad).unwrap();
        p.poll_event().map(|event| event.id)
    };
    let ids: Vec<_> = (10..13)
        .map(|qpn| send_request(&mut p, 1, qpn).unwrap())
        .collect();
    assert_eq!(send_request(&mut p, 1, 13), None, "three of one peer");
    let fourth = send_request(&mut p, 3, 14).unwrap();
    assert_eq!(send_request(&mut p, 4, 15), None, "a backlog of four");
    assert_eq!((p.counters().dropped, p.poll_transmit()), (2, None));

    // Established connections are not counted anymore.
    for id in [ids[0], fourth] {
        p.send_rep(now, id, &rep_params(1)).unwrap();
        p.establish(now, id).unwrap();
    }
    p.poll_transmit();
    p.poll_transmit();
    assert!(send_request(&mut p, 5, 16).is_some());
    assert_eq!(p.id_count(), 6);
    assert_eq!(send_request(&mut p, 6, 17), None, "six identifiers");
    let (_, CmMessage::Rej(rej), _) = only(&mut p) else {
        panic!()
    };
    assert_eq!(rej.reason, RejReason::NoResources);
    assert_eq!(
        p.send_req(now, addr(7), &req_params(2, 7, 1)),
        Err(IbCmError::TooManyIds)
    );
    // A REJ that is only kept for retransmission can be removed.
    p.destroy(now, ids[1]).unwrap();
    p.poll_transmit();
    assert!(send_request(&mut p, 6, 18).is_some());
    assert_eq!(p.id_count(), 6);
}

#[test]
pub(super) fn destroy_closes_any_state_without_events() {
    let builders: [fn(&mut Pair) -> Ids; 4] = [
        Pair::req_rcvd,
        Pair::rep_sent,
        Pair::rep_rcvd,
        Pair::established,
    ];
    for build in builders {
        for passive_first in [false, true] {
            let mut pair = Pair::new();
            let ids = build(&mut pair);
            let now = pair.now;
            if passive_first {
                pair.p.destroy(now, ids.p).unwrap();
            } else {
                pair.a.destroy(now, ids.a).unwrap();
            }
            for _ in 0..40 {
                pair.p_to_a();
                pair.a_to_p();
                while let Some(event) = pair.p.poll_event() {
                    assert!(!passive_first, "{event:?}");
                    if matches!(event.kind, IbCmEventKind::DreqReceived { .. }) {
                        pair.p
                            .send_drep(pair.now, ids.p, PrivateData::default())
                            .unwrap();
                    }
                }
                while let Some(event) = pair.a.poll_event() {
                    assert!(passive_first, "{event:?}");
                    if matches!(event.kind, IbCmEventKind::DreqReceived { .. }) {
                        pair.a
                            .send_drep(pair.now, ids.a, PrivateData::default())
                            .unwrap();
                    }
                }
                pair.pass(TIMEWAIT);
            }
            pair.assert_clean();
        }
    }
}

#[test]
pub(super) fn comm_ids_contain_worker_number() {
    let now = Instant::now();
    for worker in 0..4 {
        let mut cm = Cm::new(CmConfig::new(CaGuid(1)), worker, 2, [worker as u8; 32]);
        let id = cm.send_req(now, addr(2), &req_params(1, 2, 5)).unwrap();
        assert_eq!(id.comm_id().0 & 3, worker);
        let (_, mad) = cm.poll_transmit().unwrap();
        assert_eq!(
            worker_of(&mad, 2),
            Some(worker),
            "a REQ by the requester's id"
        );
        let mut p = Cm::new(CmConfig::new(CaGuid(2)), 3 - worker, 2, [9; 32]);
        p.listen(SERVICE, u64::MAX, 8).unwrap();
        p.handle_mad(now, addr(1), &mad).unwrap();
        let request = p.poll_event().unwrap();
        p.send_rep(now, request.id, &rep_params(6)).unwrap();
        let (_, mad) = p.poll_transmit().unwrap();
        assert_eq!(
            worker_of(&mad, 2),
            Some(worker),
            "a REP by the receiver's id"
        );
        cm.handle_mad(now, addr(2), &mad).unwrap();
        cm.poll_event().unwrap();
        cm.send_rtu(id, PrivateData::default()).unwrap();
        assert_eq!(
            worker_of(&cm.poll_transmit().unwrap().1, 2),
            Some(3 - worker)
        );
        // Canceling a request must use the same destination as the request.
        let other = cm.send_req(now, addr(2), &req_params(1, 2, 7)).unwrap();
        cm.poll_transmit();
        cm.destroy(now, other).unwrap();
        assert_eq!(worker_of(&cm.poll_transmit().unwrap().1, 2), Some(worker));
    }
    assert_eq!(worker_of(&[0; 256], 2), None);
}

#[test]
pub(super) fn calls_in_wrong_state_have_no_effect() {
    let mut pair = Pair::new();
    let ids = pair.established();
    let wrong = Err(IbCmError::State {
        state: CmState::Established,
    });
    let now = pair.now;
    assert_eq!(pair.a.send_rep(now, ids.a, &rep_params(1)), wrong);
    assert_eq!(pair.a.send_rtu(ids.a, PrivateData::default()), wrong);
    assert_eq!(
        pair.a
            .send_mra(ids.a, CmTimeout::new(1), PrivateData::default()),
        wrong
    );
    assert_eq!(pair.a.send_drep(now, ids.a, PrivateData::default()), wrong);
    let (info, data) = (AdditionalInfo::default(), PrivateData::default());
    assert_eq!(
        pair.a.send_rej(now, ids.a, RejReason::NoQp, info, data),
        wrong
    );
    assert_eq!(pair.a.poll_transmit(), None);
    assert_eq!(
        pair.p
            .send_dreq(now, IbCmId(CommId(1)), PrivateData::default()),
        Err(IbCmError::NoSuchId)
    );
}

#[test]
fn lost_peer_closes_all_its_connections() {
    let lose = |pair: &mut Pair| {
        pair.a.lose_peer(pair.now, addr(2));
        pair.p.lose_peer(pair.now, addr(1));
        (pair.a_event(), pair.p_event())
    };
    let mut pair = Pair::new();
    pair.req_rcvd();
    let (a, p) = lose(&mut pair);
    assert_eq!(a, IbCmEventKind::ReqTimeout);
    assert!(
        matches!(
            p,
            IbCmEventKind::RejReceived {
                reason: RejReason::Timeout,
                timewait: false,
                ..
            }
        ),
        "{p:?}"
    );
    pair.assert_clean();

    let mut pair = Pair::new();
    pair.rep_rcvd();
    let ended = lose(&mut pair);
    let wanted = (IbCmEventKind::StaleConnection, IbCmEventKind::RepTimeout);
    assert_eq!(ended, wanted);

    let mut pair = Pair::new();
    let ids = pair.established();
    pair.a.lose_peer(pair.now, addr(3));
    let up = (CmState::Established, CmState::Established);
    assert_eq!((pair.a.poll_event(), pair.states(ids)), (None, up));
    let stale = || IbCmEventKind::StaleConnection;
    assert_eq!(lose(&mut pair), (stale(), stale()));
    assert_eq!(pair.states(ids), (CmState::Timewait, CmState::Timewait));
    // No message should be sent to a peer that is down.
    assert_eq!((pair.a_to_p(), pair.p_to_a()), (0, 0));
    pair.pass(TIMEWAIT);
    let over = || IbCmEventKind::TimewaitExit;
    assert_eq!((pair.a_event(), pair.p_event()), (over(), over()));
    pair.assert_clean();
}
