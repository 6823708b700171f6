//! Tests reservations that persist through power loss when the daemon is killed or restarted.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use riser_target::backend::{Fault, FaultOn, Faults};
use riser_target::config::Config;
use riser_target::server::Server;
use riser_test_peers::open_target;
use riser_test_peers::tcp::Client;
use riser_testkit::daemon::{Daemon, RISERD};
use riser_testkit::eventually;

const IQN: &str = "iqn.2026-01.com.example:demo";

const GOOD: u8 = 0;
const CHECK_CONDITION: u8 = 2;
const RESERVATION_CONFLICT: u8 = 0x18;

const RESERVE: u8 = 1;
const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;
const REGISTER: u8 = 6;

const APTPL: u8 = 1;

/// Logs in with a separate initiator port and clears the unit attention of the new nexus.
fn log_in(host: &str, isid: u8) -> Client {
    let to: SocketAddr = format!("{host}:3290").parse().unwrap();
    let mut client = Client::login_at(to, IQN, isid, None).unwrap();
    client.command(&[0; 6], false, 0, &[]);
    client
}

fn write(client: &mut Client) -> u8 {
    let cdb = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    client.command(&cdb, true, 512, &[1; 512]).0
}

fn send_change(client: &mut Client, action: u8, kind: u8, keys: (u64, u64), flags: u8) {
    let mut list = [0; 24];
    list[..8].copy_from_slice(&keys.0.to_be_bytes());
    list[8..16].copy_from_slice(&keys.1.to_be_bytes());
    list[20] = flags;
    let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
    client.send_command(&cdb, true, 24, &list);
}

fn change(client: &mut Client, action: u8, kind: u8, keys: (u64, u64), flags: u8) -> u8 {
    send_change(client, action, kind, keys, flags);
    client.receive_response().0
}

fn keys(client: &mut Client) -> Vec<u64> {
    let cdb = [0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0];
    let (status, data) = client.command(&cdb, false, 256, &[]);
    assert_eq!(status, GOOD);
    let keys = data[8..].chunks(8);
    keys.map(|key| u64::from_be_bytes(key.try_into().unwrap()))
        .collect()
}

#[test]
fn fencing_survives_killed_daemon() {
    let host = "127.97.0.1";
    let mut daemon = Daemon::start("fenced", host);
    let (mut one, mut two) = (log_in(host, 1), log_in(host, 2));
    for (client, key) in [(&mut one, 0xa), (&mut two, 0xb)] {
        assert_eq!(change(client, REGISTER, 0, (0, key), APTPL), GOOD);
    }
    assert_eq!(change(&mut two, RESERVE, 5, (0xb, 0), 0), GOOD);
    assert_eq!(change(&mut two, PREEMPT, 5, (0xb, 0xa), 0), GOOD);
    daemon.restart(&[]);
    // This is the first command.
    let mut one = log_in(host, 1);
    assert_eq!(write(&mut one), RESERVATION_CONFLICT);
    let mut two = log_in(host, 2);
    assert_eq!(keys(&mut two), [0xb]);
    assert_eq!(write(&mut two), GOOD);
    // The LUN is removed and added again.
    daemon.configure(host, "{ 1: b }");
    assert!(daemon.run_command(&["reload"]).status.success());
    daemon.configure(host, "{ 0: a }");
    assert!(daemon.run_command(&["reload"]).status.success());
    let mut one = log_in(host, 1);
    assert_eq!(write(&mut one), RESERVATION_CONFLICT);
    // Without APTPL, the reservation is released by the next start.
    let mut two = log_in(host, 2);
    assert_eq!(change(&mut two, REGISTER, 0, (0, 0xb), 0), GOOD);
    daemon.restart(&[]);
    assert_eq!(write(&mut log_in(host, 1)), GOOD);
}

/// After the daemon was killed, all acknowledged registrations must exist, and possibly the pending
/// one.
#[test]
fn killed_daemon_keeps_acknowledged_registrations() {
    let host = "127.97.0.2";
    let mut daemon = Daemon::start("killed", host);
    let mut key = 0;
    for round in 0..4 {
        let mut client = log_in(host, 1);
        let process = daemon.process.id();
        let responses = Arc::new(AtomicU64::new(0));
        let killer = std::thread::spawn({
            let responses = Arc::clone(&responses);
            move || {
                eventually("changes get a response", Duration::from_secs(60), || {
                    responses.load(Ordering::Relaxed) >= 3 + 5 * round
                });
                let pid = rustix::process::Pid::from_raw(process as i32).unwrap();
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            }
        });
        // If the connection is closed, the client panics, so the loop is left.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            loop {
                send_change(&mut client, REGISTER, 0, (0, key + 1), APTPL);
                assert_eq!(client.receive_response().0, GOOD);
                key += 1;
                responses.fetch_add(1, Ordering::Relaxed);
            }
        }));
        let _: Result<(), _> = result;
        killer.join().unwrap();
        daemon.process.wait().unwrap();
        daemon.run(&[]);
        let kept = keys(&mut log_in(host, 1));
        let one_more = key + 1;
        assert!(
            kept == [key] || kept == [one_more],
            "{key} was acknowledged, found {kept:x?}"
        );
        key = kept[0];
    }
}

