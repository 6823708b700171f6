//! An attacker in the network of a target under load. It sends forged ICMP messages, connection
//! manager messages and packets for reliable connections. The attacker is either off-path (it knows
//! addresses and formats), on-path (it can see every packet, so it knows queue pairs, sequence
//! numbers and keys), or on-path but with a single incorrect value in each packet. For example, the
//! address must be incorrect if the switch only forwards packets with the port's own address.
//!
//! RoCE can't detect that a packet with all correct values was not sent by the peer. So an on-path
//! attacker can always close sessions, and could also execute commands on behalf of a host, which
//! we don't do here. We verify the following:
//!
//! | | off-path | one value incorrect | on-path |
//! | --- | --- | --- | --- |
//! | data read and written by honest hosts is correct | yes | yes | yes |
//! | the attacker can't read any memory | yes | yes | yes |
//! | sessions stay connected | yes | yes | they reconnect after the attack |
//! | hosts can log in | yes | yes | after the attack |
//! | the daemon's memory is limited | yes | yes | yes |
//!
//! This test uses the whole machine, so it must be run separately: `cargo test -p riser-tests
//! --test adversary -- --ignored --nocapture`. `RISER_ADVERSARY_SECONDS` sets the duration (default
//! 10), and `RISER_ADVERSARY_SEED` the random seed.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints seeds and results")]
#![allow(unsafe_code, reason = "a network namespace of a thread's own")]

mod forge;
mod host;
mod hostile;
mod net;
mod rounds;
mod single;

use std::fs;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forge::{Forger, Login, Reach, Sniffer, Trick};
use net::{HONEST, LATER, TARGET, World};
use riser_block::task::block_on;
use riser_initiator::engine::{Client, EngineError, LinkState, Session};
use riser_initiator::lun::Lun;
use riser_initiator::url::TargetUrl;
use riser_testkit::eventually_some;
use riser_testkit::metered::get;
use riser_testkit::programs::{Pair, skip};
use riser_tests::history::{BLOCK, History, Port};
use riser_tests::load::{Chance, Op, setting};

const IQN: &str = "iqn.2026-01.com.example:loaded";
const SCHEMES: [&str; 3] = ["srp", "iser", "iscsi"];
const DISK: Range<u64> = 0..512;
/// Address of the daemon's metrics.
const METRICS: &str = "10.11.0.1:9909";
const METRICS_PORT: u16 = 9909;
const PATIENCE: Duration = Duration::from_secs(120);
/// Maximum increase of the daemon's memory from the first logins to the end, in bytes. About 240
/// MiB are used for connections that are not established, because there is space for 256 SRP and 64
/// iSER connections for each worker. The limits of the connection manager are twice as high.
const GROWTH: u64 = 320 << 20;
/// If an operation takes longer than this, it was not just slow: the command was lost and then sent
/// again after [`Timing::attempt`](riser_initiator::session::Timing::attempt).
const LOST: Duration = Duration::from_secs(20);
/// Number of packets in a burst, and the delay after it. This allows up to about 10,000 packets per
/// second.
const BURST: u32 = 16;
const PAUSE: Duration = Duration::from_micros(1500);

/// State shared by the threads of honest hosts.
struct Shared {
    history: History,
    stop: AtomicBool,
    /// Delay between two operations of a thread.
    pause: Duration,
    /// Number of operations, their total time and the maximum time, in microseconds.
    count: AtomicU64,
    total: AtomicU64,
    longest: AtomicU64,
    /// Time of each operation in microseconds, for each of [`SCHEMES`].
    times: Mutex<[Vec<u64>; 3]>,
}

