//! State table, and scripts to test all transitions.

use riser_state::testing::{assert_all_taken, table};

use super::sidr_lap::lap;
use super::*;
use crate::cm::CmState::*;
use crate::wire::cm_msg::{AprStatus, RejMsg, RejOf};

const STATES: [CmState; 20] = [
    Idle,
    Listen,
    ReqSent,
    ReqRcvd,
    MraReqSent,
    MraReqRcvd,
    RepSent,
    RepRcvd,
    MraRepSent,
    MraRepRcvd,
    Established,
    LapSent,
    LapRcvd,
    MraLapSent,
    MraLapRcvd,
    DreqSent,
    DreqRcvd,
    Timewait,
    SidrReqSent,
    SidrReqRcvd,
];

#[test]
fn transitions_match_diagram() {
    let expected = "Idle: \n\
                    Listen: \n\
                    ReqSent: MraReqRcvd RepRcvd\n\
                    ReqRcvd: MraReqSent RepSent Timewait\n\
                    MraReqSent: RepSent Timewait\n\
                    MraReqRcvd: RepRcvd\n\
                    RepSent: MraRepRcvd Established DreqRcvd Timewait\n\
                    RepRcvd: MraRepSent Established Timewait\n\
                    MraRepSent: Established Timewait\n\
                    MraRepRcvd: Established DreqRcvd Timewait\n\
                    Established: LapSent LapRcvd DreqSent DreqRcvd Timewait\n\
                    LapSent: Established MraLapRcvd DreqSent DreqRcvd Timewait\n\
                    LapRcvd: Established MraLapSent DreqSent DreqRcvd Timewait\n\
                    MraLapSent: Established DreqSent DreqRcvd Timewait\n\
                    MraLapRcvd: Established DreqSent DreqRcvd Timewait\n\
                    DreqSent: Timewait\n\
                    DreqRcvd: Timewait\n\
                    Timewait: \n\
                    SidrReqSent: \n\
                    SidrReqRcvd: \n";
    assert_eq!(table(&STATES), expected);
}

#[test]
fn tests_cover_all_transitions() {
    let scripts: &[fn()] = &[
        script::connection_is_established_and_closed,
        script::events_contain_qp_attributes,
        script::req_is_retried_then_times_out,
        script::timed_out_peer_cancels_request,
        script::missing_listener_rejects_request,
        script::listener_masks_select_service_ids,
        script::invalid_reqs_are_rejected_with_reason,
        script::rej_is_repeated_for_duplicate_req,
        script::rep_can_be_rejected_and_canceled,
        script::mra_extends_timeout_on_both_sides,
        script::lost_rep_is_repeated_for_duplicate_req,
        script::lost_rtu_is_repeated_for_duplicate_rep,
        script::data_before_rtu_establishes_connection,
        script::passive_side_without_rtu_times_out,
        script::dreq_before_rtu_is_handled,
        script::simultaneous_dreqs_close_connection,
        script::lost_drep_is_repeated_even_if_removed,
        script::dreq_uses_shorter_retry_interval,
        script::unanswered_dreq_closes_connection,
        script::restarted_peer_reconnects_and_old_becomes_stale,
        script::restarted_peer_with_same_id_reconnects,
        script::data_before_rtu_closes_stale_connection,
        script::other_adapter_at_address_closes_nothing,
        script::simultaneous_requests_both_connect,
        script::rep_for_unknown_request_is_rejected,
        script::messages_from_wrong_address_are_ignored,
        script::limits_hold,
        script::destroy_closes_any_state_without_events,
        script::comm_ids_contain_worker_number,
        script::calls_in_wrong_state_have_no_effect,
        sidr_lap::service_id_is_resolved,
        sidr_lap::unknown_service_is_rejected_and_timeout_closes,
        sidr_lap::alternate_paths_are_rejected_if_disabled,
        sidr_lap::alternate_paths_are_negotiated_if_enabled,
        sidr_lap::lap_for_unknown_connection_is_rejected,
        sidr_lap::crossing_and_stray_path_messages_are_ignored,
        sidr_lap::messages_use_migrated_path,
    ];
    assert_all_taken(&STATES, || {
        scripts.iter().for_each(|script| script());
        mra_is_followed_by_completion();
        path_negotiation_ends_in_all_ways();
    });
}

