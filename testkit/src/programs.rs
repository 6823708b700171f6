//! `riserd` and `riser` as processes, tools that judge them, and tests that cannot run here.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::lchown;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Once};

pub use crate::skip::skip;

/// The variable that says that the programs are up to date: who runs the tests has built them.
pub const ARE_BUILT: &str = "RISER_PROGRAMS_ARE_BUILT";

/// The signal that nothing can catch.
const SIGKILL: i32 = 9;

/// The folder of this build's programs, which are brought up to date once, unless [`ARE_BUILT`] is
/// set.
///
/// Cargo waits for any other Cargo that works in the same folder, so `cargo xtask test`, which
/// lints while tests run, sets it.
#[must_use]
pub fn folder() -> PathBuf {
    static BUILT: Once = Once::new();
    let test = std::env::current_exe().expect("a test has a name");
    let folder = test
        .parent()
        .and_then(Path::parent)
        .expect("tests lie in a folder below the programs");
    BUILT.call_once(|| {
        if std::env::var_os(ARE_BUILT).is_some() {
            return;
        }
        let mut cargo = Command::new(env!("CARGO"));
        // With `--examples`, though there are none, dependencies have the features that they have
        // in tests, so that nothing is built a second time.
        cargo.args(["build", "-q", "--bins", "--examples"]);
        for package in ["riser-target", "riser-initiator", "riser-configfs-emu"] {
            cargo.args(["-p", package]);
        }
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(cargo.status().expect("cargo runs").success(), "no programs");
    });
    folder.to_owned()
}

/// A user that owns nothing else.
const NOBODY: u32 = 65534;

/// Words before a program that run it as a user without capabilities, with as much locked memory as
/// the service may have if this process may give it so much. None where it is not root, or where
/// that user cannot run programs where they are.
pub static WITHOUT_RIGHTS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let user = format!(
        "setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups --inh-caps=-all \
         --bounding-set=-all"
    );
    let memory = "prlimit --memlock=unlimited:unlimited";
    // In a folder below that of the programs, which need not be built yet.
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

/// A program, about to run [`WITHOUT_RIGHTS`].
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

/// Gives a path, and all that is below it, to programs [`WITHOUT_RIGHTS`].
///
/// # Panics
/// If it is not there.
pub fn give(path: &Path) {
    if WITHOUT_RIGHTS.is_empty() {
        return;
    }
    lchown(path, Some(NOBODY), Some(NOBODY)).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    if path.is_dir() && !path.is_symlink() {
        for entry in fs::read_dir(path).unwrap() {
            give(&entry.unwrap().path());
        }
    }
}

/// The first of these tools that is not installed.
#[must_use]
pub fn missing<'a>(tools: &[&'a str]) -> Option<&'a str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let folders: Vec<PathBuf> = std::env::split_paths(&path).chain(sbin).collect();
    let is_there = |tool: &str| folders.iter().any(|f| f.join(tool).is_file());
    tools.iter().copied().find(|tool| !is_there(tool))
}

/// Runs a tool that must succeed; gives its standard output.
pub fn tool(name: &str, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> String {
    let mut command = Command::new(name);
    command.args(args);
    succeeded(&mut command)
}

/// Runs a command that must succeed; gives its standard output.
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

/// A `riserd` of its own with one disk, and `riser` beside it.
pub struct Pair {
    /// A folder that goes with this value.
    pub dir: PathBuf,
    programs: PathBuf,
    daemon: Option<Child>,
    network: u8,
    has_rights: bool,
}

impl Pair {
    /// Serves `backend`, the text of a backend of riserd's configuration, at 127.0.`network`.1.
    #[must_use]
    pub fn new(network: u8, backend: &str) -> Self {
        let portals = format!("[{{ protocol: srp, listen: 127.0.{network}.1 }}]");
        Self::with_target(network, backend, &format!("portals: {portals}"))
    }

    /// Serves `backend` on the target that these lines of riserd's configuration describe, with its
    /// portals, beside its name and its one logical unit: to all initiators, unless they have rules.
    #[must_use]
    pub fn with_target(network: u8, backend: &str, target: &str) -> Self {
        Self::start(network, backend, target, false)
    }

    /// The same with a riserd that has the rights of this process, for what only its user may open.
    #[must_use]
    pub fn with_rights(network: u8, backend: &str, target: &str) -> Self {
        Self::start(network, backend, target, true)
    }

    fn start(network: u8, backend: &str, target: &str, has_rights: bool) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let programs = folder();
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
            give(&pair.dir);
        }
        pair.serve();
        pair
    }

    /// Starts riserd, again if it was ended: [`WITHOUT_RIGHTS`], as the service is, unless it has
    /// them.
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

    /// The number of riserd's process, while it runs.
    #[must_use]
    pub fn process(&self) -> Option<u32> {
        self.daemon.as_ref().map(Child::id)
    }

    /// Kills riserd. Returns whether it ended by that, rather than before.
    pub fn kill(&mut self) -> bool {
        let Some(mut daemon) = self.daemon.take() else {
            return false;
        };
        let _ = daemon.kill();
        let status = daemon.wait();
        status.is_ok_and(|status| status.signal() == Some(SIGKILL))
    }

    /// Asks riserd to end, as a service manager does.
    pub fn ask_to_end(&self) {
        if let Some(id) = self.process() {
            tool("kill", ["-TERM", &id.to_string()]);
        }
    }

    /// Asks riserd to end and waits until it has.
    pub fn terminate(&mut self) {
        self.ask_to_end();
        if let Some(mut daemon) = self.daemon.take() {
            let status = daemon.wait().unwrap();
            assert!(status.success(), "riserd: {status}");
        }
    }

    /// The address of its disk.
    #[must_use]
    pub fn url(&self) -> String {
        format!("srp://127.0.{}.1/0", self.network)
    }

    /// A path within [`Self::dir`].
    #[must_use]
    pub fn path(&self, name: &str) -> String {
        self.dir.join(name).to_str().unwrap().to_owned()
    }

    /// `riser` with these arguments.
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

    /// Runs `riser`, which must succeed.
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
