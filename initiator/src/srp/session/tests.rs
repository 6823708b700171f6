use std::time::Duration;

use proptest::prelude::*;
use riser_scsi::srp::{
    InitiatorPortId, LoginReq, MemDesc, MultiChannelAction, TargetPortId, TaskAttr,
};
use riser_state::testing::{assert_all_taken, table};
use riser_testkit::{fuzz, one_of};

use super::*;
use crate::request::{
    Cdb, DataLen, Effect, RequestError, RequestId, RequestResult, RequestSpec, Retry,
};
use crate::session::tests::{self as script, Rig as _};
use crate::session::{Machine, SessionEvent, SrpLoginError, Timing};
use crate::srp::channel::{ChannelConfig, CommandData};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
const CH0: ChannelIndex = ChannelIndex(0);
const CH1: ChannelIndex = ChannelIndex(1);

/// A session with a target played by the test.
pub(crate) struct Rig {
    session: SrpSession,
    now: Instant,
    /// Address to which logins are redirected.
    redirect: Option<SocketAddr>,
    /// Tags of sent commands, by request.
    sent: Vec<(RequestId, ChannelIndex, u64)>,
}

fn config(channels: u8) -> SessionConfig {
    SessionConfig {
        channels,
        channel: ChannelConfig {
            queue_size: 4,
            max_it_iu_len: 8260,
            inline_descriptors: 12,
            external_descriptors: 0,
            max_immediate: 0,
            initiator_port: InitiatorPortId([1; 16]),
            target_port: TargetPortId([2; 16]),
            multi_channel: MultiChannelAction::Single,
        },
        max_requests: 16,
        timing: Timing::of_tests(),
        ping: 3600 * SEC,
        max_attempts: 4,
        reconnect: true,
    }
}

fn login_rsp(limit: u32) -> [u8; 52] {
    let mut iu = [0; 52];
    iu[0] = 0xc0;
    iu[4..8].copy_from_slice(&limit.to_be_bytes());
    iu[16..20].copy_from_slice(&8260u32.to_be_bytes());
    iu[20..24].copy_from_slice(&8260u32.to_be_bytes());
    iu[25] = 6;
    iu
}

fn spec(rig: &Rig, effect: Effect) -> RequestSpec {
    RequestSpec {
        lun: [0; 8],
        attr: TaskAttr::Simple,
        cdb: Cdb::new(&[0; 6]).unwrap(),
        len: DataLen::None,
        deadline: rig.now + 60 * SEC,
        retry: Retry::Standard,
        effect,
    }
}

impl Rig {
    fn connecting(channels: u8) -> Self {
        Self::with(config(channels))
    }

    fn with(config: SessionConfig) -> Self {
        let now = Instant::now();
        let mut session = SrpSession::new(config, now);
        assert_eq!(session.poll_output(), Some(Output::Connect(CH0)));
        Self {
            session,
            now,
            redirect: None,
            sent: Vec::new(),
        }
    }

    fn live(channels: u8) -> Self {
        let mut rig = Self::connecting(channels);
        rig.log_in(CH0);
        assert_eq!(rig.next(), Output::Event(SessionEvent::Live));
        for i in 1..channels {
            assert_eq!(rig.next(), Output::Connect(ChannelIndex(i)));
        }
        for i in 1..channels {
            rig.log_in(ChannelIndex(i));
        }
        rig.expect_idle();
        rig
    }

    fn log_in(&mut self, channel: ChannelIndex) -> LoginReq {
        let login = self.session.begin_login(channel);
        self.session
            .handle_connected(channel, &login_rsp(32), 16, self.redirect, self.now);
        login
    }

    fn next(&mut self) -> Output {
        self.session.poll_output().expect("an output")
    }

    /// Expects a start as the next output, and "sends" the command.
    fn started(&mut self) -> (RequestId, ChannelIndex) {
        let output = self.next();
        let Output::Start {
            request, channel, ..
        } = output
        else {
            panic!("{output:?}");
        };
        let mut iu = [0; 128];
        self.session
            .emit_command(request, CommandData::None, &mut iu)
            .unwrap();
        let tag = u64::from_be_bytes(iu[8..16].try_into().unwrap());
        self.sent.retain(|(r, ..)| *r != request);
        self.sent.push((request, channel, tag));
        (request, channel)
    }

    fn tsk_mgmt(&mut self) -> ([u8; 48], ChannelIndex) {
        let output = self.next();
        let Output::SendTskMgmt(channel, iu) = output else {
            panic!("{output:?}");
        };
        (iu, channel)
    }

    fn respond_to_tsk_mgmt(&mut self, channel: ChannelIndex, iu: &[u8; 48], code: u8) {
        let mut rsp = [0; 40];
        rsp[0] = 0xc1;
        rsp[7] = 1;
        rsp[8..16].copy_from_slice(&iu[8..16]);
        rsp[18] = 1;
        rsp[35] = 4;
        rsp[39] = code;
        self.session.handle_iu(channel, &rsp, self.now);
    }

    /// Expects closing a channel as the next output, and closes it immediately.
    fn expect_channel_disconnect(&mut self, channel: ChannelIndex) {
        let output = self.next();
        assert!(
            matches!(output, Output::Disconnect(c, None) if c == channel),
            "{output:?}"
        );
        self.session.handle_channel_closed(channel, self.now);
    }
}

impl script::Rig for Rig {
    type Session = SrpSession;
    type Function = (ChannelIndex, [u8; 48]);

    const RESETS: usize = 1;
    const ABORTED: &'static [FunctionOutcome] = &[FunctionOutcome::Complete];

    fn connecting() -> Self {
        Self::connecting(2)
    }

    fn live() -> Self {
        Self::live(1)
    }

