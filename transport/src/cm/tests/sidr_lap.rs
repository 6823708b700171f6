//! Service ID resolution and alternate paths.

use super::*;
use crate::wire::cm_msg::{AprStatus, MraOf, SidrStatus};

fn sidr_params(service_id: ServiceId) -> SidrReqParams {
    SidrReqParams {
        traffic_class: 0,
        service_id,
        pkey: PKey::DEFAULT,
        timeout: CmTimeout::new(15),
        max_cm_retries: Bits::truncate(2),
        private_data: PrivateData::new(&[1, 2, 3]).unwrap(),
    }
}

#[test]
pub(super) fn service_id_is_resolved() {
    let mut pair = Pair::new();
    let a = pair
        .a
        .send_sidr_req(pair.now, addr(2), &sidr_params(SERVICE))
        .unwrap();
    assert_eq!(pair.a.state(a), CmState::SidrReqSent);
    pair.a_to_p();
    // A duplicate before the response must not create a second event.
    pair.pass(Duration::from_nanos(4096 << 15));
    assert_eq!(pair.a_to_p(), 1);
    let event = pair.p.poll_event().unwrap();
    let IbCmEventKind::SidrReqReceived { peer, req, .. } = event.kind else {
        panic!()
    };
    assert_eq!(
        (peer, req.private_data[2], pair.p.state(event.id)),
        (addr(1), 3, CmState::SidrReqRcvd)
    );
    let params = SidrRepParams {
        status: SidrStatus::Success,
        qpn: Qpn::new(0x77),
        qkey: 0x1234,
        info: AdditionalInfo::default(),
        private_data: PrivateData::default(),
    };
    pair.p.send_sidr_rep(event.id, &params).unwrap();
    pair.p_to_a();
    let IbCmEventKind::SidrRepReceived { rep } = pair.a_event() else {
        panic!()
    };
    assert_eq!(
        (rep.qpn.value(), rep.qkey, rep.service_id),
        (0x77, 0x1234, SERVICE)
    );
    pair.assert_clean();
}

#[test]
pub(super) fn unknown_service_is_rejected_and_timeout_closes() {
    let mut pair = Pair::new();
    pair.a
        .send_sidr_req(pair.now, addr(2), &sidr_params(ServiceId(9)))
        .unwrap();
    pair.a_to_p();
    pair.p_to_a();
    let IbCmEventKind::SidrRepReceived { rep } = pair.a_event() else {
        panic!()
    };
    assert_eq!(rep.status, SidrStatus::Unsupported);
    pair.assert_clean();

    pair.a
        .send_sidr_req(pair.now, addr(2), &sidr_params(SERVICE))
        .unwrap();
    for _ in 0..3 {
        assert!(pair.a.poll_transmit().is_some());
        pair.pass(Duration::from_nanos(4096 << 15));
    }
    assert_eq!(
        (pair.a.poll_transmit(), pair.a_event()),
        (None, IbCmEventKind::SidrReqTimeout)
    );
    pair.assert_clean();

    pair.a
        .send_sidr_req(pair.now, addr(2), &sidr_params(SERVICE))
        .unwrap();
    pair.a_to_p();
    let event = pair.p.poll_event().unwrap();
    pair.p.destroy(pair.now, event.id).unwrap();
    pair.p_to_a();
    let IbCmEventKind::SidrRepReceived { rep } = pair.a_event() else {
        panic!()
    };
    assert_eq!(rep.status, SidrStatus::Reject);
    pair.assert_clean();
}

pub(super) fn lap(pair: &mut Pair, ids: Ids) {
    let path = CmPath {
        service_level: Bits::truncate(3),
        ..req_params(1, 2, 1).primary
    };
    pair.a
        .send_lap(pair.now, ids.a, path, PrivateData::default())
        .unwrap();
}

