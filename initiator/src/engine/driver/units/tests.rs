use std::sync::{Arc, Weak};
use std::time::Duration;

use riser_block::oneshot::oneshot;
use riser_block::{BufferPool, Mailbox};
use riser_scsi::sense::AdditionalSense;

use super::*;
use crate::engine::driver::{
    IscsiOpen, Link, Open, PathPlan, PathsOpen, Plan, Protocol, Transport, User,
};
use crate::engine::io::{Done, IoCompletion, IoData, ScsiIo, Target, WorkQueue, Workload};
use crate::engine::tests::log::log_of;
use crate::engine::tests::world::Sim;
use crate::iscsi::session::fixture::{config, redirect};
use crate::paths::{PathIndex, PathsConfig, PortTag};
use crate::request::{CHECK_CONDITION, GOOD};
use crate::session::ConnectError;
use crate::unit::Losses;

fn target() -> Target {
    Target {
        dst: "127.0.0.1:1".parse().unwrap(),
        host: None,
        src: None,
        service_id: None,
    }
}

fn iscsi() -> Protocol {
    Protocol::Iscsi(Box::new(IscsiOpen {
        config: config(),
        transport: Transport::Tcp,
        found: None,
    }))
}

/// Creates the watch of unit 0 for a user with a volatile cache.
fn watch_of(owner: Weak<Losses>, pool: &BufferPool) -> Watch {
    Watch {
        lun: LunId::ZERO,
        unit: Snapshot::default(),
        write_cache: true,
        has_fua: true,
        recovers: false,
        noted: None,
        was_redirected: false,
        owner,
        buffer: pool.try_take(4096).unwrap(),
    }
}

/// Creates the watch of a process that takes over unit 0 from a killed process, with the generation
/// of its cache now and as recorded by that process.
fn takeover_watch(owner: &Arc<Losses>, found: Option<[u8; 16]>, noted: Option<[u8; 16]>) -> Watch {
    Watch {
        unit: Snapshot {
            cache: found,
            ..Snapshot::default()
        },
        recovers: true,
        noted,
        ..watch_of(Arc::downgrade(owner), &BufferPool::new(1 << 16).unwrap())
    }
}

/// Creates an engine without a thread, with a session that has received a message from its
/// target before.
fn driver(now: Instant) -> (Driver<Sim>, SessionKey) {
    driver_with(Plan::One(iscsi()), now)
}

fn driver_with(plan: Plan, now: Instant) -> (Driver<Sim>, SessionKey) {
    let pool = BufferPool::new(1 << 16).unwrap();
    let mailbox = Arc::new(Mailbox::new().unwrap());
    let mut driver = Driver::new(Sim::new(None), None, mailbox, pool.memory().whole());
    let (reply, _) = oneshot();
    let opened = driver.open(
        Open {
            target: target(),
            plan,
            status: Arc::default(),
            user: User::Caller(reply),
        },
        now,
    );
    let key = opened.unwrap();
    driver.sessions[key.index].units.last_received = Some(now);
    let watch = Watch {
        write_cache: false,
        ..watch_of(Weak::new(), &pool)
    };
    driver.watch(key.index, watch, now);
    (driver, key)
}

/// Flushes a watched unit, which returns GOOD.
fn flush(driver: &mut Driver<Sim>, key: SessionKey, now: Instant) -> RequestResult {
    let command = crate::scsi::Command::synchronize_cache();
    let lun = LunId::new(0).unwrap();
    let io = ScsiIo::new(lun, command, IoData::None, Duration::from_secs(1));
    let mut io = Io::new(io, Done::Ping, now);
    let session = &mut driver.sessions[key.index];
    session.units.mark_flush(&mut io);
    let good = crate::request::CommandResponse {
        status: GOOD,
        sense: None,
        transferred: 0,
        overflow: 0,
    };
    session.track_command(&io, Ok(good))
}

/// Flushes once when woken.
struct Woken(Option<Instant>);

impl Workload for Woken {
    fn start(&mut self, _queue: &mut WorkQueue) {}

    fn complete(&mut self, _token: u64, end: IoCompletion, _queue: &mut WorkQueue) {
        assert!(end.result.is_err(), "the session is closed");
    }

    fn due(&self) -> Option<Instant> {
        self.0
    }

    fn wake(&mut self, queue: &mut WorkQueue) {
        self.0 = None;
        let command = crate::scsi::Command::synchronize_cache();
        let lun = LunId::new(0).unwrap();
        let io = ScsiIo::new(lun, command, IoData::None, Duration::from_secs(1));
        queue.submit(0, io);
    }
}

#[test]
fn failed_workload_command_keeps_engine_awake() {
    let now = Instant::now();
    let (mut driver, key) = driver(now);
    driver.close(key.index, now);
    driver.start_workload(key.index, Box::new(Woken(Some(now))), now);
    assert!(driver.run_workloads(now), "an end waits to be reported");
    assert!(driver.run_workloads(now), "it is");
    assert!(!driver.run_workloads(now));
}

