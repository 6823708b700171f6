//! End-to-end iSER tests: a worker and a raw initiator over an in-memory wire, and then a server
//! that serves one disk over iSER, iSCSI and SRP at the same time.

mod world;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::channel;

use riser_reactor::{Ring, RingConfig};
use riser_scsi::iscsi::keys::Key;
use riser_scsi::iscsi::login::LoginError;
use riser_scsi::iscsi::name::parse_targets;
use riser_scsi::iscsi::pdu::{LoginStatus, TmfStatus};
use riser_scsi::srp::{LoginReq, LoginReqFlags, TskMgmtFunction};
use riser_target::config::Config;
use riser_target::host::SystemHost;
use riser_target::server::{Server, build_shared};
use riser_target::worker::mail::{Mail, Snapshot};
use riser_test_peers::Pump;
use riser_test_peers::iser_client::Client;
use riser_test_peers::mini::{Mini, Said, login_req, real};
use riser_test_peers::pdus::{cdb10, pattern};
use riser_test_peers::tcp;
use riser_transport::loopback::{Endpoint, Fabric, FabricConfig, Failing, Refusals};
use riser_transport::nic::NicLimits;
use riser_transport::roce::fault::FaultConfig;
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::Provider;
use world::{SERVER, World};

const IQN: &str = "iqn.2026-01.org.example:disk";

fn config(addr: IpAddr, portals: &str, rest: &str) -> Config {
    let text = format!(
        "backends: {{ d: {{ kind: ram, size: 16MiB }} }}\n\
         targets:\n\
         - name: t\n\
         \x20 iqn: {IQN}\n\
         \x20 portals: [{{ protocol: iser, listen: '{addr}' }}{portals}]\n\
         \x20 luns: {{ 0: d }}\n\
         \x20 access: open\n{rest}"
    );
    Config::parse(&text, "test.yaml").unwrap()
}

impl World {
    fn new(faults: FaultConfig, rest: &str) -> Self {
        Self::serving(faults, &config(SERVER, "", rest))
    }

    /// Creates a wire whose devices are iWARP adapters, which reject a READ without a sink.
    fn of_iwarp_adapters() -> Self {
        let fabric = Fabric::new(FabricConfig {
            limits: NicLimits {
                registered_reads: true,
                ..NicLimits::default()
            },
            ..FabricConfig::default()
        });
        let shared = build_shared(&config(SERVER, "", ""), None).unwrap();
        let ring = Ring::new(RingConfig::default()).unwrap();
        Self::on(fabric, shared, ring, Vec::new(), (1, Arc::new(SystemHost)))
    }

    /// Returns the number of regions of the worker's device.
    fn regions(&mut self, dev: &mut Endpoint) -> usize {
        let (tx, rx) = channel();
        self.mail.send(Mail::Snapshot(tx)).unwrap();
        self.pump(dev);
        let nic = rx.try_recv().unwrap().devices[0].nic;
        nic.expect("counters of a software NIC").usage.mrs
    }

    fn connect(&mut self, n: u8) -> Client<Endpoint> {
        let dev = self.client(n);
        Client::connect(dev, SocketAddr::new(SERVER, 3260), true, &mut |d| {
            self.pump(d);
        })
        .unwrap()
    }

    fn log_in(&mut self, n: u8, keys: &[(Key, u32)]) -> Client<Endpoint> {
        let mut client = self.connect(n);
        client
            .login(Some(IQN), n, keys, &mut |d| self.pump(d))
            .unwrap();
        client.clear_unit_attention(&mut |d| self.pump(d));
        client
    }

    /// Advances the clock until the worker has no connections.
    fn drain(&mut self) -> Snapshot {
        let mut idle = self.client(99);
        for _ in 0..20_000 {
            self.pump(&mut idle);
        }
        let (tx, rx) = channel();
        self.mail.send(Mail::Snapshot(tx)).unwrap();
        self.pump(&mut idle);
        rx.try_recv().unwrap()
    }

    fn is_empty(&mut self) {
        let snapshot = self.drain();
        assert_eq!(snapshot.iscsi_sessions.len(), 0);
        assert_eq!(snapshot.pool_free, snapshot.pool_size);
        let units = &self.shared.registry.catalog().targets[0].units;
        assert_eq!(units[0].1.tasks(), 0);
    }
}

