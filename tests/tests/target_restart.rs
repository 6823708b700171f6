//! Tests an initiator when the daemon is killed and started again: with an empty volatile cache,
//! with a different disk, or without a disk.

#![allow(missing_docs, reason = "a test")]

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use riser_block::task::block_on;
use riser_initiator::engine::{Client, LinkState, Session};
use riser_initiator::lun::{Lun, LunError};
use riser_initiator::paths::PathState;
use riser_initiator::request::RequestError;
use riser_initiator::session::Down;
use riser_initiator::url::TargetUrl;
use riser_target::backend::{Direct, Source, Spec, open_in_time};
use riser_testkit::programs::{Pair, tool};
use riser_testkit::{eventually, eventually_ok};

const IQN: &str = "iqn.2026-01.com.example:disk";
const PATIENCE: Duration = Duration::from_secs(120);
const PIECE: usize = 64 << 10;

/// Starts a daemon on 127.0.`network`.1 that exports a disk using all protocols.
fn pair(network: u8, backend: &str) -> Pair {
    let portals = ["srp", "iser", "iscsi"]
        .map(|protocol| format!("{{ protocol: {protocol}, listen: 127.0.{network}.1 }}"));
    let target = format!("iqn: {IQN}\nportals: [{}]", portals.join(", "));
    Pair::with_target(network, backend, &target)
}

fn url(network: u8, scheme: &str) -> TargetUrl {
    let target = match scheme {
        "srp" => "0".to_owned(),
        _ => format!("{IQN}/0"),
    };
    let url = format!("{scheme}://127.0.{network}.1/{target}");
    url.parse().unwrap()
}

fn connect(network: u8, url: &TargetUrl, scheme: &str) -> Session {
    let builder = Client::builder().pool(16 << 20);
    let client = match scheme {
        "iscsi" => builder.without_device(),
        _ => builder.open(format!("127.0.{network}.2").parse().unwrap()),
    };
    let client = client.unwrap();
    let session = eventually_ok("a login", PATIENCE, || {
        block_on(client.connect(url.clone()))
    });
    session.with_timeout(PATIENCE)
}

fn write(lun: &Lun, offset: u64, fua: bool) -> Result<(), LunError> {
    let buffer = block_on(lun.buffers().take_buffer(PIECE));
    buffer.slice().fill(0, PIECE, 0xbb);
    block_on(lun.write(offset, buffer, fua)).map(drop)
}

fn flush(lun: &Lun) -> Result<(), LunError> {
    block_on(lun.flush())
}

fn lost() -> Result<(), LunError> {
    Err(LunError::Request(RequestError::CacheLost))
}

fn restart(pair: &mut Pair) {
    pair.kill();
    pair.serve();
}

fn signal(pair: &Pair, signal: &str) {
    let process = pair.process().expect("it runs").to_string();
    tool("kill", [signal, &process]);
}

/// If a process is stopped, it doesn't send or reject anything, same as a host without a network
/// connection.
fn stopped_daemon_is_noticed(network: u8, scheme: &str) {
    let pair = pair(network, "{ kind: ram, size: 16MiB }");
    let session = connect(network, &url(network, scheme), scheme);
    let lun = block_on(session.lun(0)).unwrap();
    let is_over = AtomicBool::new(false);
    let took = thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    write(&lun, 0, false).unwrap();
                }
            });
        }
        thread::sleep(Duration::from_secs(1));
        signal(&pair, "-STOP");
        let begun = Instant::now();
        eventually("the end of the connection", PATIENCE, || {
            session.status().link() != LinkState::Live
        });
        let took = begun.elapsed();
        signal(&pair, "-CONT");
        is_over.store(true, Ordering::Relaxed);
        took
    });
    // The limit is less than five seconds, plus some time for a busy machine.
    assert!(took < Duration::from_secs(6), "{took:?}");
}

