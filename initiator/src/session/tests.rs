//! Test scripts for the sessions of all protocols. Every protocol has an implementation of [`Rig`],
//! which plays the target.

use std::time::{Duration, Instant};

use super::{
    ConnectError, Down, FunctionOutcome, Machine, SessionEvent, SessionState, SubmitError,
};
use crate::request::{
    BUSY, CHECK_CONDITION, Effect, GOOD, RequestError, RequestId, RequestResult, RequestSpec,
    Retry, TASK_ABORTED,
};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

/// A session with [`Timing::of_tests`](super::Timing::of_tests), up to 4 outstanding commands and
/// up to 16 requests, with a target played by the test. No pings are sent.
pub(crate) trait Rig: Sized {
    type Session: Machine;
    /// A task-management function sent to the target.
    type Function;

    /// Number of resets sent after a failed ABORT TASK.
    const RESETS: usize;
    /// Responses to ABORT TASK after which the task is not executed.
    const ABORTED: &'static [FunctionOutcome];

    /// Creates a session that has started to connect.
    fn connecting() -> Self;

    /// Creates a session in full-feature phase.
    fn live() -> Self;

    /// The same for a session that closes with its connection.
    fn live_without_reconnect() -> Self;

    fn session(&mut self) -> &mut Self::Session;

    fn state(&self) -> SessionState;

    /// Returns the number of accepted, incomplete requests.
    fn requests(&self) -> usize;

    fn now(&self) -> Instant;

    /// Advances the time and handles timeouts.
    fn advance(&mut self, by: Duration);

    /// Returns a request with this effect and a timeout of 60 seconds.
    fn spec(&self, effect: Effect) -> RequestSpec;

    /// Expects no output.
    fn expect_idle(&mut self);

    /// Expects an event as the next output.
    fn expect_event(&mut self) -> SessionEvent;

    /// Expects a start as the next output, and "sends" the command.
    fn expect_start(&mut self) -> RequestId;

    /// Expects the memory of a request to be retired.
    fn expect_retire(&mut self, request: RequestId);

    /// Expects the completion of a request.
    fn expect_completion(&mut self, request: RequestId) -> RequestResult;

    /// Expects ABORT TASK for the last attempt of a request.
    fn expect_abort(&mut self, request: RequestId) -> Self::Function;

    /// Expects an abort and a retirement. Their order depends on the protocol, and is irrelevant.
    fn expect_abort_and_retire(&mut self, aborted: RequestId, retired: RequestId)
    -> Self::Function;

    /// Expects a reset. `step` counts the resets since the failed abort.
    fn expect_reset(&mut self, step: usize) -> Self::Function;

    /// Expects a disconnect without a logout, and closes the connection.
    fn expect_disconnect(&mut self);

    /// Expects a logout. The target responds, and the connection is closed.
    fn expect_logout(&mut self);

    /// Expects the end of the connection after [`Machine::abandon_connection`], and closes it.
    fn expect_abandonment(&mut self);

    /// Expects the disconnect of a session that does not reconnect, and closes the connection.
    fn expect_last_disconnect(&mut self);

    /// Expects that the session connects to the original address.
    fn expect_connect(&mut self);

    /// The connection is established, and the session sends its login.
    fn start_login(&mut self);

    /// Connecting fails.
    fn fail_connect(&mut self, error: ConnectError);

    /// The target rejects the login, and the connection is closed.
    fn reject_login(&mut self);

    /// Checks whether this is the reason of [`Self::reject_login`].
    fn is_login_rejection(why: Down) -> bool;

    /// Logs in on a new connection.
    fn log_in(&mut self);

    /// The target rejects an established connection (IBTA 12.9.7).
    fn reject_established(&mut self);

    fn break_connection(&mut self);

    /// The target completes a command.
    fn respond(&mut self, request: RequestId, status: u8, sense: &[u8]);

