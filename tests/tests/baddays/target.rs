//! Tests `riserd` if a disk or address is missing, or if the size of a file has changed.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use riser_testkit::programs::{change_owner, directory, succeeded, without_rights};
use serde_json::Value;

use crate::{ended, eventually};

/// A daemon with its own configuration.
pub(crate) struct Daemon {
    dir: PathBuf,
    process: Option<Child>,
    /// Network namespace to use for all programs.
    netns: Option<String>,
}

impl Daemon {
    /// Creates a daemon, but doesn't start it. In the configuration, `DIR` is replaced by its
    /// directory.
    pub(crate) fn new(config: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = format!("riser-badday-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(dir);
        fs::create_dir(&dir).unwrap();
        let daemon = Self {
            dir,
            process: None,
            netns: None,
        };
        daemon.write(config);
        daemon
    }

    /// Same as [`Daemon::new`], but the daemon and its initiators use a network namespace.
    pub(crate) fn in_netns(config: &str, netns: &str) -> Self {
        let mut daemon = Self::new(config);
        daemon.netns = Some(netns.to_owned());
        daemon
    }

    /// Returns a command for a program or a command prefix that runs in the network namespace.
    fn inside(&self, program: impl AsRef<OsStr>) -> Command {
        match &self.netns {
            None => Command::new(program),
            Some(netns) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", netns]).arg(program);
                command
            }
        }
    }

    pub(crate) fn write(&self, config: &str) {
        let text = format!(
            "{config}\nadmin: {{ socket: DIR/admin }}\nstate: {{ directory: DIR/state }}\n"
        );
        let text = text.replace("DIR", self.dir.to_str().unwrap());
        fs::write(self.dir.join("riserd.yaml"), text).unwrap();
    }

