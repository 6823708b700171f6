//! Tests that a failed flush is remembered after the server has exited.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use riser_scsi::step::BackendError;
use riser_target::backend::{Fault, FaultOn, Faults};
use riser_target::config::{Config, Location};
use riser_target::control::history::History;
use riser_target::server::handover::ServerState;
use riser_target::server::{Server, ServerError};
use riser_test_peers::open_target;
use riser_test_peers::tcp::Client;

const IQN: &str = "iqn.2026-01.com.example:demo";

const GOOD: u8 = 0;
const CHECK_CONDITION: u8 = 2;

const HOST: &str = "127.97.1.1";

fn start(dir: &Path, faults: Vec<Fault>) -> Server {
    let portals = [("iscsi", format!("{HOST}:3290"))];
    let dir_name = dir.display();
    let disk = format!("a: {{ kind: file, path: {dir_name}/a, size: 1MiB, create: true }}");
    let text = open_target(IQN, &portals, &disk, "0: a", "workers: { count: 2 }\n");
    let mut config = Config::parse(&text, "test.yaml").unwrap();
    config.backends[0].spec.faults = Some(Arc::new(Faults::new(faults)));
    let history = History::open(&Location::At(dir.join("state"))).unwrap();
    Server::start_after(&config, &ServerState::default(), history.keepers()).unwrap()
}

/// Sends WRITE and SYNCHRONIZE CACHE. Returns their status.
fn write_and_flush() -> (u8, u8) {
    let to: SocketAddr = format!("{HOST}:3290").parse().unwrap();
    let mut client = Client::ready_at(to, IQN, 1);
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let written = client.command(&write, true, 512, &[1; 512]).0;
    let flushed = client.command(&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], false, 0, &[]);
    (written, flushed.0)
}

/// Returns the files with saved failures.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir.join("state")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.to_string_lossy().contains("flush-failure"))
        .collect()
}

#[test]
fn restart_keeps_failed_flush() {
    let dir = std::env::temp_dir().join(format!("riserd-failed-flush-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir(&dir).unwrap();
    let once = Fault {
        on: FaultOn::Flush,
        offset: 0,
        len: u64::MAX,
        times: Some(1),
        delay: Duration::ZERO,
        error: Some(BackendError::Medium { offset: None }),
    };
    let server = start(&dir, vec![once]);
    assert_eq!(write_and_flush(), (GOOD, CHECK_CONDITION));
    assert!(matches!(server.shutdown(), Err(ServerError::Flush(_))));
    let remembered = files(&dir);
    assert_eq!(remembered.len(), 1);

    // By now, a flush would be successful.
    let server = start(&dir, Vec::new());
    assert_eq!(write_and_flush(), (GOOD, CHECK_CONDITION));
    assert_eq!(server.clear_flush_failure(None).unwrap(), 1);
    assert_eq!(write_and_flush(), (GOOD, GOOD));
    assert!(server.shutdown().is_ok());
    assert!(files(&dir).is_empty());

    let server = start(&dir, Vec::new());
    assert_eq!(write_and_flush(), (GOOD, GOOD));
    assert!(server.shutdown().is_ok());

    // If the file can't be read, we must assume that there was a failure.
    std::fs::write(&remembered[0], "{").unwrap();
    let server = start(&dir, Vec::new());
    assert_eq!(write_and_flush(), (GOOD, CHECK_CONDITION));
    assert_eq!(server.clear_flush_failure(None).unwrap(), 1);
    assert_eq!(write_and_flush(), (GOOD, GOOD));
    assert!(server.shutdown().is_ok());
    std::fs::remove_dir_all(&dir).unwrap();
}
