//! iSCSI over TCP, using either the engine in the same process, or `riser` and `riserd`.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use riser_block::task::block_on;
use riser_initiator::engine::LinkState;
use riser_testkit::programs::{missing, skip};
use riser_tests::rig::{
    CHAP, IQN, Protocol, Rig, SECRET, TARGET_SECRET, eventually, get, pair, pattern, put, run,
    scattered,
};

use super::load_survives_restart;

#[test]
fn data_transfer_modes_are_equivalent() {
    let rig = Rig::new(Protocol::Tcp, 82, "{ kind: ram, size: 16MiB }");
    // Not aligned to blocks or PDUs.
    let lens = [1, 511, 1023, 1025, 4096, 3, 8189, 100_000, 51_552];
    for digests in ["none", "crc32c"] {
        for (initial_r2t, immediate) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            for bursts in ["", "&first_burst=1024&max_burst=4096&max_recv=1024"] {
                let keys = format!(
                    "?header_digest={digests}&data_digest={digests}&initial_r2t={initial_r2t}\
                     &immediate_data={immediate}{bursts}"
                );
                let session = rig.connect(&keys);
                let lun = block_on(session.lun(0)).unwrap();
                scattered(&lun, &lens, &keys);
                block_on(session.close());
            }
        }
    }
}

#[test]
fn session_reconnects_under_load() {
    let mut rig = Rig::with_file(Protocol::Tcp, 85, "16MiB");
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
        rig.stop();
        eventually("the loss", || session.status().link() != LinkState::Live);
        rig.serve(&[1]);
        eventually("the session", || session.status().link() == LinkState::Live);
    }
    wait_for_rounds();
    done.store(true, Ordering::Relaxed);
    for writer in writers {
        assert!(writer.join().unwrap() > 0);
    }
    assert!(session.status().reconnects() >= 3);
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
        return skip("initiator", &format!("{tool} is not installed"));
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
    load_survives_restart(&mut pair, &socket);
}