/// Writes and reads back data of several sizes, with all ways of sending the data.
fn round_trips<P: Provider>(client: &mut Client<P>, unsolicited: bool, pump: Pump<'_, P>) {
    for (lba, blocks, immediate) in [
        (0, 1u16, 512),
        (3, 1, 0),
        (8, 8, 777),
        (64, 16, 8192),
        (100, 256, 8191),
        (1000, 2048, 0),
    ] {
        let len = usize::from(blocks) * 512;
        let data = pattern(len, lba as u8);
        let first_burst = if unsolicited { 8192 } else { 0 };
        let status = client.write(lba, &data, immediate, first_burst, pump);
        assert_eq!(status, 0, "write of {len} bytes");
        assert!(client.read(lba, blocks, pump) == (0, data), "{len} bytes");
    }
}

/// Requests from forged addresses, where the sender does not receive the response, must not block
/// other hosts.
#[test]
fn unconfirmed_requests_do_not_block_logins() {
    let mut world = World::new(FaultConfig::default(), "");
    for n in 2..=75 {
        let mut dev = world.client(n);
        let at = SocketAddr::new(SERVER, 3260);
        let offer = vec![0; 4];
        Mini::request(&mut dev, at, offer, &mut |d| world.pump(d));
        world.pump(&mut dev);
        drop(dev);
    }
    let mut client = world.log_in(1, &[]);
    round_trips(&mut client, false, &mut |d| world.pump(d));
    let (tx, rx) = channel();
    world.mail.send(Mail::Snapshot(tx)).unwrap();
    world.pump(&mut client.dev);
    assert_eq!(rx.try_recv().unwrap().iscsi_sessions.len(), 1);
}

#[test]
fn written_data_is_read_back() {
    let mut world = World::new(FaultConfig::default(), "");
    let keys = [(Key::InitialR2T, 0), (Key::FirstBurstLength, 65536)];
    let mut client = world.log_in(1, &keys);
    let session = client.session.as_ref().unwrap();
    assert!(session.rdma_extensions && session.immediate_data && !session.initial_r2t);
    assert_eq!(session.first_burst, 8192);
    round_trips(&mut client, false, &mut |d| world.pump(d));
    round_trips(&mut client, true, &mut |d| world.pump(d));
    assert!(client.invalidated > 0, "responses invalidate keys");
    client.logout(&mut |d| world.pump(d));
    client.disconnect(&mut |d| world.pump(d));
    world.is_empty();
}

#[test]
fn lossy_wire_changes_nothing() {
    let faults = FaultConfig {
        seed: 7,
        loss: 20_000,
        duplication: 10_000,
        reorder: 10_000,
        ..FaultConfig::default()
    };
    let mut world = World::new(faults, "");
    let mut client = world.log_in(1, &[(Key::InitialR2T, 0)]);
    round_trips(&mut client, true, &mut |d| world.pump(d));
    client.disconnect(&mut |d| world.pump(d));
    world.is_empty();
}

/// An initiator whose device doesn't support invalidation, and that doesn't send unsolicited data.
#[test]
fn minimal_initiator_is_served() {
    let mut world = World::new(FaultConfig::default(), "");
    let dev = world.client(1);
    let to = SocketAddr::new(SERVER, 3260);
    let mut client = Client::connect(dev, to, false, &mut |d| world.pump(d)).unwrap();
    assert!(!client.reply.remote_invalidate && !client.reply.zero_based);
    let keys = [(Key::InitialR2T, 1), (Key::ImmediateData, 0)];
    client
        .login(Some(IQN), 1, &keys, &mut |d| world.pump(d))
        .unwrap();
    client.clear_unit_attention(&mut |d| world.pump(d));
    let data = pattern(65536, 1);
    assert_eq!(client.write(0, &data, 0, 0, &mut |d| world.pump(d)), 0);
    assert!(client.read(0, 128, &mut |d| world.pump(d)) == (0, data));
    assert_eq!(client.invalidated, 0);
    client.disconnect(&mut |d| world.pump(d));
    world.is_empty();
}

#[test]
fn discovery_lists_portals() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut client = world.connect(1);
    client.login(None, 1, &[], &mut |d| world.pump(d)).unwrap();
    let text = client.send_targets(&mut |d| world.pump(d));
    let (found, refused) = parse_targets(&text).unwrap();
    assert_eq!((found.len(), refused), (1, 0));
    assert_eq!(found[0].name.as_str(), IQN);
    let addresses: Vec<_> = found[0].addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.0.0.1:3260,1"]);
    client.disconnect(&mut |d| world.pump(d));
    world.is_empty();
}

