//! `riser` from a user's perspective: results, messages and exit statuses, with disks in memory.

#![allow(missing_docs, reason = "a test")]

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use riser_testkit::eventually;
use riser_testkit::skip::skip;

/// A directory for a test, with a separate list of attachments.
struct Home(PathBuf);

impl Home {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let dir = std::env::temp_dir().join(format!(
            "riser-cli-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        ));
        std::fs::create_dir(&dir).unwrap();
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
            .env_remove("RISER_INJECT")
            .env("COLUMNS", "100")
            .stdin(Stdio::null());
        command
    }

    fn riser(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Expects success; returns the standard output.
    fn ok(&self, args: &[&str]) -> String {
        let output = self.riser(args);
        assert!(
            output.status.success(),
            "{args:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    }

    /// Expects a failure; returns the exit status and standard error.
    fn fails(&self, args: &[&str]) -> (i32, String) {
        let output = self.riser(args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.stdout, b"", "{args:?}");
        (output.status.code().unwrap(), text)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let listed = self.riser(&["list", "-o", "json"]);
        assert_eq!(listed.stdout, b"[]\n", "something is still attached");
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn help_lists_verbs_and_exit_statuses() {
    let home = Home::new();
    let help = home.ok(&["--help"]);
    for want in [
        "discover",
        "list",
        "attach",
        "detach",
        "mount",
        "inquiry",
        "read",
        "write",
        "bench",
        "run",
        "completions",
        "man",
        "--timeout",
        "--output",
        "Exit status:",
        "3  the target could not",
        "7  the data read differs",
        "srp://HOST",
        "mem:SIZE",
    ] {
        assert!(help.contains(want), "no {want} in\n{help}");
    }
    assert!(home.ok(&["attach", "--help"]).contains("--inject"));
    assert!(!home.ok(&["attach", "--help"]).contains("supervised"));
    assert!(home.ok(&["--version"]).starts_with("riser "));
}

#[test]
fn failures_have_status_and_message() {
    let home = Home::new();
    let gone = home.path("gone");
    let cases: &[(&[&str], i32, &str)] = &[
        (&[], 2, "Usage: riser"),
        (&["frobnicate"], 2, "unrecognized subcommand 'frobnicate'"),
        (
            &["attach", "mem:1M"],
            2,
            "<--fuse <PATH>|--nbd <SOCKET>|--ublk[=<N>]>",
        ),
        (
            &["attach", "mem:1M", "--fuse", "a", "--nbd", "b"],
            2,
            "cannot be used with",
        ),
        (
            &["attach", "mem:1000", "--nbd", "b"],
            2,
            "not a multiple of the block size",
        ),
        (
            &["attach", "http://x/", "--nbd", "b"],
            2,
            "must start with `srp://`",
        ),
        (&["read", "mem:1M", "--inject", "loss=200"], 2, "percentage"),
        (
            &["read", "mem:1M", "--timeout", "soon"],
            2,
            "`soon` is not a duration",
        ),
        (
            &["read", "mem:1M", "--offset", "2M"],
            2,
            "byte 2097152 is beyond the end of the disk",
        ),
        (
            &["read", "mem:1M", "--length", "2M"],
            2,
            "beyond the end of the disk",
        ),
        (&["inquiry", "mem:1M"], 2, "not the address of a target"),
        (
            &["bench", "mem:1M", "--bs", "1000"],
            2,
            "not a multiple of the device's 512",
        ),
        (
            &["bench", "mem:1M", "--depth", "0"],
            2,
            "must be from 1 to 4096",
        ),
        (&["detach", "7"], 5, "no attachment `7`"),
        (&["write", "mem:1M", &gone], 5, "gone"),
        (&["attach", "mem:1M", "--fuse", &gone], 5, "gone"),
        (
            &["attach", "mem:1M", "--foreground", "--fuse", &gone],
            5,
            "gone",
        ),
        // There is no listener on this port of the software NIC's network.
        (
            &["read", "srp://127.0.0.1:1/0", "--timeout", "300ms"],
            4,
            "cannot log in to srp://127.0.0.1:1/0",
        ),
    ];
    for (args, status, want) in cases {
        let (got, text) = home.fails(args);
        assert_eq!(got, *status, "{args:?}: {text}");
        assert!(text.contains(want), "{args:?}: no {want:?} in {text}");
    }
}

#[test]
fn error_format_is_stable() {
    let home = Home::new();
    let (_, text) = home.fails(&["detach", "7"]);
    assert_eq!(
        text,
        "  × no attachment `7`\n  help: use `riser list` to list attachments\n"
    );
    let (status, text) = home.fails(&["-o", "json", "detach", "7"]);
    assert_eq!(status, 5);
    assert_eq!(
        text,
        r#"{
  "error": {
    "message": "no attachment `7`",
    "causes": [],
    "help": "use `riser list` to list attachments",
    "exit_status": 5
  }
}
"#
    );
}

#[test]
fn ranges_are_read_and_written() {
    let home = Home::new();
    assert_eq!(
        home.riser(&["read", "mem:1M", "--offset", "1000", "--length", "7"])
            .stdout,
        [0; 7]
    );
    let file = home.path("out");
    let text = home.ok(&["read", "mem:3M", &file, "-o", "json"]);
    assert!(text.contains("\"bytes\": 3145728"), "{text}");
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 3 << 20);
    let text = home.ok(&["write", "mem:4M", &file, "--offset", "12345", "-o", "json"]);
    assert!(text.contains("\"bytes\": 3145728"), "{text}");
    // Too much data: known in advance, and detected while writing.
    let (status, text) = home.fails(&["write", "mem:2M", &file]);
    assert_eq!(status, 2, "{text}");
    let mut child = home
        .command(&["write", "mem:64K"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The program may stop reading early.
    let _ = child.stdin.take().unwrap().write_all(&[1; 70_000]);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("the disk is too small"));
}

#[test]
fn nbd_attachment_lives_until_detached() {
    let home = Home::new();
    let socket = home.path("nbd");
    let text = home.ok(&["attach", "mem:1M,4096", "--nbd", &socket, "--read-only"]);
    assert_eq!(
        text,
        format!(
            "0: mem:1048576,4096 is available at nbd+unix:///lun0?socket={socket} (1.00 MiB)\n"
        )
    );
    let list: serde_json::Value = serde_json::from_str(&home.ok(&["list", "-o", "json"])).unwrap();
    assert_eq!(list[0]["export"]["kind"], "nbd");
    assert_eq!(list[0]["read_only"], true);
    assert_eq!(list[0]["block_size"], 4096);
    assert!(Path::new(list[0]["log"].as_str().unwrap()).exists());
    // The same socket again, then another one.
    let (status, text) = home.fails(&["attach", "mem:1M", "--nbd", &socket]);
    assert_eq!(status, 6, "{text}");
    let other = home.path("other");
    assert!(
        home.ok(&["attach", "mem:1M", "--nbd", &other])
            .starts_with("1: ")
    );
    assert!(home.ok(&["detach", "0"]).contains("is detached from"));
    assert!(!Path::new(&socket).exists());
    home.ok(&["detach", &other]);
    // All files are removed.
    let left: Vec<_> = std::fs::read_dir(home.0.join("state"))
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left, [""; 0]);
}

#[test]
fn files_and_nbd_exports_are_disks() {
    let home = Home::new();
    let (image, socket) = (home.path("disk.img"), home.path("nbd"));
    let disk = std::fs::File::create(&image).unwrap();
    disk.set_len(4 << 20).unwrap();
    let pattern: Vec<u8> = (0..100_000_u32).map(|n| (n % 251) as u8).collect();
    std::fs::write(home.0.join("in"), &pattern).unwrap();
    let file = format!("file:{image}");
    home.ok(&["write", &file, &home.path("in"), "--offset", "1000"]);
    assert_eq!(std::fs::read(&image).unwrap()[1000..101_000], pattern);

    // While attached as an export, it must be accessed with the export's address.
    home.ok(&["attach", &image, "--nbd", &socket]);
    let uri = format!("nbd+unix:///disk.img?socket={socket}");
    home.ok(&[
        "read",
        &uri,
        &home.path("out"),
        "--offset",
        "1000",
        "--length",
        "100000",
    ]);
    assert_eq!(std::fs::read(home.0.join("out")).unwrap(), pattern);
    home.ok(&["write", &uri, &home.path("in"), "--offset", "2M"]);
    assert_eq!(
        std::fs::read(&image).unwrap()[2 << 20..(2 << 20) + 100_000],
        pattern
    );
    for address in [&uri, &image] {
        let json = home.ok(&[
            "bench",
            address,
            "--rw",
            "randrw",
            "--total",
            "1M",
            "--warm-up",
            "0",
            "--verify",
            "-o",
            "json",
            "--overwrite",
        ]);
        let report: serde_json::Value = serde_json::from_str(&json).unwrap();
        let ios = |way: &str| report["jobs"][0][way]["total_ios"].as_u64().unwrap();
        assert_eq!(ios("read") + ios("write"), 256);
    }
    // Another path leads to the same file.
    let same = home.path("same");
    std::fs::hard_link(&image, &same).unwrap();
    for path in [&image, &same] {
        let (exit, text) = home.fails(&["write", path, &home.path("in")]);
        assert_eq!(exit, 6);
        assert!(text.contains("has it attached"), "{text}");
    }
    home.ok(&["detach", &socket]);

    // The content of a disk is not overwritten by mistake.
    let mut head = vec![0; 65536];
    head[..4].copy_from_slice(b"XFSB");
    std::fs::write(home.0.join("head"), head).unwrap();
    home.ok(&["write", &image, &home.path("head"), "--overwrite"]);
    let (exit, text) = home.fails(&["write", &image, &home.path("in")]);
    assert_eq!(exit, 6);
    assert!(text.contains("XFS"), "{text}");
}

#[test]
fn unsuitable_disks_and_options_are_rejected() {
    let home = Home::new();
    let image = home.path("disk.img");
    std::fs::write(&image, [0; 1000]).unwrap();
    let gone = format!("nbd+unix:///disk?socket={}", home.path("gone"));
    for (args, exit, words) in [
        (
            &["inquiry", &image] as &[&str],
            2,
            "not the address of a target",
        ),
        (
            &["discover", "nbd://127.0.0.1/disk"],
            2,
            "not the address of a target",
        ),
        (&["read", &image], 2, "not a multiple of the block size"),
        (&["read", "/dev/null"], 2, "a character device"),
        (&["read", "/does/not/exist"], 5, "No such file"),
        (&["read", &gone], 3, "cannot connect"),
        (
            &["read", &gone, "--channels", "2"],
            2,
            "--channels only applies",
        ),
        (
            &["read", &image, "--inject", "loss=1"],
            2,
            "--inject only applies",
        ),
    ] {
        let (status, text) = home.fails(args);
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(words), "{args:?}: {text}");
        assert_eq!(status, exit, "{args:?}: {text}");
    }
}

#[test]
fn bench_wire_reports_measurements() {
    let home = Home::new();
    let args = ["bench", "wire", "--runtime", "200ms", "--warm-up", "5ms"];
    let table = home.ok(&args);
    assert!(table.contains("round trip"), "{table}");
    let json = home.ok(&[&args[..], &["-o", "json"]].concat());
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(report["cases"][0]["operations"].as_u64().unwrap() > 0);
    let (exit, text) = home.fails(&["bench", "wire", "--to", "127.0.0.1", "--addr", "127.0.0.1"]);
    assert_eq!(exit, 2);
    assert!(text.contains("is the local address"), "{text}");
}

/// The test holds the lock of the attachment list.
#[test]
fn lock_wait_is_reported_and_bounded() {
    let home = Home::new();
    home.ok(&["list"]);
    let dir = home.path("state");
    let lock = std::fs::File::open(&dir).unwrap();
    lock.lock().unwrap();
    let socket = home.path("nbd");
    let verbs: [&[&str]; 3] = [
        &["list"],
        &["detach", "0"],
        &["attach", "mem:1M", "--nbd", &socket],
    ];
    for verb in verbs {
        let mut command = home.command(verb);
        command.args(["--timeout", "1500ms"]).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        eventually(&format!("{verb:?} ends"), Duration::from_secs(60), || {
            child.try_wait().unwrap().is_some()
        });
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{verb:?}: {text}");
        let wanted = format!("waiting for the lock of {dir}, held by ");
        assert!(text.contains(&wanted), "{verb:?}: {text}");
        if Path::new("/proc/locks").exists() {
            let holder = format!("process {} (", std::process::id());
            assert!(text.contains(&holder), "{verb:?}: {text}");
        }
    }
    drop(lock);
    home.ok(&["attach", "mem:1M", "--nbd", &socket]);
    home.ok(&["detach", "0"]);
}

#[test]
fn killed_process_is_cleaned_up() {
    let home = Home::new();
    let socket = home.path("nbd");
    home.ok(&["attach", "mem:1M", "--nbd", &socket]);
    let pid = pid(&home);
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    eventually(
        "the killed process has gone",
        Duration::from_secs(30),
        || !is_alive(pid),
    );
    assert_eq!(home.ok(&["list"]), "no attachments\n");
    assert!(!Path::new(&socket).exists());
    home.ok(&["attach", "mem:1M", "--nbd", &socket]);
    home.ok(&["detach", &socket]);
}

#[test]
fn fuse_attachment_is_file_until_unmount() {
    let home = Home::new();
    if !Path::new("/dev/fuse").exists() {
        return skip("FUSE", "there is no /dev/fuse");
    }
    let dir = home.path("mount");
    std::fs::create_dir(&dir).unwrap();
    let output = home.riser(&["attach", "mem:4M", "--fuse", &dir]);
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains("cannot mount FUSE"), "{text}");
        return skip("FUSE", &format!("it cannot be mounted here: {text}"));
    }
    let file = Path::new(&dir).join("lun0");
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 4 << 20);
    // A detach fails while the file is in use.
    let open = std::fs::File::open(&file).unwrap();
    let (status, text) = home.fails(&["detach", &dir]);
    assert_eq!((status, text.contains("is busy")), (6, true), "{text}");
    drop(open);
    home.ok(&["detach", &dir]);
    assert!(!file.exists());
    // With `--force`, it is removed even while in use.
    home.ok(&["attach", "mem:4M", "--fuse", &dir]);
    let open = std::fs::File::open(&file).unwrap();
    home.ok(&["detach", "0", "--force", "--timeout", "20s"]);
    drop(open);
    // In the foreground, terminated by an external unmount.
    let child = home
        .command(&["attach", "mem:4M", "--fuse", &dir, "--foreground"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("the file is there", Duration::from_secs(60), || {
        file.exists()
    });
    riser_exports::fuse::unmount(Path::new(&dir), true).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
}

#[test]
fn open_file_is_served_after_signal() {
    use std::os::unix::fs::FileExt;

    let home = Home::new();
    let dir = home.path("mount");
    std::fs::create_dir(&dir).unwrap();
    let output = home.riser(&["attach", "mem:4M", "--fuse", &dir]);
    if !output.status.success() {
        return skip("FUSE", "it cannot be mounted here");
    }
    let file = Path::new(&dir).join("lun0");
    let open = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&file)
        .unwrap();
    let pid = pid(&home);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    // New users cannot open it.
    eventually("the file is hidden", Duration::from_secs(60), || {
        !file.exists()
    });
    // Data of the remaining user may be written after any fixed timeout.
    std::thread::sleep(Duration::from_secs(6));
    open.write_all_at(b"late", 0).unwrap();
    drop(open);
    eventually("the process ends", Duration::from_secs(60), || {
        !is_alive(pid)
    });
}

#[test]
fn detach_keeps_foreign_mount_at_path() {
    use riser_block::{ByteDevice, MemoryDevice};
    use riser_exports::fuse::{Caching, FuseMount, FuseOptions, unmount};

    let home = Home::new();
    let dir = home.path("mount");
    std::fs::create_dir(&dir).unwrap();
    let output = home.riser(&["attach", "mem:4M", "--fuse", &dir]);
    if !output.status.success() {
        return skip("FUSE", "it cannot be mounted here");
    }
    let open = std::fs::File::open(Path::new(&dir).join("lun0")).unwrap();
    let pid = pid(&home);
    unmount(Path::new(&dir), true).unwrap();
    let disk = Arc::new(ByteDevice::new(Arc::new(
        MemoryDevice::new(1 << 20, 512).unwrap(),
    )));
    let options = FuseOptions {
        path: (&dir).into(),
        name: "other".into(),
        source: "other".into(),
        caching: Caching::Direct,
        allow_other: false,
    };
    let other = FuseMount::new(disk, options, || {}).unwrap();
    // The file is still open, so it is still served.
    let (status, text) = home.fails(&["detach", "0", "--timeout", "1s"]);
    assert!(text.contains("still serves"), "{status}: {text}");
    assert!(other.file().exists(), "the other mount was removed");
    drop(open);
    eventually("the process ends", Duration::from_secs(60), || {
        !is_alive(pid)
    });
    assert!(other.file().exists(), "the other mount was removed");
    other.detach().unwrap();
    other.wait().unwrap();
}

#[test]
fn serving_process_avoids_own_disk() {
    let home = Home::new();
    let socket = home.path("nbd");
    home.ok(&["attach", "mem:1M", "--nbd", &socket]);
    let proc = format!("/proc/{}", pid(&home).as_raw_nonzero());
    let has = |sets: rustix::thread::CapabilitySets, one| sets.effective.contains(one);
    let ours = rustix::thread::capabilities(None).unwrap();
    if has(ours, rustix::thread::CapabilitySet::SYS_RESOURCE) {
        for task in std::fs::read_dir(format!("{proc}/task")).unwrap() {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            let flags = stat[stat.rfind(')').unwrap()..].split(' ').nth(7).unwrap();
            // PF_MEMALLOC_NOIO: memory reclaim on this thread must not start I/O.
            let flags: u32 = flags.parse().unwrap();
            assert_ne!(flags & 0x0008_0000, 0, "{stat}");
        }
    } else {
        skip("a thread that is an I/O flusher", "no right to make one");
    }
    if has(ours, rustix::thread::CapabilitySet::IPC_LOCK) {
        let status = std::fs::read_to_string(format!("{proc}/status")).unwrap();
        let locked = status
            .lines()
            .find(|line| line.starts_with("VmLck:"))
            .unwrap();
        assert!(!locked.contains(" 0 kB"), "{locked}");
    } else {
        skip("locked memory", "no right to lock any");
    }
    home.ok(&["detach", &socket]);
}

/// Returns the process that serves the only attachment.
fn pid(home: &Home) -> rustix::process::Pid {
    let list: serde_json::Value = serde_json::from_str(&home.ok(&["list", "-o", "json"])).unwrap();
    let pid = list[0]["pid"].as_i64().unwrap() as i32;
    rustix::process::Pid::from_raw(pid).unwrap()
}

/// Returns whether a process exists; a zombie does not count.
fn is_alive(pid: rustix::process::Pid) -> bool {
    riser::cli::state::process_start(pid.as_raw_nonzero().get() as u32).is_some()
}

#[test]
fn benchmark_report_is_complete() {
    let home = Home::new();
    let text = home.ok(&[
        "bench",
        "mem:8M",
        "--rw",
        "randrw",
        "--mix",
        "70",
        "--total",
        "4M",
        "--warm-up",
        "0",
        "--verify",
        "-o",
        "json",
    ]);
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let job = &report["jobs"][0];
    let ios = |direction: &str| job[direction]["total_ios"].as_u64().unwrap();
    assert_eq!(ios("read") + ios("write"), 1024);
    assert_eq!(job["job options"]["rwmixread"], "70");
    let percentiles = &job["read"]["clat_ns"]["percentile"];
    assert!(percentiles["99.900000"].as_u64().unwrap() > 0);
    let text = home.ok(&["bench", "mem:8M", "--total", "1M", "--warm-up", "0"]);
    for want in ["mem:8388608", "randread", "IOPS", "99.9"] {
        assert!(text.contains(want), "no {want} in\n{text}");
    }
}

#[test]
fn runs_use_different_operations() {
    let home = Home::new();
    let image = home.path("disk.img");
    let disk = std::fs::File::create(&image).unwrap();
    disk.set_len(64 << 20).unwrap();
    let jobs = home.path("jobs.fio");
    let section = "rw=randwrite\nbs=4k\nnumber_ios=16\n";
    let text = format!("[a]\n{section}[b]\nstonewall\n{section}");
    std::fs::write(&jobs, text).unwrap();
    home.ok(&["bench", &jobs, &image]);
    let content = std::fs::read(&image).unwrap();
    let blocks = content.chunks(4096);
    let written = blocks.filter(|block| block.iter().any(|byte| *byte != 0));
    assert!(written.count() > 24);
}

#[test]
fn results_go_to_files_and_are_compared() {
    let home = Home::new();
    let [page, csv, log] = ["page.html", "series.csv", "log.hlog"].map(|name| home.path(name));
    let run = [
        "bench",
        "mem:8M",
        "--number-ios=64",
        "--warm-up=0",
        "--rounds=4",
    ];
    let files = [
        "--report",
        &page,
        "--csv",
        &csv,
        "--hdr-log",
        &log,
        "--bins",
    ];
    let json = home.ok(&[&run[..], &files, &["-o", "json"]].concat());
    std::fs::write(home.path("a.json"), &json).unwrap();
    std::fs::write(
        home.path("b.json"),
        home.ok(&[&run[..], &["-o", "json"]].concat()),
    )
    .unwrap();
    assert!(json.contains("\"bins\""), "{json}");
    let read = |path: &str| std::fs::read_to_string(path).unwrap();
    assert!(read(&page).contains("</html>") && read(&csv).lines().count() > 4);
    assert!(read(&log).starts_with("#["), "{}", read(&log));
    let (a, b) = (home.path("a.json"), home.path("b.json"));
    let text = home.ok(&["bench", "compare", &a, &b]);
    assert!(text.contains("rounds: 4 of A, 4 of B"), "{text}");
    let (code, errors) = home.fails(&["bench", "mem:8M", "--csv", "/nonexistent/f"]);
    assert_eq!(code, 5, "{errors}");
    assert!(errors.contains("cannot write /nonexistent/f"), "{errors}");
}

/// Creates a file disk of `size` bytes, all zeroes.
fn zeroed(home: &Home, size: u64) -> String {
    let image = home.path("disk.img");
    std::fs::File::create(&image)
        .unwrap()
        .set_len(size)
        .unwrap();
    image
}

fn is_zeroed(image: &str) -> bool {
    std::fs::read(image).unwrap().iter().all(|byte| *byte == 0)
}

#[test]
fn results_never_overwrite_disk_or_inputs() {
    let home = Home::new();
    let image = zeroed(&home, 1 << 20);
    let (file, state) = (home.path("jobs.fio"), home.path("state.bench"));
    std::fs::write(&file, "[a]\nnumber_ios=1\n").unwrap();
    let cases: [&[&str]; 4] = [
        &["bench", &image, "--csv", &image],
        &["bench", &file, &image, "--report", &file],
        &[
            "bench",
            &image,
            "--rw=write",
            "--csv",
            &state,
            "--state",
            &state,
        ],
        &["bench", &image, "--csv", &state, "--report", &state],
    ];
    for args in cases {
        let (code, errors) = home.fails(args);
        assert_eq!(code, 2, "{args:?}: {errors}");
        assert!(errors.contains("would replace"), "{args:?}: {errors}");
    }
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 1 << 20);
    assert!(is_zeroed(&image));
    assert_eq!(
        std::fs::read_to_string(&file).unwrap(),
        "[a]\nnumber_ios=1\n"
    );
}

