//! A `riserd` of our own: built, started, waited for and stopped.

use std::fs::File;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Failure, root, sh};

/// Longest time for a start or a stop. Under valgrind, either takes seconds on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The profile of programs and long simulations in tests.
pub(crate) const OPTIMIZED: &str = "optimized";

/// The logical unit of [`TARGET`].
pub(crate) const URL: &str = "srp://127.0.0.1:5555/0";

/// A target at [`URL`] that serves the backend `disk` to all initiators.
pub(crate) const TARGET: &str = "targets:
  - name: demo
    portals: [{ protocol: srp, listen: 127.0.0.1 }]
    luns: { 0: disk }
    access: open
";

/// Packages of the programs, and of the libraries that `riser run` starts others with.
const PACKAGES: [&str; 6] = [
    "riser-target",
    "riser-initiator",
    "riser-configfs-emu",
    "riser-drop-in",
    "riser-fabric",
    "riser-preload",
];

/// Builds the programs and libraries as they are tested; returns their folder.
pub(crate) fn build() -> Result<PathBuf, Failure> {
    build_in(OPTIMIZED)
}

/// Builds them as they are shipped, for figures.
pub(crate) fn build_release() -> Result<PathBuf, Failure> {
    build_in("release")
}

/// Builds them in a profile of Cargo's.
pub(crate) fn build_in(profile: &str) -> Result<PathBuf, Failure> {
    sh::run(&mut building(profile))?;
    let folder = if profile == "dev" { "debug" } else { profile };
    Ok(root().join(".build").join(folder))
}

/// Cargo, about to build the programs and libraries: always these, as others beside them would
/// change features of crates that all depend on, and have everything built once more.
pub(crate) fn building(profile: &str) -> Command {
    let args = ["build", "-q", "--locked", "--profile", profile];
    let packages = PACKAGES.into_iter().flat_map(|name| ["-p", name]);
    sh::cargo(args.into_iter().chain(packages))
}

/// A running `riserd`; it is stopped when the value goes.
pub(crate) struct Daemon {
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts the program with a configuration file and waits until it says that it serves, through
    /// the notification socket that systemd would give it. Its log goes to `log`. Its state goes
    /// beside the log, so that it never uses that of a daemon installed on this machine.
    pub(crate) fn start(program: &Path, config: &Path, log: &Path) -> Result<Self, Failure> {
        Self::spawn(serving(program, config), log)
    }

    /// The same behind another program that becomes it, as valgrind does.
    pub(crate) fn start_behind(
        tool: Command,
        program: &Path,
        config: &Path,
        log: &Path,
    ) -> Result<Self, Failure> {
        Self::spawn(sh::behind(tool, &serving(program, config)), log)
    }

    fn spawn(command: Command, log: &Path) -> Result<Self, Failure> {
        let mut command = sh::ending_with_us(command, "TERM");
        let socket = log.with_extension("notify");
        let _ = std::fs::remove_file(&socket);
        let notify = UnixDatagram::bind(&socket)?;
        // Short, since a daemon that ends at its start never sends anything: its exit is looked
        // for between two reads.
        notify.set_read_timeout(Some(Duration::from_millis(200)))?;
        // Appended: a case that starts the daemon again must not lose what it said before.
        let out = File::options().create(true).append(true).open(log)?;
        let child = command
            .env("NOTIFY_SOCKET", &socket)
            .env("STATE_DIRECTORY", log.with_extension("state"))
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .spawn()
            .map_err(|e| format!("{}: {e}", command.get_program().display()))?;
        let mut daemon = Self {
            child,
            log: log.to_path_buf(),
        };
        let started = Instant::now();
        let mut message = [0; 4096];
        while started.elapsed() < PATIENCE {
            if let Ok(n) = notify.recv(&mut message)
                && message[..n]
                    .split(|&b| b == b'\n')
                    .any(|line| line == b"READY=1")
            {
                return Ok(daemon);
            }
            if let Some(status) = daemon.child.try_wait()? {
                return Err(
                    format!("riserd ended at its start ({status}):\n{}", daemon.tail()).into(),
                );
            }
        }
        Err(format!(
            "riserd was not ready within {PATIENCE:?}:\n{}",
            daemon.tail()
        )
        .into())
    }

    /// Process id of the daemon.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks it to stop and waits until it has.
    pub(crate) fn stop(mut self) -> Result<(), Failure> {
        terminate(self.child.id());
        let asked = Instant::now();
        while asked.elapsed() < PATIENCE {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => {
                    return Err(format!("riserd ended with {status}:\n{}", self.tail()).into());
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        Err(format!("riserd did not stop within {PATIENCE:?}:\n{}", self.tail()).into())
    }

    fn tail(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn serving(program: &Path, config: &Path) -> Command {
    let mut command = sh::cmd(program, ["run", "--config"]);
    command.arg(config);
    command
}

/// Sends SIGTERM to a process that we started.
pub(crate) fn terminate(pid: u32) {
    let _ = sh::output(&mut sh::cmd("kill", ["-TERM", &pid.to_string()]));
}