    fn live_without_reconnect() -> Self {
        let mut rig = Self::with(SessionConfig {
            reconnect: false,
            ..config(1)
        });
        rig.log_in(CH0);
        assert_eq!(rig.next(), Output::Event(SessionEvent::Live));
        rig
    }

    fn session(&mut self) -> &mut SrpSession {
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
        spec(self, effect)
    }

    fn expect_idle(&mut self) {
        assert_eq!(self.session.poll_output(), None);
    }

    fn expect_event(&mut self) -> SessionEvent {
        let output = self.next();
        let Output::Event(event) = output else {
            panic!("{output:?}");
        };
        event
    }

    fn expect_start(&mut self) -> RequestId {
        let (request, channel) = self.started();
        assert_eq!(channel, CH0);
        request
    }

    fn expect_retire(&mut self, request: RequestId) {
        let sent = self.sent.iter().find(|(sent, ..)| *sent == request);
        let channel = sent.unwrap().1;
        assert_eq!(self.next(), Output::Retire { request, channel });
    }

    fn expect_completion(&mut self, request: RequestId) -> RequestResult {
        let output = self.next();
        let Output::Complete(id, result) = output else {
            panic!("{output:?}");
        };
        assert_eq!(id, request);
        result
    }

    fn expect_abort(&mut self, request: RequestId) -> Self::Function {
        let (iu, channel) = self.tsk_mgmt();
        assert_eq!(iu[30], 1, "ABORT TASK");
        let sent = self.sent.iter().find(|(sent, ..)| *sent == request);
        let &(_, on, tag) = sent.unwrap();
        assert_eq!((channel, &iu[32..40]), (on, &tag.to_be_bytes()[..]));
        (channel, iu)
    }

    fn expect_abort_and_retire(
        &mut self,
        aborted: RequestId,
        retired: RequestId,
    ) -> Self::Function {
        let function = self.expect_abort(aborted);
        self.expect_retire(retired);
        function
    }

    fn expect_reset(&mut self, _step: usize) -> Self::Function {
        let (iu, channel) = self.tsk_mgmt();
        assert_eq!(iu[30], 8, "LOGICAL UNIT RESET");
        (channel, iu)
    }

    fn expect_disconnect(&mut self) {
        self.expect_channel_disconnect(CH0);
    }

    fn expect_logout(&mut self) {
        let output = self.next();
        let Output::Disconnect(CH0, Some(iu)) = output else {
            panic!("{output:?}");
        };
        assert_eq!(iu[0], 3, "SRP_I_LOGOUT");
        self.session.handle_channel_closed(CH0, self.now);
    }

    fn expect_abandonment(&mut self) {
        self.expect_channel_disconnect(CH0);
    }

    fn expect_last_disconnect(&mut self) {
        assert!(matches!(self.next(), Output::Disconnect(CH0, _)));
        self.session.handle_channel_closed(CH0, self.now);
    }

    fn expect_connect(&mut self) {
        assert_eq!(self.next(), Output::Connect(CH0));
    }

    fn start_login(&mut self) {
        self.session.begin_login(CH0);
    }

    fn fail_connect(&mut self, error: ConnectError) {
        self.session.handle_connect_failed(CH0, error, self.now);
    }

    fn reject_login(&mut self) {
        self.session.begin_login(CH0);
        let mut rej = [0; 148];
        rej[0] = 0xc2;
        rej[4..8].copy_from_slice(&0x0001_0001u32.to_be_bytes());
        self.session.handle_rejected(CH0, 28, &rej, self.now);
    }

    fn is_login_rejection(why: Down) -> bool {
        let Down::Connect(ConnectError::Login(error)) = why else {
            return false;
        };
        error.to_string().contains("lacks resources")
    }

    fn log_in(&mut self) {
        let login = Self::log_in(self, CH0);
        assert_eq!(login.multi_channel, MultiChannelAction::Single);
        assert_eq!(self.next(), Output::Event(SessionEvent::Live));
    }

    fn reject_established(&mut self) {
        self.session.handle_rejected(CH0, 28, &[], self.now);
    }

    fn break_connection(&mut self) {
        self.session.handle_channel_error(CH0, self.now);
    }

    fn respond(&mut self, request: RequestId, status: u8, sense: &[u8]) {
        let &(_, channel, tag) = self.sent.iter().find(|(r, ..)| *r == request).unwrap();
        let mut iu = vec![0; 36];
        iu[0] = 0xc1;
        iu[7] = 1;
        iu[8..16].copy_from_slice(&tag.to_be_bytes());
        iu[19] = status;
        if !sense.is_empty() {
            iu[18] = 2;
            iu[31] = sense.len() as u8;
            iu.extend_from_slice(sense);
        }
        self.session.handle_iu(channel, &iu, self.now);
    }

    fn respond_to_function(&mut self, function: &Self::Function, outcome: FunctionOutcome) {
        let code = match outcome {
            FunctionOutcome::Complete => 0,
            FunctionOutcome::NoTask => unreachable!("SRP has no such response"),
            FunctionOutcome::Failed => 5,
        };
        let (channel, iu) = function;
        self.respond_to_tsk_mgmt(*channel, iu, code);
    }

    fn receive_message(&mut self) {
        let mut credit = [0; 16];
        credit[0] = 0x81;
        self.session.handle_iu(CH0, &credit, self.now);
        assert!(matches!(self.next(), Output::Reply(CH0, _)));
    }

    fn handle_retired(&mut self, request: RequestId) {
        self.session.handle_retired(request, self.now);
    }
}