#[test]
fn impossible_runs_are_rejected_before_start() {
    let home = Home::new();
    let image = zeroed(&home, 16 << 20);
    let run = [
        "bench",
        &image,
        "--rw=write",
        "--number-ios=4",
        "--warm-up=0",
    ];
    let (code, errors) = home.fails(&[&run[..], &["--sweep", "bs=4k,8M"]].concat());
    assert_eq!(code, 2);
    assert!(
        errors.contains("exceeds the limit of one transfer"),
        "{errors}"
    );
    assert!(is_zeroed(&image), "the first run has written");
    let file = home.path("jobs.fio");
    std::fs::write(&file, "[a]\nrw=write\nsize=1m\n[b]\nstonewall\nbs=1000\n").unwrap();
    let (code, errors) = home.fails(&["bench", &file, &image]);
    assert_eq!(code, 2);
    assert!(errors.contains("job `b`: "), "{errors}");
    assert!(is_zeroed(&image), "the first job has run");
}

#[test]
fn failed_run_keeps_earlier_results() {
    let home = Home::new();
    let image = zeroed(&home, 1 << 20);
    let (file, csv) = (home.path("jobs.fio"), home.path("series.csv"));
    // The blocks have no headers, so the second job finds a wrong one.
    let jobs = "[a]\nnumber_ios=4\n[b]\nstonewall\nverify=crc32c\n[c]\nstonewall\n";
    std::fs::write(&file, jobs).unwrap();
    let output = home.riser(&["bench", &file, &image, "-o", "json", "--csv", &csv]);
    assert_eq!(output.status.code(), Some(7), "wrong data");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let jobs = report["jobs"].as_array().unwrap();
    assert_eq!(jobs.len(), 1);
    assert_eq!(
        (&jobs[0]["jobname"], &jobs[0]["read"]["total_ios"]),
        (&"a".into(), &4.into())
    );
    assert!(std::fs::read_to_string(&csv).unwrap().lines().count() > 1);
    let errors: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
    assert!(
        errors["error"]["causes"][0]
            .as_str()
            .unwrap()
            .contains("no verification header")
    );
}

