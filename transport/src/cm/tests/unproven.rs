//! Connections from addresses that are not proven yet, over a network that loses messages: a REP is
//! repeated as often as the peer asks for it, and no more often than a few times beside that.

use chacha20::rand_core::Rng;

use super::*;

/// A REQ as Linux makes it: 4.3 s for an answer to each message, 15 repetitions.
fn linux_params() -> ReqParams {
    ReqParams {
        remote_cm_timeout: CmTimeout::new(20),
        local_cm_timeout: CmTimeout::new(20),
        max_cm_retries: Bits::truncate(15),
        ..req_params(1, 2, ACTIVE_QPN)
    }
}

/// Connects once, each message being lost with this chance in a hundred; whether both sides have
/// been connected.
fn connects(random: &mut ChaCha12Rng, loss: u32) -> bool {
    let mut lost = || random.next_u32() % 100 < loss;
    let mut pair = Pair::new();
    let a = pair.a.send_req(pair.now, addr(2), &linux_params()).unwrap();
    let mut passive = None;
    // Packets of data of the active side, which its queue pair repeats so often.
    let (mut data, mut next_data) = (8, pair.now);
    loop {
        while let Some((_, mad)) = pair.a.poll_transmit() {
            if !lost() {
                pair.p.handle_mad(pair.now, addr(1), &mad).unwrap();
            }
        }
        while let Some(event) = pair.p.poll_event() {
            match event.kind {
                IbCmEventKind::ReqReceived { .. } => {
                    let rep = rep_params(PASSIVE_QPN);
                    pair.p.send_rep(pair.now, event.id, &rep).unwrap();
                    passive = Some(event.id);
                }
                IbCmEventKind::RepTimeout => return false,
                _ => {}
            }
        }
        while let Some((_, mad)) = pair.p.poll_transmit() {
            if !lost() {
                pair.a.handle_mad(pair.now, addr(2), &mad).unwrap();
            }
        }
        while let Some(event) = pair.a.poll_event() {
            match event.kind {
                IbCmEventKind::RepReceived { .. } => {
                    pair.a.send_rtu(a, PrivateData::default()).unwrap();
                    next_data = pair.now;
                }
                IbCmEventKind::ReqTimeout | IbCmEventKind::RejReceived { .. } => return false,
                _ => {}
            }
        }
        let is_up = pair.a.state(a) == CmState::Established;
        if let Some(p) = passive.filter(|_| is_up) {
            if pair.p.state(p) == CmState::Established {
                return true;
            }
            if data > 0 && next_data <= pair.now {
                (data, next_data) = (data - 1, pair.now + Duration::from_millis(500));
                if !lost() {
                    pair.p.establish(pair.now, p).unwrap();
                }
                continue;
            }
        }
        let timers = [&pair.a, &pair.p].into_iter().filter_map(Cm::poll_timeout);
        let next = timers.chain((is_up && data > 0).then_some(next_data)).min();
        let Some(next) = next else {
            return false;
        };
        pair.now = pair.now.max(next);
        pair.pass(Duration::ZERO);
    }
}

#[test]
fn a_peer_that_asks_long_enough_is_connected_though_messages_are_lost() {
    // Lost on the way out of either host and on the way in: 10 % at both ends.
    let loss = 19;
    let mut random = ChaCha12Rng::from_seed([11; 32]);
    let failed = (0..8000).filter(|_| !connects(&mut random, loss));
    assert_eq!(failed.count(), 0, "of 8000");
}

#[test]
fn an_unproven_address_gets_an_answer_for_each_request_and_a_few_beside() {
    for repetitions in [0, 1, 5, 15, 30] {
        let mut pair = Pair::new();
        pair.a.send_req(pair.now, addr(2), &linux_params()).unwrap();
        let (_, req) = pair.a.poll_transmit().unwrap();
        let (begin, mut answers, mut times, mut lives) = (pair.now, 0, 0, 0);
        let mut next_req = Some(pair.now);
        loop {
            if next_req == Some(pair.now) {
                pair.p.handle_mad(pair.now, addr(1), &req).unwrap();
                times += 1;
                next_req = (times <= repetitions).then(|| pair.now + Duration::from_secs(4));
            }
            while let Some(event) = pair.p.poll_event() {
                if matches!(event.kind, IbCmEventKind::ReqReceived { .. }) {
                    let rep = rep_params(PASSIVE_QPN);
                    pair.p.send_rep(pair.now, event.id, &rep).unwrap();
                    lives += 1;
                }
            }
            while pair.p.poll_transmit().is_some() {
                answers += 1;
            }
            let Some(next) = pair.p.poll_timeout().into_iter().chain(next_req).min() else {
                break;
            };
            pair.now = next;
            pair.p.handle_timeout(pair.now);
        }
        // Three by itself, and the REJ at the end. Who asks more often than the request says begins
        // anew.
        assert!(answers <= times + 4 * lives, "{answers} to {times}");
        assert!(answers > repetitions, "{answers} to {times}");
        assert_eq!(lives, if repetitions > 15 { 2 } else { 1 });
        // It is waited for while it asks, but not without end.
        let most = Duration::from_secs(4 * repetitions + 18 + 2);
        assert!(pair.now - begin <= most, "{:?}", pair.now - begin);
        assert_eq!(pair.p.id_count(), 1);
    }
}

#[test]
fn a_peer_that_gets_the_rep_late_and_asks_for_time_is_not_cut_off() {
    let mut pair = Pair::new();
    let a = pair.a.send_req(pair.now, addr(2), &linux_params()).unwrap();
    let (_, req) = pair.a.poll_transmit().unwrap();
    let mut p = None;
    // All answers but the last are lost.
    for _ in 0..7 {
        pair.p.handle_timeout(pair.now);
        while pair.p.poll_transmit().is_some() {}
        pair.p.handle_mad(pair.now, addr(1), &req).unwrap();
        while let Some(event) = pair.p.poll_event() {
            let rep = rep_params(PASSIVE_QPN);
            pair.p.send_rep(pair.now, event.id, &rep).unwrap();
            p = Some(event.id);
        }
        pair.now += Duration::from_secs(4);
    }
    pair.p_to_a();
    let time = CmTimeout::new(18);
    pair.a.send_mra(a, time, PrivateData::default()).unwrap();
    pair.a_to_p();
    pair.p.handle_timeout(pair.now);
    assert_eq!(pair.p.state(p.unwrap()), CmState::MraRepRcvd);
}
