//! Tests the initiator engine with the real server in the same process. Most tests run with every
//! protocol: SRP and iSER use the software NIC on loopback.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints results")]

mod damage;
mod iser;
mod protection;
mod srp;
mod tcp;

use riser_block::task::block_on;
use riser_block::{ExtentKind, ZeroOptions};
use riser_initiator::engine::{IoData, LinkState, Session};
use riser_initiator::lun::Lun;
use riser_initiator::request::{Cdb, DataLen};
use riser_initiator::url::{IscsiUrl, TargetUrl};
use riser_testkit::programs::{Pair, tool};
use riser_tests::rig::Protocol::{self, Srp, Tcp};
use riser_tests::rig::{
    CHAP, IQN, Rig, SECRET, TARGET_SECRET, buffer_of, eventually, fio, get, pattern, put,
    wait_for_writes,
};
use riser_transport::roce::fault::FaultConfig;

use self::protection::{damage_is_detected_with_its_block, protected_data_round_trips};

/// Runs tests with protocols. Each uses a network number.
macro_rules! scripts {
    ($($number:literal $name:ident: $($protocol:ident)*,)*) => {
        $(mod $name {
            $(#[test]
            fn $protocol() {
                let protocol = riser_tests::rig::Protocol::of(stringify!($protocol));
                super::$name(protocol, $number);
            })*
        })*
    };
}

scripts! {
    1 disk_works: srp iser tcp,
    2 errors_come_with_their_sense: srp iser tcp,
    3 concurrent_commands_keep_data_separate: srp iser tcp,
    4 lossy_wire_loses_nothing: srp iser,
    5 session_reconnects_after_server_restart: srp iser tcp,
    6 many_sessions_share_server: srp iser tcp,
    7 portal_lists_targets: iser tcp,
    8 session_requires_mutual_authentication: iser tcp,
    41 protected_data_round_trips: srp iser tcp,
    42 damage_is_detected_with_its_block: srp iser tcp,
}

/// Reads a block beyond the end of the disk.
fn read_beyond_end(lun: &Lun) {
    let beyond = Cdb::new(&[0x88, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 1, 0, 0]).unwrap();
    let data = IoData::One(block_on(lun.buffers().take_buffer(512)));
    let response = block_on(lun.scsi(beyond, DataLen::In(512), data));
    let response = response.result.unwrap();
    assert_eq!((response.status, response.transferred), (2, 0));
    assert_eq!(response.sense().unwrap().additional.code, 0x21);
}

fn disk_works(protocol: Protocol, number: u8) {
    let rig = Rig::new(protocol, number, "{ kind: ram, size: 64MiB, thin: true }");
    let keys: &[&str] = match protocol {
        Srp => &["?channels=2"],
        _ => &["", "?immediate_data=0", "?first_burst=1024&queue_size=2"],
    };
    for keys in keys {
        let session = rig.connect(keys);
        let luns = block_on(session.luns()).unwrap();
        assert_eq!(luns.iter().map(|l| l.number()).collect::<Vec<_>>(), [0, 7]);
        let lun = block_on(session.lun(0)).unwrap();
        let info = lun.info();
        let capacity = info.capacity.blocks * u64::from(info.capacity.block_size);
        assert_eq!(capacity, 64 << 20);
        assert!(info.identity.naa.is_some() && info.identity.serial.is_some());
        let sizes = [
            (1, 0, 512),
            (2, 512, 8192),
            (3, 65536, 8704),
            (4, 1 << 20, 1 << 20),
            (5, 8 << 20, 300 * 512),
            (6, 9 << 20, 4096),
        ];
        for (seed, offset, len) in sizes {
            let data = pattern(seed, len);
            put(&lun, offset, &data);
            assert!(get(&lun, offset, len) == data, "{keys}: {len} bytes");
        }
        block_on(lun.flush()).unwrap();
        assert!(get(&lun, 1 << 20, 1 << 20) == pattern(4, 1 << 20));
        let zero = ZeroOptions {
            may_unmap: true,
            fua: true,
            fast: false,
        };
        block_on(lun.write_zeroes((1 << 20)..(1 << 20) + 65536, zero)).unwrap();
        assert_eq!(get(&lun, 1 << 20, 65536), vec![0; 65536]);
        block_on(lun.discard((8 << 20)..(9 << 20))).unwrap();
        let status = block_on(lun.status((8 << 20)..(10 << 20))).unwrap();
        assert_eq!(status[0].kind, ExtentKind::Hole);
        let missing = block_on(session.lun(3)).unwrap_err();
        assert!(missing.to_string().contains("not a disk"), "{missing}");
        read_beyond_end(&lun);
        block_on(session.close());
        assert_eq!(session.status().link(), LinkState::Closed);
    }
    assert_eq!(rig.client.buffers().free(), 32 << 20);
}

