//! Attachments with misbehaving targets, logs or users.

#![allow(missing_docs, reason = "a test")]

mod foreign_target;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use foreign_target::{
    Attached, Disk, ForeignTarget, Nbd, Reply, check_condition, good, unscripted,
};
use riser_testkit::eventually;
use riser_testkit::skip::skip;
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);

/// A directory for a test, with a list of attachments.
struct Home(PathBuf);

impl Home {
    fn new(name: &str) -> Self {
        let dir = format!("riser-attachments-{name}-{}", std::process::id());
        let dir = std::env::temp_dir().join(dir);
        fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_riser"));
        command
            .args(args)
            .env("RISER_STATE_DIR", self.0.join("state"))
            .env_remove("RISER_LOG")
            .stdin(Stdio::null());
        command
    }

    /// Returns the exit status, standard output and standard error.
    fn run(&self, args: &[&str]) -> (i32, String, String) {
        finished(self.command(args).output().unwrap())
    }

    fn spawn(&self, args: &[&str]) -> Child {
        let mut command = self.command(args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    fn list(&self) -> Value {
        serde_json::from_str(&self.run(&["list", "-o", "json"]).1).unwrap()
    }

    /// Returns whether the human-readable list contains an attachment in this state.
    fn has_state(&self, state: &str) -> bool {
        self.run(&["list"]).1.contains(&format!(" {state} "))
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        for attachment in self.list().as_array().unwrap() {
            let id = attachment["id"].as_str().unwrap();
            self.run(&["detach", id, "--force"]);
        }
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn finished(output: Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().unwrap_or(-1);
    (code, text(&output.stdout), text(&output.stderr))
}

/// Starts an attachment whose standard error has no reader, for example because a log collector was
/// restarted.
fn without_reader(url: &str, name: &str) -> Attached {
    let mut attached = Attached::start(url, name, Stdio::piped());
    drop(attached.child.stderr.take());
    attached
}

fn terminate(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
}

#[test]
fn unwritable_log_does_not_delay_signal() {
    let mut disk = without_reader("mem:1M", "signal");
    terminate(&disk.child);
    eventually("the process ends", PATIENCE, || {
        disk.child.try_wait().unwrap().is_some()
    });
}

#[test]
fn unwritable_log_does_not_stop_disk() {
    let mut is_cut = false;
    let script = move |cdb: &[u8], _: &[u8]| {
        // The first write closes the connection, which logs a line.
        (cdb[0] == 0x8a && !std::mem::replace(&mut is_cut, true)).then(|| Reply {
            disconnect: true,
            ..Reply::default()
        })
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    let disk = without_reader(&target.url.to_string(), "disk");
    let error = disk.nbd().execute(Nbd::WRITE, 0, 0, &[0x5a; 4096]);
    assert_eq!(error, 0, "the write is repeated after the next login");
}

/// SYNCHRONIZE CACHE (10) and (16) fail with MEDIUM ERROR.
fn target_with_failing_flush() -> ForeignTarget {
    let script = |cdb: &[u8], _: &[u8]| {
        let is_flush = matches!(cdb[0], 0x35 | 0x91);
        is_flush.then(|| check_condition(0x70, 3, 0x0c, 0))
    };
    ForeignTarget::start(Disk::default(), Box::new(script))
}

#[test]
fn detach_reports_failed_final_flush() {
    let target = target_with_failing_flush();
    let (home, url) = (Home::new("flush"), target.url.to_string());
    let (socket, log) = (home.path("nbd"), home.path("log"));
    for options in [&[][..], &["--log-file", &log], &["--foreground"]] {
        let args = [&["attach", &url, "--nbd", &socket], options].concat();
        let mut process = home.spawn(&args);
        eventually("the disk is attached", PATIENCE, || home.has_state("live"));
        let error = Nbd::connect(Path::new(&socket)).execute(Nbd::WRITE, 0, 0, &[1; 4096]);
        assert_eq!(error, 0);
        let (code, _, text) = home.run(&["detach", &socket]);
        assert_eq!(code, 1, "{options:?}: {text}");
        assert!(text.contains("with an error"), "{options:?}: {text}");
        assert_eq!(home.list(), serde_json::json!([]), "{options:?}");
        let _ = process.wait();
    }
}

#[test]
fn failed_attachment_is_listed_until_detached() {
    let target = target_with_failing_flush();
    let (home, url) = (Home::new("failed"), target.url.to_string());
    let socket = home.path("nbd");
    let attach = ["attach", &url, "--nbd", &socket, "--foreground"];
    let mut process = home.spawn(&attach);
    eventually("the disk is attached", PATIENCE, || home.has_state("live"));
    let error = Nbd::connect(Path::new(&socket)).execute(Nbd::WRITE, 0, 0, &[1; 4096]);
    assert_eq!(error, 0);
    terminate(&process);
    assert_eq!(process.wait().unwrap().code(), Some(1));
    assert!(home.has_state("failed"));
    assert_eq!(home.list()[0]["phase"], "failed");
    // Neither the unit nor the path is in use anymore.
    let mut process = home.spawn(&attach);
    eventually("the disk is attached", PATIENCE, || home.has_state("live"));
    assert_eq!(home.list().as_array().unwrap().len(), 1, "it is replaced");
    terminate(&process);
    process.wait().unwrap();
}

#[test]
fn second_writer_of_unit_is_rejected() {
    let target = ForeignTarget::start(Disk::default(), unscripted());
    let (home, url) = (Home::new("writers"), target.url.to_string());
    let sockets = ["a", "b", "c"].map(|name| home.path(name));
    let attach = |socket: &str, options: &[&str]| {
        let args = [&["attach", &url, "--nbd", socket], options].concat();
        home.run(&args)
    };
    assert_eq!(attach(&sockets[0], &[]).0, 0);
    // The unit only has a serial number, so its address may differ.
    let other = format!("{url}?queue_size=4");
    let (code, _, text) = home.run(&["attach", &other, "--nbd", &sockets[1]]);
    assert_eq!(code, 6, "{text}");
    assert!(
        text.contains(&format!("same logical unit at {}", sockets[0])),
        "{text}"
    );
    assert!(!Path::new(&sockets[1]).exists());
    assert_eq!(attach(&sockets[1], &["--read-only"]).0, 0);
    assert_eq!(attach(&sockets[2], &["--shared"]).0, 0);
    assert_eq!(home.list().as_array().unwrap().len(), 3);
    for socket in &sockets {
        assert_eq!(home.run(&["detach", socket]).0, 0);
    }
}

#[test]
fn simultaneous_unit_attaches_exclude_each_other() {
    let target = ForeignTarget::start(Disk::default(), unscripted());
    let (home, url) = (Home::new("race"), target.url.to_string());
    // Two of them also use the same socket, which was left by a killed process.
    let stale = home.path("nbd");
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    let sockets = [stale.clone(), stale.clone(), home.path("a"), home.path("b")];
    let attach = |socket: &String| home.spawn(&["attach", &url, "--nbd", socket]);
    let processes: Vec<_> = sockets.iter().map(attach).collect();
    let ended = processes.into_iter().map(|p| p.wait_with_output().unwrap());
    let mut codes: Vec<_> = ended.map(|output| finished(output).0).collect();
    codes.sort_unstable();
    assert_eq!(codes, [0, 6, 6, 6]);
    let listed = home.list();
    let socket = listed[0]["export"]["socket"].as_str().unwrap();
    drop(Nbd::connect(Path::new(socket)));
    assert_eq!(home.run(&["detach", "0"]).0, 0);
}

#[test]
fn simultaneous_directory_attaches_exclude_each_other() {
    let home = Home::new("directory");
    let dir = home.path("mnt");
    fs::create_dir(&dir).unwrap();
    let attach = |_| home.spawn(&["attach", "mem:4M", "--fuse", &dir]);
    let processes: Vec<_> = (0..3).map(attach).collect();
    let ended = processes.into_iter().map(|p| p.wait_with_output().unwrap());
    let mut ended: Vec<_> = ended.map(finished).collect();
    ended.sort();
    if ended[0].0 == 1 {
        return skip("FUSE", "it cannot be mounted here");
    }
    let codes: Vec<_> = ended.iter().map(|(code, ..)| *code).collect();
    assert_eq!(codes, [0, 6, 6], "{ended:?}");
    assert_eq!(home.run(&["detach", &dir]).0, 0);
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(&dir), "{mounts}");
}

#[test]
fn detach_with_connected_clients_is_busy() {
    let home = Home::new("clients");
    let socket = home.path("nbd");
    assert_eq!(home.run(&["attach", "mem:1M", "--nbd", &socket]).0, 0);
    let client = Nbd::connect(Path::new(&socket));
    let (code, _, text) = home.run(&["detach", &socket]);
    assert_eq!(code, 6, "{text}");
    assert!(text.contains("a client connected"), "{text}");
    assert!(home.has_state("live"));
    drop(client);
    assert_eq!(home.run(&["detach", &socket]).0, 0);
    // With `--force`, the client is disconnected.
    assert_eq!(home.run(&["attach", "mem:1M", "--nbd", &socket]).0, 0);
    let _client = Nbd::connect(Path::new(&socket));
    let (code, _, text) = home.run(&["detach", &socket, "--force"]);
    assert_eq!(code, 0, "{text}");
}

/// A container that was started while the disk was attached has a copy of its mount.
#[test]
fn detach_names_mounts_in_other_namespaces() {
    let home = Home::new("namespaces");
    let dir = home.path("mnt");
    fs::create_dir(&dir).unwrap();
    if home.run(&["attach", "mem:4M", "--fuse", &dir]).0 != 0 {
        return skip("FUSE", "it cannot be mounted here");
    }
    let mut container = Command::new("unshare")
        .args(["-m", "--propagation", "private", "sleep", "1000"])
        .spawn()
        .unwrap();
    let other = format!("/proc/{}/mountinfo", container.id());
    let program = format!("/proc/{}/comm", container.id());
    eventually("the container runs", PATIENCE, || {
        fs::read_to_string(&program).is_ok_and(|name| name == "sleep\n")
    });
    if !fs::read_to_string(&other).is_ok_and(|mounts| mounts.contains(&dir)) {
        container.kill().unwrap();
        container.wait().unwrap();
        return skip("a mount namespace", "it cannot be made here");
    }
    for _ in 0..2 {
        let (code, _, text) = home.run(&["detach", "0", "--timeout", "1s"]);
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(code, 4, "{text}");
        let process = format!("process {} (sleep 1000)", container.id());
        assert!(text.contains(&process), "{text}");
        assert!(home.has_state("ending"));
    }
    container.kill().unwrap();
    container.wait().unwrap();
    eventually("the attachment ends", PATIENCE, || {
        home.list() == serde_json::json!([])
    });
}

#[test]
fn detach_names_processes_with_open_files() {
    let home = Home::new("open");
    let dir = home.path("mnt");
    fs::create_dir(&dir).unwrap();
    if home.run(&["attach", "mem:4M", "--fuse", &dir]).0 != 0 {
        return skip("FUSE", "it cannot be mounted here");
    }
    let file = File::open(Path::new(&dir).join("lun0")).unwrap();
    let (code, _, text) = home.run(&["detach", "0"]);
    assert_eq!(code, 6, "{text}");
    let pid = home.list()[0]["pid"].as_i64().unwrap() as i32;
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    eventually("it ends", PATIENCE, || home.has_state("ending"));
    let (code, _, text) = home.run(&["detach", "0", "--timeout", "1s"]);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(code, 4, "{text}");
    let user = format!("process {} (", std::process::id());
    assert!(
        text.contains(&user) && text.contains("has it open"),
        "{text}"
    );
    drop(file);
    eventually("the attachment ends", PATIENCE, || {
        home.list() == serde_json::json!([])
    });
}

/// Creates a 16 MiB disk image with an ext4 file system at an offset, and two directories; returns
/// `None` if `riser mount` cannot be used here.
fn image(home: &Home, offset: u64) -> Option<(String, [String; 2])> {
    let is_root = rustix::process::geteuid().is_root();
    let devices = ["/dev/fuse", "/dev/loop-control", "/usr/sbin/mkfs.ext4"];
    if !is_root || devices.iter().any(|path| !Path::new(path).exists()) {
        skip(
            "riser mount",
            "needs root, FUSE, loop devices and mkfs.ext4",
        );
        return None;
    }
    let image = home.path("disk.img");
    File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let mut mkfs = Command::new("/usr/sbin/mkfs.ext4");
    mkfs.args(["-q", "-E", &format!("offset={offset}"), &image, "8M"]);
    let made = mkfs.stderr(Stdio::null()).status().unwrap();
    assert!(made.success());
    let dirs = ["a", "b"].map(|name| home.path(name));
    for dir in &dirs {
        fs::create_dir(dir).unwrap();
    }
    Some((image, dirs))
}

#[test]
fn simultaneous_disk_mounts_exclude_each_other() {
    let home = Home::new("mounts");
    let Some((image, dirs)) = image(&home, 0) else {
        return;
    };
    let mount = |dir: &String| home.spawn(&["mount", &image, dir]);
    let processes: Vec<_> = dirs.iter().map(mount).collect();
    let ended = processes.into_iter().map(|p| p.wait_with_output().unwrap());
    let mut ended: Vec<_> = ended.map(finished).collect();
    ended.sort();
    if ended[0].2.contains("losetup") {
        return skip("riser mount", "no loop device can be had");
    }
    assert_eq!((ended[0].0, ended[1].0), (0, 6), "{ended:?}");
    // Mounting by a client of an NBD export must be prevented, too.
    let (code, _, text) = home.run(&["attach", &image, "--nbd", &home.path("nbd")]);
    assert_eq!(code, 6, "{text}");
    assert_eq!(home.run(&["detach", "0"]).0, 0);
    // The image cannot be mounted while such an export exists.
    let socket = home.path("nbd");
    assert_eq!(home.run(&["attach", &image, "--nbd", &socket]).0, 0);
    let (code, _, text) = home.run(&["mount", &image, &dirs[0], "--read-only"]);
    assert_eq!(code, 6, "{text}");
    assert_eq!(home.run(&["detach", &socket]).0, 0);
}

/// Simulates a process that is killed by the kernel's OOM killer while mount(8) runs.
#[test]
fn killed_mount_leaves_no_loop_device() {
    let home = Home::new("killed");
    let Some((image, [dir, _])) = image(&home, 0) else {
        return;
    };
    let (tools, state) = (home.path("tools"), home.path("state"));
    fs::create_dir(&tools).unwrap();
    let tool = format!("{tools}/mount");
    fs::write(&tool, "#!/bin/sh\nexec sleep 60\n").unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&tool, executable).unwrap();
    let path = format!("{tools}:{}", std::env::var("PATH").unwrap());
    let mut command = home.command(&["mount", &image, &dir, "--foreground"]);
    command.env("PATH", path).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let loops = || {
        let disks = fs::read_dir("/sys/class/block").unwrap().flatten();
        let file = |disk: fs::DirEntry| fs::read_to_string(disk.path().join("loop/backing_file"));
        let files = disks.filter_map(|disk| file(disk).ok());
        files.filter(|file| file.starts_with(&state)).count()
    };
    let until = Instant::now() + PATIENCE;
    while loops() == 0 {
        if child.try_wait().unwrap().is_some() || Instant::now() > until {
            let (_, _, text) = finished(child.wait_with_output().unwrap());
            assert!(text.contains("losetup"), "{text}");
            return skip("riser mount", "no loop device can be had");
        }
        thread::sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(loops(), 1);
    assert_eq!(home.list(), serde_json::json!([]));
    assert_eq!(loops(), 0);
    let left = fs::read_dir(&state).unwrap().flatten();
    let left = left.filter(|file| file.file_name().to_string_lossy().contains(".fuse"));
    assert_eq!(left.count(), 0);
}

/// The port is only kept for a process that takes over from a killed one.
#[test]
fn failed_mount_releases_its_initiator_port() {
    let home = Home::new("port");
    let Some((_, [dir, _])) = image(&home, 0) else {
        return;
    };
    let tools = home.path("tools");
    fs::create_dir(&tools).unwrap();
    let tool = format!("{tools}/losetup");
    fs::write(&tool, "#!/bin/sh\nexit 1\n").unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&tool, executable).unwrap();
    let target = ForeignTarget::start(Disk::default(), unscripted());
    let path = format!("{tools}:{}", std::env::var("PATH").unwrap());
    let mut command = home.command(&["mount", &target.url.to_string(), &dir]);
    let (code, _, text) = finished(command.env("PATH", path).output().unwrap());
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("losetup failed"), "{text}");
    let left = fs::read_dir(home.path("state")).unwrap().flatten();
    let left: Vec<_> = left.map(|file| file.file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// The target may still execute a write that was outstanding at the end. The next attachment at the
/// path logs in with the same initiator port, which terminates the write before newer writes are
/// sent.
#[test]
fn outstanding_write_keeps_initiator_port() {
    for is_lost in [false, true] {
        let script = move |cdb: &[u8], _: &[u8]| {
            (cdb[0] == 0x8a && is_lost).then(|| Reply {
                disconnect: true,
                is_last: true,
                ..Reply::default()
            })
        };
        let target = ForeignTarget::start(Disk::default(), Box::new(script));
        let (home, url) = (Home::new("outstanding"), target.url.to_string());
        let socket = home.path("nbd");
        let attach = ["attach", &url, "--nbd", &socket, "--foreground"];
        let mut process = home.spawn(&[&attach[..], &["--io-timeout", "2s"]].concat());
        eventually("the disk is attached", PATIENCE, || home.has_state("live"));
        let error = Nbd::connect(Path::new(&socket)).execute(Nbd::WRITE, 0, 0, &[1; 4096]);
        assert_eq!(error != 0, is_lost);
        terminate(&process);
        assert_eq!(process.wait().unwrap().code(), Some(i32::from(is_lost)));
        let state = fs::read_dir(home.path("state")).unwrap().flatten();
        let is_port = |name: &str| name.ends_with(".port");
        let ports = state.filter(|file| file.file_name().to_str().is_some_and(is_port));
        assert_eq!(ports.count(), usize::from(is_lost));
    }
}

#[test]
fn partitions_are_mounted_by_number() {
    let home = Home::new("partitions");
    let Some((path, [dir, _])) = image(&home, 1 << 20) else {
        return;
    };
    // An MBR with a single partition at 1 MiB.
    let mut table = [0; 512];
    (table[0x1c2], table[510], table[511]) = (0x83, 0x55, 0xaa);
    table[0x1c6..0x1ca].copy_from_slice(&2048_u32.to_le_bytes());
    table[0x1ca..0x1ce].copy_from_slice(&16384_u32.to_le_bytes());
    let disk = File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&disk, &table, 0).unwrap();
    let (code, _, text) = home.run(&["mount", &path, &dir]);
    if text.contains("losetup") {
        return skip("riser mount", "no loop device can be had");
    }
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("a partition table (MBR)"), "{text}");
    assert!(text.contains("--partition N"), "{text}");
    let (code, _, text) = home.run(&["mount", &path, &dir, "--partition", "2"]);
    assert_eq!(code, 5, "{text}");
    let (code, _, text) = home.run(&["mount", &path, &dir, "--partition", "1"]);
    assert_eq!(code, 0, "{text}");
    fs::write(format!("{dir}/file"), "data").unwrap();
    assert_eq!(home.run(&["detach", &dir]).0, 0);
    assert_eq!(home.run(&["mount", &path, &dir, "--partition", "1"]).0, 0);
    assert_eq!(fs::read(format!("{dir}/file")).unwrap(), b"data");
    assert_eq!(home.run(&["detach", &dir]).0, 0);
}

#[test]
fn mount_of_blank_disk_suggests_mkfs() {
    let home = Home::new("blank");
    let Some((path, [dir, _])) = image(&home, 0) else {
        return;
    };
    let disk = File::create(&path).unwrap();
    disk.set_len(16 << 20).unwrap();
    let (code, _, text) = home.run(&["mount", &path, &dir]);
    if text.contains("losetup") {
        return skip("riser mount", "no loop device can be had");
    }
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("no file system found"), "{text}");
    assert!(text.contains("mkfs.ext4 DIR/disk.img"), "{text}");
    assert_eq!(home.list(), serde_json::json!([]));
}

/// Creates a portal with this list of targets.
fn portal(targets: Vec<u8>) -> (ForeignTarget, String) {
    let disk = Disk {
        targets,
        ..Disk::default()
    };
    let target = ForeignTarget::start(disk, unscripted());
    let url = format!("iscsi://{}/", target.portal);
    (target, url)
}

#[test]
fn discovery_lists_thousands_of_targets() {
    const TARGETS: usize = 3000;
    let name = |n: usize| format!("iqn.2003-01.org.linux-iscsi.storage-array-7.x8664:sn.{n:012x}");
    let list =
        (0..TARGETS).map(|n| format!("TargetName={}\0TargetAddress=192.0.2.30:3260,1\0", name(n)));
    let (_target, url) = portal(list.collect::<String>().into_bytes());
    let home = Home::new("targets");
    let (code, out, text) = home.run(&["discover", &url, "--targets-only", "-o", "json"]);
    assert_eq!(code, 0, "{text}");
    let found: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(found.as_array().unwrap().len(), TARGETS);
    let last = &found[TARGETS - 1];
    assert_eq!(last["name"], name(TARGETS - 1));
    assert_eq!(last["portals"][0], "192.0.2.30:3260,1");
}

#[test]
fn invalid_target_list_is_reported() {
    let list = b"TargetName=iqn.2026-01.com.example:a\0TargetName=iqn.2026-01.com.example:\x1b\0";
    let (_target, url) = portal(list.to_vec());
    let home = Home::new("invalid");
    let (code, _, text) = home.run(&["discover", &url]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("invalid list of targets"), "{text}");
    assert!(text.contains("control characters"), "{text}");
}

#[test]
fn unusable_unit_hides_no_other_from_discovery() {
    let mut capacities = 0;
    let script = move |cdb: &[u8], _: &[u8]| match cdb[0] {
        0xa0 => {
            let units = [[0; 8], [0, 1, 0, 0, 0, 0, 0, 0]];
            Some(good(
                [&[0, 0, 0, 16, 0, 0, 0, 0][..], &units.concat()].concat(),
            ))
        }
        // The first unit needs an administrator.
        0x9e => {
            capacities += 1;
            (capacities == 1).then(|| check_condition(0x70, 2, 0x04, 0x03))
        }
        _ => None,
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    let home = Home::new("units");
    let url = target.url.to_string();
    let (code, out, text) = home.run(&["discover", &url, "-o", "json"]);
    assert_eq!(code, 0, "{text}");
    let found: Value = serde_json::from_str(&out).unwrap();
    let units = found[0]["luns"].as_array().unwrap();
    assert_eq!(units.len(), 2);
    let error = units[0]["error"].as_str().unwrap();
    assert!(error.contains("NOT READY"), "{error}");
    assert_eq!(units[0]["capacity"], Value::Null);
    assert_eq!(units[1]["error"], Value::Null);
    assert_eq!(units[1]["capacity"], 8_u64 << 30);
}