#[test]
fn discovery_lists_targets_of_portal() {
    let other = "iqn.2026-01.org.example:other";
    let rest = format!(
        "- name: other\n  iqn: {other}\n  luns: {{ 0: d }}\n  access: open\n  \
         portals: [{{ protocol: iser, listen: '10.0.0.1:3261' }}]\n"
    );
    let mut world = World::new(FaultConfig::default(), &rest);
    for (n, port, name) in [(1, 3260, IQN), (2, 3261, other)] {
        let (dev, to) = (world.client(n), SocketAddr::new(SERVER, port));
        let mut client = Client::connect(dev, to, true, &mut |d| world.pump(d)).unwrap();
        client.login(None, n, &[], &mut |d| world.pump(d)).unwrap();
        let text = client.send_targets(&mut |d| world.pump(d));
        let (found, _) = parse_targets(&text).unwrap();
        let names: Vec<_> = found.iter().map(|found| found.name.as_str()).collect();
        assert_eq!(names, [name]);
        client.disconnect(&mut |d| world.pump(d));
    }
    world.is_empty();
}

#[test]
fn strangers_and_unknown_targets_are_refused() {
    let mut world = World::new(
        FaultConfig::default(),
        "- name: closed\n  iqn: iqn.2026-01.org.example:closed\n  \
         portals: [{ protocol: iser, listen: 10.0.0.1 }]\n  luns: { 0: d }\n  \
         access: [{ iqn: 'iqn.2026-01.org.example:other' }]\n",
    );
    for (target, status) in [
        ("iqn.2026-01.org.example:none", LoginStatus::NOT_FOUND),
        (
            "iqn.2026-01.org.example:closed",
            LoginStatus::AUTHORIZATION_FAILURE,
        ),
    ] {
        let mut client = world.connect(1);
        let refused = client.login(Some(target), 1, &[], &mut |d| world.pump(d));
        assert_eq!(refused, Err(LoginError::Refused(status)));
        client.wait_closed(&mut |d| world.pump(d));
        client.disconnect(&mut |d| world.pump(d));
    }
    world.is_empty();
}

/// A login with the same initiator port reinstates the session and closes the old connection.
#[test]
fn second_login_reinstates_session() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut first = world.log_in(1, &[]);
    let mut second = world.connect(2);
    second
        .login(Some(IQN), 1, &[], &mut |d| world.pump(d))
        .unwrap();
    first.wait_closed(&mut |d| world.pump(d));
    second.clear_unit_attention(&mut |d| world.pump(d));
    second.disconnect(&mut |d| world.pump(d));
    first.disconnect(&mut |d| world.pump(d));
    world.is_empty();
}

/// A peer that only connects gets a few connections, and a new connection replaces the oldest one.
/// Other hosts must still be served.
#[test]
fn idle_connections_are_limited() {
    let mut world = World::new(FaultConfig::default(), "");
    let to = SocketAddr::new(SERVER, 3260);
    let mut dev = world.client(1);
    for n in 0.. {
        let (client, error) = Client::try_connect(dev, to, true, &mut |d| world.pump(d));
        dev = client.leave_open();
        if let Some(error) = error {
            // The 17th connection has replaced the first one, and this is the first attempt that
            // notices it.
            assert_eq!(n, 17);
            assert!(error.contains("Disconnected"), "{error}");
            break;
        }
    }
    let mut other = world.log_in(2, &[]);
    round_trips(&mut other, false, &mut |d| world.pump(d));
    other.disconnect(&mut |d| world.pump(d));
    world.is_empty();
}

/// If a peer disappears while commands are in flight, all resources must be released.
#[test]
fn vanished_peer_leaves_nothing() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut client = world.log_in(1, &[(Key::InitialR2T, 0)]);
    let data = pattern(1 << 20, 9);
    for tag in 0..8 {
        client.send_write(500 + tag, tag * 16, &data[..8192], 0, 0);
    }
    // A command that waits for data which is never sent.
    client.send_write(600, 0, &data[..8192], 512, 4096);
    client.disconnect(&mut |d| world.pump(d));
    world.is_empty();
}

/// The data of a read is sent, but the device rejects the response.
#[test]
fn partially_posted_chain_closes_connection() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut client = world.log_in(1, &[]);
    let one = Refusals { after: 1, calls: 1 };
    world.fabric.refuse_posts(SERVER, one);
    client.send_read(7, 0, 256);
    client.wait_closed(&mut |d| world.pump(d));
    world.is_empty();

    let mut client = world.log_in(2, &[]);
    let all = Refusals {
        after: 1,
        ..Refusals::ALL
    };
    world.fabric.refuse_posts(SERVER, all);
    client.send_read(7, 0, 256);
    client.wait_closed(&mut |d| world.pump(d));
    let snapshot = world.drain();
    assert!(snapshot.pool_free < snapshot.pool_size);
    world.fabric.unplug(SERVER);
    world.is_empty();
}