/// If a file is damaged, we don't know which initiators may write: this unit is not ready, but all
/// other units must be served.
#[test]
fn unit_without_readable_reservations_is_not_ready() {
    let host = "127.97.0.3";
    let mut daemon = Daemon::start("damaged", host);
    daemon.configure(host, "{ 0: a, 1: b }");
    assert!(daemon.run_command(&["reload"]).status.success());
    let mut one = log_in(host, 1);
    assert_eq!(change(&mut one, REGISTER, 0, (0, 0xa), APTPL), GOOD);
    daemon.kill();
    let files = std::fs::read_dir(daemon.dir.join("state")).unwrap();
    let mut files = files.map(|entry| entry.unwrap().path());
    let file = files.find(|path| path.to_string_lossy().contains("reservations-"));
    let file = file.unwrap();
    let intact = std::fs::read(&file).unwrap();
    std::fs::write(&file, "{").unwrap();
    daemon.run(&[]);
    let mut one = log_in(host, 1);
    assert_eq!(write(&mut one), CHECK_CONDITION);
    let problems = daemon.json("status")["problems"].clone();
    let problems = problems.as_array().unwrap();
    assert_eq!(problems.len(), 1, "{problems:?}");
    let why = problems[0].to_string();
    assert!(why.contains("reservations-"), "{why}");
    // The unit is served automatically when they can be read.
    std::fs::write(&file, intact).unwrap();
    eventually("it is tried again", Duration::from_secs(30), || {
        daemon.json("status").get("problems").is_none()
    });
    // Sessions continue, and initiators don't need to identify the disk again.
    let mut attentions = 0;
    while write(&mut one) != GOOD {
        attentions += 1;
        assert!(attentions < 4, "it does not come back to a session");
    }
    let mut one = log_in(host, 1);
    assert_eq!(keys(&mut one), [0xa]);
    assert_eq!(write(&mut one), GOOD);
    daemon.kill();

    // With `strict`, the daemon doesn't start.
    std::fs::write(&file, "{").unwrap();
    let config = daemon.dir.join("riserd.yaml");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("strict: true\n{text}")).unwrap();
    let refused = std::process::Command::new(&*RISERD)
        .args(["run", "--config"])
        .arg(config)
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("reservations-"), "{said}");
}

/// Returns faults that delay one write to each of these blocks for longer than a test.
fn stuck_writes(blocks: &[u64]) -> Arc<Faults> {
    let stuck = |block: &u64| Fault {
        on: FaultOn::Write,
        offset: block * 512,
        len: 512,
        times: Some(1),
        delay: Duration::from_secs(600),
        error: None,
    };
    Arc::new(Faults::new(blocks.iter().map(stuck).collect()))
}

/// PREEMPT AND ABORT aborts disk operations of the preempted initiator, and must not wait for other
/// operations.
#[test]
fn preempt_and_abort_aborts_preempted_commands() {
    let host = "127.97.0.4";
    let portals = [("iscsi", format!("{host}:3290"))];
    let (disk, workers) = ("a: { kind: ram, size: 1MiB }", "workers: { count: 2 }\n");
    let text = open_target(IQN, &portals, disk, "0: a", workers);
    let mut config = Config::parse(&text, "test.yaml").unwrap();
    config.backends[0].spec.faults = Some(stuck_writes(&[1, 2]));
    let server = Server::start(&config).unwrap();
    let [mut one, mut two, mut three] = [1, 2, 3].map(|isid| log_in(host, isid));
    for (client, key) in [(&mut one, 0xa), (&mut two, 0xb), (&mut three, 0xc)] {
        assert_eq!(change(client, REGISTER, 0, (0, key), 0), GOOD);
    }
    assert_eq!(change(&mut two, RESERVE, 5, (0xb, 0), 0), GOOD);
    for (client, block) in [(&mut one, 1), (&mut three, 2)] {
        let cdb = [0x2a, 0, 0, 0, 0, block, 0, 0, 1, 0];
        client.send_command(&cdb, true, 512, &[1; 512]);
        // Later commands on the same connection are completed first.
        assert_eq!(keys(client).len(), 3);
    }
    assert_eq!(change(&mut two, PREEMPT_AND_ABORT, 5, (0xb, 0xa), 0), GOOD);
    let read = |client: &mut Client, block| {
        let cdb = [0x28, 0, 0, 0, 0, block, 0, 0, 1, 0];
        client.command(&cdb, false, 512, &[])
    };
    assert_eq!(read(&mut two, 1), (GOOD, vec![0; 512]));
    assert_eq!(keys(&mut two), [0xb, 0xc]);
    // The write is completed with TASK ABORTED. Then there is a unit attention, followed by the
    // conflict.
    assert_eq!(one.receive_response(), (0x40, Vec::new()));
    assert_eq!(one.command(&[0; 6], false, 0, &[]).0, CHECK_CONDITION);
    assert_eq!(write(&mut one), RESERVATION_CONFLICT);
    assert_eq!(write(&mut three), GOOD);
    server.shutdown().unwrap();
}