/// Logs in with a target that supports immediate data and may have this many outstanding READs.
fn taking_immediate_data(reads: u8) -> Rig {
    let mut config = config(1);
    (config.channel.queue_size, config.channel.max_immediate) = (8, 4096);
    let mut rig = Rig::with(config);
    rig.session.begin_login(CH0);
    let mut rsp = login_rsp(32);
    rsp[26] = 0x80;
    rig.session
        .handle_connected(CH0, &rsp, reads, None, rig.now);
    assert_eq!(rig.next(), Output::Event(SessionEvent::Live));
    rig
}

/// Starts a write; returns whether it carries its data.
fn start_write(rig: &mut Rig, len: u32) -> (RequestId, bool) {
    let at = u64::from(rig.session.requests() as u32) * 64;
    let spec = RequestSpec {
        len: DataLen::Out(len),
        ..spec(rig, write(at, at + 8))
    };
    let id = rig.session.submit(spec, rig.now).unwrap();
    let output = rig.next();
    let Output::Start { immediate, .. } = output else {
        panic!("{output:?}");
    };
    let data = match immediate {
        true => CommandData::Immediate,
        false => CommandData::Direct(MemDesc::new(0, 1, len)),
    };
    let mut iu = [0; 128];
    rig.session.emit_command(id, data, &mut iu).unwrap();
    let tag = u64::from_be_bytes(iu[8..16].try_into().unwrap());
    rig.sent.retain(|(request, ..)| *request != id);
    rig.sent.push((id, CH0, tag));
    (id, immediate)
}

fn complete_write(rig: &mut Rig, id: RequestId) {
    rig.respond_and_retire(id, 0, &[]);
    rig.expect_completion(id).unwrap();
}

#[test]
fn few_writes_carry_data_many_are_fetched() {
    let mut rig = taking_immediate_data(16);
    let ids: Vec<_> = (0..6).map(|_| start_write(&mut rig, 512)).collect();
    let immediate: Vec<_> = ids.iter().map(|(_, immediate)| *immediate).collect();
    assert_eq!(immediate, [true, true, true, false, false, false]);
    for (id, _) in &ids[..4] {
        complete_write(&mut rig, *id);
    }
    let (third, immediate) = start_write(&mut rig, 512);
    assert!(!immediate, "two others are under way, and there were many");
    complete_write(&mut rig, third);
    complete_write(&mut rig, ids[4].0);
    let (second, immediate) = start_write(&mut rig, 512);
    assert!(immediate, "one other is under way");
    for id in [second, ids[5].0] {
        complete_write(&mut rig, id);
    }
    for _ in 0..4 {
        let (id, immediate) = start_write(&mut rig, 512);
        assert!(immediate, "one at a time");
        complete_write(&mut rig, id);
    }
    let (_, immediate) = start_write(&mut rig, 8192);
    assert!(!immediate, "longer than was agreed on");
}

#[test]
fn target_with_few_reads_receives_data() {
    let mut rig = taking_immediate_data(1);
    for _ in 0..6 {
        assert!(start_write(&mut rig, 512).1);
    }
}

fn write(start: u64, end: u64) -> Effect {
    Effect::Blocks { start, end }
}

#[test]
fn malformed_login_response_closes_channel() {
    let mut rig = Rig::connecting(1);
    rig.session.begin_login(CH0);
    rig.session
        .handle_connected(CH0, &[0xc0; 20], 16, None, rig.now);
    rig.expect_channel_disconnect(CH0);
    assert!(matches!(
        rig.next(),
        Output::Event(SessionEvent::Closed(Down::Connect(ConnectError::Login(
            SrpLoginError::Fault(_)
        ))))
    ));
    rig.expect_idle();
}

fn states() -> [ConnState; 4] {
    [
        ConnState::Free,
        ConnState::Connecting(Instant::now()),
        ConnState::Established,
        ConnState::Disconnecting,
    ]
}

#[test]
fn connection_transitions_match_diagram() {
    let expected = "Free: Connecting\n\
                    Connecting: Free Established Disconnecting\n\
                    Established: Disconnecting\n\
                    Disconnecting: Free\n";
    assert_eq!(table(&states()), expected);
}

#[test]
fn connection_transition_coverage_is_complete() {
    assert_all_taken(&states(), || {
        let mut rig = Rig::live(1);
        rig.lose_connection();
        let mut late = Rig::connecting(1);
        late.advance(5 * SEC);
        late.expect_channel_disconnect(CH0);
        let mut unreachable = Rig::connecting(1);
        let error = ConnectError::Unreachable;
        unreachable
            .session
            .handle_connect_failed(CH0, error, unreachable.now);
    });
}

/// An engine that shuts down closes a session before it has started to connect.
#[test]
fn closed_session_ends_once_after_failed_connect() {
    let mut session = SrpSession::new(config(1), Instant::now());
    let now = Instant::now();
    session.close(now);
    assert_eq!(session.poll_output(), Some(Output::Connect(CH0)));
    session.handle_connect_failed(CH0, ConnectError::Unreachable, now);
    assert_eq!(session.poll_output(), Some(Output::Disconnect(CH0, None)));
    session.handle_channel_closed(CH0, now);
    let closed = SessionEvent::Closed(Down::Closed);
    assert_eq!(session.poll_output(), Some(Output::Event(closed)));
    assert_eq!(session.poll_output(), None);
}

#[test]
fn commands_spread_over_channels() {
    let mut rig = Rig::live(2);
    assert_eq!(rig.session.live_channels(), 2);
    for _ in 0..4 {
        rig.submit(Effect::None);
    }
    let used: Vec<_> = (0..4).map(|_| rig.started().1).collect();
    assert_eq!(used, [CH0, CH1, CH0, CH1]);
}

