use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use riser_scsi::srp::{TargetPortId, TaskAttr};
use riser_state::testing::{assert_all_taken, table};

use super::types::Stage;
use super::*;
use crate::request::{Cdb, DataLen, Effect, GOOD};
use crate::scsi::{Identity, Inquiry};
use crate::session::{ConnectError, SessionEvent, Timing};

/// Blocks not used by any write of these tests.
const READ: Effect = Effect::Read {
    start: 1000,
    end: 1008,
};
const A: PathIndex = PathIndex(0);
const B: PathIndex = PathIndex(1);
const GROUP: Option<PortTag> = Some(PortTag::Group(1, None));
const REDIRECTED: Option<PortTag> = Some(PortTag::Port(
    TargetPortId([7; 16]),
    Some(SocketAddr::new(
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)),
        5555,
    )),
));

/// Returns the portal group of [`GROUP`] at a host to which a login was redirected.
fn redirected_group(host: u8) -> Option<PortTag> {
    let address = SocketAddr::from(([192, 0, 2, host], 3260));
    Some(PortTag::Group(1, Some(address)))
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn write(start: u64, end: u64) -> Effect {
    Effect::Blocks { start, end }
}

fn unit(name: &str) -> Snapshot {
    Snapshot {
        inquiry: Some(Inquiry::default()),
        identity: Identity {
            naa: Some(name.into()),
            ..Identity::default()
        },
        ..Snapshot::default()
    }
}

fn found(access: Option<Access>) -> UnitReport {
    UnitReport {
        unit: unit("one"),
        access,
    }
}

fn good() -> RequestResult {
    Ok(CommandResponse {
        status: GOOD,
        sense: None,
        transferred: 0,
        overflow: 0,
    })
}

/// A machine, the current time, and its outputs.
struct Rig {
    paths: Paths,
    now: Instant,
    seen: Vec<Output>,
}

impl Rig {
    fn new(count: u8) -> Self {
        let config = PathsConfig {
            paths: count,
            max_requests: 8,
            timing: Timing::default(),
            recheck: ms(5000),
        };
        let mut rig = Self {
            paths: Paths::new(config),
            now: Instant::now(),
            seen: Vec::new(),
        };
        rig.collect_outputs();
        for path in 0..count {
            assert!(rig.seen.contains(&open(PathIndex(path), PathIndex(path))));
        }
        rig
    }

    /// Returns two live paths to the same group.
    fn live() -> Self {
        let mut rig = Self::new(2);
        rig.activate(A, None);
        assert!(!rig.saw(&Output::Event(SessionEvent::Live)), "B is awaited");
        rig.activate(B, None);
        assert!(rig.saw(&Output::Event(SessionEvent::Live)));
        rig
    }

    /// A path logs in, and leads to the expected unit.
    fn activate(&mut self, path: PathIndex, access: Option<Access>) {
        self.paths.handle_live(path, GROUP, self.now);
        self.collect_outputs();
        assert!(self.saw(&Output::Check(path)));
        self.check(path, Ok(found(access)));
    }

    /// Same as [`Self::activate`], for a target with a cache generation.
    fn activate_with_cache(&mut self, path: PathIndex, port: Option<PortTag>) {
        self.paths.handle_live(path, port, self.now);
        self.collect_outputs();
        let mut found = found(None);
        found.unit.cache = Some([1; 16]);
        self.check(path, Ok(found));
    }

    /// Same as [`Self::activate`], for an SRP target with this cache generation.
    fn activate_on_srp(&mut self, path: PathIndex, cache: Option<[u8; 16]>) {
        let port = PortTag::Port(TargetPortId([7; 16]), None);
        self.paths.handle_live(path, Some(port), self.now);
        self.collect_outputs();
        let mut found = found(None);
        found.unit.cache = cache;
        self.check(path, Ok(found));
    }

    fn check(&mut self, path: PathIndex, found: Result<UnitReport, Down>) {
        self.paths.handle_checked(path, found, self.now);
        self.collect_outputs();
    }

    fn collect_outputs(&mut self) {
        self.seen.clear();
        while let Some(output) = self.paths.poll_output() {
            self.seen.push(output);
        }
    }

    fn saw(&self, output: &Output) -> bool {
        self.seen.contains(output)
    }

    fn wait(&mut self, span: Duration) {
        self.now += span;
        self.paths.handle_timeout(self.now);
        self.collect_outputs();
    }

    fn submit(&mut self, effect: Effect) -> RequestId {
        let spec = RequestSpec {
            lun: [0; 8],
            attr: TaskAttr::Simple,
            cdb: Cdb::new(&[0; 6]).unwrap(),
            len: DataLen::None,
            deadline: self.now + ms(60_000),
            retry: Retry::Standard,
            effect,
        };
        let request = self.paths.submit(spec, self.now).unwrap();
        self.collect_outputs();
        request
    }

    fn complete_with(&mut self, request: RequestId, result: RequestResult) {
        self.paths.handle_completed(request, result, self.now);
        self.collect_outputs();
    }

    fn complete_good(&mut self, request: RequestId) {
        self.complete_with(request, good());
        assert!(self.saw(&Output::Complete(request, good())));
    }

    /// Closes a path's session with these requests.
    fn lose(&mut self, path: PathIndex, requests: &[RequestId]) {
        let mut seen = Vec::new();
        for request in requests {
            self.complete_with(*request, Err(RequestError::Closed));
            seen.append(&mut self.seen);
        }
        self.close(path, Down::ConnectionLost);
        self.seen.splice(0..0, seen);
    }

    fn close(&mut self, path: PathIndex, why: Down) {
        self.paths.handle_closed(path, why, self.now);
        self.collect_outputs();
    }

    /// Waits for 15 seconds ([`Timing::settle`]), and ensures that no request starts before.
    fn wait_for_settling(&mut self) {
        self.wait(ms(14_900));
        assert_eq!(self.started(), []);
        self.wait(ms(100));
    }

    fn started(&self) -> Vec<(RequestId, PathIndex)> {
        let start = |output: &Output| match output {
            Output::Start { request, path } => Some((*request, *path)),
            _ => None,
        };
        self.seen.iter().filter_map(start).collect()
    }

    fn states(&self) -> Vec<PathState> {
        self.paths.views().map(|view| view.state).collect()
    }
}

fn open(path: PathIndex, through: PathIndex) -> Output {
    Output::Open {
        path,
        through,
        patience: Timing::default().login,
    }
}

fn stages() -> [Stage; 6] {
    let until = Instant::now();
    [
        Stage::Idle { until },
        Stage::Opening { through: 0 },
        Stage::Checking,
        Stage::Live,
        Stage::Closing,
        Stage::Over,
    ]
}

#[test]
fn path_transitions_match_diagram() {
    let expected = "Idle: Opening Over\n\
                    Opening: Checking Closing\n\
                    Checking: Live Closing\n\
                    Live: Closing\n\
                    Closing: Idle Opening Over\n\
                    Over: \n";
    assert_eq!(table(&stages()), expected);
}

#[test]
fn path_transition_coverage_is_complete() {
    assert_all_taken(&stages(), || {
        let mut rig = Rig::live();
        rig.close(A, Down::ConnectionLost);
        rig.wait(ms(10_000));
        rig.close(A, Down::ConnectionLost);
        rig.paths.close(rig.now);
        rig.close(B, Down::Closed);
        let mut foreign = Rig::new(1);
        foreign.paths.handle_live(A, GROUP, foreign.now);
        foreign.check(A, Err(Down::NoIdentity));
    });
}

#[test]
fn requests_use_least_loaded_path() {
    let mut rig = Rig::live();
    let first = rig.submit(Effect::None);
    assert_eq!(rig.started(), [(first, B)]);
    let second = rig.submit(Effect::None);
    assert_eq!(rig.started(), [(second, A)]);
    rig.complete_good(first);
    let third = rig.submit(Effect::None);
    assert_eq!(rig.started(), [(third, B)]);
    rig.complete_good(second);
    rig.complete_good(third);
    assert_eq!(rig.states(), [PathState::Live; 2]);
}

#[test]
fn lost_write_waits_for_fence_unlike_read() {
    let mut rig = Rig::live();
    let read = rig.submit(READ);
    let write_a = rig.submit(write(0, 8));
    let read_b = rig.submit(READ);
    assert_eq!(rig.started(), [(read_b, B)]);
    rig.complete_good(read);
    let read_a = rig.submit(READ);
    rig.complete_good(read_b);
    let lost: Vec<_> = [write_a, read_a].into();
    rig.lose(A, &lost[..1]);
    assert_eq!(rig.started(), []);
    assert!(rig.saw(&open(A, B)), "{:?}", rig.seen);
    // Requests without a conflict do not wait.
    let elsewhere = rig.submit(write(8, 16));
    assert_eq!(rig.started(), [(elsewhere, B)]);
    let over = rig.submit(write(7, 9));
    assert_eq!(rig.started(), []);
    rig.paths.handle_live(A, GROUP, rig.now);
    rig.collect_outputs();
    assert_eq!(rig.started(), [(write_a, B)]);
    assert!(rig.saw(&Output::Close(A)));
    // This write overlaps with both.
    rig.complete_good(write_a);
    assert_eq!(rig.started(), []);
    rig.complete_good(elsewhere);
    assert_eq!(rig.started(), [(over, B)]);
    // The path recovers at its own portal.
    rig.close(A, Down::Closed);
    assert_eq!(rig.states(), [PathState::Lost, PathState::Live]);
    rig.wait(ms(200));
    assert!(rig.saw(&open(A, A)));
    rig.activate(A, None);
    assert_eq!(rig.states(), [PathState::Live; 2]);
    assert_eq!(rig.paths.views().next().unwrap().losses, 1);
}

#[test]
fn lost_read_retries_without_login() {
    let mut rig = Rig::live();
    let on_b = rig.submit(READ);
    let on_a = rig.submit(READ);
    assert_eq!(rig.started(), [(on_a, A)]);
    rig.lose(A, &[on_a]);
    assert_eq!(rig.started(), [(on_a, B)]);
    // Nothing requires a fence: the next attempt uses the path's own portal.
    assert!(!rig.saw(&open(A, B)));
    rig.complete_good(on_a);
    rig.complete_good(on_b);
}

#[test]
fn login_in_other_group_never_fences() {
    let mut rig = Rig::new(2);
    rig.activate(A, None);
    rig.paths
        .handle_live(B, Some(PortTag::Group(2, None)), rig.now);
    rig.check(B, Ok(found(None)));
    rig.submit(Effect::None);
    let lost = rig.submit(write(0, 8));
    assert_eq!(rig.started(), [(lost, A)]);
    rig.lose(A, &[lost]);
    assert!(!rig.saw(&open(A, B)));
    rig.wait(ms(100));
    assert!(rig.saw(&open(A, A)));
    // A login is no proof either before the unit was identified.
    rig.paths.handle_live(A, GROUP, rig.now);
    rig.collect_outputs();
    assert_eq!(rig.started(), []);
    rig.check(A, Ok(found(None)));
    assert_eq!(rig.started(), [(lost, A)]);
}

#[test]
fn fence_requires_unchanged_group() {
    let mut rig = Rig::live();
    rig.submit(Effect::None);
    let lost = rig.submit(write(0, 8));
    rig.lose(A, &[lost]);
    assert!(rig.saw(&open(A, B)));
    rig.paths
        .handle_live(A, Some(PortTag::Group(7, None)), rig.now);
    rig.collect_outputs();
    assert!(rig.saw(&Output::Close(A)));
    assert_eq!(rig.started(), []);
    rig.close(A, Down::Closed);
    // First the path's own portal, then the other one again.
    rig.wait(ms(100));
    assert!(rig.saw(&open(A, A)));
    rig.close(A, ConnectError::Unreachable.into());
    assert!(rig.saw(&open(A, B)));
    rig.paths.handle_live(A, GROUP, rig.now);
    rig.collect_outputs();
    assert_eq!(rig.started(), [(lost, B)]);
}

#[test]
fn timed_out_write_blocks_conflicting_requests() {
    let mut rig = Rig::new(2);
    rig.activate(A, None);
    rig.paths
        .handle_live(B, Some(PortTag::Group(2, None)), rig.now);
    rig.check(B, Ok(found(None)));
    rig.submit(Effect::None);
    let stale = rig.submit(write(0, 8));
    rig.lose(A, &[stale]);
    rig.wait(ms(60_000));
    let timed_out = Err(RequestError::TimedOut);
    assert!(rig.saw(&Output::Complete(stale, timed_out)));
    let newer = rig.submit(write(4, 5));
    let read = rig.submit(Effect::Read { start: 7, end: 9 });
    let raw = rig.submit(Effect::Other);
    assert_eq!(rig.started(), [], "the stale copy may still land");
    let free = rig.submit(Effect::Read { start: 8, end: 9 });
    assert_eq!(rig.started(), [(free, B)], "it sees nothing of that");
    rig.complete_good(free);
    let elsewhere = rig.submit(write(8, 9));
    assert_eq!(
        rig.started(),
        [],
        "an earlier command of unknown effect waits"
    );
    assert!(rig.saw(&open(A, A)) || rig.paths.next_deadline().is_some());
    rig.paths.handle_live(A, GROUP, rig.now);
    rig.collect_outputs();
    rig.check(A, Ok(found(None)));
    let started: Vec<_> = rig.started().into_iter().map(|(id, _)| id).collect();
    assert_eq!(started, [newer, read]);
    rig.complete_good(newer);
    assert_eq!(rig.started().len(), 1);
    rig.complete_good(raw);
    assert_eq!(rig.started().len(), 1);
    rig.complete_good(elsewhere);
}

#[test]
fn unrepeatable_request_fails_and_blocks_io() {
    let mut rig = Rig::live();
    rig.submit(Effect::None);
    let other = rig.submit(Effect::Other);
    assert_eq!(rig.started(), [(other, A)]);
    rig.lose(A, &[other]);
    let lost = Err(RequestError::ConnectionLost);
    assert!(rig.saw(&Output::Complete(other, lost)));
    assert!(rig.saw(&open(A, B)), "it is fenced nevertheless");
    let newer = rig.submit(write(0, 1));
    let read = rig.submit(READ);
    let inquiry = rig.submit(Effect::None);
    assert_eq!(rig.started(), [(inquiry, B)]);
    rig.paths.handle_live(A, GROUP, rig.now);
    rig.collect_outputs();
    assert_eq!(rig.started(), [(newer, B), (read, B)]);
}

#[test]
fn conflicting_writes_are_never_outstanding_together() {
    let mut rig = Rig::live();
    let first = rig.submit(write(0, 8));
    let second = rig.submit(write(4, 12));
    let third = rig.submit(write(8, 16));
    assert_eq!(rig.started(), []);
    let apart = rig.submit(write(100, 101));
    assert_eq!(rig.started().len(), 1);
    rig.complete_good(first);
    assert_eq!(rig.started().len(), 1);
    rig.complete_good(second);
    assert_eq!(rig.started().len(), 1);
    rig.complete_good(third);
    rig.complete_good(apart);
}

#[test]
fn returning_path_fences_remaining_lost_path() {
    let mut rig = Rig::live();
    let on_b = rig.submit(write(0, 8));
    let on_a = rig.submit(write(8, 16));
    rig.lose(A, &[on_a]);
    assert!(rig.saw(&open(A, B)));
    rig.lose(B, &[on_b]);
    let down = SessionEvent::Reconnecting(Down::ConnectionLost);
    assert!(rig.saw(&Output::Event(down)));
    rig.close(A, Down::ConnectionLost);
    let waiting = rig.submit(Effect::None);
    assert_eq!(rig.started(), []);
    rig.wait(ms(100));
    assert!(rig.saw(&open(A, A)) && rig.saw(&open(B, B)));
    // B responds; A is silent, and its attempt is aborted.
    rig.paths.handle_live(B, GROUP, rig.now);
    rig.collect_outputs();
    rig.check(B, Ok(found(None)));
    assert!(rig.saw(&Output::Event(SessionEvent::Live)));
    assert!(rig.saw(&Output::Close(A)));
    assert_eq!(rig.started(), [(on_b, B), (waiting, B)]);
    rig.close(A, Down::Closed);
    assert!(rig.saw(&open(A, B)));
    rig.paths.handle_live(A, GROUP, rig.now);
    rig.collect_outputs();
    assert_eq!(rig.started(), [(on_a, B)]);
}

#[test]
fn opening_fails_on_other_unit() {
    let mut rig = Rig::new(2);
    rig.activate(A, None);
    rig.paths.handle_live(B, GROUP, rig.now);
    let other = UnitReport {
        unit: unit("two"),
        access: None,
    };
    rig.check(B, Ok(other));
    assert!(rig.saw(&Output::Close(A)) && rig.saw(&Output::Close(B)));
    rig.close(A, Down::Closed);
    rig.close(B, Down::Closed);
    let closed = SessionEvent::Closed(Down::OtherUnit);
    assert!(rig.saw(&Output::Event(closed)));
}

#[test]
fn opening_fails_without_unit_identity() {
    let mut rig = Rig::new(2);
    rig.paths.handle_live(A, GROUP, rig.now);
    let nobody = UnitReport {
        unit: Snapshot::default(),
        access: None,
    };
    rig.check(A, Ok(nobody));
    rig.close(A, Down::Closed);
    rig.close(B, Down::Closed);
    let closed = SessionEvent::Closed(Down::NoIdentity);
    assert!(rig.saw(&Output::Event(closed)));
}

#[test]
fn path_to_other_unit_is_retried() {
    let mut rig = Rig::live();
    rig.lose(A, &[]);
    rig.wait(ms(100));
    assert!(rig.saw(&open(A, A)));
    rig.paths.handle_live(A, GROUP, rig.now);
    let other = UnitReport {
        unit: unit("two"),
        access: None,
    };
    rig.check(A, Ok(other));
    assert!(rig.saw(&Output::Close(A)));
    rig.close(A, Down::Closed);
    assert_eq!(rig.states(), [PathState::OtherUnit, PathState::Live]);
    for _ in 0..4 {
        let request = rig.submit(Effect::None);
        assert_eq!(rig.started(), [(request, B)]);
    }
    rig.wait(ms(5000));
    assert!(rig.saw(&open(A, A)));
    rig.activate(A, None);
    assert_eq!(rig.states(), [PathState::Live; 2]);
}

#[test]
fn opening_fails_if_all_paths_fail() {
    let mut rig = Rig::new(2);
    let refused: Down = ConnectError::Unreachable.into();
    rig.close(A, refused);
    rig.activate(B, None);
    assert!(rig.saw(&Output::Event(SessionEvent::Live)));
    assert_eq!(rig.states(), [PathState::Lost, PathState::Live]);
    let mut rig = Rig::new(2);
    rig.close(A, refused);
    rig.close(B, Down::ConnectionLost);
    assert!(rig.saw(&Output::Event(SessionEvent::Closed(refused))));
}

#[test]
fn login_timeout_doubles_patience() {
    let mut rig = Rig::live();
    rig.lose(A, &[]);
    rig.wait(ms(100));
    rig.close(A, ConnectError::TimedOut.into());
    rig.wait(ms(200));
    let patience = 2 * Timing::default().login;
    let (path, through) = (A, A);
    assert!(rig.saw(&Output::Open {
        path,
        through,
        patience
    }));
}

#[test]
fn access_states_select_paths() {
    let mut rig = Rig::new(3);
    let c = PathIndex(2);
    rig.activate(A, Some(Access::None));
    rig.activate(B, Some(Access::NonOptimized));
    rig.activate(c, Some(Access::Optimized));
    let standby = PathState::Standby;
    assert_eq!(rig.states(), [standby, PathState::Live, PathState::Live]);
    let requests: Vec<_> = (0..3).map(|_| rig.submit(Effect::None)).collect();
    assert_eq!(rig.paths.paths[2].outstanding, 3);
    // The unit changes its preference, and reports this with an error.
    let mut sense = [0; 18];
    (sense[0], sense[2], sense[7], sense[12], sense[13]) = (0x70, 0x02, 10, 0x04, 0x0b);
    let refusal = CommandResponse {
        status: CHECK_CONDITION,
        sense: Some(sense.into()),
        transferred: 0,
        overflow: 0,
    };
    rig.complete_with(requests[0], Ok(refusal));
    assert_eq!(rig.started(), [(requests[0], B)]);
    rig.wait(ms(0));
    assert!(rig.saw(&Output::Check(A)) && rig.saw(&Output::Check(B)));
    rig.check(A, Ok(found(Some(Access::Optimized))));
    let next = rig.submit(Effect::None);
    assert_eq!(rig.started(), [(next, A)]);
    rig.wait(ms(5000));
    assert!(rig.saw(&Output::Check(c)));
}

#[test]
fn close_completes_requests_after_sessions() {
    let mut rig = Rig::live();
    let on_b = rig.submit(write(0, 8));
    let waits = rig.submit(write(0, 8));
    rig.paths.close(rig.now);
    rig.collect_outputs();
    assert!(rig.saw(&Output::Close(A)) && rig.saw(&Output::Close(B)));
    rig.close(A, Down::Closed);
    let closed = || Err(RequestError::Closed);
    rig.complete_with(on_b, closed());
    assert!(rig.saw(&Output::Complete(on_b, closed())));
    rig.close(B, Down::Closed);
    assert!(rig.saw(&Output::Complete(waits, closed())));
    let over = SessionEvent::Closed(Down::Closed);
    assert!(rig.saw(&Output::Event(over)));
    assert_eq!(rig.paths.next_deadline(), None);
}

/// A request is passed to a closed session before the machine was notified.
#[test]
fn request_completes_before_closed_event() {
    let mut rig = Rig::new(1);
    rig.activate(A, None);
    let request = rig.submit(Effect::None);
    assert_eq!(rig.started(), [(request, A)]);
    rig.paths.close(rig.now);
    rig.collect_outputs();
    rig.close(A, Down::ConnectionLost);
    let over = Output::Event(SessionEvent::Closed(Down::Closed));
    assert!(!rig.saw(&over));
    let closed = || Err(RequestError::Closed);
    rig.complete_with(request, closed());
    assert_eq!(rig.seen, [Output::Complete(request, closed()), over]);
}

/// Simulates a target with a disk and single-block writes, randomly broken sessions, and copies of
/// commands that reach the disk as late as the target allows: until their session is replaced.
#[test]
fn random_losses_keep_acknowledged_data() {
    for seed in 1..400u64 {
        simulate(seed);
    }
}

/// A write of a session at the target: request, block, value.
type Held = (RequestId, u64, u64);

fn simulate(seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = move |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % n
    };
    let mut rig = Rig::live();
    // Writes of each path's initiator port at the target, in a current or an old session.
    let mut held: [Vec<Held>; 2] = Default::default();
    let mut is_up = [true; 2];
    let mut opening: [Option<PathIndex>; 2] = [None; 2];
    let mut disk: BTreeMap<u64, u64> = BTreeMap::new();
    let mut acked: BTreeMap<u64, u64> = BTreeMap::new();
    let mut writes: BTreeMap<RequestId, (u64, u64)> = BTreeMap::new();
    let mut value = 0;
    for step in 0..300 {
        let mut todo = std::mem::take(&mut rig.seen);
        while !todo.is_empty() {
            for output in std::mem::take(&mut todo) {
                match output {
                    Output::Start { request, path } => {
                        let (block, value) = writes[&request];
                        held[usize::from(path.0)].push((request, block, value));
                    }
                    Output::Open { path, through, .. } => {
                        opening[usize::from(path.0)] = Some(through);
                    }
                    Output::Close(path) => {
                        opening[usize::from(path.0)] = None;
                        rig.close(path, Down::Closed);
                        todo.append(&mut rig.seen);
                    }
                    Output::Check(path) => {
                        is_up[usize::from(path.0)] = true;
                        rig.check(path, Ok(found(None)));
                        todo.append(&mut rig.seen);
                    }
                    Output::Complete(request, result) => {
                        assert_eq!(result, good(), "seed {seed}");
                        let (block, value) = writes.remove(&request).unwrap();
                        acked.insert(block, value);
                    }
                    Output::Changed | Output::Event(_) | Output::Settling { .. } => {}
                }
            }
        }
        let at = random(2) as usize;
        let path = PathIndex(at as u8);
        match random(8) {
            0..=2 if step < 200 && writes.len() < 8 => {
                let block = random(3);
                // The content of a block is only known if no other request is writing to it.
                if writes.values().all(|(b, _)| *b != block) {
                    value += 1;
                    let next = rig.paths.requests.vacant_key() as u32;
                    writes.insert(RequestId(next), (block, value));
                    rig.submit(write(block, block + 1));
                }
            }
            3 | 4 if !held[at].is_empty() => {
                let place = random(held[at].len() as u64) as usize;
                let (request, block, value) = held[at].swap_remove(place);
                disk.insert(block, value);
                if is_up[at] && random(4) > 0 {
                    rig.complete_with(request, good());
                } else if is_up[at] {
                    // The response is lost with the connection.
                    held[at].push((request, block, value));
                }
            }
            5 if is_up[at] && step < 250 => {
                is_up[at] = false;
                let lost: Vec<_> = held[at].iter().map(|(r, ..)| *r).collect();
                rig.lose(path, &lost);
            }
            _ => match opening[at] {
                Some(through) if random(3) > 0 || step >= 250 => {
                    opening[at] = None;
                    // The target terminates previous commands of the initiator port before its
                    // response.
                    held[at].clear();
                    if usize::from(through.0) == at || is_up[usize::from(through.0)] {
                        rig.paths.handle_live(path, GROUP, rig.now);
                        rig.collect_outputs();
                    } else {
                        rig.close(path, ConnectError::Unreachable.into());
                    }
                }
                Some(_) if random(3) == 0 => {
                    opening[at] = None;
                    rig.close(path, ConnectError::Unreachable.into());
                }
                _ => rig.wait(ms(50)),
            },
        }
        // Acknowledged data must be present, unless the block is being written.
        for (block, value) in &acked {
            if writes.values().all(|(b, _)| b != block) {
                assert_eq!(disk.get(block), Some(value), "seed {seed}, step {step}");
            }
        }
    }
}

