//! The table of states, and the scripts that take every transition of it.

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
fn the_table_is_the_diagram() {
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
fn every_transition_is_taken() {
    let scripts: &[fn()] = &[
        script::a_connection_lives_and_dies,
        script::events_carry_what_the_queue_pairs_need,
        script::a_req_is_repeated_as_often_as_it_says_and_then_given_up,
        script::a_peer_that_gave_up_takes_its_request_back,
        script::no_peer_listens,
        script::masks_select_service_ids,
        script::requests_that_cannot_be_are_refused_with_the_field_to_blame,
        script::a_refusal_reaches_the_peer_and_is_repeated_for_a_repeated_request,
        script::a_rep_can_be_refused_and_taken_back,
        script::an_mra_buys_time_on_both_sides,
        script::a_lost_rep_is_repeated_for_the_repeated_req,
        script::a_lost_rtu_is_repeated_for_the_repeated_rep,
        script::data_before_the_rtu_establishes,
        script::a_passive_side_without_rtu_gives_up_and_says_so,
        script::a_dreq_may_overtake_the_rtu,
        script::dreqs_may_cross,
        script::a_lost_drep_is_repeated_and_a_forgotten_dreq_is_answered,
        script::a_dreq_is_repeated_sooner_than_other_messages,
        script::a_dreq_without_answer_ends_the_connection_all_the_same,
        script::a_peer_that_restarted_reconnects_at_once_and_the_old_connection_is_stale,
        script::the_same_id_from_a_peer_that_restarted_is_stale_too,
        script::data_before_the_rtu_ends_what_the_peer_has_forgotten_as_well,
        script::another_adapter_at_the_same_address_leaves_connections_alone,
        script::requests_may_cross,
        script::a_rep_for_a_forgotten_request_is_refused,
        script::messages_from_elsewhere_change_nothing,
        script::limits_hold,
        script::letting_go_ends_every_state_without_events,
        script::ids_say_which_worker_they_belong_to,
        script::calls_in_the_wrong_state_change_nothing,
        sidr_lap::a_service_id_is_resolved,
        sidr_lap::an_unknown_service_is_unsupported_and_silence_ends,
        sidr_lap::alternate_paths_are_refused_where_there_are_none,
        sidr_lap::alternate_paths_are_negotiated_where_they_exist,
        sidr_lap::a_lap_for_nothing_names_the_mistake,
        sidr_lap::crossing_and_stray_messages_about_paths_change_nothing,
        sidr_lap::messages_take_the_path_that_the_queue_pair_has_migrated_to,
    ];
    assert_all_taken(&STATES, || {
        scripts.iter().for_each(|script| script());
        a_plea_for_time_is_followed_by_an_end();
        a_discussion_of_a_path_ends_in_every_way();
    });
}

fn mra(cm: &mut Cm, id: IbCmId) {
    cm.send_mra(id, CmTimeout::new(16), PrivateData::default())
        .unwrap();
}

fn a_plea_for_time_is_followed_by_an_end() {
    let mut pair = Pair::new();
    let ids = pair.req_rcvd();
    mra(&mut pair.p, ids.p);
    pair.p.destroy(pair.now, ids.p).unwrap();
    assert_eq!(pair.p.state(ids.p), Timewait);

    let asked_for_time = || {
        let mut pair = Pair::new();
        let ids = pair.rep_rcvd();
        mra(&mut pair.a, ids.a);
        pair.a_to_p();
        assert_eq!(pair.states(ids), (MraRepSent, MraRepRcvd));
        (pair, ids)
    };
    let (mut pair, ids) = asked_for_time();
    pair.a.destroy(pair.now, ids.a).unwrap();
    pair.p.destroy(pair.now, ids.p).unwrap();
    assert_eq!(pair.states(ids), (Timewait, Timewait));

    let (mut pair, ids) = asked_for_time();
    pair.a.send_rtu(ids.a, PrivateData::default()).unwrap();
    pair.a.poll_transmit().expect("an RTU, which is lost");
    let none = PrivateData::default();
    pair.a.send_dreq(pair.now, ids.a, none).unwrap();
    pair.a_to_p();
    assert_eq!(pair.p.state(ids.p), DreqRcvd);
}

/// Both states of either side, while an alternate path is discussed: the side that asked for it is
/// the active one.
fn a_discussion_of_a_path_ends_in_every_way() {
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
        // With the APR.
        let (mut pair, ids) = discussing();
        let (info, none) = (AdditionalInfo::default(), PrivateData::default());
        pair.p
            .send_apr(ids.p, AprStatus::Success, info, none)
            .unwrap();
        pair.p_to_a();
        assert_eq!(pair.states(ids), (Established, Established));
        // With a DREQ of either side.
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
        // With a REJ: the peer knows of no connection.
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
