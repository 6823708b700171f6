//! Tests the tunnels described on the security page of the book: a target is used via a tunnel over
//! RDMA and TCP, and we check the packets that are visible outside. This uses network namespaces,
//! WireGuard from the host or `wireguard-go`, and ESP from the host.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints which way it was tried")]
#![allow(unsafe_code, reason = "a network namespace of a thread's own")]

#[path = "adversary/net.rs"]
#[allow(dead_code, reason = "shared with another test")]
mod net;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use net::{HONEST, TARGET, World, sh};
use riser_block::task::block_on;
use riser_initiator::engine::Client;
use riser_initiator::url::TargetUrl;
use riser_testkit::eventually;
use riser_testkit::programs::{Pair, missing, skip, tool};
use riser_tests::load::Disk;
use socket2::{Domain, Protocol, Socket, Type};

/// Protocol number for the Internet Group Management Protocol.
const IGMP: u8 = 2;

const IQN: &str = "iqn.2026-01.com.example:tunnel";
/// Inner addresses for tunnels that need separate addresses.
const INNER: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 77, 0, 1), Ipv4Addr::new(10, 77, 0, 2)];
const PATIENCE: Duration = Duration::from_secs(30);
/// Data to write, which must not be visible outside.
const MARK: &[u8; 32] = b"a mark that no one else may read";

/// Packets seen outside the tunnel.
struct Outside {
    socket: Socket,
    packets: u64,
    marks: u64,
    /// IP protocols and UDP ports that were seen.
    kinds: Vec<(u8, u16)>,
}

impl Outside {
    /// Must be called in the switch namespace.
    fn new() -> Self {
        let every_protocol = Protocol::from(i32::from(3u16.to_be()));
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(every_protocol)).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket.set_recv_buffer_size(64 << 20).unwrap();
        Self {
            socket,
            packets: 0,
            marks: 0,
            kinds: Vec::new(),
        }
    }

    fn look(&mut self) {
        let mut frame = vec![0; 1 << 16];
        while let Ok(len) = self.socket.read(&mut frame) {
            let frame = &frame[..len];
            if len < 38 || frame[12..14] != [8, 0] {
                continue;
            }
            self.packets += 1;
            self.marks += u64::from(frame.windows(MARK.len()).any(|part| part == MARK));
            let port = u16::from_be_bytes([frame[36], frame[37]]);
            let kind = (frame[23], if frame[23] == 17 { port } else { 0 });
            // These are sent by hosts to report their multicast groups.
            if kind.0 == IGMP {
                continue;
            }
            if !self.kinds.contains(&kind) {
                self.kinds.push(kind);
            }
        }
    }
}

