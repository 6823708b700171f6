//! Tests a disk that fails because its device was removed, and returns as another device.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use riser_scsi::step::BackendError;
use riser_target::backend::{Fault, FaultOn, Faults, open_all};
use riser_target::config::{Config, Location};
use riser_target::control::history::History;
use riser_target::server::Server;
use riser_target::server::handover::ServerState;
use riser_test_peers::open_target;
use riser_test_peers::tcp::Client;

const IQN: &str = "iqn.2026-01.com.example:demo";
/// A separate address for each test.
const HOSTS: [&str; 2] = ["127.97.2.1", "127.97.2.31"];

const GOOD: u8 = 0;
const CHECK_CONDITION: u8 = 2;

/// Returns a fault that removes the device at the first read of its second block.
fn gone() -> Fault {
    Fault {
        on: FaultOn::Read,
        offset: 512,
        len: 512,
        times: Some(1),
        delay: Duration::ZERO,
        error: Some(BackendError::NotReady),
    }
}

/// Starts a server for a disk with these faults.
fn start(dir: &Path, host: &str, faults: Vec<Fault>) -> Server {
    let portals = [("iscsi", format!("{host}:3290"))];
    let dir_name = dir.display();
    let disk = format!("a: {{ kind: file, path: {dir_name}/a, size: 1MiB, create: true }}");
    let text = open_target(IQN, &portals, &disk, "0: a", "workers: { count: 2 }\n");
    let mut config = Config::parse(&text, "test.yaml").unwrap();
    config.backends[0].spec.faults = Some(Arc::new(Faults::new(faults)));
    let history = History::open(&Location::At(dir.join("state"))).unwrap();
    Server::start_after(&config, &ServerState::default(), history.keepers()).unwrap()
}

fn read(client: &mut Client, block: u8) -> (u8, Vec<u8>) {
    client.command(&[0x28, 0, 0, 0, 0, block, 0, 0, 1, 0], false, 512, &[])
}

/// Reads the Device Identification VPD page.
fn names(client: &mut Client) -> Vec<u8> {
    let (status, page) = client.command(&[0x12, 1, 0x83, 1, 0, 0], false, 256, &[]);
    assert_eq!(status, GOOD);
    page
}

#[test]
fn removed_disk_is_opened_again() {
    let host = HOSTS[0];
    let dir = std::env::temp_dir().join(format!("riserd-gone-disk-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir(&dir).unwrap();
    let mut server = start(&dir, host, vec![gone()]);
    let to: SocketAddr = format!("{host}:3290").parse().unwrap();
    let mut client = Client::ready_at(to, IQN, 1);
    let before = names(&mut client);
    assert!(!server.check_resources() && server.problems().is_empty());

    assert_eq!(read(&mut client, 1).0, CHECK_CONDITION);
    assert!(server.check_resources());
    assert_eq!(server.problems().iter().count(), 1);
    // Either it's not available, or it's the same device, which is still locked.
    let opened = open_all(server.open_requests());
    server.retry(opened).unwrap();
    assert!(server.check_resources());

    // Now there is another device with the same path.
    let mut image = vec![7; 512];
    image.resize(1 << 20, 0);
    std::fs::write(dir.join("new"), &image).unwrap();
    std::fs::rename(dir.join("new"), dir.join("a")).unwrap();
    let opened = open_all(server.open_requests());
    server.retry(opened).unwrap();
    assert!(!server.check_resources() && server.problems().is_empty());
    // The session receives unit attentions and continues.
    let mut attentions = 0;
    let data = loop {
        match read(&mut client, 0) {
            (GOOD, data) => break data,
            _ => attentions += 1,
        }
        assert!(attentions < 4, "it does not come back to a session");
    };
    assert!(attentions > 0, "what was not flushed may be lost");
    assert_eq!(data, [7; 512]);
    assert_eq!(names(&mut client), before);
    server.shutdown().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
}

/// The daemon is restarted before the device is available again.
#[test]
fn restart_remembers_loss_of_removed_disk() {
    let host = HOSTS[1];
    let dir = std::env::temp_dir().join(format!("riserd-gone-restart-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir(&dir).unwrap();
    let generation = |server: &Server| server.unit_on("a").unwrap().lu.config().cache_generation;
    let mut server = start(&dir, host, vec![gone()]);
    let before = generation(&server);
    let to: SocketAddr = format!("{host}:3290").parse().unwrap();
    let mut client = Client::ready_at(to, IQN, 1);
    assert_eq!(read(&mut client, 1).0, CHECK_CONDITION);
    assert!(server.check_resources());
    std::fs::rename(dir.join("a"), dir.join("away")).unwrap();
    let opened = open_all(server.open_requests());
    server.retry(opened).unwrap();
    drop(client);
    std::fs::rename(dir.join("away"), dir.join("a")).unwrap();
    server.shutdown().unwrap();
    let server = start(&dir, host, Vec::new());
    assert_ne!(generation(&server), before);
    server.shutdown().unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
}
