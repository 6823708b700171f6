//! Injects disk errors while there is a verified load using all protocols and NBD.
//!
//! If the disk returns an error, this must fail the commands that use the affected blocks with the
//! correct error. It must not close a session, affect any other command or corrupt data.
//!
//! `RISER_FAILING_ROUNDS` sets the number of rounds for each test (default 1), and
//! `RISER_FAILING_SEED` sets the random seed for the load.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints seeds and results")]

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use riser_block::ByteDevice;
use riser_block::task::block_on;
use riser_exports::nbd;
use riser_initiator::engine::{Client, Session};
use riser_initiator::lun::Lun;
use riser_initiator::session::Timing;
use riser_initiator::url::TargetUrl;
use riser_scsi::step::BackendError;
use riser_target::backend::{Fault, FaultOn, Faults};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_tests::history::{BLOCK, History, Port};
use riser_tests::load::{Chance, Disk, Failed, Kind, Nbd, Op, setting};

const IQN: &str = "iqn.2026-01.com.example:failing";
const SCHEMES: [&str; 3] = ["srp", "iser", "iscsi"];
/// The disk in blocks, and the range of bad blocks.
const DISK: Range<u64> = 0..1024;
const BAD: Range<u64> = 400..520;
/// Maximum size of a read or write, which is large enough to use immediate data, RDMA and R2Ts.
const LONGEST: u64 = 320;
/// Timeout for any operation, which should be enough for a slow machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Errors that are currently allowed.
#[derive(Clone, Debug)]
struct Rule {
    /// Applies to all threads with this name prefix.
    whose: &'static str,
    /// Operations that may fail, and the expected error.
    fails: Vec<(Kind, i32)>,
    /// Set if only operations that use bad blocks may fail.
    in_bad: bool,
}

impl Rule {
    fn calm() -> Self {
        Self::fails(Vec::new())
    }

    fn fails(fails: Vec<(Kind, i32)>) -> Self {
        Self {
            whose: "",
            fails,
            in_bad: true,
        }
    }

    fn allows(&self, who: &str, op: &Op, error: &Failed) -> bool {
        let is_meant = who.starts_with(self.whose);
        let is_there = !self.in_bad || op.kind == Kind::Flush || op.touches(&BAD);
        is_meant && is_there && self.fails.contains(&(op.kind, error.errno))
    }
}

/// State shared by all threads of the load.
struct Shared {
    history: History,
    /// All rules that were set, in order. The last rule is the current one.
    rules: Mutex<Vec<Rule>>,
    stop: AtomicBool,
}

