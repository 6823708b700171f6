//! Tests `riser mount` with a `riserd` disk: the file system must keep its data across several
//! attachments. Requires root.

#![allow(missing_docs, reason = "a test")]

use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use riser_testkit::programs::{Pair, missing, skip, tool};
use riser_testkit::{eventually, eventually_some};

/// Creates a disk with a file system. Returns its address and a directory to use as the mount
/// point, or `None` if this is not supported here.
fn formatted(test: &str, network: u8, backend: &str) -> Option<(Pair, String, String)> {
    if let Some(tool) = missing(&["mkfs.ext4", "e2fsck", "losetup", "mount"]) {
        skip(test, &format!("{tool} is not installed"));
        return None;
    }
    let is_root = tool("id", ["-u"]).trim() == "0";
    let devices = ["/dev/fuse", "/dev/loop-control"];
    if !is_root || devices.iter().any(|d| !Path::new(d).exists()) {
        skip(test, "needs root, FUSE and loop devices");
        return None;
    }
    let pair = Pair::new(network, backend);
    let (url, dir) = (pair.url(), pair.path("mnt"));
    fs::create_dir(&dir).unwrap();
    pair.riser(&["attach", &url, "--fuse", &dir]);
    tool("/usr/sbin/mkfs.ext4", ["-q", &format!("{dir}/lun0")]);
    pair.riser(&["detach", &dir]);
    Some((pair, url, dir))
}

/// Runs `riser mount` with these arguments. Returns false if no loop device is available.
fn mount(pair: &Pair, args: &[&str]) -> bool {
    let mounted = pair
        .command(&[&["mount"][..], args].concat())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&mounted.stderr).into_owned();
    if said.contains("cannot attach") && said.contains("loop") {
        return false;
    }
    assert!(mounted.status.success(), "{said}");
    true
}

/// Returns the number of mounts on a directory.
fn mounts(dir: &str) -> usize {
    let list = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let is_on = |line: &&str| line.split(' ').nth(4) == Some(dir);
    list.lines().filter(is_on).count()
}

/// Returns true if a directory is currently a mount point.
fn is_mounted(dir: &str) -> bool {
    mounts(dir) > 0
}