    /// Returns a command to run the daemon with the prefix [`WITHOUT_RIGHTS`], same as the service.
    pub(crate) fn command(&self) -> Command {
        change_owner(&self.dir);
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.dir.join("log"))
            .unwrap();
        let riserd = directory().join("riserd");
        let without_rights = without_rights(riserd);
        let mut command = self.inside(without_rights.get_program());
        command
            .args(without_rights.get_args())
            .args(["run", "--config"])
            .arg(self.dir.join("riserd.yaml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        command
    }

    /// Starts the daemon and waits until it responds.
    pub(crate) fn serve(&mut self) {
        self.process = Some(self.command().spawn().unwrap());
        eventually("the daemon responds", || {
            self.run_command(&["status"]).0 == 0
        });
    }

    /// Sends a signal to the daemon if it's running.
    pub(crate) fn signal(&self, name: &str) {
        if let Some(process) = &self.process {
            let name = format!("-{name}");
            let _ = Command::new("kill")
                .args([&name, &process.id().to_string()])
                .status();
        }
    }

    /// Sends SIGTERM to the daemon and waits until it has exited.
    pub(crate) fn terminate(&mut self) {
        self.signal("TERM");
        if let Some(mut process) = self.process.take() {
            process.wait().unwrap();
        }
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    pub(crate) fn run_command(&self, args: &[&str]) -> (i32, String, String) {
        let mut command = Command::new(directory().join("riserd"));
        ended(
            command
                .args(args)
                .env("RISERD_SOCKET", self.dir.join("admin")),
        )
    }

    fn json_or_nothing(&self, args: &[&str]) -> Option<Value> {
        let (code, out, _) = self.run_command(&[args, &["-o", "json"]].concat());
        (code == 0).then(|| serde_json::from_str(&out).unwrap())
    }

    /// Runs a command and returns its JSON output.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let (code, out, errors) = self.run_command(&[args, &["-o", "json"]].concat());
        assert_eq!(code, 0, "{args:?}: {errors}");
        serde_json::from_str(&out).unwrap()
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns a `riser` command with these arguments.
    pub(crate) fn riser(&self, args: &[&str]) -> Command {
        let mut command = self.inside(directory().join("riser"));
        command
            .args(args)
            .env("RISER_STATE_DIR", self.dir.join("riser"))
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn write_block(&self, url: &str, byte: u8) {
        let data = self.path("data");
        fs::write(&data, [byte; 4096]).unwrap();
        succeeded(&mut self.riser(&["write", url, data.to_str().unwrap(), "-q"]));
    }

    pub(crate) fn read_block(&self, url: &str) -> Vec<u8> {
        let data = self.path("data");
        let to = data.to_str().unwrap();
        succeeded(&mut self.riser(&["read", url, to, "--length=4096", "-q"]));
        fs::read(&data).unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        #[allow(clippy::print_stderr, reason = "shown with the failure")]
        if std::thread::panicking() {
            eprintln!("riserd: {}", self.log());
        }
        self.kill();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn set_len(path: &Path, len: u64) {
    let mut file = File::options();
    let file = file.create(true).truncate(false).write(true).open(path);
    file.unwrap().set_len(len).unwrap();
}

/// Two disks, where one is a file that doesn't exist, and two portals, where one uses an address
/// that is not available on this host.
const HALF: &str = "
backends:
  good: { kind: ram, size: 64MiB }
  gone: { kind: file, path: DIR/gone }
targets:
  - name: t
    iqn: iqn.2026-01.com.example:t
    portals:
      - { protocol: srp, listen: 127.0.186.1 }
      - { protocol: iscsi, listen: 127.0.186.1 }
      - { protocol: srp, listen: 203.0.113.4 }
      - { protocol: iscsi, listen: 203.0.113.4 }
    luns: { 0: good, 1: gone }
    access: open
metrics: { listen: 127.0.186.1:9909 }";

#[test]
fn missing_parts_do_not_affect_others() {
    let mut daemon = Daemon::new(HALF);
    daemon.serve();
    let problems = || daemon.json(&["status"])["problems"].clone();
    let named = |problems: &Value| -> Vec<String> {
        let all = problems.as_array().into_iter().flatten();
        all.map(|p| format!("{} {}", p["kind"], p["name"]))
            .collect()
    };
    let found = problems();
    assert_eq!(
        named(&found),
        [
            "\"backend\" \"gone\"",
            "\"portal\" \"203.0.113.4:5555\"",
            "\"portal\" \"203.0.113.4:3260\""
        ]
    );
    assert!(
        found[0]["error"].as_str().unwrap().contains("No such file"),
        "{found}"
    );
    let (_, text, _) = daemon.run_command(&["status"]);
    assert!(text.contains("NOT SERVED: backend gone: "), "{text}");
    let log = daemon.log();
    assert_eq!(log.matches("not served").count(), 3, "a line for each");
    assert_eq!(log.matches("serving target=").count(), 2, "{log}");
    for scheme in [
        "srp://127.0.186.1",
        "iscsi://127.0.186.1/iqn.2026-01.com.example:t",
    ] {
        daemon.write_block(&format!("{scheme}/0"), 7);
        assert_eq!(daemon.read_block(&format!("{scheme}/0")), [7; 4096]);
        let url = format!("{scheme}/1");
        let (code, _, errors) = ended(&mut daemon.riser(&["read", &url, "/dev/null", "-q"]));
        assert_ne!(code, 0);
        assert!(
            errors.contains("not ready: LOGICAL UNIT NOT READY, MANUAL INTERVENTION REQUIRED"),
            "{errors}"
        );
        // The unit exists and returns its identity.
        let response = succeeded(&mut daemon.riser(&["inquiry", &url, "-o", "json"]));
        assert!(response.contains("RISER"), "{response}");
    }
    let get =
        |path: &str| ended(Command::new("curl").args(["-s", &format!("127.0.186.1:9909{path}")])).1;
    assert!(
        get("/readyz").contains("backend gone: "),
        "{}",
        get("/readyz")
    );
    assert!(get("/metrics").contains("riser_not_served{kind=\"backend\",name=\"gone\"} 1"));

    // A change to another setting is applied, but a change that adds another missing disk is
    // rejected completely.
    let (code, _, errors) = daemon.run_command(&["set", "/limits", "queue_depth=64"]);
    assert_eq!(code, 0, "{errors}");
    let new = daemon.path("new.yaml");
    let text = fs::read_to_string(daemon.path("riserd.yaml")).unwrap();
    let text = text.replace(
        "  good:",
        "  bad: { kind: file, path: /nonexistent }\n  good:",
    );
    fs::write(&new, text.replace("1: gone", "1: gone, 2: bad")).unwrap();
    let (code, _, errors) = daemon.run_command(&["apply", new.to_str().unwrap()]);
    assert_ne!(code, 0);
    assert!(
        errors.contains("backend bad") && errors.contains("nothing was applied"),
        "{errors}"
    );
    assert_eq!(named(&problems()).len(), 3);

    // The disk must be detected when it's available again, and must still have its data.
    set_len(&daemon.path("gone"), 32 << 20);
    change_owner(&daemon.path("gone"));
    eventually("the disk is found", || named(&problems()).len() == 2);
    let url = "srp://127.0.186.1/1";
    daemon.write_block(url, 9);
    assert_eq!(daemon.read_block(url), [9; 4096]);
    assert_eq!(fs::metadata(daemon.path("gone")).unwrap().len(), 32 << 20);
    assert!(!get("/readyz").contains("backend gone"));
}

const METRICS: &str = "
backends: { d: { kind: ram, size: 64MiB } }
targets:
  - name: t
    iqn: iqn.2026-01.com.example:t
    portals: [{ protocol: iscsi, listen: 127.0.188.9 }]
    luns: { 0: d }
    access: open
metrics: { listen: 127.0.188.9:9909 }";

#[test]
fn metrics_address_in_use_is_retried() {
    let taken = TcpListener::bind("127.0.188.9:9909").unwrap();
    let mut daemon = Daemon::new(METRICS);
    daemon.serve();
    let problems = daemon.json(&["status"])["problems"].clone();
    assert_eq!(problems[0]["kind"], "metrics", "{problems}");
    assert_eq!(problems[0]["name"], "127.0.188.9:9909");
    daemon.write_block("iscsi://127.0.188.9/iqn.2026-01.com.example:t/0", 1);
    // All other parts must not be blocked by this.
    let (code, _, errors) = daemon.run_command(&["set", "/limits", "queue_depth=64"]);
    assert_eq!(code, 0, "{errors}");
    drop(taken);
    eventually("metrics are served", || {
        daemon.json(&["status"])["problems"].is_null()
    });
    let response = ended(Command::new("curl").args(["-s", "127.0.188.9:9909/readyz"])).1;
    assert!(response.contains("ok"), "{response}");
}

#[test]
fn attached_disk_returns_after_missing_start() {
    let config = HALF.replace("127.0.186.1", "127.0.187.1");
    let config = config.replace(
        "path: DIR/gone",
        "path: DIR/gone, create: true, size: 16MiB",
    );
    let config = config.replace("      - { protocol: srp, listen: 203.0.113.4 }\n", "");
    let config = config.replace("      - { protocol: iscsi, listen: 203.0.113.4 }\n", "");
    let mut daemon = Daemon::new(&config);
    daemon.serve();
    assert_eq!(daemon.json(&["status"])["problems"], Value::Null);
    let socket = daemon.path("nbd");
    let socket = socket.to_str().unwrap();
    let url = "srp://127.0.187.1/1";
    daemon.write_block(url, 3);
    succeeded(&mut daemon.riser(&["attach", url, "--nbd", socket, "--io-timeout=never"]));
    // The daemon restarts before the file system with this disk has been mounted.
    daemon.kill();
    let (file, hidden) = (daemon.path("gone"), daemon.path("hidden"));
    fs::rename(&file, &hidden).unwrap();
    fs::create_dir(&file).unwrap();
    daemon.serve();
    assert_eq!(
        daemon.json(&["status"])["problems"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    fs::remove_dir(&file).unwrap();
    fs::rename(&hidden, &file).unwrap();
    eventually("the disk is found", || {
        daemon.json(&["status"])["problems"].is_null()
    });
    let mut bytes = [0; 4096];
    riser_tests::load::Disk::read(
        &mut riser_tests::load::Nbd::connect(Path::new(socket)),
        0,
        &mut bytes,
    )
    .unwrap();
    assert_eq!(bytes, [3; 4096]);
    succeeded(&mut daemon.riser(&["detach", "0"]));
}

#[test]
fn strict_daemon_requires_all_parts() {
    let config = HALF.replace("127.0.186.1", "127.0.188.1");
    let mut daemon = Daemon::new(&format!("strict: true{config}"));
    let (code, _, _) = ended(&mut daemon.command());
    assert_eq!(code, 1);
    assert!(daemon.log().contains("backend gone: "), "{}", daemon.log());
    set_len(&daemon.path("gone"), 1 << 20);
    let (code, _, _) = ended(&mut daemon.command());
    assert_eq!(code, 1);
    assert!(daemon.log().contains("203.0.113.4"), "{}", daemon.log());
    daemon.write(&config);
    daemon.serve();
}

#[test]
fn grown_disk_keeps_its_size() {
    const MIB: u64 = 1 << 20;
    let config = "
backends:
  d: { kind: file, path: DIR/disk, size: 64MiB, create: true }
targets:
  - name: t
    portals: [{ protocol: srp, listen: 127.0.189.1 }]
    luns: { 0: d }
    access: open";
    let mut daemon = Daemon::new(config);
    daemon.serve();
    let size = |daemon: &Daemon| {
        daemon.json(&["targets"])[0]["luns"]["0"]["size"]
            .as_u64()
            .unwrap()
    };
    let file = daemon.path("riserd.yaml");
    let file = file.to_str().unwrap();
    assert_eq!(size(&daemon), 64 * MIB);
    assert_eq!(daemon.run_command(&["diff", file]).0, 0);

    // Change the size manually and rescan.
    set_len(&daemon.path("disk"), 128 * MIB);
    assert_eq!(daemon.run_command(&["rescan"]).0, 0);
    assert_eq!(size(&daemon), 128 * MIB);
    let (code, text, _) = daemon.run_command(&["diff", file]);
    assert_eq!(code, 3, "{text}");
    assert!(text.contains("/backends/d/size"), "{text}");
    let (code, _, errors) = daemon.run_command(&["reload"]);
    assert_eq!(code, 0, "{errors}");
    assert_eq!(size(&daemon), 128 * MIB);
    daemon.kill();
    daemon.serve();
    assert_eq!(size(&daemon), 128 * MIB);
    let (_, text, _) = daemon.run_command(&["status"]);
    assert!(text.contains("/backends/d/size"), "{text}");

    // Change the configuration, but not the file.
    let (code, _, errors) = daemon.run_command(&["set", "/backends/d", "size=256MiB"]);
    assert_eq!(code, 0, "{errors}");
    assert_eq!(size(&daemon), 256 * MIB);
    daemon.kill();
    daemon.serve();
    assert_eq!(size(&daemon), 256 * MIB);
    let (code, _, errors) = daemon.run_command(&["apply", file]);
    assert_eq!(code, 0, "{errors}");
    assert_eq!(size(&daemon), 256 * MIB);
}

fn both_fabrics(network: u8) -> String {
    let listen = format!("127.0.{network}.1");
    format!(
        "
backends:
  d: {{ kind: file, path: DIR/disk, size: 64MiB, create: true }}
targets:
  - name: t
    iqn: iqn.2026-01.com.example:t
    portals:
      - {{ protocol: srp, listen: {listen} }}
      - {{ protocol: iser, listen: {listen} }}
      - {{ protocol: iscsi, listen: {listen} }}
    luns: {{ 0: d }}
    access: open"
    )
}

/// Checks that the unit can be accessed using each protocol.
fn check_served(daemon: &Daemon, network: u8) {
    let iqn = "iqn.2026-01.com.example:t";
    for url in [
        format!("srp://127.0.{network}.1/0"),
        format!("iser://127.0.{network}.1/{iqn}/0"),
        format!("iscsi://127.0.{network}.1/{iqn}/0"),
    ] {
        succeeded(&mut daemon.riser(&["inquiry", &url]));
    }
}

#[test]
fn second_daemon_reports_first() {
    let mut first = Daemon::new(&both_fabrics(190));
    first.serve();
    let pid = first.process.as_ref().unwrap().id();
    let named = format!("riserd (process {pid})");
    // Use the same addresses, but a different state directory and file.
    for portal in ["srp", "iscsi"] {
        let config = both_fabrics(190);
        let others = config
            .lines()
            .filter(|line| !line.contains("protocol") || line.contains(portal));
        let second = Daemon::new(&others.collect::<Vec<_>>().join("\n"));
        let (code, _, _) = ended(&mut second.command());
        assert_eq!(code, 1);
        let log = second.log();
        assert!(log.contains(&named) && log.contains("in use"), "{log}");
        for _ in 0..4 {
            check_served(&first, 190);
        }
    }
    // Use the same state directory.
    let (code, _, _) = ended(&mut first.command());
    assert_eq!(code, 1);
    assert!(
        first.log().contains(&format!("in use by {named}")),
        "{}",
        first.log()
    );
    check_served(&first, 190);
}

#[test]
fn new_daemon_waits_for_exiting_one() {
    let mut daemon = Daemon::new(&both_fabrics(191));
    daemon.serve();
    for round in 0..3 {
        let mut old = daemon.process.take().unwrap();
        let pid = old.id().to_string();
        succeeded(Command::new("kill").args(["-TERM", &pid]));
        daemon.process = Some(daemon.command().spawn().unwrap());
        assert!(old.wait().unwrap().success(), "round {round}");
        eventually("the next one serves", || {
            daemon
                .json_or_nothing(&["status"])
                .is_some_and(|status| status["pid"] != old.id())
        });
        check_served(&daemon, 191);
        assert_eq!(daemon.json(&["status"])["problems"], Value::Null);
    }
}

#[test]
fn portal_in_use_is_skipped_after_wait() {
    let taken = TcpListener::bind("127.0.199.9:3260").unwrap();
    let portals = "portals:\n      - { protocol: iscsi, listen: 127.0.199.9 }";
    let config = both_fabrics(199).replace("portals:", portals);
    let mut daemon = Daemon::new(&config);
    daemon.serve();
    let problems = daemon.json(&["status"])["problems"].clone();
    assert_eq!(problems.as_array().unwrap().len(), 1, "{problems}");
    assert_eq!(problems[0]["name"], "127.0.199.9:3260", "{problems}");
    let why = problems[0]["error"].as_str().unwrap();
    assert!(why.contains("in use"), "{why}");
    check_served(&daemon, 199);
    drop(taken);
    eventually("the portal is served", || {
        daemon.json(&["status"])["problems"].is_null()
    });
}

/// If the reservations of a disk are not known, it must not be served, but this must not affect the
/// other disk.
#[test]
fn unreadable_reservations_affect_one_disk() {
    let config = HALF.replace("127.0.186.1", "127.0.194.1");
    let config = config.replace(
        "path: DIR/gone",
        "path: DIR/gone, create: true, size: 16MiB",
    );
    let config = config.replace("- { protocol: srp, listen: 203.0.113.4 }", "");
    let config = config.replace("203.0.113.4", "127.0.194.9");
    // Another process is using one of the portals.
    let taken = TcpListener::bind("127.0.194.9:3260").unwrap();
    let mut daemon = Daemon::new(&config);
    daemon.serve();
    let kept = fs::read_to_string(daemon.path("state/identities.json")).unwrap();
    let kept: Value = serde_json::from_str(&kept).unwrap();
    let naa = kept["backends"]["gone"]["naa"].as_u64().unwrap();
    daemon.kill();
    let file = daemon.path(&format!("state/reservations-3{naa:015x}.json"));
    fs::write(&file, "{").unwrap();
    daemon.serve();
    let problem = |daemon: &Daemon, name: &str| {
        let problems = daemon.json(&["status"])["problems"].clone();
        let mut problems = problems.as_array().into_iter().flatten();
        let of_name = problems.find(|problem| problem["name"] == name);
        of_name.map(|problem| problem["error"].as_str().unwrap().to_owned())
    };
    let why = problem(&daemon, "gone").expect("a problem");
    assert!(why.contains("reservations"), "{why}");
    daemon.write_block("srp://127.0.194.1/0", 1);
    // Retries and configuration changes must still work. When the portal is opened, this also tries
    // to open the disk.
    drop(taken);
    eventually("a retry", || problem(&daemon, "127.0.194.9:3260").is_none());
    assert!(problem(&daemon, "gone").is_some());
    let log = daemon.log();
    assert!(!log.contains("cannot retry unavailable objects"), "{log}");
    let (code, _, errors) = daemon.run_command(&["reload"]);
    assert_eq!(code, 0, "{errors}");
    fs::remove_file(&file).unwrap();
    eventually("the disk is served", || {
        daemon.json(&["status"])["problems"].is_null()
    });
    daemon.write_block("srp://127.0.194.1/1", 2);
}

#[test]
fn moved_image_keeps_disk_names() {
    let config = both_fabrics(195);
    let mut daemon = Daemon::new(&config);
    daemon.serve();
    let serial = |daemon: &Daemon| daemon.json(&["targets"])[0]["luns"]["0"]["serial"].clone();
    let first = serial(&daemon);
    daemon.kill();
    fs::rename(daemon.path("disk"), daemon.path("moved")).unwrap();
    daemon.write(&config.replace("DIR/disk", "DIR/moved"));
    daemon.serve();
    assert_eq!(serial(&daemon), first, "another path");
    daemon.kill();
    let renamed = config.replace("  d:", "  e:").replace("0: d", "0: e");
    daemon.write(&renamed.replace("DIR/disk", "DIR/moved"));
    daemon.serve();
    assert_eq!(serial(&daemon), first, "another name of the backend");
    assert!(!daemon.log().contains("the file or device has changed"));
    daemon.kill();
    fs::copy(daemon.path("moved"), daemon.path("copy")).unwrap();
    daemon.write(&renamed.replace("DIR/disk", "DIR/copy"));
    daemon.serve();
    assert_eq!(serial(&daemon), first);
    assert!(
        daemon.log().contains("the file or device has changed"),
        "{}",
        daemon.log()
    );
}
