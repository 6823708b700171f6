//! Tests initiators that slowly send the data of their WRITEs over RDMA, with a healthy initiator
//! on the same worker.
//!
//! The target uses RDMA READ to fetch the data, so a slow initiator is simulated by a slow
//! responder: the send rate of its device is limited. `isolation.rs` tests the same rates over TCP.

mod world;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use riser_scsi::srp::{DataBuffer, TargetPortId};
use riser_target::config::Config;
use riser_test_peers::iser_client::Client;
use riser_test_peers::mini::{Mini, login_req};
use riser_test_peers::pdus::cdb10;
use riser_transport::loopback::Endpoint;
use riser_transport::roce::fault::FaultConfig;
use riser_transport::verbs::Provider;
use world::{SERVER, World};

const IQN: &str = "iqn.2026-01.org.example:trickle";

/// Rates in bytes per second, from no data to a rate that is accepted without a limit.
const RATES: [u64; 7] = [0, 1, 100, 1 << 10, 16 << 10, 256 << 10, 1 << 20];

/// Duration of the slow phase. Linux aborts a command after this time.
const DURATION: Duration = Duration::from_secs(30);

/// Maximum latency for commands of the healthy initiator.
const LONGEST: Duration = Duration::from_secs(5);

/// Number of 1 MiB commands from the slow initiator, which is more than the pool size.
const COMMANDS: u32 = 100;

/// Device of a slow initiator, and the clock for its rate limit.
struct SlowLink {
    sent: Arc<AtomicU64>,
    /// Number of bytes sent before the slow phase.
    before: u64,
    since: Instant,
    rate: u64,
}

impl SlowLink {
    /// Counts bytes sent by the device with this address.
    fn count(world: &World, addr: IpAddr) -> Arc<AtomicU64> {
        let sent = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&sent);
        world.fabric.tap(move |src, _, packet| {
            if src.ip() == addr {
                counter.fetch_add(packet.len() as u64, Ordering::Relaxed);
            }
        });
        sent
    }

    /// Drives the device if this is allowed by the rate limit.
    fn drive(&self, world: &World, device: &mut Endpoint) {
        let now = world.fabric.now();
        let elapsed = now.duration_since(self.since);
        let allowed = (elapsed.as_micros() * u128::from(self.rate) / 1_000_000) as u64;
        let sent = self.sent.load(Ordering::Relaxed) - self.before;
        world.fabric.fill_sockets(device.addr(), sent >= allowed);
        device.progress(now);
    }
}

fn start() -> World {
    let text = format!(
        "backends: {{ one: {{ kind: ram, size: 128MiB }}, other: {{ kind: ram, size: 1MiB }} }}\n\
         targets:\n\
         - name: t\n\
         \x20 iqn: {IQN}\n\
         \x20 portals: [{{ protocol: srp, listen: '{SERVER}' }}, {{ protocol: iser, listen: '{SERVER}' }}]\n\
         \x20 luns: {{ 0: one, 1: other }}\n\
         \x20 access: open\n"
    );
    World::serving(
        FaultConfig::default(),
        &Config::parse(&text, "test.yaml").unwrap(),
    )
}

fn log_in_by_srp(world: &mut World, n: u8) -> Mini<Endpoint> {
    let portals = &world.shared.registry.catalog().targets[0].portals;
    let port: TargetPortId = portals[0].target_port();
    let (device, to) = (world.client(n), SocketAddr::new(SERVER, 5555));
    let mini = Mini::connect(device, to, &login_req(n, port), &mut |d| world.pump(d));
    let mut mini = mini.map_err(|(_, error)| error).unwrap();
    mini.clear_unit_attention(&mut |d| world.pump(d));
    mini
}

/// Writes and reads blocks on the other disk. Returns the number of commands and the maximum
/// latency.
fn use_other_disk(
    world: &mut World,
    healthy: &mut Mini<Endpoint>,
    mut drive: impl FnMut(&World),
) -> (u32, Duration) {
    let begin = world.fabric.now();
    let (mut commands, mut longest) = (0, Duration::ZERO);
    while world.fabric.now() - begin < DURATION {
        let data = healthy.desc(0, 4096);
        let (out, into) = match commands % 2 {
            0 => (DataBuffer::Direct(data), DataBuffer::None),
            _ => (DataBuffer::None, DataBuffer::Direct(data)),
        };
        let cdb = cdb10(if commands % 2 == 0 { 0x2a } else { 0x28 }, 0, 8);
        let since = world.fabric.now();
        healthy.send_cmd(u64::from(commands), 1, &cdb, out, into);
        let response = healthy.receive_response(&mut |device| {
            drive(world);
            world.pump(device);
        });
        longest = longest.max(world.fabric.now() - since);
        // The first commands report unit attentions of the other disk.
        assert!(response.status == 0 || commands < 2, "{response:?}");
        commands += 1;
        // Don't send commands as fast as possible, because this would take too long with the
        // virtual clock.
        let next = world.fabric.now() + Duration::from_millis(200);
        while world.fabric.now() < next {
            drive(world);
            world.pump(&mut healthy.dev);
        }
    }
    (commands, longest)
}

fn check(protocol: &str, rate: u64, (commands, longest): (u32, Duration)) {
    let report = format!("{protocol} at {rate} B/s: {commands} commands, {longest:?}");
    assert!(longest < LONGEST, "{report}");
    assert!(commands > 20, "{report}");
}

#[test]
fn trickling_srp_initiator_delays_no_other() {
    for rate in RATES {
        let mut world = start();
        let mut healthy = log_in_by_srp(&mut world, 2);
        let mut slow = log_in_by_srp(&mut world, 1);
        let sent = SlowLink::count(&world, slow.dev.addr());
        for n in 0..COMMANDS {
            let data = slow.desc(0, 1 << 20);
            let cdb = cdb10(0x2a, n * 2048, 2048);
            slow.send_cmd(
                n.into(),
                0,
                &cdb,
                DataBuffer::Direct(data),
                DataBuffer::None,
            );
            // Sends the request.
            slow.dev.progress(world.fabric.now());
        }
        let link = SlowLink {
            before: sent.load(Ordering::Relaxed),
            sent,
            since: world.fabric.now(),
            rate,
        };
        let drive = |world: &World| {
            link.drive(world, &mut slow.dev);
            slow.poll();
        };
        check("SRP", rate, use_other_disk(&mut world, &mut healthy, drive));
    }
}

#[test]
fn trickling_iser_initiator_delays_no_other() {
    for rate in RATES {
        let mut world = start();
        let mut healthy = log_in_by_srp(&mut world, 2);
        let (device, to) = (world.client(1), SocketAddr::new(SERVER, 3260));
        let slow = Client::connect(device, to, false, &mut |d| world.pump(d));
        let mut slow = slow.unwrap();
        slow.login(Some(IQN), 1, &[], &mut |d| world.pump(d))
            .unwrap();
        slow.clear_unit_attention(&mut |d| world.pump(d));
        let sent = SlowLink::count(&world, slow.dev.addr());
        let data = vec![7; 1 << 20];
        for n in 0..COMMANDS {
            slow.send_write(n, n * 2048, &data, 0, 0);
            slow.dev.progress(world.fabric.now());
        }
        let link = SlowLink {
            before: sent.load(Ordering::Relaxed),
            sent,
            since: world.fabric.now(),
            rate,
        };
        let drive = |world: &World| link.drive(world, &mut slow.dev);
        check(
            "iSER",
            rate,
            use_other_disk(&mut world, &mut healthy, drive),
        );
    }
}