#[test]
pub(super) fn alternate_paths_are_rejected_if_disabled() {
    let mut pair = Pair::new();
    let ids = pair.established();
    let refused = pair
        .a
        .send_lap(pair.now, ids.a, CmPath::default(), PrivateData::default());
    assert_eq!(refused, Err(IbCmError::AlternatePaths));
    // The peer sends a LAP even though it is disabled here.
    pair.a.config.alternate_paths = true;
    lap(&mut pair, ids);
    assert_eq!(pair.a.state(ids.a), CmState::LapSent);
    pair.a_to_p();
    assert_eq!(
        (pair.p.poll_event(), pair.p.state(ids.p)),
        (None, CmState::Established)
    );
    pair.p_to_a();
    let IbCmEventKind::AprReceived { status, .. } = pair.a_event() else {
        panic!()
    };
    assert_eq!(
        (status, pair.a.state(ids.a)),
        (AprStatus::Unsupported, CmState::Established)
    );
}

#[test]
pub(super) fn alternate_paths_are_negotiated_if_enabled() {
    let mut pair = Pair::new();
    pair.a.config.alternate_paths = true;
    pair.p.config.alternate_paths = true;
    let ids = pair.established();
    lap(&mut pair, ids);
    pair.a_to_p();
    let IbCmEventKind::LapReceived { lap: received } = pair.p_event() else {
        panic!()
    };
    assert_eq!(
        (
            received.alternate.service_level.value(),
            pair.p.state(ids.p)
        ),
        (3, CmState::LapRcvd)
    );
    pair.p
        .send_mra(ids.p, CmTimeout::new(16), PrivateData::default())
        .unwrap();
    pair.p_to_a();
    assert!(matches!(
        pair.a_event(),
        IbCmEventKind::MraReceived {
            message: MraOf::Lap,
            ..
        }
    ));
    assert_eq!(pair.states(ids), (CmState::MraLapRcvd, CmState::MraLapSent));
    let info = AdditionalInfo::default();
    pair.p
        .send_apr(ids.p, AprStatus::Success, info, PrivateData::default())
        .unwrap();
    pair.p.poll_transmit();
    // The APR was lost, so both the LAP and the APR are sent again.
    pair.pass(Duration::from_nanos((4096 << 16) + (4096 << 15)));
    pair.a_to_p();
    assert_eq!(pair.p.poll_event(), None);
    pair.p_to_a();
    assert!(matches!(
        pair.a_event(),
        IbCmEventKind::AprReceived {
            status: AprStatus::Success,
            ..
        }
    ));
    assert_eq!(
        pair.states(ids),
        (CmState::Established, CmState::Established)
    );

    lap(&mut pair, ids);
    for _ in 0..4 {
        assert!(pair.a.poll_transmit().is_some());
        pair.pass(Duration::from_nanos(4096 << 15));
    }
    assert_eq!(
        (pair.a_event(), pair.a.state(ids.a)),
        (IbCmEventKind::LapTimeout, CmState::Established)
    );
    // A connection can be closed while a path is being negotiated.
    lap(&mut pair, ids);
    pair.p
        .send_dreq(pair.now, ids.p, PrivateData::default())
        .unwrap();
    pair.p_to_a();
    assert!(matches!(pair.a_event(), IbCmEventKind::DreqReceived { .. }));
}

#[test]
pub(super) fn lap_for_unknown_connection_is_rejected() {
    let mut pair = Pair::new();
    let ids = pair.established();
    pair.a.config.alternate_paths = true;
    lap(&mut pair, ids);
    let (_, mad) = pair.a.poll_transmit().unwrap();
    let mut stranger = machine(2, 50);
    stranger.handle_mad(pair.now, addr(1), &mad).unwrap();
    let (_, response) = stranger.poll_transmit().unwrap();
    let (_, CmMessage::Apr(apr)) = CmMessage::parse(&response).unwrap() else {
        panic!()
    };
    assert_eq!(
        (apr.status, apr.remote_comm_id),
        (AprStatus::InvalidCommId, ids.a.comm_id())
    );
}

#[test]
fn lap_for_other_queue_pair_is_rejected() {
    let mut pair = Pair::new();
    let ids = pair.established();
    pair.a.config.alternate_paths = true;
    pair.p.config.alternate_paths = true;
    lap(&mut pair, ids);
    let (_, mad) = pair.a.poll_transmit().unwrap();
    let (transaction, CmMessage::Lap(mut lap)) = CmMessage::parse(&mad).unwrap() else {
        panic!()
    };
    lap.remote_qpn = Qpn::new(lap.remote_qpn.value() + 1);
    let mad = CmMessage::Lap(lap).emit(transaction);
    pair.p.handle_mad(pair.now, addr(1), &mad).unwrap();
    let (_, response) = pair.p.poll_transmit().unwrap();
    let (_, CmMessage::Apr(apr)) = CmMessage::parse(&response).unwrap() else {
        panic!()
    };
    assert_eq!(
        (apr.status, pair.p.state(ids.p)),
        (AprStatus::InvalidQpnEecn, CmState::Established)
    );
}

