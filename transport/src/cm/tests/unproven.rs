//! Connections from unproven addresses over an unreliable network: a REP is sent again for each
//! duplicate request, plus a limited number of retries.

use chacha20::rand_core::Rng;

use super::*;

/// Returns the parameters used by Linux: a response timeout of 4.3 s and 15 retries.
fn linux_params() -> ReqParams {
    ReqParams {
        remote_cm_timeout: CmTimeout::new(20),
        local_cm_timeout: CmTimeout::new(20),
        max_cm_retries: Bits::truncate(15),
        ..req_params(1, 2, ACTIVE_QPN)
    }
}

/// Connects once with the given loss in percent. Returns true if both sides were connected.
fn connects(random: &mut ChaCha12Rng, loss: u32) -> bool {
    let mut lost = || random.next_u32() % 100 < loss;
    let mut pair = Pair::new();
    let a = pair.a.send_req(pair.now, addr(2), &linux_params()).unwrap();
    let mut passive = None;
    // Data packets from the active side, with the number of retries of its QP.
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
fn retrying_peer_connects_despite_loss() {
    // Packets are dropped on both send and receive: 10 % on each host.
    let loss = 19;
    let mut random = ChaCha12Rng::from_seed([11; 32]);
    let failed = (0..8000).filter(|_| !connects(&mut random, loss));
    assert_eq!(failed.count(), 0, "of 8000");
}

#[test]
fn unproven_address_gets_limited_responses() {
    for repetitions in [0, 1, 5, 15, 30] {
        let mut pair = Pair::new();
        pair.a.send_req(pair.now, addr(2), &linux_params()).unwrap();
        let (_, req) = pair.a.poll_transmit().unwrap();
        let (begin, mut responses, mut times, mut lives) = (pair.now, 0, 0, 0);
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
                responses += 1;
            }
            let Some(next) = pair.p.poll_timeout().into_iter().chain(next_req).min() else {
                break;
            };
            pair.now = next;
            pair.p.handle_timeout(pair.now);
        }
        // Three retries, and the REJ at the end. The count restarts if the peer sends more requests
        // than specified.
        assert!(responses <= times + 4 * lives, "{responses} to {times}");
        assert!(responses > repetitions, "{responses} to {times}");
        assert_eq!(lives, if repetitions > 15 { 2 } else { 1 });
        // We wait while requests are received, but not forever.
        let most = Duration::from_secs(4 * repetitions + 18 + 2);
        assert!(pair.now - begin <= most, "{:?}", pair.now - begin);
        assert_eq!(pair.p.id_count(), 1);
    }
}

#[test]
fn mra_extends_late_rep() {
    let mut pair = Pair::new();
    let a = pair.a.send_req(pair.now, addr(2), &linux_params()).unwrap();
    let (_, req) = pair.a.poll_transmit().unwrap();
    let mut p = None;
    // Only the last response is received.
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