/// The device rejects the responses of two reads, and also any markers after them. After this, the
/// device is idle.
#[test]
fn rejected_chains_close_connection() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut client = world.log_in(1, &[]);
    client.send_read(7, 0, 256);
    client.send_read(8, 256, 256);
    let refusals = Refusals { after: 0, calls: 3 };
    world.fabric.refuse_posts(SERVER, refusals);
    client.wait_closed(&mut |d| world.pump(d));
    world.fabric.refuse_posts(SERVER, Refusals::NONE);
    world.is_empty();
}

#[test]
fn iwarp_adapter_registers_sinks_of_reads() {
    let mut world = World::of_iwarp_adapters();
    let idle = world.regions(&mut world.client(98));
    let mut client = world.log_in(1, &[(Key::InitialR2T, 0)]);
    let connected = world.regions(&mut client.dev);
    for unsolicited in [false, true] {
        round_trips(&mut client, unsolicited, &mut |d| world.pump(d));
        assert_eq!(world.regions(&mut client.dev), connected);
    }
    // Both rings and the pool, but no sinks.
    assert_eq!(connected, idle + 3);
    client.send_write(500, 0, &pattern(256 << 10, 1), 0, 0);
    let mut most = 0;
    for _ in 0..200 {
        most = world.regions(&mut client.dev).max(most);
    }
    assert!(most > connected, "a sink while data is transferred");
    client.disconnect(&mut |d| world.pump(d));
    world.is_empty();
    assert_eq!(world.regions(&mut world.client(97)), idle);
}

/// Connections of an iWARP adapter end at any time. Their sinks are deregistered once, which the
/// device checks, and their buffers are released, although an adapter may not flush its requests.
#[test]
fn sinks_end_with_connection() {
    let mut world = World::of_iwarp_adapters();
    let idle = world.regions(&mut world.client(98));
    let data = pattern(256 << 10, 9);
    for steps in [0, 1, 2, 5, 20] {
        let mut client = world.log_in(1, &[(Key::InitialR2T, 0)]);
        for tag in 0..8 {
            client.send_write(500 + tag, tag * 512, &data, 0, 0);
        }
        (0..steps).for_each(|_| world.pump(&mut client.dev));
        client.disconnect(&mut |d| world.pump(d));
        world.is_empty();
        assert_eq!(world.regions(&mut world.client(97)), idle);
    }
    // The device rejects a part of a chain, or each chain and the markers after it.
    for (after, calls) in [(1, 1), (2, 1), (0, 1), (1, u32::MAX)] {
        let mut client = world.log_in(1, &[(Key::InitialR2T, 0)]);
        world.fabric.refuse_posts(SERVER, Refusals { after, calls });
        client.send_write(500, 0, &data, 0, 0);
        client.send_write(501, 0, &data, 0, 0);
        client.wait_closed(&mut |d| world.pump(d));
        world.fabric.refuse_posts(SERVER, Refusals::NONE);
        world.is_empty();
        assert_eq!(world.regions(&mut world.client(97)), idle);
    }
    // A sink cannot be registered.
    let mut client = world.log_in(1, &[(Key::InitialR2T, 0)]);
    world.fabric.record(SERVER, None);
    assert_eq!(client.write(0, &data, 0, 0, &mut |d| world.pump(d)), 0);
    let mut calls = world.fabric.take_record(SERVER).calls.into_iter();
    let at = calls.position(|name| name == "reg_mr").expect("a sink");
    world.fabric.record(SERVER, Some(Failing::Call(at)));
    client.send_write(501, 0, &data, 0, 0);
    client.wait_closed(&mut |d| world.pump(d));
    world.is_empty();
    assert_eq!(world.regions(&mut world.client(97)), idle);
}