#[test]
pub(super) fn crossing_and_stray_path_messages_are_ignored() {
    let mut pair = Pair::new();
    pair.a.config.alternate_paths = true;
    pair.p.config.alternate_paths = true;
    let ids = pair.established();
    // Both sides send a LAP at the same time and must reject it.
    lap(&mut pair, ids);
    pair.p
        .send_lap(pair.now, ids.p, CmPath::default(), PrivateData::default())
        .unwrap();
    let (_, from_a) = pair.a.poll_transmit().unwrap();
    pair.p_to_a();
    let (_, refusal) = pair.a.poll_transmit().unwrap();
    pair.p.handle_mad(pair.now, addr(1), &from_a).unwrap();
    // It should be ignored if received from a different host.
    pair.p.handle_mad(pair.now, addr(9), &refusal).unwrap();
    assert_eq!(pair.p.state(ids.p), CmState::LapSent);
    pair.p.handle_mad(pair.now, addr(1), &refusal).unwrap();
    pair.p_to_a();
    for event in [pair.a_event(), pair.p_event()] {
        assert!(matches!(
            event,
            IbCmEventKind::AprReceived {
                status: AprStatus::Reject,
                ..
            }
        ));
    }
    let established = (CmState::Established, CmState::Established);
    assert_eq!(pair.states(ids), established);
    // Response without a request.
    pair.p.handle_mad(pair.now, addr(1), &refusal).unwrap();
    assert_eq!((pair.p.poll_event(), pair.states(ids)), (None, established));
    // A duplicate request can still be responded to by the user.
    lap(&mut pair, ids);
    let (_, question) = pair.a.poll_transmit().unwrap();
    for _ in 0..3 {
        pair.p.handle_mad(pair.now, addr(1), &question).unwrap();
    }
    assert!(matches!(pair.p_event(), IbCmEventKind::LapReceived { .. }));
    assert_eq!(pair.p.poll_event(), None);
    let info = AdditionalInfo::default();
    for status in [AprStatus::InvalidGid, AprStatus::Success] {
        let sent = pair.p.send_apr(ids.p, status, info, PrivateData::default());
        let is_first = status == AprStatus::InvalidGid;
        assert_eq!(sent.is_ok(), is_first, "one response per request");
    }
    pair.p_to_a();
    assert!(matches!(
        pair.a_event(),
        IbCmEventKind::AprReceived {
            status: AprStatus::InvalidGid,
            ..
        }
    ));
}

#[test]
pub(super) fn messages_use_migrated_path() {
    let mut pair = Pair::new();
    let ids = pair.established();
    let route = CmRoute {
        peer: addr(7),
        gid_index: 1,
        traffic_class: 8,
    };
    pair.a.migrate(ids.a, route);
    pair.a
        .send_dreq(pair.now, ids.a, PrivateData::default())
        .unwrap();
    let (to, dreq) = pair.a.poll_transmit().unwrap();
    assert_eq!((to, pair.a.route(to, &dreq)), (addr(7), route));
    // The peer has not migrated, so its response uses the old path.
    pair.p.handle_mad(pair.now, addr(1), &dreq).unwrap();
    assert!(matches!(pair.p_event(), IbCmEventKind::DreqReceived { .. }));
    pair.p
        .send_drep(pair.now, ids.p, PrivateData::default())
        .unwrap();
    let (_, drep) = pair.p.poll_transmit().unwrap();
    pair.a.handle_mad(pair.now, addr(9), &drep).unwrap();
    assert_eq!(pair.a.state(ids.a), CmState::DreqSent, "of another host");
    pair.a.handle_mad(pair.now, addr(2), &drep).unwrap();
    assert_eq!(pair.a.state(ids.a), CmState::Timewait);
}
