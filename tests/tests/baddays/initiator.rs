//! Tests `riser` with target failures and user errors.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use riser_testkit::programs::Pair;
use serde_json::Value;

use crate::{PATIENCE, ended, eventually};
use riser_tests::load::{Disk, Nbd};

const RAM: &str = "{ kind: ram, size: 64MiB }";

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// Attaches a disk when the daemon is ready, because it was just started.
fn attach_first(pair: &Pair, args: &[&str]) {
    eventually("the daemon serves", || {
        ended(&mut pair.command(args)).0 == 0
    });
}

fn list(pair: &Pair) -> Value {
    parse(&pair.riser(&["list", "-o", "json"]))
}

#[test]
fn discovery_lists_ports_once() {
    let pair = Pair::new(181, RAM);
    for url in ["srp://127.0.181.1", "srp://127.0.181.1:5556"] {
        let mut found = Value::Null;
        // The daemon was just started.
        eventually("the daemon serves", || {
            let (code, out, _) = ended(&mut pair.command(&["discover", url, "-o", "json"]));
            code == 0 && {
                found = parse(&out);
                true
            }
        });
        assert_eq!(found.as_array().unwrap().len(), 1, "{found}");
        assert_eq!(found[0]["error"], Value::Null, "{found}");
        let unit = found[0]["luns"][0]["url"].as_str().unwrap();
        assert!(unit.starts_with("srp://127.0.181.1/0?"), "{unit}");
    }
    drop(pair);
    let target = "iqn: iqn.2026-01.com.example:closed\n\
                  portals: [{ protocol: iscsi, listen: 127.0.182.1 }]\n\
                  chap: { users: [{ name: me, secret: twelve bytes or more }] }";
    let pair = Pair::with_target(182, RAM, target);
    let args = ["discover", "iscsi://127.0.182.1", "-o", "json"];
    eventually("the daemon serves", || {
        let (code, out, errors) = ended(&mut pair.command(&args));
        assert_ne!(code, 0, "{out}");
        if !errors.contains("cannot use ") {
            return false;
        }
        let found = parse(&out);
        assert!(found[0]["error"].is_string(), "{found}");
        code == 3
    });
}

#[test]
fn nothing_is_attached_over_something_else() {
    let pair = Pair::new(183, RAM);
    let url = pair.url();
    let (socket, dir) = (pair.path("nbd"), pair.path("dir"));
    fs::create_dir(&dir).unwrap();
    attach_first(&pair, &["attach", &url, "--nbd", &socket]);
    let (code, _, errors) = ended(&mut pair.command(&["attach", &url, "--nbd", &socket]));
    assert_eq!(code, 6, "{errors}");
    assert!(errors.contains("riser detach 0"), "{errors}");
    assert_eq!(list(&pair).as_array().unwrap().len(), 1);
    if !Path::new("/dev/fuse").exists() {
        return riser_testkit::programs::skip(
            "nothing_is_attached_over_something_else",
            "/dev/fuse",
        );
    }
    pair.riser(&["attach", &url, "--fuse", &dir, "--shared"]);
    for again in [
        &["attach", &url, "--fuse", &dir][..],
        &["attach", &url, "--fuse", &format!("{dir}/lun0")],
        &["mount", &url, &dir],
    ] {
        let (code, _, errors) = ended(&mut pair.command(again));
        assert_eq!(code, 6, "{again:?}: {errors}");
        assert!(errors.contains("riser detach 1"), "{errors}");
    }
    assert_eq!(list(&pair).as_array().unwrap().len(), 2);
    // An existing mount must not be hidden either.
    let (code, _, errors) = ended(&mut pair.command(&["attach", &url, "--fuse", "/proc"]));
    assert_eq!(code, 6, "{errors}");
    assert!(
        errors.contains("/proc is already a mount point"),
        "{errors}"
    );
    pair.riser(&["detach", &dir]);
    pair.riser(&["attach", &url, "--fuse", &dir, "--shared"]);
}

#[test]
fn idle_attachment_detects_lost_target() {
    let mut pair = Pair::new(189, RAM);
    attach_first(&pair, &["attach", &pair.url(), "--nbd", &pair.path("nbd")]);
    let state = |pair: &Pair| list(pair)[0]["link"]["state"].clone();
    eventually("it is live", || state(&pair) == "live");
    pair.kill();
    eventually("it is away", || state(&pair) != "live");
    pair.serve();
    eventually("it is live again", || state(&pair) == "live");
}

