//! Tests several paths to the same logical unit: portals are removed under load, and a network
//! delivers old writes late.

#![allow(missing_docs, reason = "a test")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use riser_block::task::block_on;
use riser_initiator::engine::{EngineError, LinkState, Session};
use riser_initiator::lun::Lun;
use riser_initiator::paths::PathState;
use riser_initiator::session::Down;
use riser_testkit::eventually_ok;
use riser_testkit::programs::Pair;
use riser_tests::load::{Disk, Nbd};
use riser_tests::rig::{IQN, Protocol, Rig, buffer_of, eventually, get, pattern, put};

/// Timeout for any event that should happen without our help.
const PATIENCE: Duration = Duration::from_secs(60);

/// Serves a file on hosts 1 and 3 of a network.
fn rig(protocol: Protocol, number: u8) -> Rig {
    let mut rig = Rig::with_file(protocol, number, "32MiB");
    rig.serve(&[1, 3]);
    rig
}

fn connect(rig: &Rig, host: u8, other: u8) -> Session {
    let keys = format!("?portal={}", rig.address(other));
    let session = block_on(rig.client.connect(rig.url_on(host, "", &keys)));
    session.unwrap_or_else(|e| panic!("{keys}: {e}"))
}

fn states(session: &Session) -> Vec<PathState> {
    session
        .status()
        .report()
        .paths
        .iter()
        .map(|p| p.state)
        .collect()
}

#[track_caller]
fn wait_for(session: &Session, wanted: &[PathState]) {
    eventually_ok(&format!("{wanted:?}"), PATIENCE, || {
        let is_so = states(session) == wanted;
        is_so.then_some(()).ok_or(session.status().report().paths)
    });
}

/// Used to stop [`verify`], and to get the number of completed iterations.
#[derive(Default)]
struct Progress {
    is_over: AtomicBool,
    rounds: AtomicU64,
}

/// Writes to the whole disk in parallel and verifies the data, in a loop.
fn verify(lun: &Lun, progress: &Progress) {
    const PIECE: usize = 16 << 10;
    let mut round = 0;
    while !progress.is_over.load(Ordering::Relaxed) {
        let write = |i: u64| {
            let data = buffer_of(lun, &pattern(round << 8 | i, PIECE));
            let io = lun.write_io((i * 7 % 64) << 16, data, false).unwrap();
            lun.session().submit(io)
        };
        let writes: Vec<_> = (0..16).map(write).collect();
        for write in writes {
            Lun::completed_buffer(block_on(write)).unwrap();
        }
        for i in 0..16 {
            let there = get(lun, (i * 7 % 64) << 16, PIECE);
            assert!(
                there == pattern(round << 8 | i, PIECE),
                "round {round}, piece {i}"
            );
        }
        block_on(lun.flush()).unwrap();
        round += 1;
        progress.rounds.store(round, Ordering::Relaxed);
    }
}

/// Removes and adds portals in turn while there are verified writes.
fn portals_come_and_go(protocol: Protocol, number: u8) {
    let mut rig = rig(protocol, number);
    let session = connect(&rig, 1, 3);
    assert_eq!(states(&session), [PathState::Live; 2]);
    let lun = block_on(session.lun(0)).unwrap();
    let progress = Arc::new(Progress::default());
    let work = thread::spawn({
        let (lun, progress) = (lun.clone(), progress.clone());
        move || verify(&lun, &progress)
    });
    for hosts in [&[1][..], &[3], &[1, 3], &[3], &[1, 3]] {
        // If a write was lost with an SRP portal, it has to wait for the same portal, and other
        // writes have to wait for this write.
        if protocol != Protocol::Srp || states(&session) == [PathState::Live; 2] {
            let before = progress.rounds.load(Ordering::Relaxed);
            eventually("further rounds", || {
                assert!(!work.is_finished(), "an error");
                progress.rounds.load(Ordering::Relaxed) >= before + 2
            });
        }
        rig.serve(hosts);
        let state = |host| match hosts.contains(&host) {
            true => PathState::Live,
            false => PathState::Lost,
        };
        wait_for(&session, &[state(1), state(3)]);
        assert!(!work.is_finished(), "an error");
    }
    progress.is_over.store(true, Ordering::Relaxed);
    work.join().unwrap();
    assert_eq!(session.status().link(), LinkState::Live);
    block_on(session.close());
    drop((lun, session));
    assert_eq!(rig.client.buffers().free(), 32 << 20);
}

#[test]
fn portals_come_and_go_on_tcp() {
    portals_come_and_go(Protocol::Tcp, 101);
}

#[test]
fn portals_come_and_go_on_iser() {
    portals_come_and_go(Protocol::Iser, 102);
}

