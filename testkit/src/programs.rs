//! Runs `riserd`, `riser` and the tools used to check them, and handles tests that can't run here.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::lchown;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Once};

pub use crate::skip::skip;

/// If this variable is set, the programs have already been built by the caller.
pub const ARE_BUILT: &str = "RISER_PROGRAMS_ARE_BUILT";

/// This signal can't be caught.
const SIGKILL: i32 = 9;

/// Returns the directory of the programs. They are built on the first call, unless [`ARE_BUILT`] is
/// set.
///
/// Cargo waits if another instance uses the same directory, so `cargo xtask test` sets this
/// variable because it runs the lints at the same time as the tests.
#[must_use]
pub fn directory() -> PathBuf {
    static BUILT: Once = Once::new();
    let test = std::env::current_exe().expect("a test has a name");
    let directory = test
        .parent()
        .and_then(Path::parent)
        .expect("tests are in a subdirectory of the programs");
    BUILT.call_once(|| {
        if std::env::var_os(ARE_BUILT).is_some() {
            return;
        }
        let mut cargo = Command::new(env!("CARGO"));
        // There are no examples, but we need `--examples` so that dependencies use the same
        // features as in tests and don't have to be built again.
        cargo.args(["build", "-q", "--bins", "--examples"]);
        for package in ["riser-target", "riser", "riser-configfs-emu"] {
            cargo.args(["-p", package]);
        }
        if directory.ends_with("release") {
            cargo.arg("--release");
        }
        cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(cargo.status().expect("cargo runs").success(), "no programs");
    });
    directory.to_owned()
}

/// A user that doesn't own any other files.
const NOBODY: u32 = 65534;

/// Command prefix to run a program as a user without capabilities. If we are allowed to, this also
/// sets the locked memory limit to the value used for the service. Empty if we are not root, or if
/// this user can't run programs from their directory.
pub static WITHOUT_RIGHTS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let user = format!(
        "setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups --inh-caps=-all \
         --bounding-set=-all"
    );
    let memory = "prlimit --memlock=unlimited:unlimited";
    // This test is in a subdirectory of the programs, which may not have been built yet.
    let test = std::env::current_exe().expect("a test has a name");
    let can_run = |words: &Vec<String>| {
        let mut attempt = Command::new(&words[0]);
        attempt.args(&words[1..]).args(["test", "-x"]).arg(&test);
        let output = attempt.stdin(Stdio::null()).output();
        output.is_ok_and(|output| output.status.success())
    };
    let ways = [format!("{memory} {user}"), user];
    let mut ways = ways.map(|way| way.split(' ').map(str::to_owned).collect());
    let way = ways.iter_mut().find(|way| can_run(way));
    way.map(std::mem::take).unwrap_or_default()
});

/// Returns a command to run a program with the prefix [`WITHOUT_RIGHTS`].
#[must_use]
pub fn without_rights(program: impl AsRef<OsStr>) -> Command {
    match &WITHOUT_RIGHTS[..] {
        [] => Command::new(program),
        [first, rest @ ..] => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
    }
}

/// Changes the owner of a path, including everything below it, to the user in [`WITHOUT_RIGHTS`].
///
/// # Panics
/// Panics if the path doesn't exist.
pub fn change_owner(path: &Path) {
    if WITHOUT_RIGHTS.is_empty() {
        return;
    }
    lchown(path, Some(NOBODY), Some(NOBODY)).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    if path.is_dir() && !path.is_symlink() {
        for entry in fs::read_dir(path).unwrap() {
            change_owner(&entry.unwrap().path());
        }
    }
}

/// Returns the first of these tools that is not installed.
#[must_use]
pub fn missing<'a>(tools: &[&'a str]) -> Option<&'a str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let directories: Vec<PathBuf> = std::env::split_paths(&path).chain(sbin).collect();
    let is_there = |tool: &str| directories.iter().any(|f| f.join(tool).is_file());
    tools.iter().copied().find(|tool| !is_there(tool))
}

