//! Tests for timeouts, pings and slow data.

use super::*;

#[test]
fn slow_data_in_does_not_time_out() {
    let mut rig = Rig::live();
    let id = rig.submit(READ);
    let (_, command) = rig.started();
    let itt = word(&command.bhs, 16);
    for (data_sn, flags) in [(0, 0), (1, 0), (2, 0), (3, 0x81)] {
        // Longer than half of an attempt's timeout, while the target is alive throughout.
        for _ in 0..6 {
            rig.advance(SEC);
            rig.receive(bhs(0x20, 0x80, u32::MAX), &[]);
        }
        let mut data = bhs(0x25, flags, itt);
        put_word(&mut data, 24, rig.stat_sn);
        put_word(&mut data, 36, data_sn);
        put_word(&mut data, 40, data_sn * 256);
        rig.session.handle_data_in(&data, 256, true, rig.now);
    }
    rig.retire(id);
    assert_eq!(rig.expect_completion(id).unwrap().transferred, 1024);
}

/// The timeout of each request starts when its own data has arrived, even while other data is in
/// transit.
#[test]
fn only_requests_in_transit_get_extensions() {
    let mut rig = Rig::live();
    let arrived = rig.submit(out(512, 0));
    let (_, command) = rig.started();
    let moving = rig.submit(out(512, 8));
    rig.started();
    for _ in 0..9 {
        rig.advance(SEC);
        rig.receive(bhs(0x20, 0x80, u32::MAX), &[]);
        rig.session
            .handle_progress(|id| id == moving, |_| false, rig.now);
        rig.expect_idle();
    }
    rig.advance(SEC);
    let abort = rig.sent();
    assert_eq!((abort.bhs[0], abort.bhs[1]), (0x42, 0x81), "ABORT TASK");
    assert_eq!(abort.bhs[20..24], command.bhs[16..20], "of {arrived:?}");
    // The abort follows the data of the other request.
    for _ in 0..3 {
        rig.session
            .handle_progress(|id| id == moving, |_| true, rig.now);
        rig.advance(SEC / 2);
        rig.receive(bhs(0x20, 0x80, u32::MAX), &[]);
        rig.expect_idle();
    }
    rig.advance(SEC / 2);
    assert_eq!(rig.sent().bhs[1], 0x85, "LOGICAL UNIT RESET");
}

/// A ping may wait behind slowly arriving data, but not forever.
#[test]
fn silent_target_times_out_despite_slow_data() {
    let mut rig = Rig::live();
    let begun = rig.now;
    rig.advance(3 * SEC);
    rig.sent();
    while rig.now < begun + 35 * SEC {
        rig.expect_idle();
        rig.now += SEC;
        rig.progress();
        rig.advance(Duration::ZERO);
    }
    rig.expect_idle();
    rig.now += SEC;
    rig.progress();
    rig.advance(Duration::ZERO);
    rig.expect_disconnect();
    rig.reconnecting(Down::Unresponsive);
}

/// The response to a ping may be behind slowly arriving data, but not forever.
#[test]
fn received_bytes_extend_ping_timeout() {
    let mut rig = Rig::live();
    for _ in 0..20 {
        rig.now += SEC;
        rig.session.handle_bytes(None, rig.now);
        rig.advance(Duration::ZERO);
        rig.expect_idle();
    }
    rig.advance(3 * SEC);
    rig.sent();
    for _ in 0..33 {
        rig.expect_idle();
        rig.now += SEC;
        rig.session.handle_bytes(None, rig.now);
        rig.advance(Duration::ZERO);
    }
    rig.expect_disconnect();
    rig.reconnecting(Down::Unresponsive);
}

/// Data of one command does not extend the timeouts of other commands.
#[test]
fn partial_data_in_extends_timeout_until_deadline() {
    let mut rig = Rig::live();
    let silent = rig.submit(READ);
    let (_, first) = rig.started();
    rig.submit(READ);
    let (_, command) = rig.started();
    let trickle = |rig: &mut Rig, command: &CommandPdu, seconds: u32| {
        let itt = Itt(word(&command.bhs, 16));
        for _ in 0..seconds {
            rig.expect_idle();
            rig.now += SEC;
            rig.session.handle_bytes(Some(itt), rig.now);
            rig.advance(Duration::ZERO);
        }
    };
    trickle(&mut rig, &command, 10);
    let abort = rig.sent();
    assert_eq!(abort.bhs[20..24], first.bhs[16..20], "of {silent:?}");
    rig.receive(bhs(0x22, 0x80, word(&abort.bhs, 16)), &[]);
    assert_eq!(rig.next(), Output::Retire(silent));
    trickle(&mut rig, &command, 10);
    // Memory that is not retired.
    rig.expect_disconnect();
    let Output::Event(SessionEvent::Reconnecting(_)) = rig.next() else {
        panic!("no outage");
    };
    // The same until the deadline.
    let mut rig = Rig::live();
    rig.submit(READ);
    let (_, command) = rig.started();
    trickle(&mut rig, &command, 60);
    for function in [0x81, 0x85, 0x86] {
        assert_eq!(rig.sent().bhs[1], function);
        trickle(&mut rig, &command, 1);
    }
    rig.expect_disconnect();
}

/// Advances a second, with a message from the target and acknowledged bytes.
fn dribble(rig: &mut Rig) {
    rig.now += SEC;
    rig.receive(bhs(0x20, 0x80, u32::MAX), &[]);
    rig.progress();
    rig.advance(Duration::ZERO);
}

