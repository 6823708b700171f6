//! Tests a worker and an initiator over an in-memory wire with a virtual clock.

mod world;

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use riser_reactor::RingConfig;
use riser_scsi::config::Identity;
use riser_scsi::opcode::Kind;
use riser_scsi::reservation::{ReservationKeeper, SavedReservations};
use riser_scsi::sense::{AdditionalSense, Sense};
use riser_scsi::srp::{
    DataBuffer, IndirectTable, LoginRejReason, MultiChannelAction, MultiChannelResult,
    TargetPortId, TskMgmtFunction,
};
use riser_target::backend::{Fault, FaultOn, Faults};
use riser_target::config::{Config, Protocol};
use riser_target::fabric::{ConnRef, TaskIdx, TaskRef};
use riser_target::iscsi::ReassignRequest;
use riser_target::server::build_shared;
use riser_target::sessions::catalog::Entrance;
use riser_target::sessions::guard::{Departure, SessionGuard};
use riser_target::sessions::nexus::{Endpoints, NexusKey};
use riser_target::worker::mail::Mail;
use riser_target::worker::{Report, TcpListener};
use riser_test_peers::mini::{Mini, Refused, Said, config, login_req};
use riser_test_peers::pdus::{cdb10, pattern, reserve_out_list};
use riser_testkit::eventually;
use riser_transport::loopback::{Endpoint, Refusals};
use riser_transport::roce::fault::FaultConfig;
use world::{SERVER, World};

impl World {
    fn new(faults: FaultConfig, rest: &str) -> Self {
        let text = config(SERVER, 1, rest);
        Self::serving(faults, &Config::parse(&text, "test.yaml").unwrap())
    }

    fn target(&self) -> TargetPortId {
        self.shared.registry.catalog().targets[0].portals[0].target_port()
    }

    fn log_in(&mut self, n: u8) -> Mini<Endpoint> {
        let dev = self.client(n);
        let req = login_req(n, self.target());
        let dst = SocketAddr::new(SERVER, 5555);
        let mut mini = Mini::connected(dev, dst, &req, &mut |d| self.pump(d));
        mini.clear_unit_attention(&mut |d| self.pump(d));
        mini
    }
}

#[test]
fn written_data_is_read_back() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut mini = world.log_in(1);
    assert_eq!(mini.rsp.req_lim_delta, 128);
    for (lba, blocks) in [(0, 1u16), (8, 8), (100, 256), (1000, 2048)] {
        let len = usize::from(blocks) * 512;
        let data = pattern(len, lba as u8);
        mini.data.write(0, &data);
        let response = mini.write(lba, blocks, 0, &mut |d| world.pump(d));
        assert_eq!(response.status, 0);
        mini.data.fill(0, len, 0);
        let response = mini.read(lba, blocks, 2 << 20, &mut |d| world.pump(d));
        assert_eq!(response.status, 0);
        assert_eq!(
            mini.data.slice(2 << 20..(2 << 20) + len).unwrap().to_vec(),
            data
        );
    }
    mini.disconnect(&mut |d| world.pump(d));
    let snapshot = drain(&mut world);
    assert_eq!(snapshot.sessions, []);
    assert_eq!(snapshot.pool_free, snapshot.pool_size);
    assert_eq!(snapshot.counters.torn_down, 0);
    assert_eq!(world.shared.registry.sessions(), 0);
}

/// Blocks are transferred together with their protection information, in several pieces.
#[test]
fn protection_information_is_transferred() {
    let text = config(SERVER, 1, "").replace("16MiB }", "16MiB, protection: { type: 3 } }");
    let mut parsed = Config::parse(&text, "test.yaml").unwrap();
    parsed.limits.window = 64 << 10;
    let mut world = World::serving(FaultConfig::default(), &parsed);
    let mut mini = world.log_in(1);
    // The guard of zeroes is zero, and the tags of type 3 belong to the initiator.
    let frame = |n: u16| {
        let [high, low] = n.to_be_bytes();
        [vec![0; 512], vec![0, 0, high, low, 1, 2, 3, low]].concat()
    };
    for blocks in [1, 200_u16, 2000] {
        let len = usize::from(blocks) * 520;
        let data: Vec<u8> = (0..blocks).flat_map(frame).collect();
        let protected = |op, at: usize, mini: &Mini<Endpoint>| {
            let mut cdb = cdb10(op, 77, blocks);
            cdb[1] = 1 << 5;
            (cdb, DataBuffer::Direct(mini.desc(at, len as u32)))
        };
        mini.data.write(0, &data);
        let (cdb, out) = protected(0x2a, 0, &mini);
        let response = mini.command(&cdb, out, DataBuffer::None, &mut |d| world.pump(d));
        assert_eq!(response.status, 0);
        let (cdb, into) = protected(0x28, 2 << 20, &mini);
        let response = mini.command(&cdb, DataBuffer::None, into, &mut |d| world.pump(d));
        assert_eq!(response.status, 0);
        let read = mini.data.slice(2 << 20..(2 << 20) + len).unwrap();
        assert!(read.to_vec() == data, "{blocks} blocks");
    }
    // A wrong guard is rejected, and nothing is written.
    mini.data.write(512, &[9]);
    let mut cdb = cdb10(0x2a, 77, 1);
    cdb[1] = 1 << 5;
    let out = DataBuffer::Direct(mini.desc(0, 520));
    let response = mini.command(&cdb, out, DataBuffer::None, &mut |d| world.pump(d));
    assert_eq!(response.status, 2);
    let response = mini.read(77, 1, 0, &mut |d| world.pump(d));
    assert_eq!(response.status, 0);
    assert_eq!(mini.data.slice(0..512).unwrap().to_vec(), [0; 512]);
}

fn drain(world: &mut World) -> riser_target::worker::mail::Snapshot {
    let mut idle = world.client(99);
    for _ in 0..50_000 {
        world.pump(&mut idle);
    }
    snapshot(world)
}

fn snapshot(world: &mut World) -> riser_target::worker::mail::Snapshot {
    let mut idle = world.client(98);
    let (tx, rx) = channel();
    world.mail.send(Mail::Snapshot(tx)).unwrap();
    world.pump(&mut idle);
    rx.try_recv().unwrap()
}