#[test]
fn list_shows_time_of_disconnect() {
    let target = "iqn: iqn.2026-01.com.example:disk\n\
                  portals: [{ protocol: iscsi, listen: 127.0.184.1 }]";
    let mut pair = Pair::with_target(184, RAM, target);
    let url = "iscsi://127.0.184.1/iqn.2026-01.com.example:disk/0";
    let attach = ["attach", url, "--nbd", &pair.path("nbd")];
    // The daemon was just started.
    eventually("the daemon serves", || {
        ended(&mut pair.command(&attach)).0 == 0
    });
    let link = |pair: &Pair| list(pair)[0]["link"].clone();
    eventually("live", || link(&pair)["state"] == "live");
    pair.kill();
    eventually("down", || link(&pair)["state"] == "reconnecting");
    let down = link(&pair);
    assert!(down["since"].as_u64().unwrap() > 1_700_000_000, "{down}");
    // Another attempt in between could fail with a different error.
    eventually("down with its last error", || {
        let link = link(&pair);
        let error = link["last_error"].as_str().unwrap();
        let text = pair.riser(&["list"]);
        text.contains(" down ") && text.contains(error)
    });
    pair.serve();
    eventually("live again", || link(&pair)["state"] == "live");
    let text = pair.riser(&["list"]);
    assert!(
        text.contains(" live ") && text.contains("before that: "),
        "{text}"
    );
}

#[test]
fn operation_waits_for_its_timeout() {
    let mut pair = Pair::new(
        185,
        "{ kind: file, path: DIR/disk, size: 64MiB, create: true }",
    );
    let (short, long) = (pair.path("short"), pair.path("long"));
    let url = pair.url();
    attach_first(&pair, &["attach", &url, "--nbd", &short, "--io-timeout=1s"]);
    let second = [
        "attach",
        &url,
        "--nbd",
        &long,
        "--io-timeout=never",
        "--shared",
    ];
    pair.riser(&second);
    let mut disks = [&short, &long].map(|path| Nbd::connect(Path::new(path)));
    let mut bytes = [0; 512];
    for disk in &mut disks {
        disk.read(0, &mut bytes).unwrap();
    }
    pair.kill();
    let [short, long] = &mut disks;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || long.read(0, &mut [0; 512]).map_err(|e| e.errno));
        eventually("the long one waits", || {
            list(&pair)[1]["link"]["pending"]["operations"] == 1
        });
        let begin = Instant::now();
        let failed = short.read(0, &mut bytes).unwrap_err();
        assert_eq!(failed.errno, libc::EIO, "{failed:?}");
        assert!(begin.elapsed() < PATIENCE, "its time-out is finite");
        // This was started before the short wait, but has a longer timeout.
        assert!(!waiting.is_finished());
        pair.serve();
        assert_eq!(waiting.join().unwrap(), Ok(()));
    });
    let (code, _, errors) =
        ended(&mut pair.command(&["attach", &url, "--nbd", "x", "--io-timeout=0"]));
    assert_eq!(code, 2, "{errors}");
}

#[test]
fn disk_contents_are_not_overwritten_accidentally() {
    let pair = Pair::new(192, RAM);
    let (url, file) = (pair.url(), pair.path("image"));
    let write = ["write", &url, &file, "-q"];
    let force = ["write", &url, &file, "-q", "--overwrite"];
    let bench = ["bench", &url, "--rw=randwrite", "--runtime=100ms", "-q"];
    let refused = |args: &[&str], why: &str| {
        let (code, _, errors) = ended(&mut pair.command(args));
        assert_eq!(code, 6, "{args:?}: {errors}");
        assert!(
            errors.contains(why) && errors.contains("--overwrite"),
            "{errors}"
        );
    };
    // Writes an image that looks like ext4 to a blank disk.
    let mut image = vec![0; 1 << 20];
    image[0x438..0x43a].copy_from_slice(&[0x53, 0xef]);
    fs::write(&file, &image).unwrap();
    eventually("the daemon serves", || {
        ended(&mut pair.command(&write)).0 == 0
    });
    refused(&write, "ext4");
    refused(&bench, "ext4");
    pair.riser(&["bench", &url, "--rw=randread", "--runtime=100ms", "-q"]);
    image[0x438] = 0;
    fs::write(&file, &image).unwrap();
    pair.riser(&force);
    pair.riser(&bench);
    // Use a different name for the same unit.
    let socket = pair.path("nbd");
    pair.riser(&["attach", &url, "--nbd", &socket]);
    let other = "srp://127.0.192.1:5555/0";
    refused(&["write", other, &file, "-q"], &socket);
    refused(&bench, &socket);
    pair.riser(&["write", other, &file, "-q", "--overwrite"]);
    pair.riser(&["detach", "0"]);
    pair.riser(&write);
    // The last bytes should be checked as well.
    let mut tail = vec![0; 8192];
    tail[..4].copy_from_slice(&[0xfc, 0x4e, 0x2b, 0xa9]);
    fs::write(&file, &tail).unwrap();
    let end = format!("--offset={}", (64 << 20) - 8192);
    pair.riser(&["write", &url, &file, "-q", &end]);
    refused(&write, "RAID");
}