impl Shared {
    fn work(&self, mut lun: Lun, port: Port, chance: &mut Chance, done: &AtomicU64) {
        while !self.stop.load(Ordering::Relaxed) {
            let op = Op::random(chance, &DISK, 32);
            let before = Instant::now();
            let result = op.carry_out(&mut lun, port, &self.history);
            result.unwrap_or_else(|e| panic!("{op:?} of port {}: {e:?}", port.0));
            let took = before.elapsed().as_micros() as u64;
            self.count.fetch_add(1, Ordering::Relaxed);
            self.total.fetch_add(took, Ordering::Relaxed);
            self.longest.fetch_max(took, Ordering::Relaxed);
            self.times.lock().unwrap()[usize::from(port.0) - 1].push(took);
            done.fetch_add(1, Ordering::Relaxed);
            thread::sleep(self.pause);
        }
    }
}

/// A target, active honest hosts, and an attacker that is idle.
struct Scene {
    sessions: Vec<Session>,
    shared: Arc<Shared>,
    workers: Vec<(Arc<AtomicU64>, JoinHandle<()>)>,
    pair: Pair,
    daemon: u32,
    world: Arc<World>,
}

fn client(scheme: &str, host: Ipv4Addr) -> Client {
    let before = Instant::now();
    loop {
        let builder = Client::builder()
            .pool(4 << 20)
            .spin(Duration::from_micros(10));
        let client = match scheme {
            "iscsi" => builder.without_device(),
            _ => builder.open(host.into()),
        };
        match client {
            // When another test starts a process, it inherits our file descriptors until it
            // executes its program. So the address of a device may still be in use after it was
            // closed.
            Err(EngineError::Device(e))
                if e.kind() == ErrorKind::AddrInUse && before.elapsed() < PATIENCE =>
            {
                thread::sleep(Duration::from_millis(5));
            }
            client => return client.unwrap(),
        }
    }
}