#[test]
fn immediate_and_indirect_data_arrive() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut mini = world.log_in(1);
    let data = pattern(4096, 3);
    let immediate = DataBuffer::Immediate {
        offset: riser_scsi::srp::ImmediateDataOffset::new(80).unwrap(),
        len: 4096,
        data: &data,
    };
    let response = mini.command(&cdb10(0x2a, 0, 8), immediate, DataBuffer::None, &mut |d| {
        world.pump(d);
    });
    assert_eq!(response.status, 0);
    // Eight blocks with separate buffers, where the descriptors must be fetched from memory.
    let descs: Vec<_> = (0..8).map(|i| mini.desc((7 - i) * 10_000, 512)).collect();
    let mut table = Vec::new();
    for d in &descs {
        table.extend(d.va().to_be_bytes());
        table.extend(d.key().to_be_bytes());
        table.extend(d.data_len().to_be_bytes());
    }
    mini.data.write(1 << 20, &table);
    for inline in [8, 3, 0] {
        mini.data.fill(0, 100_000, 0);
        let buffer = DataBuffer::Indirect(IndirectTable {
            table: mini.desc(1 << 20, 128),
            len: 4096,
            inline: &descs[..inline],
        });
        let response = mini.command(&cdb10(0x28, 0, 8), DataBuffer::None, buffer, &mut |d| {
            world.pump(d);
        });
        assert_eq!(response.status, 0);
        for i in 0..8 {
            let at = (7 - i) * 10_000;
            let got = mini.data.slice(at..at + 512).unwrap().to_vec();
            assert_eq!(
                got,
                data[i * 512..(i + 1) * 512],
                "block {i}, {inline} inline"
            );
        }
    }
}

#[test]
fn bad_wire_changes_nothing() {
    let faults = FaultConfig {
        seed: 7,
        loss: 20_000,
        duplication: 10_000,
        corruption: 10_000,
        reorder: 20_000,
        ..FaultConfig::default()
    };
    let mut world = World::new(faults, "");
    let mut mini = world.log_in(1);
    for round in 0..40u32 {
        let data = pattern(65536, round as u8);
        mini.data.write(0, &data);
        assert_eq!(
            mini.write(round * 128, 128, 0, &mut |d| world.pump(d))
                .status,
            0
        );
        assert_eq!(
            mini.read(round * 128, 128, 1 << 20, &mut |d| world.pump(d))
                .status,
            0
        );
        assert_eq!(
            mini.data
                .slice(1 << 20..(1 << 20) + 65536)
                .unwrap()
                .to_vec(),
            data
        );
    }
}

#[test]
fn rejections_reach_initiator() {
    let mut world = World::new(FaultConfig::default(), "limits: { max_sessions: 1 }\n");
    let dst = SocketAddr::new(SERVER, 5555);
    let try_login = |world: &mut World, change: &dyn Fn(&mut riser_scsi::srp::LoginReq)| {
        let dev = world.client(2);
        let mut req = login_req(2, world.target());
        change(&mut req);
        Mini::connect(dev, dst, &req, &mut |d| world.pump(d)).map_err(|(_, e)| e)
    };
    let refused = |r: Result<Mini<Endpoint>, Refused>| r.err().expect("refused");
    let e = refused(try_login(&mut world, &|r| {
        r.target_port = TargetPortId([9; 16]);
    }));
    assert_eq!(e, Refused::Login(LoginRejReason::UnableToAssociateChannel));
    let e = refused(try_login(&mut world, &|r| r.req_it_iu_len = 1 << 20));
    assert_eq!(e, Refused::Login(LoginRejReason::ReqItIuLengthTooLarge));
    let _first = world.log_in(1);
    let e = refused(try_login(&mut world, &|_| {}));
    assert_eq!(e, Refused::Login(LoginRejReason::InsufficientResources));
}

#[test]
fn second_login_replaces_or_joins_session() {
    let mut world = World::new(FaultConfig::default(), "");
    let dst = SocketAddr::new(SERVER, 5555);
    let mut first = world.log_in(1);
    let mut req = login_req(1, world.target());
    req.multi_channel = MultiChannelAction::Multi;
    let dev = world.client(2);
    let mut second = Mini::connected(dev, dst, &req, &mut |d| world.pump(d));
    assert_eq!(second.rsp.multi_channel, MultiChannelResult::Maintained);
    // Both channels use the same nexus, so the unit attention was already reported on the first
    // channel.
    let none = || DataBuffer::None;
    let response = second.command(&[0; 6], none(), none(), &mut |d| world.pump(d));
    assert_eq!(response.status, 0);
    assert_eq!(world.shared.registry.sessions(), 1);
    req.multi_channel = MultiChannelAction::Single;
    let dev = world.client(3);
    let mut third = Mini::connected(dev, dst, &req, &mut |d| world.pump(d));
    assert_eq!(third.rsp.multi_channel, MultiChannelResult::Terminated);
    for old in [&mut first, &mut second] {
        assert_eq!(old.next(&mut |d| world.pump(d)), Said::Logout(4));
        old.wait_closed(&mut |d| world.pump(d));
    }
    for _ in 0..1000 {
        world.pump(&mut third.dev);
    }
    assert_eq!(world.shared.registry.sessions(), 1);
}

/// Logs in again from the same port, using another connection.
fn log_in_again(world: &mut World, client: u8) -> Result<Mini<Endpoint>, Refused> {
    let dev = world.client(client);
    let req = login_req(1, world.target());
    let dst = SocketAddr::new(SERVER, 5555);
    Mini::connect(dev, dst, &req, &mut |d| world.pump(d)).map_err(|(_, e)| e)
}

#[test]
fn replaced_session_has_no_late_write() {
    const SLOW: Duration = Duration::from_millis(300);
    let mut parsed = Config::parse(&config(SERVER, 1, ""), "test.yaml").unwrap();
    let slow = Fault {
        on: FaultOn::Write,
        offset: 0,
        len: u64::MAX,
        times: Some(1),
        delay: SLOW,
        error: None,
    };
    parsed.backends[0].spec.faults = Some(Arc::new(Faults::new(vec![slow])));
    let mut world = World::serving(FaultConfig::default(), &parsed);
    let mut old = world.log_in(1);
    old.data.fill(0, 512, 0xaa);
    let data = DataBuffer::Direct(old.desc(0, 512));
    old.send_cmd(5, 0, &cdb10(0x2a, 0, 1), data, DataBuffer::None);
    for _ in 0..200 {
        old.poll();
        world.pump(&mut old.dev);
    }
    assert_eq!(snapshot(&mut world).sessions[0].in_flight, 1);
    let delay_ends = Instant::now() + SLOW;
    // The initiator has dropped the old connection and writes the same block again.
    let mut new = log_in_again(&mut world, 2).unwrap();
    assert_eq!(new.rsp.multi_channel, MultiChannelResult::Terminated);
    new.send_cmd(1, 0, &[0; 6], DataBuffer::None, DataBuffer::None);
    let response = new.receive_response(&mut |d| world.pump(d));
    let sense = Sense::parse(&response.sense).unwrap();
    assert_eq!(sense.additional, AdditionalSense::NEXUS_LOSS);
    new.data.fill(0, 512, 0xbb);
    assert_eq!(new.write(0, 1, 0, &mut |d| world.pump(d)).status, 0);
    // If the old write had not completed before the new one was started, it would now be written to
    // the disk.
    eventually("the end of the delay", Duration::from_secs(60), || {
        world.pump(&mut new.dev);
        Instant::now() > delay_ends
    });
    for _ in 0..50 {
        world.pump(&mut new.dev);
    }
    assert_eq!(new.read(0, 1, 4096, &mut |d| world.pump(d)).status, 0);
    let block = new.data.slice(4096..4097).unwrap().to_vec();
    assert_eq!(block, [0xbb], "the replaced session's write was last");
}