#[test]
fn detach_without_target_reports_loss() {
    let target = "iqn: iqn.2026-01.com.example:disk\n\
                  portals: [{ protocol: iscsi, listen: 127.0.193.1 }]";
    let mut pair = Pair::with_target(193, RAM, target);
    let url = "iscsi://127.0.193.1/iqn.2026-01.com.example:disk/0";
    let socket = pair.path("nbd");
    // This operation would never complete, so if anything succeeds here, it did not wait for it.
    attach_first(
        &pair,
        &["attach", url, "--nbd", &socket, "--io-timeout=never"],
    );
    let mut disk = Nbd::connect(Path::new(&socket));
    disk.write(0, &[1; 512], false).unwrap();
    pair.kill();
    let waiting = std::thread::spawn(move || disk.write(512, &[2; 512], false).is_err());
    eventually("one operation waits", || {
        list(&pair)[0]["link"]["pending"]["operations"] == 1
    });
    let (code, _, errors) = ended(&mut pair.command(&["detach", "0"]));
    assert_eq!(code, 4, "{errors}");
    let lost = "1 operation fails, and acknowledged writes that were not flushed may be lost";
    assert!(
        errors.contains(lost) && errors.contains("--force"),
        "{errors}"
    );
    let (code, out, errors) = ended(&mut pair.command(&["detach", "0", "--force"]));
    assert_eq!(code, 0, "{errors}");
    assert!(out.contains(lost), "{out}");
    // The pending operation must either fail or lose its connection.
    assert!(waiting.join().unwrap_or(true));
    assert_eq!(list(&pair), Value::Array(Vec::new()));
}

#[test]
fn pending_operations_are_counted_immediately() {
    let target = "iqn: iqn.2026-01.com.example:disk\n\
                  portals: [{ protocol: iscsi, listen: 127.0.199.1 }, \
                  { protocol: iscsi, listen: 127.0.199.2 }]";
    let mut pair = Pair::with_target(199, RAM, target);
    let url = "iscsi://127.0.199.1/iqn.2026-01.com.example:disk/0?portal=127.0.199.2";
    let socket = pair.path("nbd");
    attach_first(
        &pair,
        &["attach", url, "--nbd", &socket, "--io-timeout=never"],
    );
    let mut disk = Nbd::connect(Path::new(&socket));
    pair.kill();
    let link = |pair: &Pair| list(pair)[0]["link"].clone();
    eventually("down", || link(&pair)["state"] == "reconnecting");
    assert_eq!(link(&pair)["pending"]["operations"], 0);
    // This must be sent after the last event reported by the session.
    let waiting = std::thread::spawn(move || disk.write(0, &[2; 512], false).is_err());
    eventually("one operation waits", || {
        link(&pair)["pending"]["operations"] == 1
    });
    let (code, _, errors) = ended(&mut pair.command(&["detach", "0"]));
    assert_eq!(code, 4, "{errors}");
    assert!(errors.contains("1 operation fails"), "{errors}");
    pair.riser(&["detach", "0", "--force"]);
    assert!(waiting.join().unwrap_or(true));
}