#[test]
fn stopped_daemon_is_noticed_over_srp() {
    stopped_daemon_is_noticed(153, "srp");
}

#[test]
fn stopped_daemon_is_noticed_over_iser() {
    stopped_daemon_is_noticed(154, "iser");
}

/// A RAM disk loses its data, so the next flush must fail, but only once and only if there was data
/// to lose.
fn a_restart_fails_a_flush_once(network: u8, scheme: &str) {
    let mut pair = pair(network, "{ kind: ram, size: 16MiB, write_cache: true }");
    let session = connect(network, &url(network, scheme), scheme);
    let lun = block_on(session.lun(0)).unwrap();
    write(&lun, 0, false).unwrap();
    restart(&mut pair);
    assert_eq!(flush(&lun), lost());
    assert_eq!(flush(&lun), Ok(()));
    // Another command is the first to use the target after the restart.
    write(&lun, 0, false).unwrap();
    restart(&mut pair);
    let buffer = block_on(lun.buffers().take_buffer(PIECE));
    block_on(lun.read(0, buffer)).unwrap();
    assert_eq!(flush(&lun), lost());
    // This data was already on the medium and not in the cache.
    write(&lun, 0, true).unwrap();
    restart(&mut pair);
    assert_eq!(flush(&lun), Ok(()));
    write(&lun, 0, false).unwrap();
    assert_eq!(flush(&lun), Ok(()));
    restart(&mut pair);
    assert_eq!(flush(&lun), Ok(()));
    assert!(session.status().reconnects() >= 4);
}

#[test]
fn restart_fails_one_flush_over_iscsi() {
    a_restart_fails_a_flush_once(141, "iscsi");
}

#[test]
fn restart_fails_one_flush_over_iser() {
    a_restart_fails_a_flush_once(142, "iser");
}

#[test]
fn restart_fails_one_flush_over_srp() {
    a_restart_fails_a_flush_once(143, "srp");
}

#[test]
fn restart_fails_one_flush_with_multipath() {
    let mut pair = {
        let portal = |host| format!("{{ protocol: iscsi, listen: 127.0.144.{host} }}");
        let target = format!("iqn: {IQN}\nportals: [{}, {}]", portal(1), portal(3));
        Pair::with_target(
            144,
            "{ kind: ram, size: 16MiB, write_cache: true }",
            &target,
        )
    };
    let url = format!("iscsi://127.0.144.1/{IQN}/0?portal=127.0.144.3");
    let session = connect(144, &url.parse().unwrap(), "iscsi");
    let live = |session: &Session| {
        let until = Instant::now() + PATIENCE;
        while session
            .status()
            .report()
            .paths
            .iter()
            .any(|p| p.state != PathState::Live)
        {
            assert!(
                Instant::now() < until,
                "{:?}",
                session.status().report().paths
            );
            thread::sleep(Duration::from_millis(10));
        }
    };
    let lun = block_on(session.lun(0)).unwrap();
    live(&session);
    write(&lun, 0, false).unwrap();
    restart(&mut pair);
    assert_eq!(flush(&lun), lost());
    // The other path also detects this loss, but it was already reported.
    write(&lun, 0, false).unwrap();
    live(&session);
    assert_eq!(flush(&lun), Ok(()));
}

/// The path that was in use is not available again, and another path is the first to detect the
/// lost cache.
#[test]
fn restart_fails_one_flush_on_new_path() {
    let portal = |host| format!("portals: [{{ protocol: iscsi, listen: 127.0.247.{host} }}]");
    let mut pair = Pair::with_target(
        247,
        "{ kind: ram, size: 16MiB, write_cache: true }",
        &format!("iqn: {IQN}\n{}", portal(1)),
    );
    let url = format!("iscsi://127.0.247.1/{IQN}/0?portal=127.0.247.3");
    let session = connect(247, &url.parse().unwrap(), "iscsi");
    let lun = block_on(session.lun(0)).unwrap();
    write(&lun, 0, false).unwrap();
    exchange(&mut pair, &portal(1), &portal(3));
    assert_eq!(flush(&lun), lost());
    assert_eq!(flush(&lun), Ok(()));
    // When the first path is available again, there is a third cache. The state it has last seen is
    // old, but was already counted.
    write(&lun, 0, false).unwrap();
    exchange(&mut pair, &portal(3), &portal(1));
    assert_eq!(flush(&lun), lost());
    assert_eq!(flush(&lun), Ok(()));
}

