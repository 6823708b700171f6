//! Tests many sessions, both at the same time and in sequence, using a real target and real
//! initiators on loopback in the same process.
//!
//! `RISER_CONNECT_CYCLES` sets the number of sessions to connect and disconnect (default 200); the
//! long test command uses 10,000.

#![allow(clippy::print_stdout, reason = "prints results of the test")]

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use riser_block::task::block_on;
use riser_initiator::engine::Client;
use riser_initiator::lun::Lun;
use riser_initiator::url::IscsiUrl;
use riser_initiator::url::SrpUrl;
use riser_target::config::Config;
use riser_target::server::Server;
use riser_testkit::alloc::Counting;
use riser_testkit::eventually;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new(|| ());

/// Resident memory is measured for the whole process, so only a single test can run at a time.
static ALONE: Mutex<()> = Mutex::new(());

const SESSIONS: u64 = 64;
const REGION: u64 = 1 << 20;

/// Starts a target on `host` with a RAM disk that has a region for each session.
fn serve(host: &str) -> (Server, SocketAddr) {
    let text = format!(
        "identity: scale\nbackends: {{ ram: {{ kind: ram, size: {}MiB }} }}\n\
         targets:\n  - name: scale\n    portals: [{{ protocol: srp, listen: {host} }}]\n    luns: {{ 0: ram }}\n\
         \x20   access: open\nworkers: {{ count: 2 }}\n",
        (SESSIONS * REGION) >> 20
    );
    let server = Server::start(&Config::parse(&text, "scale.yaml").unwrap()).unwrap();
    let addr = server.addresses()[0];
    (server, addr)
}

/// Returns the address of LUN 0 using a separate initiator port.
fn url(addr: SocketAddr, initiator: u64) -> SrpUrl {
    format!("srp://{addr}/0?initiator_ext={initiator:x}&queue_size=8")
        .parse()
        .unwrap()
}

/// Creates data that is unique for the session and round.
fn pattern(session: u64, round: u64, len: usize) -> Vec<u8> {
    let mut x = session << 32 | round | 1 << 63;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn many_sessions_write_and_read_concurrently() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (server, addr) = serve("127.0.0.81");
    let client = Client::builder()
        .pool(32 << 20)
        .open("127.0.0.82".parse().unwrap())
        .unwrap();
    let logged_in = Arc::new(Barrier::new(SESSIONS as usize + 1));
    let done = Arc::new(Barrier::new(SESSIONS as usize + 1));
    let threads: Vec<_> = (0..SESSIONS)
        .map(|n| {
            let (client, logged_in, done) = (client.clone(), logged_in.clone(), done.clone());
            std::thread::spawn(move || {
                let session = block_on(client.connect(&url(addr, 0x100 + n)));
                let lun = session.map(|session| (block_on(session.lun(0)), session));
                // If a thread fails, it must not block the other threads.
                logged_in.wait();
                let (lun, _session) = lun.unwrap();
                let lun = lun.unwrap();
                for round in 0..32 {
                    let len = 4096 << (round % 4);
                    let offset = n * REGION + round * (32 << 10);
                    let data = pattern(n, round, len);
                    let buffer = block_on(client.buffers().take_buffer(len));
                    buffer.slice().write(0, &data);
                    let buffer = block_on(lun.write(offset, buffer, false)).unwrap();
                    buffer.slice().fill(0, len, 0);
                    let buffer = block_on(lun.read(offset, buffer)).unwrap();
                    let mut found = vec![0; len];
                    buffer.slice().read(0, &mut found);
                    assert!(found == data, "session {n}, round {round}");
                }
                done.wait();
            })
        })
        .collect();
    logged_in.wait();
    assert_eq!(server.sessions(), SESSIONS as usize);
    let snapshots = server.snapshot();
    let memory = snapshots
        .iter()
        .flat_map(|s| &s.sessions)
        .map(|s| s.params.memory().total())
        .max()
        .unwrap();
    println!(
        "result: memory of one session with the default queue depth of 128: {} KiB",
        memory >> 10
    );
    assert!(memory <= 3 << 19, "{memory} bytes for a session");
    done.wait();
    for thread in threads {
        thread.join().unwrap();
    }
    eventually("the sessions end", Duration::from_secs(60), || {
        server.sessions() == 0
    });
    server.shutdown().unwrap();
}

#[test]
fn concurrent_discovery_finds_all_targets() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (server, addr) = serve("127.0.0.83");
    let client = Client::builder()
        .pool(1 << 20)
        .open("127.0.0.84".parse().unwrap())
        .unwrap();
    let bare: SrpUrl = format!("srp://{addr}/").parse().unwrap();
    let searches: Vec<_> = (0..300)
        .map(|_| {
            let (client, bare) = (client.clone(), bare.clone());
            std::thread::spawn(move || block_on(client.discover(&bare)))
        })
        .collect();
    for search in searches {
        let found = search.join().unwrap().unwrap();
        assert!(found.iter().any(|f| f.port() == Some(addr.port())));
    }
    server.shutdown().unwrap();
}

