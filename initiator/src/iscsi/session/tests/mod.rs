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

mod data;
mod deadlines;
mod hostile;
mod login;
mod resets;

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

    /// Waits until this time, while the target sends NOP-Ins.
    fn wait_until(&mut self, at: Instant) {
        while self.now < at {
            self.receive(bhs(0x20, 0x80, u32::MAX), &[]);
            self.advance(SEC.min(at - self.now));
        }
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
