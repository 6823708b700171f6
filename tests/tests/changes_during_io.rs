//! Applies a sequence of configurations to a running target while initiators read and write a disk,
//! using a real target and real initiators on loopback in the same process. Some of the
//! configurations are not valid and must not change anything.
//!
//! `RISER_CHANGES` sets the number of configurations (default 40); the long test command uses
//! 1,000.

#![allow(clippy::print_stdout, reason = "prints results of the test")]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use riser_block::task::block_on;
use riser_initiator::engine::Client;
use riser_initiator::lun::Lun;
use riser_initiator::url::IscsiUrl;
use riser_initiator::url::SrpUrl;
use riser_target::config::Config;
use riser_target::server::Server;

const HOST: &str = "127.0.0.91";
const IQN: &str = "iqn.2026-01.com.example:kept";
const REGION: u64 = 1 << 20;
/// Number of invalid changes to try before each valid change.
const FAILING: u64 = 3;

/// A generator of random numbers, which are the same in every run.
struct Chance(u64);

impl Chance {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }

    fn is(&mut self) -> bool {
        self.below(2) == 1
    }
}

/// Creates a configuration that always contains the target in use, and randomly adds other targets.
/// Backends will grow in each round.
fn config(chance: &mut Chance, round: u64, image: &str) -> String {
    let grown = 1 + round / 8;
    let mut text = format!(
        "identity: apply\nbackends:\n  kept: {{ kind: ram, size: {}MiB }}\n  \
         ram: {{ kind: ram, size: {grown}MiB }}\n  \
         file: {{ kind: file, path: {image}, size: {grown}MiB, create: true }}\n",
        (3 * REGION) >> 20
    );
    let others = chance.below(3);
    for n in 0..others {
        let _ = writeln!(text, "  other{n}: {{ kind: \"null\", size: {}GiB }}", n + 1);
    }
    text.push_str("targets:\n");
    let kept = format!(
        "  - name: kept\n    iqn: {IQN}\n    portals:\n      \
         - {{ protocol: srp, listen: {HOST} }}\n      \
         - {{ protocol: iscsi, listen: {HOST} }}\n      \
         - {{ protocol: iser, listen: {HOST} }}\n    luns: {{ 0: kept }}\n    access: open\n"
    );
    let place = chance.below(4);
    for n in 0..3 {
        if n == place {
            text.push_str(&kept);
        }
        if chance.is() {
            continue;
        }
        let _ = write!(
            text,
            "  - name: t{n}\n    iqn: iqn.2026-01.com.example:t{n}\n    access: open\n    \
             portals:\n      - {{ protocol: iscsi, listen: {HOST} }}\n"
        );
        let hosts = [92 + n, 95];
        for host in hosts.into_iter().filter(|_| chance.is()) {
            let _ = writeln!(
                text,
                "      - {{ protocol: iscsi, listen: 127.0.0.{host} }}"
            );
        }
        for protocol in ["srp", "iser"] {
            if chance.is() {
                let host = 92 + n;
                let portal = format!("{{ protocol: {protocol}, listen: 127.0.0.{host} }}");
                let _ = writeln!(text, "      - {portal}");
            }
        }
        if chance.is() {
            let _ = writeln!(
                text,
                "      - {{ protocol: srp, listen: \"{HOST}:{}\" }}",
                6000 + n
            );
        }
        let mut luns = Vec::new();
        for (number, name) in ["ram", "file", "kept"].iter().enumerate() {
            if chance.is() {
                luns.push(format!("{number}: {name}"));
            }
        }
        luns.extend((0..others).map(|n| format!("{}: other{n}", n + 7)));
        let _ = writeln!(text, "    luns: {{ {} }}", luns.join(", "));
    }
    if place == 3 {
        text.push_str(&kept);
    }
    text.push_str("workers: { count: 2 }\n");
    text
}