#[test]
fn missing_unit_moves_commands_to_other_path() {
    let mut rig = Rig::live();
    let id = rig.submit(write(0, 8));
    let (_, path) = rig.started()[0];
    rig.seen.clear();
    let mut sense = [0; 18];
    (sense[0], sense[2], sense[7], sense[12]) = (0x70, 5, 10, 0x25);
    let response = CommandResponse {
        status: CHECK_CONDITION,
        sense: Some(sense.into()),
        transferred: 0,
        overflow: 0,
    };
    rig.complete_with(id, Ok(response));
    assert!(rig.saw(&Output::Close(path)));
    let other = if path == A { B } else { A };
    assert_eq!(rig.started(), [(id, other)]);
}

/// Returns two live SRP paths whose portals report the same target port identifier.
fn srp(cache: Option<[u8; 16]>) -> Rig {
    let mut rig = Rig::new(2);
    for path in [A, B] {
        rig.activate_on_srp(path, cache);
    }
    rig
}

#[test]
fn srp_login_by_other_portal_never_fences() {
    for cache in [None, Some([1; 16])] {
        let mut rig = srp(cache);
        rig.submit(Effect::None);
        let lost = rig.submit(write(0, 8));
        assert_eq!(rig.started(), [(lost, A)]);
        rig.lose(A, &[lost]);
        assert!(!rig.saw(&open(A, B)), "{:?}", rig.seen);
        assert_eq!(rig.started(), []);
    }
}

