//! Tests an unavailable mount used for one disk of a daemon, with healthy disks on the same worker.

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use riser_scsi::iscsi::pdu::FromTarget;
use riser_test_peers::tcp::Client;
use riser_testkit::daemon::Daemon;
use riser_testkit::eventually;
use riser_testkit::hung_mount::{HungMount, Silence};
use riser_testkit::skip::skip;

const IQN: &str = "iqn.2026-01.org.example:mounts";

/// Timeout for steps that don't have to wait for the unavailable mount.
const PATIENCE: Duration = Duration::from_secs(60);

/// LUNs: the disk on this mount, and two healthy disks.
const DEAD: u8 = 0;
const FILE: u8 = 1;
const RAM: u8 = 2;

const GOOD: u8 = 0;
const BUSY: u8 = 8;

const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const FLUSH: [u8; 10] = [0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0];

struct Bench {
    daemon: Daemon,
    mount: HungMount,
    to: SocketAddr,
}

impl Bench {
    /// Skips the test and returns `None` if FUSE is not available.
    fn start(name: &str, address: &str) -> Option<Self> {
        let dir = std::env::temp_dir().join(format!("riserd-mount-{}-{name}", std::process::id()));
        let mount = HungMount::new(&dir, 8 << 20)
            .inspect_err(|error| skip(name, &error.to_string()))
            .ok()?;
        let text = format!(
            "backends:\n\
             \x20 dead: {{ kind: file, path: {} }}\n\
             \x20 file: {{ kind: file, path: {}/file, size: 8MiB, create: true }}\n\
             \x20 ram: {{ kind: ram, size: 8MiB }}\n\
             targets:\n\
             - name: t\n\
             \x20 iqn: {IQN}\n\
             \x20 portals: [{{ protocol: iscsi, listen: '{address}:3290' }}]\n\
             \x20 luns: {{ {DEAD}: dead, {FILE}: file, {RAM}: ram }}\n\
             \x20 access: open\n",
            mount.file().display(),
            std::env::temp_dir()
                .join(format!("riserd-admin-{}-{name}", std::process::id()))
                .display(),
        );
        Some(Self {
            daemon: Daemon::start_logging(name, &text),
            mount,
            to: format!("{address}:3290").parse().unwrap(),
        })
    }

    /// Logs in and clears the unit attentions of the new nexus.
    fn log_in(&self, isid: u8) -> Client {
        let mut client = Client::login_at(self.to, IQN, isid, None).unwrap();
        client.socket.set_read_timeout(Some(PATIENCE)).unwrap();
        for lun in [FILE, RAM] {
            status(&mut client, lun, &[0; 6], &[]);
        }
        client
    }

    fn problem(&self, field: &str) -> Option<String> {
        let status = self.daemon.json("status");
        let problems = status["problems"].as_array()?.iter();
        let mut dead = problems.filter(|problem| problem["name"] == "dead");
        Some(dead.next()?[field].as_str()?.to_owned())
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // The daemon can't exit before the mount was removed.
        self.mount.kill();
    }
}

/// Returns the status of the next response, with sense key, ASC and ASCQ.
fn response(client: &mut Client) -> (u8, Option<[u8; 3]>) {
    match client.receive().expect("a response") {
        (FromTarget::ScsiResponse(response), _, data) => {
            let sense = data.get(2..16);
            let sense = sense.map(|sense| [sense[2], sense[12], sense[13]]);
            (response.status, sense)
        }
        (FromTarget::DataIn(data), ..) => (data.status.expect("with status").status, None),
        (other, ..) => panic!("{other:?}"),
    }
}

fn status(client: &mut Client, lun: u8, cdb: &[u8], data: &[u8]) -> (u8, Option<[u8; 3]>) {
    let read = if cdb[0] == READ[0] { 512 } else { 0 };
    client.send_to(lun, cdb, data, read);
    response(client)
}