    /// The target responds to a function.
    fn respond_to_function(&mut self, function: &Self::Function, outcome: FunctionOutcome);

    /// The target sends a message that completes nothing.
    fn receive_message(&mut self);

    fn handle_retired(&mut self, request: RequestId);

    fn submit(&mut self, effect: Effect) -> RequestId {
        let spec = self.spec(effect);
        self.submit_spec(spec).unwrap()
    }

    fn submit_spec(&mut self, spec: RequestSpec) -> Result<RequestId, SubmitError> {
        let now = self.now();
        self.session().submit(spec, now)
    }

    /// Submits a request and sends its command.
    fn start(&mut self, effect: Effect) -> RequestId {
        let id = self.submit(effect);
        assert_eq!(self.expect_start(), id);
        id
    }

    fn retire(&mut self, request: RequestId) {
        self.expect_retire(request);
        self.handle_retired(request);
    }

    /// The target completes a command, and its memory is retired.
    fn respond_and_retire(&mut self, request: RequestId, status: u8, sense: &[u8]) {
        self.respond(request, status, sense);
        self.retire(request);
    }

    /// The target executes a command, and its request completes.
    fn execute(&mut self, request: RequestId) {
        self.respond_and_retire(request, GOOD, &[]);
        assert_eq!(self.expect_completion(request).unwrap().status, GOOD);
    }

    fn expect_reconnecting(&mut self, why: Down) {
        assert_eq!(self.expect_event(), SessionEvent::Reconnecting(why));
    }

    /// Loses the connection.
    fn lose_connection(&mut self) {
        self.break_connection();
        self.expect_disconnect();
    }

    /// Waits for the longest back-off and logs in again.
    fn reconnect(&mut self) {
        self.advance(400 * MS);
        self.expect_connect();
        self.log_in();
    }

    fn set_guarded(&mut self) {
        self.session().set_guarded(true);
    }

    /// The unit was checked by a target that terminates the commands of old connections.
    fn release(&mut self) {
        let now = self.now();
        self.session().release(true, now);
    }

    fn close(&mut self) {
        let now = self.now();
        self.session().close(now);
    }
}

macro_rules! scripts {
    ($($name:ident,)*) => {
        mod srp {
            $(#[test]
            fn $name() {
                super::$name::<crate::srp::session::tests::Rig>();
            })*
        }

        mod iscsi {
            $(#[test]
            fn $name() {
                super::$name::<crate::iscsi::session::tests::Rig>();
            })*
        }
    };
}

fn write(start: u64, end: u64) -> Effect {
    Effect::Blocks { start, end }
}

fn unit_attention(asc: u8, ascq: u8) -> [u8; 18] {
    let mut sense = [0; 18];
    (sense[0], sense[2], sense[7]) = (0x70, 6, 10);
    (sense[12], sense[13]) = (asc, ascq);
    sense
}

fn command_completes_after_memory_is_retired<R: Rig>() {
    let mut rig = R::live();
    let id = rig.start(Effect::None);
    rig.respond(id, GOOD, &[]);
    rig.expect_retire(id);
    rig.expect_idle();
    rig.handle_retired(id);
    assert_eq!(rig.expect_completion(id).unwrap().status, GOOD);
    assert_eq!(rig.requests(), 0);
}

/// On RDMA, a target that blocks the send queue also blocks all invalidations.
fn unretired_memory_closes_connection<R: Rig>() {
    let mut rig = R::live();
    let id = rig.start(Effect::None);
    rig.respond(id, GOOD, &[]);
    rig.expect_retire(id);
    // The target is alive throughout.
    for _ in 0..9 {
        rig.advance(SEC);
        rig.receive_message();
        rig.expect_idle();
    }
    rig.advance(SEC);
    rig.expect_disconnect();
    let result = rig.expect_completion(id);
    assert_eq!(result.unwrap().status, GOOD, "the command has completed");
    rig.expect_reconnecting(Down::Unresponsive);
}