#[test]
fn rejected_second_channel_keeps_first() {
    let mut rig = Rig::connecting(2);
    rig.log_in(CH0);
    assert_eq!(rig.next(), Output::Event(SessionEvent::Live));
    assert_eq!(rig.next(), Output::Connect(CH1));
    let login = rig.session.begin_login(CH1);
    assert_eq!(login.multi_channel, MultiChannelAction::Multi);
    rig.session.handle_rejected(CH1, 28, &[], rig.now);
    rig.expect_idle();
    rig.submit(Effect::None);
    assert_eq!(rig.started().1, CH0);
}

/// The target responds, but accepts no more commands, so not even a ping can be sent.
#[test]
fn exhausted_request_limit_causes_reconnect() {
    let mut rig = Rig::live(2);
    let consume_limit = |rig: &mut Rig, channel: ChannelIndex| {
        // SRP_CRED_REQ with a delta that leaves one credit, for task management.
        let mut iu = [0; 16];
        iu[0] = 0x81;
        iu[4..8].copy_from_slice(&(-31i32).to_be_bytes());
        rig.session.handle_iu(channel, &iu, rig.now);
        assert!(matches!(rig.next(), Output::Reply(c, _) if c == channel));
    };
    let slow = rig.submit(Effect::None);
    let (_, channel) = rig.started();
    consume_limit(&mut rig, CH0);
    consume_limit(&mut rig, CH1);
    let submit = |rig: &mut Rig| {
        let mut spec = spec(rig, Effect::None);
        spec.deadline = rig.now + SEC;
        rig.session.submit(spec, rig.now).unwrap()
    };
    let waits = submit(&mut rig);
    rig.advance(SEC);
    assert_eq!(rig.expect_completion(waits), Err(RequestError::TimedOut));
    rig.expect_idle();
    // The response to the outstanding command could have granted a credit, but does not.
    let tag = rig.sent[0].2;
    let mut iu = [0; 36];
    iu[0] = 0xc1;
    iu[8..16].copy_from_slice(&tag.to_be_bytes());
    rig.session.handle_iu(channel, &iu, rig.now);
    rig.retire(slow);
    rig.expect_completion(slow).unwrap();
    let waits = submit(&mut rig);
    rig.advance(SEC);
    rig.expect_channel_disconnect(CH0);
    assert!(matches!(rig.next(), Output::Disconnect(CH1, None)));
    assert_eq!(rig.expect_completion(waits), Err(RequestError::TimedOut));
    rig.session.handle_channel_closed(CH1, rig.now);
    rig.expect_reconnecting(Down::Unresponsive);
}

#[test]
fn failed_abort_resets_unit_and_its_commands() {
    let mut rig = Rig::live(2);
    let a = rig.submit(Effect::None);
    let b = rig.submit(Effect::Other);
    let mut elsewhere = spec(&rig, Effect::None);
    elsewhere.lun = [0, 9, 0, 0, 0, 0, 0, 0];
    elsewhere.deadline = rig.now + 100 * SEC;
    rig.started();
    rig.started();
    rig.advance(9 * SEC);
    let c = rig.session.submit(elsewhere, rig.now).unwrap();
    rig.started();
    rig.advance(SEC);
    let (abort_a, on_a) = rig.tsk_mgmt();
    let (abort_b, on_b) = rig.tsk_mgmt();
    assert_ne!(on_a, on_b);
    rig.respond_to_tsk_mgmt(on_a, &abort_a, 5);
    let (reset, on) = rig.tsk_mgmt();
    assert_eq!((reset[30], on), (8, on_a), "LOGICAL UNIT RESET");
    rig.respond_to_tsk_mgmt(on, &reset, 0);
    rig.retire(a);
    // The reset does not apply to the other channel, but its own abort does.
    rig.expect_idle();
    rig.respond_to_tsk_mgmt(on_b, &abort_b, 0);
    rig.retire(b);
    assert_eq!(rig.started().0, a);
    assert_eq!(rig.expect_completion(b), Err(RequestError::TimedOut));
    rig.respond_and_retire(c, 0, &[]);
    assert!(rig.expect_completion(c).is_ok());
}

#[test]
fn untrusted_target_gets_settle_time() {
    let mut rig = Rig::live(1);
    rig.session.set_guarded(true);
    let id = rig.submit(write(0, 8));
    rig.started();
    rig.lose_connection();
    rig.expect_reconnecting(Down::ConnectionLost);
    let lost_at = rig.now;
    rig.reconnect();
    rig.session.release(false, rig.now);
    rig.expect_idle();
    rig.now = lost_at + 15 * SEC - MS;
    rig.session.handle_timeout(rig.now);
    rig.expect_idle();
    rig.now += MS;
    rig.session.handle_timeout(rig.now);
    assert_eq!(rig.started().0, id);
}

#[test]
fn redirected_login_waits_for_lost_changes() {
    let to = |host: u8| Some(([10, 0, 0, host], 5555).into());
    for is_guarded in [false, true] {
        let mut rig = Rig::live(1);
        rig.session.set_guarded(is_guarded);
        let id = rig.submit(write(0, 8));
        rig.started();
        rig.lose_connection();
        rig.expect_reconnecting(Down::ConnectionLost);
        let lost_at = rig.now;
        rig.redirect = to(2);
        rig.reconnect();
        // The target terminates the commands of old channels, but only at its own ports.
        rig.session.release(true, rig.now);
        rig.expect_idle();
        rig.now = lost_at + 15 * SEC - MS;
        rig.session.handle_timeout(rig.now);
        rig.expect_idle();
        rig.now += MS;
        rig.session.handle_timeout(rig.now);
        assert_eq!(rig.started().0, id);
        // The next login reaches the same port.
        rig.lose_connection();
        rig.expect_reconnecting(Down::ConnectionLost);
        rig.reconnect();
        rig.session.release(true, rig.now);
        assert_eq!(rig.started().0, id);
    }
}

