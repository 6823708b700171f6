//! State tables, and scripts to test all transitions.

use riser_state::testing::{assert_all_taken, table};

use super::*;
use crate::rc::state::{RequesterState, ResponderState};
use crate::verbs::QpType;
use crate::verbs::qp_state::{OfType, STATES};

#[test]
fn qp_supports_all_transitions() {
    let states = STATES.map(|state| OfType(QpType::Rc, state));
    // SQE is not used for RC QPs.
    let states = states.into_iter().filter(|s| s.1 != QpState::Sqe);
    let states: Vec<_> = states.collect();
    let in_state = |state| {
        let up_to = match state {
            QpState::Reset | QpState::Init | QpState::Rtr => state,
            _ => QpState::Rts,
        };
        let mut rig = Rig::with(&Options {
            state: up_to,
            ..DEFAULT
        });
        match state {
            QpState::Sqd => rig.run(RcQp::to_sqd),
            QpState::Error => rig.run(RcQp::to_error),
            _ => {}
        }
        assert_eq!(rig.qp.state(), state);
        rig
    };
    assert_all_taken(&states, || {
        for OfType(_, state) in states.iter().copied() {
            in_state(state).qp.to_reset();
            in_state(state).run(RcQp::to_error);
        }
        in_state(QpState::Init).qp.to_init();
        in_state(QpState::Rts).qp.resume();
        in_state(QpState::Sqd).qp.resume();
        in_state(QpState::Sqd).run(RcQp::to_sqd);
    });
}

#[test]
#[should_panic(expected = "Reset became Rtr")]
fn states_cannot_be_skipped() {
    let mut rig = Rig::with(&Options {
        state: QpState::Reset,
        ..DEFAULT
    });
    rig.qp.to_rtr(&RtrParams {
        path_mtu: Mtu::Mtu256,
        dest_qpn: Qpn::new(0x22),
        rq_psn: Psn::new(0),
        max_dest_rd_atomic: 0,
        min_rnr_timer: RnrTimer::new(14),
        access: Access::empty(),
    });
}

#[test]
fn requester_transitions_match_table() {
    let states = [
        RequesterState::Ready,
        RequesterState::RnrWait(Instant::now()),
    ];
    assert_eq!(table(&states), "Ready: RnrWait\nRnrWait: Ready\n");
    assert_all_taken(&states, || {
        let mut rig = Rig::new();
        rig.post(1, SendOp::Send, 4);
        rig.sent();
        rig.ack(SQ_PSN, 0x2e);
        rig.expire();
    });
}

#[test]
fn responder_transitions_match_table() {
    use ResponderState::{Expecting, Failed, NakSent};
    let states = [Expecting, NakSent, Failed];
    assert_eq!(
        table(&states),
        "Expecting: NakSent Failed\nNakSent: Expecting Failed\nFailed: \n"
    );
    assert_all_taken(&states, || {
        // The receive is only posted later.
        let mut rig = Rig::new();
        let send = packet(0x04, RQ_PSN, true, &[], &[9]);
        rig.feed(&send);
        rig.post_recv(1, 8);
        rig.feed(&send);
        // A middle packet outside of a message.
        rig.feed(&packet(0x01, RQ_PSN + 1, false, &[], &[0; 256]));
        // The key for a READ is invalidated while waiting for a missing packet.
        let mut rig = Rig::new();
        let (addr, rkey) = (rig.mr.addr, rig.mr.rkey);
        let reth = reth(addr, rkey, 256);
        rig.feed(&packet(0x0c, RQ_PSN, true, &reth, &[]));
        rig.feed(&packet(0x04, RQ_PSN + 2, true, &[], &[9]));
        rig.mrs.dereg(rig.mr.id).unwrap();
        rig.sent();
    });
}

#[test]
fn qp_memory_is_known_in_advance() {
    let mut rig = Rig::new();
    let cap = rig.qp.config().cap;
    let known = RcQp::memory(&cap, 2, 2);
    assert_eq!(rig.qp.footprint(), known);
    for n in 0..u64::from(cap.max_send_wr) {
        rig.post(n, SendOp::Send, 8);
    }
    assert_eq!(rig.qp.footprint(), known, "posts allocate nothing");
    let (wr, sge) = (cap.max_recv_wr, cap.max_recv_sge);
    assert_eq!(rig.rq.footprint(), RecvQueue::memory(wr, sge));
}