#[test]
fn restart_with_file_fails_no_flush() {
    let backend = "{ kind: file, path: DIR/disk, size: 16MiB, create: true, write_cache: true }";
    let mut pair = pair(145, backend);
    let session = connect(145, &url(145, "iscsi"), "iscsi");
    let lun = block_on(session.lun(0)).unwrap();
    write(&lun, 0, false).unwrap();
    restart(&mut pair);
    assert_eq!(flush(&lun), Ok(()));
    assert!(session.status().reconnects() >= 1);
}

/// After a daemon is killed, the kernel can take some time to complete its I/O and will keep its
/// locks during this time.
#[test]
fn restart_with_locked_file_fails_nothing() {
    let backend = "{ kind: file, path: DIR/disk, size: 16MiB, create: true, write_cache: true }";
    let mut pair = pair(248, backend);
    let session = connect(248, &url(248, "iscsi"), "iscsi");
    let lun = block_on(session.lun(0)).unwrap();
    write(&lun, 0, false).unwrap();
    pair.kill();
    let spec = Spec {
        name: "disk".into(),
        source: Source::File {
            path: pair.dir.join("disk"),
            size: None,
            create: false,
        },
        block_size: 512,
        direct: Direct::Auto,
        write_cache: true,
        read_only: false,
        protection: None,
        faults: None,
    };
    let held = eventually_ok("the daemon's lock is free", PATIENCE, || {
        open_in_time(&spec, false)
    });
    pair.serve();
    let log = pair.dir.join("riserd.log");
    eventually("it serves without the file", PATIENCE, || {
        fs::read_to_string(&log).is_ok_and(|log| log.contains("holds its lock"))
    });
    let release = thread::spawn(|| {
        thread::sleep(Duration::from_secs(2));
        drop(held);
    });
    write(&lun, PIECE as u64, false).unwrap();
    assert_eq!(flush(&lun), Ok(()));
    release.join().unwrap();
}

/// Forwards connections from a local port, and can close them.
struct Proxy {
    address: String,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    fn new(target: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let open = Arc::new(Mutex::new(Vec::new()));
        let kept = open.clone();
        thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(target)) else {
                    continue;
                };
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    thread::spawn(move || {
                        let mut bytes = [0; 16 << 10];
                        while let Ok(len @ 1..) = from.read(&mut bytes) {
                            if to.write_all(&bytes[..len]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                kept.lock().unwrap().extend([client, server]);
            }
        });
        Self { address, open }
    }

