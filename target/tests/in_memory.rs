//! A worker and an initiator over the wire in memory, under a virtual clock.

mod mini;
mod world;

use std::net::SocketAddr;
use std::sync::mpsc::channel;
use std::time::Duration;

use mini::{Mini, Refused, Said, cdb10, config, login_req};
use riser_scsi::kind::Kind;
use riser_scsi::srp::{
    DataBuffer, IndirectTable, LoginRejReason, MultiChannelAction, MultiChannelResult,
    TargetPortId, TskMgmtFunction,
};
use riser_target::config::Config;
use riser_target::worker::Report;
use riser_target::worker::mail::Mail;
use riser_transport::loopback::Endpoint;
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
        let mut mini = Mini::connect(dev, dst, &req, &mut |d| self.pump(d))
            .map_err(|(_, e)| e)
            .unwrap();
        mini.settle(&mut |d| self.pump(d));
        mini
    }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ seed).collect()
}

#[test]
fn what_is_written_is_read_back() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut mini = world.log_in(1);
    assert_eq!(mini.rsp.req_lim_delta, 128);
    for (lba, blocks) in [(0, 1u16), (8, 8), (100, 256), (1000, 2048)] {
        let len = usize::from(blocks) * 512;
        let data = pattern(len, lba as u8);
        mini.data.write(0, &data);
        let answer = mini.write(lba, blocks, 0, &mut |d| world.pump(d));
        assert_eq!(answer.status, 0);
        mini.data.fill(0, len, 0);
        let answer = mini.read(lba, blocks, 2 << 20, &mut |d| world.pump(d));
        assert_eq!(answer.status, 0);
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

fn drain(world: &mut World) -> riser_target::worker::mail::Snapshot {
    let mut idle = world.client(99);
    for _ in 0..50_000 {
        world.pump(&mut idle);
    }
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
    let answer = mini.command(&cdb10(0x2a, 0, 8), immediate, DataBuffer::None, &mut |d| {
        world.pump(d);
    });
    assert_eq!(answer.status, 0);
    // Eight blocks, each to a place of its own, the descriptors fetched from memory.
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
        let answer = mini.command(&cdb10(0x28, 0, 8), DataBuffer::None, buffer, &mut |d| {
            world.pump(d);
        });
        assert_eq!(answer.status, 0);
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
fn a_bad_wire_changes_nothing() {
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
fn refusals_reach_the_initiator() {
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
fn a_second_login_replaces_or_joins_the_first() {
    let mut world = World::new(FaultConfig::default(), "");
    let dst = SocketAddr::new(SERVER, 5555);
    let mut first = world.log_in(1);
    let mut req = login_req(1, world.target());
    req.multi_channel = MultiChannelAction::Multi;
    let dev = world.client(2);
    let mut second = Mini::connect(dev, dst, &req, &mut |d| world.pump(d))
        .map_err(|(_, e)| e)
        .unwrap();
    assert_eq!(second.rsp.multi_channel, MultiChannelResult::Maintained);
    // One nexus: its unit attention was read on the first channel.
    let none = || DataBuffer::None;
    let answer = second.command(&[0; 6], none(), none(), &mut |d| world.pump(d));
    assert_eq!(answer.status, 0);
    assert_eq!(world.shared.registry.sessions(), 1);
    req.multi_channel = MultiChannelAction::Single;
    let dev = world.client(3);
    let third = Mini::connect(dev, dst, &req, &mut |d| world.pump(d))
        .map_err(|(_, e)| e)
        .unwrap();
    assert_eq!(third.rsp.multi_channel, MultiChannelResult::Terminated);
    for old in [&mut first, &mut second] {
        assert_eq!(old.next(&mut |d| world.pump(d)), Said::Logout(4));
        old.wait_closed(&mut |d| world.pump(d));
    }
    assert_eq!(world.shared.registry.sessions(), 1);
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
        let answer = mini.answer(&mut |d| world.pump(d));
        assert_eq!((answer.tag, answer.code), (5, Some(0)), "{function:?}");
    }
    let none = || DataBuffer::None;
    let answer = mini.command(&[0; 6], none(), none(), &mut |d| world.pump(d));
    assert_eq!(answer.status, 2, "the reset raised a unit attention");
}

#[test]
fn a_bad_key_costs_one_connection() {
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
    let answer = good.read(0, 1, 0, &mut |d| world.pump(d));
    assert_eq!(answer.status, 0);
}

#[test]
fn a_shutdown_logs_everybody_out() {
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
    world.mail.send(Mail::Flush).unwrap();
    for _ in 0..10 {
        world.pump(&mut mini.dev);
    }
    let flushed = world
        .reports
        .try_iter()
        .any(|r| matches!(r, Report::Flushed(Ok(()))));
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
        let mut answers = 0;
        while answers < 16 * 8 {
            for mini in &mut minis {
                mini.poll();
                while let Some(said) = mini.said.pop_front() {
                    let Said::Answer(answer) = said else {
                        panic!("{said:?}");
                    };
                    assert_eq!(answer.status, 0);
                    answers += 1;
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
fn a_login_on_the_service_id_has_the_long_form() {
    let mut world = World::new(FaultConfig::default(), "");
    let dst = SocketAddr::new(SERVER, 0);
    let service = world.shared.registry.catalog().targets[0].portals[0].service_id;
    let req = login_req(1, world.target());
    let dev = world.client(1);
    let mini = Mini::connect_service(dev, dst, service, &req, &mut |d| world.pump(d));
    let mut mini = mini.map_err(|(_, e)| e).unwrap();
    mini.settle(&mut |d| world.pump(d));
    assert_eq!(mini.read(0, 8, 0, &mut |d| world.pump(d)).status, 0);
}

/// CVE-2024-26744: whatever a peer or an administrator writes as a GUID, it is refused, not followed.
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
fn logins_that_are_none_are_refused() {
    use riser_transport::verbs::PortSpace;
    let mut world = World::new(FaultConfig::default(), "");
    let dst = SocketAddr::new(SERVER, 5555);
    // The CM pads private data with zeros: nothing at all reads as a login from port 0 to port 0.
    let nobody = LoginRejReason::UnableToAssociateChannel;
    let no_login = LoginRejReason::UnableToEstablishChannel;
    for (private_data, reason) in [
        (vec![], nobody),
        (vec![0; 1], nobody),
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

#[test]
fn coming_and_going_leaves_nothing() {
    let mut world = World::new(FaultConfig::default(), "");
    let dst = SocketAddr::new(SERVER, 5555);
    let req = login_req(1, world.target());
    let mut dev = world.client(1);
    for round in 0..300 {
        let mini = Mini::connect(dev, dst, &req, &mut |d| world.pump(d));
        let mut mini = mini.map_err(|(_, e)| e).unwrap();
        if round % 2 == 0 {
            // Some leave in the middle of it.
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
fn an_initiator_that_vanishes_leaves_nothing() {
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

/// Twice, with transfers under way: sessions end, nothing stays behind, and the portals come back with
/// the device.
#[test]
fn a_device_that_is_unplugged_comes_back() {
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
        // While it is away nobody answers; then it is found.
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

#[test]
fn commands_are_counted_by_unit_session_and_kind() {
    let mut world = World::new(FaultConfig::default(), "");
    let mut mini = world.log_in(1);
    let count = |world: &World, kind| {
        let catalog = world.shared.registry.catalog();
        let counts = catalog.targets[0].stats[0].class(kind);
        (counts.total.count(), counts.bytes)
    };
    for _ in 0..3 {
        let answer = mini.write(0, 8, 0, &mut |d| world.pump(d));
        assert_eq!(answer.status, 0);
    }
    let answer = mini.read(0, 1, 0, &mut |d| world.pump(d));
    assert_eq!(answer.status, 0);
    assert_eq!(count(&world, Kind::Write), (3, 3 * 4096));
    assert_eq!(count(&world, Kind::Read), (1, 512));
    // Beyond the end: ILLEGAL REQUEST.
    let answer = mini.read(0x7fff_ffff, 1, 0, &mut |d| world.pump(d));
    assert_eq!(answer.status, 2);
    mini.send_tmf(9, TskMgmtFunction::LogicalUnitReset, 0);
    let answer = mini.answer(&mut |d| world.pump(d));
    assert_eq!(answer.code, Some(0));
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
