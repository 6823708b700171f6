use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use riser_state::testing::{assert_all_taken, table};

use riser_scsi::iscsi::BHS_LEN;
use riser_scsi::iscsi::frame::Frame;
use riser_scsi::lun::WireLun;
use riser_scsi::srp::TaskAttr;
use riser_testkit::{fuzz, one_of};

use super::fixture::config;
use super::*;
use crate::request::{
    CHECK_CONDITION, Cdb, CommandResponse, DataLen, Effect, RequestError, RequestId, RequestResult,
    RequestSpec, Retry,
};
use crate::session::tests::{self as script, Rig as _};
use crate::session::{
    ConnectError, Down, FunctionOutcome, IscsiFault, Machine, SessionEvent, SrpLoginError,
    SubmitError,
};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

/// A session with a target played by the test.
pub(crate) struct Rig {
    session: IscsiSession,
    now: Instant,
    stat_sn: u32,
    exp_cmd_sn: u32,
    window: u32,
    /// Tags of sent commands, by request.
    tags: Vec<(RequestId, u32)>,
}

/// Returns a header of the target: opcode, flags, tag, and otherwise zeroes.
fn bhs(opcode: u8, flags: u8, itt: u32) -> [u8; BHS_LEN] {
    let mut bhs = [0; BHS_LEN];
    (bhs[0], bhs[1]) = (opcode, flags);
    bhs[16..20].copy_from_slice(&itt.to_be_bytes());
    bhs[20..24].copy_from_slice(&[0xff; 4]);
    bhs
}

fn word(bhs: &[u8; BHS_LEN], at: usize) -> u32 {
    u32::from_be_bytes(bhs[at..at + 4].try_into().unwrap())
}

