//! Connects and disconnects many thousands of sessions to a running `riserd` while many sessions stay
//! connected. No memory, descriptors, queue pairs, regions or sessions must be leaked.
//!
//! Guests log in using all protocols, and either log out, close the connection or disappear. Some
//! logins are rejected or interrupted, some sessions have two connections, some use CHAP, and some
//! are for discovery only ([`guest`]). When there are no guest sessions, we check the resources
//! used by the daemon: resident memory, descriptors and threads as reported by the system, and the
//! daemon's own report.
//!
//! `RISER_SOAK_CONNECTS` sets the number of sessions to connect and disconnect (default 600),
//! `RISER_SOAK_SESSIONS` sets the number of sessions that stay connected (default 48), and
//! `RISER_SOAK_SEED` sets the random seed. `cargo xtask soak` uses a million and a thousand.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints seeds and results")]
#![allow(unsafe_code, reason = "a socket option")]

mod guest;

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::thread;
use std::time::{Duration, Instant};

use guest::{End, Guest, Kind, Protocol};
use riser_block::task::block_on;
use riser_initiator::engine::Client;
use riser_initiator::lun::Lun;
use riser_initiator::url::TargetUrl;
use riser_testkit::eventually_some;
use riser_testkit::metered::get;
use riser_testkit::programs::Pair;
use riser_tests::load::{Disk, setting};

const TARGET: Ipv4Addr = Ipv4Addr::new(127, 0, 171, 1);
const METRICS: &str = "127.0.171.1:9909";
const IQN: &str = "iqn.2026-01.com.example:soak";
/// Secret for hosts with this address prefix.
const SECRET: &str = "twelve-bytes-or-more";
const WITH_CHAP: [u8; 2] = [127, 2];
const IOC_GUID: u64 = 0x0200_c0ff_ee00_0171;

/// Number of guests. Each has a single session at a time.
const GUESTS: u8 = 6;

/// Number of permanent sessions per engine.
const PER_CLIENT: usize = 96;

/// Minimum number of commands required to use all slots in a session's rings. Without this, pings
/// on permanent sessions would use new pages from time to time.
const SLOTS: u32 = 128;

/// Maximum number of checks in a long run. A check has to wait until the daemon has cleaned up
/// interrupted logins, so there are fewer checks in a short run.
const MOST_LOOKS: u64 = 10;

const PATIENCE: Duration = Duration::from_secs(120);

/// Resources used by the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Held {
    descriptors: usize,
    threads: usize,
    sessions: u64,
    /// Number of RDMA objects by type.
    objects: BTreeMap<String, u64>,
    /// Number of pending requests.
    requests: u64,
    /// Buffer memory in use, in bytes.
    buffers: u64,
}

/// The daemon as seen from outside.
struct Daemon {
    pair: Pair,
    process: u32,
}

impl Daemon {
    fn serve(sessions: u64) -> Self {
        let portals = [
            format!("{{ protocol: srp, listen: {TARGET}, ioc_guid: {IOC_GUID:#018x} }}"),
            format!("{{ protocol: iser, listen: {TARGET} }}"),
            format!("{{ protocol: iscsi, listen: {TARGET} }}"),
        ];
        // Rules are checked in order.
        let [a, b] = WITH_CHAP;
        let rules = [
            format!(
                "{{ address: {a}.{b}.0.0/16, chap: {{ users: [{{ name: alice, secret: {SECRET} }}] }} }}"
            ),
            "{ address: 127.0.0.0/8 }".to_owned(),
        ];
        let target = format!(
            "iqn: {IQN}\nportals: [{}]\naccess: [{}]",
            portals.join(", "),
            rules.join(", ")
        );
        let most = sessions + 128;
        let backend = format!(
            "{{ kind: ram, size: 1MiB }}\nmetrics: {{ listen: \"{METRICS}\" }}\n\
             workers: {{ count: 2 }}\n\
             limits: {{ max_sessions: {most}, sessions_per_address: {most}, queue_depth: 16, \
             connections_per_session: 2 }}\n\
             log: {{ filter: error }}"
        );
        let pair = Pair::with_target(171, &backend, &target);
        let process = pair.process().expect("a daemon that runs");
        eventually_some("readiness", PATIENCE, || get(METRICS, "/readyz"));
        Self { pair, process }
    }