#[test]
fn target_without_unit_is_down() {
    let target = "iqn: iqn.2026-01.com.example:disk\n\
                  portals: [{ protocol: iscsi, listen: 127.0.200.1 }]";
    let mut pair = Pair::with_target(200, RAM, target);
    let url = "iscsi://127.0.200.1/iqn.2026-01.com.example:disk/0";
    attach_first(&pair, &["attach", url, "--nbd", &pair.path("nbd")]);
    let link = |pair: &Pair| list(pair)[0]["link"].clone();
    let config = pair.path("riserd.yaml");
    let with_unit = fs::read_to_string(&config).unwrap();
    pair.kill();
    eventually("down", || link(&pair)["state"] == "reconnecting");
    let since = link(&pair)["since"].clone();
    fs::write(&config, with_unit.replace("{ 0: disk }", "{ 5: disk }")).unwrap();
    pair.serve();
    let says_why = |link: &Value| {
        link["last_error"]
            .as_str()
            .unwrap()
            .contains("the logical unit")
    };
    eventually("the login succeeds", || says_why(&link(&pair)));
    // The session tries to log in repeatedly.
    for _ in 0..20 {
        let link = link(&pair);
        assert_eq!(
            (&link["state"], &link["since"]),
            (&"reconnecting".into(), &since)
        );
        std::thread::sleep(Duration::from_millis(200));
    }
    pair.kill();
    fs::write(&config, with_unit).unwrap();
    pair.serve();
    eventually("live", || link(&pair)["state"] == "live");
}

/// The list can be slightly older than the state of the session.
#[test]
fn detach_succeeds_after_target_returns() {
    let pair = Pair::new(208, RAM);
    attach_first(&pair, &["attach", &pair.url(), "--nbd", &pair.path("nbd")]);
    eventually("it is live", || list(&pair)[0]["link"]["state"] == "live");
    let file = Path::new(&pair.path("state")).join("0.json");
    let live = fs::read_to_string(&file).unwrap();
    let down = live.replacen("\"live\"", "\"reconnecting\"", 1);
    assert_ne!(live, down);
    fs::write(&file, down).unwrap();
    let detach = pair.command(&["detach", "0"]).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    fs::write(&file, live).unwrap();
    let end = detach.wait_with_output().unwrap();
    assert!(end.status.success(), "{end:?}");
}

#[test]
fn detach_fails_if_flush_fails() {
    let target = "iqn: iqn.2026-01.com.example:disk\n\
                  portals: [{ protocol: iscsi, listen: 127.0.201.1 }]";
    let pair = Pair::with_target(201, RAM, target);
    let url = "iscsi://127.0.201.1/iqn.2026-01.com.example:disk/0";
    let socket = pair.path("nbd");
    attach_first(&pair, &["attach", url, "--nbd", &socket, "--io-timeout=1s"]);
    let mut disk = Nbd::connect(Path::new(&socket));
    disk.write(0, &[1; 512], false).unwrap();
    drop(disk);
    // If the process is stopped, the connection stays open, but there is no response.
    riser_testkit::programs::tool("kill", ["-STOP", &pair.process().unwrap().to_string()]);
    let (code, out, errors) = ended(&mut pair.command(&["detach", "0", "--timeout=60s"]));
    assert_eq!(code, 1, "{out}{errors}");
    let log = errors
        .split(|c: char| c.is_whitespace() || c == ';')
        .find(|word| word.ends_with(".log"));
    let log = fs::read_to_string(log.expect("it names the log")).unwrap();
    assert!(log.contains("the NBD server on"), "{log}");
    assert!(errors.contains("may be lost"), "{errors}");
}

#[test]
fn killed_riser_invalidates_unflushed_writes() {
    let target = "iqn: iqn.2026-01.com.example:disk\n\
                  portals: [{ protocol: iscsi, listen: 127.0.205.1 }]";
    let mut pair = Pair::with_target(205, RAM, target);
    let url = "iscsi://127.0.205.1/iqn.2026-01.com.example:disk/0";
    let socket = pair.path("nbd");
    let attach = ["attach", url, "--nbd", &socket];
    attach_first(&pair, &attach);
    for is_restarted in [false, true] {
        let mut disk = Nbd::connect(Path::new(&socket));
        disk.write(0, &[1; 512], false).unwrap();
        let id = list(&pair)[0]["pid"].as_u64().unwrap().to_string();
        riser_testkit::programs::tool("kill", ["-KILL", &id]);
        eventually("it is gone", || list(&pair)[0].is_null());
        if is_restarted {
            pair.kill();
            pair.serve();
        }
        attach_first(&pair, &attach);
        // Like a client that sends its pending requests again and then continues.
        let mut disk = Nbd::connect(Path::new(&socket));
        assert_eq!(disk.flush().is_err(), is_restarted, "the write is gone");
        disk.flush().unwrap();
    }
}