fn put_word(bhs: &mut [u8; BHS_LEN], at: usize, value: u32) {
    bhs[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

fn out(len: u32, start: u64) -> (DataLen, Effect) {
    let end = start + 8;
    (DataLen::Out(len), Effect::Blocks { start, end })
}

impl Rig {
    fn connecting(config: SessionConfig) -> Self {
        let now = Instant::now();
        let mut session = IscsiSession::new(config, now);
        assert_eq!(session.poll_output(), Some(Output::Connect(None)));
        Self {
            session,
            now,
            stat_sn: 100,
            exp_cmd_sn: 1,
            window: 64,
            tags: Vec::new(),
        }
    }

    fn live() -> Self {
        let mut rig = Self::connecting(config());
        rig.log_in();
        rig
    }

    fn log_in(&mut self) {
        (self.stat_sn, self.exp_cmd_sn) = (100, 1);
        self.session.handle_connected([7; 33], self.now);
        let first = self.sent();
        assert_eq!(
            (first.bhs[0], first.bhs[1]),
            (0x43, 0x81),
            "security, to operational"
        );
        assert_eq!(first.bhs[8..14], [0x80, 1, 2, 3, 4, 5]);
        self.login_response(0x81, b"AuthMethod=None\0");
        let second = self.sent();
        assert_eq!(second.bhs[1], 0x87, "operational, to full feature");
        self.login_response(
            0x87,
            b"InitialR2T=No\0FirstBurstLength=1024\0MaxBurstLength=4096\0DefaultTime2Wait=0\0",
        );
        assert!(matches!(self.next(), Output::FullFeature(_)));
        assert_eq!(self.next(), Output::Event(SessionEvent::Live));
    }

    fn login_response(&mut self, flags: u8, text: &[u8]) {
        let mut pdu = bhs(0x23, flags, 0);
        pdu[8..14].copy_from_slice(&[0x80, 1, 2, 3, 4, 5]);
        pdu[20..24].fill(0);
        self.receive(pdu, text);
    }

    /// Passes a PDU with the next status number to the session.
    fn receive(&mut self, mut pdu: [u8; BHS_LEN], data: &[u8]) {
        put_word(&mut pdu, 24, self.stat_sn);
        put_word(&mut pdu, 28, self.exp_cmd_sn);
        put_word(&mut pdu, 32, self.exp_cmd_sn + self.window - 1);
        let has_status = !matches!(pdu[0] & 0x3f, 0x25 | 0x31) || pdu[1] & 1 != 0;
        if has_status && pdu[16..20] != [0xff; 4] {
            self.stat_sn += 1;
        }
        let frame = Frame {
            bhs: &pdu,
            ahs: &[],
            data,
            is_intact: true,
        };
        self.session.handle_pdu(&frame, self.now);
    }

    fn next(&mut self) -> Output {
        self.session.poll_output().expect("an output")
    }

    fn sent(&mut self) -> ControlPdu {
        match self.next() {
            Output::Send(pdu) => pdu,
            other => panic!("{other:?}"),
        }
    }

    fn spec(&self, (len, effect): (DataLen, Effect)) -> RequestSpec {
        RequestSpec {
            lun: [0, 3, 0, 0, 0, 0, 0, 0],
            attr: TaskAttr::Simple,
            cdb: Cdb::new(&[0x88; 16]).unwrap(),
            len,
            deadline: self.now + 60 * SEC,
            retry: Retry::Standard,
            effect,
        }
    }

    fn submit(&mut self, what: (DataLen, Effect)) -> RequestId {
        let spec = self.spec(what);
        self.session.submit(spec, self.now).unwrap()
    }

    /// Expects a start as the next output; returns the encoded command.
    fn started(&mut self) -> (RequestId, CommandPdu) {
        let request = match self.next() {
            Output::Start(request) => request,
            other => panic!("{other:?}"),
        };
        let command = self.session.emit_command(request).unwrap();
        // Each session starts with 1.
        assert_eq!(word(&command.bhs, 24), self.exp_cmd_sn);
        self.exp_cmd_sn += 1;
        self.tags.retain(|(sent, _)| *sent != request);
        self.tags.push((request, word(&command.bhs, 16)));
        (request, command)
    }

    fn respond(&mut self, itt: u32, status: u8) {
        self.respond_with(itt, status, &[]);
    }

    /// Completes a command with this data segment.
    fn respond_with(&mut self, itt: u32, status: u8, data: &[u8]) {
        let mut pdu = bhs(0x21, 0x80, itt);
        pdu[3] = status;
        self.receive(pdu, data);
    }

    /// Returns the tag of the last command sent for a request.
    fn tag(&self, request: RequestId) -> u32 {
        let sent = self.tags.iter().find(|(sent, _)| *sent == request);
        sent.unwrap().1
    }

    /// Some of the data in transit has arrived.
    fn progress(&mut self) {
        self.session.handle_progress(|_| true, |_| true, self.now);
    }

    fn reconnecting(&mut self, why: Down) {
        assert_eq!(self.next(), Output::Event(SessionEvent::Reconnecting(why)));
        self.advance(SEC);
        assert_eq!(self.next(), Output::Connect(None));
    }
}

impl script::Rig for Rig {
    type Session = IscsiSession;
    /// Initiator Task Tag of the request.
    type Function = u32;

    const RESETS: usize = 2;
    const ABORTED: &'static [FunctionOutcome] =
        &[FunctionOutcome::Complete, FunctionOutcome::NoTask];

    fn connecting() -> Self {
        Self::connecting(quiet())
    }

    fn live() -> Self {
        let mut rig = Self::connecting(quiet());
        rig.log_in();
        rig
    }

    fn live_without_reconnect() -> Self {
        let mut rig = Self::connecting(SessionConfig {
            reconnect: false,
            ..quiet()
        });
        rig.log_in();
        rig
    }

    fn session(&mut self) -> &mut IscsiSession {
        &mut self.session
    }

    fn state(&self) -> SessionState {
        self.session.state()
    }

    fn requests(&self) -> usize {
        self.session.requests()
    }

    fn now(&self) -> Instant {
        self.now
    }

    fn advance(&mut self, by: Duration) {
        self.now += by;
        self.session.handle_timeout(self.now);
    }

    fn spec(&self, effect: Effect) -> RequestSpec {
        let len = match effect {
            Effect::Blocks { .. } => DataLen::Out(512),
            Effect::None => DataLen::In(1024),
            _ => DataLen::None,
        };
        Self::spec(self, (len, effect))
    }

    fn expect_idle(&mut self) {
        assert_eq!(self.session.poll_output(), None);
    }

    fn expect_event(&mut self) -> SessionEvent {
        match self.next() {
            Output::Event(event) => event,
            other => panic!("{other:?}"),
        }
    }

    fn expect_start(&mut self) -> RequestId {
        self.started().0
    }

    fn expect_retire(&mut self, request: RequestId) {
        assert_eq!(self.next(), Output::Retire(request));
    }

    fn expect_completion(&mut self, request: RequestId) -> RequestResult {
        match self.next() {
            Output::Complete(id, result) => {
                assert_eq!(id, request);
                result
            }
            other => panic!("{other:?}"),
        }
    }

    fn expect_abort(&mut self, request: RequestId) -> u32 {
        let abort = self.sent();
        assert_eq!((abort.bhs[0], abort.bhs[1]), (0x42, 0x81), "ABORT TASK");
        assert_eq!(word(&abort.bhs, 20), self.tag(request));
        word(&abort.bhs, 16)
    }

    fn expect_abort_and_retire(&mut self, aborted: RequestId, retired: RequestId) -> u32 {
        self.expect_retire(retired);
        self.expect_abort(aborted)
    }

    fn expect_reset(&mut self, step: usize) -> u32 {
        let reset = self.sent();
        let functions = [(0x85, "LOGICAL UNIT RESET"), (0x86, "TARGET WARM RESET")];
        let (function, name) = functions[step];
        assert_eq!((reset.bhs[0], reset.bhs[1]), (0x42, function), "{name}");
        word(&reset.bhs, 16)
    }

    fn expect_disconnect(&mut self) {
        assert_eq!(self.next(), Output::Disconnect);
        self.session.handle_disconnected(self.now);
    }

    fn expect_logout(&mut self) {
        let logout = self.sent();
        assert_eq!((logout.bhs[0], logout.bhs[1]), (0x46, 0x80));
        self.receive(bhs(0x26, 0x80, word(&logout.bhs, 16)), &[]);
        self.expect_disconnect();
    }

    fn expect_abandonment(&mut self) {
        assert_eq!(self.sent().bhs[0], 0x46, "a logout");
        self.session.handle_broken(self.now);
        self.expect_disconnect();
    }

    fn expect_last_disconnect(&mut self) {
        self.expect_disconnect();
    }

    fn expect_connect(&mut self) {
        assert_eq!(self.next(), Output::Connect(None));
    }

    fn start_login(&mut self) {
        self.session.handle_connected([7; 33], self.now);
        assert_eq!(self.sent().bhs[0], 0x43, "a login request");
    }

    fn fail_connect(&mut self, error: ConnectError) {
        self.session.handle_connect_failed(error, self.now);
    }

    fn reject_login(&mut self) {
        self.session.handle_connected([7; 33], self.now);
        self.sent();
        let mut rejection = bhs(0x23, 0, 0);
        (rejection[36], rejection[37]) = (2, 1);
        self.receive(rejection, &[]);
        self.expect_disconnect();
    }

    fn is_login_rejection(why: Down) -> bool {
        let Down::Connect(ConnectError::IscsiLogin(error)) = why else {
            return false;
        };
        error.to_string().contains("0201h")
    }

    fn log_in(&mut self) {
        Self::log_in(self);
    }

    fn reject_established(&mut self) {
        let refused = ConnectError::Login(SrpLoginError::Refused(28));
        self.session.handle_connect_failed(refused, self.now);
    }

    fn break_connection(&mut self) {
        self.session.handle_broken(self.now);
    }

    fn respond(&mut self, request: RequestId, status: u8, sense: &[u8]) {
        let mut data = Vec::new();
        if !sense.is_empty() {
            data.extend_from_slice(&(sense.len() as u16).to_be_bytes());
            data.extend_from_slice(sense);
        }
        self.respond_with(self.tag(request), status, &data);
    }

    fn respond_to_function(&mut self, function: &u32, outcome: FunctionOutcome) {
        let mut response = bhs(0x22, 0x80, *function);
        response[2] = match outcome {
            FunctionOutcome::Complete => 0,
            FunctionOutcome::NoTask => 1,
            FunctionOutcome::Failed => 5,
        };
        self.receive(response, &[]);
    }

    fn receive_message(&mut self) {
        self.receive(bhs(0x20, 0x80, u32::MAX), &[]);
    }

    fn handle_retired(&mut self, request: RequestId) {
        self.session.handle_retired(request, self.now);
    }
}

/// Returns the configuration of a session that should not send any pings during a test.
fn quiet() -> SessionConfig {
    SessionConfig {
        ping: 1000 * SEC,
        ..config()
    }
}

const READ: (DataLen, Effect) = (DataLen::In(1024), Effect::None);

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

fn states() -> [ConnState; 6] {
    let until = Instant::now();
    [
        ConnState::Free,
        ConnState::XptWait(until),
        ConnState::InLogin(until),
        ConnState::LoggedIn,
        ConnState::InLogout(until),
        ConnState::CleanupWait,
    ]
}

#[test]
fn connection_transitions_match_diagram() {
    let expected = "Free: XptWait\n\
                    XptWait: Free InLogin CleanupWait\n\
                    InLogin: LoggedIn CleanupWait\n\
                    LoggedIn: InLogout CleanupWait\n\
                    InLogout: CleanupWait\n\
                    CleanupWait: Free\n";
    assert_eq!(table(&states()), expected);
}

#[test]
fn connection_transition_coverage_is_complete() {
    assert_all_taken(&states(), || {
        let mut closed = Rig::live();
        closed.session.close(closed.now);
        closed.session.handle_broken(closed.now);
        closed.session.handle_disconnected(closed.now);
        let mut broken = Rig::live();
        broken.session.handle_broken(broken.now);
        let mut silent = Rig::connecting(config());
        silent.session.handle_connected([7; 33], silent.now);
        silent.session.handle_broken(silent.now);
        let mut late = Rig::connecting(config());
        late.session.close(late.now);
        let mut refused = Rig::connecting(config());
        let error = ConnectError::Unreachable;
        refused.session.handle_connect_failed(error, refused.now);
    });
}

#[test]
fn write_sends_burst_then_solicited_data() {
    let mut rig = Rig::live();
    let id = rig.submit(out(4096, 0));
    let (request, command) = rig.started();
    assert_eq!(request, id);
    // A single segment of immediate data, limited by the first burst; then an R2T.
    assert_eq!(
        (command.bhs[0], command.bhs[1]),
        (0x01, 0xa1),
        "write, simple, final"
    );
    assert_eq!((word(&command.bhs, 20), word(&command.bhs, 24)), (4096, 1));
    assert_eq!((command.immediate, command.unsolicited), (1024, None));
    let itt = word(&command.bhs, 16);
    let mut r2t = bhs(0x31, 0x80, itt);
    put_word(&mut r2t, 20, 9);
    put_word(&mut r2t, 40, 1024);
    put_word(&mut r2t, 44, 3072);
    rig.receive(r2t, &[]);
    let Output::SendData(order) = rig.next() else {
        panic!("no data");
    };
    assert_eq!((order.offset, order.len, order.ttt.0), (1024, 3072, 9));
    rig.session.handle_data_sent(&order);
    rig.respond(itt, 0);
    rig.retire(id);
    let response = rig.expect_completion(id).unwrap();
    assert_eq!((response.status, response.transferred), (0, 4096));
}

#[test]
fn rdma_target_fetches_data_of_many_writes() {
    let start = |rig: &mut Rig| {
        rig.submit(out(4096, 0));
        let (_, command) = rig.started();
        assert_eq!(command.unsolicited, None);
        (command.immediate, word(&command.bhs, 16))
    };
    let mut tcp = Rig::live();
    let mut rdma = Rig::live();
    rdma.session.set_reads(16);
    for n in 0..4 {
        assert_eq!(start(&mut tcp).0, 1024);
        let (immediate, itt) = start(&mut rdma);
        assert_eq!(immediate, if n < 3 { 1024 } else { 0 });
        if n == 3 {
            // No data was sent, so a target without RDMA would solicit all of it.
            let mut r2t = bhs(0x31, 0x80, itt);
            put_word(&mut r2t, 20, 9);
            put_word(&mut r2t, 44, 4096);
            rdma.receive(r2t, &[]);
            let Output::SendData(order) = rdma.next() else {
                panic!("no data");
            };
            assert_eq!((order.offset, order.len), (0, 4096));
        }
    }
}

#[test]
fn r2t_for_sent_data_breaks_connection() {
    let mut rig = Rig::live();
    rig.submit(out(4096, 0));
    let (_, command) = rig.started();
    let mut r2t = bhs(0x31, 0x80, word(&command.bhs, 16));
    put_word(&mut r2t, 20, 9);
    put_word(&mut r2t, 44, 4096);
    rig.receive(r2t, &[]);
    rig.expect_disconnect();
    rig.reconnecting(Down::IscsiFault(IscsiFault::R2t));
}

#[test]
fn data_in_is_ordered_and_carries_status() {
    let mut rig = Rig::live();
    let id = rig.submit(READ);
    let (_, command) = rig.started();
    let itt = word(&command.bhs, 16);
    let mut first = bhs(0x25, 0, itt);
    put_word(&mut first, 32, rig.exp_cmd_sn + 10);
    assert_eq!(
        rig.session.place_data(&first, 512),
        Ok(Placement::Into(id, 0))
    );
    rig.session.handle_data_in(&first, 512, true, rig.now);
    let mut last = bhs(0x25, 0x83, itt);
    put_word(&mut last, 24, 102);
    put_word(&mut last, 36, 1);
    put_word(&mut last, 40, 512);
    put_word(&mut last, 44, 12);
    assert_eq!(
        rig.session.place_data(&last, 513),
        Err(IscsiFault::DataRange)
    );
    let mut again = last;
    put_word(&mut again, 36, 0);
    assert_eq!(
        rig.session.place_data(&again, 500),
        Err(IscsiFault::DataOrder)
    );
    assert_eq!(
        rig.session.place_data(&last, 500),
        Ok(Placement::Into(id, 512))
    );
    rig.session.handle_data_in(&last, 500, true, rig.now);
    rig.retire(id);
    let want = CommandResponse {
        status: 0,
        sense: None,
        transferred: 1012,
        overflow: 0,
    };
    assert_eq!(rig.expect_completion(id), Ok(want));
    assert_eq!(rig.session.exp_stat_sn().0, 103);
    // Further data for it is discarded.
    assert_eq!(rig.session.place_data(&last, 500), Ok(Placement::Discard));
    let strange = bhs(0x25, 0, 0x0001_0009);
    assert!(matches!(
        rig.session.place_data(&strange, 4),
        Err(IscsiFault::UnknownTask(_))
    ));
}

#[test]
fn missing_data_in_reduces_transferred_length() {
    let mut rig = Rig::live();
    let id = rig.submit(READ);
    let (_, command) = rig.started();
    rig.respond(word(&command.bhs, 16), 0);
    rig.retire(id);
    assert_eq!(rig.expect_completion(id).unwrap().transferred, 0);
}

#[test]
fn command_window_delays_commands() {
    let mut rig = Rig::connecting(config());
    rig.window = 1;
    rig.log_in();
    let a = rig.submit(READ);
    let b = rig.submit(READ);
    let (first, command) = rig.started();
    assert_eq!(first, a);
    rig.expect_idle();
    rig.respond(word(&command.bhs, 16), 0);
    assert_eq!(rig.next(), Output::Retire(a));
    let (second, command) = rig.started();
    assert_eq!((second, word(&command.bhs, 24)), (b, 2));
}

#[test]
fn duplicate_response_is_counted_and_dropped() {
    let mut rig = Rig::live();
    let id = rig.submit(READ);
    let (_, command) = rig.started();
    let itt = word(&command.bhs, 16);
    rig.respond(itt, 0);
    rig.retire(id);
    assert!(rig.expect_completion(id).is_ok());
    rig.expect_idle();
    rig.respond(itt, 0);
    assert_eq!(rig.next(), Output::Event(SessionEvent::Stale));
    rig.expect_idle();
}

#[test]
fn sense_is_returned_and_busy_is_retried() {
    let mut rig = Rig::live();
    let id = rig.submit(READ);
    let (_, command) = rig.started();
    rig.respond(word(&command.bhs, 16), 0x08);
    rig.retire(id);
    rig.expect_idle();
    rig.advance(10 * MS);
    let (_, command) = rig.started();
    let mut pdu = bhs(0x21, 0x82, word(&command.bhs, 16));
    pdu[3] = 2;
    put_word(&mut pdu, 44, 1024);
    let mut data = vec![0, 18];
    data.extend([0x70, 0, 3, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x11, 0, 0, 0, 0, 0]);
    rig.receive(pdu, &data);
    rig.retire(id);
    let response = rig.expect_completion(id).unwrap();
    assert_eq!((response.status, response.transferred), (2, 0));
    assert_eq!(response.sense.unwrap().len(), 18);
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
fn reject_only_fails_its_command() {
    let mut rig = Rig::live();
    let id = rig.submit(READ);
    let (_, command) = rig.started();
    let mut reject = bhs(0x3f, 0x80, 0xffff_ffff);
    reject[2] = 9;
    rig.receive(reject, &command.bhs);
    rig.retire(id);
    let error = rig.expect_completion(id).unwrap_err();
    assert!(matches!(error, RequestError::Rejected(_)), "{error}");
    rig.expect_idle();
    rig.receive(reject, b"short");
    rig.expect_disconnect();
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

/// CVE-2026-99154: a task tag that is negative as a signed number is a normal tag that matches none
/// of our commands, regardless of its lower half.
#[test]
fn cve_2026_99154_negative_task_tags_are_unknown() {
    let high = [0x8000_0000, 0xffff_0000, 0xfffe_0000, 0x8001_0000];
    for tag in high.into_iter().flat_map(|half| [half, half | 1, half | 3]) {
        for opcode in [0x21, 0x25, 0x31] {
            let mut rig = Rig::live();
            let ids = [(); 4].map(|()| rig.submit(READ));
            let commands = [(); 4].map(|()| rig.started());
            let used = commands.map(|(_, command)| word(&command.bhs, 16));
            assert!(
                used.iter().all(|itt| (*itt).cast_signed() >= 0),
                "{used:x?}"
            );
            let pdu = bhs(opcode, 0x80, tag);
            if opcode == 0x25 {
                let placed = rig.session.place_data(&pdu, 512);
                assert_eq!(placed, Err(IscsiFault::UnknownTask(Itt(tag))));
            }
            rig.receive(pdu, &[]);
            rig.expect_disconnect();
            rig.reconnecting(Down::IscsiFault(IscsiFault::UnknownTask(Itt(tag))));
            rig.log_in();
            // All of them are retried.
            for id in ids {
                assert_eq!(rig.started().0, id, "{opcode:#x}, {tag:#x}");
            }
        }
    }
}

/// CVE-2023-2162: a session is closed at any point, while the target continues to use it. Each
/// request completes once, and later messages do not find it.
#[test]
fn cve_2023_2162_closed_session_is_not_used() {
    const ENDS: [fn(&mut IscsiSession, Instant); 2] = [
        |session, now| session.close(now),
        |session, now| session.handle_broken(now),
    ];
    for (end, progress) in ENDS
        .into_iter()
        .flat_map(|end| (0..5).map(move |n| (end, n)))
    {
        let mut rig = Rig::connecting(SessionConfig {
            reconnect: false,
            ..config()
        });
        rig.log_in();
        let ids = [rig.submit(READ), rig.submit(out(512, 0)), rig.submit(READ)];
        let tags = [(); 3].map(|()| word(&rig.started().1.bhs, 16));
        let mut completed = Vec::new();
        if progress > 0 {
            rig.respond(tags[0], 0);
        }
        if progress > 1 {
            rig.retire(ids[0]);
        }
        if progress > 2 {
            let mut r2t = bhs(0x31, 0x80, tags[1]);
            put_word(&mut r2t, 20, 7);
            put_word(&mut r2t, 44, 64);
            rig.receive(r2t, &[]);
        }
        if progress > 3 {
            rig.advance(3 * SEC);
        }
        end(&mut rig.session, rig.now);
        let mut is_closed = false;
        for round in 0..40 {
            while let Some(output) = rig.session.poll_output() {
                match output {
                    Output::Complete(id, _) => completed.push(id),
                    Output::Event(SessionEvent::Closed(_)) => is_closed = true,
                    Output::Retire(id) => rig.session.handle_retired(id, rig.now),
                    Output::Disconnect => rig.session.handle_disconnected(rig.now),
                    other => assert!(!is_closed, "{other:?} after the end"),
                }
            }
            // PDUs in flight are still received.
            for tag in tags {
                let data = bhs(0x25, 0x81, tag);
                if rig.session.place_data(&data, 16).is_ok() {
                    rig.session.handle_data_in(&data, 16, true, rig.now);
                }
                rig.respond(tag, 0);
            }
            for id in ids {
                assert!(
                    !is_closed || rig.session.emit_command(id).is_none(),
                    "{round}"
                );
            }
            rig.session.handle_timeout(rig.now);
            rig.session.handle_progress(|_| true, |_| true, rig.now);
            rig.session.handle_broken(rig.now);
            rig.now += SEC;
        }
        completed.sort();
        assert_eq!((is_closed, completed), (true, ids.to_vec()), "{progress}");
        assert_eq!(rig.session.next_deadline(), None);
        let late = rig.session.submit(rig.spec(READ), rig.now);
        assert_eq!(late, Err(SubmitError::Closed));
    }
}

/// CVE-2026-18724 to CVE-2026-18728: names of targets are used in paths and on terminals.
#[test]
fn cve_2026_18724_to_2026_18728_target_names_are_checked() {
    let listed = |text: &[u8]| {
        let mut config = config();
        config.target = None;
        let mut rig = Rig::connecting(config);
        rig.log_in();
        let wish = rig.sent();
        rig.receive(bhs(0x24, 0x80, word(&wish.bhs, 16)), text);
        rig.next()
    };
    for name in [
        "iqn.2026-01.a:../../etc/shadow",
        "iqn.2026-01.a:x/y",
        "iqn.2026-01.a:x y",
        "iqn.2026-01.a:x;reboot",
        "iqn.2026-01.a:$(id)",
        "iqn.2026-01.a:%2e%2e",
        "../x",
        ".",
    ] {
        let text = format!(
            "TargetName={name}\0TargetAddress=10.0.0.1:3260,1\0\
             TargetName=iqn.2026-01.a:good\0TargetAddress=10.0.0.2:3260,1\0"
        );
        let Output::Found(found) = listed(text.as_bytes()) else {
            panic!("{name:?}");
        };
        let names: Vec<_> = found.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names, ["iqn.2026-01.a:good"], "{name:?}");
        assert_eq!(found[0].addresses.len(), 1, "{name:?}");
    }
    // Control characters are not allowed in any text of the protocol.
    for byte in (1..0x20).chain([0x7f]) {
        for key in ["TargetName=iqn.2026-01.a:x", "TargetAddress=10.0.0.1"] {
            let text = [
                b"TargetName=iqn.2026-01.a:y\0",
                key.as_bytes(),
                &[byte],
                b"z\0",
            ]
            .concat();
            assert_eq!(listed(&text), Output::Disconnect, "{key}{byte:#x}");
        }
    }
}

#[derive(Clone, Debug)]
enum Action {
    Submit(u8),
    Respond(u8, u8),
    SolicitData(u8),
    Retire(u8),
    Advance(u16),
    Garbage(u8, Vec<u8>),
    Forged(Forged),
    Break,
    Connect(bool),
    RespondTmf(u8),
    Pong,
    Close,
}

/// A PDU of a target that violates the protocol, with some valid fields.
#[derive(Clone, Debug)]
struct Forged {
    /// The command with its tag.
    which: u8,
    /// Bit mask of valid fields.
    right: u8,
    /// Length of its data.
    len: u8,
    bhs: [u64; 6],
}

fn forged() -> impl Strategy<Value = Forged> {
    let bhs = prop::array::uniform6(any::<u64>());
    (any::<[u8; 3]>(), bhs).prop_map(|([which, right, len], bhs)| Forged {
        which,
        right,
        len,
        bhs,
    })
}

fn action() -> impl Strategy<Value = Action> {
    one_of![
        4 => forged().prop_map(Action::Forged),
        6 => (0u8..4).prop_map(Action::Submit),
        6 => (any::<u8>(), 0u8..4).prop_map(|(i, s)| Action::Respond(i, s)),
        2 => any::<u8>().prop_map(Action::SolicitData),
        6 => any::<u8>().prop_map(Action::Retire),
        2 => (0u16..8000).prop_map(Action::Advance),
        1 => (any::<u8>(), proptest::collection::vec(any::<u8>(), 0..60))
            .prop_map(|(opcode, bytes)| Action::Garbage(opcode, bytes)),
        1 => Just(Action::Break),
        4 => prop::bool::weighted(0.8).prop_map(Action::Connect),
        2 => any::<u8>().prop_map(Action::RespondTmf),
        2 => Just(Action::Pong),
    ]
}

/// State known to the session's owner and to its target.
struct Model {
    rig: Rig,
    /// Accepted and incomplete requests.
    open: HashSet<RequestId>,
    /// Started and unretired requests, with their tags.
    exposed: HashMap<RequestId, u32>,
    retiring: Vec<RequestId>,
    tmfs: Vec<u32>,
    pings: Vec<u32>,
    connecting: bool,
}

impl Model {
    fn new() -> Self {
        let now = Instant::now();
        let mut model = Self {
            rig: Rig {
                session: IscsiSession::new(config(), now),
                now,
                stat_sn: 100,
                exp_cmd_sn: 1,
                window: 64,
                tags: Vec::new(),
            },
            open: HashSet::new(),
            exposed: HashMap::new(),
            retiring: Vec::new(),
            tmfs: Vec::new(),
            pings: Vec::new(),
            connecting: false,
        };
        model.drain();
        model
    }

    fn pick(&self, which: u8) -> Option<(RequestId, u32)> {
        let mut all: Vec<_> = self.exposed.iter().map(|(id, itt)| (*id, *itt)).collect();
        all.retain(|(id, _)| !self.retiring.contains(id));
        all.sort_unstable();
        (!all.is_empty()).then(|| all[usize::from(which) % all.len()])
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Submit(kind) => {
                let kinds = [
                    READ,
                    (DataLen::None, Effect::Other),
                    out(4096, 0),
                    out(512, 4),
                ];
                let spec = RequestSpec {
                    lun: [0; 8],
                    attr: TaskAttr::Simple,
                    cdb: Cdb::new(&[0; 6]).unwrap(),
                    len: kinds[usize::from(kind)].0,
                    deadline: self.rig.now + 30 * SEC,
                    retry: Retry::Standard,
                    effect: kinds[usize::from(kind)].1,
                };
                if let Ok(id) = self.rig.session.submit(spec, self.rig.now) {
                    assert!(self.open.insert(id));
                }
            }
            Action::Respond(which, status) => {
                if let Some((_, itt)) = self.pick(which) {
                    self.rig.respond(itt, [0, 2, 8, 0x28][usize::from(status)]);
                }
            }
            Action::SolicitData(which) => {
                if let Some((_, itt)) = self.pick(which) {
                    let mut r2t = bhs(0x31, 0x80, itt);
                    put_word(&mut r2t, 20, 5);
                    put_word(&mut r2t, 40, 1024);
                    put_word(&mut r2t, 44, 1024);
                    self.rig.receive(r2t, &[]);
                }
            }
            Action::Retire(which) if !self.retiring.is_empty() => {
                let at = usize::from(which) % self.retiring.len();
                let id = self.retiring.remove(at);
                self.exposed.remove(&id);
                self.rig.session.handle_retired(id, self.rig.now);
            }
            Action::Advance(ms) => self.rig.advance(u32::from(ms) * MS),
            Action::Garbage(opcode, bytes) => {
                let mut pdu = [0; BHS_LEN];
                let len = bytes.len().min(BHS_LEN);
                pdu[..len].copy_from_slice(&bytes[..len]);
                pdu[0] = opcode;
                let frame = Frame {
                    bhs: &pdu,
                    ahs: &[],
                    data: &bytes[len..],
                    is_intact: true,
                };
                let _ = self.rig.session.place_data(&pdu, 100);
                self.rig.session.handle_pdu(&frame, self.rig.now);
            }
            Action::Forged(forged) => self.forge(&forged),
            Action::Break => self.rig.session.handle_broken(self.rig.now),
            Action::Connect(true) if self.connecting => {
                self.connecting = false;
                self.rig.log_in();
            }
            Action::Connect(false) if self.connecting => {
                self.connecting = false;
                let error = ConnectError::Unreachable;
                self.rig.session.handle_connect_failed(error, self.rig.now);
            }
            Action::RespondTmf(status) if !self.tmfs.is_empty() => {
                let mut pdu = bhs(0x22, 0x80, self.tmfs.remove(0));
                pdu[2] = status % 7;
                self.rig.receive(pdu, &[]);
            }
            Action::Pong if !self.pings.is_empty() => {
                let itt = self.pings.remove(0);
                self.rig.receive(bhs(0x20, 0x80, itt), &[]);
            }
            Action::Close => self.rig.session.close(self.rig.now),
            _ => {}
        }
        self.drain();
    }

    /// Passes a PDU to the session like its owner: data of a command is placed first.
    fn forge(&mut self, forged: &Forged) {
        let mut pdu = [0; BHS_LEN];
        for (at, word) in forged.bhs.iter().enumerate() {
            pdu[8 * at..][..8].copy_from_slice(&word.to_le_bytes());
        }
        let is_right = |bit: u8| forged.right & 1 << bit != 0;
        if is_right(0) {
            // Opcodes of a target, which are consecutive except for the last three.
            let opcodes = [
                0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x25, 0x26, 0x31, 0x32, 0x3f,
            ];
            pdu[0] = opcodes[usize::from(pdu[0]) % opcodes.len()];
        }
        if let Some((_, itt)) = self.pick(forged.which).filter(|_| is_right(1)) {
            put_word(&mut pdu, 16, itt);
        }
        if is_right(2) {
            put_word(&mut pdu, 20, u32::MAX);
        }
        if is_right(3) {
            put_word(&mut pdu, 24, self.rig.stat_sn);
        }
        if is_right(4) {
            put_word(&mut pdu, 28, self.rig.exp_cmd_sn);
            put_word(&mut pdu, 32, self.rig.exp_cmd_sn + self.rig.window);
        }
        if is_right(5) {
            // Low offsets and numbers.
            for at in [36, 40, 44] {
                let value = word(&pdu, at);
                put_word(&mut pdu, at, value % 8192);
            }
        }
        if pdu[0] & 0x3f == 0x25 && forged.len > 0 {
            return self.forge_data(&pdu, u32::from(forged.len));
        }
        let data = vec![forged.which; forged.len.into()];
        let frame = Frame {
            bhs: &pdu,
            ahs: &[],
            data: &data,
            is_intact: !is_right(6),
        };
        self.rig.session.handle_pdu(&frame, self.rig.now);
    }

    /// Data may only be placed if an outstanding command has room for it.
    fn forge_data(&mut self, pdu: &[u8; BHS_LEN], len: u32) {
        match self.rig.session.place_data(pdu, len) {
            Err(fault) => return self.rig.session.handle_fault(fault),
            Ok(Placement::Into(request, offset)) => {
                assert!(self.exposed.contains_key(&request), "its memory is here");
                assert!(!self.retiring.contains(&request), "its memory is going");
                assert!(offset.checked_add(len).is_some_and(|end| end <= 1024));
            }
            Ok(Placement::Discard) => {}
        }
        let now = self.rig.now;
        self.rig.session.handle_data_in(pdu, len, true, now);
    }

    fn drain(&mut self) {
        while let Some(output) = self.rig.session.poll_output() {
            match output {
                Output::Connect(_) => self.connecting = true,
                Output::Send(pdu) => match pdu.bhs[0] & 0x3f {
                    0x02 => self.tmfs.push(word(&pdu.bhs, 16)),
                    0x00 if word(&pdu.bhs, 16) != 0xffff_ffff => {
                        self.pings.push(word(&pdu.bhs, 16));
                    }
                    _ => {}
                },
                Output::Start(id) => {
                    assert!(self.open.contains(&id));
                    let command = self.rig.session.emit_command(id);
                    if let Some(command) = command {
                        self.rig.exp_cmd_sn += 1;
                        let itt = word(&command.bhs, 16);
                        let before = self.exposed.insert(id, itt);
                        assert!(before.is_none(), "memory is exposed once");
                    }
                }
                Output::SendData(order) => {
                    assert!(self.exposed.contains_key(&order.request));
                    self.rig.session.handle_data_sent(&order);
                }
                Output::Retire(id) => self.retiring.push(id),
                Output::Disconnect => {
                    self.connecting = false;
                    self.exposed.clear();
                    self.retiring.clear();
                    self.tmfs.clear();
                    self.pings.clear();
                    self.rig.session.handle_disconnected(self.rig.now);
                }
                Output::Complete(id, _) => {
                    assert!(self.open.remove(&id), "completed once");
                    assert!(!self.exposed.contains_key(&id), "memory is back");
                }
                Output::FullFeature(_) | Output::Found(_) | Output::Event(_) => {}
            }
        }
    }
}

/// After any history, each accepted request has completed exactly once, and never while its memory
/// was in use.
fn run(actions: Vec<Action>) {
    let mut model = Model::new();
    for action in actions {
        model.act(action);
    }
    model.act(Action::Close);
    model.act(Action::Advance(1000));
    assert!(model.open.is_empty(), "{} left", model.open.len());
    assert_eq!(model.rig.session.state(), SessionState::Closed);
}

proptest! {
    #[test]
    fn requests_complete_exactly_once(actions in proptest::collection::vec(action(), 1..200)) {
        run(actions);
    }
}

#[test]
fn hostile_iscsi_target() {
    bolero::check!(name = "hostile_iscsi_target").for_each(|bytes: &[u8]| {
        if let Some(((), actions)) = fuzz::history(&Just(()), &action(), bytes) {
            run(actions);
        }
    });
}

impl Rig {
    /// Logs in to a portal group, with this time to wait after an unexpected disconnect.
    fn log_in_at(&mut self, group: u16, time2wait: u16) {
        (self.stat_sn, self.exp_cmd_sn) = (100, 1);
        self.session.handle_connected([7; 33], self.now);
        self.sent();
        let text = format!("TargetPortalGroupTag={group}\0AuthMethod=None\0");
        self.login_response(0x81, text.as_bytes());
        self.sent();
        let text = format!("DefaultTime2Wait={time2wait}\0");
        self.login_response(0x87, text.as_bytes());
        assert!(matches!(self.next(), Output::FullFeature(_)));
        assert_eq!(self.next(), Output::Event(SessionEvent::Live));
    }

    /// Loses the connection with an outstanding write, and reconnects.
    fn lose_with_a_write(&mut self) -> RequestId {
        let write = self.submit(out(512, 0));
        self.started();
        self.lose();
        write
    }

    fn lose(&mut self) {
        self.lose_connection();
        self.reconnecting(Down::ConnectionLost);
    }

    /// Returns the wait before the next login.
    fn wait_for_login(&self) -> Duration {
        match self.session.state() {
            SessionState::Backoff { until } => until - self.now,
            state => panic!("{state:?}"),
        }
    }

    /// Logs in to a portal that redirects to `to`.
    fn redirected(&mut self, status: u8, to: &str) {
        (self.stat_sn, self.exp_cmd_sn) = (100, 1);
        self.session.handle_connected([7; 33], self.now);
        self.sent();
        let mut pdu = bhs(0x23, 0x80, 0);
        pdu[8..14].copy_from_slice(&[0x80, 1, 2, 3, 4, 5]);
        pdu[20..24].fill(0);
        (pdu[36], pdu[37]) = (1, status);
        self.receive(pdu, format!("TargetAddress={to}\0").as_bytes());
        self.expect_disconnect();
    }

    fn connects_to(&mut self, host: Option<&str>) {
        match self.next() {
            Output::Connect(to) => assert_eq!(to.as_ref().map(|to| &*to.host), host),
            other => panic!("{other:?}"),
        }
    }
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
        while rig.now < settle_at {
            rig.receive(bhs(0x20, 0x80, u32::MAX), &[]);
            rig.advance(SEC.min(settle_at - rig.now));
        }
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

/// Otherwise, a busy path would fail all of its checks.
#[test]
fn probe_overtakes_queued_data() {
    let mut rig = Rig::live();
    for start in 0..8 {
        rig.submit(out(512, 100 * start));
    }
    let (first, command) = rig.started();
    for _ in 1..4 {
        rig.started();
    }
    let mut probe = rig.spec(READ);
    probe.retry = Retry::Probe;
    let probe = rig.session.submit(probe, rig.now).unwrap();
    rig.respond(word(&command.bhs, 16), 0);
    rig.retire(first);
    rig.expect_completion(first).unwrap();
    assert_eq!(rig.started().0, probe);
}

/// RFC 7143 clause 7.8: the immediate data of a discarded command is recovered by retrying the
/// task.
#[test]
fn rejected_digest_repeats_write() {
    // DATA DIGEST ERROR, WAITING FOR LOGOUT
    for reason in [0x02, 0x0c] {
        let mut rig = Rig::live();
        let write = rig.submit(out(512, 0));
        let (_, command) = rig.started();
        let mut reject = bhs(0x3f, 0x80, u32::MAX);
        reject[2] = reason;
        rig.receive(reject, &command.bhs);
        rig.expect_disconnect();
        let Output::Event(SessionEvent::Reconnecting(Down::IscsiFault(fault))) = rig.next() else {
            panic!("no new login");
        };
        assert!(matches!(fault, IscsiFault::Rejected(_)));
        rig.advance(SEC);
        rig.connects_to(None);
        rig.log_in();
        assert_eq!(rig.started().0, write);
    }
    // INVALID PDU FIELD only affects the command.
    let mut rig = Rig::live();
    let write = rig.submit(out(512, 0));
    let (_, command) = rig.started();
    let mut reject = bhs(0x3f, 0x80, u32::MAX);
    reject[2] = 0x09;
    rig.receive(reject, &command.bhs);
    rig.retire(write);
    rig.expect_completion(write).unwrap_err();
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

/// Linux does the same after DID_ERROR.
#[test]
fn failed_response_repeats_request() {
    let mut rig = Rig::connecting(SessionConfig {
        max_attempts: 32,
        ..config()
    });
    rig.log_in();
    let read = rig.submit((DataLen::In(512), Effect::Read { start: 0, end: 1 }));
    for attempt in 0..6 {
        let (id, command) = rig.started();
        assert_eq!(id, read);
        let mut response = bhs(0x21, 0x80, word(&command.bhs, 16));
        match attempt {
            // TARGET FAILURE
            0..5 => response[2] = 1,
            // GOOD, without data.
            _ => {
                response[1] |= 2;
                put_word(&mut response, 44, 512);
            }
        }
        rig.receive(response, &[]);
        rig.retire(read);
        rig.advance(SEC);
    }
    assert_eq!(rig.expect_completion(read).unwrap().transferred, 0);
    // A command with another effect is not retried.
    let other = rig.submit((DataLen::None, Effect::Other));
    let (_, command) = rig.started();
    let mut response = bhs(0x21, 0x80, word(&command.bhs, 16));
    response[2] = 1;
    rig.receive(response, &[]);
    rig.retire(other);
    let failed = rig.expect_completion(other);
    assert_eq!(failed, Err(RequestError::TargetFailure(1)));
}

/// If a target reports success before receiving the data of a write, it has not actually written
/// it.
#[test]
fn good_write_counts_only_solicited_data() {
    let mut rig = Rig::live();
    let write = rig.submit(out(4096, 0));
    let (request, command) = rig.started();
    rig.respond(word(&command.bhs, 16), 0);
    rig.retire(request);
    let unsolicited = 1024;
    assert_eq!(
        rig.expect_completion(write).unwrap().transferred,
        unsolicited
    );
}