#[test]
fn srp_login_fences_with_cache_generation() {
    let mut rig = srp(Some([1; 16]));
    rig.submit(Effect::None);
    let lost = rig.submit(write(0, 8));
    rig.lose(A, &[lost]);
    // Without the login there is no proof, regardless of the time.
    rig.wait(ms(40_000));
    assert_eq!(rig.started(), []);
    rig.activate_on_srp(A, Some([1; 16]));
    assert_eq!(rig.started().len(), 1);
}

#[test]
fn unproven_srp_login_fences_after_delay() {
    let mut rig = srp(None);
    rig.submit(Effect::None);
    let lost = rig.submit(write(0, 8));
    let gone = rig.submit(Effect::None);
    rig.lose(A, &[lost]);
    rig.wait(ms(100));
    rig.activate_on_srp(A, None);
    assert_eq!(rig.started(), [], "the old session's write may be held up");
    rig.wait(ms(14_800));
    assert_eq!(rig.started(), []);
    rig.wait(ms(200));
    assert_eq!(rig.started().len(), 1);
    assert_eq!(rig.started()[0].0, lost);
    rig.complete_good(gone);
}

/// The settle time of an earlier loss expires while the session is being closed.
#[test]
fn earlier_loss_fences_no_later_session() {
    let mut rig = srp(None);
    rig.submit(Effect::None);
    let lost = rig.submit(write(0, 8));
    assert_eq!(rig.started(), [(lost, A)]);
    rig.lose(A, &[lost]);
    rig.wait(ms(100));
    rig.activate_on_srp(A, None);
    let late = rig.submit(write(8, 16));
    assert_eq!(rig.started(), [(late, A)]);
    rig.wait(ms(14_800));
    rig.check(A, Err(Down::NoIdentity));
    assert!(rig.saw(&Output::Close(A)));
    rig.wait(ms(200));
    rig.lose(A, &[late]);
    assert_eq!(rig.started(), [], "its write may be held up");
    rig.wait(ms(15_000));
    let started = rig.started().into_iter().map(|(request, _)| request);
    assert_eq!(started.collect::<Vec<_>>(), [lost, late]);
}

