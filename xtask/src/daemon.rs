//! Builds, starts and stops a `riserd` instance for testing.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::process::Process;
use crate::{Failure, root, sh};

/// Maximum time for start and stop. Under valgrind, both can take seconds even if the machine is
/// idle.
const PATIENCE: Duration = Duration::from_secs(60);

/// Profile used for programs and long simulations in tests.
pub(crate) const RELEASE: &str = "release";

/// Profile used for packages and benchmarks.
pub(crate) const DIST: &str = "dist";

/// Logical unit of [`TARGET`].
pub(crate) const URL: &str = "srp://127.0.0.1:5555/0";

/// Target at [`URL`] that exports the backend `disk` to all initiators.
pub(crate) const TARGET: &str = "targets:
  - name: demo
    portals: [{ protocol: srp, listen: 127.0.0.1 }]
    luns: { 0: disk }
    access: open
";

/// Packages with the programs, and with the libraries that `riser run` loads into other programs.
const PACKAGES: [&str; 5] = [
    "riser-target",
    "riser",
    "riser-configfs-emu",
    "riser-rdma-compat",
    "riser-fabric",
];

pub(crate) fn build() -> Result<PathBuf, Failure> {
    build_in(RELEASE)
}

pub(crate) fn build_dist() -> Result<PathBuf, Failure> {
    build_in(DIST)
}

pub(crate) fn build_in(profile: &str) -> Result<PathBuf, Failure> {
    sh::run(&mut building(profile))?;
    let directory = if profile == "dev" { "debug" } else { profile };
    Ok(root().join(".build").join(directory))
}

/// Returns a Cargo command to build the programs and libraries. We always build this same set of
/// packages, because any other set could change features of common dependencies and so cause a full
/// rebuild.
pub(crate) fn building(profile: &str) -> Command {
    let args = ["build", "-q", "--locked", "--profile", profile];
    let packages = PACKAGES.into_iter().flat_map(|name| ["-p", name]);
    sh::cargo(args.into_iter().chain(packages))
}

/// A running `riserd`. The daemon will be killed on drop.
pub(crate) struct Daemon(Process);

impl Daemon {
    /// Starts the program with a configuration file and waits for its ready message, which is sent
    /// to a notification socket as with systemd. Output is written to `log`. The state directory is
    /// created in the same directory as the log, so that we never use the state of an installed
    /// daemon.
    pub(crate) fn start(program: &Path, config: &Path, log: &Path) -> Result<Self, Failure> {
        Self::spawn(serving(program, config), log)
    }

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
        notify.set_nonblocking(true)?;
        command
            .env("NOTIFY_SOCKET", &socket)
            .env("STATE_DIRECTORY", log.with_extension("state"));
        // A test may restart the daemon and needs to keep the previous output.
        let mut process = Process::start_again(command, log)?;
        process.wait_until(PATIENCE, |_| {
            let mut message = [0; 4096];
            let length = notify.recv(&mut message).unwrap_or_default();
            let mut lines = message[..length].split(|&b| b == b'\n');
            lines.any(|line| line == b"READY=1")
        })?;
        Ok(Self(process))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// Sends SIGTERM and waits until the daemon has exited.
    pub(crate) fn stop(mut self) -> Result<(), Failure> {
        match self.0.stop(PATIENCE) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(self.0.failure(&format!("exited with {status}"))),
            None => Err(self.0.failure(&format!("did not stop within {PATIENCE:?}"))),
        }
    }
}

fn serving(program: &Path, config: &Path) -> Command {
    let mut command = sh::cmd(program, ["run", "--config"]);
    command.arg(config);
    command
}