#[test]
fn disk_of_other_user_is_not_overwritten() {
    let pair = Pair::new(207, RAM);
    if !Path::new("/dev/fuse").exists() {
        return riser_testkit::programs::skip("what another user has attached", "/dev/fuse");
    }
    let (url, file, dir) = (pair.url(), pair.path("image"), pair.path("mnt"));
    fs::create_dir(&dir).unwrap();
    fs::write(&file, [0; 4096]).unwrap();
    let write = ["write", &url, &file, "-q"];
    eventually("the daemon serves", || {
        ended(&mut pair.command(&write)).0 == 0
    });
    // This user's list of attachments is in a different directory, but the mounts are in the mount
    // table.
    let of_other = |args: &[&str]| {
        let mut command = pair.command(args);
        ended(command.env("RISER_STATE_DIR", pair.path("other")))
    };
    assert_eq!(of_other(&["attach", &url, "--fuse", &dir]).0, 0);
    let (code, _, errors) = ended(&mut pair.command(&write));
    // This should be first, because nothing else would detach it.
    assert_eq!(of_other(&["detach", "0"]).0, 0);
    assert_eq!(code, 6, "{errors}");
    assert!(errors.contains(&dir), "{errors}");
    pair.riser(&write);
}

#[test]
fn unknown_attachment_prevents_overwriting() {
    let pair = Pair::new(202, RAM);
    let (url, file) = (pair.url(), pair.path("image"));
    fs::write(&file, [0; 4096]).unwrap();
    let write = ["write", &url, &file, "-q"];
    eventually("the daemon serves", || {
        ended(&mut pair.command(&write)).0 == 0
    });
    // An attachment created by a different version, which could even be for this disk.
    let unknown = Path::new(&pair.path("state")).join("7.json");
    fs::write(&unknown, "{}").unwrap();
    let name = unknown.to_str().unwrap();
    let (code, _, errors) = ended(&mut pair.command(&write));
    assert_eq!(code, 6, "{errors}");
    assert!(
        errors.replace(['\n', ' ', '│'], "").contains(name),
        "{errors}"
    );
    // This must not hide the other attachments.
    let (code, out, errors) = ended(&mut pair.command(&["list"]));
    assert_eq!((code, out.as_str()), (0, "no attachments\n"));
    assert!(errors.contains(name), "{errors}");
    fs::remove_file(unknown).unwrap();
    // If a user has no directory for attachments, there are no attachments.
    let mut command = pair.command(&write);
    let (code, _, errors) = ended(command.env("RISER_STATE_DIR", "/sys/riser"));
    assert_eq!(code, 0, "{errors}");
}

#[test]
fn unreadable_disk_is_not_overwritten() {
    let mut pair = Pair::new(
        203,
        "{ kind: file, path: DIR/disk, size: 64MiB, create: true }",
    );
    let (url, file) = (pair.url(), pair.path("image"));
    fs::write(&file, [0; 4096]).unwrap();
    let write = ["write", &url, &file, "-q"];
    eventually("the daemon serves", || {
        ended(&mut pair.command(&write)).0 == 0
    });
    let disk = fs::File::options().write(true).open(pair.path("disk"));
    disk.unwrap().set_len(0).unwrap();
    let (code, _, errors) = ended(&mut pair.command(&write));
    assert_eq!(code, 6, "{errors}");
    assert!(errors.contains("cannot read its"), "{errors}");
    pair.kill();
}

#[test]
fn discovery_reports_missing_target() {
    let target = "iqn: iqn.2026-01.com.example:closed\n\
                  portals: [{ protocol: iscsi, listen: 127.0.204.1 }]";
    let mut pair = Pair::with_target(204, RAM, target);
    pair.kill();
    let config = pair.path("riserd.yaml");
    let text = fs::read_to_string(&config).unwrap();
    let others = "access: [{ iqn: iqn.2026-01.com.example:other }]";
    fs::write(&config, text.replace("access: open", others)).unwrap();
    pair.serve();
    let discover = ["discover", "iscsi://127.0.204.1"];
    eventually("the daemon serves", || {
        let (code, out, _) = ended(&mut pair.command(&discover));
        code == 0 && {
            assert!(out.contains("no targets available"), "{out}");
            true
        }
    });
    let json = pair.riser(&["discover", "iscsi://127.0.204.1", "-o", "json"]);
    assert_eq!(parse(&json), Value::Array(Vec::new()));
}