#[test]
fn takeover_flushes_or_reports_inherited_writes() {
    let (one, two) = (Some([1; 16]), Some([2; 16]));
    let now = Instant::now();
    for (recovers, noted, found, write_cache, is_lost) in [
        (true, one, two, true, true),
        (true, one, None, true, true),
        // Its cache was disabled after that.
        (true, one, two, false, true),
        (true, one, one, true, false),
        (true, None, two, true, false),
        (false, one, two, true, false),
        // There is no cache, so nothing is lost if the next process finds a third generation.
        (true, None, two, false, false),
        (false, None, two, false, false),
    ] {
        let (mut driver, key) = driver(now);
        let session = &mut driver.sessions[key.index];
        session.units.units.clear();
        session.status.set_cache(noted.or(found));
        let owner = Arc::new(Losses::default());
        let watch = Watch {
            write_cache,
            recovers,
            ..takeover_watch(&owner, found, noted)
        };
        driver.watch(key.index, watch, now);
        let what = (recovers, noted, found, write_cache);
        let status = driver.sessions[key.index].status.clone();
        // A process that takes over now should also detect the loss.
        let found = found.filter(|_| write_cache || is_lost);
        let before = if is_lost { noted } else { found };
        assert_eq!(status.report().cache, before, "{what:?}");
        let is_pending = driver.sessions[key.index].pending().unflushed;
        assert_eq!(is_pending, recovers && (write_cache || is_lost), "{what:?}");
        let flushed = flush(&mut driver, key, now);
        assert_eq!(flushed == Err(RequestError::CacheLost), is_lost, "{what:?}");
        assert_eq!(status.report().cache, found, "{what:?}");
        flush(&mut driver, key, now).unwrap();
    }
}

/// The unit proves that the target terminates old commands at its own port, but the old or the new
/// login may have been redirected.
#[test]
fn takeover_waits_after_redirected_login() {
    for (is_redirected, was_redirected) in [(false, false), (false, true), (true, false)] {
        let now = Instant::now();
        let (mut driver, key) = driver(now);
        if is_redirected {
            let Link::Iscsi(link) = &mut driver.sessions[key.index].link else {
                panic!("another protocol");
            };
            redirect(&mut link.machine);
        }
        driver.sessions[key.index].units.units.clear();
        let owner = Arc::new(Losses::default());
        let watch = Watch {
            was_redirected,
            ..takeover_watch(&owner, Some([1; 16]), Some([1; 16]))
        };
        driver.watch(key.index, watch, now);
        let machine = driver.sessions[key.index].link.machine();
        assert_eq!(machine.is_settled(), !is_redirected && !was_redirected);
        // The next process must wait as well.
        driver.handle_event(key.index, SessionEvent::Live, now);
        let report = driver.sessions[key.index].status.report();
        assert_eq!(report.is_redirected, is_redirected);
    }
}

/// The paths should detect the loss after the unit was identified, but before it is watched.
#[test]
fn cache_loss_during_takeover_is_detected() {
    for noted in [None, Some([1; 16])] {
        take_over_amid_a_loss(noted);
    }
}

fn take_over_amid_a_loss(noted: Option<[u8; 16]>) {
    let now = Instant::now();
    let lun = LunId::new(0).unwrap();
    let pool = BufferPool::new(1 << 16).unwrap();
    let plan = Plan::Paths(Box::new(PathsOpen {
        config: PathsConfig {
            paths: 1,
            max_requests: 8,
            timing: config().timing,
            recheck: Duration::from_secs(5),
        },
        lun,
        recovers: true,
        was_redirected: false,
        paths: vec![PathPlan {
            target: target(),
            protocol: iscsi(),
            buffer: pool.try_take(4096).unwrap(),
        }],
    }));
    let (mut driver, key) = driver_with(plan, now);
    let session = &mut driver.sessions[key.index];
    session.units.units.clear();
    session.link.paths_mut().unwrap().generation = Some([2; 16]);
    let owner = Arc::new(Losses::default());
    let watch = takeover_watch(&owner, Some([1; 16]), noted);
    driver.watch(key.index, watch, now);
    let first = flush(&mut driver, key, now);
    assert_eq!(first, Err(RequestError::CacheLost));
    flush(&mut driver, key, now).unwrap();
}

/// Until the new process has flushed, a loss affects writes of the earlier process.
#[test]
fn cache_loss_after_takeover_is_detected() {
    let mut cache = WriteCache::inherited();
    cache.on_lost();
    assert!(cache.has_lost() && !cache.end_flush(cache.begin_flush()));
    assert!(!cache.has_lost() && cache.end_flush(cache.begin_flush()));
    let mut flushed = WriteCache::inherited();
    assert!(flushed.end_flush(flushed.begin_flush()));
    flushed.on_lost();
    assert!(!flushed.has_lost());
}

/// Returns whether the session would resume now.
fn releases_requests(driver: &mut Driver<Sim>, key: SessionKey, now: Instant) -> bool {
    driver.sessions[key.index].units.last_received = Some(now);
    driver.release_checked(key.index, now);
    driver.sessions[key.index].units.last_received.is_none()
}

#[test]
fn session_is_live_after_unit_checks() {
    let now = Instant::now();
    let (mut driver, key) = driver(now);
    let state = |driver: &Driver<Sim>| driver.sessions[key.index].status.link();
    driver.handle_event(
        key.index,
        SessionEvent::Reconnecting(Down::Unresponsive),
        now,
    );
    driver.handle_event(key.index, SessionEvent::Live, now);
    assert_eq!(state(&driver), LinkState::Reconnecting, "not checked yet");
    // The connection is lost again, so the previous check is void.
    driver.handle_event(key.index, SessionEvent::Reconnecting(Down::UnitSilent), now);
    driver.inputs.clear();
    driver.release_checked(key.index, now);
    assert_eq!(state(&driver), LinkState::Reconnecting, "not logged in");
    driver.handle_event(key.index, SessionEvent::Live, now);
    driver.inputs.clear();
    driver.release_checked(key.index, now);
    assert_eq!(state(&driver), LinkState::Live);
}