/// The target reached by the redirect reports the same identifiers, but does not know the session.
#[test]
fn redirected_login_fences_after_delay() {
    let mut rig = srp(Some([1; 16]));
    rig.submit(Effect::None);
    let lost = rig.submit(write(0, 8));
    assert_eq!(rig.started(), [(lost, A)]);
    rig.lose(A, &[lost]);
    rig.wait(ms(100));
    rig.activate_with_cache(A, REDIRECTED);
    assert_eq!(rig.states(), [PathState::Live; 2]);
    assert_eq!(rig.started(), []);
    rig.wait_for_settling();
    assert_eq!(rig.started().len(), 1);
}

/// The host reached by the redirect reports the same portal group, but does not know the session.
#[test]
fn redirected_group_fences_after_delay() {
    let mut rig = Rig::new(1);
    rig.activate(A, None);
    let lost = rig.submit(write(0, 8));
    assert_eq!(rig.started(), [(lost, A)]);
    let lose = |rig: &mut Rig, port| {
        rig.lose(A, &[lost]);
        rig.wait(ms(200));
        rig.paths.handle_live(A, port, rig.now);
        rig.collect_outputs();
        rig.check(A, Ok(found(None)));
        assert_eq!(rig.states(), [PathState::Live]);
    };
    for host in [2, 3] {
        lose(&mut rig, redirected_group(host));
        assert_eq!(rig.started(), []);
        rig.wait_for_settling();
        assert_eq!(rig.started(), [(lost, A)]);
    }
    // The same host terminates the commands of its lost session.
    lose(&mut rig, redirected_group(3));
    assert_eq!(rig.started(), [(lost, A)]);
}