#[test]
fn redirected_takeover_waits_after_check() {
    let other = Some(([10, 0, 0, 2], 5555).into());
    for (redirect, was_redirected) in [(None, false), (other, false), (None, true), (other, true)] {
        let mut rig = Rig::connecting(1);
        rig.redirect = redirect;
        rig.log_in(CH0);
        assert_eq!(rig.next(), Output::Event(SessionEvent::Live));
        rig.session.set_guarded(true);
        rig.session.recover(was_redirected, rig.now);
        let id = rig.submit(write(0, 8));
        rig.session.release(true, rig.now);
        if redirect.is_some() || was_redirected {
            rig.expect_idle();
            rig.now += 15 * SEC - MS;
            rig.session.handle_timeout(rig.now);
            assert!(!matches!(
                rig.session.poll_output(),
                Some(Output::Start { .. })
            ));
            rig.now += MS;
            rig.session.handle_timeout(rig.now);
        }
        assert_eq!(rig.started().0, id);
    }
}

#[test]
fn further_channel_must_reach_same_port() {
    let mut rig = Rig::connecting(2);
    rig.log_in(CH0);
    assert_eq!(rig.next(), Output::Event(SessionEvent::Live));
    assert_eq!(rig.next(), Output::Connect(CH1));
    rig.redirect = Some(([10, 0, 0, 2], 5555).into());
    rig.log_in(CH1);
    assert!(matches!(rig.next(), Output::Disconnect(CH1, None)));
    rig.session.handle_channel_closed(CH1, rig.now);
    assert_eq!(rig.session.live_channels(), 1);
    assert_eq!(rig.session.state(), SessionState::Live);
    rig.expect_idle();
}

#[test]
fn commands_without_effect_need_no_settle_time() {
    let mut rig = Rig::live(1);
    rig.session.set_guarded(true);
    let id = rig.submit(Effect::None);
    rig.started();
    rig.lose_connection();
    rig.expect_reconnecting(Down::ConnectionLost);
    rig.reconnect();
    rig.expect_idle();
    rig.session.release(false, rig.now);
    assert_eq!(rig.started().0, id);
}

#[test]
fn reset_aborts_other_channels_separately() {
    let mut rig = Rig::live(2);
    let late = rig.submit(write(0, 8));
    let (_, here) = rig.started();
    rig.advance(5 * SEC);
    let other = rig.submit(write(100, 108));
    let (_, there) = rig.started();
    assert_ne!(here, there);
    rig.advance(5 * SEC);
    let (abort, on) = rig.tsk_mgmt();
    rig.respond_to_tsk_mgmt(on, &abort, 5);
    let (reset, on) = rig.tsk_mgmt();
    assert_eq!((reset[30], on), (8, here), "LOGICAL UNIT RESET");
    rig.respond_to_tsk_mgmt(on, &reset, 0);
    rig.retire(late);
    // The reset may have been executed before or after the other channel's command, but its abort
    // follows it.
    let (abort, on) = rig.tsk_mgmt();
    assert_eq!((abort[30], on), (1, there), "ABORT TASK");
    rig.expect_idle();
    rig.respond_and_retire(other, 0, &[]);
    assert!(rig.expect_completion(other).is_ok());
    rig.expect_idle();
    rig.respond_to_tsk_mgmt(on, &abort, 5);
    assert_eq!(rig.started().0, late);
}

impl Rig {
    /// Returns a session that pings a silent target after five seconds.
    fn pinging() -> Self {
        let mut rig = Self::live(1);
        rig.session.core.ping = 5 * SEC;
        // As after a login.
        rig.session.core.arm(rig.now + 5 * SEC);
        rig
    }

    /// Advances the time, and wakes the session at its deadlines.
    fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(due) = self.session.next_deadline().filter(|due| *due <= end) {
            self.now = self.now.max(due);
            self.session.handle_timeout(self.now);
        }
        self.now = end;
    }

    /// Handles [`Output::Ping`] like the engine.
    fn ping(&mut self) -> RequestId {
        assert_eq!(self.next(), Output::Ping);
        let spec = RequestSpec {
            retry: Retry::Probe,
            ..spec(self, Effect::None)
        };
        let ping = self.session.submit(spec, self.now).unwrap();
        assert_eq!(self.started().0, ping);
        ping
    }
}

#[test]
fn silent_target_is_pinged_repeatedly() {
    let mut rig = Rig::pinging();
    for _ in 0..3 {
        rig.wait(5 * SEC - MS);
        rig.expect_idle();
        rig.wait(MS);
        let ping = rig.ping();
        rig.respond_and_retire(ping, 0, &[]);
        rig.expect_completion(ping).unwrap();
    }
    // Any message from the target counts.
    rig.wait(4 * SEC);
    let sent = rig.submit(Effect::None);
    rig.started();
    rig.respond_and_retire(sent, 0, &[]);
    rig.expect_completion(sent).unwrap();
    rig.wait(5 * SEC - MS);
    rig.expect_idle();
    rig.wait(5 * SEC);
    assert_eq!(rig.next(), Output::Ping);
    rig.expect_idle();
}

/// The target may have been killed after it acknowledged the command's packets.
#[test]
fn silent_target_is_pinged_while_command_waits() {
    let mut rig = Rig::pinging();
    let sent = rig.submit(Effect::None);
    rig.started();
    rig.wait(5 * SEC - MS);
    rig.expect_idle();
    rig.wait(MS);
    rig.ping();
    // One ping at a time.
    rig.wait(4 * SEC);
    rig.expect_idle();
    rig.respond_and_retire(sent, 0, &[]);
    rig.expect_completion(sent).unwrap();
}

