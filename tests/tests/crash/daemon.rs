//! Runs the daemon in a temporary directory, using strace if required by the test, and provides
//! reservation commands for an initiator.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use riser_test_peers::tcp::Client;
use riser_testkit::eventually;
use riser_testkit::programs::{change_owner, directory, without_rights};
use riser_tests::contest::IQN;

use crate::inject::{self, Watch, Watcher};

/// Timeout for any operation, which should be enough for a slow machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const GOOD: u8 = 0;
const APTPL: u8 = 1;
pub(crate) const RESERVE: u8 = 1;
pub(crate) const RELEASE: u8 = 2;
pub(crate) const REGISTER_AND_IGNORE: u8 = 6;
/// Write exclusive, registrants only (SPC-4 table 62).
const KIND: u8 = 5;

/// A directory with a configuration, and the daemon that is using it.
pub(crate) struct Daemon {
    pub(crate) directory: PathBuf,
    process: Option<Child>,
}

impl Daemon {
    /// Creates a directory for a test.
    pub(crate) fn new(name: &str) -> Self {
        let name = format!("riser-crash-{name}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir(&directory).unwrap();
        Self {
            directory,
            process: None,
        }
    }

    /// Writes a configuration with these backends, and a target using this address and these units.
    pub(crate) fn configure(&self, address: &str, backends: &str, luns: &str) {
        let portal = format!("{{ protocol: iscsi, listen: \"{address}\" }}");
        self.configure_at(&portal, backends, luns, 1);
    }

    /// Same, but uses any portal and this number of workers.
    pub(crate) fn configure_at(&self, portal: &str, backends: &str, luns: &str, workers: u8) {
        let text = format!(
            "backends: {backends}\n\
             targets:\n  - name: t\n    iqn: {IQN}\n    \
             portals: [{portal}]\n    \
             luns: {luns}\n    access: open\n\
             admin: {{ socket: {} }}\nstate: {{ directory: {} }}\nworkers: {{ count: {workers} }}\n",
            self.socket().display(),
            self.state().display()
        );
        fs::write(self.directory.join("riserd.yaml"), text).unwrap();
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join("admin")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.directory.join("state")
    }

    /// Starts the daemon, using strace if there are arguments for it, and waits until it's ready or
    /// has exited.
    pub(crate) fn start(&mut self, strace: Option<&[String]>) {
        let riserd = directory().join("riserd");
        change_owner(&self.directory);
        let command = match strace {
            None => without_rights(riserd),
            Some(args) => {
                let mut command = without_rights("strace");
                command.args(["-f", "-qq"]).args(args).arg("--").arg(riserd);
                command
            }
        };
        self.run(command);
    }

    /// Starts the daemon while watching its system calls, and waits until it's ready or has exited.
    pub(crate) fn start_watched(&mut self, watch: Watch) -> Watcher {
        let mut command = Command::new(directory().join("riserd"));
        let watcher = inject::watch(&mut command, watch);
        self.run(command);
        watcher
    }

    fn run(&mut self, mut command: Command) {
        let _ = fs::remove_file(self.socket());
        let log = self.directory.join("log");
        let log = File::options().create(true).append(true).open(log).unwrap();
        let process = command
            .args(["run", "--restore", "--config"])
            .arg(self.directory.join("riserd.yaml"))
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

    /// Returns the process ID. This requires that the daemon was started without strace.
    pub(crate) fn process(&self) -> u32 {
        self.process.as_ref().expect("it was started").id()
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        let process = self.process.as_mut().expect("it was started");
        process.try_wait().unwrap().is_some()
    }

    /// Kills the daemon.
    pub(crate) fn kill(&mut self) {
        self.signal("-KILL");
        if let Some(mut process) = self.process.take() {
            process.wait().unwrap();
        }
    }

    /// Sends SIGTERM and waits until the daemon has exited. Returns `None` if this times out.
    pub(crate) fn terminate(&mut self, patience: Duration) -> Option<ExitStatus> {
        self.signal("-TERM");
        let until = Instant::now() + patience;
        let process = self.process.as_mut().expect("it was started");
        loop {
            if let Some(status) = process.try_wait().unwrap() {
                self.process = None;
                return Some(status);
            }
            if Instant::now() > until {
                return None;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends a signal. If we use strace, it must be sent to the traced process, and strace will
    /// then exit as well. We use the process ID because `--kill-on-exit` is not supported in all
    /// versions.
    fn signal(&self, name: &str) {
        let Some(process) = &self.process else {
            return;
        };
        let id = process.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"));
        let tracees = children.unwrap_or_default();
        let own = id.to_string();
        let mut to: Vec<_> = tracees.split_whitespace().collect();
        if to.is_empty() {
            to.push(&own);
        }
        // The process could exit at the same time.
        let _ = Command::new("kill")
            .arg(name)
            .args(to)
            .stderr(Stdio::null())
            .status();
    }

    pub(crate) fn riserd(&self, args: &[&str]) -> Option<String> {
        let output = Command::new(directory().join("riserd"))
            .args(args)
            .arg("--socket")
            .arg(self.socket())
            .output()
            .unwrap();
        let is_ok = output.status.success();
        is_ok.then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!(
                "{}",
                fs::read_to_string(self.directory.join("log")).unwrap_or_default()
            );
        }
        self.kill();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Tries to open a session without waiting.
pub(crate) fn try_log_in(address: &str) -> Option<Client> {
    let to: SocketAddr = address.parse().unwrap();
    let mut client = catch_unwind(|| Client::login_at(to, IQN, 1, None).ok()).ok()??;
    // Clears the unit attention of the new nexus.
    client.command(&[0; 6], false, 0, &[]);
    Some(client)
}

/// Sends PERSISTENT RESERVE OUT and returns the status.
pub(crate) fn reserve_out(client: &mut Client, action: u8, keys: (u64, u64)) -> u8 {
    let (cdb, list) = reserve_list(action, keys);
    client.command(&cdb, true, 24, &list).0
}

/// Creates the CDB and parameter list for PERSISTENT RESERVE OUT.
pub(crate) fn reserve_list(action: u8, keys: (u64, u64)) -> ([u8; 10], [u8; 24]) {
    let mut list = [0; 24];
    list[..8].copy_from_slice(&keys.0.to_be_bytes());
    list[8..16].copy_from_slice(&keys.1.to_be_bytes());
    list[20] = APTPL * u8::from(action == REGISTER_AND_IGNORE);
    ([0x5f, action, KIND, 0, 0, 0, 0, 0, 24, 0], list)
}

/// Sends PERSISTENT RESERVE IN and returns the data after the header.
pub(crate) fn reserve_in(client: &mut Client, action: u8) -> Vec<u8> {
    let cdb = [0x5e, action, 0, 0, 0, 0, 0, 1, 0, 0];
    let (status, data) = client.command(&cdb, false, 256, &[]);
    assert_eq!(status, GOOD);
    data[8..].to_vec()
}

/// Returns all paths in `dir` that are found in the output of `strace -y`.
pub(crate) fn paths_in(trace: &str, dir: &Path) -> BTreeSet<String> {
    let dir = dir.to_str().unwrap();
    let starts = trace.match_indices(dir).map(|(at, _)| &trace[at..]);
    let end = |text: &str| text.find(['"', '>', '(']).unwrap_or(text.len());
    starts.map(|text| text[..end(text)].to_owned()).collect()
}