#[test]
fn acknowledged_bytes_do_not_extend_deadline() {
    let mut rig = Rig::live();
    let id = rig.submit(out(512, 0));
    rig.started();
    for _ in 0..60 {
        rig.expect_idle();
        dribble(&mut rig);
    }
    // The deadline has passed. The abort is in transit, and must not be replaced by a reset.
    assert_eq!(rig.sent().bhs[1], 0x81);
    for _ in 0..3 {
        rig.expect_idle();
        dribble(&mut rig);
    }
    rig.expect_disconnect();
    assert_eq!(rig.expect_completion(id), Err(RequestError::TimedOut));
    rig.reconnecting(Down::Unresponsive);
}

#[test]
fn memory_is_retired_soon_after_deadline() {
    let mut rig = Rig::live();
    let id = rig.submit(out(512, 0));
    rig.started();
    for _ in 0..60 {
        dribble(&mut rig);
    }
    let abort = rig.sent();
    rig.receive(bhs(0x22, 0x80, word(&abort.bhs, 16)), &[]);
    assert_eq!(rig.next(), Output::Retire(id));
    for _ in 0..10 {
        rig.expect_idle();
        dribble(&mut rig);
    }
    rig.expect_disconnect();
    assert_eq!(rig.expect_completion(id), Err(RequestError::TimedOut));
    rig.reconnecting(Down::Unresponsive);
}

/// The response to a ping may be delayed by data that the target must process first.
#[test]
fn late_ping_response_is_accepted_while_receiving() {
    let mut rig = Rig::live();
    rig.advance(3 * SEC);
    rig.sent();
    for _ in 0..60 {
        rig.receive(bhs(0x20, 0x80, u32::MAX), &[]);
        rig.progress();
        rig.advance(SEC);
        rig.expect_idle();
    }
}

/// The timeout of a reset restarts only once, because nothing is sent after it.
#[test]
fn slow_data_delays_reset_only_once() {
    let mut rig = Rig::live();
    rig.submit(out(512, 0));
    rig.started();
    for _ in 0..10 {
        rig.advance(SEC);
        rig.receive(bhs(0x20, 0x80, u32::MAX), &[]);
    }
    let abort = rig.sent();
    let mut refused = bhs(0x22, 0x80, word(&abort.bhs, 16));
    refused[2] = 5;
    rig.receive(refused, &[]);
    assert_eq!(rig.sent().bhs[1], 0x85, "LOGICAL UNIT RESET");
    for _ in 0..4 {
        rig.expect_idle();
        rig.now += SEC / 2;
        rig.progress();
        rig.advance(Duration::ZERO);
    }
    assert_eq!(rig.sent().bhs[1], 0x86, "TARGET WARM RESET");
}

/// The aborts of several requests are serialized, but together take no longer than the maximum for
/// one.
#[test]
fn slow_aborts_do_not_extend_deadline() {
    let mut rig = Rig::live();
    let ids: Vec<_> = (0..4).map(|_| rig.submit(READ)).collect();
    for _ in &ids {
        rig.started();
    }
    for _ in 0..60 {
        dribble(&mut rig);
    }
    let mut abort = rig.sent();
    for id in &ids[..3] {
        rig.advance(9 * SEC / 10);
        rig.receive(bhs(0x22, 0x80, word(&abort.bhs, 16)), &[]);
        assert_eq!(rig.next(), Output::Retire(*id));
        abort = rig.sent();
        rig.session.handle_retired(*id, rig.now);
        assert_eq!(rig.expect_completion(*id), Err(RequestError::TimedOut));
    }
    rig.advance(3 * SEC / 10);
    rig.expect_disconnect();
    assert_eq!(rig.expect_completion(ids[3]), Err(RequestError::TimedOut));
    rig.reconnecting(Down::Unresponsive);
}

#[test]
fn pings_get_responses_and_silence_disconnects() {
    let mut rig = Rig::live();
    let mut nop = bhs(0x20, 0x80, 0xffff_ffff);
    put_word(&mut nop, 20, 77);
    rig.receive(nop, b"echo");
    let pong = rig.sent();
    assert_eq!((pong.bhs[0], word(&pong.bhs, 20)), (0x40, 77));
    assert_eq!(pong.data, b"echo");
    rig.advance(3 * SEC);
    let ping = rig.sent();
    assert_eq!((ping.bhs[0], word(&ping.bhs, 20)), (0x40, 0xffff_ffff));
    rig.receive(bhs(0x20, 0x80, word(&ping.bhs, 16)), &[]);
    rig.advance(2 * SEC);
    rig.expect_idle();
    rig.advance(SEC);
    rig.sent();
    rig.advance(3 * SEC);
    rig.expect_disconnect();
    rig.reconnecting(Down::Unresponsive);
}

#[test]
fn late_command_escalates_to_target_reset() {
    let mut rig = Rig::connecting(quiet());
    rig.log_in();
    let id = rig.submit((DataLen::None, Effect::Other));
    let (_, command) = rig.started();
    rig.advance(10 * SEC);
    let abort = rig.sent();
    assert_eq!((abort.bhs[0], abort.bhs[1]), (0x42, 0x81));
    assert_eq!(word(&abort.bhs, 20), word(&command.bhs, 16));
    assert_eq!(word(&abort.bhs, 32), word(&command.bhs, 24), "RefCmdSN");
    rig.advance(SEC);
    let reset = rig.sent();
    assert_eq!((reset.bhs[1], &reset.bhs[8..10]), (0x85, &[0, 3][..]));
    let mut refused = bhs(0x22, 0x80, word(&reset.bhs, 16));
    refused[2] = 5;
    rig.receive(refused, &[]);
    let reset = rig.sent();
    assert_eq!(reset.bhs[1], 0x86);
    rig.receive(bhs(0x22, 0x80, word(&reset.bhs, 16)), &[]);
    rig.retire(id);
    assert_eq!(rig.expect_completion(id), Err(RequestError::TimedOut));
}