/// Sends PERSISTENT RESERVE OUT with these keys. Returns the status.
fn reserve_out(
    world: &mut World,
    mini: &mut Mini<Endpoint>,
    (action, kind): (u8, u8),
    (own, key): (u64, u64),
) -> u8 {
    mini.data.write(8192, &reserve_out_list(own, key));
    let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
    let data = DataBuffer::Direct(mini.desc(8192, 24));
    let pump = &mut |d: &mut _| world.pump(d);
    mini.command(&cdb, data, DataBuffer::None, pump).status
}

/// PREEMPT AND ABORT aborts disk operations of the preempted initiator, and must not wait for other
/// operations.
#[test]
fn preempt_and_abort_aborts_preempted_commands() {
    let mut parsed = Config::parse(&config(SERVER, 1, ""), "test.yaml").unwrap();
    let stuck = |block: u64| Fault {
        on: FaultOn::Write,
        offset: block * 512,
        len: 512,
        times: Some(1),
        delay: Duration::from_secs(600),
        error: None,
    };
    let faults = Faults::new([1, 2].map(stuck).to_vec());
    parsed.backends[0].spec.faults = Some(Arc::new(faults));
    let mut world = World::serving(FaultConfig::default(), &parsed);
    let [mut one, mut two, mut three] = [1, 2, 3].map(|n| world.log_in(n));
    for (mini, key) in [(&mut one, 0xa), (&mut two, 0xb), (&mut three, 0xc)] {
        assert_eq!(reserve_out(&mut world, mini, (6, 0), (0, key)), 0);
    }
    assert_eq!(reserve_out(&mut world, &mut two, (1, 5), (0xb, 0)), 0);
    for (mini, block) in [(&mut one, 1), (&mut three, 2)] {
        mini.data.fill(0, 512, 0xaa);
        let data = DataBuffer::Direct(mini.desc(0, 512));
        mini.send_cmd(5, 0, &cdb10(0x2a, block, 1), data, DataBuffer::None);
        for _ in 0..200 {
            mini.poll();
            world.pump(&mut mini.dev);
        }
    }
    assert_eq!(reserve_out(&mut world, &mut two, (5, 5), (0xb, 0xa)), 0);
    let in_flight = |world: &mut World| {
        let sessions = snapshot(world).sessions;
        sessions.iter().map(|s| s.in_flight).sum::<usize>()
    };
    assert_eq!(two.read(1, 1, 4096, &mut |d| world.pump(d)).status, 0);
    assert_eq!(two.data.slice(4096..4097).unwrap().to_vec(), [0]);
    // The write is completed with TASK ABORTED. Then there is a unit attention, followed by the
    // conflict.
    let ended = one.receive_response(&mut |d| world.pump(d));
    assert_eq!((ended.tag, ended.status, ended.delta), (5, 0x40, 1));
    for _ in 0..50 {
        world.pump(&mut one.dev);
    }
    assert_eq!(
        in_flight(&mut world),
        1,
        "the write of who stays registered"
    );
    let none = || DataBuffer::None;
    let response = one.command(&[0; 6], none(), none(), &mut |d| world.pump(d));
    assert_eq!((response.tag, response.status), (77, 2));
    assert_eq!(one.write(0, 1, 0, &mut |d| world.pump(d)).status, 0x18);
}

/// Returns a channel of a worker that doesn't exist, to simulate a channel with commands at a
/// device.
fn held_channel(world: &World) -> SessionGuard {
    let req = login_req(1, world.target());
    let key = NexusKey {
        initiator: req.initiator_port,
        target: req.target_port,
    };
    let (worker, serial) = (7, 1);
    let channel = ConnRef { worker, serial };
    let ends = Endpoints {
        peer: SocketAddr::from(([10, 0, 0, 101], 1)),
        local: SERVER,
        entrance: Entrance::Port(5555),
    };
    let (registry, now) = (&world.shared.registry, world.fabric.now());
    let (_, guard) = registry.login(&req, ends, channel, now).unwrap();
    assert!(registry.establish(key, channel).may_start);
    guard
}

#[test]
fn new_commands_wait_for_replaced_session() {
    let mut world = World::new(FaultConfig::default(), "");
    let held = held_channel(&world);
    let mut new = log_in_again(&mut world, 1).unwrap();
    new.send_cmd(1, 0, &[0; 6], DataBuffer::None, DataBuffer::None);
    for _ in 0..1000 {
        new.poll();
        world.pump(&mut new.dev);
    }
    assert_eq!(new.said, [], "the old session still has commands");
    let left = held.leave_session(Departure::default());
    let [ConnRef { serial, .. }] = left.notify[..] else {
        panic!("one channel waits: {left:?}");
    };
    world.mail.send(Mail::OthersGone { serial }).unwrap();
    assert_eq!(
        new.receive_response(&mut |d| world.pump(d)).status,
        2,
        "its attention"
    );
    assert_eq!(new.read(0, 8, 0, &mut |d| world.pump(d)).status, 0);
}

/// A host with a hanging disk can log in again and use its units. Only the hanging unit returns
/// BUSY.
#[test]
fn srp_login_starts_despite_hanging_write() {
    const BUSY: u8 = 8;
    let mut parsed = Config::parse(&config(SERVER, 1, ""), "test.yaml").unwrap();
    let faults = Arc::new(Faults::new(Vec::new()));
    faults.hold(FaultOn::Write, 0, u64::MAX);
    parsed.backends[0].spec.faults = Some(Arc::clone(&faults));
    let mut world = World::serving(FaultConfig::default(), &parsed);
    let mut old = world.log_in(1);
    old.data.fill(0, 512, 0xaa);
    let data = DataBuffer::Direct(old.desc(0, 512));
    old.send_cmd(5, 0, &cdb10(0x2a, 0, 1), data, DataBuffer::None);
    for _ in 0..200 {
        old.poll();
        world.pump(&mut old.dev);
    }
    let mut new = log_in_again(&mut world, 2).unwrap();
    let none = || DataBuffer::None;
    for _ in 0..3 {
        let response = new.command(&[0; 6], none(), none(), &mut |d| world.pump(d));
        assert_eq!(response.status, BUSY, "the write may still be executed");
    }
    // Another login isn't delayed either.
    let mut new = log_in_again(&mut world, 3).unwrap();
    let response = new.command(&[0; 6], none(), none(), &mut |d| world.pump(d));
    assert_eq!(response.status, BUSY);
    faults.release();
    eventually("the write ends", Duration::from_secs(60), || {
        let response = new.command(&[0; 6], none(), none(), &mut |d| world.pump(d));
        response.status != BUSY
    });
    assert_eq!(new.read(0, 1, 0, &mut |d| world.pump(d)).status, 0);
}