#[test]
fn portals_come_and_go_on_srp() {
    portals_come_and_go(Protocol::Srp, 103);
}

/// A proxy between a client and a portal, which either forwards or holds data sent by the client.
struct Proxy {
    hold: Arc<Hold>,
    is_cut: Arc<AtomicBool>,
    /// Number of connection directions that are still open.
    forwarding: Arc<AtomicUsize>,
    /// Both sides of each connection.
    links: Arc<Mutex<Vec<(TcpStream, TcpStream)>>>,
}

/// Indicates whether a proxy should hold data from the client, and whether it currently does.
#[derive(Default)]
struct Hold {
    is_wanted: AtomicBool,
    has_some: AtomicBool,
}

impl Proxy {
    fn new(from: SocketAddr, to: SocketAddr) -> Self {
        let proxy = Self {
            hold: Arc::default(),
            forwarding: Arc::default(),
            is_cut: Arc::default(),
            links: Arc::default(),
        };
        let listener = TcpListener::bind(from).unwrap();
        let (hold, is_cut) = (proxy.hold.clone(), proxy.is_cut.clone());
        let (links, forwarding) = (proxy.links.clone(), proxy.forwarding.clone());
        thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else {
                    continue;
                };
                if is_cut.load(Ordering::SeqCst) {
                    continue;
                }
                let (client_2, server_2) =
                    (client.try_clone().unwrap(), server.try_clone().unwrap());
                links
                    .lock()
                    .unwrap()
                    .push((client.try_clone().unwrap(), server.try_clone().unwrap()));
                forwarding.fetch_add(2, Ordering::SeqCst);
                thread::spawn({
                    let (hold, forwarding) = (hold.clone(), forwarding.clone());
                    move || {
                        forward(&client, &server, &hold);
                        forwarding.fetch_sub(1, Ordering::SeqCst);
                    }
                });
                let forwarding = forwarding.clone();
                thread::spawn(move || {
                    forward(&server_2, &client_2, &Hold::default());
                    // If the client has closed its side, discard any remaining data from the
                    // target.
                    let _ = std::io::copy(&mut &server_2, &mut std::io::sink());
                    forwarding.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        proxy
    }

    /// Closes the client's connections, but not the target's. New connections are not allowed.
    fn cut(&self) {
        self.is_cut.store(true, Ordering::SeqCst);
        for (client, _) in &*self.links.lock().unwrap() {
            let _ = client.shutdown(Shutdown::Both);
        }
    }
}

/// Copies data until the connection is closed. If the client closes the connection, the target's
/// side stays open, as if the network between them was disconnected.
fn forward(mut from: &TcpStream, mut to: &TcpStream, hold: &Hold) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let len = match from.read(&mut bytes) {
            Ok(0) => return,
            Ok(len) => len,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(_) => return,
        };
        while hold.is_wanted.load(Ordering::SeqCst) {
            hold.has_some.store(true, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(2));
        }
        if to.write_all(&bytes[..len]).is_err() {
            return;
        }
    }
}

#[test]
fn late_write_does_not_undo_newer() {
    let rig = rig(Protocol::Tcp, 104);
    let at = |host: u8| SocketAddr::new(rig.address(host).into(), 3260);
    let proxy = Proxy::new(at(4), at(3));
    let session = connect(&rig, 1, 4);
    let lun = block_on(session.lun(0)).unwrap();
    for round in 0..3u64 {
        wait_for(&session, &[PathState::Live; 2]);
        proxy.hold.has_some.store(false, Ordering::SeqCst);
        proxy.hold.is_wanted.store(true, Ordering::SeqCst);
        let write = |i: u64| {
            let data = buffer_of(&lun, &pattern(round << 8 | i, 4096));
            let io = lun.write_io(i << 16, data, false).unwrap();
            lun.session().submit(io)
        };
        // Half of these writes are held.
        let writes: Vec<_> = (0..8).map(write).collect();
        eventually("writes that are held", || {
            proxy.hold.has_some.load(Ordering::SeqCst)
        });
        proxy.cut();
        for write in writes {
            Lun::completed_buffer(block_on(write)).unwrap();
        }
        assert_eq!(states(&session), [PathState::Live, PathState::Lost]);
        let newer: Vec<_> = (0..8)
            .map(|i| pattern(1000 + (round << 8 | i), 4096))
            .collect();
        for (i, data) in (0u64..).zip(&newer) {
            put(&lun, i << 16, data);
        }
        // The data is now delivered to a connection that the target has already closed or is about
        // to close.
        proxy.hold.is_wanted.store(false, Ordering::SeqCst);
        eventually("the end of what was held", || {
            proxy.forwarding.load(Ordering::SeqCst) == 0
        });
        for (i, data) in (0u64..).zip(&newer) {
            assert!(
                get(&lun, i << 16, 4096) == *data,
                "round {round}, piece {i}"
            );
        }
        proxy.is_cut.store(false, Ordering::SeqCst);
    }
    wait_for(&session, &[PathState::Live; 2]);
    assert!(session.status().report().paths[1].losses >= 3);
}