fn mra(cm: &mut Cm, id: IbCmId) {
    cm.send_mra(id, CmTimeout::new(16), PrivateData::default())
        .unwrap();
}

fn mra_is_followed_by_completion() {
    let mut pair = Pair::new();
    let ids = pair.req_rcvd();
    mra(&mut pair.p, ids.p);
    pair.p.destroy(pair.now, ids.p).unwrap();
    assert_eq!(pair.p.state(ids.p), Timewait);

    let after_mra = || {
        let mut pair = Pair::new();
        let ids = pair.rep_rcvd();
        mra(&mut pair.a, ids.a);
        pair.a_to_p();
        assert_eq!(pair.states(ids), (MraRepSent, MraRepRcvd));
        (pair, ids)
    };
    let (mut pair, ids) = after_mra();
    pair.a.destroy(pair.now, ids.a).unwrap();
    pair.p.destroy(pair.now, ids.p).unwrap();
    assert_eq!(pair.states(ids), (Timewait, Timewait));

    let (mut pair, ids) = after_mra();
    pair.a.send_rtu(ids.a, PrivateData::default()).unwrap();
    pair.a.poll_transmit().expect("an RTU, which is lost");
    let none = PrivateData::default();
    pair.a.send_dreq(pair.now, ids.a, none).unwrap();
    pair.a_to_p();
    assert_eq!(pair.p.state(ids.p), DreqRcvd);
}

/// Tests both states on each side while an alternate path is being negotiated. The side proposing
/// it is the active side.
fn path_negotiation_ends_in_all_ways() {
    for has_mra in [false, true] {
        let discussing = || {
            let mut pair = Pair::new();
            pair.a.config.alternate_paths = true;
            pair.p.config.alternate_paths = true;
            let ids = pair.established();
            lap(&mut pair, ids);
            pair.a_to_p();
            if has_mra {
                mra(&mut pair.p, ids.p);
                pair.p_to_a();
            }
            (pair, ids)
        };
        // Using the APR.
        let (mut pair, ids) = discussing();
        let (info, none) = (AdditionalInfo::default(), PrivateData::default());
        pair.p
            .send_apr(ids.p, AprStatus::Success, info, none)
            .unwrap();
        pair.p_to_a();
        assert_eq!(pair.states(ids), (Established, Established));
        // Using a DREQ from either side.
        let (mut pair, ids) = discussing();
        pair.a
            .send_dreq(pair.now, ids.a, PrivateData::default())
            .unwrap();
        pair.a_to_p();
        assert_eq!(pair.states(ids), (DreqSent, DreqRcvd));
        let (mut pair, ids) = discussing();
        pair.p
            .send_dreq(pair.now, ids.p, PrivateData::default())
            .unwrap();
        pair.p_to_a();
        assert_eq!(pair.states(ids), (DreqRcvd, DreqSent));
        // Using a REJ: the connection is unknown to the peer.
        let (mut pair, ids) = discussing();
        let rej = |from: IbCmId, to: IbCmId| {
            let rej = CmMessage::Rej(RejMsg {
                local_comm_id: from.0,
                remote_comm_id: to.0,
                message: RejOf::NoMessage,
                reason: RejReason::InvalidCommId,
                info: AdditionalInfo::default(),
                private_data: PrivateData::default(),
            });
            rej.emit(TransactionId(1))
        };
        let (to_a, to_p) = (rej(ids.p, ids.a), rej(ids.a, ids.p));
        pair.a.handle_mad(pair.now, addr(2), &to_a).unwrap();
        pair.p.handle_mad(pair.now, addr(1), &to_p).unwrap();
        assert_eq!(pair.states(ids), (Timewait, Timewait));
    }
}