#[test]
fn unconfirmed_request_keeps_session() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut victim = world.log_in(1);
    let req = login_req(1, world.target());
    let mut private_data = vec![0; 56];
    req.emit_rdma(&mut private_data);
    // The sender of the request does not receive the response, because its address was forged.
    let mut dev = world.client(2);
    Mini::request(
        &mut dev,
        SocketAddr::new(SERVER, 5555),
        private_data,
        &mut |d| {
            world.pump(d);
        },
    );
    drop(dev);
    for _ in 0..2000 {
        victim.poll();
        world.pump(&mut victim.dev);
    }
    let registry = &world.shared.registry;
    assert_eq!(registry.unconfirmed(), 1, "the request was taken");
    assert_eq!(registry.sessions(), 1, "and no session's place");
    assert!(!victim.closed && victim.said.is_empty());
    assert_eq!(victim.read(0, 8, 0, &mut |d| world.pump(d)).status, 0);
}

/// Two targets, each with a RAM disk and a portal.
const TWO_TARGETS: &str = "\
backends: { a: { kind: ram, size: 1MiB }, b: { kind: ram, size: 1MiB } }
targets:
  - { name: outer, portals: [{ protocol: srp, listen: \"10.0.0.1:5555\" }], luns: { 0: a }, access: open }
  - { name: inner, portals: [{ protocol: srp, listen: \"10.0.0.1:5556\" }], luns: { 0: b }, access: open }
workers: { count: 1 }
";

#[test]
fn target_is_limited_to_its_portals() {
    let parsed = Config::parse(TWO_TARGETS, "test.yaml").unwrap();
    let mut world = World::serving(FaultConfig::default(), &parsed);
    let inner = world.shared.registry.catalog().targets[1].portals[0].target_port();
    let req = login_req(1, inner);
    let mut by = |port: u16| {
        let dev = world.client(1);
        let dst = SocketAddr::new(SERVER, port);
        let mini = Mini::connect(dev, dst, &req, &mut |d| world.pump(d));
        mini.map(|_| ()).map_err(|(_, e)| e)
    };
    let denied = Refused::Login(LoginRejReason::UnableToAssociateChannel);
    assert_eq!(by(5555), Err(denied), "a portal of another target");
    assert_eq!(by(5556), Ok(()));
}

/// A disk with multiple LUNs is a single unit: it has one name, and its reservations are valid for
/// all LUNs.
#[test]
fn reservation_covers_read_only_lun() {
    let text = "backends: { a: { kind: ram, size: 1MiB } }\n\
        targets:\n\
        \x20 - { name: t, portals: [{ protocol: srp, listen: 10.0.0.1 }], access: open,\n\
        \x20     luns: { 0: a, 1: { backend: a, read_only: true } } }\n\
        workers: { count: 1 }\n";
    let parsed = Config::parse(text, "test.yaml").unwrap();
    let mut world = World::serving(FaultConfig::default(), &parsed);
    let mut holder = world.log_in(1);
    // REGISTER AND IGNORE EXISTING KEY, then RESERVE with this key: Exclusive Access.
    for (action, kind, key_at) in [(0x06, 0, 8), (0x01, 0x03, 0)] {
        let mut list = [0_u8; 24];
        list[key_at..key_at + 8].copy_from_slice(&7_u64.to_be_bytes());
        holder.data.write(0, &list);
        let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
        let data = DataBuffer::Direct(holder.desc(0, 24));
        let response = holder.command(&cdb, data, DataBuffer::None, &mut |d| world.pump(d));
        assert_eq!(response.status, 0);
    }
    let mut other = world.log_in(2);
    let none = || DataBuffer::None;
    for lun in [0, 1] {
        let desc = other.desc(0, 512);
        let read = cdb10(0x28, 0, 1);
        other.send_cmd(1, lun, &read, none(), DataBuffer::Direct(desc));
        assert_eq!(
            other.receive_response(&mut |d| world.pump(d)).status,
            0x18,
            "{lun}"
        );
    }
    // The holder can use both LUNs to read, but only one to write.
    for (lun, opcode, status) in [(0, 0x28, 0), (1, 0x28, 0), (0, 0x2a, 0), (1, 0x2a, 2)] {
        let data = DataBuffer::Direct(holder.desc(0, 512));
        let (out, into) = if opcode == 0x2a {
            (data, none())
        } else {
            (none(), data)
        };
        holder.send_cmd(1, lun, &cdb10(opcode, 0, 1), out, into);
        let response = holder.receive_response(&mut |d| world.pump(d));
        assert_eq!(response.status, status, "{lun}: {:x?}", response.sense);
    }
}

/// An initiator with read-only access must not block other initiators from writing: it cannot
/// reserve the unit or abort their commands.
#[test]
fn read_only_lun_cannot_block_others() {
    let text = "backends: { a: { kind: ram, size: 1MiB } }\n\
        targets:\n\
        \x20 - { name: t, portals: [{ protocol: srp, listen: 10.0.0.1 }], access: open,\n\
        \x20     luns: { 0: a, 1: { backend: a, read_only: true } } }\n\
        workers: { count: 1 }\n";
    let parsed = Config::parse(text, "test.yaml").unwrap();
    let mut world = World::serving(FaultConfig::default(), &parsed);
    let mut reader = world.log_in(1);
    reader.data.write(0, &[0; 24]);
    reader.data.write(8, &7_u64.to_be_bytes());
    let mut by = |lun, cdb: &[u8], len| {
        let out = match len {
            0 => DataBuffer::None,
            _ => DataBuffer::Direct(reader.desc(0, len)),
        };
        reader.send_cmd(1, lun, cdb, out, DataBuffer::None);
        let response = reader.receive_response(&mut |d| world.pump(d));
        (response.status, response.sense.get(2).copied())
    };
    let (good, protected) = ((0, None), (2, Some(7)));
    for action in 0..7 {
        let cdb = [0x5f, action, 1, 0, 0, 0, 0, 0, 24, 0];
        assert_eq!(by(1, &cdb, 24), protected, "action {action}");
    }
    for (reserve, release) in [(0x16, 0x17), (0x56, 0x57)] {
        let cdb = |opcode: u8| match opcode {
            0x16 | 0x17 => vec![opcode, 0, 0, 0, 0, 0],
            _ => vec![opcode, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        };
        assert_eq!(by(1, &cdb(reserve), 0), protected);
        assert_eq!(by(0, &cdb(reserve), 0), good, "the other number");
        assert_eq!(by(0, &cdb(release), 0), good);
    }
    // It can abort its own commands with this LUN, but can only abort all commands with the other
    // LUN.
    use TskMgmtFunction::{AbortTaskSet, ClearTaskSet, LogicalUnitReset};
    let mut manage = |lun, function| {
        reader.send_tmf_to(9, lun, function, 0);
        reader.receive_response(&mut |d| world.pump(d)).code
    };
    assert_eq!(manage(1, AbortTaskSet), Some(0));
    for function in [ClearTaskSet, LogicalUnitReset] {
        assert_eq!(manage(1, function), Some(5), "the function failed");
        assert_eq!(manage(0, function), Some(0));
    }
}

/// RESERVE is released when its session is closed, including session reinstatement by the same
/// initiator (SPC-2 5.5.1).
#[test]
fn new_login_releases_reserve() {
    for (reserve, cdb_len) in [(0x16, 6), (0x56, 10)] {
        let mut world = World::new(FaultConfig::default(), "");
        let (mut holder, mut other) = (world.log_in(1), world.log_in(2));
        let mut cdb = [0; 10];
        cdb[0] = reserve;
        let none = || DataBuffer::None;
        let pump = &mut |world: &mut World, mini: &mut Mini<Endpoint>, cdb: &[u8]| {
            let response = mini.command(cdb, none(), none(), &mut |d| world.pump(d));
            response.status
        };
        assert_eq!(pump(&mut world, &mut holder, &cdb[..cdb_len]), 0);
        assert_eq!(pump(&mut world, &mut other, &[0; 6]), 0x18, "reserved");
        let mut again = log_in_again(&mut world, 3).unwrap();
        again.clear_unit_attention(&mut |d| world.pump(d));
        assert_eq!(pump(&mut world, &mut other, &[0; 6]), 0);
        assert_eq!(pump(&mut world, &mut again, &[0; 6]), 0);
    }
}

/// A keeper without storage. Saving is blocked while the test holds the lock.
#[derive(Debug, Default)]
struct Held(Mutex<()>);

impl ReservationKeeper for Held {
    fn load(&self, _: &Identity) -> io::Result<Option<SavedReservations>> {
        Ok(None)
    }

    fn save(&self, _: &Identity, _: Option<&SavedReservations>) -> io::Result<()> {
        drop(self.0.lock().unwrap());
        Ok(())
    }
}

/// Sends a registration that persists through power loss.
fn register(mini: &mut Mini<Endpoint>, tag: u64) {
    let mut list = [0_u8; 24];
    (list[15], list[20]) = (7, 1);
    mini.data.write(0, &list);
    let cdb = [0x5f, 0x06, 0, 0, 0, 0, 0, 0, 24, 0];
    let data = DataBuffer::Direct(mini.desc(0, 24));
    mini.send_cmd(tag, 0, &cdb, data, DataBuffer::None);
}

/// Even if many changes of reservations are pending for some hosts, a change from another host must
/// succeed.
#[test]
fn flood_of_registrations_spares_others() {
    let config = Config::parse(&config(SERVER, 1, ""), "test.yaml").unwrap();
    let keeper = Arc::new(Held::default());
    let shared = build_shared(&config, Some(keeper.clone())).unwrap();
    let mut world = World::over(FaultConfig::default(), shared);
    let hangs = keeper.0.lock().unwrap();
    let mut hosts: Vec<_> = (1..=4).map(|n| world.log_in(n)).collect();
    const EACH: u64 = 100;
    for host in &mut hosts[..3] {
        for n in 0..EACH {
            register(host, n);
            // The host only has a few request buffers, so each request must be sent before its
            // buffer is used again.
            (0..8).for_each(|_| world.pump(&mut host.dev));
        }
        for _ in 0..200 {
            world.pump(&mut host.dev);
        }
    }
    register(&mut hosts[3], 7);
    for _ in 0..200 {
        world.pump(&mut hosts[3].dev);
    }
    drop(hangs);
    let response = hosts[3].receive_response(&mut |d| world.pump(d));
    assert_eq!(
        (response.tag, response.status),
        (7, 0),
        "{:x?}",
        response.sense
    );
    for host in &mut hosts[..3] {
        for _ in 0..EACH {
            let response = host.receive_response(&mut |d| world.pump(d));
            assert_eq!(response.status, 0, "{:x?}", response.sense);
        }
    }
}

#[test]
fn hung_state_directory_delays_no_login() {
    let config = Config::parse(&config(SERVER, 1, ""), "test.yaml").unwrap();
    let keeper = Arc::new(Held::default());
    let shared = build_shared(&config, Some(keeper.clone())).unwrap();
    let mut world = World::over(FaultConfig::default(), shared);
    // Must be unlocked before the world is dropped, because this waits for the helper thread.
    let hangs = keeper.0.lock().unwrap();
    let mut host = world.log_in(1);
    register(&mut host, 1);
    let read = host.read(0, 1, 4096, &mut |d| world.pump(d));
    assert_eq!(read.status, 0, "other commands continue");
    host.send_tmf(2, TskMgmtFunction::AbortTask, 1);
    let response = host.receive_response(&mut |d| world.pump(d));
    assert_eq!((response.tag, response.code), (2, Some(0)));
    register(&mut host, 3);
    let read = host.read(0, 1, 4096, &mut |d| world.pump(d));
    assert_eq!(read.status, 0);
    // It disconnects and logs in again.
    let mut again = log_in_again(&mut world, 2).unwrap();
    again.clear_unit_attention(&mut |d| world.pump(d));
    let read = again.read(0, 1, 4096, &mut |d| world.pump(d));
    assert_eq!(read.status, 0);
    register(&mut again, 4);
    drop(hangs);
    let response = again.receive_response(&mut |d| world.pump(d));
    assert_eq!((response.tag, response.status), (4, 0));
}

#[test]
fn task_management_answers() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut mini = world.log_in(1);
    for function in [
        TskMgmtFunction::AbortTask,
        TskMgmtFunction::AbortTaskSet,
        TskMgmtFunction::ClearTaskSet,
        TskMgmtFunction::LogicalUnitReset,
    ] {
        mini.send_tmf(5, function, 9);
        let response = mini.receive_response(&mut |d| world.pump(d));
        assert_eq!((response.tag, response.code), (5, Some(0)), "{function:?}");
    }
    let none = || DataBuffer::None;
    let response = mini.command(&[0; 6], none(), none(), &mut |d| world.pump(d));
    assert_eq!(response.status, 2, "the reset raised a unit attention");
}

#[test]
fn bad_key_closes_one_connection() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut bad = world.log_in(1);
    let mut good = world.log_in(2);
    let mut desc = bad.desc(0, 512);
    desc = riser_scsi::srp::MemDesc::new(desc.va(), desc.key() ^ 0x5a00, 512);
    bad.send_cmd(
        9,
        0,
        &cdb10(0x28, 0, 1),
        DataBuffer::None,
        DataBuffer::Direct(desc),
    );
    bad.wait_closed(&mut |d| world.pump(d));
    let response = good.read(0, 1, 0, &mut |d| world.pump(d));
    assert_eq!(response.status, 0);
}

/// It's not even possible to request such a range from the device. The previous descriptor is
/// valid, but must not be used either: the buffer is returned to the pool, so no work request of
/// this chain may be in flight.
#[test]
fn wrapped_address_range_closes_connection() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut bad = world.log_in(1);
    let mut good = world.log_in(2);
    let wraps = riser_scsi::srp::MemDesc::new(u64::MAX - 510, bad.data_mr.rkey.0, 512);
    bad.data.fill(0, 512, 0xee);
    let buffer = DataBuffer::Indirect(IndirectTable {
        table: bad.desc(1 << 20, 32),
        len: 1024,
        inline: &[bad.desc(0, 512), wraps],
    });
    bad.send_cmd(9, 0, &cdb10(0x28, 0, 2), DataBuffer::None, buffer);
    bad.wait_closed(&mut |d| world.pump(d));
    assert_eq!(bad.data.slice(0..512).unwrap().to_vec(), [0xee; 512]);
    let response = good.read(0, 1, 0, &mut |d| world.pump(d));
    assert_eq!(response.status, 0);
}

#[test]
fn shutdown_logs_out_all_sessions() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut mini = world.log_in(1);
    let until = world.fabric.now() + Duration::from_secs(5);
    world.mail.send(Mail::Shutdown { until }).unwrap();
    assert_eq!(mini.next(&mut |d| world.pump(d)), Said::Logout(0));
    mini.wait_closed(&mut |d| world.pump(d));
    for _ in 0..20_000 {
        world.pump(&mut mini.dev);
    }
    let quiet = world
        .reports
        .try_iter()
        .any(|r| matches!(r, Report::Quiet(0)));
    assert!(quiet);
    world.mail.send(Mail::Flush(1)).unwrap();
    for _ in 0..10 {
        world.pump(&mut mini.dev);
    }
    let flushed = world
        .reports
        .try_iter()
        .any(|r| matches!(r, Report::Flushed(1, Ok(()))));
    assert!(flushed);
}

#[test]
fn many_sessions_do_io_at_once() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut minis: Vec<_> = (1..=16).map(|n| world.log_in(n)).collect();
    for round in 0..4 {
        for (i, mini) in minis.iter_mut().enumerate() {
            for tag in 0..8u64 {
                let lba = (i as u32 * 8 + tag as u32) * 16;
                let at = tag as usize * 8192;
                mini.data
                    .fill(at, 8192, (i * 8 + tag as usize + round) as u8);
                let desc = mini.desc(at, 8192);
                mini.send_cmd(
                    tag,
                    0,
                    &cdb10(0x2a, lba, 16),
                    DataBuffer::Direct(desc),
                    DataBuffer::None,
                );
            }
        }
        let mut responses = 0;
        while responses < 16 * 8 {
            for mini in &mut minis {
                mini.poll();
                while let Some(said) = mini.said.pop_front() {
                    let Said::Response(response) = said else {
                        panic!("{said:?}");
                    };
                    assert_eq!(response.status, 0);
                    responses += 1;
                }
                world.pump(&mut mini.dev);
            }
        }
    }
    let (first, rest) = minis.split_first_mut().unwrap();
    first.data.fill(0, 1 << 20, 0);
    assert_eq!(first.read(0, 2048, 0, &mut |d| world.pump(d)).status, 0);
    for i in 0..128usize {
        let got = first.data.slice(i * 8192..(i + 1) * 8192).unwrap().to_vec();
        assert!(got.iter().all(|&b| b == (i + 3) as u8), "extent {i}");
    }
    assert_eq!(rest.len(), 15);
}

#[test]
fn service_id_login_uses_long_form() {
    let mut world = World::new(FaultConfig::default(), "");
    let dst = SocketAddr::new(SERVER, 0);
    let service = world.shared.registry.catalog().targets[0].portals[0].service_id;
    let req = login_req(1, world.target());
    let dev = world.client(1);
    let mini = Mini::connect_service(dev, dst, service, &req, &mut |d| world.pump(d));
    let mut mini = mini.map_err(|(_, e)| e).unwrap();
    mini.clear_unit_attention(&mut |d| world.pump(d));
    assert_eq!(mini.read(0, 8, 0, &mut |d| world.pump(d)).status, 0);
}

/// CVE-2024-26744: any invalid GUID from a peer or an administrator must be rejected.
#[test]
fn cve_2024_26744_service_guids() {
    for guid in [
        "0x",
        "zz",
        "-1",
        "0x1234",
        "18446744073709551616",
        "[]",
        "\"\\0\"",
    ] {
        let text =
            config(SERVER, 1, "").replace("5555\"", &format!("5555\", service_guid: {guid}"));
        let error = Config::parse(&text, "test.yaml")
            .expect_err(guid)
            .to_string();
        assert!(
            error.contains("service_guid") || error.contains("2:"),
            "{error}"
        );
    }
    let mut world = World::new(FaultConfig::default(), "");
    let dst = SocketAddr::new(SERVER, 5555);
    for port in [[0; 16], [0xff; 16]] {
        let dev = world.client(1);
        let req = login_req(1, TargetPortId(port));
        let refused = Mini::connect(dev, dst, &req, &mut |d| world.pump(d))
            .err()
            .unwrap()
            .1;
        assert_eq!(
            refused,
            Refused::Login(LoginRejReason::UnableToAssociateChannel)
        );
    }
}

#[test]
fn invalid_logins_are_rejected() {
    use riser_transport::verbs::PortSpace;
    let mut world = World::new(FaultConfig::default(), "");
    let dst = SocketAddr::new(SERVER, 5555);
    // The CM pads private data with zeros, so empty data would be parsed as a login from port 0 to
    // port 0.
    let absent = LoginRejReason::UnableToAssociateChannel;
    let no_login = LoginRejReason::UnableToEstablishChannel;
    for (private_data, reason) in [
        (vec![], absent),
        (vec![0; 1], absent),
        (vec![0xff; 56], no_login),
        (vec![0xc0; 20], no_login),
    ] {
        let dev = world.client(1);
        let space = PortSpace::Tcp;
        let refused = Mini::connect_with(dev, dst, space, private_data, &mut |d| world.pump(d));
        assert_eq!(refused.err().unwrap().1, Refused::Login(reason));
    }
    assert_eq!(world.shared.registry.sessions(), 0);
}

/// Because the audit log is rate-limited, operators need a counter to notice that hosts cannot
/// connect.
#[test]
fn connection_without_resources_is_counted() {
    let text = config(SERVER, 1, "");
    let shared = build_shared(&Config::parse(&text, "test.yaml").unwrap(), None).unwrap();
    let socket = TcpListener::bind(([127, 0, 0, 1], 0).into()).unwrap();
    socket.listen().unwrap();
    let portal = socket.fd().unwrap().try_clone_to_owned().unwrap();
    let portal = std::net::TcpListener::from(portal).local_addr().unwrap();
    // This ring only has space for one connection.
    let ring = RingConfig {
        capacity: 8,
        ..RingConfig::default()
    };
    let mut world = World::with(FaultConfig::default(), shared, ring, vec![socket]);
    let initiators = [(); 3].map(|()| TcpStream::connect(portal).unwrap());
    let mut idle = world.client(97);
    eventually("both are refused", Duration::from_secs(20), || {
        world.pump(&mut idle);
        let (tx, rx) = channel();
        world.mail.send(Mail::Snapshot(tx)).unwrap();
        world.pump(&mut idle);
        let rejects = rx.try_recv().unwrap().rejects;
        let counted: Vec<_> = rejects.iter().collect();
        counted == [((Protocol::Iscsi, "out_of_resources"), 2)]
    });
    drop(initiators);
}

/// In this case the last receive request is in the last full batch: the channel has already
/// released everything before the connection could be accepted.
#[test]
fn login_is_rejected_while_device_fails() {
    let mut world = World::new(FaultConfig::default(), "limits: { queue_depth: 28 }\n");
    let req = login_req(1, world.target());
    let dst = SocketAddr::new(SERVER, 5555);
    world.fabric.refuse_posts(SERVER, Refusals::ALL);
    let dev = world.client(1);
    let refused = Mini::connect(dev, dst, &req, &mut |d| world.pump(d));
    let (_, refused) = refused.err().expect("no receive can be posted");
    assert!(matches!(refused, Refused::Login(_)), "{refused:?}");
    let snapshot = drain(&mut world);
    assert_eq!(snapshot.sessions, []);
    assert_eq!(snapshot.logins.total(), 0);
    assert_eq!(snapshot.rejects.total(), 1);
    assert_eq!(snapshot.pool_free, snapshot.pool_size);
    assert_eq!(world.shared.registry.sessions(), 0);
    assert_eq!(world.shared.registry.unconfirmed(), 0);
    world.fabric.refuse_posts(SERVER, Refusals::NONE);
    let mini = world.log_in(2);
    mini.disconnect(&mut |d| world.pump(d));
}

/// Requests 16 KiB with a table of 32 descriptors, so the response is a chain of 32 work requests
/// and a message.
fn scattered_read(mini: &mut Mini<Endpoint>) {
    let descs: Vec<_> = (0..32).map(|i| mini.desc(i * 1000, 512)).collect();
    let mut table = Vec::new();
    for d in &descs {
        table.extend(d.va().to_be_bytes());
        table.extend(d.key().to_be_bytes());
        table.extend(d.data_len().to_be_bytes());
    }
    mini.data.write(1 << 20, &table);
    let buffer = DataBuffer::Indirect(IndirectTable {
        table: mini.desc(1 << 20, 512),
        len: 32 * 512,
        inline: &descs[..8],
    });
    mini.send_cmd(7, 0, &cdb10(0x28, 0, 32), DataBuffer::None, buffer);
}

/// The previous work requests use the buffer until the marker after them has completed.
#[test]
fn partially_posted_chain_closes_channel() {
    let mut world = World::new(FaultConfig::default(), "");
    // One request fetches the table. The 19th request of the response is in the second call.
    for after in [2, 19] {
        let mut mini = world.log_in(after as u8);
        world
            .fabric
            .refuse_posts(SERVER, Refusals { after, calls: 1 });
        scattered_read(&mut mini);
        mini.wait_closed(&mut |d| world.pump(d));
        let snapshot = drain(&mut world);
        assert_eq!(snapshot.sessions, []);
        assert_eq!(snapshot.pool_free, snapshot.pool_size);
    }
}

/// If no marker can be posted, we don't know when the accepted work requests have completed.
#[test]
fn chain_without_marker_keeps_buffer() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut mini = world.log_in(1);
    let all_after = Refusals {
        after: 19,
        ..Refusals::ALL
    };
    world.fabric.refuse_posts(SERVER, all_after);
    scattered_read(&mut mini);
    mini.wait_closed(&mut |d| world.pump(d));
    let snapshot = drain(&mut world);
    assert!(snapshot.pool_free < snapshot.pool_size);
    world.fabric.unplug(SERVER);
    let snapshot = drain(&mut world);
    assert_eq!(snapshot.sessions, []);
    assert_eq!(snapshot.pool_free, snapshot.pool_size);
}

/// The connection that sends the request uses a context for the response.
#[test]
fn claim_without_recovery_gets_response() {
    let mut world = World::new(FaultConfig::default(), "");
    let mini = world.log_in(1);
    let serial = snapshot(&mut world).sessions[0].serial;
    let task = |worker, channel| TaskRef {
        worker,
        channel,
        index: TaskIdx(0),
        generation: 1,
    };
    let gone = u64::MAX - 1;
    for channel in [serial, gone] {
        let (task, to) = (task(0, channel), task(1, 7));
        let reassign = ReassignRequest {
            task,
            to,
            exp_data_sn: 0,
        };
        world.mail.send(Mail::Reassign(reassign)).unwrap();
        let mut idle = world.client(if channel == gone { 50 } else { 51 });
        world.pump(&mut idle);
        let response = std::iter::from_fn(|| world.other.poll_message()).last();
        let is_response = matches!(
            response,
            Some(Mail::Reassigned { to: requester, moved: None }) if requester == to
        );
        assert!(is_response, "{response:?}");
    }
    assert_eq!(snapshot(&mut world).sessions.len(), 1);
    mini.disconnect(&mut |d| world.pump(d));
}

#[test]
fn repeated_logins_leave_no_resources() {
    let mut world = World::new(FaultConfig::default(), "");
    let dst = SocketAddr::new(SERVER, 5555);
    let req = login_req(1, world.target());
    let mut dev = world.client(1);
    for round in 0..300 {
        let mut mini = Mini::connected(dev, dst, &req, &mut |d| world.pump(d));
        if round % 2 == 0 {
            // Some disconnect while commands are in flight.
            for tag in 0..5 {
                let desc = mini.desc(0, 4096);
                let into = DataBuffer::Direct(desc);
                mini.send_cmd(tag, 0, &cdb10(0x28, 0, 8), DataBuffer::None, into);
            }
        }
        dev = mini.disconnect(&mut |d| world.pump(d));
    }
    let snapshot = drain(&mut world);
    assert_eq!(snapshot.logins.total(), 300);
    assert_eq!(snapshot.sessions, []);
    assert_eq!(snapshot.pool_free, snapshot.pool_size);
    assert_eq!(world.shared.registry.sessions(), 0);
}

#[test]
fn vanished_initiator_leaves_nothing() {
    let mut world = World::new(FaultConfig::default(), "");
    let mini = world.log_in(1);
    drop(mini);
    assert_eq!(world.shared.registry.sessions(), 1);
    let mut idle = world.client(2);
    let start = world.fabric.elapsed();
    while world.shared.registry.sessions() > 0 {
        world.pump(&mut idle);
        assert!(world.fabric.elapsed() - start < Duration::from_secs(60));
    }
    let snapshot = drain(&mut world);
    assert_eq!(snapshot.pool_free, snapshot.pool_size);
}

/// Simulates a worker failure. Disk writes of the worker may still be in flight, so a new login
/// must wait until the daemon has exited.
#[test]
fn failed_worker_keeps_sessions_registered() {
    let mut world = World::new(FaultConfig::default(), "");
    let minis = [1, 2].map(|n| world.log_in(n));
    let World { worker, shared, .. } = world;
    drop(worker);
    assert_eq!(shared.registry.sessions(), 2);
    drop(minis);
}

/// This is done twice with transfers in flight: sessions are closed, all resources are released,
/// and the portals are available again with the device.
#[test]
fn unplugged_device_returns() {
    let mut world = World::new(FaultConfig::default(), "");
    for round in 0..2u8 {
        let mut mini = world.log_in(1 + round);
        let len = 512 << 10;
        for tag in 0..8 {
            let desc = mini.desc(0, len);
            let cdb = cdb10(
                if tag % 2 == 0 { 0x28 } else { 0x2a },
                0,
                (len / 512) as u16,
            );
            let (none, data) = (DataBuffer::None, DataBuffer::Direct(desc));
            let (out, into) = if tag % 2 == 0 {
                (none, data)
            } else {
                (data, none)
            };
            mini.send_cmd(tag, 0, &cdb, out, into);
        }
        for _ in 0..20 {
            world.pump(&mut mini.dev);
        }
        world.fabric.unplug(SERVER);
        drop(mini);
        let snapshot = drain(&mut world);
        assert_eq!(snapshot.sessions, []);
        assert_eq!(snapshot.pool_free, snapshot.pool_size);
        assert_eq!(world.shared.registry.sessions(), 0);
        // Without the device there is no response. Later it is found.
        world.fabric.plug(SERVER);
        let mut idle = world.client(50);
        for _ in 0..2_000 {
            world.pump(&mut idle);
        }
    }
    let mut mini = world.log_in(9);
    let data = pattern(4096, 3);
    mini.data.write(0, &data);
    assert_eq!(mini.write(8, 8, 0, &mut |d| world.pump(d)).status, 0);
    mini.disconnect(&mut |d| world.pump(d));
}

/// One of its ports is now used by another program: the other port is served immediately, and this
/// port when it's available.
#[test]
fn device_returns_without_port_in_use() {
    let (first, second) = (SocketAddr::new(SERVER, 5555), SocketAddr::new(SERVER, 5556));
    let more = format!("portals: [{{ protocol: srp, listen: \"{second}\" }}, ");
    let text = config(SERVER, 1, "").replace("portals: [", &more);
    let config = Config::parse(&text, "test.yaml").unwrap();
    let mut world = World::serving(FaultConfig::default(), &config);
    let wait = |world: &mut World| {
        let mut idle = world.client(50);
        for _ in 0..2_000 {
            world.pump(&mut idle);
        }
    };
    let connects = |world: &mut World, n, dst| {
        let dev = world.client(n);
        let req = login_req(n, world.target());
        let connected = Mini::connect(dev, dst, &req, &mut |d| world.pump(d));
        connected.is_ok()
    };
    assert!(connects(&mut world, 1, first) && connects(&mut world, 2, second));
    world.fabric.unplug(SERVER);
    drain(&mut world);
    world.fabric.occupy(second);
    world.fabric.plug(SERVER);
    wait(&mut world);
    assert!(connects(&mut world, 3, first));
    assert!(!connects(&mut world, 4, second));
    world.fabric.vacate(second);
    wait(&mut world);
    assert!(connects(&mut world, 5, second) && connects(&mut world, 6, first));
}

#[test]
fn commands_are_counted_per_unit_and_session() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut mini = world.log_in(1);
    let count = |world: &World, kind| {
        let catalog = world.shared.registry.catalog();
        let counts = catalog.targets[0].stats[0].class(kind);
        (counts.total.count(), counts.bytes)
    };
    for _ in 0..3 {
        let response = mini.write(0, 8, 0, &mut |d| world.pump(d));
        assert_eq!(response.status, 0);
    }
    let response = mini.read(0, 1, 0, &mut |d| world.pump(d));
    assert_eq!(response.status, 0);
    assert_eq!(count(&world, Kind::Write), (3, 3 * 4096));
    assert_eq!(count(&world, Kind::Read), (1, 512));
    // After the end of the disk: ILLEGAL REQUEST.
    let response = mini.read(0x7fff_ffff, 1, 0, &mut |d| world.pump(d));
    assert_eq!(response.status, 2);
    mini.send_tmf(9, TskMgmtFunction::LogicalUnitReset, 0);
    let response = mini.receive_response(&mut |d| world.pump(d));
    assert_eq!(response.code, Some(0));
    let (tx, rx) = channel();
    world.mail.send(Mail::Snapshot(tx)).unwrap();
    world.pump(&mut mini.dev);
    let snapshot = rx.try_recv().unwrap();
    let [entry] = &snapshot.accounts[..] else {
        panic!("one session has used one unit");
    };
    let (account, stats) = (&entry.account, entry.account.lun());
    assert_eq!(
        (stats.target(), stats.lun(), stats.queue_depth()),
        ("t", 0, 0)
    );
    assert_eq!(account.class(Kind::Write).commands, 3);
    let faults: Vec<_> = account.faults().iter().collect();
    assert!(
        faults
            .iter()
            .any(|(f, n)| (f.class, f.status, f.sense_key, *n) == (Kind::Read, 2, Some(5), 1)),
        "{faults:?}"
    );
    let functions: Vec<_> = snapshot.functions[0].1.iter().collect();
    assert_eq!(functions, [(("logical_unit_reset", "complete"), 1)]);
    mini.disconnect(&mut |d| world.pump(d));
    assert_eq!(drain(&mut world).accounts.len(), 0);
    assert_eq!(count(&world, Kind::Write).0, 3, "what a session did stays");
}
