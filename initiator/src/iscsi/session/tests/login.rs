//! Tests for logins, redirections and the time before the next login.

use super::*;
use crate::engine::tests::log::log_of;

#[test]
fn redirecting_target_recovers_after_outage() {
    let mut rig = Rig::live();
    rig.lose_connection();
    let redirect = |rig: &mut Rig| {
        rig.stat_sn = 100;
        rig.session.handle_connected([7; 33], rig.now);
        rig.sent();
        let mut moved = bhs(0x23, 0, 0);
        (moved[36], moved[37]) = (1, 1);
        rig.receive(moved, b"TargetAddress=10.0.0.9:3261,1\0");
        rig.expect_disconnect();
    };
    // The portal is available and redirects to the node, as at each login; the node is unavailable
    // for a while.
    for _ in 0..5 {
        assert!(matches!(
            rig.next(),
            Output::Event(SessionEvent::Reconnecting(_))
        ));
        rig.advance(SEC);
        assert_eq!(rig.next(), Output::Connect(None));
        redirect(&mut rig);
        match rig.next() {
            Output::Connect(Some(_)) => {
                let error = ConnectError::Unreachable;
                rig.session.handle_connect_failed(error, rig.now);
            }
            other => panic!("one redirection is not followed: {other:?}"),
        }
    }
}

/// On iSER, a REJ may be received late (IBTA 12.9.7).
#[test]
fn rejection_during_first_login_is_final() {
    let refused = ConnectError::Login(SrpLoginError::Refused(28));
    let mut rig = Rig::connecting(config());
    rig.session.handle_connected([7; 33], rig.now);
    rig.sent();
    rig.session.handle_connect_failed(refused, rig.now);
    rig.expect_disconnect();
    let closed = SessionEvent::Closed(Down::ConnectionLost);
    assert_eq!(rig.next(), Output::Event(closed));
}

