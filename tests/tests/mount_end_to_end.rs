//! `riser mount` of a disk of `riserd`: a file system that outlives its attachments. Needs root.

#![allow(missing_docs, reason = "a test")]

use std::fs;
use std::path::Path;

use std::time::Duration;

use riser_testkit::eventually;
use riser_testkit::programs::{Pair, missing, skip, tool};

#[test]
fn a_mounted_file_system_keeps_what_was_written() {
    const NAME: &str = "mount_end_to_end";
    if let Some(tool) = missing(&["mkfs.ext4", "e2fsck", "losetup", "mount"]) {
        return skip(NAME, &format!("{tool} is not installed"));
    }
    let is_root = tool("id", ["-u"]).trim() == "0";
    let devices = ["/dev/fuse", "/dev/loop-control"];
    if !is_root || devices.iter().any(|d| !Path::new(d).exists()) {
        return skip(NAME, "needs root, FUSE and loop devices");
    }
    let mut pair = Pair::new(
        72,
        "{ kind: file, path: DIR/disk.img, size: 64MiB, create: true }",
    );
    let (url, dir, file) = (pair.url(), pair.path("mnt"), pair.path("mnt/data"));
    fs::create_dir(&dir).unwrap();
    pair.riser(&["attach", &url, "--fuse", &dir]);
    tool("/usr/sbin/mkfs.ext4", ["-q", &format!("{dir}/lun0")]);
    pair.riser(&["detach", &dir]);

    let bytes: Vec<u8> = (0..9_000_000u32)
        .map(|i| (i.wrapping_mul(i) >> 9) as u8)
        .collect();
    // The first is ended by `riser detach`, the second by umount, each from other hands.
    for round in 0..2 {
        let mounted = pair.command(&["mount", &url, &dir]).output().unwrap();
        let said = String::from_utf8_lossy(&mounted.stderr).into_owned();
        if said.contains("cannot attach") && said.contains("loop") {
            return skip(NAME, "no loop device can be had");
        }
        assert!(mounted.status.success(), "{said}");
        if round == 0 {
            fs::write(&file, &bytes).unwrap();
            tool("sync", ["-f", &file]);
            // The target goes away and comes back below a file system in use.
            pair.kill();
            pair.serve();
            fs::write(format!("{dir}/second"), &bytes).unwrap();
            pair.riser(&["detach", &dir]);
        } else {
            for name in ["data", "second"] {
                let got = fs::read(format!("{dir}/{name}")).unwrap();
                assert!(got == bytes, "{name} has changed");
            }
            tool("umount", [&dir]);
        }
        assert!(!Path::new(&file).exists());
    }
    // It is no longer attached, so the daemon's file can be looked at.
    let listed = |pair: &Pair| pair.riser(&["list", "-o", "json"]);
    eventually("nothing is attached", Duration::from_secs(60), || {
        listed(&pair).trim() == "[]"
    });
    tool("/usr/sbin/e2fsck", ["-fn", &pair.path("disk.img")]);
}

#[test]
fn a_file_system_whose_target_is_gone_is_detached_at_once() {
    const NAME: &str = "a_file_system_whose_target_is_gone_is_detached_at_once";
    if let Some(tool) = missing(&["mkfs.ext4", "losetup", "mount"]) {
        return skip(NAME, &format!("{tool} is not installed"));
    }
    let is_root = tool("id", ["-u"]).trim() == "0";
    let devices = ["/dev/fuse", "/dev/loop-control"];
    if !is_root || devices.iter().any(|d| !Path::new(d).exists()) {
        return skip(NAME, "needs root, FUSE and loop devices");
    }
    let mut pair = Pair::new(198, "{ kind: ram, size: 64MiB }");
    let (url, dir) = (pair.url(), pair.path("mnt"));
    fs::create_dir(&dir).unwrap();
    pair.riser(&["attach", &url, "--fuse", &dir]);
    tool("/usr/sbin/mkfs.ext4", ["-q", &format!("{dir}/lun0")]);
    pair.riser(&["detach", &dir]);
    let mount = ["mount", &url, &dir, "--io-timeout=never"];
    let mounted = pair.command(&mount).output().unwrap();
    let said = String::from_utf8_lossy(&mounted.stderr).into_owned();
    if said.contains("cannot attach") && said.contains("loop") {
        return skip(NAME, "no loop device can be had");
    }
    assert!(mounted.status.success(), "{said}");
    // The same disk is not mounted twice: neither would know of the other.
    let other = pair.path("other");
    fs::create_dir(&other).unwrap();
    let again = pair.command(&["mount", &url, &other]).output().unwrap();
    assert_eq!(again.status.code(), Some(6));
    fs::write(format!("{dir}/dirty"), [1; 65536]).unwrap();
    pair.kill();
    eventually("the target is down", Duration::from_secs(60), || {
        pair.riser(&["list"]).contains(" down ")
    });
    // Operations never end by themselves, so neither of the two waits for one.
    let refused = pair.command(&["detach", &dir]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(4), "{said}");
    assert!(said.contains("not written back"), "{said}");
    pair.riser(&["detach", &dir, "--force"]);
    assert_eq!(pair.riser(&["list", "-o", "json"]).trim(), "[]");
    let left = fs::read_dir(pair.path("state")).unwrap();
    let left = left.filter_map(|e| e.ok()?.file_name().into_string().ok());
    assert_eq!(left.filter(|name| name.ends_with(".fuse")).count(), 0);
}