fn stuck_memory_after_abort_causes_retry<R: Rig>() {
    let mut rig = R::live();
    let id = rig.start(write(0, 8));
    rig.advance(10 * SEC);
    let abort = rig.expect_abort(id);
    rig.respond_to_function(&abort, FunctionOutcome::Complete);
    rig.expect_retire(id);
    rig.advance(10 * SEC);
    rig.expect_disconnect();
    rig.expect_reconnecting(Down::Unresponsive);
    rig.reconnect();
    assert_eq!(rig.expect_start(), id);
}

/// On RDMA, a connection has as many slots as commands in the queue, and a slot is in use until its
/// memory is retired. If a command had to wait for a slot there, its abort would overtake it.
fn slot_is_reused_after_memory_is_retired<R: Rig>() {
    let mut rig = R::live();
    let first = rig.start(Effect::None);
    for _ in 1..4 {
        rig.start(Effect::None);
    }
    let waiting = rig.submit(Effect::None);
    rig.expect_idle();
    rig.respond(first, GOOD, &[]);
    rig.expect_retire(first);
    rig.expect_idle();
    rig.handle_retired(first);
    assert!(rig.expect_completion(first).is_ok());
    assert_eq!(rig.expect_start(), waiting);
    rig.expect_idle();
}

fn first_login_failure_is_final<R: Rig>() {
    let mut rig = R::connecting();
    rig.reject_login();
    let event = rig.expect_event();
    let SessionEvent::Closed(why) = event else {
        panic!("{event:?}");
    };
    assert!(R::is_login_rejection(why), "{why}");
    assert_eq!(rig.state(), SessionState::Closed);
    let spec = rig.spec(Effect::None);
    assert_eq!(rig.submit_spec(spec), Err(SubmitError::Closed));
}

fn login_without_response_times_out<R: Rig>() {
    let mut rig = R::connecting();
    let id = rig.submit(Effect::None);
    rig.start_login();
    rig.advance(5 * SEC);
    rig.expect_disconnect();
    assert_eq!(rig.expect_completion(id), Err(RequestError::Closed));
    let closed = SessionEvent::Closed(ConnectError::TimedOut.into());
    assert_eq!(rig.expect_event(), closed);
}

fn late_rejection_breaks_connection<R: Rig>() {
    let mut rig = R::live();
    let id = rig.start(Effect::None);
    rig.reject_established();
    rig.expect_disconnect();
    rig.expect_reconnecting(Down::ConnectionLost);
    rig.reconnect();
    assert_eq!(rig.expect_start(), id);
}

fn queued_requests_are_bounded_and_ordered<R: Rig>() {
    let mut rig = R::live();
    let ids: Vec<_> = (0..16).map(|_| rig.submit(Effect::None)).collect();
    let one_more = rig.spec(Effect::None);
    assert_eq!(rig.submit_spec(one_more), Err(SubmitError::Full));
    for &id in &ids[..4] {
        assert_eq!(rig.expect_start(), id);
    }
    rig.expect_idle();
    rig.execute(ids[2]);
    assert_eq!(rig.expect_start(), ids[4]);
}

fn queued_request_times_out_unsent<R: Rig>() {
    let mut rig = R::connecting();
    let deadline = rig.now() + SEC;
    let short = RequestSpec {
        deadline,
        ..rig.spec(Effect::None)
    };
    let id = rig.submit_spec(short).unwrap();
    assert!(rig.session().next_deadline().unwrap() <= deadline);
    rig.advance(SEC);
    assert_eq!(rig.expect_completion(id), Err(RequestError::TimedOut));
}