#[test]
fn unwritable_file_keeps_other_results() {
    let home = Home::new();
    if !Path::new("/dev/full").exists() {
        return skip("a full disk", "there is no /dev/full");
    }
    let log = home.path("log.hlog");
    let run = [
        "bench",
        "mem:8M",
        "--number-ios=64",
        "--warm-up=0",
        "-o",
        "json",
    ];
    let output = home.riser(&[&run[..], &["--csv", "/dev/full", "--hdr-log", &log]].concat());
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("cannot write /dev/full"), "{errors}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["jobs"][0]["read"]["total_ios"], 64);
    assert!(std::fs::read_to_string(&log).unwrap().starts_with("#["));
}

#[test]
fn memory_has_buffers_for_many_large_operations() {
    let home = Home::new();
    let run = [
        "bench",
        "mem:256M",
        "--bs=1M",
        "--depth=128",
        "--number-ios=128",
    ];
    let text = home.ok(&[&run[..], &["--warm-up=0", "-o", "json"]].concat());
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["jobs"][0]["read"]["total_ios"], 128);
}

#[test]
fn sweeps_run_every_combination_in_every_round() {
    let home = Home::new();
    let text = home.ok(&[
        "bench",
        "mem:8M",
        "--number-ios",
        "20",
        "--warm-up",
        "0",
        "-o",
        "json",
        "--rounds",
        "2",
        "--sweep",
        "bs=4k,8k",
        "depth=1..4",
    ]);
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let jobs = report["jobs"].as_array().unwrap();
    let runs: Vec<_> = jobs
        .iter()
        .map(|job| ["bs", "iodepth"].map(|name| job["job options"][name].as_str().unwrap()))
        .collect();
    let round = [
        ["4k", "1"],
        ["4k", "2"],
        ["4k", "4"],
        ["8k", "1"],
        ["8k", "2"],
        ["8k", "4"],
    ];
    assert_eq!(runs, [round, round].concat());
    assert!(jobs.iter().all(|job| job["read"]["total_ios"] == 20));
}