/// For example with a disk that needs longer for the ping than a command may take.
#[test]
fn late_ping_is_aborted_keeping_connection() {
    let mut rig = Rig::pinging();
    rig.wait(5 * SEC);
    let ping = rig.ping();
    rig.wait(10 * SEC);
    let (abort, on) = rig.tsk_mgmt();
    assert_eq!(abort[30], 1, "ABORT TASK");
    rig.respond_to_tsk_mgmt(on, &abort, 0);
    rig.retire(ping);
    assert_eq!(rig.started().0, ping, "again");
    rig.respond_and_retire(ping, 0, &[]);
    rig.expect_completion(ping).unwrap();
    rig.expect_idle();
    assert_eq!(rig.session.state(), SessionState::Live);
}

#[test]
fn unabortable_ping_reconnects_without_reset() {
    for response in [Some(5), None] {
        let mut rig = Rig::pinging();
        rig.wait(5 * SEC);
        rig.ping();
        rig.wait(10 * SEC);
        let (abort, on) = rig.tsk_mgmt();
        match response {
            Some(code) => rig.respond_to_tsk_mgmt(on, &abort, code),
            None => rig.wait(SEC),
        }
        assert_eq!(rig.next(), Output::Disconnect(CH0, None));
        let why = Down::Unresponsive;
        assert_eq!(
            rig.session.state(),
            SessionState::TearingDown { why, last: false }
        );
    }
}

#[test]
fn target_logout_and_violation_cause_reconnect() {
    for (iu, lasting) in [([0x80; 16], true), ([0xee; 16], false)] {
        let mut rig = Rig::live(2);
        rig.session.handle_iu(CH1, &iu, rig.now);
        rig.expect_channel_disconnect(CH0);
        rig.expect_channel_disconnect(CH1);
        let output = rig.next();
        let Output::Event(SessionEvent::Reconnecting(why)) = output else {
            panic!("{output:?}");
        };
        assert_eq!(matches!(why, Down::Logout(_)), lasting);
    }
}

impl Rig {
    /// Sends a command, and submits another one for which the connection has no room.
    fn crowded(effect: Effect) -> (Self, RequestId, RequestId) {
        Self::crowded_within(effect, 60 * SEC)
    }

    /// Same as [`Self::crowded`], with this timeout for the second command.
    fn crowded_within(effect: Effect, patience: Duration) -> (Self, RequestId, RequestId) {
        let mut rig = Self::live(1);
        let sent = rig.submit(write(0, 4));
        rig.started();
        let deadline = rig.now + patience;
        let waiting = RequestSpec {
            deadline,
            ..spec(&rig, effect)
        };
        let waiting = rig.session.submit(waiting, rig.now).unwrap();
        rig.no_room(waiting);
        rig.expect_idle();
        (rig, sent, waiting)
    }

    /// Expects a start as the next output, and reports that the connection has no room.
    fn no_room(&mut self, request: RequestId) {
        let output = self.next();
        assert!(
            matches!(output, Output::Start { request: r, .. } if r == request),
            "{output:?}"
        );
        self.session.handle_no_room(request, self.now);
    }

    fn request_limit(&self) -> i64 {
        self.session.members[0].channel.request_limit()
    }
}

/// Its abort would be received before it, and have no effect.
#[test]
fn unsent_command_is_not_aborted() {
    let (mut rig, sent, waiting) = Rig::crowded(write(4, 8));
    assert_eq!(rig.request_limit(), 31, "only what was sent counts");
    assert_eq!(rig.session.unreturned(), 0);
    rig.advance(10 * SEC);
    let (iu, channel) = rig.tsk_mgmt();
    assert_eq!(iu[32..40], rig.sent[0].2.to_be_bytes());
    rig.respond_to_tsk_mgmt(channel, &iu, 0);
    rig.retire(sent);
    // In order of submission, even if the other one was tried earlier.
    assert_eq!(rig.started().0, sent);
    assert_eq!(rig.started().0, waiting);
    rig.expect_idle();
    rig.advance(9 * SEC);
    rig.expect_idle();
    rig.respond_and_retire(waiting, 0, &[]);
    assert!(rig.expect_completion(waiting).is_ok());
    rig.respond_and_retire(sent, 0, &[]);
    assert!(rig.expect_completion(sent).is_ok());
    // The target must still return the credit of the aborted command.
    assert_eq!(rig.request_limit(), 31);
    assert_eq!(rig.session.unreturned(), 1);
}

#[test]
fn reset_does_not_affect_unsent_command() {
    let (mut rig, sent, waiting) = Rig::crowded(Effect::Other);
    rig.advance(10 * SEC);
    let (iu, channel) = rig.tsk_mgmt();
    rig.respond_to_tsk_mgmt(channel, &iu, 5);
    let (iu, channel) = rig.tsk_mgmt();
    assert_eq!(iu[30], 8, "LOGICAL UNIT RESET");
    rig.expect_idle();
    rig.respond_to_tsk_mgmt(channel, &iu, 0);
    rig.retire(sent);
    assert_eq!(rig.started().0, sent);
    rig.respond_and_retire(sent, 0, &[]);
    assert!(rig.expect_completion(sent).is_ok());
    assert_eq!(rig.started().0, waiting);
    rig.respond_and_retire(waiting, 0, &[]);
    assert!(rig.expect_completion(waiting).is_ok());
}

#[test]
fn unsent_command_waits_for_reset_completion() {
    let mut rig = Rig::live(1);
    let late = rig.submit(Effect::None);
    rig.started();
    rig.advance(SEC);
    let sent = rig.submit(Effect::None);
    rig.started();
    let waiting = rig.submit(write(0, 4));
    rig.no_room(waiting);
    rig.advance(9 * SEC);
    let (iu, channel) = rig.tsk_mgmt();
    rig.respond_to_tsk_mgmt(channel, &iu, 5);
    let (reset, channel) = rig.tsk_mgmt();
    rig.respond_and_retire(sent, 0, &[]);
    assert!(rig.expect_completion(sent).is_ok());
    rig.expect_idle();
    rig.respond_to_tsk_mgmt(channel, &reset, 0);
    rig.retire(late);
    assert_eq!([rig.started().0, rig.started().0], [waiting, late]);
}