impl Shared {
    fn rules(&self) -> Vec<Rule> {
        self.rules
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Runs the load until it's stopped, and counts successful and failed operations.
    fn work(&self, disk: &mut dyn Disk, me: &Me, chance: &mut Chance, counts: &Counts) {
        let Me { who, port, within } = me;
        while !self.stop.load(Ordering::Relaxed) {
            let longest = [LONGEST, 24, 24, 24, 24, 24][chance.below(6) as usize];
            let op = Op::random(chance, within, longest);
            let from = self.rules().len() - 1;
            let result = op.carry_out(disk, *port, &self.history);
            let rules = self.rules();
            match result {
                Ok(()) => counts.good.fetch_add(1, Ordering::Relaxed),
                Err(error) => {
                    let is_allowed = rules[from..]
                        .iter()
                        .any(|rule| rule.allows(who, &op, &error));
                    assert!(
                        is_allowed,
                        "{who}: {op:?} failed: {error:?} under {:?}",
                        &rules[from..]
                    );
                    counts.failed.fetch_add(1, Ordering::Relaxed)
                }
            };
        }
    }
}

/// A thread of the load.
#[derive(Clone)]
struct Me {
    who: String,
    port: Port,
    /// Blocks to use.
    within: Range<u64>,
}

#[derive(Default)]
struct Counts {
    good: AtomicU64,
    failed: AtomicU64,
}

impl Counts {
    fn now(&self) -> (u64, u64) {
        (
            self.good.load(Ordering::Relaxed),
            self.failed.load(Ordering::Relaxed),
        )
    }
}

struct Worker {
    who: String,
    thread: Option<JoinHandle<()>>,
    counts: Arc<Counts>,
}

/// A server with a failing disk, an initiator for each protocol, and the load.
struct Bench {
    faults: Arc<Faults>,
    shared: Arc<Shared>,
    sessions: Vec<(&'static str, Session)>,
    exports: Vec<nbd::ServerHandle>,
    workers: Vec<Worker>,
    server: Option<Server>,
    dir: PathBuf,
    network: u8,
}

impl Bench {
    fn new(network: u8, history: History) -> Self {
        let dir =
            std::env::temp_dir().join(format!("riser-failing-{}-{network}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let portals = SCHEMES.map(|p| format!("{{ protocol: {p}, listen: 127.0.{network}.1 }}"));
        let text = format!(
            "backends:\n  disk: {{ kind: file, path: {}, size: {}, create: true }}\n\
             targets:\n  - name: t\n    iqn: {IQN}\n    portals: [{}]\n    luns: {{ 0: disk }}\n    \
             access: open\nworkers: {{ count: 2 }}\n",
            dir.join("disk").display(),
            DISK.end * BLOCK as u64,
            portals.join(", "),
        );
        let faults = Arc::new(Faults::default());
        let mut config = Config::parse(&text, "failing.yaml").unwrap_or_else(|e| panic!("{e}"));
        config.backends[0].spec.faults = Some(faults.clone());
        Self {
            faults,
            shared: Arc::new(Shared {
                history,
                rules: Mutex::new(vec![Rule::calm()]),
                stop: AtomicBool::new(false),
            }),
            sessions: Vec::new(),
            exports: Vec::new(),
            workers: Vec::new(),
            server: Some(Server::start(&config).unwrap()),
            dir,
            network,
        }
    }

    fn connect(&mut self, scheme: &'static str, host: u8, timing: Timing, limit: Duration) -> Lun {
        let network = self.network;
        let spin = Duration::from_micros(10);
        let builder = Client::builder().pool(4 << 20).timing(timing).spin(spin);
        let client = match scheme {
            "iscsi" => builder.without_device(),
            _ => builder.open(format!("127.0.{network}.{host}").parse().unwrap()),
        };
        let target = match scheme {
            "srp" => "0".to_owned(),
            _ => format!("{IQN}/0"),
        };
        let url: TargetUrl = format!("{scheme}://127.0.{network}.1/{target}")
            .parse()
            .unwrap();
        let session = block_on(client.unwrap().connect(url))
            .unwrap()
            .with_timeout(limit);
        let lun = block_on(session.lun(0)).unwrap();
        self.sessions.push((scheme, session));
        lun
    }

    fn work(&mut self, seed: u64, me: Me, mut disk: impl Disk + 'static) {
        let (shared, counts) = (self.shared.clone(), Arc::new(Counts::default()));
        let mut chance = Chance::new(seed, self.workers.len() as u64);
        let worker = Worker {
            who: me.who.clone(),
            counts: counts.clone(),
            thread: Some(thread::spawn(move || {
                shared.work(&mut disk, &me, &mut chance, &counts);
            })),
        };
        self.workers.push(worker);
    }

    /// Starts an initiator for each protocol, using three threads for its disk and one thread for
    /// an NBD export of this disk.
    fn load(&mut self, seed: u64) {
        for scheme in SCHEMES {
            self.load_as("", seed, scheme, DISK, Timing::default(), PATIENCE);
        }
    }

    fn load_as(
        &mut self,
        name: &'static str,
        seed: u64,
        scheme: &'static str,
        within: Range<u64>,
        timing: Timing,
        limit: Duration,
    ) {
        let at = self.exports.len() as u8;
        let lun = self.connect(scheme, 2 + at, timing, limit);
        let socket = self.dir.join(format!("{name}{scheme}"));
        let bytes = Arc::new(ByteDevice::new(Arc::new(lun.clone())));
        let export = nbd::Server::bind(&socket, bytes, "disk", "").unwrap();
        self.exports.push(export.start().unwrap());
        let me = |how: &str| Me {
            who: format!("{name} {how} {scheme}"),
            port: Port(u16::from(at) + 1),
            within: within.clone(),
        };
        for thread in ["first", "second", "third"] {
            self.work(seed, me(thread), lun.clone());
        }
        self.work(seed, me("NBD"), Nbd::connect(&socket));
    }

    /// Sets a new rule.
    fn allow(&self, rule: Rule) {
        let mut rules = self.shared.rules.lock().unwrap();
        rules.push(rule);
    }

    /// Waits until the condition is true, and checks that all threads are still running.
    fn wait(&mut self, what: &str, mut holds: impl FnMut(&[Worker]) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !holds(&self.workers) {
            for worker in &mut self.workers {
                if worker.thread.as_ref().is_some_and(JoinHandle::is_finished) {
                    let ended = worker.thread.take().unwrap().join();
                    panic!("{}: {ended:?}", worker.who);
                }
            }
            if Instant::now() > until {
                let counts: Vec<_> = self
                    .workers
                    .iter()
                    .map(|w| (&w.who, w.counts.now()))
                    .collect();
                panic!("{what}: {counts:?}, {:?}", self.reconnects());
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until every thread has completed `good` more operations successfully and `failed` more
    /// with an error.
    fn wait_for(&mut self, what: &str, good: u64, failed: u64) {
        let before: Vec<_> = self.workers.iter().map(|w| w.counts.now()).collect();
        self.wait(what, |workers| {
            workers.iter().zip(&before).all(|(worker, before)| {
                let now = worker.counts.now();
                now.0 >= before.0 + good && now.1 >= before.1 + failed
            })
        });
    }

    fn failures(&self) -> u64 {
        self.workers.iter().map(|w| w.counts.now().1).sum()
    }

    fn reconnects(&self) -> Vec<(&'static str, u64, String)> {
        let of = |(scheme, session): &(&'static str, Session)| {
            let status = session.status();
            (
                *scheme,
                status.reconnects(),
                format!("{:?}", status.last_down()),
            )
        };
        self.sessions.iter().map(of).collect()
    }

    /// Checks that the first `first` initiators are still connected.
    fn assert_no_session_was_lost(&self, first: usize, after: &str) {
        let lost = self.reconnects();
        let mut first = lost.iter().take(first);
        assert!(first.all(|(_, n, _)| *n == 0), "{after}: {lost:?}");
    }

    /// Stops the load and reads the whole disk again.
    fn end(mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for worker in &mut self.workers {
            worker.thread.take().unwrap().join().unwrap();
        }
        let session = self.sessions[0].1.clone();
        let mut lun = block_on(session.lun(0)).unwrap();
        for start in DISK.step_by(LONGEST as usize) {
            let op = Op::read(start..(start + LONGEST).min(DISK.end));
            op.carry_out(&mut lun, Port(1), &self.shared.history)
                .unwrap();
        }
        let good: u64 = self.workers.iter().map(|w| w.counts.now().0).sum();
        println!("result: {good} operations, {} failed", self.failures());
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.faults.release();
        self.exports.clear();
        self.sessions.clear();
        drop(self.server.take());
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn seed(test: &str) -> (u64, u64) {
    let (seed, rounds) = (
        setting("RISER_FAILING_SEED", 0x0fa1),
        setting("RISER_FAILING_ROUNDS", 1),
    );
    println!(
        "RISER_FAILING_SEED={seed} RISER_FAILING_ROUNDS={rounds} cargo test -p riser-tests --test \
         failing_backend {test}"
    );
    (seed, rounds)
}

fn fault(on: FaultOn, times: Option<u32>, error: BackendError) -> Fault {
    Fault {
        on,
        offset: BAD.start * BLOCK as u64,
        len: (BAD.end - BAD.start) * BLOCK as u64,
        times,
        delay: Duration::ZERO,
        error: Some(error),
    }
}

#[test]
fn medium_error_affects_only_its_commands() {
    let (seed, rounds) = seed("a_medium_that_fails");
    let mut bench = Bench::new(161, History::new(DISK.end as usize));
    bench.load(seed);
    bench.wait_for("calm", 10, 0);
    let medium = BackendError::Medium { offset: None };
    let (read, write) = ((Kind::Read, libc::EIO), (Kind::Write, libc::EIO));
    let cases = [
        ("EIO on reads", FaultOn::Read, medium, vec![read]),
        ("EIO on writes", FaultOn::Write, medium, vec![write]),
        (
            "ENOSPC",
            FaultOn::Write,
            BackendError::NoSpace,
            vec![(Kind::Write, libc::ENOSPC)],
        ),
        (
            "EROFS",
            FaultOn::Write,
            BackendError::ReadOnly,
            vec![(Kind::Write, libc::EPERM)],
        ),
        ("ENODEV", FaultOn::Read, BackendError::NotReady, vec![read]),
        (
            "an error of ours",
            FaultOn::Write,
            BackendError::Internal,
            vec![write],
        ),
    ];
    for _ in 0..rounds {
        for (what, on, error, fails) in &cases {
            // If the fault is set for a single command, exactly one must fail. If it's permanent,
            // there must be at least one failure for each thread.
            let before = bench.failures();
            bench.allow(Rule::fails(fails.clone()));
            bench.faults.set(vec![fault(*on, Some(1), *error)]);
            bench.wait_for(what, 40, 0);
            assert_eq!(bench.failures(), before + 1, "{what}, once");
            bench.faults.set(vec![fault(*on, None, *error)]);
            bench.wait_for(what, 40, 2);
            bench.faults.set(Vec::new());
            bench.allow(Rule::calm());
            bench.wait_for(what, 10, 0);
            bench.assert_no_session_was_lost(SCHEMES.len(), what);
        }
        // If the disk has aborted a command, the initiator will retry it.
        let abort_error = |on| fault(on, Some(5), BackendError::Aborted);
        bench.faults.set(vec![
            abort_error(FaultOn::Read),
            abort_error(FaultOn::Write),
        ]);
        bench.wait_for("aborted", 40, 0);
        let slow = Fault {
            delay: Duration::from_millis(30),
            error: None,
            ..fault(FaultOn::Any, None, medium)
        };
        bench.faults.set(vec![slow]);
        bench.wait_for("slow", 20, 0);
        bench.faults.set(Vec::new());
        for most in [512, 3 * 512] {
            bench.faults.shorten(most);
            bench.wait_for("short", 30, 0);
        }
        bench.faults.shorten(0);
        bench.assert_no_session_was_lost(SCHEMES.len(), "slow and short");
    }
    bench.end();
}

#[test]
fn failed_flush_persists_until_cleared() {
    let (seed, rounds) = seed("a_flush_that_failed");
    let mut bench = Bench::new(162, History::new(DISK.end as usize));
    bench.load(seed);
    for _ in 0..rounds {
        bench.wait_for("calm", 10, 0);
        bench.allow(Rule {
            whose: "",
            fails: vec![(Kind::Flush, libc::EIO)],
            in_bad: false,
        });
        let once = fault(
            FaultOn::Flush,
            Some(1),
            BackendError::Medium { offset: None },
        );
        bench.faults.set(vec![once]);
        // The flushes of every thread must fail more than once, but reads and writes must continue
        // to work, including FUA.
        bench.wait_for("after a failed flush", 60, 3);
        let failure = {
            let server = bench.server.as_ref().unwrap();
            let catalog = server.shared().registry.catalog();
            let unit = &catalog.targets[0].units[0].1;
            catalog.store_of(unit).unwrap().flush_failure()
        };
        assert_eq!(failure.map(|f| f.errno), Some(libc::EIO));
        // No flush must succeed during this time.
        for (scheme, session) in &bench.sessions {
            let lun = block_on(session.lun(0)).unwrap();
            assert!(block_on(lun.flush()).is_err(), "{scheme}");
        }
        let server = bench.server.as_ref().unwrap();
        assert_eq!(server.clear_flush_failure(None).unwrap(), 1);
        assert_eq!(server.clear_flush_failure(None).unwrap(), 0);
        bench.allow(Rule::calm());
        bench.wait_for("after it was cleared", 60, 0);
        for (scheme, session) in &bench.sessions {
            let lun = block_on(session.lun(0)).unwrap();
            assert_eq!(block_on(lun.flush()), Ok(()), "{scheme}");
        }
        bench.assert_no_session_was_lost(SCHEMES.len(), "failed flushes");
    }
    bench.end();
}

/// If the disk hangs, pending commands will time out in the initiator and complete later. They must
/// not overwrite any newer data, and operations on other blocks must continue to work.
#[test]
fn hung_blocks_affect_only_their_commands() {
    let (seed, rounds) = seed("a_disk_that_hangs");
    // Commands that time out will be retried.
    let history = History::new(DISK.end as usize).with_repeats();
    let mut bench = Bench::new(163, history);
    for scheme in SCHEMES {
        let within = 0..BAD.start;
        bench.load_as("other", seed, scheme, within, Timing::default(), PATIENCE);
    }
    let impatient = Timing {
        attempt: Duration::from_millis(300),
        tsk_mgmt: Duration::from_millis(300),
        login: Duration::from_millis(600),
        backoff_max: Duration::from_millis(200),
        ..Timing::default()
    };
    for scheme in SCHEMES {
        let limit = Duration::from_millis(1500);
        bench.load_as("impatient", seed, scheme, DISK, impatient, limit);
    }
    let kinds = [Kind::Read, Kind::Write, Kind::Flush];
    let errors = [libc::ETIMEDOUT, libc::EIO];
    bench.allow(Rule {
        whose: "impatient",
        fails: kinds.iter().flat_map(|k| errors.map(|e| (*k, e))).collect(),
        in_bad: false,
    });
    for _ in 0..rounds {
        bench.wait_for("calm", 5, 0);
        let (offset, len) = (
            BAD.start * BLOCK as u64,
            (BAD.end - BAD.start) * BLOCK as u64,
        );
        bench.faults.hold(FaultOn::Write, offset, len);
        let before: Vec<_> = bench.workers.iter().map(|w| w.counts.now()).collect();
        bench.wait("while it hangs", |workers| {
            workers.iter().zip(&before).all(|(worker, before)| {
                let now = worker.counts.now();
                match worker.who.starts_with("other") {
                    true => now.0 >= before.0 + 30,
                    false => now.1 > before.1,
                }
            })
        });
        bench.assert_no_session_was_lost(SCHEMES.len(), "a disk that hangs");
        bench.faults.release();
        bench.wait_for("when it continues", 10, 0);
        bench.assert_no_session_was_lost(SCHEMES.len(), "a disk that goes on");
    }
    println!("result: {:?}", bench.reconnects());
    bench.end();
}