fn settling(redirect: Option<SocketAddr>) -> Output {
    Output::Settling {
        path: A,
        settle: Timing::default().settle,
        redirect,
    }
}

/// Nothing is logged if no request waits.
#[test]
fn wait_for_lost_writes_is_reported() {
    for is_awaited in [false, true] {
        let mut rig = Rig::new(1);
        rig.activate(A, None);
        let lost = rig.submit(write(0, 8));
        if is_awaited {
            rig.lose(A, &[lost]);
        } else {
            rig.complete_good(lost);
            rig.lose(A, &[]);
        }
        rig.wait(ms(200));
        rig.paths.handle_live(A, redirected_group(2), rig.now);
        rig.check(A, Ok(found(None)));
        let address = SocketAddr::from(([192, 0, 2, 2], 3260));
        assert_eq!(rig.saw(&settling(Some(address))), is_awaited);
    }
}

/// Returns two live paths to the same group. The login of A was redirected, and a write is
/// outstanding on A.
fn redirected_write() -> (Rig, RequestId) {
    let mut rig = Rig::new(2);
    rig.paths.handle_live(A, redirected_group(2), rig.now);
    rig.collect_outputs();
    rig.check(A, Ok(found(None)));
    rig.activate(B, None);
    rig.submit(Effect::None);
    let lost = rig.submit(write(0, 8));
    assert_eq!(rig.started(), [(lost, A)]);
    (rig, lost)
}