#[test]
fn portals_of_different_disks_are_never_mixed() {
    let [one, two] = [105, 106].map(|number| rig(Protocol::Tcp, number));
    let url = |portal: &str| one.url_on(1, "", &format!("?portal={portal}"));
    // Both use the same identity, except for the disk.
    let other = url(&two.address(1).to_string());
    let error = block_on(one.client.connect(other)).unwrap_err();
    assert!(
        matches!(error, EngineError::Login(Down::OtherUnit)),
        "{error}"
    );
    drop(two);
    let same = url(&format!("{}:3261", one.address(1)));
    let session = block_on(one.client.connect(same)).unwrap();
    assert_eq!(states(&session), [PathState::Live, PathState::Lost]);
}

#[test]
fn listed_portals_are_used() {
    let rig = rig(Protocol::Tcp, 107);
    let url = rig.url_on(3, "", "?paths=all");
    let session = block_on(rig.client.connect(url)).unwrap();
    let mut portals: Vec<_> = session.status().report().paths.into_iter().collect();
    portals.sort_by(|a, b| a.portal.cmp(&b.portal));
    let names: Vec<_> = portals.iter().map(|p| p.portal.as_str()).collect();
    let portal = |host| format!("{}:3260", rig.address(host));
    assert_eq!(names, [portal(1), portal(3)]);
    assert_eq!(states(&session), [PathState::Live; 2]);
    let lun = block_on(session.lun(0)).unwrap();
    put(&lun, 0, &pattern(1, 65536));
    assert!(get(&lun, 0, 65536) == pattern(1, 65536));
}

#[test]
fn attachment_shows_paths() {
    let portals = |hosts: &[u8]| {
        let all = hosts.iter();
        let all = all.map(|h| format!("{{ protocol: iscsi, listen: 127.0.108.{h} }}"));
        format!("portals: [{}]", all.collect::<Vec<_>>().join(", "))
    };
    let backend = "{ kind: file, path: DIR/disk.img, size: 8MiB, create: true }";
    let target = format!("iqn: {IQN}\n{}", portals(&[1, 3]));
    let mut pair = Pair::with_target(108, backend, &target);
    let socket = pair.path("nbd");
    let url = format!("iscsi://127.0.108.1/{IQN}/0?portal=127.0.108.3");
    eventually("riserd listens", || {
        TcpStream::connect(("127.0.108.3", 3260)).is_ok()
    });
    pair.riser(&["attach", &url, "--nbd", &socket]);
    let list = |pair: &Pair| {
        let text = pair.riser(&["-o", "json", "list"]);
        let all: serde_json::Value = serde_json::from_str(&text).unwrap();
        let paths = all[0]["paths"].as_array().unwrap().clone();
        let show = |p: &serde_json::Value| format!("{} {}", p["portal"], p["state"]);
        paths.iter().map(show).collect::<Vec<_>>()
    };
    let first = r#""127.0.108.1:3260" "live""#;
    assert_eq!(list(&pair), [first, r#""127.0.108.3:3260" "live""#]);
    let config = pair.path("riserd.yaml");
    let text = std::fs::read_to_string(&config).unwrap();
    let text = text.replace(&portals(&[1, 3]), &portals(&[1]));
    std::fs::write(&config, text).unwrap();
    pair.kill();
    pair.serve();
    eventually_ok("the second path is lost", PATIENCE, || {
        let list = list(&pair);
        let is_so = list == [first, r#""127.0.108.3:3260" "lost""#];
        is_so.then_some(()).ok_or(list)
    });
    let human = pair.riser(&["list"]);
    assert!(
        human.contains("path 127.0.108.1:3260: live, lost 1 time(s)"),
        "{human}"
    );
    assert!(
        human.contains("path 127.0.108.3:3260: lost, lost 1 time(s): "),
        "{human}"
    );
    // The daemon that was killed may still hold the disk for some time, which would cause the last
    // flush to fail.
    let mut disk = Nbd::connect(socket.as_ref());
    eventually_ok("the disk is served again", PATIENCE, || disk.flush());
    drop(disk);
    pair.riser(&["detach", &socket]);
    let bad = format!("iscsi://127.0.108.1/{IQN}/0?portal=127.0.108.3:0");
    let output = pair.command(&["inquiry", &bad]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("value `127.0.108.3:0` of key `portal`"),
        "{said}"
    );
}
