//! Measures memory used by sessions in a real `riserd`, using sessions with a deep queue for each
//! protocol, and a thousand idle sessions. We check resident memory, which only includes the used
//! part of rings and queues.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints results of the test")]

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use riser_block::task::block_on;
use riser_initiator::engine::Client;
use riser_initiator::lun::Lun;
use riser_initiator::url::{IscsiUrl, SrpUrl};
use riser_testkit::eventually;
use riser_testkit::programs::directory;

const IQN: &str = "iqn.2026-01.com.example:memory";
const FABRICS: [&str; 3] = ["srp", "iscsi", "iser"];

/// Number of commands in a deep session.
const DEPTH: u64 = 128;
/// Size of each command in bytes. A write fits in a single message and a single receive buffer on
/// the target.
const BLOCK: u64 = 4096;
/// Number of deep sessions.
const DEEP: u64 = 8;
/// Every session writes and reads the same region again, so that a disk in memory doesn't grow.
const REGION: u64 = DEPTH * BLOCK;
/// Maximum memory for a deep session in bytes.
const OF_DEEP: u64 = 3 << 19;

/// Total number of idle sessions for all protocols.
const IDLE: u64 = 1000;
/// Number of sessions per initiator process.
const OF_CLIENT: u64 = 60;
/// Maximum memory for all idle sessions in bytes.
const OF_IDLE: u64 = 128 << 20;

/// A daemon with a separate address.
struct Daemon {
    process: Child,
    dir: PathBuf,
    host: String,
}