/// Logs in from a host and reads data. Also returns the time this took.
fn log_in(client: &Client, scheme: &str) -> (Session, Lun, Duration) {
    let target = match scheme {
        "srp" => "0".to_owned(),
        _ => format!("{IQN}/0"),
    };
    let url: TargetUrl = format!("{scheme}://{TARGET}/{target}").parse().unwrap();
    let before = Instant::now();
    loop {
        match block_on(client.connect(url.clone())) {
            Ok(session) => {
                let session = session.with_timeout(PATIENCE);
                let lun = block_on(session.lun(0)).unwrap();
                return (session, lun, before.elapsed());
            }
            Err(error) => assert!(before.elapsed() < PATIENCE, "{url}: {error}"),
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Logs in to the target that all hosts can use over RDMA, and logs out again.
fn visit_other_target() {
    let other = hostile::OTHER;
    let srp = hostile::OTHER_SRP;
    for url in [
        format!("srp://{TARGET}:{srp}/0"),
        format!("iser://{TARGET}/{other}/0"),
    ] {
        let client = client("srp", LATER);
        let url: TargetUrl = url.parse().unwrap();
        let session = block_on(client.connect(url)).unwrap();
        block_on(session.close());
        client.shutdown();
    }
}

/// Logs in from another host using each protocol, and verifies the data.
fn others_log_in(shared: Arc<Shared>) -> Duration {
    let mut longest = Duration::ZERO;
    // Use the devices in sequence, because they have the same address.
    for (at, scheme) in SCHEMES.into_iter().enumerate() {
        let client = client(scheme, LATER);
        let (session, mut lun, took) = log_in(&client, scheme);
        let read = Op::read(0..64);
        let port = Port(10 + at as u16);
        read.carry_out(&mut lun, port, &shared.history).unwrap();
        block_on(session.close());
        client.shutdown();
        longest = longest.max(took);
    }
    longest
}

/// Adds a second target with a separate disk to a configuration. All hosts can use this target.
fn with_another_target(text: &str) -> String {
    let other = hostile::OTHER;
    let srp = hostile::OTHER_SRP;
    let target = format!(
        "targets:\n  - name: other\n    iqn: {other}\n    portals:\n      \
         - {{ protocol: srp, listen: \"{TARGET}:{srp}\" }}\n      \
         - {{ protocol: iser, listen: {TARGET} }}\n      \
         - {{ protocol: iscsi, listen: {TARGET} }}\n    luns: {{ 0: junk }}\n    access: open\n"
    );
    text.replacen(
        "backends:\n",
        "backends:\n  junk: { kind: ram, size: 1MiB }\n",
        1,
    )
    .replacen("targets:\n", &target, 1)
}

/// Returns the 99th percentile, or zero if there are no values.
fn p99_of(times: &mut [u64]) -> u64 {
    times.sort_unstable();
    times.get(times.len() * 99 / 100).copied().unwrap_or(0)
}

/// Starts the daemon with two targets.
fn serve(world: &World, workers: u32) -> Pair {
    world.target.run(move || {
        let portals = SCHEMES.map(|p| format!("{{ protocol: {p}, listen: {TARGET} }}"));
        let target = format!("iqn: {IQN}\nportals: [{}]", portals.join(", "));
        let size = DISK.end * BLOCK as u64;
        let metrics = format!(
            "metrics: {{ listen: \"{METRICS}\", remote: true }}\nworkers: {{ count: {workers} }}"
        );
        let backend = format!("{{ kind: ram, size: {size}, write_cache: true }}\n{metrics}");
        let mut pair = Pair::with_target(0, &backend, &target);
        pair.kill();
        let file = pair.dir.join("riserd.yaml");
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, with_another_target(&text)).unwrap();
        pair.serve();
        pair
    })
}

/// Returns the total of all metrics with this prefix and, if set, with this reason or kind.
fn metric(world: &World, name: &'static str, label: &'static str) -> u64 {
    // The daemon opens its portals first, and all of its connections may be in use.
    let text = eventually_some("a responding daemon", PATIENCE, || {
        world.target.run(|| get(METRICS, "/metrics"))
    });
    let lines = text.lines().filter(|l| l.starts_with(name));
    let is_wanted = |l: &&str| label.is_empty() || l.contains(&format!("=\"{label}\""));
    let values = lines.filter(is_wanted);
    let values = values.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok());
    values.sum::<f64>() as u64
}

impl Scene {
    fn new(world: World, seed: u64, pause: Duration) -> Self {
        let world = Arc::new(world);
        let pair = serve(&world, 2);
        let daemon = pair.process().expect("a daemon that runs");
        let shared = Arc::new(Shared {
            // If a session is lost, commands without a response are sent again.
            history: History::new(DISK.end as usize).with_repeats(),
            stop: AtomicBool::new(false),
            pause,
            count: AtomicU64::new(0),
            total: AtomicU64::new(0),
            longest: AtomicU64::new(0),
            times: Mutex::default(),
        });
        let (mut sessions, mut workers) = (Vec::new(), Vec::new());
        for (at, scheme) in SCHEMES.into_iter().enumerate() {
            // SRP and iSER use the same device on their host.
            let (session, lun) = world.hosts.run(move || {
                let host = if scheme == "iser" {
                    net::SECOND
                } else {
                    HONEST
                };
                let (session, lun, _) = log_in(&client(scheme, host), scheme);
                (session, lun)
            });
            sessions.push(session);
            for thread in 0..2 {
                let (shared, lun) = (shared.clone(), lun.clone());
                let done = Arc::new(AtomicU64::new(0));
                let mut chance = Chance::new(seed, (at as u64) << 8 | thread);
                let port = Port(at as u16 + 1);
                let worker = thread::spawn({
                    let done = done.clone();
                    move || shared.work(lun, port, &mut chance, &done)
                });
                workers.push((done, worker));
            }
        }
        Self {
            sessions,
            shared,
            workers,
            pair,
            daemon,
            world,
        }
    }

    /// Returns the resident memory of the daemon in bytes.
    fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.daemon)).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let kilobytes = line.and_then(|line| line.split_whitespace().nth(1));
        kilobytes.unwrap().parse::<u64>().unwrap() << 10
    }

    /// Checks that the forged packets were received and that they were rejected for the expected
    /// reason.
    fn has_refused(&self) {
        for (name, label) in [
            ("riser_device_dropped_packets_total", "wrong_source"),
            ("riser_device_dropped_packets_total", "unknown_qp"),
            ("riser_device_cm_messages_total", "illegal"),
        ] {
            let count = metric(&self.world, name, label);
            println!("result: {label}: {count}");
            assert!(count > 0, "nothing was refused as {label}");
        }
    }

    /// Waits until every honest thread has completed `more` operations, but not less than `span`.
    fn wait_progress(&mut self, what: &str, more: u64, span: Duration) {
        let now = |workers: &[(Arc<AtomicU64>, JoinHandle<()>)]| -> Vec<u64> {
            workers
                .iter()
                .map(|(n, _)| n.load(Ordering::Relaxed))
                .collect()
        };
        let (before, begun) = (now(&self.workers), Instant::now());
        let is_done = |now: &[u64]| now.iter().zip(&before).all(|(n, b)| n - b >= more);
        while begun.elapsed() < span || !is_done(&now(&self.workers)) {
            if let Some(at) = self.workers.iter().position(|(_, w)| w.is_finished()) {
                panic!("{what}: {:?}", self.workers.remove(at).1.join());
            }
            let done = now(&self.workers);
            assert!(
                begun.elapsed() < span + PATIENCE,
                "{what}: {before:?}, {done:?}"
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Prints the measured values of the honest hosts since the last call. Returns the 99th
    /// percentile for all operations and for each of [`SCHEMES`], in microseconds.
    ///
    /// # Panics
    /// Panics if a command was lost.
    fn print_results(&self, what: &str, span: Duration) -> (u64, [u64; 3]) {
        let taken = |n: &AtomicU64| n.swap(0, Ordering::Relaxed);
        let (count, total) = (taken(&self.shared.count), taken(&self.shared.total));
        let longest = taken(&self.shared.longest);
        let mut times = std::mem::take(&mut *self.shared.times.lock().unwrap());
        let each = times.each_mut().map(|times| p99_of(times));
        let all = p99_of(&mut times.concat());
        println!(
            "result: {what}: {:.0} operations/s, mean {} us, p99 {all} us ({each:?} of {SCHEMES:?}), \
             longest {} ms, daemon {} MiB",
            count as f64 / span.as_secs_f64(),
            total / count.max(1),
            longest / 1000,
            self.memory() >> 20,
        );
        assert!(
            u128::from(longest) < LOST.as_micros(),
            "{what}: an operation took {} ms",
            longest / 1000
        );
        (all, each)
    }

    fn reconnects(&self) -> Vec<u64> {
        self.sessions
            .iter()
            .map(|s| s.status().reconnects())
            .collect()
    }

    fn downs(&self) -> Vec<String> {
        let down = |s: &Session| format!("{:?}", s.status().last_down());
        self.sessions.iter().map(down).collect()
    }

    /// Starts the attacker, which will run until it's stopped.
    fn attack(&self, seed: u64, reach: Reach, requests: &[Vec<u8>], logins: &[Login]) -> Attack {
        let stop = Arc::new(AtomicBool::new(false));
        let trick = Arc::new(Mutex::new(Trick::Icmp));
        let mut sniffer = self.world.switch.run(Sniffer::new);
        let (requests, logins) = (requests.to_vec(), logins.to_vec());
        let forger = move || Forger::new(seed, reach, requests, logins);
        let mut forger = self.world.stranger.run(forger);
        let thread = thread::spawn({
            let (stop, trick) = (stop.clone(), trick.clone());
            move || {
                while !stop.load(Ordering::Relaxed) {
                    if reach != Reach::OffPath {
                        forger.learn(&mut sniffer);
                    }
                    let trick = *trick.lock().unwrap_or_else(PoisonError::into_inner);
                    for _ in 0..BURST {
                        forger.play(trick);
                    }
                    thread::sleep(PAUSE);
                }
                forger.learn(&mut sniffer);
                (forger.sent, forger.responses)
            }
        });
        Attack {
            stop,
            trick,
            thread: Some(thread),
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

struct Attack {
    stop: Arc<AtomicBool>,
    trick: Arc<Mutex<Trick>>,
    thread: Option<JoinHandle<(u64, u64)>>,
}

impl Attack {
    fn change(&self, trick: Trick) {
        *self.trick.lock().unwrap() = trick;
    }

    /// Stops everything. Returns the number of forged packets, and the number of forged READs for
    /// which the response contained data.
    fn end(mut self) -> (u64, u64) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Attack {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[test]
#[ignore = "keeps the machine busy, and is run by itself"]
fn attacker_does_not_affect_hosts() {
    let seed = setting("RISER_ADVERSARY_SEED", 0xadd);
    let seconds = setting("RISER_ADVERSARY_SECONDS", 10);
    println!(
        "RISER_ADVERSARY_SEED={seed} RISER_ADVERSARY_SECONDS={seconds} cargo test -p riser-tests \
         --test adversary -- --ignored --nocapture"
    );
    let world = match World::new() {
        Ok(world) => world,
        Err(why) => return skip("attacker_does_not_affect_hosts", &why),
    };
    let mut sniffer = world.switch.run(Sniffer::new);
    let mut scene = Scene::new(world, seed, Duration::ZERO);
    let turn = Duration::from_secs(seconds) / (Reach::ALL.len() * Trick::ALL.len()) as u32;
    scene.wait_progress("before", 20, turn);
    scene.print_results("before", turn);
    let at_work = sniffer.logins();
    assert_eq!(at_work.len(), 2, "SRP and iSER");
    // Capture a login, because the attacker could also try to log in.
    let world = scene.world.clone();
    let later = {
        let (world, shared) = (world.clone(), scene.shared.clone());
        move || {
            let shared = shared.clone();
            world.hosts.run(move || others_log_in(shared))
        }
    };
    later();
    let requests: Vec<_> = sniffer.logins().into_iter().map(|l| l.req).collect();
    drop(sniffer);
    assert_eq!(requests.len(), 2, "SRP and iSER");
    let memory = scene.memory();
    for reach in Reach::ALL {
        let attack = scene.attack(seed, reach, &requests, &at_work);
        for trick in Trick::ALL {
            let what = format!("{trick:?}, {reach:?}");
            attack.change(trick);
            let begun = Instant::now();
            let is_on_path = reach == Reach::OnPath;
            scene.wait_progress(&what, if is_on_path { 0 } else { 10 }, turn);
            scene.print_results(&what, begun.elapsed());
            if !is_on_path {
                println!("result: {what}: logins took {:?} at most", later());
                assert_eq!(scene.reconnects(), [0; 3], "{what}: {:?}", scene.downs());
            }
        }
        let (sent, responses) = attack.end();
        assert_eq!(
            responses, 0,
            "READs with wrong keys got responses, {reach:?}"
        );
        scene.wait_progress("afterwards", 20, Duration::ZERO);
        println!(
            "result: {reach:?}: {sent} packets forged, reconnects {:?}",
            scene.reconnects()
        );
        println!("result: after it, logins took {:?} at most", later());
        let live = scene.sessions.iter().map(|s| s.status().link());
        assert_eq!(live.collect::<Vec<_>>(), [LinkState::Live; 3]);
        if reach == Reach::OneNumberOff {
            scene.has_refused();
        }
    }
    let grown = scene.memory().saturating_sub(memory);
    assert!(grown < GROWTH, "the daemon has grown by {grown} bytes");
    scene.shared.stop.store(true, Ordering::Relaxed);
    for (_, worker) in scene.workers.drain(..) {
        worker.join().unwrap();
    }
    scene.pair.kill();
}

/// Returns a kernel counter for the network namespace of the current thread.
fn kernel_counter(protocol: &str, name: &str) -> u64 {
    let text = fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
    let mut lines = text.lines().filter(|l| l.starts_with(protocol));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let at = names.split(' ').position(|n| n == name);
    let value = values.split(' ').nth(at.expect("a counter"));
    value.unwrap().parse().unwrap()
}