fn busy_is_retried_with_delay_until_deadline<R: Rig>() {
    let mut rig = R::live();
    let deadline = rig.spec(Effect::None).deadline;
    let id = rig.submit(Effect::None);
    for pause in [5, 10, 20, 40, 80, 160, 320, 640, 640] {
        rig.expect_start();
        rig.respond_and_retire(id, BUSY, &[]);
        rig.expect_idle();
        rig.advance((pause - 1) * MS);
        rig.expect_idle();
        rig.advance(MS);
    }
    while rig.now() + 640 * MS < deadline {
        rig.expect_start();
        rig.respond_and_retire(id, BUSY, &[]);
        rig.advance(640 * MS);
    }
    // The target's status is more useful than a timeout.
    rig.expect_start();
    rig.respond_and_retire(id, BUSY, &[]);
    assert_eq!(rig.expect_completion(id).unwrap().status, BUSY);
}

fn unit_attention_is_retried_unless_disabled<R: Rig>() {
    let attention = unit_attention(0x29, 0x00);
    let mut rig = R::live();
    let id = rig.start(Effect::Other);
    rig.respond_and_retire(id, CHECK_CONDITION, &attention);
    assert_eq!(rig.expect_start(), id);
    rig.execute(id);
    let raw = RequestSpec {
        retry: Retry::Never,
        ..rig.spec(Effect::Other)
    };
    let id = rig.submit_spec(raw).unwrap();
    rig.expect_start();
    rig.respond_and_retire(id, CHECK_CONDITION, &attention);
    let response = rig.expect_completion(id).unwrap();
    assert_eq!(response.sense().unwrap().additional.code, 0x29);
}

fn other_errors_are_reported<R: Rig>() {
    let mut rig = R::live();
    let id = rig.start(Effect::None);
    rig.respond_and_retire(id, CHECK_CONDITION, &[0x72, 0x03, 0x11, 0, 0, 0, 0, 0]);
    assert_eq!(rig.expect_completion(id).unwrap().status, CHECK_CONDITION);
}

/// The device may have received the command before another initiator aborted it.
fn foreign_abort_retries_only_safe_commands<R: Rig>() {
    let mut rig = R::live();
    let safe = rig.start(write(0, 4));
    rig.respond_and_retire(safe, TASK_ABORTED, &[]);
    assert_eq!(rig.expect_start(), safe);
    rig.execute(safe);
    let other = rig.start(Effect::Other);
    rig.respond_and_retire(other, TASK_ABORTED, &[]);
    assert_eq!(rig.expect_completion(other).unwrap().status, TASK_ABORTED);
}

fn silent_command_is_aborted_and_retried<R: Rig>() {
    let mut rig = R::live();
    let id = rig.start(write(0, 8));
    rig.advance(10 * SEC);
    let abort = rig.expect_abort(id);
    rig.expect_idle();
    rig.respond_to_function(&abort, FunctionOutcome::Complete);
    rig.retire(id);
    assert_eq!(rig.expect_start(), id);
    rig.execute(id);
}

fn unreplayable_command_times_out_after_abort<R: Rig>() {
    let mut rig = R::live();
    let id = rig.start(Effect::Other);
    rig.advance(10 * SEC);
    let abort = rig.expect_abort(id);
    rig.respond_to_function(&abort, FunctionOutcome::Complete);
    rig.retire(id);
    assert_eq!(rig.expect_completion(id), Err(RequestError::TimedOut));
}

fn response_crossing_abort_is_accepted<R: Rig>() {
    let mut rig = R::live();
    let id = rig.start(Effect::None);
    rig.advance(10 * SEC);
    let abort = rig.expect_abort(id);
    rig.execute(id);
    rig.respond_to_function(&abort, FunctionOutcome::Failed);
    rig.expect_idle();
}