#[test]
fn fio_job_files_run() {
    let home = Home::new();
    let file = home.path("jobs.fio");
    let text = "[global]\nioengine=libaio\nsize=1m\nbs=${BS}\n[one]\nrw=write\nverify=crc32c\n\
                [two]\nstonewall\nrw=randread\nverify=crc32c\niodepth=4\n";
    std::fs::write(&file, text).unwrap();
    let output = home
        .command(&["bench", &file, "mem:4M", "-o", "json"])
        .env("BS", "64k")
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let [one, two] = report["jobs"].as_array().unwrap().as_slice() else {
        panic!("{report}");
    };
    assert_eq!(
        (&one["jobname"], &one["write"]["total_ios"]),
        (&"one".into(), &16.into())
    );
    // The second job reads the data written by the first.
    assert_eq!(
        (&two["riser"]["verified_blocks"], &two["job options"]["bs"]),
        (&16.into(), &"64k".into())
    );
    std::fs::write(&file, "[one]\nrw=read\nlatency_target=5\n").unwrap();
    let (code, errors) = home.fails(&["bench", &file, "mem:4M"]);
    assert_eq!(code, 2);
    assert!(
        errors.contains("jobs.fio:3: option `latency_target` is not supported"),
        "{errors}"
    );
    let (code, errors) = home.fails(&["bench", &file, "mem:4M", "--bs", "4k"]);
    assert_eq!(code, 2);
    assert!(errors.contains("in the job file"), "{errors}");
}

