//! Replaces the daemon's binary and restarts the daemon while initiators read and write using all
//! three protocols. This uses a real `riserd` process and real initiators on loopback.
//!
//! At the end, all acknowledged writes must be present, and no command must have failed.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints results of the test")]

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use riser_block::task::block_on;
use riser_initiator::engine::{Client, Session, SessionStatus};
use riser_initiator::lun::Lun;
use riser_initiator::url::TargetUrl;
use riser_testkit::eventually;
use riser_testkit::programs::{change_owner, directory, succeeded, without_rights};
use serde_json::Value;

const IQN: &str = "iqn.2026-01.com.example:disk";

/// Size of the region used for each load, in bytes.
const REGION: u64 = 1 << 20;

/// Timeout for any event that should happen without our help. Writes may have to wait for a real
/// disk that is also used by other processes.
const PATIENCE: Duration = Duration::from_secs(300);

/// A `riserd` with a file and a RAM disk, which are exported using all protocols on
/// 127.0.`number`.1.
struct Daemon {
    dir: PathBuf,
    number: u8,
    process: Option<Child>,
}

impl Daemon {
    fn new(number: u8) -> Self {
        let dir = std::env::temp_dir().join(format!("riser-up-{}-{number}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let (path, host) = (dir.display(), format!("127.0.{number}.1"));
        let portals = ["srp", "iser", "iscsi"]
            .map(|protocol| format!("{{ protocol: {protocol}, listen: {host} }}"));
        let text = format!(
            "identity: test\n\
             backends:\n  file: {{ kind: file, path: {path}/disk.img, size: 16MiB, create: true }}\n  \
             ram: {{ kind: ram, size: 16MiB }}\n\
             targets:\n  - name: t\n    iqn: {IQN}\n    portals: [{}]\n    \
             luns: {{ 0: file, 1: ram }}\n    access: open\n\
             workers: {{ count: 2 }}\n\
             admin: {{ socket: {path}/admin.sock }}\nstate: {{ directory: {path}/state }}\n",
            portals.join(", ")
        );
        fs::write(dir.join("riserd.yaml"), text).unwrap();
        let mut daemon = Self {
            dir,
            number,
            process: None,
        };
        daemon.serve();
        daemon
    }

    /// Starts the daemon and waits until it's ready.
    fn serve(&mut self) {
        let log = self.dir.join("log");
        let log = File::options().create(true).append(true).open(log).unwrap();
        change_owner(&self.dir);
        let process = without_rights(directory().join("riserd"))
            .args(["run", "--config"])
            .arg(self.dir.join("riserd.yaml"))
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.process = Some(process);
        eventually("the daemon serves", PATIENCE, || {
            self.dir.join("admin.sock").exists()
        });
    }

    fn pid(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    /// Restarts the daemon in the same way as `systemctl restart`.
    fn restart(&mut self) {
        let mut process = self.process.take().unwrap();
        let pid = process.id().to_string();
        succeeded(Command::new("kill").arg(pid));
        assert!(process.wait().unwrap().success());
        self.serve();
    }

    fn upgrade(&self) -> Value {
        let mut command = Command::new(directory().join("riserd"));
        command.args(["upgrade", "-o", "json", "--socket"]);
        command.arg(self.dir.join("admin.sock"));
        serde_json::from_str(&succeeded(&mut command)).unwrap()
    }

    fn url(&self, protocol: &str) -> TargetUrl {
        let target = match protocol {
            "srp" => "0".to_owned(),
            _ => format!("{IQN}/0"),
        };
        let url = format!("{protocol}://127.0.{}.1/{target}", self.number);
        url.parse().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
        if std::thread::panicking() {
            let log = fs::read_to_string(self.dir.join("log")).unwrap_or_default();
            println!("riserd: {log}");
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Sessions using all protocols, with a load for each disk.
struct Load {
    sessions: Vec<Session>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    done: Vec<Arc<AtomicU64>>,
}

impl Load {
    fn start(client: &Client, daemon: &Daemon, disks: &[u32]) -> Self {
        let mut load = Self {
            sessions: Vec::new(),
            stop: Arc::default(),
            threads: Vec::new(),
            done: Vec::new(),
        };
        for (place, protocol) in ["srp", "iser", "iscsi"].into_iter().enumerate() {
            let session = block_on(client.connect(daemon.url(protocol)));
            let session = session.unwrap_or_else(|e| panic!("{protocol}: {e}"));
            for disk in disks {
                let lun = block_on(session.lun(*disk)).unwrap();
                let (done, stop) = (Arc::<AtomicU64>::default(), Arc::clone(&load.stop));
                load.done.push(Arc::clone(&done));
                load.threads.push(std::thread::spawn(move || {
                    work(&lun, place as u64, &stop, &done);
                }));
            }
            load.sessions.push(session);
        }
        load
    }

    /// Waits until all loads have made progress.
    fn assert_progress(&self) {
        let at = || self.done.iter().map(|done| done.load(Ordering::Relaxed));
        let before: Vec<u64> = at().collect();
        eventually("every load continues", PATIENCE, || {
            assert!(self.threads.iter().all(|thread| !thread.is_finished()));
            at().zip(&before).all(|(now, before)| now >= before + 3)
        });
    }

    /// Stops the load and verifies all data that was written. Returns the number of writes.
    fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().unwrap();
        }
        self.done
            .iter()
            .map(|done| done.load(Ordering::Relaxed))
            .sum()
    }
}

/// Creates data that is different in each round.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

fn read(lun: &Lun, offset: u64, len: usize) -> Vec<u8> {
    let buffer = block_on(lun.buffers().take_buffer(len));
    block_on(lun.read(offset, buffer)).unwrap().slice().to_vec()
}

/// Reads and writes a region until `stop` is set, then reads the whole region.
fn work(lun: &Lun, place: u64, stop: &AtomicBool, done: &AtomicU64) {
    let start = place * REGION;
    let mut written = read(lun, start, REGION as usize);
    let mut round = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let len = 4096 << (round % 4);
        let at = (round % 32 * (32 << 10)) as usize;
        let data = pattern(round << 8 | place, len);
        let buffer = block_on(lun.buffers().take_buffer(len));
        buffer.slice().write(0, &data);
        block_on(lun.write(start + at as u64, buffer, false)).unwrap();
        written[at..at + len].copy_from_slice(&data);
        // Also check older data.
        let other = (round * 7 % 32 * (32 << 10)) as usize;
        let found = read(lun, start + other as u64, 4096);
        assert!(found == written[other..other + 4096], "round {round}");
        round += 1;
        done.fetch_add(1, Ordering::Relaxed);
    }
    assert!(
        read(lun, start, REGION as usize) == written,
        "what was written is there"
    );
}

fn client(number: u8) -> Client {
    let address = format!("127.0.{number}.2").parse().unwrap();
    Client::builder().pool(16 << 20).open(address).unwrap()
}

fn reconnects(load: &Load) -> Vec<u64> {
    let status = load.sessions.iter().map(Session::status);
    status.map(SessionStatus::reconnects).collect()
}

#[test]
fn programs_take_over_under_load() {
    let daemon = Daemon::new(113);
    let pid = daemon.pid();
    let client = client(113);
    let load = Load::start(&client, &daemon, &[0, 1]);
    for round in 1..=4u32 {
        load.assert_progress();
        let began = Instant::now();
        let done = daemon.upgrade();
        println!("result: upgrade {round} took {:?}", began.elapsed());
        assert_eq!(
            (&done["pid"], &done["upgrades"]),
            (&pid.into(), &round.into())
        );
    }
    load.assert_progress();
    let all = reconnects(&load);
    assert!(all.iter().all(|n| *n >= 4), "{all:?}");
    println!("result: 4 upgrades during {} writes and reads", load.end());
    client.shutdown();
}

#[test]
fn restarts_are_survived_under_load() {
    let mut daemon = Daemon::new(114);
    let client = client(114);
    let load = Load::start(&client, &daemon, &[0]);
    for _ in 0..4 {
        load.assert_progress();
        daemon.restart();
    }
    load.assert_progress();
    let all = reconnects(&load);
    assert!(all.iter().all(|n| *n >= 4), "{all:?}");
    println!("result: 4 restarts during {} writes and reads", load.end());
    client.shutdown();
}
