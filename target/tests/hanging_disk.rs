//! Tests servers with a hanging disk and healthy disks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::iscsi::pdu::FromTarget;
use riser_target::backend::{FaultOn, Faults};
use riser_target::config::Config;
use riser_target::server::{Server, ServerError};
use riser_test_peers::open_target;
use riser_test_peers::tcp::{Client, free_port};

const IQN: &str = "iqn.2026-01.org.example:hanging";

/// Timeout for everything that doesn't have to wait for the disk.
const PATIENCE: Duration = Duration::from_secs(40);

/// LUN 0 hangs while its WRITEs are held by the faults, LUN 1 is a RAM disk.
fn start(name: &str, port: u16) -> (Server, Arc<Faults>) {
    let image = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.img"));
    let portals = [("iscsi", format!("127.0.0.1:{port}"))];
    let backends = format!(
        "hung: {{ kind: file, path: {}, size: 8MiB, create: true }}, ram: {{ kind: ram, size: 8MiB }}",
        image.display(),
    );
    let workers = "workers: { count: 1 }\n";
    let text = open_target(IQN, &portals, &backends, "0: hung, 1: ram", workers);
    let mut config = Config::parse(&text, "test.yaml").unwrap();
    let hung = config.backends.iter_mut().find(|b| b.name == "hung");
    let faults = Arc::new(Faults::new(Vec::new()));
    hung.unwrap().spec.faults = Some(Arc::clone(&faults));
    (Server::start(&config).unwrap(), faults)
}

const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// Consumes the unit attentions of a new nexus.
fn clear_attentions(client: &mut Client) {
    for lun in [0, 1] {
        client.send_to(lun, &[0; 6], &[], 0);
        client.receive().unwrap();
    }
}

#[test]
fn drain_resumes_service_if_disk_hangs() {
    let port = free_port();
    let (mut server, faults) = start("drained", port);
    let mut client = Client::login(port, IQN, 1, None).unwrap();
    clear_attentions(&mut client);
    client.send_to(1, &WRITE, &[7; 512], 0);
    client.receive().unwrap();
    server.check_block_operations().unwrap();
    let since = Instant::now();
    faults.hold(FaultOn::Write, 0, 8 << 20);
    client.send_to(0, &WRITE, &[1; 512], 0);
    // The disk starts to hang after the check.
    let error = server.drain().unwrap_err();
    assert!(
        matches!(&error, ServerError::Hanging { backend, .. } if backend.contains("drained")),
        "{error}"
    );
    assert!(since.elapsed() < PATIENCE, "the drain waited for the disk");
    let error = server.check_block_operations().unwrap_err();
    assert!(matches!(error, ServerError::Hanging { .. }), "{error}");
    let login = Client::login(port, IQN, 2, None);
    let mut client = login.expect("logins are accepted again");
    clear_attentions(&mut client);
    client.send_to(1, &READ, &[], 512);
    let (_, _, data) = client.receive().unwrap();
    assert_eq!(data, vec![7; 512], "the RAM disk");
    // The disk is working again.
    faults.release();
    riser_testkit::eventually("no operation hangs", PATIENCE, || {
        server.check_block_operations().is_ok()
    });
    server.drain().unwrap();
    server.shutdown().unwrap();
}

/// An operation of a removed disk delays an upgrade until it completes.
#[test]
fn drain_waits_for_removed_disk() {
    let port = free_port();
    let (mut server, faults) = start("removed", port);
    let mut client = Client::login(port, IQN, 1, None).unwrap();
    clear_attentions(&mut client);
    faults.hold(FaultOn::Write, 0, 8 << 20);
    client.send_to(0, &WRITE, &[1; 512], 0);
    riser_testkit::eventually("the write is at the disk", PATIENCE, || {
        server.unit_on("hung").unwrap().tasks() == 1
    });
    let mut config = server.config().clone();
    config.targets.clear();
    config.backends.clear();
    server.change(config).unwrap();
    server.check_block_operations().unwrap();
    let release = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1));
        faults.release();
        Instant::now()
    });
    server.drain().unwrap();
    let drained = Instant::now();
    assert!(release.join().unwrap() <= drained);
    server.shutdown().unwrap();
}

/// The initiator drops its session, as Linux does, and logs in again.
#[test]
fn login_succeeds_while_disk_hangs() {
    const BUSY: u8 = 8;
    let port = free_port();
    let (server, faults) = start("relogin", port);
    let mut client = Client::login(port, IQN, 1, None).unwrap();
    clear_attentions(&mut client);
    faults.hold(FaultOn::Write, 0, 8 << 20);
    client.send_to(0, &WRITE, &[1; 512], 0);
    // Wait until the write is in progress.
    riser_testkit::eventually("the write is at the disk", PATIENCE, || {
        server.unit_on("hung").unwrap().tasks() == 1
    });
    drop(client);
    let since = Instant::now();
    let mut client = Client::login(port, IQN, 1, None).unwrap();
    assert!(since.elapsed() < Duration::from_secs(8), "login timeout");
    let mut status = |lun, cdb: &[u8], data: &[u8]| {
        client.send_to(lun, cdb, data, 0);
        let received = client
            .receive()
            .unwrap_or_else(|| panic!("no response to {cdb:02x?} at LUN {lun}"));
        match received.0 {
            FromTarget::ScsiResponse(response) => response.status,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(status(1, &[0; 6], &[]), 2, "I_T nexus loss");
    assert_eq!(status(1, &WRITE, &[2; 512]), 0);
    for _ in 0..3 {
        assert_eq!(status(0, &WRITE, &[2; 512]), BUSY);
    }
    faults.release();
    riser_testkit::eventually("the unit accepts commands", PATIENCE, || {
        status(0, &[0; 6], &[]) != BUSY
    });
    assert_eq!(status(0, &WRITE, &[2; 512]), 0);
    server.shutdown().unwrap();
}