/// Number of TCP sessions, and also of iSER sessions.
const ISCSI_SESSIONS: u64 = 128;
/// Number of commands in flight for each session.
const DEPTH: u64 = 32;
const BLOCK: u64 = 4096;
const IQN: &str = "iqn.2026-01.com.example:scale";

#[test]
fn many_sessions_use_deep_queues() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let text = format!(
        "identity: scale\nbackends: {{ ram: {{ kind: ram, size: {}MiB }} }}\n\
         targets:\n  - name: scale\n    iqn: {IQN}\n    portals:\n      \
         - {{ protocol: iscsi, listen: 127.0.0.85 }}\n      \
         - {{ protocol: iser, listen: 127.0.0.85 }}\n    \
         luns: {{ 0: ram }}\n    access: open\nworkers: {{ count: 2 }}\n\
         limits: {{ max_sessions: 512, sessions_per_address: 512, queue_depth: {DEPTH} }}\n",
        (2 * ISCSI_SESSIONS * DEPTH * BLOCK) >> 20
    );
    let server = Server::start(&Config::parse(&text, "scale.yaml").unwrap()).unwrap();
    // A single engine doesn't have enough completion queues for all sessions.
    let clients = [86, 87].map(|host| {
        Client::builder()
            // Each session also needs a buffer to identify the unit.
            .pool((ISCSI_SESSIONS * (DEPTH + 1) * BLOCK) as usize)
            .open(format!("127.0.0.{host}").parse().unwrap())
            .unwrap()
    });
    let luns: Vec<_> = (0..2 * ISCSI_SESSIONS)
        .map(|n| {
            let scheme = ["iscsi", "iser"][(n % 2) as usize];
            let url: IscsiUrl =
                format!("{scheme}://127.0.0.85/{IQN}/0?initiator=iqn.2026-01.com.example:host{n}")
                    .parse()
                    .unwrap();
            let client = &clients[(n / ISCSI_SESSIONS) as usize];
            block_on(block_on(client.connect(&url)).unwrap().lun(0)).unwrap()
        })
        .collect();
    for round in 0..4 {
        let at = |n: u64, i: u64| (n * DEPTH + i) * BLOCK;
        let writes: Vec<_> = (0..DEPTH)
            .flat_map(|i| (0..).zip(&luns).map(move |(n, lun)| (n, i, lun)))
            .map(|(n, i, lun)| {
                let buffer = block_on(lun.buffers().take_buffer(BLOCK as usize));
                let data = pattern(n << 8 | i, round, BLOCK as usize);
                buffer.slice().write(0, &data);
                let io = lun.write_io(at(n, i), buffer, false).unwrap();
                lun.session().submit(io)
            })
            .collect();
        for write in writes {
            Lun::completed_buffer(block_on(write)).unwrap();
        }
        let reads: Vec<_> = (0..DEPTH)
            .flat_map(|i| (0..).zip(&luns).map(move |(n, lun)| (n, i, lun)))
            .map(|(n, i, lun)| {
                let buffer = block_on(lun.buffers().take_buffer(BLOCK as usize));
                let io = lun.read_io(at(n, i), buffer).unwrap();
                (n, i, lun.session().submit(io))
            })
            .collect();
        for (n, i, read) in reads {
            let found = Lun::completed_buffer(block_on(read))
                .unwrap()
                .slice()
                .to_vec();
            assert!(
                found == pattern(n << 8 | i, round, BLOCK as usize),
                "session {n}, command {i}, round {round}"
            );
        }
    }
    assert_eq!(server.sessions(), 2 * ISCSI_SESSIONS as usize);
    let sessions: Vec<_> = server
        .snapshot()
        .into_iter()
        .flat_map(|s| s.iscsi_sessions)
        .collect();
    for (name, iser) in [("TCP", false), ("iSER", true)] {
        let memory = sessions
            .iter()
            .filter(|s| s.provider.is_some() == iser)
            .map(|s| s.memory);
        assert_eq!(memory.clone().count() as u64, ISCSI_SESSIONS, "{name}");
        let memory = memory.max().unwrap();
        println!(
            "result: memory of one session over {name} with a queue depth of {DEPTH}: {} KiB",
            memory >> 10
        );
        assert!(memory < 4 << 20, "{memory} bytes for a session over {name}");
    }
    drop(luns);
    eventually("the sessions end", Duration::from_secs(60), || {
        server.sessions() == 0
    });
    server.shutdown().unwrap();
}

