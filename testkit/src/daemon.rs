//! Runs the daemon in a temporary directory.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use crate::eventually;
use crate::programs::{change_owner, without_rights};

/// Path of `riserd`. Cargo builds the program before it runs the tests in this package.
pub static RISERD: LazyLock<String> = LazyLock::new(|| {
    let test = std::env::current_exe().expect("a test has a name");
    let directory = test.parent().and_then(Path::parent);
    let directory = directory.expect("tests are in a subdirectory of the programs");
    directory.join("riserd").display().to_string()
});

/// A running daemon in a temporary directory.
pub struct Daemon {
    pub process: Child,
    pub dir: PathBuf,
}

impl Daemon {
    pub fn start(name: &str, address: &str) -> Self {
        Self::start_as(name, |daemon| daemon.configure(address, "{ 0: a }"))
    }

    /// Starts a daemon without any targets.
    pub fn start_empty(name: &str) -> Self {
        Self::start_as(name, |daemon| daemon.write("targets: []\n"))
    }

    /// Starts a daemon with this configuration and writes its output to a log.
    pub fn start_logging(name: &str, text: &str) -> Self {
        Self::start_as(name, |daemon| {
            daemon.write(text);
            std::fs::write(daemon.log(), "").unwrap();
        })
    }

    fn start_as(name: &str, configure: impl FnOnce(&Self)) -> Self {
        let dir = std::env::temp_dir().join(format!("riserd-admin-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let daemon = Self {
            process: Command::new("true").spawn().unwrap(),
            dir,
        };
        configure(&daemon);
        let mut daemon = daemon;
        daemon.process.wait().unwrap();
        daemon.run(&[]);
        daemon
    }

    /// Returns a command to run the program [`WITHOUT_RIGHTS`](crate::programs::WITHOUT_RIGHTS),
    /// same as the service, with this configuration. The user will own all files in the directory.
    pub fn command(&self, config: &Path) -> Command {
        change_owner(&self.dir);
        let mut command = without_rights(&*RISERD);
        command.args(["run", "--config"]).arg(config);
        command
    }

    /// Returns the path of the configuration file.
    pub fn config(&self) -> PathBuf {
        self.dir.join("riserd.yaml")
    }

    /// Starts the program and waits until it's ready.
    pub fn run(&mut self, more: &[&str]) {
        let mut command = self.command(&self.config());
        command.args(more).stderr(self.stderr());
        self.spawn(command);
    }

    /// Same, but uses the given command.
    pub fn spawn(&mut self, mut command: Command) {
        let daemon = self;
        let _ = std::fs::remove_file(daemon.socket());
        command
            .env("CREDENTIALS_DIRECTORY", &daemon.dir)
            .env_remove("RUST_LOG");
        daemon.process = command.spawn().unwrap();
        eventually("the daemon serves", Duration::from_secs(20), || {
            daemon.socket().exists()
        });
    }

    /// Kills the daemon immediately and starts it again.
    pub fn restart(&mut self, more: &[&str]) {
        self.kill();
        self.run(more);
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub fn configure(&self, address: &str, luns: &str) {
        let text = format!(
            "backends:\n  a: {{ kind: ram, size: 1MiB }}\n  b: {{ kind: ram, size: 2MiB }}\n\
             targets:\n  - name: demo\n    iqn: iqn.2026-01.com.example:demo\n    portals:\n      \
             - {{ protocol: srp, listen: \"{address}\" }}\n      \
             - {{ protocol: iscsi, listen: \"{address}:3290\" }}\n    \
             luns: {luns}\n    access: open\n"
        );
        self.write(&text);
    }

    /// Writes a configuration and adds the settings used in all tests.
    pub fn write(&self, text: &str) {
        let text = format!(
            "{text}admin: {{ socket: {} }}\nstate: {{ directory: {} }}\nworkers: {{ count: 1 }}\n",
            self.socket().display(),
            self.dir.join("state").display()
        );
        std::fs::write(self.config(), text).unwrap();
    }

    /// Returns the path of the log, if enabled.
    pub fn log(&self) -> PathBuf {
        self.dir.join("riserd.log")
    }

    fn stderr(&self) -> Stdio {
        let file = std::fs::OpenOptions::new().append(true).open(self.log());
        file.map_or_else(|_| Stdio::null(), Stdio::from)
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("admin.sock")
    }

    pub fn run_command(&self, args: &[&str]) -> Output {
        run_command(&self.socket(), args)
    }

    pub fn json(&self, verb: &str) -> serde_json::Value {
        let output = self.run_command(&[verb, "-o", "json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    pub fn http(&self, request: &str) -> String {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        write!(
            stream,
            "{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }
}

pub fn run_command(socket: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(&*RISERD);
    command.args(args).arg("--socket").arg(socket);
    command.output().unwrap()
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
