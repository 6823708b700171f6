//! Tests the iSCSI initiator with the real server, using either the engine in the same process, or
//! `riser` and `riserd`.

#![allow(missing_docs, reason = "a test")]

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use riser_block::ZeroOptions;
use riser_block::task::block_on;
use riser_initiator::engine::{IoData, LinkState, Session};
use riser_initiator::lun::Lun;
use riser_initiator::request::{Cdb, DataLen};
use riser_initiator::url::IscsiUrl;
use riser_testkit::programs::{missing, skip, tool};
use riser_tests::iscsi_rig::{
    CHAP, IQN, Rig, SECRET, TARGET_SECRET, buffer_of, eventually, fio, get, pair, pattern, put,
    run, scattered, start, wait_for_writes,
};

#[test]
fn disk_works_over_tcp() {
    let rig = Rig::tcp(81, "{ kind: ram, size: 64MiB, thin: true }", "");
    let session = rig.connect("");
    let luns = block_on(session.luns()).unwrap();
    assert_eq!(luns.iter().map(|l| l.number()).collect::<Vec<_>>(), [0, 7]);
    let lun = block_on(session.lun(0)).unwrap();
    assert!(lun.info().identity.naa.is_some() && lun.info().identity.serial.is_some());
    for (seed, offset, len) in [
        (1, 0, 512),
        (2, 512, 8192),
        (3, 1 << 20, 1 << 20),
        (4, 8 << 20, 300 * 512),
    ] {
        let data = pattern(seed, len);
        put(&lun, offset, &data);
        assert_eq!(get(&lun, offset, len), data, "{len} bytes");
    }
    block_on(lun.flush()).unwrap();
    let zero = ZeroOptions {
        may_unmap: true,
        fua: true,
        fast: false,
    };
    block_on(lun.write_zeroes((1 << 20)..(1 << 20) + 65536, zero)).unwrap();
    assert_eq!(get(&lun, 1 << 20, 65536), vec![0; 65536]);
    block_on(lun.discard((8 << 20)..(9 << 20))).unwrap();
    let missing = block_on(session.lun(3)).unwrap_err();
    assert!(missing.to_string().contains("not a disk"), "{missing}");
    let beyond = Cdb::new(&[0x88, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 1, 0, 0]).unwrap();
    let data = IoData::One(block_on(lun.buffers().take_buffer(512)));
    let answer = block_on(lun.scsi(beyond, DataLen::In(512), data))
        .result
        .unwrap();
    assert_eq!((answer.status, answer.transferred), (2, 0));
    assert_eq!(answer.sense().unwrap().additional.code, 0x21);
    block_on(session.close());
    assert_eq!(session.status().link(), LinkState::Closed);
    assert_eq!(rig.client.buffers().free(), 32 << 20);
}

#[test]
fn data_transfer_modes_are_equivalent() {
    let rig = Rig::tcp(82, "{ kind: ram, size: 16MiB }", "");
    for digests in ["none", "crc32c"] {
        for (initial_r2t, immediate) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            for bursts in ["", "&first_burst=1024&max_burst=4096&max_recv=1024"] {
                let keys = format!(
                    "?header_digest={digests}&data_digest={digests}&initial_r2t={initial_r2t}\
                     &immediate_data={immediate}{bursts}"
                );
                let session = rig.connect(&keys);
                let lun = block_on(session.lun(0)).unwrap();
                scattered(&lun, &keys);
                block_on(session.close());
            }
        }
    }
}

#[test]
fn session_requires_mutual_authentication() {
    let rig = Rig::tcp(83, "{ kind: ram, size: 1MiB }", CHAP);
    let me = format!("me%{SECRET}@");
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
    // A file instead of an address.
    let path = std::env::temp_dir().join(format!("riser-chap-{}", std::process::id()));
    fs::write(&path, format!("{SECRET}\n")).unwrap();
    let keys = format!("?password_file={}", path.display());
    block_on(rig.try_connect("me@", &keys).unwrap().close());
    fs::remove_file(path).unwrap();
}

#[test]
fn portal_lists_targets() {
    let rig = Rig::tcp(84, "{ kind: ram, size: 1MiB }", "");
    let url = rig.url("", "");
    let found = block_on(rig.client.discover_targets(&url)).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].name.as_str(), IQN);
    assert_eq!(found[0].addresses[0].to_string(), "127.0.84.1:3260,1");
    let absent: IscsiUrl = format!("iscsi://127.0.84.1/{IQN}x/0").parse().unwrap();
    let error = block_on(rig.client.connect(&absent)).unwrap_err();
    assert!(error.to_string().contains("0203h"), "{error}");
    let nowhere: IscsiUrl = format!("iscsi://127.0.84.9/{IQN}/0").parse().unwrap();
    let error = block_on(rig.client.connect(&nowhere)).unwrap_err();
    assert!(error.to_string().contains("refused"), "{error}");
}

