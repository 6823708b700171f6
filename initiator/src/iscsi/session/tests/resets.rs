//! Tests for unit attentions after a reset.

use super::*;

/// Logical unit for the commands of [`Rig`].
const UNIT: WireLun = [0, 3, 0, 0, 0, 0, 0, 0];

/// Creates a session with a watched unit that was just reset by its task management.
fn reset_unit() -> Rig {
    let mut rig = Rig::connecting(quiet());
    rig.log_in();
    rig.session.set_guarded(true);
    let late = rig.submit((DataLen::None, Effect::Other));
    rig.started();
    rig.advance(10 * SEC);
    let abort = rig.sent();
    let mut refused = bhs(0x22, 0x80, word(&abort.bhs, 16));
    refused[2] = 5;
    rig.receive(refused, &[]);
    let reset = rig.sent();
    assert_eq!(reset.bhs[1], 0x85, "LOGICAL UNIT RESET");
    rig.receive(bhs(0x22, 0x80, word(&reset.bhs, 16)), &[]);
    let event = SessionEvent::UnitReset(Some(UNIT));
    assert_eq!(rig.next(), Output::Event(event));
    rig.retire(late);
    assert_eq!(rig.expect_completion(late), Err(RequestError::TimedOut));
    rig
}

/// Executes a command.
fn execute(rig: &mut Rig) {
    let id = rig.submit((DataLen::None, Effect::None));
    let (_, command) = rig.started();
    rig.respond(word(&command.bhs, 16), 0);
    rig.retire(id);
    rig.expect_completion(id).unwrap();
}

/// Reports a unit attention for a command; returns whether it is treated as the report of our own
/// reset.
fn is_own_reset(rig: &mut Rig, asc: u8, ascq: u8) -> bool {
    let id = rig.submit((DataLen::None, Effect::None));
    let (_, command) = rig.started();
    unit_attention(rig, word(&command.bhs, 16), asc, ascq);
    let event = rig.next();
    let Output::Event(SessionEvent::UnitEvent { is_own_reset, .. }) = event else {
        panic!("{event:?}");
    };
    rig.retire(id);
    rig.session.release(true, rig.now);
    let (again, command) = rig.started();
    rig.respond(word(&command.bhs, 16), 0);
    rig.retire(again);
    rig.expect_completion(id).unwrap();
    is_own_reset
}

#[test]
fn own_reset_is_reported_once() {
    let mut rig = reset_unit();
    // Another unit attention does not replace the report.
    rig.session.set_guarded(true);
    let id = rig.submit((DataLen::None, Effect::None));
    let (_, command) = rig.started();
    unit_attention(&mut rig, word(&command.bhs, 16), 0x2a, 0x01);
    let event = rig.next();
    let is_ours = |event: &Output| matches!(event, Output::Event(SessionEvent::UnitEvent { is_own_reset, .. }) if *is_own_reset);
    assert!(!is_ours(&event), "{event:?}");
    rig.retire(id);
    rig.session.release(true, rig.now);
    let (_, command) = rig.started();
    unit_attention(&mut rig, word(&command.bhs, 16), 0x29, 0x00);
    let event = rig.next();
    assert!(is_ours(&event), "{event:?}");
    rig.retire(id);
    rig.session.release(true, rig.now);
    let (_, command) = rig.started();
    rig.respond(word(&command.bhs, 16), 0);
    rig.retire(id);
    rig.expect_completion(id).unwrap();
    assert!(!is_own_reset(&mut rig, 0x29, 0x00));
}

/// Otherwise, a much later power-on would be treated as the report of the reset.
#[test]
fn executed_command_ends_wait_for_reset_report() {
    let mut rig = reset_unit();
    execute(&mut rig);
    assert!(!is_own_reset(&mut rig, 0x29, 0x00));
}

/// A target may report the reset on all paths except this one.
#[test]
fn unreported_reset_of_other_path_is_forgotten() {
    let mut rig = Rig::live();
    rig.session.set_guarded(true);
    rig.session.expect_reset_report(None);
    assert!(is_own_reset(&mut rig, 0x29, 0x00));
    rig.session.expect_reset_report(Some(UNIT));
    execute(&mut rig);
    assert!(!is_own_reset(&mut rig, 0x29, 0x00));
    // Commands to another unit report nothing about this unit, and vice versa.
    let other = Some([0, 9, 0, 0, 0, 0, 0, 0]);
    rig.session.expect_reset_report(other);
    assert!(!is_own_reset(&mut rig, 0x29, 0x00));
}

#[test]
fn login_ends_wait_for_reset_report() {
    let mut rig = Rig::live();
    rig.session.set_guarded(true);
    rig.session.expect_reset_report(None);
    rig.lose_connection();
    rig.reconnecting(Down::ConnectionLost);
    rig.log_in();
    rig.session.release(true, rig.now);
    assert!(!is_own_reset(&mut rig, 0x29, 0x00));
}

fn unit_attention(rig: &mut Rig, itt: u32, asc: u8, ascq: u8) {
    let mut sense = [0; 20];
    sense[1] = 18;
    (sense[2], sense[4], sense[9]) = (0x70, 6, 10);
    (sense[14], sense[15]) = (asc, ascq);
    rig.respond_with(itt, CHECK_CONDITION, &sense);
}
