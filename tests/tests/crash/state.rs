//! The daemon is killed before each system call on a file of its state directory.
//!
//! Afterwards, reservations and the configuration are as before a change or as after it, and as
//! after it if the change was answered. A registration, a reservation and an applied configuration
//! are changed in each round.
//!
//! `RISER_CRASH_STATE` sets how many files are taken (default 2, at most all).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use riser_test_peers::tcp::Client;
use riser_testkit::programs::{folder, missing, skip};
use riser_testkit::{eventually, eventually_some};
use riser_tests::contest::IQN;
use riser_tests::load::setting;

const ADDRESS: &str = "127.0.174.1:3260";
const PATIENCE: Duration = Duration::from_secs(60);

const GOOD: u8 = 0;
const APTPL: u8 = 1;
const RESERVE: u8 = 1;
const RELEASE: u8 = 2;
const REGISTER_AND_IGNORE: u8 = 6;
/// Write exclusive, registrants only (SPC-4 table 62).
const KIND: u8 = 5;

/// What the daemon keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kept {
    key: u64,
    is_reserved: bool,
    iops: u64,
}

impl Kept {
    fn next(self) -> Self {
        Self {
            key: self.key + 1,
            is_reserved: !self.is_reserved,
            iops: self.iops + 1,
        }
    }
}

/// A folder with a configuration, and the daemon that runs there.
struct Daemon {
    folder: PathBuf,
    process: Option<Child>,
}

impl Daemon {
    fn new() -> Self {
        let name = format!("riser-crash-state-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).unwrap();
        let daemon = Self {
            folder,
            process: None,
        };
        let text = format!(
            "backends:\n  disk: {{ kind: ram, size: 1MiB }}\n\
             targets:\n  - name: t\n    iqn: {IQN}\n    \
             portals: [{{ protocol: iscsi, listen: \"{ADDRESS}\" }}]\n    \
             luns: {{ 0: disk }}\n    access: open\n\
             admin: {{ socket: {} }}\nstate: {{ directory: {} }}\nworkers: {{ count: 1 }}\n",
            daemon.socket().display(),
            daemon.state().display()
        );
        fs::write(daemon.folder.join("riserd.yaml"), text).unwrap();
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("admin")
    }

    fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// Starts it, under strace with these arguments if there are some, and waits until it serves
    /// or has ended.
    fn start(&mut self, strace: Option<&[String]>) {
        let _ = fs::remove_file(self.socket());
        let riserd = folder().join("riserd");
        let mut command = match strace {
            None => Command::new(riserd),
            Some(args) => {
                let mut command = Command::new("strace");
                command.args(["-f", "-qq"]).args(args).arg("--").arg(riserd);
                command
            }
        };
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.folder.join("log"))
            .unwrap();
        let process = command
            .args(["run", "--restore", "--config"])
            .arg(self.folder.join("riserd.yaml"))
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.process = Some(process);
        eventually("the daemon serves or has ended", PATIENCE, || {
            self.socket().exists() || self.has_ended()
        });
    }

    /// Makes a change under strace with these arguments, which may kill it, and looks at what is
    /// there after a restart. Returns whether it was killed, and whether a part of the change is
    /// there.
    ///
    /// # Panics
    /// If neither the state before nor that after the change is there, or what was answered is not.
    fn is_killed_at(&mut self, strace: &[&str], kept: &mut Kept) -> (bool, bool) {
        let args: Vec<_> = strace.iter().map(|arg| (*arg).to_owned()).collect();
        self.start(Some(&args));
        let answered = match self.has_ended() {
            true => *kept,
            false => self.change(*kept),
        };
        let is_killed = self.has_ended();
        self.kill();
        self.start(None);
        let (found, next) = (self.kept(), kept.next());
        let fits = |found: u64, old: u64, answered: u64, new: u64| match answered == new {
            true => found == new,
            false => found == old || found == new,
        };
        assert!(
            fits(found.key, kept.key, answered.key, next.key)
                && fits(found.iops, kept.iops, answered.iops, next.iops)
                && fits(
                    found.is_reserved.into(),
                    kept.is_reserved.into(),
                    answered.is_reserved.into(),
                    next.is_reserved.into()
                ),
            "{strace:?}: there was {kept:?}, {answered:?} was answered, {found:?} is there"
        );
        self.kill();
        let is_half = found != *kept && found != next;
        *kept = found;
        (is_killed, is_half)
    }

