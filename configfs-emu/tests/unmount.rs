//! Tests unmounting by another process and by a signal.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::Duration;

use riser_testkit::eventually;
use riser_testkit::skip::skip;

/// Shell script to be run in a separate mount namespace, where `riserd-configfs` is mounted over a
/// tmpfs at `config`.
const SCRIPT: &str = r#"
cd "$1"
mount -t tmpfs below config
touch config/below
"$2" --socket "$1/socket" "$1/config" 2> log &
pid=$!
until test -d config/target || ! kill -0 $pid; do sleep 0.02; done
test -d config/target
"#;

/// Maximum time for a script.
const PATIENCE: Duration = Duration::from_secs(60);

/// A directory with the admin socket of a daemon without any targets.
struct Daemon(PathBuf);

impl Daemon {
    fn new(test: &str) -> Option<Self> {
        let namespace = Command::new("unshare").args(["-m", "true"]).status();
        if fs::File::open("/dev/fuse").is_err() || !namespace.is_ok_and(|status| status.success()) {
            skip(test, "it takes root and FUSE");
            return None;
        }
        let dir = std::env::temp_dir().join(format!("riser-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(dir.join("config")).unwrap();
        let listener = UnixListener::bind(dir.join("socket")).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let mut request = [0; 4096];
                let _ = stream.read(&mut request);
                let body = r#"{"backends":{},"targets":[]}"#;
                let length = body.len();
                let response = format!(
                    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nETag: \"1\"\r\n\
                     Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
                );
                let _ = stream.write_all(response.as_bytes());
            }
        });
        Some(Self(dir))
    }

    /// Runs a script after the tree was mounted. All of its mounts are removed when it exits.
    fn run(&self, script: &str) -> Output {
        let mut shell = Command::new("unshare");
        shell.args([
            "-m",
            "--propagation",
            "private",
            "--fork",
            "--pid",
            "--kill-child",
        ]);
        shell.args(["sh", "-exc", &format!("{SCRIPT}{script}"), "sh"]);
        shell
            .arg(&self.0)
            .arg(env!("CARGO_BIN_EXE_riserd-configfs"));
        shell.stdout(fs::File::create(self.0.join("out")).unwrap());
        shell.stderr(fs::File::create(self.0.join("errors")).unwrap());
        let mut child = Ending(shell.spawn().unwrap());
        let mut status = None;
        eventually("the script ends", PATIENCE, || {
            status = child.0.try_wait().unwrap();
            status.is_some()
        });
        let read = |name: &str| fs::read(self.0.join(name)).unwrap_or_default();
        Output {
            status: status.unwrap(),
            stdout: read("out"),
            stderr: [read("errors"), read("log")].concat(),
        }
    }

    fn must(&self, script: &str) {
        let output = self.run(script);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{script}\n{errors}");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(Path::new(&self.0));
    }
}

/// A process that is killed on drop.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn lower_mount_survives_foreign_unmount() {
    let Some(daemon) = Daemon::new("configfs-unmounted") else {
        return;
    };
    daemon.must("umount config; wait $pid; test -e config/below");
}

#[test]
fn signal_unmounts_only_tree() {
    for signal in ["TERM", "INT"] {
        let Some(daemon) = Daemon::new(&format!("configfs-{signal}")) else {
            return;
        };
        daemon.must(&format!(
            "kill -{signal} $pid; wait $pid; test -e config/below"
        ));
    }
}

#[test]
fn signal_unmounts_busy_tree() {
    let Some(daemon) = Daemon::new("configfs-busy") else {
        return;
    };
    daemon.must("cd config/target; kill -TERM $pid; wait $pid; cd /; test -e \"$1/config/below\"");
}

#[test]
fn signal_keeps_upper_mount() {
    let Some(daemon) = Daemon::new("configfs-over") else {
        return;
    };
    daemon.must(
        "mount -t tmpfs over config; touch config/over; kill -TERM $pid; wait $pid; test -e config/over",
    );
}