fn errors_come_with_their_sense(protocol: Protocol, number: u8) {
    let rig = Rig::new(
        protocol,
        number,
        "{ kind: ram, size: 1MiB, read_only: true }",
    );
    let session = rig.connect("");
    let lun = block_on(session.lun(0)).unwrap();
    assert!(lun.info().caching.write_protected);
    let error = block_on(lun.write(0, buffer_of(&lun, &[1; 512]), false)).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("data protect: WRITE PROTECTED"), "{error}");
    read_beyond_end(&lun);
}

fn concurrent_commands_keep_data_separate(protocol: Protocol, number: u8) {
    let rig = Rig::new(protocol, number, "{ kind: ram, size: 64MiB }");
    let session = rig.connect("?queue_size=8");
    let lun = block_on(session.lun(0)).unwrap();
    for round in 0..4 {
        let writes: Vec<_> = (0..48u64)
            .map(|i| {
                let data = buffer_of(&lun, &pattern(round << 8 | i, 65536));
                session.submit(lun.write_io(i << 16, data, false).unwrap())
            })
            .collect();
        for write in writes {
            Lun::completed_buffer(block_on(write)).unwrap();
        }
        for i in 0..48u64 {
            assert!(get(&lun, i << 16, 65536) == pattern(round << 8 | i, 65536));
        }
    }
}

fn lossy_wire_loses_nothing(protocol: Protocol, number: u8) {
    let faults = FaultConfig::percent(3, 2.0, 1.0, 1.0, 2.0);
    let backend = "{ kind: ram, size: 32MiB }";
    let rig = Rig::with(protocol, number, backend, "", Some(faults));
    let session = rig.connect(if protocol == Srp { "?channels=2" } else { "" });
    let lun = block_on(session.lun(0)).unwrap();
    for round in 0..24 {
        let data = pattern(round, 32768 * (1 + round as usize % 5));
        put(&lun, (round % 7) << 20, &data);
        assert!(get(&lun, (round % 7) << 20, data.len()) == data);
    }
}

fn session_reconnects_after_server_restart(protocol: Protocol, number: u8) {
    let mut rig = Rig::with_file(protocol, number, "16MiB");
    let session = rig.connect("");
    let lun = block_on(session.lun(0)).unwrap();
    put(&lun, 0, &pattern(1, 65536));
    for round in 2..4 {
        rig.stop();
        let data = buffer_of(&lun, &pattern(round, 4096));
        let waiting = session.submit(lun.write_io(65536, data, true).unwrap());
        // The session is waiting with the write, because its server is not running.
        eventually("the loss", || session.status().link() != LinkState::Live);
        rig.serve(&[1]);
        Lun::completed_buffer(block_on(waiting)).unwrap();
        assert!(get(&lun, 0, 65536) == pattern(1, 65536));
        assert!(get(&lun, 65536, 4096) == pattern(round, 4096));
    }
    assert!(session.status().reconnects() >= 2);
}

