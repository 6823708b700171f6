//! A stranger on the network of a loaded target: it forges ICMP, messages of the connection
//! manager, and packets of reliable connections. It is off path (it knows addresses and formats),
//! on path (it sees every packet, and so knows queue pairs, sequence numbers and keys), or on path
//! where each of its packets is right but for one number: a switch that forwards only a port's own
//! address makes one of it that is wrong in the address, say.
//!
//! RoCE cannot distinguish a packet of the peer from a forged one with all the right numbers. So an
//! attacker on path can end sessions, and could carry out commands in a host's name; this one does
//! not do the latter. What has to hold:
//!
//! | | off path | one number off | on path |
//! | --- | --- | --- | --- |
//! | what honest hosts read and write is right | yes | yes | yes |
//! | no memory is shown to it | yes | yes | yes |
//! | sessions stay | yes | yes | they come back when it is over |
//! | hosts can log in | yes | yes | when it is over |
//! | the daemon's memory is bounded | yes | yes | yes |
//!
//! It takes all of a machine's time, so it is run by itself: `cargo test -p riser-tests --test
//! adversary -- --ignored --nocapture`. `RISER_ADVERSARY_SECONDS` sets how long it goes on (default
//! 10), `RISER_ADVERSARY_SEED` what it forges.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints seeds and figures")]
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
use riser_initiator::block::task::block_on;
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
/// Where the daemon reports its metrics.
const METRICS: &str = "10.11.0.1:9909";
const METRICS_PORT: u16 = 9909;
const PATIENCE: Duration = Duration::from_secs(120);
/// How much more memory the daemon may have at the end than after its first logins, in bytes: some
/// 240 MiB are for connections that are not established, of which it has room for 256 of SRP and 64
/// of iSER for each worker. The connection manager's limits are twice that.
const GROWTH: u64 = 320 << 20;
/// An operation that takes longer was not slow: its command was lost, and repeated after
/// [`Timing::attempt`](riser_initiator::session::Timing::attempt).
const LOST: Duration = Duration::from_secs(20);
/// Packets of a burst, and the pause after it: some ten thousand in a second at most.
const BURST: u32 = 16;
const PAUSE: Duration = Duration::from_micros(1500);

/// What the honest hosts' threads share.
struct Shared {
    history: History,
    stop: AtomicBool,
    /// Between two operations of a thread.
    pause: Duration,
    /// Operations, and how long all of them and the longest took, in microseconds.
    count: AtomicU64,
    total: AtomicU64,
    longest: AtomicU64,
    /// How long each took, in microseconds, for each of [`SCHEMES`].
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

/// A target, honest hosts at work, and an idle attacker.
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
            // A process that another test starts has the descriptors of this one until it executes
            // its program, and with them the address of a device that was closed in the meantime.
            Err(EngineError::Device(e))
                if e.kind() == ErrorKind::AddrInUse && before.elapsed() < PATIENCE =>
            {
                thread::sleep(Duration::from_millis(5));
            }
            client => return client.unwrap(),
        }
    }
}

/// Logs in from a host, and reads; how long that took.
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

/// Logs in to the target that every host may use, over RDMA, and out again.
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