#[test]
fn session_reconnects_under_load() {
    let path = std::env::temp_dir().join(format!("riser-ini-{}.img", std::process::id()));
    let backend = format!(
        "{{ kind: file, path: {}, size: 16MiB, create: true }}",
        path.display()
    );
    let mut rig = Rig::tcp(85, &backend, "");
    let session = rig.connect("?header_digest=crc32c&data_digest=crc32c");
    let done = Arc::new(AtomicBool::new(false));
    let rounds = Arc::new(AtomicU64::new(0));
    let writers: Vec<_> = (0..4)
        .map(|number: u64| {
            let (session, done, rounds) = (session.clone(), done.clone(), rounds.clone());
            std::thread::spawn(move || {
                let lun = block_on(session.lun(0)).unwrap();
                let mut round = 0;
                while !done.load(Ordering::Relaxed) {
                    let data = pattern(number << 32 | round, 65536);
                    put(&lun, number << 20, &data);
                    assert!(get(&lun, number << 20, 65536) == data);
                    round += 1;
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
                round
            })
        })
        .collect();
    let wait_for_rounds = || {
        let before = rounds.load(Ordering::Relaxed);
        eventually("further rounds", || {
            rounds.load(Ordering::Relaxed) >= before + 8
        });
    };
    for _ in 0..3 {
        wait_for_rounds();
        rig.server.take().unwrap().shutdown().unwrap();
        eventually("the loss", || session.status().link() != LinkState::Live);
        rig.server = Some(start(&rig.config));
        eventually("the session", || session.status().link() == LinkState::Live);
    }
    wait_for_rounds();
    done.store(true, Ordering::Relaxed);
    for writer in writers {
        assert!(writer.join().unwrap() > 0);
    }
    assert!(session.status().reconnects() >= 3);
    drop((session, rig));
    fs::remove_file(path).unwrap();
}

#[test]
fn many_sessions_share_server() {
    let rig = Rig::tcp(86, "{ kind: ram, size: 64MiB }", "");
    let sessions: Vec<Session> = (0..32)
        .map(|i| match i {
            // The name can be the same or different, but each session must use a separate port.
            0..16 => rig.connect("?queue_size=8"),
            _ => rig.connect(&format!(
                "?initiator=iqn.2026-01.com.example:i{i}&queue_size=8"
            )),
        })
        .collect();
    let luns: Vec<Lun> = sessions
        .iter()
        .map(|s| block_on(s.lun(0)).unwrap())
        .collect();
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
}

#[test]
fn command_line_accepts_iscsi_addresses() {
    let pair = pair(87, "iscsi", CHAP);
    let portal = "iscsi://me@127.0.87.1";
    let url = format!("{portal}/{IQN}/0");
    let output = run(&pair, &["discover", portal, "-o", "json"], SECRET);
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{why}");
    let found = String::from_utf8(output.stdout).unwrap();
    let found: serde_json::Value = serde_json::from_str(&found).unwrap();
    assert_eq!(found[0]["name"], IQN);
    assert_eq!(found[0]["portals"][0], "127.0.87.1:3260,1");
    assert_eq!(found[0]["luns"][0]["url"], url);
    assert_eq!(found[0]["luns"][0]["capacity"], 64 << 20);

    let refused = run(&pair, &["inquiry", &url], "not-the-secret");
    assert_eq!(refused.status.code(), Some(3));
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        why.contains("cannot log in to iscsi://me@127.0.87.1/"),
        "{why}"
    );
    assert!(
        why.contains("authentication failed (status 0201h)") && why.contains("name and password"),
        "{why}"
    );
    let missing = pair.command(&["inquiry", &url]).output().unwrap();
    assert_eq!(missing.status.code(), Some(2));
    let why = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(why.contains("RISER_CHAP_PASSWORD"), "{why}");

    assert!(run(&pair, &["inquiry", &url], SECRET).status.success());
    let (input, output) = (pair.path("in"), pair.path("out"));
    fs::write(&input, pattern(3, 3 << 20)).unwrap();
    for args in [
        ["write", &url, &input, "--offset=1M", "-q"],
        ["read", &url, &output, "--offset=1M", "--length=3M"],
    ] {
        let output = run(&pair, &args, SECRET);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    assert!(fs::read(&input).unwrap() == fs::read(&output).unwrap());
    let bench = [
        "bench",
        &url,
        "--runtime=200ms",
        "--warm-up=0s",
        "--rw=randrw",
        "--verify",
    ];
    assert!(run(&pair, &bench, SECRET).status.success());
}

#[test]
fn attached_disk_hides_password_and_reconnects() {
    if let Some(tool) = missing(&["fio", "nbdinfo"]) {
        return skip("iscsi_initiator", &format!("{tool} is not installed"));
    }
    let mut pair = pair(88, "iscsi", CHAP);
    let url = format!(
        "iscsi://me%{SECRET}@127.0.88.1/{IQN}/0?target_user=you&target_password={TARGET_SECRET}\
         &header_digest=crc32c&data_digest=crc32c"
    );
    let socket = pair.path("nbd");
    pair.riser(&["attach", &url, "--nbd", &socket]);
    let list = pair.riser(&["list", "-o", "json"]);
    assert!(!list.contains("secret"), "{list}");
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let pid = list[0]["pid"].as_u64().unwrap();
    let seen = ["cmdline", "environ"].map(|f| fs::read(format!("/proc/{pid}/{f}")).unwrap());
    for bytes in seen {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        assert!(!text.contains(SECRET) && !text.contains(TARGET_SECRET));
    }
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
    pair.riser(&["detach", &socket]);
}