fn parse(text: &str) -> Config {
    Config::parse(text, "apply.yaml").unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Makes a configuration invalid, so that it will fail when it's parsed, when its files are opened,
/// or when its sockets are bound. In the last case, the files have already been extended.
fn spoil(text: &str, chance: &mut Chance, round: u64, taken: SocketAddr) -> (String, &'static str) {
    let late = |text: &str, listen: SocketAddr, backend: &str| {
        let target = format!(
            "  - name: late\n    iqn: iqn.2026-01.com.example:late\n    access: open\n    \
             portals: [{{ protocol: iscsi, listen: \"{listen}\" }}]\n    luns: {{ 0: {backend} }}\n"
        );
        text.replacen("workers:", &format!("{target}workers:"), 1)
    };
    match chance.below(3) {
        0 => (text.replace("{ count: 2 }", "{ count: 3 }"), "restart"),
        1 => {
            let missing = "  missing: { kind: file, path: /nonexistent/riser.img }\ntargets:\n";
            let text = text.replacen("targets:\n", missing, 1);
            let free = SocketAddr::new(taken.ip(), 3260);
            (late(&text, free, "missing"), "missing")
        }
        _ => {
            let grown = format!("size: {}MiB, create", 1 + round / 8);
            let longer = format!("size: {}MiB, create", 2 + round / 8);
            let text = text.replacen(&grown, &longer, 1);
            (late(&text, taken, "file"), "taken")
        }
    }
}

/// A file used in this test, which is removed on drop.
struct Image(PathBuf);

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Writes and reads a region until `stop` is set. Returns the number of iterations.
fn work(client: &Client, lun: &Lun, place: u64, stop: &AtomicBool, done: &AtomicU64) {
    let mut round = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let len = 4096 << (round % 4);
        let offset = place * REGION + round % 16 * (32 << 10);
        let mut chance = Chance(round << 8 | place | 1 << 63);
        let data: Vec<u8> = (0..len).map(|_| chance.below(256) as u8).collect();
        let buffer = block_on(client.buffers().take_buffer(len));
        buffer.slice().write(0, &data);
        let buffer = block_on(lun.write(offset, buffer, false)).unwrap();
        buffer.slice().fill(0, len, 0);
        let buffer = block_on(lun.read(offset, buffer)).unwrap();
        let mut found = vec![0; len];
        buffer.slice().read(0, &mut found);
        assert!(found == data, "region {place}, round {round}");
        round += 1;
        done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns the nexus numbers of the target in use, along with the protocol.
fn nexuses(server: &Server) -> Vec<(&'static str, u64)> {
    let mut all = Vec::new();
    for snapshot in server.snapshot() {
        all.extend(snapshot.sessions.iter().map(|s| ("srp", s.nexus)));
        let iscsi = snapshot.iscsi_sessions.iter();
        all.extend(iscsi.map(|s| {
            (
                ["iscsi", "iser"][usize::from(s.provider.is_some())],
                s.info.nexus.0,
            )
        }));
    }
    all.sort_unstable();
    all
}

#[test]
fn changes_spare_unaffected_sessions() {
    let changes: u64 = std::env::var("RISER_CHANGES").map_or(40, |n| n.parse().unwrap());
    let name = format!("riser-apply-{}.img", std::process::id());
    let image = Image(std::env::temp_dir().join(name));
    let path = image.0.display().to_string();
    let mut chance = Chance(0x5eed);
    let mut server = Server::start(&parse(&config(&mut chance, 0, &path))).unwrap();
    let squatter = std::net::TcpListener::bind((HOST, 0)).unwrap();
    let taken = squatter.local_addr().unwrap();
    let client = Client::builder()
        .pool(4 << 20)
        .open("127.0.0.96".parse().unwrap())
        .unwrap();
    let [iscsi, iser] = ["iscsi", "iser"].map(|scheme| {
        let initiator = format!("iqn.2026-01.com.example:{scheme}");
        let url = format!("{scheme}://{HOST}/{IQN}/0?initiator={initiator}");
        url.parse::<IscsiUrl>().unwrap()
    });
    let srp: SrpUrl = {
        let catalog = server.shared().registry.catalog();
        let mut targets = catalog.targets.iter();
        let kept = targets.find(|t| t.config.name == "kept").unwrap();
        let portal = &kept.portals[0];
        let (ext, guid) = (portal.id_ext, portal.ioc_guid);
        let url = format!("srp://{HOST}/0?id_ext={ext:016x}&ioc_guid={guid:016x}");
        url.parse().unwrap()
    };
    let luns = [
        block_on(block_on(client.connect(&iscsi)).unwrap().lun(0)).unwrap(),
        block_on(block_on(client.connect(&srp)).unwrap().lun(0)).unwrap(),
        block_on(block_on(client.connect(&iser)).unwrap().lun(0)).unwrap(),
    ];
    let before = nexuses(&server);
    assert_eq!(before.len(), 3);
    let stop = Arc::new(AtomicBool::new(false));
    let done: Arc<[AtomicU64; 3]> = Arc::default();
    let threads: Vec<_> = luns
        .into_iter()
        .enumerate()
        .map(|(place, lun)| {
            let (client, stop, done) = (client.clone(), stop.clone(), done.clone());
            std::thread::spawn(move || work(&client, &lun, place as u64, &stop, &done[place]))
        })
        .collect();
    // The file is created when it's needed by a unit.
    let length = || std::fs::metadata(&path).map_or(0, |m| m.len());
    let mut failed = BTreeMap::new();
    for round in 1..=changes {
        let text = config(&mut chance, round, &path);
        if chance.below(FAILING) == 0 {
            let was = server.shared().registry.catalog();
            let long = length();
            let (spoilt, why) = spoil(&text, &mut chance, round, taken);
            let error = server.change(parse(&spoilt)).expect_err(why);
            assert!(
                Arc::ptr_eq(&was, &server.shared().registry.catalog()),
                "{error}"
            );
            assert_eq!(length(), long, "{error}");
            *failed.entry(why).or_insert(0) += 1;
        }
        let config = parse(&text);
        let targets = config.targets.len();
        server
            .change(config)
            .unwrap_or_else(|e| panic!("change {round}: {e}"));
        assert_eq!(server.shared().registry.catalog().targets.len(), targets);
        assert!(threads.iter().all(|thread| !thread.is_finished()));
        // Wait until each session has made progress between two changes, even if this machine is
        // slow.
        let at = |done: &AtomicU64| done.load(Ordering::Relaxed);
        let seen: Vec<u64> = done.iter().map(at).collect();
        while done.iter().zip(&seen).any(|(done, seen)| at(done) == *seen) {
            assert!(threads.iter().all(|thread| !thread.is_finished()));
            std::thread::yield_now();
        }
    }
    assert_eq!(nexuses(&server), before, "the sessions are the same");
    stop.store(true, Ordering::Relaxed);
    for thread in threads {
        thread.join().unwrap();
    }
    let [iscsi, srp, iser] = [0, 1, 2].map(|n| done[n].load(Ordering::Relaxed));
    println!(
        "result: {changes} changes, and {failed:?} that failed, during {iscsi} writes and reads over iSCSI, \
         {srp} over SRP, {iser} over iSER"
    );
    assert_eq!(failed.len(), 3, "changes fail in each way: {failed:?}");
    server.shutdown().unwrap();
}