    fn cut(&self) {
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

#[test]
fn flapping_connection_fails_no_flush() {
    let _pair = pair(146, "{ kind: ram, size: 16MiB, write_cache: true }");
    let proxy = Proxy::new("127.0.146.1:3260");
    let url = format!("iscsi://{}/{IQN}/0", proxy.address);
    let session = connect(146, &url.parse().unwrap(), "iscsi");
    let lun = block_on(session.lun(0)).unwrap();
    for round in 1..4 {
        write(&lun, 0, false).unwrap();
        proxy.cut();
        assert_eq!(flush(&lun), Ok(()));
        assert!(session.status().reconnects() >= round);
    }
}

fn named(name: &str, size: &str) -> String {
    format!("{{ kind: file, path: DIR/{name}, size: {size}, create: true, serial: {name} }}")
}

/// Changes the configuration to replace the disk or its number.
fn exchange(pair: &mut Pair, from: &str, to: &str) {
    pair.kill();
    let (path, dir) = (
        pair.path("riserd.yaml"),
        pair.dir.to_str().unwrap().to_owned(),
    );
    let text = fs::read_to_string(&path).unwrap();
    let from = from.replace("DIR", &dir);
    assert!(text.contains(&from), "{text}");
    fs::write(&path, text.replace(&from, &to.replace("DIR", &dir))).unwrap();
    pair.serve();
}

fn another_disk_is_not_written_to(network: u8, scheme: &str) {
    let one = named("disk-one", "16MiB");
    let mut pair = pair(network, &one);
    let session = connect(network, &url(network, scheme), scheme);
    let lun = block_on(session.lun(0)).unwrap();
    write(&lun, 0, false).unwrap();
    exchange(&mut pair, &one, &named("another-disk", "16MiB"));
    assert!(write(&lun, 2 << 20, false).is_err());
    assert!(write(&lun, 0, false).is_err());
    let other = fs::read(pair.path("another-disk")).unwrap();
    assert!(other.iter().all(|b| *b == 0), "it was written to");
    assert_eq!(session.status().last_down(), Some(Down::OtherUnit));
    let paths = session.status().report().paths;
    let why = paths[0].why.as_deref().unwrap();
    assert!(
        why.contains("disk-one") && why.contains("another-disk"),
        "{why}"
    );
}

#[test]
fn replaced_disk_is_not_written_over_iscsi() {
    another_disk_is_not_written_to(147, "iscsi");
}

#[test]
fn replaced_disk_is_not_written_over_srp() {
    another_disk_is_not_written_to(148, "srp");
}

#[test]
fn attachment_reports_why_it_stopped() {
    let one = named("disk-one", "16MiB");
    let mut pair = pair(149, &one);
    let socket = pair.path("nbd");
    // If a login succeeds, the daemon is ready.
    drop(connect(149, &url(149, "iscsi"), "iscsi"));
    let url = url(149, "iscsi").to_string();
    pair.riser(&["attach", &url, "--nbd", &socket]);
    exchange(&mut pair, &one, &named("another-disk", "16MiB"));
    eventually_ok("the list names both disks", PATIENCE, || {
        let list = pair.riser(&["list"]);
        let words = ["leads to another logical unit", "disk-one", "another-disk"];
        let has_all = words.iter().all(|word| list.contains(word));
        has_all.then_some(()).ok_or(list)
    });
}

#[test]
fn returned_disk_must_not_be_smaller() {
    let one = named("disk-one", "16MiB");
    let mut pair = pair(150, &one);
    let session = connect(150, &url(150, "iscsi"), "iscsi");
    let lun = block_on(session.lun(0)).unwrap();
    let grown = named("disk-one", "32MiB");
    exchange(&mut pair, &one, &grown);
    write(&lun, 0, true).unwrap();
    pair.kill();
    fs::write(pair.path("disk-one"), []).unwrap();
    exchange(&mut pair, &grown, &named("disk-one", "8MiB"));
    assert!(write(&lun, 0, true).is_err());
    assert_eq!(session.status().last_down(), Some(Down::Shrunk));
}

#[test]
fn session_waits_for_missing_disk() {
    let one = named("disk-one", "16MiB");
    let mut pair = pair(151, &one);
    let session = connect(151, &url(151, "iscsi"), "iscsi");
    let lun = block_on(session.lun(0)).unwrap();
    exchange(&mut pair, "luns: { 0: disk }", "luns: { 1: disk }");
    let writing = thread::spawn({
        let lun = lun.clone();
        move || write(&lun, 0, true)
    });
    eventually_ok("the unit is away", PATIENCE, || {
        let down = session.status().last_down();
        (down == Some(Down::NoIdentity)).then_some(()).ok_or(down)
    });
    exchange(&mut pair, "luns: { 1: disk }", "luns: { 0: disk }");
    writing.join().unwrap().unwrap();
}
