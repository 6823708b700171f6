//! Tests the iSCSI initiator with `tgtd`, which is an external target.

#![allow(missing_docs, reason = "a test")]

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use riser_block::Buffer;
use riser_block::task::block_on;
use riser_initiator::engine::Client;
use riser_initiator::lun::Lun;
use riser_initiator::url::IscsiUrl;
use riser_testkit::eventually;
use riser_testkit::programs::{missing, skip, tool};

const IQN: &str = "iqn.2026-01.com.example:tgt";
const PORTAL: &str = "127.0.89.1:3260";

/// Returns the number to use for the control socket of this daemon, so that we don't conflict with
/// another instance.
fn control() -> String {
    (1000 + std::process::id() % 30_000).to_string()
}

struct Tgt {
    daemon: Child,
    dir: PathBuf,
}

impl Tgt {
    fn new() -> Self {
        let dir = std::env::temp_dir().join(format!("riser-tgt-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let log = File::create(dir.join("log")).unwrap();
        let daemon = Command::new("tgtd")
            .args([
                "-f",
                "-C",
                &control(),
                "--iscsi",
                &format!("portal={PORTAL}"),
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let tgt = Self { daemon, dir };
        eventually("tgtd responds", Duration::from_secs(10), || {
            admin("show", "target", &[]).status().unwrap().success()
        });
        let disk = tgt.dir.join("disk");
        File::create(&disk).unwrap().set_len(64 << 20).unwrap();
        run("new", "target", &["--tid", "1", "-T", IQN]);
        let unit = ["--tid", "1", "--lun", "1", "-b", disk.to_str().unwrap()];
        run("new", "logicalunit", &unit);
        run("bind", "target", &["--tid", "1", "-I", "ALL"]);
        for digest in ["HeaderDigest", "DataDigest"] {
            let both = ["--tid", "1", "-n", digest, "-v", "None,CRC32C"];
            run("update", "target", &both);
        }
        tgt
    }
}

impl Drop for Tgt {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn admin(op: &str, mode: &str, more: &[&str]) -> Command {
    let mut command = Command::new("tgtadm");
    command.args([
        "-C",
        &control(),
        "--lld",
        "iscsi",
        "--op",
        op,
        "--mode",
        mode,
    ]);
    command
        .args(more)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

fn run(op: &str, mode: &str, more: &[&str]) {
    assert!(
        admin(op, mode, more).status().unwrap().success(),
        "{op} {mode}"
    );
}

fn url(user: &str, keys: &str) -> IscsiUrl {
    let url = format!("iscsi://{user}127.0.89.1/{IQN}/1{keys}");
    url.parse().unwrap()
}

fn buffer_of(lun: &Lun, byte: u8, len: usize) -> Buffer {
    let buffer = block_on(lun.buffers().take_buffer(len));
    buffer.slice().fill(0, len, byte);
    buffer
}

#[test]
fn tgt_works_as_target() {
    if let Some(tool) = missing(&["tgtd", "tgtadm"]) {
        return skip("iscsi_tgt", &format!("{tool} is not installed"));
    }
    if !tool("id", ["-u"]).starts_with('0') {
        return skip("iscsi_tgt", "tgtd needs root");
    }
    let _tgt = Tgt::new();
    let client = Client::builder().pool(16 << 20).without_device().unwrap();
    let found = block_on(client.discover_targets(&url("", ""))).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].name.as_str(), IQN);
    for keys in [
        "",
        "?header_digest=crc32c&data_digest=crc32c",
        "?immediate_data=0&initial_r2t=1&max_burst=4096&first_burst=512",
        "?max_recv=4096&queue_size=3",
    ] {
        let session = block_on(client.connect(&url("", keys))).unwrap();
        let lun = block_on(session.lun(1)).unwrap();
        for (byte, offset, len) in [(1, 0, 512), (2, 4096, 65536), (3, 1 << 20, 512 << 10)] {
            let written = lun.write(offset, buffer_of(&lun, byte, len), false);
            block_on(written).unwrap();
            let read = block_on(lun.read(offset, buffer_of(&lun, 0, len))).unwrap();
            assert!(read.slice().to_vec() == vec![byte; len], "{keys}");
        }
        block_on(lun.flush()).unwrap();
        block_on(session.close());
    }
    run(
        "new",
        "account",
        &["--user", "me", "--password", "initiator-secret"],
    );
    run("bind", "account", &["--tid", "1", "--user", "me"]);
    run(
        "new",
        "account",
        &["--user", "you", "--password", "target-secret-1"],
    );
    run(
        "bind",
        "account",
        &["--tid", "1", "--user", "you", "--outgoing"],
    );
    let me = "me%initiator-secret@";
    // tgtd uses the number of SHA-1 for SHA-256.
    let mutual = "?chap=md5&target_user=you&target_password=target-secret-1";
    for keys in ["?chap=md5", mutual] {
        block_on(block_on(client.connect(&url(me, keys))).unwrap().close());
    }
    for (user, keys) in [
        ("me%wrong-secret-@", "?chap=md5"),
        (me, "?chap=md5&target_user=you&target_password=wrong"),
    ] {
        assert!(
            block_on(client.connect(&url(user, keys))).is_err(),
            "{user}{keys}"
        );
    }
    client.shutdown();
}