    fn has_ended(&mut self) -> bool {
        let process = self.process.as_mut().expect("it was started");
        process.try_wait().unwrap().is_some()
    }

    /// Kills it. Under strace, the tracee goes with it (`--kill-on-exit` is not in all versions, so
    /// it is ended by its own number).
    fn kill(&mut self) {
        let Some(mut process) = self.process.take() else {
            return;
        };
        let children = format!("/proc/{0}/task/{0}/children", process.id());
        let tracees = fs::read_to_string(children).unwrap_or_default();
        for tracee in tracees.split_whitespace() {
            // It may end at this moment.
            let mut kill = Command::new("kill");
            let _ = kill.args(["-KILL", tracee]).stderr(Stdio::null()).status();
        }
        if tracees.is_empty() {
            let _ = process.kill();
        }
        process.wait().unwrap();
    }

    fn riserd(&self, args: &[&str]) -> Option<String> {
        let output = Command::new(folder().join("riserd"))
            .args(args)
            .arg("--socket")
            .arg(self.socket())
            .output()
            .unwrap();
        let is_ok = output.status.success();
        is_ok.then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Makes all three changes, as far as the daemon lives; returns what was answered.
    fn change(&self, from: Kept) -> Kept {
        let next = from.next();
        let mut answered = from;
        // A connection that breaks ends these by a panic of the client's.
        let _: Result<(), _> = catch_unwind(AssertUnwindSafe(|| {
            let mut client = log_in();
            let keys = (0, next.key);
            if reserve_out(&mut client, REGISTER_AND_IGNORE, keys) != GOOD {
                return;
            }
            answered.key = next.key;
            let action = if next.is_reserved { RESERVE } else { RELEASE };
            if reserve_out(&mut client, action, (next.key, 0)) == GOOD {
                answered.is_reserved = next.is_reserved;
            }
        }));
        let limit = format!("limits/iops={}", next.iops);
        if self.riserd(&["set", "/backends/disk", &limit]).is_some() {
            answered.iops = next.iops;
        }
        answered
    }

    /// What it keeps, after a start.
    fn kept(&self) -> Kept {
        let mut client = eventually_some("a login", PATIENCE, try_log_in);
        let keys = reserve_in(&mut client, 0);
        let keys: Vec<_> = keys
            .chunks_exact(8)
            .map(|key| key.try_into().unwrap())
            .collect();
        assert!(keys.len() <= 1, "one initiator, one key: {keys:?}");
        let text = self
            .riserd(&["get", "/backends/disk", "-o", "json"])
            .unwrap();
        let disk: serde_json::Value = serde_json::from_str(&text).unwrap();
        Kept {
            key: keys.first().map_or(0, |key| u64::from_be_bytes(*key)),
            is_reserved: !reserve_in(&mut client, 1).is_empty(),
            iops: disk["limits"]["iops"].as_u64().unwrap_or_default(),
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!(
                "{}",
                fs::read_to_string(self.folder.join("log")).unwrap_or_default()
            );
        }
        self.kill();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn try_log_in() -> Option<Client> {
    let to: SocketAddr = ADDRESS.parse().unwrap();
    let mut client = catch_unwind(|| Client::login_at(to, IQN, 1, None).ok()).ok()??;
    // The unit attention of a new nexus.
    client.command(&[0; 6], false, 0, &[]);
    Some(client)
}

fn log_in() -> Client {
    try_log_in().expect("a daemon that lives")
}

/// PERSISTENT RESERVE OUT; its status.
fn reserve_out(client: &mut Client, action: u8, keys: (u64, u64)) -> u8 {
    let mut list = [0; 24];
    list[..8].copy_from_slice(&keys.0.to_be_bytes());
    list[8..16].copy_from_slice(&keys.1.to_be_bytes());
    list[20] = APTPL * u8::from(action == REGISTER_AND_IGNORE);
    let cdb = [0x5f, action, KIND, 0, 0, 0, 0, 0, 24, 0];
    client.command(&cdb, true, 24, &list).0
}

/// PERSISTENT RESERVE IN; its data behind the header.
fn reserve_in(client: &mut Client, action: u8) -> Vec<u8> {
    let cdb = [0x5e, action, 0, 0, 0, 0, 0, 1, 0, 0];
    let (status, data) = client.command(&cdb, false, 256, &[]);
    assert_eq!(status, GOOD);
    data[8..].to_vec()
}

/// The paths below `dir` that a trace of strace's with `-y` names.
fn paths_in(trace: &str, dir: &Path) -> BTreeSet<String> {
    let dir = dir.to_str().unwrap();
    let starts = trace.match_indices(dir).map(|(at, _)| &trace[at..]);
    let end = |text: &str| text.find(['"', '>', '(']).unwrap_or(text.len());
    starts.map(|text| text[..end(text)].to_owned()).collect()
}

/// Names of the system calls on a path in such a trace.
fn calls_on<'a>(trace: &'a str, path: &str) -> BTreeSet<&'a str> {
    // Quoted, or the file of a descriptor.
    let forms = [format!("\"{path}\""), format!("<{path}>")];
    let lines = trace.lines();
    let lines = lines.filter(|line| forms.iter().any(|form| line.contains(form)));
    // Behind the number of the thread.
    let calls = lines.filter_map(|line| line.split_whitespace().nth(1)?.split_once('('));
    calls.map(|(name, _)| name).collect()
}

#[test]
fn a_kill_at_any_step_leaves_the_state_before_or_after_a_change() {
    if let Some(tool) = missing(&["strace"]) {
        return skip("crash state", &format!("{tool} is not installed"));
    }
    let files = setting("RISER_CRASH_STATE", 2) as usize;
    let mut daemon = Daemon::new();
    let start = Kept {
        key: 0,
        is_reserved: false,
        iops: 1000,
    };
    // Once without a kill: that is where the files are named.
    let trace = daemon.folder.join("trace");
    let args = [
        "-y",
        "-e",
        "trace=%file,%desc",
        "-o",
        trace.to_str().unwrap(),
    ];
    daemon.start(Some(&args.map(str::to_owned)));
    let mut kept = daemon.change(start);
    assert_eq!(kept, start.next(), "all is answered");
    daemon.kill();
    let trace = fs::read_to_string(&trace).unwrap();
    let mut paths = paths_in(&trace, &daemon.state());
    paths.remove(daemon.state().to_str().unwrap());
    assert!(paths.len() >= 5, "files and their hidden forms: {paths:?}");
    let (mut kills, mut halves) = (0, 0);
    let mut struck = BTreeSet::new();
    // Files whose names differ are far apart in this order.
    let step = paths.len().div_ceil(files.max(1));
    for path in paths.iter().step_by(step) {
        // strace counts the calls of each name by themselves.
        for name in calls_on(&trace, path) {
            for nth in 1.. {
                let kill = format!("inject={name}:signal=KILL:when={nth}");
                let args = ["-P", path, "-e", &kill, "-o", "/dev/null"];
                let (is_killed, is_half) = daemon.is_killed_at(&args, &mut kept);
                halves += u64::from(is_half);
                if !is_killed {
                    break;
                }
                kills += 1;
                struck.insert(name);
            }
        }
    }
    println!(
        "figure: {kills} kills at calls on {} of {} files, {halves} between two changes",
        paths.len().div_ceil(step),
        paths.len()
    );
    for name in ["rename", "fsync"] {
        assert!(struck.contains(name), "{name} was not met: {struck:?}");
    }
}