#[test]
fn group_at_other_address_fences_after_delay() {
    let (mut rig, lost) = redirected_write();
    rig.lose(A, &[lost]);
    assert!(rig.saw(&open(A, B)), "{:?}", rig.seen);
    rig.wait(ms(1_000));
    rig.paths.handle_live(A, GROUP, rig.now);
    rig.collect_outputs();
    assert!(rig.saw(&settling(None)));
    assert!(rig.saw(&Output::Close(A)));
    rig.close(A, Down::Closed);
    // The portal never returns, and there is no further login through B.
    let end = rig.now + ms(15_000);
    while rig.now < end {
        assert_eq!(rig.started(), []);
        assert!(!rig.saw(&open(A, B)));
        if rig.saw(&open(A, A)) {
            rig.close(A, ConnectError::Unreachable.into());
        }
        rig.wait(ms(100));
    }
    assert_eq!(rig.started(), [(lost, B)]);
}

#[test]
fn lost_address_fences_before_delay() {
    let (mut rig, lost) = redirected_write();
    rig.lose(A, &[lost]);
    rig.paths.handle_live(A, GROUP, rig.now);
    rig.collect_outputs();
    rig.close(A, Down::Closed);
    rig.wait(ms(200));
    assert!(rig.saw(&open(A, A)), "{:?}", rig.seen);
    rig.paths.handle_live(A, redirected_group(2), rig.now);
    rig.collect_outputs();
    assert_eq!(rig.started(), []);
    rig.check(A, Ok(found(None)));
    assert_eq!(rig.started().len(), 1);
}