/// Serves one disk over three protocols at the same time: each must read the data written with the
/// other two.
#[test]
fn target_serves_all_protocols_at_once() {
    let at = |host| IpAddr::V4(Ipv4Addr::new(127, 78, 1, host));
    let portals = format!(
        ", {{ protocol: iscsi, listen: '{0}' }}, {{ protocol: srp, listen: '{0}' }}",
        at(1)
    );
    let server = Server::start(&config(at(1), &portals, "workers: { count: 2 }\n")).unwrap();
    let to = |port| SocketAddr::new(at(1), port);
    assert_eq!(server.addresses(), [to(5555), to(3260), to(3260)]);
    let dev = Roce::open(&RoceConfig::new(at(2))).unwrap();
    let mut iser = Client::connect(dev, to(3260), true, &mut real).unwrap();
    iser.login(Some(IQN), 1, &[], &mut real).unwrap();
    iser.clear_unit_attention(&mut real);
    let dev = Roce::open(&RoceConfig::new(at(3))).unwrap();
    let port = server.shared().registry.catalog().targets[0].portals[0].target_port();
    let mut srp = Mini::connected(dev, to(5555), &login_req(1, port), &mut real);
    srp.clear_unit_attention(&mut real);
    let mut tcp = tcp::Client::ready_at(to(3260), IQN, 2);

    round_trips(&mut iser, false, &mut real);
    let data = pattern(4096, 0x77);
    assert_eq!(iser.write(0, &data, 0, 0, &mut real), 0);
    assert_eq!(srp.read(0, 8, 0, &mut real).status, 0);
    assert_eq!(srp.data.slice(0..4096).unwrap().to_vec(), data);
    let read = cdb10(0x28, 0, 8);
    assert_eq!(tcp.command(&read, false, 4096, &[]), (0, data));
    let write = cdb10(0x2a, 0, 8);
    assert_eq!(tcp.command(&write, true, 4096, &pattern(4096, 1)).0, 0);
    assert!(iser.read(0, 8, &mut real) == (0, pattern(4096, 1)));
    let sessions: usize = server
        .snapshot()
        .iter()
        .map(|s| s.iscsi_sessions.len())
        .sum();
    assert_eq!(sessions, 2);
    drop(tcp);
    iser.logout(&mut real);
    iser.disconnect(&mut real);
    srp.disconnect(&mut real);
    server.shutdown().unwrap();
}

/// A reset must be reported as an SRP asynchronous event (SRP r16a, SRP_AER_REQ), regardless of its
/// protocol.
#[test]
fn reset_is_reported_as_srp_event() {
    let at = |host| IpAddr::V4(Ipv4Addr::new(127, 78, 2, host));
    let portals = format!(
        ", {{ protocol: iscsi, listen: '{0}' }}, {{ protocol: srp, listen: '{0}' }}",
        at(1)
    );
    let server = Server::start(&config(at(1), &portals, "workers: { count: 2 }\n")).unwrap();
    let to = |port| SocketAddr::new(at(1), port);
    let port = server.shared().registry.catalog().targets[0].portals[0].target_port();
    let srp = |host, login: &LoginReq| {
        let dev = Roce::open(&RoceConfig::new(at(host))).unwrap();
        let mut srp = Mini::connected(dev, to(5555), login, &mut real);
        srp.clear_unit_attention(&mut real);
        srp
    };
    let request = LoginReq {
        flags: LoginReqFlags::AESOLNT,
        ..login_req(1, port)
    };
    let mut listener = srp(2, &request);
    let mut resetter = srp(3, &login_req(2, port));
    let dev = Roce::open(&RoceConfig::new(at(4))).unwrap();
    let mut iser = Client::connect(dev, to(3260), true, &mut real).unwrap();
    iser.login(Some(IQN), 1, &[], &mut real).unwrap();
    let mut tcp = tcp::Client::login_at(to(3260), IQN, 2, None).unwrap();

    // UNIT ATTENTION, BUS DEVICE RESET FUNCTION OCCURRED (SPC-4 table D.2: 29h/03h).
    let mut expect_event = || match listener.next(&mut real) {
        Said::Event(sense) => assert_eq!((sense[2] & 0xf, sense[12], sense[13]), (6, 0x29, 3)),
        other => panic!("an event, not {other:?}"),
    };
    resetter.send_tmf(9, TskMgmtFunction::LogicalUnitReset, 0);
    assert_eq!(resetter.receive_response(&mut real).code, Some(0));
    expect_event();
    assert_eq!(tcp.reset_unit(), TmfStatus::Complete);
    expect_event();
    assert_eq!(iser.reset_unit(&mut real), TmfStatus::Complete);
    expect_event();

    drop(tcp);
    iser.logout(&mut real);
    iser.disconnect(&mut real);
    listener.disconnect(&mut real);
    resetter.disconnect(&mut real);
    server.shutdown().unwrap();
}