#[test]
fn unsent_command_times_out_without_abort() {
    let (mut rig, sent, waiting) = Rig::crowded_within(write(4, 8), 5 * SEC);
    rig.respond(sent, 0, &[]);
    assert!(matches!(rig.next(), Output::Retire { .. }));
    rig.advance(5 * SEC);
    assert_eq!(rig.expect_completion(waiting), Err(RequestError::TimedOut));
    rig.expect_idle();
    rig.session.handle_retired(sent, rig.now);
    assert!(rig.expect_completion(sent).is_ok());
    assert_eq!(rig.request_limit(), 32);
    rig.expect_idle();
}

/// A command that was not sent cannot have been executed.
#[test]
fn unsent_command_survives_connection_loss() {
    let (mut rig, sent, waiting) = Rig::crowded(Effect::Other);
    rig.lose_connection();
    rig.expect_reconnecting(Down::ConnectionLost);
    rig.reconnect();
    assert_eq!(rig.started().0, sent);
    rig.respond_and_retire(sent, 0, &[]);
    assert!(rig.expect_completion(sent).is_ok());
    assert_eq!(rig.started().0, waiting);
}

#[test]
fn close_completes_unsent_command() {
    let (mut rig, sent, waiting) = Rig::crowded(Effect::Other);
    rig.session.close(rig.now);
    let output = rig.next();
    assert!(
        matches!(output, Output::Disconnect(CH0, Some(_))),
        "{output:?}"
    );
    rig.session.handle_channel_closed(CH0, rig.now);
    assert_eq!(rig.expect_completion(sent), Err(RequestError::Closed));
    assert_eq!(rig.expect_completion(waiting), Err(RequestError::Closed));
}

#[test]
fn full_channel_moves_command_to_another() {
    let mut rig = Rig::live(2);
    rig.submit(Effect::None);
    assert_eq!(rig.started().1, CH0);
    rig.submit(Effect::None);
    assert_eq!(rig.started().1, CH1);
    let third = rig.submit(Effect::None);
    rig.no_room(third);
    assert_eq!(rig.started(), (third, CH1));
    let fourth = rig.submit(Effect::None);
    assert_eq!(rig.started(), (fourth, CH1), "the first has no room still");
}

#[test]
fn oversized_command_on_idle_connection_fails() {
    let mut rig = Rig::live(1);
    let id = rig.submit(Effect::None);
    rig.no_room(id);
    let result = rig.expect_completion(id);
    assert!(
        matches!(result, Err(RequestError::NotStarted(_))),
        "{result:?}"
    );
    assert_eq!(rig.request_limit(), 32);
}

#[derive(Clone, Debug)]
enum Action {
    Submit(u8),
    Respond(u8, u8),
    Retire(u8),
    Advance(u16),
    Garbage(Vec<u8>),
    Forged(Forged),
    Break(u8),
    LogIn(u8),
    Refuse(u8),
    RespondTskMgmt(u8),
    Crowd(u8),
}

/// An information unit of a target that violates the protocol, with some valid fields.
#[derive(Clone, Debug)]
struct Forged {
    channel: u8,
    /// The command with its tag.
    which: u8,
    /// Bit mask of valid fields.
    right: u8,
    /// Length if truncated.
    cut: u8,
    iu: [u64; 6],
}

fn forged() -> impl Strategy<Value = Forged> {
    let iu = prop::array::uniform6(any::<u64>());
    (any::<[u8; 3]>(), iu).prop_map(|([which, right, cut], iu)| Forged {
        channel: which >> 7,
        which,
        right,
        cut,
        iu,
    })
}

impl Forged {
    /// Returns the encoded bytes, for the outstanding tags on its channel.
    fn bytes(&self, tags: &[u64]) -> Vec<u8> {
        let mut iu: Vec<u8> = self.iu.iter().flat_map(|word| word.to_le_bytes()).collect();
        let is_right = |bit: u8| self.right & 1 << bit != 0;
        if is_right(0) {
            iu[0] = [0x80, 0x81, 0xc0, 0xc1, 0xc1, 0xc1, 0xc2][usize::from(iu[0]) % 7];
        }
        if is_right(1) && !tags.is_empty() {
            let tag = tags[usize::from(self.which) % tags.len()];
            iu[8..16].copy_from_slice(&tag.to_be_bytes());
        }
        if is_right(2) {
            // A small number of credits.
            iu[4..8].copy_from_slice(&[0, 0, 0, self.which % 4]);
        }
        if is_right(3) {
            // Neither sense data nor response data.
            iu[24..36].fill(0);
        }
        if !is_right(4) {
            iu.truncate(usize::from(self.cut) % 49);
        }
        iu
    }
}

fn action() -> impl Strategy<Value = Action> {
    one_of![
        4 => forged().prop_map(Action::Forged),
        4 => (0u8..4).prop_map(Action::Submit),
        4 => (any::<u8>(), 0u8..4).prop_map(|(i, s)| Action::Respond(i, s)),
        4 => any::<u8>().prop_map(Action::Retire),
        2 => (0u16..8000).prop_map(Action::Advance),
        1 => proptest::collection::vec(any::<u8>(), 0..50).prop_map(Action::Garbage),
        1 => (0u8..2).prop_map(Action::Break),
        4 => (0u8..2).prop_map(Action::LogIn),
        1 => (0u8..2).prop_map(Action::Refuse),
        2 => any::<u8>().prop_map(Action::RespondTskMgmt),
        1 => (0u8..4).prop_map(Action::Crowd),
    ]
}