/// Number of sessions that are open at the same time during this test.
const OPEN: usize = 4;

/// Maximum number of bytes in use that may be left by a session on average. Queue pair numbers are
/// not reused immediately on either side, and tables that double their size can be twice as large
/// as needed.
const LEFT: usize = 40;

/// Number of bytes by which memory in use can change because of messages in flight.
const SWAY: usize = 128 << 10;

/// Maximum growth of resident memory in bytes while thousands of sessions are connected and
/// disconnected. If mapped memory was leaked, with at least a page per session, it would be larger
/// than this. Memory cached by the allocator is smaller.
const GROWTH: usize = 8 << 20;

/// Opens a session, using a different protocol each time and a unique name, then reads and writes
/// data.
fn come(client: &Client, addr: SocketAddr, n: u64) -> Lun {
    let who = 0x1000 + n;
    let lun = match ["srp", "iscsi", "iser"][(n % 3) as usize] {
        "srp" => {
            let session = block_on(client.connect(&url(addr, who))).unwrap();
            assert_eq!(block_on(session.luns()).unwrap().len(), 1);
            block_on(session.lun(0))
        }
        scheme => {
            let host = addr.ip();
            let name = format!("iqn.2026-01.com.example:host{who}");
            let url = format!("{scheme}://{host}/{IQN}/0?initiator={name}&queue_size=8");
            let url: IscsiUrl = url.parse().unwrap();
            let session = block_on(client.connect(&url)).unwrap();
            assert_eq!(block_on(session.luns()).unwrap().len(), 1);
            block_on(session.lun(0))
        }
    }
    .unwrap();
    let data = pattern(who, n, 8192);
    let buffer = block_on(lun.buffers().take_buffer(data.len()));
    buffer.slice().write(0, &data);
    let buffer = block_on(lun.write(n % 64 * 8192, buffer, false)).unwrap();
    buffer.slice().fill(0, data.len(), 0);
    let buffer = block_on(lun.read(n % 64 * 8192, buffer)).unwrap();
    assert!(buffer.slice().to_vec() == data, "session {n}");
    lun
}

#[test]
fn short_sessions_leave_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cycles: u64 = std::env::var("RISER_CONNECT_CYCLES").map_or(200, |n| n.parse().unwrap());
    let text = format!(
        "identity: scale\nbackends: {{ ram: {{ kind: ram, size: 1MiB }} }}\n\
         targets:\n  - name: scale\n    iqn: {IQN}\n    portals:\n      \
         - {{ protocol: srp, listen: 127.0.0.83 }}\n      \
         - {{ protocol: iscsi, listen: 127.0.0.83 }}\n      \
         - {{ protocol: iser, listen: 127.0.0.83 }}\n    \
         luns: {{ 0: ram }}\n    access: open\nworkers: {{ count: 1 }}\n"
    );
    let server = Server::start(&Config::parse(&text, "scale.yaml").unwrap()).unwrap();
    let addr = SocketAddr::from(([127, 0, 0, 83], 5555));
    let client = Client::builder()
        .pool(4 << 20)
        .open("127.0.0.84".parse().unwrap())
        .unwrap();
    let run = |sessions: Range<u64>| {
        let mut open = VecDeque::new();
        for n in sessions {
            open.push_back(come(&client, addr, n));
            if open.len() > OPEN {
                open.pop_front();
            }
        }
        drop(open);
        eventually("the sessions end", Duration::from_secs(60), || {
            server.sessions() == 0
        });
    };
    // Use the minimum of several samples, because resources of a session that was just closed may
    // not have been released yet.
    let looks = |from: u64| {
        let look = |n: u64| {
            run(from + n * 20..from + n * 20 + 20);
            (ALLOCATOR.in_use(), resident())
        };
        (0..5).map(look).min().unwrap()
    };
    // After the first sessions, the buffers for the largest queues in this process have been
    // allocated.
    let first = (cycles / 10).max(300);
    run(0..first);
    let before = looks(first);
    let started = Instant::now();
    run(first..first + cycles);
    let took = started.elapsed();
    let after = looks(first + cycles);
    let in_use = after.0.saturating_sub(before.0);
    let grown = after.1.saturating_sub(before.1);
    println!(
        "result: {cycles} sessions opened and closed, {:.2} ms each; bytes in use grew by {} KiB, resident memory by {} KiB",
        took.as_secs_f64() * 1e3 / cycles as f64,
        in_use >> 10,
        grown >> 10
    );
    let most = SWAY + LEFT * cycles as usize;
    assert!(in_use < most, "{in_use} bytes more are in use");
    assert!(grown < GROWTH, "resident memory grew by {grown} bytes");
    server.shutdown().unwrap();
}

/// Returns the resident memory of this process in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm
        .split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<usize>()
        .unwrap()
        * 4096
}