#[test]
fn fence_prefers_address_of_lost_session() {
    let mut rig = Rig::new(3);
    let c = PathIndex(2);
    for (path, host) in [(A, 2), (B, 3), (c, 2)] {
        rig.paths.handle_live(path, redirected_group(host), rig.now);
        rig.collect_outputs();
        rig.check(path, Ok(found(None)));
    }
    rig.submit(Effect::None);
    rig.submit(Effect::None);
    let lost = rig.submit(write(0, 8));
    assert_eq!(rig.started(), [(lost, A)]);
    rig.lose(A, &[lost]);
    assert!(rig.saw(&open(A, c)), "{:?}", rig.seen);
    rig.paths.handle_live(A, redirected_group(2), rig.now);
    rig.collect_outputs();
    assert_eq!(rig.started().len(), 1);
}

#[test]
fn redirected_takeover_waits_for_dead_process() {
    let own = Some(PortTag::Port(TargetPortId([7; 16]), None));
    let redirected = redirected_group(2);
    for (port, is_redirected, was_redirected) in [
        (own.clone(), false, false),
        (REDIRECTED, true, false),
        (own, false, true),
        (GROUP, false, false),
        (redirected, true, false),
        (GROUP, false, true),
    ] {
        let mut rig = Rig::new(1);
        rig.paths.recover(was_redirected, rig.now);
        rig.activate_with_cache(A, port);
        let write = rig.submit(write(0, 8));
        if is_redirected || was_redirected {
            rig.wait_for_settling();
        }
        assert_eq!(rig.started(), [(write, A)]);
    }
}