/// A command is retried while its first abort is outstanding, and then must be aborted again: the
/// response to the first abort does not apply to the second attempt, which the target is still
/// executing.
fn late_abort_response_spares_next_attempt<R: Rig>() {
    for outcome in R::ABORTED {
        let attention = unit_attention(0x29, 0x03);
        let mut rig = R::live();
        let first = rig.start(write(0, 8));
        let second = rig.start(write(100, 108));
        rig.respond(second, CHECK_CONDITION, &attention);
        let abort = rig.expect_abort_and_retire(first, second);
        // Its response crosses the abort: another reset.
        rig.respond_and_retire(first, CHECK_CONDITION, &attention);
        assert_eq!(rig.expect_start(), first);
        let third = rig.start(write(200, 208));
        rig.respond(third, CHECK_CONDITION, &attention);
        rig.expect_retire(third);
        rig.respond_to_function(&abort, *outcome);
        let abort = rig.expect_abort(first);
        rig.expect_idle();
        rig.respond_to_function(&abort, FunctionOutcome::Complete);
        rig.retire(first);
        assert_eq!(rig.expect_start(), first);
    }
}

/// A write after the (immediate) reset is executed after it (for iSCSI: RFC 7143 clauses 4.2.2.1
/// and 4.2.2.3.1).
fn commands_wait_for_reset_completion<R: Rig>() {
    let mut rig = R::live();
    let late = rig.start(write(0, 8));
    rig.advance(10 * SEC);
    let mut function = rig.expect_abort(late);
    let mut after = None;
    for step in 0..R::RESETS {
        rig.respond_to_function(&function, FunctionOutcome::Failed);
        function = rig.expect_reset(step);
        after.get_or_insert_with(|| rig.submit(write(100, 108)));
        rig.expect_idle();
    }
    rig.respond_to_function(&function, FunctionOutcome::Complete);
    rig.expect_retire(late);
    assert_eq!(Some(rig.expect_start()), after);
    rig.handle_retired(late);
    assert_eq!(rig.expect_start(), late);
}

fn unresponsive_target_causes_reconnect<R: Rig>() {
    let mut rig = R::live();
    let id = rig.start(write(0, 8));
    rig.advance(10 * SEC);
    rig.expect_abort(id);
    for step in 0..R::RESETS {
        rig.advance(SEC);
        rig.expect_reset(step);
    }
    rig.advance(SEC);
    rig.expect_disconnect();
    rig.expect_reconnecting(Down::Unresponsive);
    rig.reconnect();
    assert_eq!(rig.expect_start(), id);
}

/// COMMANDS CLEARED BY ANOTHER INITIATOR or BUS DEVICE RESET FUNCTION OCCURRED is reported for a
/// command received after the reset.
fn foreign_reset_causes_immediate_retry<R: Rig>() {
    for (asc, ascq) in [(0x2f, 0x00), (0x29, 0x03)] {
        for outcome in R::ABORTED {
            let mut rig = R::live();
            let silent = rig.start(write(0, 8));
            let next = rig.start(write(100, 108));
            rig.start(write(200, 208));
            rig.respond(next, CHECK_CONDITION, &unit_attention(asc, ascq));
            let abort = rig.expect_abort_and_retire(silent, next);
            rig.expect_idle();
            rig.handle_retired(next);
            assert_eq!(rig.expect_start(), next);
            rig.respond_to_function(&abort, *outcome);
            rig.retire(silent);
            assert_eq!(rig.expect_start(), silent);
            rig.expect_idle();
        }
    }
}

fn retries_wait_for_unit_check<R: Rig>() {
    // Reset, INQUIRY DATA HAS CHANGED, REPORTED LUNS DATA HAS CHANGED, CAPACITY DATA HAS CHANGED,
    // MODE PARAMETERS CHANGED.
    for (asc, ascq) in [
        (0x29, 0x00),
        (0x3f, 0x03),
        (0x3f, 0x0e),
        (0x2a, 0x09),
        (0x2a, 0x01),
    ] {
        let mut rig = R::live();
        rig.set_guarded();
        let id = rig.start(write(0, 8));
        rig.respond(id, CHECK_CONDITION, &unit_attention(asc, ascq));
        let event = rig.expect_event();
        assert!(matches!(event, SessionEvent::UnitEvent { .. }), "{event:?}");
        rig.retire(id);
        let later = rig.submit(write(100, 108));
        rig.expect_idle();
        // We should be able to identify the unit, and then all other commands should resume in
        // order.
        let probe = RequestSpec {
            retry: Retry::Probe,
            ..rig.spec(Effect::None)
        };
        let probe = rig.submit_spec(probe).unwrap();
        assert_eq!(rig.expect_start(), probe);
        rig.execute(probe);
        rig.expect_idle();
        rig.release();
        assert_eq!(rig.expect_start(), id);
        assert_eq!(rig.expect_start(), later);
    }
}