#[test]
fn mounted_file_system_keeps_data() {
    const NAME: &str = "mount_end_to_end";
    let backend = "{ kind: file, path: DIR/disk.img, size: 64MiB, create: true }";
    let Some((mut pair, url, dir)) = formatted(NAME, 72, backend) else {
        return;
    };
    let file = pair.path("mnt/data");

    let bytes: Vec<u8> = (0..9_000_000u32)
        .map(|i| (i.wrapping_mul(i) >> 9) as u8)
        .collect();
    // In the first round we use `riser detach`, and in the second we use umount. Both are run by
    // another process.
    for round in 0..2 {
        if !mount(&pair, &[&url, &dir]) {
            return skip(NAME, "no loop device can be had");
        }
        if round == 0 {
            fs::write(&file, &bytes).unwrap();
            tool("sync", ["-f", &file]);
            // Restart the target while the file system is in use.
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
    // The disk is now detached, so we can check the daemon's file.
    let listed = |pair: &Pair| pair.riser(&["list", "-o", "json"]);
    eventually("nothing is attached", Duration::from_secs(60), || {
        listed(&pair).trim() == "[]"
    });
    tool("/usr/sbin/e2fsck", ["-fn", &pair.path("disk.img")]);
}

#[test]
fn file_system_without_target_detaches() {
    const NAME: &str = "file_system_without_target_detaches";
    let backend = "{ kind: ram, size: 64MiB }";
    let Some((mut pair, url, dir)) = formatted(NAME, 198, backend) else {
        return;
    };
    if !mount(&pair, &[&url, &dir, "--io-timeout=never"]) {
        return skip(NAME, "no loop device can be had");
    }
    // The same disk must not be mounted twice, because the two mounts would not know about each
    // other.
    let other = pair.path("other");
    fs::create_dir(&other).unwrap();
    let again = pair.command(&["mount", &url, &other]).output().unwrap();
    assert_eq!(again.status.code(), Some(6));
    fs::write(format!("{dir}/dirty"), [1; 65536]).unwrap();
    pair.kill();
    eventually("the target is down", Duration::from_secs(60), || {
        pair.riser(&["list"]).contains(" down ")
    });
    // These operations never complete, so we must not wait for them.
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

#[test]
fn stacked_mount_stays() {
    const NAME: &str = "stacked_mount_stays";
    let Some((pair, url, dir)) = formatted(NAME, 211, "{ kind: ram, size: 64MiB }") else {
        return;
    };
    if !mount(&pair, &[&url, &dir]) {
        return skip(NAME, "no loop device can be had");
    }
    fs::write(format!("{dir}/below"), b"1").unwrap();
    tool("mount", ["-t", "tmpfs", "other", &dir]);
    let mark = format!("{dir}/mark");
    fs::write(&mark, b"").unwrap();
    for force in [&[][..], &["--force"]] {
        let detach = [&["detach", &dir, "--timeout", "2s"][..], force].concat();
        let refused = pair.command(&detach).output().unwrap();
        assert!(!refused.status.success());
        assert!(Path::new(&mark).exists(), "the other mount was taken away");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(said.contains("another file system is mounted"), "{said}");
    }
    // The process that serves this disk must not treat it as its own either.
    let list = pair.riser(&["list", "-o", "json"]);
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    tool("kill", ["-TERM", &list[0]["pid"].to_string()]);
    let log = list[0]["log"].as_str().unwrap();
    eventually("the signal is seen", Duration::from_secs(60), || {
        fs::read_to_string(log).unwrap().contains("stays mounted")
    });
    assert!(Path::new(&mark).exists(), "the other mount was taken away");
    tool("umount", [&dir]);
    assert_eq!(fs::read(format!("{dir}/below")).unwrap(), b"1");
    pair.riser(&["detach", &dir]);
    assert!(!is_mounted(&dir));
}

#[test]
fn bind_mount_over_attachment_stays() {
    const NAME: &str = "bind_mount_over_attachment_stays";
    let Some((pair, url, dir)) = formatted(NAME, 213, "{ kind: ram, size: 64MiB }") else {
        return;
    };
    if !mount(&pair, &[&url, &dir]) {
        return skip(NAME, "no loop device can be had");
    }
    let refuses = |force: &[&str]| {
        let before = mounts(&dir);
        let detach = [&["detach", &dir, "--timeout", "2s"][..], force].concat();
        let refused = pair.command(&detach).output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(6), "{said}");
        assert!(said.contains("another file system is mounted"), "{said}");
        assert_eq!(mounts(&dir), before, "the bind mount was taken away");
    };
    // There is another mount on top of it.
    tool("mount", ["--bind", &dir, &dir]);
    refuses(&[]);
    refuses(&["--force"]);
    tool("umount", [&dir]);
    pair.riser(&["detach", &dir]);
    // Same, but using a file.
    pair.riser(&["attach", &url, "--fuse", &dir]);
    tool("mount", ["--bind", &dir, &dir]);
    refuses(&[]);
    refuses(&["--force"]);
    tool("umount", [&dir]);
    pair.riser(&["detach", &dir]);
    assert!(!is_mounted(&dir));
}

#[test]
fn file_system_mounted_twice_stays_served() {
    const NAME: &str = "file_system_mounted_twice_stays_served";
    let Some((pair, url, dir)) = formatted(NAME, 214, "{ kind: ram, size: 64MiB }") else {
        return;
    };
    if !mount(&pair, &[&url, &dir]) {
        return skip(NAME, "no loop device can be had");
    }
    let list = || pair.riser(&["list", "-o", "json"]);
    let listed: serde_json::Value = serde_json::from_str(&list()).unwrap();
    let log = listed[0]["log"].as_str().unwrap();
    let other = pair.path("other");
    fs::create_dir(&other).unwrap();
    tool("mount", ["--bind", &dir, &other]);
    tool("umount", [&dir]);
    eventually("it waits for the other", Duration::from_secs(60), || {
        fs::read_to_string(log).is_ok_and(|log| log.contains("has another mount"))
    });
    // Detaching must also wait in this case, because a signal would interrupt the operation.
    let detach = ["detach", &dir, "--timeout", "1s"];
    let refused = pair.command(&detach).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(4), "{said}");
    assert!(said.contains("still serves"), "{said}");
    assert!(
        !fs::read_to_string(log)
            .unwrap()
            .contains("received a signal to stop")
    );
    let file = format!("{other}/data");
    fs::write(&file, b"1").unwrap();
    tool("sync", ["-f", &file]);
    tool("umount", [&other]);
    eventually("it ends", Duration::from_secs(60), || list().trim() == "[]");
}

#[test]
fn unreported_mount_is_undone() {
    const NAME: &str = "unreported_mount_is_undone";
    let Some((pair, url, dir)) = formatted(NAME, 212, "{ kind: ram, size: 64MiB }") else {
        return;
    };
    if !mount(&pair, &[&url, &dir]) {
        return skip(NAME, "no loop device can be had");
    }
    pair.riser(&["detach", &dir]);
    // Its report is blocked until the process that should receive it has exited.
    let (starter, report) = UnixStream::pair().unwrap();
    report.set_nonblocking(true).unwrap();
    for len in [4096, 1] {
        while let Ok(written) = (&report).write(&[0; 4096][..len]) {
            assert!(written > 0);
        }
    }
    report.set_nonblocking(false).unwrap();
    let log = pair.path("mount.log");
    let serve = ["mount", &url, &dir, "--foreground", "--supervised", &log];
    let mut process = pair
        .command(&serve)
        .stdout(Stdio::from(OwnedFd::from(report)))
        .stderr(File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let used = format!("{dir}/lost+found");
    let open = eventually_some("the mount", Duration::from_secs(60), || {
        File::open(&used).ok()
    });
    drop(starter);
    eventually("it is unmounted", Duration::from_secs(60), || {
        !is_mounted(&dir)
    });
    drop(open);
    assert!(!process.wait().unwrap().success());
    assert_eq!(pair.riser(&["list", "-o", "json"]).trim(), "[]");
    let left = fs::read_dir(pair.path("state")).unwrap();
    let left = left.filter_map(|e| e.ok()?.file_name().into_string().ok());
    assert_eq!(left.filter(|name| name.ends_with(".fuse")).count(), 0);
}