impl Daemon {
    fn start(host: String, workers: u32) -> Self {
        let dir = std::env::temp_dir().join(format!("riser-mem-{}-{host}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (socket, state) = (dir.join("admin.sock"), dir.join("state"));
        // Disable memory shared with this process, because its rings belong to the processes and
        // not to the sessions.
        let text = format!(
            "backends: {{ a: {{ kind: ram, size: {}KiB }} }}\n\
             targets:\n  - name: memory\n    iqn: {IQN}\n    portals:\n      \
             - {{ protocol: srp, listen: {host} }}\n      \
             - {{ protocol: iscsi, listen: {host} }}\n      \
             - {{ protocol: iser, listen: {host} }}\n    luns: {{ 0: a }}\n    access: open\n\
             limits: {{ max_sessions: 1200, sessions_per_address: 1200, queue_depth: {DEPTH} }}\n\
             transport: {{ provider: roce, shm: false }}\n\
             admin: {{ socket: {} }}\nstate: {{ directory: {} }}\nworkers: {{ count: {workers} }}\n",
            (REGION * DEEP) >> 10,
            socket.display(),
            state.display()
        );
        let config = dir.join("riserd.yaml");
        std::fs::write(&config, text).unwrap();
        let log = std::fs::File::create(dir.join("log")).unwrap();
        let process = Command::new(directory().join("riserd"))
            .args(["run", "--config"])
            .arg(&config)
            .env_remove("RUST_LOG")
            .stderr(Stdio::from(log))
            .spawn()
            .unwrap();
        let daemon = Self { process, dir, host };
        eventually("the daemon serves", Duration::from_secs(20), || {
            socket.exists()
        });
        daemon
    }

    /// Returns the resident memory of the daemon in bytes.
    fn resident(&self) -> u64 {
        let path = format!("/proc/{}/status", self.process.id());
        let status = std::fs::read_to_string(path).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        kib.unwrap().parse::<u64>().unwrap() << 10
    }

    /// Opens a session using a new initiator.
    fn open(&self, client: &Client, fabric: &str, who: u64, depth: u64) -> Lun {
        let host = &self.host;
        let session = match fabric {
            "srp" => {
                let url = format!("srp://{host}/0?initiator_ext={who:x}&queue_size={depth}");
                block_on(client.connect(&url.parse::<SrpUrl>().unwrap()))
            }
            scheme => {
                let name = format!("iqn.2026-01.com.example:host{who}");
                let url = format!("{scheme}://{host}/{IQN}/0?initiator={name}&queue_size={depth}");
                block_on(client.connect(&url.parse::<IscsiUrl>().unwrap()))
            }
        };
        block_on(session.unwrap().lun(0)).unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn client(host: &str, pool: u64) -> Client {
    let builder = Client::builder().pool(pool as usize);
    builder.open(host.parse().unwrap()).unwrap()
}

/// Writes and reads the region of every session, using all commands of all sessions at the same
/// time.
fn work(luns: &[Lun], len: u64) {
    let places = |lun: u64| (0..DEPTH).map(move |i| (lun % DEEP) * REGION + i * BLOCK % REGION);
    let all = || {
        (0..)
            .zip(luns)
            .flat_map(move |(n, lun)| places(n).map(move |at| (at, lun)))
    };
    let end = DEEP * REGION - len;
    let writes: Vec<_> = all()
        .map(|(at, lun)| {
            let buffer = block_on(lun.buffers().take_buffer(len as usize));
            buffer.slice().fill(0, len as usize, at as u8);
            let io = lun.write_io(at.min(end), buffer, false).unwrap();
            lun.session().submit(io)
        })
        .collect();
    for write in writes {
        Lun::completed_buffer(block_on(write)).unwrap();
    }
    let reads: Vec<_> = all()
        .map(|(at, lun)| {
            let buffer = block_on(lun.buffers().take_buffer(len as usize));
            let io = lun.read_io(at.min(end), buffer).unwrap();
            lun.session().submit(io)
        })
        .collect();
    for read in reads {
        Lun::completed_buffer(block_on(read)).unwrap();
    }
}

/// Opens deep sessions for a protocol. Before this, we open other sessions so that the daemon has
/// already allocated its disk, data buffers and the receive buffers of its device. Contexts are for
/// commands and are shared by all sessions. So the sessions need to be deep at the same time, and
/// the sessions before must either use a protocol with different contexts or not be deep.
fn deep(host: u8, fabric: &str) {
    let daemon = Daemon::start(format!("127.89.0.{host}"), 1);
    let other = if fabric == "srp" { "iscsi" } else { "srp" };
    let first = client(&format!("127.89.1.{host}"), 64 << 20);
    // Use the same total amount of data as in all sessions below.
    let before = [daemon.open(&first, other, 1, DEPTH)];
    for _ in 0..4 {
        work(&before, DEEP * BLOCK);
    }
    let shallow = daemon.open(&first, fabric, 2, 1);
    for n in 0..64 {
        let buffer = block_on(shallow.buffers().take_buffer(128 << 10));
        let at = n % 4 * (128 << 10);
        let buffer = block_on(shallow.write(at, buffer, false)).unwrap();
        block_on(shallow.read(at, buffer)).unwrap();
    }
    let second = client(&format!("127.89.2.{host}"), 64 << 20);
    let resident = daemon.resident();
    let luns: Vec<_> = (0..DEEP)
        .map(|n| daemon.open(&second, fabric, 0x10 + n, DEPTH))
        .collect();
    for _ in 0..8 {
        work(&luns, BLOCK);
    }
    let each = daemon.resident().saturating_sub(resident) / DEEP;
    println!(
        "result: resident memory of one session over {fabric} with {DEPTH} commands under way: {} KiB",
        each >> 10
    );
    assert!(each <= OF_DEEP, "{each} bytes for a session over {fabric}");
}

#[test]
fn deep_srp_session_uses_little_memory() {
    deep(1, "srp");
}

#[test]
fn deep_iscsi_session_uses_little_memory() {
    deep(2, "iscsi");
}

#[test]
fn deep_iser_session_uses_little_memory() {
    deep(3, "iser");
}

#[test]
fn idle_sessions_use_little_memory() {
    let daemon = Daemon::start("127.89.0.4".to_owned(), 2);
    // Keep one session for each protocol open, so that initialization in the daemon is not counted
    // for the other sessions.
    let first = client("127.89.1.4", 4 << 20);
    let use_it = |lun: &Lun| {
        let buffer = block_on(lun.buffers().take_buffer(8192));
        let buffer = block_on(lun.write(0, buffer, false)).unwrap();
        block_on(lun.read(0, buffer)).unwrap();
    };
    let open = |client: &Client, n: u64| {
        let lun = daemon.open(client, FABRICS[(n % 3) as usize], 0x1000 + n, 8);
        use_it(&lun);
        lun
    };
    let before: Vec<_> = (0..6).map(|n| open(&first, n)).collect();
    let resident = daemon.resident();
    let clients: Vec<_> = (0..IDLE.div_ceil(OF_CLIENT))
        .map(|n| client(&format!("127.89.3.{}", n + 1), 4 << 20))
        .collect();
    let luns: Vec<_> = (0..IDLE)
        .map(|n| open(&clients[(n / OF_CLIENT) as usize], 6 + n))
        .collect();
    let all = daemon.resident().saturating_sub(resident);
    println!(
        "result: resident memory of {IDLE} idle sessions: {} KiB, {} KiB each",
        all >> 10,
        (all / IDLE) >> 10
    );
    assert!(all <= OF_IDLE, "{all} bytes for {IDLE} sessions");
    // These sessions must still be open.
    for lun in [&luns[0], &luns[IDLE as usize - 1], &before[0]] {
        use_it(lun);
    }
}