    fn file(&self, name: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{name}", self.process)).unwrap()
    }

    /// Returns the resident memory in bytes, not including file mappings, which can be reclaimed by
    /// the system at any time.
    ///
    /// We compare this when there are no guest sessions and after a warm-up, in which the allocator
    /// reaches its maximum. Memory that is freed later will be used again, so this value is stable
    /// even if it's not returned to the system. Most of it is used for the pool and the rings of
    /// permanent sessions.
    fn memory(&self) -> u64 {
        let status = self.file("status");
        let is_own = |line: &&str| line.starts_with("RssAnon:") || line.starts_with("RssShmem:");
        let kib = status.lines().filter(is_own);
        let kib = kib.map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        kib.map(|kib| kib.expect("a number")).sum::<u64>() << 10
    }

    fn held(&self) -> Held {
        let directory = format!("/proc/{}/fd", self.process);
        // The report itself requires a connection, which is closed after the response was received.
        let report = eventually_some("a report", PATIENCE, || get(METRICS, "/metrics"));
        let mut held = Held {
            descriptors: fs::read_dir(directory).unwrap().count(),
            threads: fs::read_dir(format!("/proc/{}/task", self.process))
                .unwrap()
                .count(),
            sessions: 0,
            objects: BTreeMap::new(),
            requests: 0,
            buffers: 0,
        };
        for line in report.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').expect("a sample");
            let value = value.parse::<f64>().unwrap() as u64;
            match name.split('{').next() {
                Some("riser_sessions") => held.sessions = value,
                Some("riser_contexts_in_use") => held.requests += value,
                Some("riser_buffer_pool_bytes") => held.buffers += value,
                Some("riser_buffer_pool_free_bytes") => {
                    held.buffers = held.buffers.wrapping_sub(value);
                }
                Some("riser_device_objects") => {
                    let kind = name.split("kind=\"").nth(1).expect("a kind");
                    let kind = kind.split('"').next().unwrap_or_default();
                    *held.objects.entry(kind.to_owned()).or_default() += value;
                }
                _ => {}
            }
        }
        held
    }

    /// Waits until the daemon uses exactly these resources.
    fn wait_released(&self, what: &str, expected: &Held) {
        let mut held = None;
        let until = Instant::now() + PATIENCE;
        while held.as_ref() != Some(expected) {
            assert!(
                Instant::now() < until,
                "{what}: it holds {held:?}, not {expected:?}"
            );
            held = Some(self.held());
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Returns the CPU time of a process in seconds.
fn processor_time(stat: &str) -> f64 {
    let after_name = stat.rsplit(')').next().expect("a name");
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    // User and system time, in units of 1/100 s.
    let ticks = [11, 12].map(|at: usize| fields[at].parse::<u64>().unwrap());
    (ticks[0] + ticks[1]) as f64 / 100.0
}

/// Opens a permanent session, using a different protocol each time.
fn stay(client: &Client, number: u64) -> Lun {
    let url = match Protocol::ALL[number as usize % Protocol::ALL.len()] {
        Protocol::Srp => format!(
            "srp://{TARGET}/0?initiator_ext={:x}&queue_size=8",
            0x5000 + number
        ),
        protocol => {
            let scheme = if protocol == Protocol::Tcp {
                "iscsi"
            } else {
                "iser"
            };
            let name = format!("iqn.2026-01.com.example:host{number}");
            format!("{scheme}://{TARGET}/{IQN}/0?initiator={name}&queue_size=8")
        }
    };
    let url: TargetUrl = url.parse().unwrap();
    let session = block_on(client.connect(url)).unwrap();
    let mut lun = block_on(session.with_timeout(PATIENCE).lun(0)).unwrap();
    for _ in 0..SLOTS {
        Disk::read(&mut lun, 0, &mut [0; 4096]).unwrap();
    }
    lun
}

/// Connects and disconnects guest sessions. At the end, all ports whose sessions disappeared will
/// log out properly.
fn come_and_go(guests: &mut [Guest], connects: u64) {
    let each = connects.div_ceil(guests.len() as u64);
    thread::scope(|scope| {
        for guest in guests {
            scope.spawn(move || {
                (0..each).for_each(|_| guest.visit());
                for (protocol, kind) in Kind::all() {
                    guest.visit_so(protocol, kind, End::Logout);
                }
            });
        }
    });
}

/// Prints the number of sessions for each type, and the average time.
fn print_kinds(guests: &[Guest]) {
    let mut all: BTreeMap<(Protocol, Kind, End), (u64, Duration)> = BTreeMap::new();
    for (kind, (count, took)) in guests.iter().flat_map(|guest| &guest.counts) {
        let sum = all.entry(*kind).or_default();
        *sum = (sum.0 + count, sum.1 + *took);
    }
    for ((protocol, kind, end), (count, took)) in all {
        let each = took.as_secs_f64() * 1e3 / count as f64;
        println!("result: {protocol:?} {kind:?} {end:?}: {count}, {each:.2} ms each");
    }
}

#[test]
fn thousands_of_sessions_leave_nothing() {
    let connects = setting("RISER_SOAK_CONNECTS", 600);
    let sessions = setting("RISER_SOAK_SESSIONS", 48);
    let seed = setting("RISER_SOAK_SEED", 0x50a4);
    println!(
        "RISER_SOAK_SEED={seed} RISER_SOAK_CONNECTS={connects} RISER_SOAK_SESSIONS={sessions} cargo \
         test -p riser-tests --test soak"
    );
    let mut daemon = Daemon::serve(sessions);
    let empty = daemon.held();
    let clients: Vec<Client> = (0..(sessions as usize).div_ceil(PER_CLIENT))
        .map(|at| {
            let [a, b, c, _] = TARGET.octets();
            let address = Ipv4Addr::new(a, b, c, 2 + at as u8);
            let builder = Client::builder().pool(PER_CLIENT * (16 << 10));
            builder.open(address.into()).unwrap()
        })
        .collect();
    let mut staying: Vec<Lun> = (0..sessions)
        .map(|number| stay(&clients[number as usize / PER_CLIENT], number))
        .collect();
    let idle = daemon.held();
    assert_eq!(idle.sessions, sessions);
    assert!(!idle.objects.is_empty(), "objects are not reported");
    let looks = (connects / 5_000).clamp(2, MOST_LOOKS);
    let mut guests: Vec<Guest> = (0..GUESTS).map(|number| Guest::new(number, seed)).collect();
    // After the first sessions, the buffers for the largest queues in this process have been
    // allocated.
    come_and_go(&mut guests, (connects / 5).max(600));
    daemon.wait_released("after the first", &idle);
    let first = daemon.memory();
    println!(
        "result: {sessions} sessions stay: {} MiB resident, {idle:?}",
        first >> 20
    );
    let (begun, busy) = (
        Instant::now(),
        [processor_time(&daemon.file("stat")), own_time()],
    );
    let mut largest = first;
    for look in 1..=looks {
        come_and_go(&mut guests, connects / looks);
        daemon.wait_released(&format!("at look {look}"), &idle);
        let now = daemon.memory();
        largest = largest.max(now);
        let done = look * connects / looks;
        println!(
            "{done} connects in {:.0} s: {} KiB resident, {:+.2} %",
            begun.elapsed().as_secs_f64(),
            now >> 10,
            percent(first, now)
        );
    }
    let took = begun.elapsed().as_secs_f64();
    let busy = [
        processor_time(&daemon.file("stat")) - busy[0],
        own_time() - busy[1],
    ];
    println!(
        "result: {connects} connects in {took:.0} s, {:.0} a second; the daemon was busy for {:.0} s of \
         processor time, the guests for {:.0} s; memory {:+.2} % at most",
        connects as f64 / took,
        busy[0],
        busy[1],
        percent(first, largest)
    );
    print_kinds(&guests);
    let most = first + first / 100;
    assert!(
        largest <= most,
        "resident memory has grown from {first} to {largest} bytes at most"
    );
    for lun in &mut staying {
        lun.read(0, &mut [0; 4096]).unwrap();
        assert_eq!(lun.session().status().reconnects(), 0, "it stayed");
    }
    for lun in staying {
        block_on(lun.session().close());
    }
    drop(clients);
    daemon.wait_released("when all have gone", &empty);
    daemon.pair.terminate();
}

fn own_time() -> f64 {
    processor_time(&fs::read_to_string("/proc/self/stat").unwrap())
}

fn percent(before: u64, after: u64) -> f64 {
    (after as f64 - before as f64) / before as f64 * 100.0
}
