//! Creates namespaces for all cases ([`isolate`]), and an environment with a network interface and
//! the directory `/dev/infiniband` that doesn't require privileges.
//!
//! All cases use a new network namespace and an empty `/tmp` and `/dev/shm`, so that no other
//! process on this machine can use the same addresses, ports or files.
//!
//! libfabric doesn't connect via loopback interfaces, and UCX only uses a device if there is a
//! character device for it in `/dev/infiniband`, but it never opens this file. We create both in
//! new user, network and mount namespaces, where any user can be root.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::cases::shorten;
use crate::process::Process;
use crate::{Failure, sh};

/// Interface addresses. Each program in a case uses one of them.
pub(super) const ADDRESSES: [Ipv4Addr; 2] =
    [Ipv4Addr::new(10, 17, 0, 1), Ipv4Addr::new(10, 17, 0, 2)];

/// Maximum time to create the namespaces.
const PATIENCE: Duration = Duration::from_secs(10);

/// Creates an interface, using a type supported by the kernel, and a new `/dev` in the directory
/// `$1` that contains the files required by programs. The remaining arguments are addresses.
const SETUP: &str = include_str!("interface.sh");

/// Script that is run in new namespaces to clear `/tmp` and `/dev/shm` and enable the loopback
/// interface. The arguments are directories that should remain visible.
const PRIVATE: &str = include_str!("private.sh");

/// Environment variable that is set for processes in these namespaces.
const IS_PRIVATE: &str = "RISER_XTASK_PRIVATE";

/// Moves this thread, and any processes it will start, to new namespaces. Requires root.
///
/// # Errors
/// Returns an error if this is not allowed by the kernel or the container.
#[allow(unsafe_code, reason = "the standard library has no namespaces")]
pub(super) fn isolate(visible: &[PathBuf]) -> Result<(), Failure> {
    // SAFETY: the thread still shares its descriptors with all other threads.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS) }?;
    let mut setup = sh::cmd("sh", ["-c", PRIVATE, "sh"]);
    sh::output(setup.args(visible)).map(drop)
}

/// Returns a command to run this program again in new namespaces, for users other than root.
/// Returns `None` if this has already been done, or if the kernel doesn't allow users to create
/// namespaces. The caller has to add the program arguments.
pub(super) fn again_isolated(visible: &[PathBuf; 3]) -> Option<Command> {
    const USERS: [&str; 3] = ["--map-root-user", "--net", "--mount"];
    if std::env::var_os(IS_PRIVATE).is_some() {
        return None;
    }
    let mut attempt = sh::cmd("unshare", USERS);
    sh::output(attempt.args(["sh", "-c", PRIVATE, "sh"]).args(visible)).ok()?;
    // The second user namespace is used to drop privileges.
    let script = format!(
        "private() {{\n{PRIVATE}}}\nprivate \"$1\" \"$2\" \"$3\"\nshift 3\n\
         exec unshare --map-user={} --map-group={} -- \"$0\" \"$@\"",
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw()
    );
    let mut command = sh::cmd("unshare", USERS);
    command.args(["sh", "-c", &script]);
    command.arg(std::env::current_exe().ok()?).args(visible);
    command.env(IS_PRIVATE, "1");
    Some(command)
}

/// The namespaces, which are removed on drop.
pub(super) struct Namespace {
    holder: Process,
}

impl Namespace {
    /// Creates the namespaces using a command with the same privileges as the programs that will
    /// use them (`as_user`). `directory` must be an empty directory owned by the same user.
    pub(super) fn new(
        as_user: impl FnOnce(Command) -> Command,
        directory: &Path,
        log: &Path,
    ) -> Result<Self, Failure> {
        let mut unshare = sh::cmd("unshare", ["--user", "--map-root-user", "--net", "--mount"]);
        unshare.args(["--", "sh", "-c", SETUP, "sh"]).arg(directory);
        unshare.args(ADDRESSES.map(|address| address.to_string()));
        let mut holder = Process::start(as_user(unshare), log)?;
        let is_ready = |holder: &Process| holder.output().lines().any(|line| line == "ready");
        holder
            .wait_until(PATIENCE, is_ready)
            .map_err(|why| shorten(&why.to_string()))
            .map_err(|why| format!("cannot create user namespaces: {why}"))?;
        Ok(Self { holder })
    }

    /// Returns a command that runs inside the namespaces. We need to set the directory because a
    /// process that enters them will start in the root directory.
    pub(super) fn enter(&self, directory: &Path, command: &Command) -> Command {
        let target = self.holder.pid().to_string();
        let directory = format!("--wdns={}", directory.display());
        let enter = [
            "--target",
            &target,
            "--user",
            "--net",
            "--mount",
            "--preserve-credentials",
            &directory,
            "--",
        ];
        sh::behind(sh::cmd("nsenter", enter), command)
    }
}