/// After any history, each accepted request has completed exactly once, and never while the target
/// could access its memory.
fn run(actions: Vec<Action>) {
    let mut rig = Rig {
        redirect: None,
        sent: Vec::new(),
        now: Instant::now(),
        session: SrpSession::new(config(2), Instant::now()),
    };
    let mut open = std::collections::HashSet::new();
    let mut exposed = std::collections::HashMap::new();
    let mut retiring = Vec::new();
    let mut connecting = Vec::new();
    let mut tmfs = Vec::new();
    let mut without_room = 0;
    for action in actions.into_iter().chain([Action::Break(9)]) {
        match action {
            Action::Submit(kind) => {
                let mut s = spec(
                    &rig,
                    [Effect::None, Effect::Other, write(0, 4), write(3, 9)][usize::from(kind)],
                );
                s.deadline = rig.now + 30 * SEC;
                if let Ok(id) = rig.session.submit(s, rig.now) {
                    assert!(open.insert(id));
                }
            }
            Action::Respond(which, status) if !rig.sent.is_empty() => {
                let (id, ..) = rig.sent.remove(usize::from(which) % rig.sent.len());
                if exposed.contains_key(&id) && !retiring.contains(&id) {
                    rig.sent.push((id, exposed[&id], 0));
                    let tag = exposed_tag(&rig.session, id);
                    rig.sent.last_mut().unwrap().2 = tag.unwrap_or(0);
                    rig.respond(id, [0, 2, 8, 0x28][usize::from(status)], &[]);
                    rig.sent.pop();
                }
            }
            Action::Retire(which) if !retiring.is_empty() => {
                let id = retiring.remove(usize::from(which) % retiring.len());
                exposed.remove(&id);
                rig.session.handle_retired(id, rig.now);
            }
            Action::Advance(ms) => rig.advance(u32::from(ms) * MS),
            Action::Garbage(iu) => rig.session.handle_iu(CH0, &iu, rig.now),
            Action::Forged(forged) => {
                let channel = ChannelIndex(forged.channel);
                let on_channel = exposed.iter().filter(|(_, c)| **c == channel);
                let mut ids: Vec<_> = on_channel.map(|(id, _)| *id).collect();
                ids.sort_unstable();
                let tags = ids.iter().filter_map(|id| exposed_tag(&rig.session, *id));
                let iu = forged.bytes(&tags.collect::<Vec<_>>());
                rig.session.handle_iu(channel, &iu, rig.now);
            }
            Action::Break(9) => rig.session.close(rig.now),
            Action::Break(c) => rig.session.handle_channel_error(ChannelIndex(c), rig.now),
            Action::LogIn(c) if connecting.contains(&ChannelIndex(c)) => {
                connecting.retain(|x| *x != ChannelIndex(c));
                rig.log_in(ChannelIndex(c));
            }
            Action::Refuse(c) if connecting.contains(&ChannelIndex(c)) => {
                connecting.retain(|x| *x != ChannelIndex(c));
                rig.session.begin_login(ChannelIndex(c));
                rig.session
                    .handle_rejected(ChannelIndex(c), 28, &[], rig.now);
            }
            Action::RespondTskMgmt(code) if !tmfs.is_empty() => {
                let (c, iu): (ChannelIndex, [u8; 48]) = tmfs.remove(0);
                rig.respond_to_tsk_mgmt(c, &iu, code % 6);
            }
            Action::Crowd(n) => without_room = n,
            _ => {}
        }
        while let Some(output) = rig.session.poll_output() {
            match output {
                Output::Start { request, .. } if without_room > 0 => {
                    without_room -= 1;
                    rig.session.handle_no_room(request, rig.now);
                }
                Output::Start {
                    request, channel, ..
                } => {
                    assert!(open.contains(&request));
                    assert!(
                        exposed.insert(request, channel).is_none(),
                        "memory is exposed once"
                    );
                    rig.sent.push((request, channel, 0));
                }
                Output::Retire { request, .. } => retiring.push(request),
                Output::Complete(request, _) => {
                    assert!(open.remove(&request), "completed once");
                    assert!(!exposed.contains_key(&request), "memory is back");
                }
                Output::Connect(c) => connecting.push(c),
                Output::Disconnect(c, _) => {
                    connecting.retain(|x| *x != c);
                    tmfs.retain(|(x, _)| *x != c);
                    retiring.retain(|r| exposed[r] != c);
                    exposed.retain(|_, x| *x != c);
                    rig.session.handle_channel_closed(c, rig.now);
                }
                Output::SendTskMgmt(c, iu) => tmfs.push((c, iu)),
                Output::Reply(..) | Output::Event(_) | Output::Ping => {}
            }
        }
    }
    assert!(open.is_empty(), "{} left", open.len());
    assert_eq!(rig.session.state(), SessionState::Closed);
}

proptest! {
    #[test]
    fn requests_complete_exactly_once(actions in proptest::collection::vec(action(), 1..200)) {
        run(actions);
    }
}

#[test]
fn hostile_srp_target() {
    bolero::check!(name = "hostile_srp_target").for_each(|bytes: &[u8]| {
        if let Some(((), actions)) = fuzz::history(&Just(()), &action(), bytes) {
            run(actions);
        }
    });
}

/// Returns the current tag of a request.
fn exposed_tag(session: &SrpSession, id: RequestId) -> Option<u64> {
    let mut iu = [0; 128];
    session.emit_command(id, CommandData::None, &mut iu)?;
    Some(u64::from_be_bytes(iu[8..16].try_into().unwrap()))
}