#[test]
fn session_waits_for_all_due_checks() {
    let now = Instant::now();
    let (mut driver, key) = driver(now);
    assert!(
        !releases_requests(&mut driver, key, now),
        "a unit was just found"
    );
    driver.inputs.clear();
    assert!(releases_requests(&mut driver, key, now));
    // A unit has not responded yet.
    driver.sessions[key.index].units.units[0].is_checking = true;
    assert!(!releases_requests(&mut driver, key, now));
    driver.sessions[key.index].units.units[0].is_checking = false;
    // An event occurred after its response.
    driver.inputs.push_back(Input::Check(key));
    assert!(!releases_requests(&mut driver, key, now));
    // The event concerns another session.
    driver.inputs.clear();
    let other = SessionKey {
        serial: key.serial + 1,
        ..key
    };
    driver.inputs.push_back(Input::Check(other));
    assert!(releases_requests(&mut driver, key, now));
}

/// Writes to unit 0, which returns GOOD.
fn write(driver: &mut Driver<Sim>, key: SessionKey, now: Instant) {
    let range = crate::scsi::BlockRange { lba: 0, blocks: 1 };
    let command = crate::scsi::Command::write(range, 512, false);
    let lun = LunId::new(0).unwrap();
    let io = ScsiIo::new(lun, command, IoData::None, Duration::from_secs(1));
    let io = Io::new(io, Done::Ping, now);
    driver.sessions[key.index]
        .track_command(&io, Ok(GOOD_RESPONSE))
        .unwrap();
}

const GOOD_RESPONSE: CommandResponse = CommandResponse {
    status: GOOD,
    sense: None,
    transferred: 0,
    overflow: 0,
};

/// Returns the completion of a query with this data, or with CHECK CONDITION and this ASC.
fn completion(pool: &BufferPool, data: Result<&[u8], u8>) -> IoCompletion {
    let buffer = pool.try_take(4096).unwrap();
    let response = match data {
        Ok(data) => {
            buffer.slice().write(0, data);
            CommandResponse {
                transferred: data.len() as u32,
                ..GOOD_RESPONSE
            }
        }
        Err(code) => {
            let mut sense = [0_u8; 18];
            (sense[0], sense[2], sense[7], sense[12]) = (0x70, 5, 10, code);
            CommandResponse {
                status: CHECK_CONDITION,
                sense: Some(Box::new(sense)),
                ..GOOD_RESPONSE
            }
        }
    };
    IoCompletion {
        result: Ok(response),
        data: IoData::One(buffer),
    }
}