/// Another host logs in by every protocol, and reads what is right.
fn others_log_in(shared: Arc<Shared>) -> Duration {
    let mut longest = Duration::ZERO;
    // Devices of one address follow each other.
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

/// A second target on a disk of its own, which every host may use, in a configuration.
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

/// The 99th percentile, and zero of none.
fn p99_of(times: &mut [u64]) -> u64 {
    times.sort_unstable();
    times.get(times.len() * 99 / 100).copied().unwrap_or(0)
}

/// Starts the daemon, with two targets.
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

/// The sum of the daemon's metrics whose names begin so, and have this reason or kind, or any.
fn metric(world: &World, name: &'static str, label: &'static str) -> u64 {
    // It serves its portals first, and others may have all its connections.
    let text = eventually_some("a daemon that answers", PATIENCE, || {
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
            // A session that is lost repeats what was not answered.
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
            // SRP and iSER share the device of their host.
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

    /// Resident memory of the daemon, in bytes.
    fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.daemon)).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let kilobytes = line.and_then(|line| line.split_whitespace().nth(1));
        kilobytes.unwrap().parse::<u64>().unwrap() << 10
    }

    /// What was forged has reached the daemon, and been refused for what is wrong with it.
    fn has_refused(&self) {
        for (name, label) in [
            ("riser_device_dropped_packets_total", "wrong_source"),
            ("riser_device_dropped_packets_total", "unknown_qp"),
            ("riser_device_cm_messages_total", "illegal"),
        ] {
            let count = metric(&self.world, name, label);
            println!("figure: {label}: {count}");
            assert!(count > 0, "nothing was refused as {label}");
        }
    }

    /// Waits until every honest thread has done `more` operations, and `span` has passed.
    fn go_on(&mut self, what: &str, more: u64, span: Duration) {
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

    /// Figures of the honest hosts since the last time; the 99th percentiles of all, and of each of
    /// [`SCHEMES`], in microseconds.
    ///
    /// # Panics
    /// If a command was lost.
    fn figures(&self, what: &str, span: Duration) -> (u64, [u64; 3]) {
        let taken = |n: &AtomicU64| n.swap(0, Ordering::Relaxed);
        let (count, total) = (taken(&self.shared.count), taken(&self.shared.total));
        let longest = taken(&self.shared.longest);
        let mut times = std::mem::take(&mut *self.shared.times.lock().unwrap());
        let each = times.each_mut().map(|times| p99_of(times));
        let all = p99_of(&mut times.concat());
        println!(
            "figure: {what}: {:.0} operations/s, mean {} us, p99 {all} us ({each:?} of {SCHEMES:?}), \
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

    /// The stranger works until it is stopped.
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
                (forger.sent, forger.answered)
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

    /// Ends it; how many packets were forged, and how many READs among them were answered with
    /// data.
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
fn a_stranger_on_the_network_spoils_nothing() {
    let seed = setting("RISER_ADVERSARY_SEED", 0xadd);
    let seconds = setting("RISER_ADVERSARY_SECONDS", 10);
    println!(
        "RISER_ADVERSARY_SEED={seed} RISER_ADVERSARY_SECONDS={seconds} cargo test -p riser-tests \
         --test adversary -- --ignored --nocapture"
    );
    let world = match World::new() {
        Ok(world) => world,
        Err(why) => return skip("a_stranger_on_the_network_spoils_nothing", &why),
    };
    let mut sniffer = world.switch.run(Sniffer::new);
    let mut scene = Scene::new(world, seed, Duration::ZERO);
    let turn = Duration::from_secs(seconds) / (Reach::ALL.len() * Trick::ALL.len()) as u32;
    scene.go_on("before", 20, turn);
    scene.figures("before", turn);
    let at_work = sniffer.logins();
    assert_eq!(at_work.len(), 2, "SRP and iSER");
    // What a login looks like: the stranger could try one.
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
            scene.go_on(&what, if is_on_path { 0 } else { 10 }, turn);
            scene.figures(&what, begun.elapsed());
            if !is_on_path {
                println!("figure: {what}: logins took {:?} at most", later());
                assert_eq!(scene.reconnects(), [0; 3], "{what}: {:?}", scene.downs());
            }
        }
        let (sent, answered) = attack.end();
        assert_eq!(
            answered, 0,
            "READs with wrong keys were answered, {reach:?}"
        );
        scene.go_on("afterwards", 20, Duration::ZERO);
        println!(
            "figure: {reach:?}: {sent} packets forged, reconnects {:?}",
            scene.reconnects()
        );
        println!("figure: after it, logins took {:?} at most", later());
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

/// A counter of the calling thread's network namespace.
fn kernel_counter(protocol: &str, name: &str) -> u64 {
    let text = fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
    let mut lines = text.lines().filter(|l| l.starts_with(protocol));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let at = names.split(' ').position(|n| n == name);
    let value = values.split(' ').nth(at.expect("a counter"));
    value.unwrap().parse().unwrap()
}