/// Completes many operations on both healthy disks.
fn use_healthy_disks(client: &mut Client) {
    for n in 0..50 {
        for lun in [FILE, RAM] {
            for (cdb, data) in [(WRITE, &[n; 512][..]), (READ, &[]), (FLUSH, &[])] {
                assert_eq!(status(client, lun, &cdb, data).0, GOOD, "{n}");
            }
        }
    }
}

fn check_dead_mount(name: &str, address: &str, silence: Silence) {
    let Some(bench) = Bench::start(name, address) else {
        return;
    };
    let mut client = bench.log_in(1);
    status(&mut client, DEAD, &[0; 6], &[]);
    assert_eq!(status(&mut client, DEAD, &WRITE, &[7; 512]).0, GOOD);
    assert_eq!(status(&mut client, DEAD, &FLUSH, &[]).0, GOOD);
    assert_eq!(bench.problem("state"), None);

    bench.mount.hang(silence);
    for n in 0..20 {
        let mut write = WRITE;
        write[5] = n;
        client.send_to(DEAD, &write, &[9; 512], 0);
    }
    let mut read = READ;
    read[5] = 100;
    client.send_to(DEAD, &read, &[], 512);
    client.send_to(DEAD, &FLUSH, &[], 0);
    eventually("the server has requests", PATIENCE, || {
        bench.mount.pending() > 0
    });
    use_healthy_disks(&mut bench.log_in(2));
    // The initiator drops its session, as Linux does, and logs in again.
    drop(client);
    let mut client = bench.log_in(1);
    use_healthy_disks(&mut client);
    assert_eq!(status(&mut client, DEAD, &[0; 6], &[]).0, BUSY);

    eventually("the hang is reported", PATIENCE, || {
        // An idle connection would have to respond to pings.
        use_healthy_disks(&mut client);
        bench.problem("state").as_deref() == Some("HANGING")
    });
    assert_eq!(bench.problem("cause").as_deref(), Some("hanging"));
    let ready = bench.daemon.http("GET /readyz");
    assert!(ready.starts_with("HTTP/1.1 503 "), "{ready}");
    assert!(ready.contains("backend dead: "), "{ready}");
    let metrics = bench.daemon.http("GET /metrics");
    let fault = "riser_backend_fault{backend=\"dead\",cause=\"hanging\"} 1\n";
    assert!(metrics.contains(fault), "{metrics}");
    let refused = bench.daemon.run_command(&["upgrade"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(error.contains("nothing has changed"), "{error}");
    assert_eq!(bench.daemon.json("status")["upgrades"], 0);
    use_healthy_disks(&mut client);

    // The process of the file server exits.
    bench.mount.kill();
    eventually("the replaced session is over", PATIENCE, || {
        status(&mut client, DEAD, &[0; 6], &[]).0 != BUSY
    });
    eventually("the sense is that of a lost device", PATIENCE, || {
        matches!(status(&mut client, DEAD, &READ, &[]), (2, Some([2, 4, _])))
    });
    eventually("the loss is reported", PATIENCE, || {
        use_healthy_disks(&mut client);
        bench.problem("cause").as_deref() != Some("hanging")
    });
    let error = bench.problem("error").expect("a problem");
    assert!(
        error.contains("dead") || error.contains("not connected"),
        "{error}"
    );
    use_healthy_disks(&mut client);
    let log = std::fs::read_to_string(bench.daemon.log()).unwrap();
    assert_eq!(
        log.matches("commands wait until it does").count(),
        1,
        "{log}"
    );

    let pid = bench.daemon.process.id().to_string();
    assert!(Command::new("kill").arg(&pid).status().unwrap().success());
    let mut bench = bench;
    eventually("the daemon ends", PATIENCE, || {
        bench.daemon.process.try_wait().unwrap().is_some()
    });
}

#[test]
fn hung_mount_delays_no_other_disk() {
    check_dead_mount("hung-mount", "127.81.6.1", Silence::Data);
}

/// Even stat(2) blocks, like on a network file system if the server is unavailable.
#[test]
fn lost_file_server_delays_no_other_disk() {
    check_dead_mount("lost-server", "127.81.6.2", Silence::All);
}