#[test]
fn redirections_are_followed_up_to_limit() {
    let mut rig = Rig::connecting(config());
    for turn in 0..5 {
        rig.session.handle_connected([7; 33], rig.now);
        rig.sent();
        let mut moved = bhs(0x23, 0, 0);
        (moved[36], moved[37]) = (1, 1);
        rig.receive(moved, b"TargetAddress=10.0.0.9:3261,1\0");
        rig.expect_disconnect();
        match rig.next() {
            Output::Connect(Some(to)) if turn < 4 => assert_eq!(to.host, "10.0.0.9"),
            Output::Event(SessionEvent::Closed(why)) if turn == 4 => {
                assert_eq!(why, Down::Connect(ConnectError::Redirected));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn logout_request_causes_relogin() {
    let mut rig = Rig::live();
    let mut message = bhs(0x32, 0x80, 0xffff_ffff);
    message[36] = 1;
    rig.receive(message, &[]);
    let logout = rig.sent();
    rig.receive(bhs(0x26, 0x80, word(&logout.bhs, 16)), &[]);
    rig.expect_disconnect();
    rig.reconnecting(Down::LogoutRequested);
}

#[test]
fn discovery_session_reports_targets() {
    let mut config = config();
    config.target = None;
    let mut rig = Rig::connecting(config);
    rig.log_in();
    let wish = rig.sent();
    assert_eq!(
        (wish.bhs[0], &wish.data[..]),
        (0x44, &b"SendTargets=All\0"[..])
    );
    let itt = word(&wish.bhs, 16);
    let mut part = bhs(0x24, 0x40, itt);
    put_word(&mut part, 20, 5);
    rig.receive(part, b"TargetName=iqn.2026-01.a:x\0TargetAddr");
    let more = rig.sent();
    assert_eq!((word(&more.bhs, 20), more.data.len()), (5, 0));
    rig.receive(bhs(0x24, 0x80, itt), b"ess=10.0.0.1:3260,1\0");
    let Output::Found(found) = rig.next() else {
        panic!("nothing found");
    };
    assert_eq!(found[0].name.as_str(), "iqn.2026-01.a:x");
    assert_eq!(found[0].addresses[0].to_string(), "10.0.0.1:3260,1");
    assert_eq!(rig.sent().bhs[0], 0x46, "logout");
}

/// RFC 7143 clause 6.3.5: a login only reinstates a session with the same portal group. Another
/// portal group does not terminate the old session, whose writes may still be in flight to the
/// disk.
#[test]
fn other_portal_group_delays_replay() {
    for guarded in [true, false] {
        let mut rig = Rig::connecting(config());
        rig.log_in_at(1, 0);
        rig.session.set_guarded(guarded);
        let write = rig.lose_with_a_write();
        rig.log_in_at(2, 0);
        rig.session.release(false, rig.now);
        rig.advance(2 * SEC);
        rig.expect_idle();
        // Another login there proves nothing, and does not extend the wait either.
        rig.lose();
        rig.log_in_at(2, 0);
        rig.session.release(false, rig.now);
        rig.expect_idle();
        let settle_at = rig.session.core.settle_at.unwrap();
        rig.wait_until(settle_at);
        assert_eq!(rig.started().0, write);
    }
}

#[test]
fn same_portal_group_replays_immediately() {
    let mut rig = Rig::connecting(config());
    rig.log_in_at(1, 0);
    let write = rig.lose_with_a_write();
    rig.log_in_at(2, 0);
    rig.lose();
    rig.log_in_at(1, 0);
    assert_eq!(rig.started().0, write);
}

/// Several hosts may use the same portal groups, without knowledge of each other's sessions.
#[test]
fn redirected_login_waits_for_lost_changes() {
    const TEMPORARY: u8 = 1;
    // Redirections, the last byte of the connection's address, and whether it is the same host.
    const STEPS: [(&str, u8, bool); 3] = [
        ("192.0.2.2", 2, false),
        ("192.0.2.2", 2, true),
        ("192.0.2.3", 3, false),
    ];
    // A name with two addresses.
    const NAME: [(&str, u8, bool); 3] = [
        ("192.0.2.2", 2, false),
        ("disk.example", 2, true),
        ("disk.example", 3, false),
    ];
    for (is_guarded, steps) in [(false, STEPS), (true, STEPS), (false, NAME)] {
        let mut rig = Rig::connecting(config());
        rig.log_in_at(1, 0);
        rig.session.set_guarded(is_guarded);
        let write = rig.submit(out(512, 0));
        rig.started();
        for (host, last, is_same) in steps {
            rig.lose();
            rig.redirected(TEMPORARY, &format!("{host}:3260,1"));
            rig.connects_to(Some(host));
            rig.session.set_peer(([192, 0, 2, last], 3260).into());
            rig.log_in_at(1, 0);
            rig.session.release(true, rig.now);
            if !is_same {
                let settle_at = rig.now + 15 * SEC;
                rig.wait_until(settle_at - MS);
                rig.expect_idle();
                rig.advance(MS);
            }
            assert_eq!(rig.started().0, write);
        }
    }
}

#[test]
fn wait_for_lost_writes_is_logged_once() {
    let text = log_of(|| {
        let mut rig = Rig::connecting(config());
        rig.log_in_at(1, 0);
        rig.lose_with_a_write();
        for _ in 0..2 {
            rig.redirected(1, "192.0.2.2:3260,1");
            rig.connects_to(Some("192.0.2.2"));
            rig.session.set_peer(([192, 0, 2, 2], 3260).into());
            rig.log_in_at(1, 0);
            rig.lose();
        }
    });
    let waits = "waiting 15 s for writes of the lost session";
    assert_eq!(text.matches(waits).count(), 1, "{text}");
    let cause = ": the login was redirected to 192.0.2.2:3260";
    assert!(text.contains(&format!("{waits}{cause}")), "{text}");
}

#[test]
fn redirected_takeover_waits_after_check() {
    for is_redirected in [false, true] {
        for was_redirected in [false, true] {
            let mut rig = Rig::connecting(config());
            if is_redirected {
                rig.redirected(1, "192.0.2.2:3260,1");
                rig.connects_to(Some("192.0.2.2"));
            }
            rig.log_in_at(1, 0);
            rig.session.set_guarded(true);
            rig.session.recover(was_redirected, rig.now);
            let write = rig.submit(out(512, 0));
            rig.session.release(true, rig.now);
            rig.wait_until(rig.now + 15 * SEC - MS);
            rig.expect_idle();
            rig.advance(MS);
            assert_eq!(rig.started().0, write);
        }
    }
}

#[test]
fn reads_need_no_portal_group() {
    let mut rig = Rig::connecting(config());
    rig.log_in_at(1, 0);
    let read = rig.submit(READ);
    rig.started();
    rig.lose();
    rig.log_in_at(2, 0);
    assert_eq!(rig.started().0, read);
}

/// RFC 7143 clause 13.15: the minimum time after an unexpected disconnect before an implicit
/// logout, such as a login with the same initiator port.
#[test]
fn default_time2wait_delays_login() {
    let mut rig = Rig::connecting(config());
    rig.log_in_at(1, 5);
    rig.lose_connection();
    assert_eq!(rig.wait_for_login(), 5 * SEC);
    // A failed login does not request a wait.
    rig.next();
    rig.advance(5 * SEC);
    rig.connects_to(None);
    rig.session
        .handle_connect_failed(ConnectError::Tcp(111), rig.now);
    assert!(rig.wait_for_login() < SEC);
}

#[test]
fn async_message_sets_time2wait() {
    for event in [2, 3] {
        let mut rig = Rig::connecting(config());
        rig.log_in_at(1, 5);
        let mut message = bhs(0x32, 0x80, u32::MAX);
        message[36] = event;
        message[40..42].copy_from_slice(&[0, 9]);
        rig.receive(message, &[]);
        rig.expect_disconnect();
        assert_eq!(rig.wait_for_login(), 9 * SEC, "event {event}");
    }
}

#[test]
fn logout_response_sets_time2wait() {
    let mut rig = Rig::connecting(config());
    rig.log_in_at(1, 5);
    let mut message = bhs(0x32, 0x80, u32::MAX);
    message[36] = 1;
    rig.receive(message, &[]);
    let logout = rig.sent();
    let mut response = bhs(0x26, 0x80, word(&logout.bhs, 16));
    response[40..42].copy_from_slice(&[0, 2]);
    rig.receive(response, &[]);
    rig.expect_disconnect();
    assert_eq!(rig.wait_for_login(), 2 * SEC);
}

#[test]
fn permanent_move_is_remembered() {
    const TEMPORARY: u8 = 1;
    const PERMANENT: u8 = 2;
    for (status, next) in [(TEMPORARY, None), (PERMANENT, Some("192.0.2.2"))] {
        let mut rig = Rig::connecting(config());
        rig.redirected(status, "192.0.2.2:3260,1");
        rig.connects_to(Some("192.0.2.2"));
        rig.log_in();
        rig.lose_connection();
        rig.next();
        rig.advance(SEC);
        rig.connects_to(next);
        // The other address is tried when this one fails, and then this one again.
        for next in [None, next] {
            rig.session
                .handle_connect_failed(ConnectError::Tcp(111), rig.now);
            rig.next();
            rig.advance(SEC);
            rig.connects_to(next);
        }
    }
}
