//! Tests the iSER initiator with the real server, using the software NIC on loopback.

#![allow(missing_docs, reason = "a test")]

use std::time::Duration;

use riser_block::task::block_on;
use riser_initiator::engine::{IoData, LinkState, ScsiIo, Session};
use riser_initiator::lun::Lun;
use riser_initiator::request::{Cdb, DataLen, RequestError};
use riser_initiator::scsi::{BlockRange, Command};
use riser_initiator::url::IscsiUrl;
use riser_testkit::programs::{missing, skip, tool};
use riser_tests::iscsi_rig::{
    CHAP, IQN, Rig, SECRET, buffer_of, eventually, fio, get, pair, pattern, put, start,
    wait_for_writes,
};
use riser_transport::roce::fault::FaultConfig;

const SIZES: [(u64, u64, usize); 6] = [
    (1, 0, 512),
    (2, 512, 8192),
    (3, 65536, 8704),
    (4, 1 << 20, 1 << 20),
    (5, 8 << 20, 300 * 512),
    (6, 9 << 20, 4096),
];

#[test]
fn disk_works_over_iser() {
    let rig = Rig::iser(91, "{ kind: ram, size: 64MiB, thin: true }", "", None);
    for keys in ["", "?immediate_data=0", "?first_burst=1024&queue_size=2"] {
        let session = rig.connect(keys);
        let luns = block_on(session.luns()).unwrap();
        assert_eq!(luns.iter().map(|l| l.number()).collect::<Vec<_>>(), [0, 7]);
        let lun = block_on(session.lun(0)).unwrap();
        for (seed, offset, len) in SIZES {
            let data = pattern(seed, len);
            put(&lun, offset, &data);
            assert!(get(&lun, offset, len) == data, "{keys}: {len} bytes");
        }
        block_on(lun.flush()).unwrap();
        block_on(lun.discard((8 << 20)..(9 << 20))).unwrap();
        let beyond = Cdb::new(&[0x88, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 1, 0, 0]).unwrap();
        let data = IoData::One(block_on(lun.buffers().take_buffer(512)));
        let answer = block_on(lun.scsi(beyond, DataLen::In(512), data))
            .result
            .unwrap();
        assert_eq!(answer.status, 2);
        assert_eq!(answer.sense().unwrap().additional.code, 0x21);
        block_on(session.close());
        assert_eq!(session.status().link(), LinkState::Closed);
    }
    assert_eq!(rig.client.buffers().free(), 32 << 20);
}

#[test]
fn buffer_with_too_many_pieces_is_rejected() {
    let rig = Rig::iser(92, "{ kind: ram, size: 1MiB }", "", None);
    let session = rig.connect("");
    let lun = block_on(session.lun(0)).unwrap();
    let send = |count: usize| {
        let buffers = (0..count)
            .map(|i| buffer_of(&lun, &pattern(i as u64, 512)))
            .collect();
        let range = BlockRange {
            lba: 8,
            blocks: count as u32,
        };
        let command = Command::write(range, range.blocks * 512, false);
        let data = IoData::Many(buffers);
        let io = ScsiIo::new(lun.info().lun, command, data, Duration::from_secs(30));
        block_on(session.submit(io)).result
    };
    assert_eq!(send(3).unwrap().status, 0);
    assert!(matches!(send(4), Err(RequestError::NotStarted(_))));
    assert!(get(&lun, 5120, 512) == pattern(2, 512));
}

#[test]
fn concurrent_commands_keep_data_separate() {
    let rig = Rig::iser(93, "{ kind: ram, size: 64MiB }", "", None);
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

#[test]
fn lossy_wire_loses_nothing() {
    let faults = FaultConfig::percent(3, 2.0, 1.0, 1.0, 2.0);
    let rig = Rig::iser(94, "{ kind: ram, size: 32MiB }", "", Some(faults));
    let session = rig.connect("");
    let lun = block_on(session.lun(0)).unwrap();
    for round in 0..24 {
        let data = pattern(round, 32768 * (1 + round as usize % 5));
        put(&lun, (round % 7) << 20, &data);
        assert!(get(&lun, (round % 7) << 20, data.len()) == data);
    }
}

#[test]
fn portal_lists_targets_and_requires_chap() {
    let rig = Rig::iser(95, "{ kind: ram, size: 1MiB }", CHAP, None);
    let me = format!("me%{SECRET}@");
    let found = block_on(rig.client.discover_targets(&rig.url(&me, ""))).unwrap();
    assert_eq!(found[0].name.as_str(), IQN);
    let keys = "?target_user=you&target_password=target-secret-1";
    block_on(rig.try_connect(&me, keys).unwrap().close());
    let error = rig.try_connect("me%not-the-secret@", "").unwrap_err();
    assert!(error.to_string().contains("0201h"), "{error}");
    let absent: IscsiUrl = format!("iser://127.0.95.1/{IQN}x/0").parse().unwrap();
    let error = block_on(rig.client.connect(&absent)).unwrap_err();
    assert!(error.to_string().contains("020"), "{error}");
}

#[test]
fn session_reconnects_after_server_restart() {
    let path = std::env::temp_dir().join(format!("riser-iser-{}.img", std::process::id()));
    let backend = format!(
        "{{ kind: file, path: {}, size: 16MiB, create: true }}",
        path.display()
    );
    let mut rig = Rig::iser(96, &backend, "", None);
    let session: Session = rig.connect("");
    let lun = block_on(session.lun(0)).unwrap();
    put(&lun, 0, &pattern(1, 65536));
    for round in 2..4 {
        rig.server.take().unwrap().shutdown().unwrap();
        let data = buffer_of(&lun, &pattern(round, 4096));
        let waiting = session.submit(lun.write_io(65536, data, true).unwrap());
        eventually("the loss", || session.status().link() != LinkState::Live);
        rig.server = Some(start(&rig.config));
        Lun::completed_buffer(block_on(waiting)).unwrap();
        assert!(get(&lun, 0, 65536) == pattern(1, 65536));
        assert!(get(&lun, 65536, 4096) == pattern(round, 4096));
    }
    assert!(session.status().reconnects() >= 2);
    drop((lun, session, rig));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn attached_disk_keeps_data() {
    if let Some(tool) = missing(&["fio", "nbdinfo"]) {
        return skip("iser_initiator", &format!("{tool} is not installed"));
    }
    let mut pair = pair(97, "iser", "");
    let url = format!("iser://127.0.97.1/{IQN}/0");
    let socket = pair.path("nbd");
    pair.riser(&["attach", &url, "--nbd", &socket]);
    let uri = format!("nbd+unix:///lun0?socket={socket}");
    let load = std::thread::spawn({
        let uri = uri.clone();
        move || tool("fio", fio(&uri))
    });
    wait_for_writes(&pair);
    assert!(!load.is_finished(), "it has ended before its target");
    pair.kill();
    pair.serve();
    load.join().unwrap();
    // This will fail if the process doesn't exit within `--timeout`.
    pair.riser(&["detach", &socket]);
}