fn login_holds_commands_until_unit_check<R: Rig>() {
    let mut rig = R::live();
    rig.set_guarded();
    let id = rig.start(write(0, 8));
    rig.lose_connection();
    rig.expect_reconnecting(Down::ConnectionLost);
    rig.reconnect();
    rig.expect_idle();
    rig.release();
    assert_eq!(rig.expect_start(), id);
}

/// The first session of a process knows neither the commands of its predecessor nor their portal
/// group.
fn takeover_waits_for_commands_of_dead_process<R: Rig>() {
    for is_checked in [false, true] {
        let mut rig = R::live();
        let now = rig.now();
        rig.set_guarded();
        rig.session().recover(false, now);
        if is_checked {
            rig.session().hold_requests();
        }
        let id = rig.submit(write(0, 8));
        if is_checked {
            rig.session().release(false, now);
        }
        for _ in 0..14 {
            rig.expect_idle();
            rig.receive_message();
            rig.advance(SEC);
        }
        rig.receive_message();
        rig.advance(SEC - MS);
        rig.expect_idle();
        rig.advance(MS);
        assert_eq!(rig.expect_start(), id);
    }
}

fn missing_unit_increases_backoff<R: Rig>() {
    let mut rig = R::live();
    rig.set_guarded();
    for wait in [100, 200, 400, 400] {
        let now = rig.now();
        rig.session()
            .abandon_connection(Down::NoIdentity, false, now);
        rig.expect_abandonment();
        let until = now + wait * MS;
        assert_eq!(rig.state(), SessionState::Backoff { until });
        rig.expect_reconnecting(Down::NoIdentity);
        rig.reconnect();
    }
    rig.release();
    rig.lose_connection();
    let until = rig.now() + 100 * MS;
    assert_eq!(rig.state(), SessionState::Backoff { until });
}

fn reconnect_replays_safe_commands_in_order<R: Rig>() {
    let mut rig = R::live();
    let first = rig.start(write(0, 8));
    let other = rig.start(Effect::Other);
    let overlapping = rig.start(write(4, 6));
    let apart = rig.start(write(100, 108));
    rig.lose_connection();
    let lost = rig.expect_completion(other);
    assert_eq!(lost, Err(RequestError::ConnectionLost));
    rig.expect_reconnecting(Down::ConnectionLost);
    rig.expect_idle();
    rig.reconnect();
    assert_eq!(rig.expect_start(), first);
    rig.expect_idle();
    rig.execute(first);
    assert_eq!(rig.expect_start(), overlapping, "after the one it overlaps");
    assert_eq!(rig.expect_start(), apart);
}

fn session_without_reconnect_returns_requests<R: Rig>() {
    let mut rig = R::live_without_reconnect();
    let write = rig.start(write(0, 8));
    let read = rig.start(Effect::None);
    rig.break_connection();
    let late = rig.spec(Effect::None);
    assert_eq!(rig.submit_spec(late), Err(SubmitError::Closed));
    rig.expect_last_disconnect();
    assert_eq!(rig.expect_completion(write), Err(RequestError::Closed));
    assert_eq!(rig.expect_completion(read), Err(RequestError::Closed));
    let closed = SessionEvent::Closed(Down::ConnectionLost);
    assert_eq!(rig.expect_event(), closed);
    rig.expect_idle();
    assert_eq!(rig.session().next_deadline(), None);
}