#[test]
fn changed_group_fences_after_delay() {
    let mut rig = Rig::live();
    rig.submit(Effect::None);
    let lost = rig.submit(write(0, 8));
    rig.lose(A, &[lost]);
    rig.close(A, ConnectError::Unreachable.into());
    rig.wait(ms(200));
    rig.paths
        .handle_live(A, Some(PortTag::Group(7, None)), rig.now);
    rig.collect_outputs();
    rig.check(A, Ok(found(None)));
    assert_eq!(rig.states(), [PathState::Live; 2]);
    assert_eq!(
        rig.started(),
        [],
        "the old group knows nothing of this login"
    );
    // A later check is no proof either.
    rig.check(A, Ok(found(None)));
    assert_eq!(rig.started(), []);
    rig.wait_for_settling();
    assert_eq!(rig.started().len(), 1);
}

#[test]
fn login_fences_only_sessions_in_group() {
    let mut rig = Rig::new(1);
    rig.activate(A, None);
    let first = rig.submit(write(0, 8));
    rig.lose(A, &[first]);
    rig.wait(ms(200));
    rig.paths
        .handle_live(A, Some(PortTag::Group(7, None)), rig.now);
    rig.collect_outputs();
    rig.check(A, Ok(found(None)));
    let second = rig.submit(write(8, 16));
    assert_eq!(rig.started(), [(second, A)]);
    rig.lose(A, &[second]);
    // A target that is unresponsive may execute commands later.
    rig.wait(ms(20_000));
    rig.activate(A, None);
    assert_eq!(rig.started(), []);
    rig.wait_for_settling();
    assert_eq!(rig.started(), [(first, A), (second, A)]);
}

#[test]
fn login_by_other_portal_fences_several_sessions() {
    let mut rig = Rig::live();
    rig.submit(Effect::None);
    let lost = rig.submit(write(0, 8));
    rig.lose(A, &[lost]);
    rig.close(A, ConnectError::Unreachable.into());
    rig.wait(ms(200));
    let other = Some(PortTag::Group(7, None));
    for path in [A, B] {
        if path == B {
            rig.lose(B, &[]);
            rig.wait(ms(200));
        }
        rig.paths.handle_live(path, other.clone(), rig.now);
        rig.collect_outputs();
        rig.check(path, Ok(found(None)));
    }
    rig.lose(A, &[]);
    assert!(rig.saw(&open(A, B)), "{:?}", rig.seen);
    rig.wait(ms(20_000));
    assert_eq!(rig.started(), []);
    rig.paths.handle_live(A, other, rig.now);
    rig.collect_outputs();
    rig.close(A, Down::Closed);
    rig.wait_for_settling();
    assert_eq!(rig.started(), [(lost, B)]);
}

/// The commands of the killed process block the whole unit, so they don't wait for a login.
#[test]
fn takeover_needs_no_login_after_loss() {
    let mut rig = Rig::new(2);
    rig.paths.recover(false, rig.now);
    rig.activate(A, None);
    rig.activate(B, None);
    rig.wait(ms(10_000));
    rig.lose(A, &[]);
    let write = rig.submit(write(0, 8));
    rig.wait_for_settling();
    assert_eq!(rig.started(), [(write, B)]);
}

#[test]
fn takeover_writes_after_fencing_all_paths() {
    let mut rig = Rig::new(2);
    rig.paths.recover(false, rig.now);
    rig.activate_with_cache(A, GROUP);
    rig.close(B, ConnectError::Unreachable.into());
    assert!(rig.saw(&Output::Event(SessionEvent::Live)));
    let write = rig.submit(write(0, 8));
    // A read could return the old data of a block before a write of the killed process reaches it.
    let read = rig.submit(Effect::Read { start: 16, end: 24 });
    let inquiry = rig.submit(Effect::None);
    assert_eq!(rig.started(), [(inquiry, A)]);
    rig.wait(ms(200));
    assert_eq!(rig.started(), []);
    assert!(rig.saw(&open(B, B)), "{:?}", rig.seen);
    rig.activate_with_cache(B, Some(PortTag::Group(2, None)));
    let started = rig.started().into_iter().map(|(request, _)| request);
    assert_eq!(started.collect::<Vec<_>>(), [write, read]);
}

/// With targets other than `riserd`, a portal may have moved to another group in the meantime.
#[test]
fn takeover_trusts_no_unknown_group() {
    let mut rig = Rig::new(2);
    rig.paths.recover(false, rig.now);
    rig.activate(A, None);
    rig.activate(B, None);
    let write = rig.submit(write(0, 8));
    rig.wait_for_settling();
    assert_eq!(rig.started().len(), 1, "{write:?}");
}

/// RFC 7143 clause 13.15, also for the login that fences the path.
#[test]
fn path_waits_for_time2wait() {
    let mut rig = Rig::live();
    rig.submit(Effect::None);
    let lost = rig.submit(write(0, 8));
    rig.paths.set_time2wait(A, ms(3_000));
    rig.lose(A, &[lost]);
    rig.wait(ms(2_900));
    assert!(!rig.saw(&open(A, B)) && !rig.saw(&open(A, A)));
    rig.wait(ms(100));
    assert!(rig.saw(&open(A, B)), "{:?}", rig.seen);
}

#[test]
fn takeover_delays_writes_for_absent_path() {
    let mut rig = Rig::new(2);
    rig.paths.recover(false, rig.now);
    rig.activate(A, None);
    rig.close(B, ConnectError::Unreachable.into());
    let write = rig.submit(write(0, 8));
    rig.wait_for_settling();
    assert_eq!(rig.started(), [(write, A)]);
}