/// Writes the mark to a disk and reads it again using one of the protocols.
fn use_disk(scheme: &str, target: Ipv4Addr, host: Ipv4Addr) {
    let builder = Client::builder().pool(4 << 20);
    let client = match scheme {
        "iscsi" => builder.without_device(),
        _ => builder.open(host.into()),
    };
    let client = client.unwrap();
    let path = match scheme {
        "srp" => "0".to_owned(),
        _ => format!("{IQN}/0"),
    };
    let url: TargetUrl = format!("{scheme}://{target}/{path}").parse().unwrap();
    let begun = Instant::now();
    let session = loop {
        match block_on(client.connect(url.clone())) {
            Ok(session) => break session.with_timeout(PATIENCE),
            Err(error) => assert!(begun.elapsed() < PATIENCE, "{url}: {error}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let mut lun = block_on(session.lun(0)).unwrap();
    let data: Vec<u8> = MARK.iter().copied().cycle().take(256 << 10).collect();
    Disk::write(&mut lun, 0, &data, false).unwrap();
    let mut read = vec![0; data.len()];
    Disk::read(&mut lun, 0, &mut read).unwrap();
    assert_eq!(read, data, "{scheme}");
    block_on(session.close());
    client.shutdown();
}

fn serve(world: &World, address: Ipv4Addr) -> Pair {
    world.target.run(move || {
        let portals = ["srp", "iser", "iscsi"];
        let portals = portals.map(|p| format!("{{ protocol: {p}, listen: {address} }}"));
        let target = format!("iqn: {IQN}\nportals: [{}]", portals.join(", "));
        Pair::with_target(0, "{ kind: ram, size: 1MiB }", &target)
    })
}

/// Uses a disk from one of the host addresses. Returns the number of packets, how many of them
/// contain the data on the disk, and their types.
fn try_out(world: &Arc<World>, target: Ipv4Addr, host: Ipv4Addr) -> Outside {
    let mut outside = world.switch.run(Outside::new);
    let mut pair = serve(world, target);
    for scheme in ["srp", "iser", "iscsi"] {
        world.hosts.run(move || use_disk(scheme, target, host));
        outside.look();
    }
    pair.terminate();
    outside
}

/// Without a tunnel, all data must be visible.
#[test]
fn data_is_visible_without_tunnel() {
    let world = match World::new() {
        Ok(world) => Arc::new(world),
        Err(why) => return skip("data_is_visible_without_tunnel", &why),
    };
    let outside = try_out(&world, TARGET, HONEST);
    assert!(outside.marks > 0, "{:?}", outside.kinds);
    assert!(outside.kinds.contains(&(17, 4791)));
}

/// One side of a WireGuard tunnel.
struct WireGuard {
    name: String,
    dir: PathBuf,
    process: Option<Child>,
}

impl WireGuard {
    /// Creates the interface in the namespace of the current thread.
    fn new(dir: &Path, end: usize) -> Self {
        let name = format!("rg{}{}", std::process::id(), end);
        let by_kernel = sh(&format!("ip link add {name} type wireguard")).is_ok();
        let process = (!by_kernel).then(|| {
            let mut command = Command::new("wireguard-go");
            command.args(["-f", &name]).stdout(Stdio::null());
            command.stderr(Stdio::null()).spawn().unwrap()
        });
        println!("WireGuard by the kernel: {by_kernel}");
        let is_there = || sh(&format!("ip link show dev {name}")).is_ok();
        eventually("an interface", PATIENCE, is_there);
        Self {
            name,
            dir: dir.to_owned(),
            process,
        }
    }

    fn key_file(&self, end: usize) -> PathBuf {
        self.dir.join(format!("key-{end}"))
    }

    /// Adds the peer, which is only allowed to use its inner address.
    fn join(&self, end: usize, peer_key: &str, outer: Ipv4Addr) {
        let (name, other) = (&self.name, INNER[1 - end]);
        let key = self.key_file(end);
        let set = || {
            sh(&format!(
                "wg set {name} private-key {} listen-port 51820 peer {peer_key} \
                 allowed-ips {other}/32 endpoint {outer}:51820",
                key.display()
            ))
        };
        eventually("its socket is there", PATIENCE, || set().is_ok());
        sh(&format!("ip addr add {}/24 dev {name}", INNER[end])).unwrap();
        sh(&format!("ip link set {name} up mtu 1420")).unwrap();
    }
}

impl Drop for WireGuard {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
            let _ = fs::remove_file(format!("/var/run/wireguard/{}.sock", self.name));
        }
    }
}

#[test]
fn wireguard_carries_every_protocol_and_shows_nothing() {
    const NAME: &str = "wireguard_carries_every_protocol_and_shows_nothing";
    if let Some(tool) = missing(&["wg", "wireguard-go"]) {
        return skip(NAME, &format!("no {tool}"));
    }
    let world = match World::new() {
        Ok(world) => Arc::new(world),
        Err(why) => return skip(NAME, &why),
    };
    let dir = std::env::temp_dir().join(format!("riser-tunnel-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let keys = [0, 1].map(|end| {
        let key = tool("wg", ["genkey"]);
        fs::write(dir.join(format!("key-{end}")), &key).unwrap();
        let mut public = Command::new("wg");
        public
            .arg("pubkey")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut public = public.spawn().unwrap();
        public
            .stdin
            .take()
            .unwrap()
            .write_all(key.as_bytes())
            .unwrap();
        let output = public.wait_with_output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    });
    let ends: Vec<_> = [(&world.target, HONEST), (&world.hosts, TARGET)]
        .into_iter()
        .enumerate()
        .map(|(end, (network, outer))| {
            let (dir, peer) = (dir.clone(), keys[1 - end].clone());
            network.run(move || {
                let guard = WireGuard::new(&dir, end);
                guard.join(end, &peer, outer);
                guard
            })
        })
        .collect();
    let outside = try_out(&world, INNER[0], INNER[1]);
    println!(
        "{} packets outside, of kinds {:?}",
        outside.packets, outside.kinds
    );
    assert!(outside.packets > 500);
    assert_eq!(outside.marks, 0);
    assert!(
        outside.kinds.iter().all(|kind| *kind == (17, 51820)),
        "{:?}",
        outside.kinds
    );
    drop(ends);
    fs::remove_dir_all(&dir).unwrap();
}

/// Uses ESP in transport mode for all packets between two hosts. This is the same as negotiated by
/// the `swanctl.conf` on this page, but the keys are set manually.
#[test]
fn ipsec_carries_every_protocol_and_shows_nothing() {
    const NAME: &str = "ipsec_carries_every_protocol_and_shows_nothing";
    const KEY: &str = "0x000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20212223";
    let world = match World::new() {
        Ok(world) => Arc::new(world),
        Err(why) => return skip(NAME, &why),
    };
    for (network, out) in [(&world.target, TARGET), (&world.hosts, HONEST)] {
        let made: Result<(), String> = network.run(move || {
            for (from, to, spi) in [(TARGET, HONEST, 0x1001), (HONEST, TARGET, 0x1002)] {
                sh(&format!(
                    "ip xfrm state add src {from} dst {to} proto esp spi {spi} mode transport \
                     aead rfc4106(gcm(aes)) {KEY} 128"
                ))?;
                let dir = if from == out { "out" } else { "in" };
                sh(&format!(
                    "ip xfrm policy add src {from} dst {to} dir {dir} tmpl src {from} dst {to} \
                     proto esp mode transport"
                ))?;
            }
            Ok(())
        });
        if let Err(why) = made {
            return skip(NAME, &format!("no ESP in this kernel: {}", why.trim()));
        }
    }
    let outside = try_out(&world, TARGET, HONEST);
    println!(
        "{} packets outside, of kinds {:?}",
        outside.packets, outside.kinds
    );
    assert!(outside.packets > 500);
    assert_eq!(outside.marks, 0);
    assert!(
        outside.kinds.iter().all(|kind| kind.0 == 50),
        "{:?}",
        outside.kinds
    );
}