fn many_sessions_share_server(protocol: Protocol, number: u8) {
    let rig = Rig::new(protocol, number, "{ kind: ram, size: 64MiB }");
    let sessions = (1..=32).map(|i| match protocol {
        Srp => rig.connect(&format!("?initiator_ext={i:x}&queue_size=8")),
        // The name can be the same or different, but each session must use a separate port.
        _ if i <= 16 => rig.connect("?queue_size=8"),
        _ => rig.connect(&format!(
            "?initiator=iqn.2026-01.com.example:i{i}&queue_size=8"
        )),
    });
    let sessions: Vec<Session> = sessions.collect();
    let luns: Vec<Lun> = sessions
        .iter()
        .map(|s| block_on(s.lun(0)).unwrap())
        .collect();
    let server = rig.server.as_ref().unwrap();
    // A session is counted when the server knows that its connection has been established.
    assert_eq!(server.sessions(), 32);
    for round in 0..4 {
        let writes: Vec<_> = luns
            .iter()
            .enumerate()
            .map(|(i, lun)| {
                let data = buffer_of(lun, &pattern(round * 100 + i as u64, 65536));
                lun.session()
                    .submit(lun.write_io((i as u64) << 20, data, false).unwrap())
            })
            .collect();
        for write in writes {
            Lun::completed_buffer(block_on(write)).unwrap();
        }
        for (i, lun) in luns.iter().enumerate() {
            let at = ((i + 1) % luns.len()) as u64;
            assert!(get(lun, at << 20, 65536) == pattern(round * 100 + at, 65536));
        }
    }
    assert!(sessions.iter().all(|s| s.status().reconnects() == 0));
    drop((luns, sessions));
    eventually("the sessions end", || server.sessions() == 0);
}

fn portal_lists_targets(protocol: Protocol, number: u8) {
    let rig = Rig::new(protocol, number, "{ kind: ram, size: 1MiB }");
    let found = block_on(rig.client.discover_targets(&rig.iscsi_url(""))).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].name.as_str(), IQN);
    let portal = rig.address(1);
    assert_eq!(
        found[0].addresses[0].to_string(),
        format!("{portal}:3260,1")
    );
    let connect = |address, target: &str| {
        let url = format!("{}://{address}/{target}/0", protocol.scheme());
        let url: IscsiUrl = url.parse().unwrap();
        let error = block_on(rig.client.connect(TargetUrl::Iscsi(url))).unwrap_err();
        error.to_string()
    };
    let error = connect(portal, &format!("{IQN}x"));
    assert!(error.contains("0203h"), "{error}");
    if protocol == Tcp {
        let error = connect(rig.address(9), IQN);
        assert!(error.contains("refused"), "{error}");
    }
}

fn session_requires_mutual_authentication(protocol: Protocol, number: u8) {
    let rig = Rig::with(protocol, number, "{ kind: ram, size: 1MiB }", CHAP, None);
    let me = format!("me%{SECRET}@");
    let found = block_on(rig.client.discover_targets(&rig.iscsi_url(&me))).unwrap();
    assert_eq!(found[0].name.as_str(), IQN);
    let you = format!("?target_user=you&target_password={TARGET_SECRET}");
    for keys in ["", you.as_str()] {
        let session = rig.try_connect(&me, keys).unwrap();
        assert!(!format!("{session:?}").contains(SECRET));
        block_on(session.close());
    }
    let wrong = "?target_user=you&target_password=something-else";
    for (user, keys, why) in [
        ("", "", "0201h"),
        ("me%not-the-secret@", "", "0201h"),
        (me.as_str(), wrong, "failed to authenticate itself"),
    ] {
        let error = rig.try_connect(user, keys).unwrap_err().to_string();
        assert!(error.contains(why), "{user}: {error}");
    }
    // A file instead of the secret.
    let name = format!("riser-chap-{number}-{}", std::process::id());
    let path = std::env::temp_dir().join(format!("{name}-{}", protocol.scheme()));
    std::fs::write(&path, format!("{SECRET}\n")).unwrap();
    let keys = format!("?password_file={}", path.display());
    block_on(rig.try_connect("me@", &keys).unwrap().close());
    std::fs::remove_file(path).unwrap();
}

/// Kills the daemon while a load is running on the attached disk.
fn load_survives_restart(pair: &mut Pair, socket: &str) {
    let uri = format!("nbd+unix:///lun0?socket={socket}");
    let load = std::thread::spawn(move || tool("fio", fio(&uri)));
    wait_for_writes(pair);
    assert!(!load.is_finished(), "it has ended before its target");
    pair.kill();
    pair.serve();
    load.join().unwrap();
    // This will fail if the process doesn't exit within `--timeout`.
    pair.riser(&["detach", socket]);
}