fn response_before_disconnect_is_kept<R: Rig>() {
    let mut rig = R::live();
    let id = rig.start(Effect::Other);
    rig.respond(id, GOOD, &[]);
    rig.expect_retire(id);
    rig.lose_connection();
    assert!(rig.expect_completion(id).is_ok());
}

fn reconnecting_waits_longer_each_time<R: Rig>() {
    let mut rig = R::live();
    rig.lose_connection();
    rig.expect_reconnecting(Down::ConnectionLost);
    for wait in [100, 200, 400, 400] {
        rig.advance((wait - 1) * MS);
        rig.expect_idle();
        rig.advance(MS);
        rig.expect_connect();
        rig.fail_connect(ConnectError::Unreachable);
        rig.expect_reconnecting(ConnectError::Unreachable.into());
    }
}

fn slow_login_gets_longer_timeout<R: Rig>() {
    let mut rig = R::live();
    rig.lose_connection();
    rig.expect_reconnecting(Down::ConnectionLost);
    for patience in [5, 10, 15, 15] {
        rig.advance(400 * MS);
        rig.expect_connect();
        rig.start_login();
        rig.advance(patience * SEC - MS);
        rig.expect_idle();
        rig.advance(MS);
        rig.expect_disconnect();
        rig.expect_reconnecting(ConnectError::TimedOut.into());
    }
    rig.reconnect();
    // Once the target has responded, the next login should start with the default timeout.
    rig.lose_connection();
    rig.expect_reconnecting(Down::ConnectionLost);
    rig.advance(100 * MS);
    rig.expect_connect();
    rig.advance(5 * SEC);
    rig.expect_disconnect();
}

fn close_logs_out_and_completes_requests<R: Rig>() {
    let mut rig = R::live();
    let id = rig.start(write(0, 8));
    rig.close();
    rig.expect_logout();
    assert_eq!(rig.expect_completion(id), Err(RequestError::Closed));
    let closed = SessionEvent::Closed(Down::Closed);
    assert_eq!(rig.expect_event(), closed);
    rig.close();
    rig.expect_idle();
}

fn close_during_backoff_is_immediate<R: Rig>() {
    let mut rig = R::live();
    let id = rig.start(write(0, 8));
    rig.lose_connection();
    rig.expect_reconnecting(Down::ConnectionLost);
    rig.close();
    assert_eq!(rig.expect_completion(id), Err(RequestError::Closed));
    assert_eq!(rig.state(), SessionState::Closed);
}

scripts! {
    command_completes_after_memory_is_retired,
    unretired_memory_closes_connection,
    stuck_memory_after_abort_causes_retry,
    slot_is_reused_after_memory_is_retired,
    first_login_failure_is_final,
    login_without_response_times_out,
    late_rejection_breaks_connection,
    queued_requests_are_bounded_and_ordered,
    queued_request_times_out_unsent,
    busy_is_retried_with_delay_until_deadline,
    unit_attention_is_retried_unless_disabled,
    other_errors_are_reported,
    foreign_abort_retries_only_safe_commands,
    silent_command_is_aborted_and_retried,
    unreplayable_command_times_out_after_abort,
    response_crossing_abort_is_accepted,
    late_abort_response_spares_next_attempt,
    commands_wait_for_reset_completion,
    unresponsive_target_causes_reconnect,
    foreign_reset_causes_immediate_retry,
    retries_wait_for_unit_check,
    login_holds_commands_until_unit_check,
    takeover_waits_for_commands_of_dead_process,
    missing_unit_increases_backoff,
    reconnect_replays_safe_commands_in_order,
    session_without_reconnect_returns_requests,
    response_before_disconnect_is_kept,
    reconnecting_waits_longer_each_time,
    slow_login_gets_longer_timeout,
    close_logs_out_and_completes_requests,
    close_during_backoff_is_immediate,
}
