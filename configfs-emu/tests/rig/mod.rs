//! A tree mounted with an in-memory daemon, and a mount namespace in which it replaces the kernel's
//! tree.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use riser_configfs_emu::engine::{ApplyError, Daemon, Engine};
use riser_configfs_emu::fuse::Mount;
use riser_configfs_emu::host::Host;
use serde_json::{Value, json};

pub(crate) use riser_testkit::skip::skip;

/// Configurations sent to a daemon, in order.
pub(crate) type LiveSource = Arc<Mutex<Vec<Value>>>;

/// A daemon that accepts and stores every configuration.
struct Memory(LiveSource);

impl Daemon for Memory {
    fn document(&mut self) -> Result<Value, ApplyError> {
        Ok(last(&self.0))
    }

    fn apply(&mut self, document: &Value) -> Result<(), ApplyError> {
        self.0.lock().unwrap().push(document.clone());
        Ok(())
    }
}

/// Returns the last configuration, or an empty configuration if nothing was sent yet.
fn last(given: &LiveSource) -> Value {
    let given = given.lock().unwrap();
    let empty = || json!({ "backends": {}, "targets": [] });
    given.last().cloned().unwrap_or_else(empty)
}

/// A mounted tree and its directory.
pub(crate) struct Rig {
    pub(crate) given: LiveSource,
    pub(crate) directory: PathBuf,
    mount: Option<Mount>,
}

impl Rig {
    /// Mounts an empty tree. If this is not possible, prints a message and returns `None`.
    pub(crate) fn new(test: &str) -> Option<Self> {
        let rtslib = Command::new("/usr/bin/python3")
            .args(["-c", "import rtslib_fb"])
            .status();
        let namespace = Command::new("unshare").args(["-m", "true"]).status();
        let is_possible = Path::new("/usr/bin/targetcli").exists()
            && Path::new("/usr/bin/dbus-run-session").exists()
            && [rtslib, namespace]
                .into_iter()
                .all(|s| s.is_ok_and(|s| s.success()));
        if !is_possible {
            skip(
                test,
                "it takes root, FUSE, dbus, python3-rtslib-fb and targetcli-fb",
            );
            return None;
        }
        Self::mount(test)
    }

    /// Same as [`Rig::new`], but doesn't require external programs.
    pub(crate) fn mount(test: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || fs::File::open("/dev/fuse").is_err() {
            skip(test, "it takes root and FUSE");
            return None;
        }
        let directory = std::env::temp_dir().join(format!("riser-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(directory.join("config")).unwrap();
        fs::create_dir_all(directory.join("etc/backup")).unwrap();
        let given = LiveSource::default();
        let engine = Engine::new(
            "a-secret-of-no-one-else".to_owned(),
            Box::new(Host::new(())),
            Box::new(Memory(given.clone())),
        )
        .unwrap();
        let engine = Arc::new(Mutex::new(engine));
        let mount = Mount::new(engine, &directory.join("config")).unwrap();
        Some(Self {
            given,
            directory,
            mount: Some(mount),
        })
    }

    /// Runs a shell command with the tree mounted at `/sys/kernel/config`. `modprobe` does nothing,
    /// and files that should be saved on this host are written to the test directory.
    pub(crate) fn run(&self, command: &str) -> Output {
        Command::new("unshare")
            .args(["-m", "--propagation", "private", "dbus-run-session", "--"])
            .arg("sh")
            .arg(script("namespace.sh"))
            .arg(&self.directory)
            .arg(command)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap()
    }

    /// Same as [`Rig::run`], but the command must be successful. Returns its output.
    pub(crate) fn must(&self, command: &str) -> String {
        let output = self.run(command);
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}\n{out}\n{err}");
        out
    }

    /// Returns the last configuration sent to the daemon.
    pub(crate) fn last(&self) -> Value {
        last(&self.given)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(mount) = self.mount.take() {
            let _ = mount.unmount();
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Parses a configuration. Returns the error if it's not valid.
pub(crate) fn parse(document: &Value) -> Result<riser_config::Config, String> {
    riser_config::Config::parse(&document.to_string(), "given").map_err(|e| e.to_string())
}

/// Returns the path of a script in this directory.
pub(crate) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/rig")
        .join(name)
}