const CACHING: [u8; 16] = [15, 0, 0, 0, 8, 10, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Identifies the unit on a path as a disk with a name and a volatile cache, without a cache
/// generation.
fn identify_on(
    driver: &mut Driver<Sim>,
    pool: &BufferPool,
    at: (SessionKey, PathIndex),
    is_greeted: bool,
    now: Instant,
) {
    identify_with(driver, pool, at, &[], is_greeted, now);
}

/// Same as `identify_on`, with a Cache Generation page.
fn identify_with(
    driver: &mut Driver<Sim>,
    pool: &BufferPool,
    (key, path): (SessionKey, PathIndex),
    generation: &[u8],
    is_greeted: bool,
    now: Instant,
) {
    let (mut capacity, mut inquiry) = ([0_u8; 32], [b' '; 36]);
    (capacity[7], capacity[10]) = (99, 2);
    inquiry[..8].copy_from_slice(&[0, 0, 6, 2, 31, 0, 0, 2]);
    let serial = b"\0\x80\0\x02S1";
    // The capacity is queried again if a unit attention preceded the first response.
    let at_last = is_greeted.then_some(&capacity[..]);
    let responses = [&capacity[..], &inquiry, &[], serial, generation, &CACHING];
    for data in responses.into_iter().chain(at_last) {
        let response = Input::PathResponse(key, path, completion(pool, Ok(data)));
        driver.inputs.push_back(response);
        driver.run_paths(now);
    }
}

const A: PathIndex = PathIndex(0);
const B: PathIndex = PathIndex(1);
const GROUP: Option<PortTag> = Some(PortTag::Group(1, None));

/// Two paths to a unit with a volatile cache and an unflushed write. Only the first path is in
/// use.
struct PathPair {
    driver: Driver<Sim>,
    key: SessionKey,
    pool: BufferPool,
    _owner: Arc<Losses>,
}

impl PathPair {
    fn new(now: Instant) -> Self {
        let lun = LunId::new(0).unwrap();
        let pool = BufferPool::new(1 << 20).unwrap();
        let path = || PathPlan {
            target: target(),
            protocol: iscsi(),
            buffer: pool.try_take(4096).unwrap(),
        };
        let plan = Plan::Paths(Box::new(PathsOpen {
            config: PathsConfig {
                paths: 2,
                max_requests: 8,
                timing: config().timing,
                recheck: Duration::from_secs(5),
            },
            lun,
            recovers: false,
            was_redirected: false,
            paths: vec![path(), path()],
        }));
        let (mut driver, key) = driver_with(plan, now);
        driver.sessions[key.index].units.units.clear();
        driver.inputs.push_back(Input::Live(key, A, GROUP));
        driver.run_paths(now);
        identify_on(&mut driver, &pool, (key, A), false, now);
        let owner = Arc::new(Losses::default());
        let watch = watch_of(Arc::downgrade(&owner), &pool);
        driver.watch(key.index, watch, now);
        write(&mut driver, key, now);
        Self {
            driver,
            key,
            pool,
            _owner: owner,
        }
    }

    fn lose(&mut self, path: PathIndex, why: Down, last_received: Option<Instant>, at: Instant) {
        let lost = Input::Closed(self.key, path, why, last_received);
        self.driver.inputs.push_back(lost);
        self.driver.run_paths(at);
    }

    /// Starts the login of paths that wait for it.
    fn reopen(&mut self, at: Instant) {
        let index = self.key.index;
        self.driver.sessions[index]
            .link
            .machine()
            .handle_timeout(at);
        self.driver.drain(index, at);
    }

    /// Records a message of the target on a path.
    fn set_last_received(&mut self, path: PathIndex, at: Instant) {
        let link = self.driver.sessions[self.key.index].link.paths_mut();
        link.unwrap().set_last_received(path, at);
    }

    fn is_waiting(&mut self, path: PathIndex) -> bool {
        let link = self.driver.sessions[self.key.index].link.paths_mut();
        link.unwrap().is_waiting(path)
    }

    fn identify(&mut self, path: PathIndex, is_greeted: bool, at: Instant) {
        identify_on(
            &mut self.driver,
            &self.pool,
            (self.key, path),
            is_greeted,
            at,
        );
    }
}

/// The cache belongs to the unit: it is lost even if the first path to recover was never in
/// use.
#[test]
fn unused_path_detects_cache_loss() {
    // Test parameters: whether the path in use is lost, the ASCQ of the initial attention, the
    // seconds until the login and until the end of the check. A restarted host, a flapping
    // connection, a slow check, and a path in use throughout.
    for (a_is_lost, greeting, login, checked, is_lost) in [
        (true, 0, 60, 60, true),
        (true, 0, 1, 1, false),
        (true, 0, 15, 25, false),
        (false, 1, 3600, 3600, false),
        // A power-on is reported after the outage.
        (true, 1, 1, 1, true),
        (true, 4, 1, 1, true),
    ] {
        let now = Instant::now();
        let mut pair = PathPair::new(now);
        let PathPair { driver, key, .. } = &mut pair;
        let key = *key;
        let away = Down::Connect(ConnectError::Tcp(111));
        driver.inputs.push_back(Input::Closed(key, B, away, None));
        driver.run_paths(now);
        assert_eq!(driver.sessions[key.index].status.link(), LinkState::Live);
        if a_is_lost {
            let lost = Input::Closed(key, A, Down::ConnectionLost, Some(now));
            driver.inputs.push_back(lost);
            driver.run_paths(now);
        }
        let [login, checked] = [login, checked].map(|at| now + Duration::from_secs(at));
        let link = &mut driver.sessions[key.index].link;
        link.machine().handle_timeout(login);
        driver.drain(key.index, login);
        driver.inputs.push_back(Input::Live(key, B, GROUP));
        // The attention that a target reports for every new nexus is not evidence.
        let greeting = AdditionalSense {
            code: 0x29,
            qualifier: greeting,
        };
        driver
            .inputs
            .push_back(Input::Attention(key, B, greeting, false));
        driver.run_paths(login);
        pair.identify(B, true, checked);
        let flushed = flush(&mut pair.driver, key, checked);
        let when = (login - now, checked - now);
        assert_eq!(flushed.is_err(), is_lost, "{when:?}: {flushed:?}");
    }
}

/// A flapping portal, a long outage, a restarted service, and a reported power-on: the other
/// path proves that the target was available throughout.
#[test]
fn returning_path_keeps_cache_used_elsewhere() {
    for (is_refused, greeting, away) in [
        (false, None, 2),
        (false, None, 30),
        (true, None, 2),
        (true, Some(1), 2),
    ] {
        let now = Instant::now();
        let mut pair = PathPair::new(now);
        let key = pair.key;
        pair.driver.inputs.push_back(Input::Live(key, B, GROUP));
        pair.driver.run_paths(now);
        pair.identify(B, false, now);
        write(&mut pair.driver, key, now);
        pair.lose(B, Down::ConnectionLost, Some(now), now);
        if is_refused {
            let at = now + Duration::from_secs(1);
            pair.reopen(at);
            let why = Down::Connect(ConnectError::Tcp(111));
            pair.lose(B, why, None, at);
        }
        let back = now + Duration::from_secs(away);
        pair.reopen(back);
        pair.driver.inputs.push_back(Input::Live(key, B, GROUP));
        if let Some(qualifier) = greeting {
            let code = 0x29;
            let greeting = AdditionalSense { code, qualifier };
            pair.driver
                .inputs
                .push_back(Input::Attention(key, B, greeting, false));
        }
        pair.driver.run_paths(back);
        pair.set_last_received(A, back);
        pair.identify(B, greeting.is_some(), back);
        let report = pair.driver.sessions[key.index].status.report();
        assert_eq!(report.link.state, LinkState::Live);
        let flushed = flush(&mut pair.driver, key, back);
        assert!(flushed.is_ok(), "{is_refused} {away}: {flushed:?}");
    }
}

/// A busy path in use may respond later than the check of the recovered path would complete.
#[test]
fn check_waits_for_path_in_use() {
    let now = Instant::now();
    let mut pair = PathPair::new(now);
    let key = pair.key;
    pair.driver.inputs.push_back(Input::Live(key, B, GROUP));
    pair.driver.run_paths(now);
    pair.identify(B, false, now);
    pair.driver.inputs.push_back(Input::Pinged(key, A));
    pair.driver.run_paths(now);
    pair.lose(B, Down::ConnectionLost, Some(now), now);
    let back = now + Duration::from_secs(2);
    pair.reopen(back);
    pair.driver.inputs.push_back(Input::Live(key, B, GROUP));
    pair.driver.run_paths(back);
    assert!(pair.is_waiting(B));
    pair.driver.inputs.push_back(Input::Pinged(key, A));
    pair.driver.run_paths(back);
    assert!(!pair.is_waiting(B));
}

#[test]
fn path_outage_is_logged_once() {
    let text = log_of(|| {
        let now = Instant::now();
        let mut pair = PathPair::new(now);
        pair.driver
            .inputs
            .push_back(Input::Live(pair.key, B, GROUP));
        pair.driver.run_paths(now);
        pair.identify(B, false, now);
        pair.lose(B, Down::ConnectionLost, Some(now), now);
        // Further login attempts will fail.
        for second in 1..4 {
            let at = now + Duration::from_secs(second);
            pair.reopen(at);
            let why = Down::Connect(ConnectError::Tcp(111));
            pair.lose(B, why, None, at);
        }
        let back = now + Duration::from_secs(10);
        pair.reopen(back);
        pair.driver
            .inputs
            .push_back(Input::Live(pair.key, B, GROUP));
        pair.driver.run_paths(back);
        pair.identify(B, false, back);
    });
    let count = |what: &str| text.matches(what).count();
    assert_eq!(count("path lost: connection lost"), 1, "{text}");
    assert_eq!(count("path rejected"), 0, "{text}");
    // For A and B initially, and for B again.
    assert_eq!(count("path is live"), 3, "{text}");
}

/// A target may report a reset on other paths, not only on the path that requested it.
#[test]
fn other_paths_expect_report_of_reset() {
    let now = Instant::now();
    let mut pair = PathPair::new(now);
    let (driver, key) = (&mut pair.driver, pair.key);
    let mut session = |path| {
        let link = driver.sessions[key.index].link.paths_mut().unwrap();
        let session = link.session_of(path).unwrap();
        driver.sessions.find(session).unwrap()
    };
    let (a, b) = (session(A), session(B));
    let lun = Some(LunId::ZERO.encode());
    driver.handle_event(a, SessionEvent::UnitReset(lun), now);
    let mut is_expected = |index: usize| {
        let machine = driver.sessions[index].link.machine();
        machine.expects_reset_report()
    };
    assert_eq!((is_expected(a), is_expected(b)), (false, true));
}

/// A host with both portals restarts, before the loss of the other path is detected.
#[test]
fn silent_path_does_not_vouch_for_cache() {
    let now = Instant::now();
    let mut pair = PathPair::new(now);
    let key = pair.key;
    pair.driver.inputs.push_back(Input::Live(key, B, GROUP));
    pair.driver.run_paths(now);
    pair.identify(B, false, now);
    write(&mut pair.driver, key, now);
    pair.lose(B, Down::ConnectionLost, Some(now), now);
    let at = now + Duration::from_secs(1);
    pair.reopen(at);
    let why = Down::Connect(ConnectError::Tcp(111));
    pair.lose(B, why, None, at);
    let back = now + Duration::from_secs(3);
    pair.reopen(back);
    pair.driver.inputs.push_back(Input::Live(key, B, GROUP));
    pair.driver.run_paths(back);
    pair.identify(B, false, back);
    let flushed = flush(&mut pair.driver, key, back);
    assert_eq!(flushed, Err(RequestError::CacheLost));
}

/// Each path may provide the evidence: the duration of the outage, a refused connection, or the
/// first attention.
#[test]
fn outage_of_all_paths_counts_once() {
    for (refused, greeting, away, losses) in [
        (None, None, 30, 1),
        (None, None, 2, 0),
        (Some(A), None, 2, 1),
        (Some(B), None, 2, 1),
        (None, Some(1), 2, 1),
    ] {
        let now = Instant::now();
        let mut pair = PathPair::new(now);
        let key = pair.key;
        pair.driver.inputs.push_back(Input::Live(key, B, GROUP));
        pair.driver.run_paths(now);
        pair.identify(B, false, now);
        write(&mut pair.driver, key, now);
        for path in [A, B] {
            pair.lose(path, Down::ConnectionLost, Some(now), now);
        }
        if let Some(path) = refused {
            let at = now + Duration::from_secs(1);
            pair.reopen(at);
            let why = Down::Connect(ConnectError::Tcp(111));
            pair.lose(path, why, None, at);
        }
        let back = now + Duration::from_secs(away);
        pair.reopen(back);
        let failed = [A, B].map(|path| {
            pair.driver.inputs.push_back(Input::Live(key, path, GROUP));
            if let Some(qualifier) = greeting {
                let code = 0x29;
                let greeting = AdditionalSense { code, qualifier };
                let attention = Input::Attention(key, path, greeting, false);
                pair.driver.inputs.push_back(attention);
            }
            pair.driver.run_paths(back);
            pair.identify(path, greeting.is_some(), back);
            let flushed = flush(&mut pair.driver, key, back);
            write(&mut pair.driver, key, back);
            usize::from(flushed.is_err())
        });
        let counted = failed.into_iter().sum::<usize>();
        assert_eq!(counted, losses, "{refused:?} {greeting:?} {away}");
    }
}

const POWER_ON: AdditionalSense = AdditionalSense {
    code: 0x29,
    qualifier: 1,
};

/// The connection of the path that reports a power-on breaks before its check completes, and
/// the other path reports nothing.
#[test]
fn power_on_report_survives_path_loss() {
    for is_early in [true, false] {
        let now = Instant::now();
        let mut pair = PathPair::new(now);
        let key = pair.key;
        pair.driver.inputs.push_back(Input::Live(key, B, GROUP));
        pair.driver.run_paths(now);
        pair.identify(B, false, now);
        write(&mut pair.driver, key, now);
        for path in [A, B] {
            pair.lose(path, Down::ConnectionLost, Some(now), now);
        }
        let back = now + Duration::from_secs(2);
        pair.reopen(back);
        let report = Input::Attention(key, B, POWER_ON, false);
        pair.driver.inputs.push_back(Input::Live(key, B, GROUP));
        if is_early {
            pair.driver.inputs.push_back(report);
            pair.driver.run_paths(back);
            pair.driver.inputs.push_back(Input::Live(key, A, GROUP));
            pair.driver.run_paths(back);
            pair.identify(A, false, back);
        } else {
            pair.driver.inputs.push_back(Input::Live(key, A, GROUP));
            pair.driver.run_paths(back);
            pair.identify(A, false, back);
            pair.driver.inputs.push_back(report);
            pair.driver.run_paths(back);
        }
        pair.lose(B, Down::ConnectionLost, Some(back), back);
        let flushed = flush(&mut pair.driver, key, back);
        assert_eq!(flushed, Err(RequestError::CacheLost), "{is_early}");
        // The path's check does not count the loss again.
        write(&mut pair.driver, key, back);
        let later = back + Duration::from_secs(2);
        pair.reopen(later);
        pair.driver.inputs.push_back(Input::Live(key, B, GROUP));
        pair.driver.run_paths(later);
        pair.identify(B, false, later);
        let flushed = flush(&mut pair.driver, key, later);
        assert!(flushed.is_ok(), "{is_early}: {flushed:?}");
    }
}

/// A node reports its restart while the path to another node is in use. That path flaps later.
#[test]
fn refuted_power_on_is_never_counted() {
    let now = Instant::now();
    let mut pair = PathPair::new(now);
    let key = pair.key;
    pair.driver.inputs.push_back(Input::Live(key, B, GROUP));
    pair.driver.run_paths(now);
    pair.identify(B, false, now);
    write(&mut pair.driver, key, now);
    pair.lose(B, Down::ConnectionLost, Some(now), now);
    let at = |seconds| now + Duration::from_secs(seconds);
    pair.reopen(at(2));
    pair.driver.inputs.push_back(Input::Live(key, B, GROUP));
    let report = Input::Attention(key, B, POWER_ON, false);
    pair.driver.inputs.push_back(report);
    pair.driver.run_paths(at(2));
    for path in [B, A] {
        pair.lose(path, Down::ConnectionLost, Some(at(3)), at(3));
    }
    pair.reopen(at(5));
    for path in [A, B] {
        pair.driver.inputs.push_back(Input::Live(key, path, GROUP));
        pair.driver.run_paths(at(5));
        pair.identify(path, false, at(5));
    }
    let flushed = flush(&mut pair.driver, key, at(5));
    assert!(flushed.is_ok(), "{flushed:?}");
}

/// A check of the other path found the generation from before the restart, but completed late.
#[test]
fn outdated_generation_hides_no_later_loss() {
    let now = Instant::now();
    let mut pair = PathPair::new(now);
    let key = pair.key;
    let find = |pair: &mut PathPair, path, generation: u8| {
        let page = [&b"\0\xc0\0\x18RISERGEN"[..], &[generation; 16]].concat();
        let (driver, pool) = (&mut pair.driver, &pair.pool);
        driver.inputs.push_back(Input::Live(key, path, GROUP));
        driver.run_paths(now);
        identify_with(driver, pool, (key, path), &page, false, now);
        let flushed = flush(driver, key, now);
        write(driver, key, now);
        flushed.is_err()
    };
    let lose = |pair: &mut PathPair, path| {
        pair.lose(path, Down::ConnectionLost, Some(now), now);
        pair.reopen(now + Duration::from_secs(60));
    };
    lose(&mut pair, A);
    find(&mut pair, A, 1);
    assert!(!find(&mut pair, B, 1));
    lose(&mut pair, A);
    lose(&mut pair, B);
    assert!(find(&mut pair, A, 2), "restarted");
    find(&mut pair, B, 1);
    lose(&mut pair, B);
    find(&mut pair, B, 2);
    lose(&mut pair, A);
    lose(&mut pair, B);
    assert!(find(&mut pair, A, 3), "restarted again");
}

/// A busy unit does not respond to the check, so we should repeat it.
#[test]
fn unanswered_recheck_keeps_path() {
    for error in [RequestError::NotSent, RequestError::TimedOut] {
        let now = Instant::now();
        let mut pair = PathPair::new(now);
        let key = pair.key;
        pair.lose(B, Down::Connect(ConnectError::Tcp(111)), None, now);
        let silent = IoCompletion {
            result: Err(error),
            data: IoData::One(pair.pool.try_take(4096).unwrap()),
        };
        pair.driver
            .inputs
            .push_back(Input::PathResponse(key, A, silent));
        pair.driver.run_paths(now);
        let paths = pair.driver.sessions[key.index].link.paths_mut().unwrap();
        let session = paths.session_of(A).unwrap();
        let index = pair.driver.sessions.find(session).unwrap();
        assert!(!pair.driver.sessions[index].closed, "{error}");
        let report = pair.driver.sessions[key.index].status.report();
        assert_eq!(report.link.state, LinkState::Live, "{error}");
    }
}

/// Verify that we can detect the events of a path, and the loss of the path in use, in any order.
#[test]
fn evidence_order_does_not_affect_loss_detection() {
    // A login of the other path three seconds later (L), the loss of the path in use (C), the
    // first attention of the other path (G), and its ASCQ.
    for (order, qualifier, is_lost) in [
        ("LGC", 0, false),
        ("CLG", 0, false),
        ("LCG", 0, false),
        ("LGC", 1, true),
        ("CLG", 1, true),
        ("LCG", 1, true),
    ] {
        let now = Instant::now();
        let mut pair = PathPair::new(now);
        let key = pair.key;
        let then = now + Duration::from_secs(3);
        for event in order.chars() {
            let greeting = AdditionalSense {
                code: 0x29,
                qualifier,
            };
            pair.driver.inputs.push_back(match event {
                'L' => Input::Live(key, B, GROUP),
                'C' => Input::Closed(key, A, Down::ConnectionLost, Some(now)),
                _ => Input::Attention(key, B, greeting, false),
            });
            pair.driver.run_paths(then);
        }
        pair.identify(B, true, then);
        let flushed = flush(&mut pair.driver, key, then);
        assert_eq!(
            flushed.is_err(),
            is_lost,
            "{order} {qualifier}: {flushed:?}"
        );
    }
}

/// Watches this many units with volatile caches, and no other units.
fn watch_units(
    driver: &mut Driver<Sim>,
    key: SessionKey,
    (pool, owner): (&BufferPool, &Arc<Losses>),
    (unit, count): (&Snapshot, u32),
    now: Instant,
) {
    driver.sessions[key.index].units.units.clear();
    for number in 0..count {
        let watch = Watch {
            lun: LunId::new(number).unwrap(),
            unit: unit.clone(),
            ..watch_of(Arc::downgrade(owner), pool)
        };
        driver.watch(key.index, watch, now);
    }
    driver.inputs.clear();
}

/// Responds to the check of the unit at this index, based on the CDB of every command.
fn identify_unit(
    driver: &mut Driver<Sim>,
    pool: &BufferPool,
    (key, at): (SessionKey, usize),
    response: impl Fn(&[u8]) -> Result<Vec<u8>, u8>,
    now: Instant,
) {
    while driver.sessions[key.index].units.units[at].is_checking {
        let unit = &driver.sessions[key.index].units.units[at];
        let (serial, cdb) = (unit.serial, unit.check.command().cdb);
        let data = response(cdb.as_bytes());
        let end = completion(pool, data.as_deref().map_err(|code| *code));
        driver.handle_unit_response(key, serial, end, now);
    }
}

/// Responses of a disk without names.
fn nameless(cdb: &[u8]) -> Vec<u8> {
    let mut capacity = vec![0; 32];
    capacity[10] = 2;
    match cdb {
        [0x9e, ..] => capacity,
        [0x12, 0, ..] => vec![0; 36],
        [0x1a, ..] => CACHING.to_vec(),
        _ => Vec::new(),
    }
}

#[test]
fn loss_evidence_is_kept_for_silent_unit() {
    let now = Instant::now();
    let (mut driver, key) = driver(now);
    let pool = BufferPool::new(1 << 20).unwrap();
    let owner = Arc::new(Losses::default());
    let units = (&Snapshot::default(), 2);
    watch_units(&mut driver, key, (&pool, &owner), units, now);
    write(&mut driver, key, now);
    let down = SessionEvent::Reconnecting;
    driver.handle_event(key.index, down(Down::ConnectionLost), now);
    let first = now + Duration::from_secs(1);
    driver.handle_event(key.index, SessionEvent::Live, first);
    let power_on = SessionEvent::UnitEvent {
        lun: LunId::ZERO.encode(),
        sense: Box::new([0x70, 0, 6, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x29, 1, 0, 0, 0, 0]),
        is_own_reset: false,
    };
    driver.handle_event(key.index, power_on, first);
    driver.run_paths(first);
    // One unit does not respond. The last response of the other unit precedes the loss of the
    // connection.
    let silent = IoCompletion {
        result: Err(RequestError::TimedOut),
        data: IoData::One(pool.try_take(4096).unwrap()),
    };
    let serial = driver.sessions[key.index].units.units[0].serial;
    driver.handle_unit_response(key, serial, silent, first);
    let response = |cdb: &[u8]| Ok(nameless(cdb));
    identify_unit(&mut driver, &pool, (key, 1), response, first);
    driver.handle_event(key.index, down(Down::UnitSilent), first);
    let second = now + Duration::from_secs(2);
    driver.handle_event(key.index, SessionEvent::Live, second);
    driver.run_paths(second);
    identify_unit(&mut driver, &pool, (key, 0), response, second);
    identify_unit(&mut driver, &pool, (key, 1), response, second);
    let flushed = flush(&mut driver, key, second);
    assert_eq!(flushed, Err(RequestError::CacheLost));
}

/// The connection is lost at the time of the last response.
#[test]
fn loss_evidence_survives_response_before_disconnect() {
    let now = Instant::now();
    let (mut driver, key) = driver(now);
    let pool = BufferPool::new(1 << 20).unwrap();
    let owner = Arc::new(Losses::default());
    let units = (&Snapshot::default(), 1);
    watch_units(&mut driver, key, (&pool, &owner), units, now);
    write(&mut driver, key, now);
    driver.inputs.push_back(Input::Check(key));
    driver.run_paths(now);
    let refused = Down::Connect(ConnectError::Tcp(111));
    driver.handle_event(key.index, SessionEvent::Reconnecting(refused), now);
    let response = |cdb: &[u8]| Ok(nameless(cdb));
    identify_unit(&mut driver, &pool, (key, 0), response, now);
    let later = now + Duration::from_secs(1);
    driver.handle_event(key.index, SessionEvent::Live, later);
    driver.run_paths(later);
    identify_unit(&mut driver, &pool, (key, 0), response, later);
    let flushed = flush(&mut driver, key, later);
    assert_eq!(flushed, Err(RequestError::CacheLost));
}

#[test]
fn session_without_unit_users_is_released() {
    let now = Instant::now();
    // The owner of its unit was dropped; a check is due, and the session is held.
    let (mut driver, key) = driver(now);
    let down = SessionEvent::Reconnecting(Down::ConnectionLost);
    driver.handle_event(key.index, down, now);
    driver.run_paths(now);
    assert!(driver.sessions[key.index].units.is_empty());
    driver.handle_event(key.index, SessionEvent::Live, now);
    driver.run_paths(now);
    // This shows that the session was released.
    assert!(driver.sessions[key.index].units.last_received.is_none());
}

#[test]
fn unit_removed_during_check_is_missing() {
    let now = Instant::now();
    // Response to page queries: first as Linux, then as riserd.
    for refusal in [0x25, 0x24] {
        let (mut driver, key) = driver(now);
        let pool = BufferPool::new(1 << 20).unwrap();
        let owner = Arc::new(Losses::default());
        let mut unit = Snapshot::default();
        unit.identity.serial = Some("S1".into());
        watch_units(&mut driver, key, (&pool, &owner), (&unit, 1), now);
        driver.inputs.push_back(Input::Check(key));
        driver.run_paths(now);
        let response = |cdb: &[u8]| match cdb {
            [0x12, 1, ..] => Err(refusal),
            [0x1a, ..] => Err(0x25),
            _ => Ok(nameless(cdb)),
        };
        identify_unit(&mut driver, &pool, (key, 0), response, now);
        let report = driver.sessions[key.index].status.report();
        assert!(report.paths.is_empty(), "{refusal:x}: {:?}", report.paths);
    }
}

/// For a command of a user, a check or a ping, on one of two paths or on the only one.
#[test]
fn deferred_error_loses_cache() {
    let sense = [0x71, 0, 3, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x0c, 0, 0, 0, 0, 0];
    let lun = LunId::ZERO.encode();
    let now = Instant::now();
    let mut pair = PathPair::new(now);
    let key = pair.key;
    let deferred = Input::Deferred(key, lun, Sense::parse(&sense).unwrap());
    pair.driver.inputs.push_back(deferred);
    pair.driver.run_paths(now);
    let flushed = flush(&mut pair.driver, key, now);
    assert_eq!(flushed, Err(RequestError::CacheLost));

    let (mut driver, key) = driver(now);
    let pool = BufferPool::new(1 << 20).unwrap();
    let owner = Arc::new(Losses::default());
    let units = (&Snapshot::default(), 1);
    watch_units(&mut driver, key, (&pool, &owner), units, now);
    write(&mut driver, key, now);
    let event = SessionEvent::UnitEvent {
        lun,
        sense: Box::new(sense),
        is_own_reset: false,
    };
    driver.handle_event(key.index, event, now);
    let flushed = flush(&mut driver, key, now);
    assert_eq!(flushed, Err(RequestError::CacheLost));
    assert_eq!(owner.count(), 1);
}

/// If the process is killed before a flush has reported the loss, the next process should report
/// it.
#[test]
fn unreported_loss_survives_process() {
    let sense = [0x71, 0, 3, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x0c, 0, 0, 0, 0, 0];
    for generation in [None, Some([1; 16])] {
        let now = Instant::now();
        let (mut first, key) = driver(now);
        let pool = BufferPool::new(1 << 20).unwrap();
        let owner = Arc::new(Losses::default());
        let unit = Snapshot {
            cache: generation,
            ..Snapshot::default()
        };
        watch_units(&mut first, key, (&pool, &owner), (&unit, 1), now);
        let noted = |driver: &Driver<Sim>| driver.sessions[key.index].status.report().cache;
        write(&mut first, key, now);
        assert_eq!(noted(&first), generation);
        let event = SessionEvent::UnitEvent {
            lun: LunId::ZERO.encode(),
            sense: Box::new(sense),
            is_own_reset: false,
        };
        first.handle_event(key.index, event, now);
        let left = noted(&first);

        let (mut second, key) = driver(now);
        second.sessions[key.index].units.units.clear();
        second.sessions[key.index].status.set_cache(left);
        let watch = takeover_watch(&owner, generation, left);
        second.watch(key.index, watch, now);
        let flushed = flush(&mut second, key, now);
        assert_eq!(flushed, Err(RequestError::CacheLost), "{generation:?}");
        assert_eq!(noted(&second), generation);
        flush(&mut second, key, now).unwrap();
    }
}