/// Runs a tool, which must be successful, and returns its standard output.
pub fn tool(name: &str, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> String {
    let mut command = Command::new(name);
    command.args(args);
    succeeded(&mut command)
}

/// Runs a command, which must be successful, and returns its standard output.
pub fn succeeded(command: &mut Command) -> String {
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = String::from_utf8_lossy(&stdout).into_owned();
    let errors = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{command:?}: {status}\n{text}\n{errors}");
    text
}

/// A `riserd` with a single disk, along with `riser`.
pub struct Pair {
    /// Directory that is removed on drop.
    pub dir: PathBuf,
    programs: PathBuf,
    daemon: Option<Child>,
    network: u8,
    has_rights: bool,
}

impl Pair {
    /// Starts a daemon on 127.0.`network`.1 that exports `backend`, which is part of the riserd
    /// configuration.
    #[must_use]
    pub fn new(network: u8, backend: &str) -> Self {
        let portals = format!("[{{ protocol: srp, listen: 127.0.{network}.1 }}]");
        Self::with_target(network, backend, &format!("portals: {portals}"))
    }

    /// Same, but also sets the target using the given lines of the configuration. These should
    /// contain the portals, in addition to the name and a single logical unit. All initiators have
    /// access if there are no rules.
    #[must_use]
    pub fn with_target(network: u8, backend: &str, target: &str) -> Self {
        Self::start(network, backend, target, false)
    }

    /// Same, but runs riserd as the current user, which is needed to open files owned by it.
    #[must_use]
    pub fn with_rights(network: u8, backend: &str, target: &str) -> Self {
        Self::start(network, backend, target, true)
    }

    fn start(network: u8, backend: &str, target: &str, has_rights: bool) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let programs = directory();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("riser-pair-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir(&dir).unwrap();
        let backend = backend.replace("DIR", dir.to_str().unwrap());
        let access = match target.contains("access:") {
            true => "",
            false => "    access: open\n",
        };
        let text = format!(
            "backends:\n  disk: {backend}\n\
             targets:\n  - name: t\n    {}\n    luns: {{ 0: disk }}\n{access}\
             state: {{ directory: {} }}\n",
            target.replace('\n', "\n    "),
            dir.join("riserd-state").display()
        );
        fs::write(dir.join("riserd.yaml"), text).unwrap();
        let mut pair = Self {
            dir,
            programs,
            daemon: None,
            network,
            has_rights,
        };
        if !has_rights {
            change_owner(&pair.dir);
        }
        pair.serve();
        pair
    }

    /// Starts riserd, or starts it again if it was stopped. Like the service, this uses
    /// [`WITHOUT_RIGHTS`] unless it should run as the current user.
    pub fn serve(&mut self) {
        let log = self.dir.join("riserd.log");
        let log = File::options().create(true).append(true).open(log).unwrap();
        let riserd = self.programs.join("riserd");
        let mut daemon = match self.has_rights {
            true => Command::new(riserd),
            false => without_rights(riserd),
        };
        let daemon = daemon
            .args(["run", "--config"])
            .arg(self.dir.join("riserd.yaml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.daemon = Some(daemon);
    }

    /// Returns the process ID of riserd if it's running.
    #[must_use]
    pub fn process(&self) -> Option<u32> {
        self.daemon.as_ref().map(Child::id)
    }

    /// Kills riserd. Returns false if the process had already exited.
    pub fn kill(&mut self) -> bool {
        let Some(mut daemon) = self.daemon.take() else {
            return false;
        };
        let _ = daemon.kill();
        let status = daemon.wait();
        status.is_ok_and(|status| status.signal() == Some(SIGKILL))
    }

    /// Sends SIGTERM to riserd, same as a service manager.
    pub fn send_sigterm(&self) {
        if let Some(id) = self.process() {
            tool("kill", ["-TERM", &id.to_string()]);
        }
    }

    /// Sends SIGTERM to riserd and waits until it has exited.
    pub fn terminate(&mut self) {
        self.send_sigterm();
        if let Some(mut daemon) = self.daemon.take() {
            let status = daemon.wait().unwrap();
            assert!(status.success(), "riserd: {status}");
        }
    }

    /// Returns the address of the disk.
    #[must_use]
    pub fn url(&self) -> String {
        format!("srp://127.0.{}.1/0", self.network)
    }

    /// Returns a path in [`Self::dir`].
    #[must_use]
    pub fn path(&self, name: &str) -> String {
        self.dir.join(name).to_str().unwrap().to_owned()
    }

    /// Returns a `riser` command with these arguments.
    #[must_use]
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join("riser"));
        command
            .args(args)
            .env("RISER_STATE_DIR", self.dir.join("state"))
            .env_remove("RISER_LOG")
            .env_remove("RISER_INJECT")
            .env_remove("RISER_PROVIDER")
            .env_remove("RISER_CHAP_PASSWORD")
            .env_remove("RISER_CHAP_TARGET_PASSWORD")
            .stdin(Stdio::null());
        command
    }

    /// Runs `riser`, which must be successful.
    pub fn riser(&self, args: &[&str]) -> String {
        succeeded(&mut self.command(args))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = fs::read_to_string(self.dir.join("riserd.log")).unwrap_or_default();
            eprintln!("riserd: {log}");
        }
        for id in ["0", "1", "2"] {
            let mut detach = self.command(&["detach", id, "--force"]);
            let _ = detach.stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
        self.kill();
        let _ = fs::remove_dir_all(&self.dir);
    }
}
