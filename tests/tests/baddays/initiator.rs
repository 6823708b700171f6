//! `riser`, where its target or its user makes mistakes.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use riser_tests::programs::Pair;
use serde_json::Value;

use crate::load::{Disk, Nbd};
use crate::{PATIENCE, ended, eventually};

const RAM: &str = "{ kind: ram, size: 64MiB }";

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// Attaches, as soon as the daemon serves, which has just been started.
fn attach_first(pair: &Pair, args: &[&str]) {
    eventually("the daemon serves", || {
        ended(&mut pair.command(args)).0 == 0
    });
}

fn list(pair: &Pair) -> Value {
    parse(&pair.riser(&["list", "-o", "json"]))
}

#[test]
fn discovery_lists_each_port_once_and_fails_if_nothing_lets_us_in() {
    let pair = Pair::new(181, RAM);
    for url in ["srp://127.0.181.1", "srp://127.0.181.1:5556"] {
        let mut found = Value::Null;
        // The daemon has just been started.
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
        if !errors.contains("cannot be used") {
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
        return riser_tests::programs::skip("nothing_is_attached_over_something_else", "/dev/fuse");
    }
    pair.riser(&["attach", &url, "--fuse", &dir]);
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
    // What others have mounted is not hidden either.
    let (code, _, errors) = ended(&mut pair.command(&["attach", &url, "--fuse", "/proc"]));
    assert_eq!(code, 6, "{errors}");
    assert!(errors.contains("mounted on /proc already"), "{errors}");
    pair.riser(&["detach", &dir]);
    pair.riser(&["attach", &url, "--fuse", &dir]);
}

#[test]
fn an_attachment_that_nothing_uses_notices_that_its_target_is_gone() {
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
fn the_list_says_since_when_a_target_is_away() {
    let target = "iqn: iqn.2026-01.com.example:disk\n\
                  portals: [{ protocol: iscsi, listen: 127.0.184.1 }]";
    let mut pair = Pair::with_target(184, RAM, target);
    let url = "iscsi://127.0.184.1/iqn.2026-01.com.example:disk/0";
    let attach = ["attach", url, "--nbd", &pair.path("nbd")];
    // The daemon has just been started.
    eventually("the daemon serves", || {
        ended(&mut pair.command(&attach)).0 == 0
    });
    let link = |pair: &Pair| list(pair)[0]["link"].clone();
    eventually("live", || link(&pair)["state"] == "live");
    pair.kill();
    eventually("down", || link(&pair)["state"] == "reconnecting");
    let down = link(&pair);
    assert!(down["since"].as_u64().unwrap() > 1_700_000_000, "{down}");
    let error = down["last_error"].as_str().unwrap().to_owned();
    let text = pair.riser(&["list"]);
    assert!(text.contains(" down ") && text.contains(&error), "{text}");
    pair.serve();
    eventually("live again", || link(&pair)["state"] == "live");
    let text = pair.riser(&["list"]);
    assert!(
        text.contains(" live ") && text.contains("before that: "),
        "{text}"
    );
}

#[test]
fn an_operation_waits_for_its_target_as_long_as_it_was_asked_to() {
    let mut pair = Pair::new(
        185,
        "{ kind: file, path: DIR/disk, size: 64MiB, create: true }",
    );
    let (short, long) = (pair.path("short"), pair.path("long"));
    let url = pair.url();
    attach_first(&pair, &["attach", &url, "--nbd", &short, "--io-timeout=1s"]);
    pair.riser(&["attach", &url, "--nbd", &long, "--io-timeout=never"]);
    let mut disks = [&short, &long].map(|path| Nbd::connect(Path::new(path)));
    let mut bytes = [0; 512];
    for disk in &mut disks {
        disk.read(0, &mut bytes).unwrap();
    }
    pair.kill();
    let [short, long] = &mut disks;
    let begin = Instant::now();
    let failed = short.read(0, &mut bytes).unwrap_err();
    assert_eq!(failed.errno, libc::EIO, "{failed:?}");
    assert!(
        begin.elapsed() < PATIENCE,
        "it was not told to wait for ever"
    );
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || long.read(0, &mut [0; 512]).map_err(|e| e.errno));
        std::thread::sleep(Duration::from_secs(2));
        assert!(!waiting.is_finished());
        pair.serve();
        assert_eq!(waiting.join().unwrap(), Ok(()));
    });
    let (code, _, errors) =
        ended(&mut pair.command(&["attach", &url, "--nbd", "x", "--io-timeout=0"]));
    assert_eq!(code, 2, "{errors}");
}

#[test]
fn what_is_on_a_disk_is_not_overwritten_by_mistake() {
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
    // A blank disk gets an image that looks like ext4.
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
    // By another name of the same unit than the one it is attached by.
    let socket = pair.path("nbd");
    pair.riser(&["attach", &url, "--nbd", &socket]);
    let other = "srp://127.0.192.1:5555/0";
    refused(&["write", other, &file, "-q"], &socket);
    refused(&bench, &socket);
    pair.riser(&["write", other, &file, "-q", "--overwrite"]);
    pair.riser(&["detach", "0"]);
    pair.riser(&write);
}

#[test]
fn a_disk_whose_target_is_gone_is_detached_at_once_and_what_is_lost_is_named() {
    let target = "iqn: iqn.2026-01.com.example:disk\n\
                  portals: [{ protocol: iscsi, listen: 127.0.193.1 }]";
    let mut pair = Pair::with_target(193, RAM, target);
    let url = "iscsi://127.0.193.1/iqn.2026-01.com.example:disk/0";
    let socket = pair.path("nbd");
    attach_first(&pair, &["attach", url, "--nbd", &socket]);
    let mut disk = Nbd::connect(Path::new(&socket));
    disk.write(0, &[1; 512], false).unwrap();
    pair.kill();
    let waiting = std::thread::spawn(move || disk.write(512, &[2; 512], false).is_err());
    eventually("one operation waits", || {
        list(&pair)[0]["link"]["pending"]["operations"] == 1
    });
    let begin = Instant::now();
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
    assert!(
        begin.elapsed() < Duration::from_secs(20),
        "not the 60 s of an operation"
    );
    // The waiting operation ends with an error, or with its connection.
    assert!(waiting.join().unwrap_or(true));
    assert_eq!(list(&pair), Value::Array(Vec::new()));
}
