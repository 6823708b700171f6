//! Two initiators of different protocols that write and read the same few blocks of one unit, while
//! sessions are replaced, commands are reset, the disk hangs, and the daemon is killed or
//! restarted.
//!
//! A history judges every block that is read: what was acknowledged is there, what was overwritten
//! does not come back. Initiators repeat what was not answered, so a write may take effect more
//! than once until it ends ([`History::with_repeats`]).
//!
//! `RISER_CONFLICT_STEPS` sets how much happens in each test (default 12), `RISER_CONFLICT_SEED`
//! what.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints seeds and figures")]

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use riser_initiator::block::task::block_on;
use riser_initiator::engine::{Client, Session};
use riser_initiator::lun::Lun;
use riser_initiator::session::Timing;
use riser_initiator::url::TargetUrl;
use riser_scsi::iscsi::pdu::{FromTarget, TmfFunction, TmfRequest};
use riser_scsi::iscsi::{CmdSn, Itt, StatSn};
use riser_target::backend::{Fault, FaultOn, Faults};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::tcp;
use riser_testkit::eventually_ok;
use riser_testkit::programs::Pair;
use riser_tests::history::{BLOCK, History, Port};
use riser_tests::load::{Chance, Op, setting};

const IQN: &str = "iqn.2026-01.com.example:contended";
/// The disk, in blocks. All writers work on all of it.
const DISK: Range<u64> = 0..48;
const LONGEST: u64 = 20;
/// Threads of each initiator.
const THREADS: u64 = 2;
/// How long anything may take on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// One initiator port, with one session at a time.
struct Initiator {
    scheme: &'static str,
    client: Client,
    url: TargetUrl,
    port: Port,
    lun: Mutex<Lun>,
    /// A session is being replaced: what it had outstanding ends with it.
    is_replacing: AtomicBool,
    done: [AtomicU64; THREADS as usize],
    cut: AtomicU64,
}

impl Initiator {
    fn new(scheme: &'static str, network: u8, port: u16) -> Arc<Self> {
        let timing = Timing {
            attempt: Duration::from_millis(400),
            tsk_mgmt: Duration::from_millis(800),
            backoff_min: Duration::from_millis(20),
            backoff_max: Duration::from_millis(200),
            ..Timing::default()
        };
        let builder = Client::builder()
            .pool(2 << 20)
            .timing(timing)
            .spin(Duration::from_micros(10))
            .port(0x0123_4567_0000_0000 | u64::from(port) << 24);
        let client = match scheme {
            "iscsi" => builder.without_device(),
            _ => builder.open(format!("127.0.{network}.{}", port + 1).parse().unwrap()),
        };
        let client = client.unwrap();
        let target = match scheme {
            "srp" => "0".to_owned(),
            _ => format!("{IQN}/0"),
        };
        let url = format!("{scheme}://127.0.{network}.1/{target}");
        let url: TargetUrl = url.parse().unwrap();
        let lun = log_in(&client, &url);
        Arc::new(Self {
            scheme,
            url,
            client,
            port: Port(port),
            lun: Mutex::new(lun),
            is_replacing: AtomicBool::new(false),
            done: Default::default(),
            cut: AtomicU64::new(0),
        })
    }