#[test]
fn completions_and_manuals_are_generated() {
    let home = Home::new();
    assert!(
        home.ok(&["completions", "bash"])
            .contains("complete -F _riser")
    );
    assert!(
        home.ok(&["completions", "zsh"])
            .starts_with("#compdef riser")
    );
    assert!(home.ok(&["man"]).contains(".TH riser 1"));
    let dir = home.path("man");
    std::fs::create_dir(&dir).unwrap();
    home.ok(&["man", "--dir", &dir]);
    for page in [
        "riser.1",
        "riser-attach.1",
        "riser-bench.1",
        "riser-target.1",
    ] {
        assert!(Path::new(&dir).join(page).exists(), "no {page}");
    }
}

#[test]
fn target_verb_executes_riserd() {
    let home = Home::new();
    let riser = home.path("riser");
    let own = env!("CARGO_BIN_EXE_riser");
    if std::fs::hard_link(own, &riser).is_err() {
        std::fs::copy(own, &riser).unwrap();
    }
    let run = |args: &[&str]| {
        let mut command = Command::new(&riser);
        command.arg("target").args(args).env("PATH", "/nonexistent");
        command.output().unwrap()
    };
    let missing = run(&["ls"]);
    assert_eq!(missing.status.code(), Some(5), "{missing:?}");
    let said = String::from_utf8(missing.stderr).unwrap();
    assert!(said.contains("cannot find riserd"), "{said}");
    // A file in the same directory is called with unchanged arguments, and its exit status is
    // returned.
    let riserd = home.path("riserd");
    std::fs::write(&riserd, "#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 3\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&riserd, mode).unwrap();
    let done = run(&["set", "/limits", "max_sessions=9", "-o", "json", "--help"]);
    assert_eq!(done.status.code(), Some(3), "{done:?}");
    let said = String::from_utf8(done.stdout).unwrap();
    assert_eq!(said, "set\n/limits\nmax_sessions=9\n-o\njson\n--help\n");
    assert_eq!(run(&["--help"]).stdout, b"--help\n");
    assert!(home.ok(&["completions", "bash"]).contains("rollback"));
}

/// Creates a file instead of the library. Programs not linked with it run without noticing.
fn stand_in(home: &Home) -> String {
    let library = home.path("stand-in.so");
    std::fs::write(&library, "").unwrap();
    library
}

/// Returns `riser run` with the test's temporary directories.
fn running(home: &Home, args: &[&str]) -> Command {
    let mut command = home.command(&["run"]);
    command
        .args(args)
        .env("RISER_DROP_IN", stand_in(home))
        .env("TMPDIR", &home.0)
        .env_remove("XDG_RUNTIME_DIR")
        .env_remove("RISER_DEVICES")
        .env_remove("RISER_PCAP")
        .env("LD_LIBRARY_PATH", "/else");
    std::fs::set_permissions(&home.0, PermissionsExt::from_mode(0o700)).unwrap();
    command
}

#[test]
fn run_passes_library_and_devices() {
    let home = Home::new();
    let script = "echo $RISER_DEVICES/$RISER_INJECT/$RISER_PCAP/$RISER_LOG; \
                  echo $LD_LIBRARY_PATH; echo $@; exit 7";
    let args = [
        "--addr=127.0.0.1,127.0.0.2",
        "--device",
        "mlx5_0=127.0.0.3",
        "--inject",
        "loss=2,seed=3",
        "--pcap",
        "a.pcap",
        "-v",
        "--",
        "sh",
        "-c",
        script,
        "--",
        "-v",
        "--addr",
    ];
    let output = running(&home, &args).current_dir(&home.0).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{errors}");
    let [environment, path, arguments] = text.lines().collect::<Vec<_>>()[..] else {
        panic!("{text}{errors}");
    };
    let devices = "riser0=127.0.0.1,riser1=127.0.0.2,mlx5_0=127.0.0.3";
    let pcap = home.path("a.pcap");
    assert_eq!(environment, format!("{devices}/loss=2,seed=3/{pcap}/info"));
    assert_eq!(arguments, "-v --addr");
    let directory = path.strip_suffix(":/else").unwrap();
    assert!(
        directory.starts_with(home.0.to_str().unwrap()),
        "{directory}"
    );
    for name in ["libibverbs.so.1", "librdmacm.so.1", "libibumad.so.3"] {
        let file = std::fs::canonicalize(Path::new(directory).join(name)).unwrap();
        assert_eq!(file, std::fs::canonicalize(stand_in(&home)).unwrap());
    }
    // Without options, there is a single device, no capture, and the library's default log.
    let script = "echo $RISER_DEVICES/$RISER_INJECT/$RISER_PCAP/$RISER_LOG";
    let output = running(&home, &["sh", "-c", script]).output().unwrap();
    assert_eq!(output.stdout, b"riser0=127.0.0.1///\n");
}

#[test]
fn unrunnable_program_has_shell_exit_status() {
    let home = Home::new();
    let plain = home.path("plain");
    std::fs::write(&plain, "#!/bin/sh\n").unwrap();
    let cases: &[(&[&str], i32, &str)] = &[
        (
            &["no-such-program-anywhere"],
            127,
            "cannot run no-such-program-anywhere",
        ),
        (&[&plain], 126, "cannot run"),
        (&["sh", "-c", "exit 3"], 3, ""),
        (
            &["--addr", "192.0.2.1", "true"],
            2,
            "riser0 cannot use 192.0.2.1",
        ),
        (&["--device", "a=b", "true"], 2, "`b` is not an IP address"),
        (&["--inject", "loss=200", "true"], 2, "percentage"),
        (&[], 2, "COMMAND"),
    ];
    for (args, status, want) in cases {
        let output = running(&home, args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(*status), "{args:?}: {text}");
        assert!(text.contains(want), "{args:?}: no {want:?} in {text}");
    }
    let mut wrong = running(&home, &["true"]);
    let wrong = wrong.env("RISER_DEVICES", std::ffi::OsStr::from_bytes(b"a=\xff"));
    let output = wrong.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("RISER_DEVICES"), "{text}");
    let mut lost = running(&home, &["true"]);
    let output = lost.env("RISER_DROP_IN", "/gone.so").output().unwrap();
    assert_eq!(output.status.code(), Some(5));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("/gone.so"), "{text}");
    assert!(
        text.contains("cargo build --release -p riser-rdma-compat"),
        "{text}"
    );
    // A signal terminates the program itself.
    let output = running(&home, &["sh", "-c", "kill -9 $$"])
        .output()
        .unwrap();
    assert_eq!(output.status.signal(), Some(9));
}

#[test]
fn setuid_program_is_rejected() {
    if !rustix::process::geteuid().is_root() || rustix::thread::no_new_privs().unwrap() {
        let why = "only root can make one, where such programs gain rights";
        return skip("riser run with a setuid program", why);
    }
    let home = Home::new();
    let program = home.path("program");
    std::fs::copy("/bin/true", &program).unwrap();
    std::os::unix::fs::chown(&program, Some(1), None).unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o4755)).unwrap();
    let output = running(&home, &[&program]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(126), "{text}");
    assert!(text.contains("setuid"), "{text}");
}