    fn lun(&self) -> Lun {
        self.lun
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn session(&self) -> Session {
        self.lun().session().clone()
    }

    /// Another session of the same initiator port in place of this one, with commands outstanding.
    fn replace(&self) {
        self.is_replacing.store(true, Ordering::SeqCst);
        block_on(self.session().close());
        let lun = log_in(&self.client, &self.url);
        *self.lun.lock().unwrap() = lun;
        self.is_replacing.store(false, Ordering::SeqCst);
    }

    fn work(&self, thread: usize, history: &History, chance: &mut Chance, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            let op = Op::random(chance, &DISK, LONGEST);
            let mut lun = self.lun();
            match op.carry_out(&mut lun, self.port, history) {
                Ok(()) => {
                    self.done[thread].fetch_add(1, Ordering::Relaxed);
                }
                // Only the end of the session that it was sent by is an excuse: such a session
                // repeats nothing, not even after a unit attention.
                Err(error) => {
                    let is_excused = self.is_replacing.load(Ordering::SeqCst)
                        || !std::ptr::eq(self.lun().session().status(), lun.session().status());
                    assert!(is_excused, "{op:?} over {}: {error:?}", self.scheme);
                    self.cut.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }

    fn done(&self) -> u64 {
        self.done.iter().map(|n| n.load(Ordering::Relaxed)).sum()
    }
}

fn log_in(client: &Client, url: &TargetUrl) -> Lun {
    // A daemon that has just been started does not serve yet.
    eventually_ok(&format!("a login to {url}"), PATIENCE, || {
        let session = block_on(client.connect(url.clone())).map_err(|e| e.to_string())?;
        block_on(session.with_timeout(PATIENCE).lun(0)).map_err(|e| e.to_string())
    })
}

/// Two initiators at work.
struct Contest {
    history: Arc<History>,
    initiators: [Arc<Initiator>; 2],
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Contest {
    fn new(schemes: [&'static str; 2], network: u8, seed: u64) -> Self {
        let history = Arc::new(History::new(DISK.end as usize).with_repeats());
        let initiators = [0, 1].map(|n: u16| Initiator::new(schemes[n as usize], network, n + 1));
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for initiator in &initiators {
            for thread in 0..THREADS {
                let (initiator, history, stop) = (initiator.clone(), history.clone(), stop.clone());
                let stream = u64::from(initiator.port.0) << 8 | thread;
                let mut chance = Chance::new(seed, stream);
                threads.push(thread::spawn(move || {
                    initiator.work(thread as usize, &history, &mut chance, &stop);
                }));
            }
        }
        Self {
            history,
            initiators,
            stop,
            threads,
        }
    }

    /// Waits until every thread has done `more` further operations.
    fn go_on(&mut self, what: &str, more: u64) {
        let counts = |contest: &Self| -> Vec<u64> {
            let all = contest.initiators.iter().flat_map(|i| &i.done);
            all.map(|n| n.load(Ordering::Relaxed)).collect()
        };
        let before = counts(self);
        let until = Instant::now() + PATIENCE;
        while counts(self)
            .iter()
            .zip(&before)
            .any(|(now, before)| now - before < more)
        {
            if let Some(at) = self.threads.iter().position(JoinHandle::is_finished) {
                panic!("{what}: {:?}", self.threads.remove(at).join());
            }
            let downs = || {
                self.initiators
                    .each_ref()
                    .map(|i| i.session().status().last_down())
            };
            assert!(
                Instant::now() < until,
                "{what}: {:?}, {:?}",
                counts(self),
                downs()
            );
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the work, and lets each initiator read everything once more.
    fn end(mut self) -> String {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
        for _ in 0..2 {
            for initiator in &self.initiators {
                let read = Op::read(DISK);
                read.carry_out(&mut initiator.lun(), initiator.port, &self.history)
                    .unwrap();
            }
        }
        assert_eq!(self.history.lost(), 0, "both have been answered since");
        let of = |i: &Arc<Initiator>| {
            let cut = i.cut.load(Ordering::Relaxed);
            let reconnects = i.session().status().reconnects();
            format!(
                "{} over {} ({cut} cut, {reconnects} reconnects)",
                i.done(),
                i.scheme
            )
        };
        let [one, two] = self.initiators.each_ref().map(of);
        format!("{one}, {two}")
    }
}

impl Drop for Contest {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn portals(network: u8) -> String {
    let portals = ["srp", "iser", "iscsi"]
        .map(|protocol| format!("{{ protocol: {protocol}, listen: 127.0.{network}.1 }}"));
    format!("iqn: {IQN}\nportals: [{}]", portals.join(", "))
}

fn seed(test: &str) -> (u64, u64) {
    let seed = setting("RISER_CONFLICT_SEED", 0x0c0f);
    let steps = setting("RISER_CONFLICT_STEPS", 12);
    println!(
        "RISER_CONFLICT_SEED={seed} RISER_CONFLICT_STEPS={steps} cargo test -p riser-tests --test \
         conflicting_writers {test}"
    );
    (seed, steps)
}

/// A file of this test's own, gone when the value is.
struct Image(PathBuf);

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A third initiator, which resets the unit.
struct Resetter(tcp::Client);

impl Resetter {
    fn new(network: u8) -> Self {
        let to = format!("127.0.{network}.1:3260").parse().unwrap();
        Self(tcp::Client::login_at(to, IQN, 9, None).unwrap())
    }

    /// LOGICAL UNIT RESET; returns when it is answered.
    fn reset(&mut self) {
        let client = &mut self.0;
        let request = TmfRequest {
            immediate: true,
            function: TmfFunction::LogicalUnitReset,
            lun: [0; 8],
            itt: Itt(client.cmd_sn | 1 << 31),
            referenced: Itt(u32::MAX),
            cmd_sn: CmdSn(client.cmd_sn),
            exp_stat_sn: StatSn(0),
            ref_cmd_sn: CmdSn(0),
            exp_data_sn: 0,
        };
        client.send(request.header(), &[]);
        loop {
            match client.receive().expect("an answer").0 {
                FromTarget::TmfResponse(response) => {
                    assert_eq!(response.status as u8, 0, "function complete");
                    return;
                }
                // A ping.
                FromTarget::NopIn(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

/// A disk that is slow at times and hangs at others.
fn trouble(faults: &Faults, chance: &mut Chance) {
    let offset = chance.below(DISK.end) * BLOCK as u64;
    match chance.below(3) {
        0 => faults.set(Vec::new()),
        1 => faults.set(vec![Fault {
            on: FaultOn::Write,
            offset,
            len: 8 * BLOCK as u64,
            times: Some(20),
            delay: chance.between(Duration::from_millis(2), Duration::from_millis(600)),
            error: None,
        }]),
        _ => faults.hold(FaultOn::Write, offset, 8 * BLOCK as u64),
    }
}

fn sessions_are_replaced_and_commands_reset(schemes: [&'static str; 2], network: u8) {
    let (seed, steps) = seed("replaced");
    let name = format!("riser-contended-{}-{network}", std::process::id());
    let image = Image(std::env::temp_dir().join(name));
    let text = format!(
        "backends:\n  disk: {{ kind: file, path: {}, size: {}, create: true }}\n\
         targets:\n  - name: t\n    {}\n    luns: {{ 0: disk }}\n    access: open\n\
         workers: {{ count: 2 }}\n",
        image.0.display(),
        DISK.end * BLOCK as u64,
        portals(network).replace('\n', "\n    "),
    );
    let mut config = Config::parse(&text, "contended.yaml").unwrap_or_else(|e| panic!("{e}"));
    let faults = Arc::new(Faults::default());
    config.backends[0].spec.faults = Some(faults.clone());
    let server = Server::start(&config).unwrap();
    let mut resetter = Resetter::new(network);
    let mut contest = Contest::new(schemes, network, seed);
    let mut chance = Chance::new(seed, 0);
    for step in 0..steps {
        contest.go_on(&format!("before step {step}"), 8);
        trouble(&faults, &mut chance);
        // What follows meets commands that wait at the disk.
        thread::sleep(chance.between(Duration::ZERO, Duration::from_millis(20)));
        let held = thread::spawn({
            let (faults, hold) = (faults.clone(), chance.below(300));
            move || {
                thread::sleep(Duration::from_millis(hold));
                faults.release();
            }
        });
        match (step + chance.below(2)) % 4 {
            0 => contest.initiators[0].replace(),
            1 => contest.initiators[1].replace(),
            2 => resetter.reset(),
            // Both at once, and a reset in the middle.
            _ => thread::scope(|scope| {
                for initiator in &contest.initiators {
                    scope.spawn(|| initiator.replace());
                }
                resetter.reset();
            }),
        }
        held.join().unwrap();
        faults.set(Vec::new());
    }
    contest.go_on("at the end", 8);
    println!(
        "figure: {steps} replaced sessions and resets during {}",
        contest.end()
    );
    server.shutdown().unwrap();
}

#[test]
fn replaced_and_reset_over_srp_and_iser() {
    sessions_are_replaced_and_commands_reset(["srp", "iser"], 164);
}

#[test]
fn replaced_and_reset_over_iser_and_iscsi() {
    sessions_are_replaced_and_commands_reset(["iser", "iscsi"], 165);
}

#[test]
fn replaced_and_reset_over_iscsi_and_srp() {
    sessions_are_replaced_and_commands_reset(["iscsi", "srp"], 166);
}

/// A file outlives the process that serves it, so every acknowledged write is there after a kill.
fn the_daemon_is_killed_and_restarted(schemes: [&'static str; 2], network: u8, cache: bool) {
    let (seed, steps) = seed("restarted");
    let backend = format!(
        "{{ kind: file, path: DIR/disk, size: {}, create: true, write_cache: {cache} }}",
        DISK.end * BLOCK as u64
    );
    let mut pair = Pair::with_target(network, &backend, &portals(network));
    let mut contest = Contest::new(schemes, network, seed);
    let mut chance = Chance::new(seed, 0);
    let restarts = steps.div_ceil(4);
    for step in 0..restarts {
        contest.go_on(&format!("before restart {step}"), 8);
        thread::sleep(chance.between(Duration::ZERO, Duration::from_millis(10)));
        match chance.below(3) {
            0 => pair.terminate(),
            _ => pair.kill(),
        }
        pair.serve();
        if chance.below(3) == 0 {
            contest.go_on(&format!("after restart {step}"), 2);
            contest.initiators[chance.below(2) as usize].replace();
        }
    }
    contest.go_on("at the end", 8);
    println!(
        "figure: {restarts} kills and restarts during {}",
        contest.end()
    );
}

#[test]
fn restarted_over_srp_and_iser() {
    the_daemon_is_killed_and_restarted(["srp", "iser"], 167, true);
}

#[test]
fn restarted_over_iser_and_iscsi() {
    the_daemon_is_killed_and_restarted(["iser", "iscsi"], 168, true);
}

#[test]
fn restarted_over_iscsi_and_srp_without_a_write_cache() {
    the_daemon_is_killed_and_restarted(["iscsi", "srp"], 169, false);
}
