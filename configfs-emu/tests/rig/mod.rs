//! A tree mounted over a daemon in memory, and a mount namespace in which it is the kernel's.

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

/// Configurations that a daemon was given, in order.
pub(crate) type LiveSource = Arc<Mutex<Vec<Value>>>;

/// A daemon that takes everything and remembers it.
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

/// The configuration that was given last; an empty one before that.
fn last(given: &LiveSource) -> Value {
    let given = given.lock().unwrap();
    let empty = || json!({ "backends": {}, "targets": [] });
    given.last().cloned().unwrap_or_else(empty)
}

/// A mounted tree with a folder of its own.
pub(crate) struct Rig {
    pub(crate) given: LiveSource,
    pub(crate) folder: PathBuf,
    mount: Option<Mount>,
}

impl Rig {
    /// Mounts an empty tree; `None`, and a line for people, where that is not possible.
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

    /// As [`Rig::new`], without the programs of others.
    pub(crate) fn mount(test: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || fs::File::open("/dev/fuse").is_err() {
            skip(test, "it takes root and FUSE");
            return None;
        }
        let folder = std::env::temp_dir().join(format!("riser-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("config")).unwrap();
        fs::create_dir_all(folder.join("etc/backup")).unwrap();
        let given = LiveSource::default();
        let engine = Engine::new(
            "a-secret-of-no-one-else".to_owned(),
            Box::new(Host::new(())),
            Box::new(Memory(given.clone())),
        )
        .unwrap();
        let engine = Arc::new(Mutex::new(engine));
        let mount = Mount::new(engine, &folder.join("config")).unwrap();
        Some(Self {
            given,
            folder,
            mount: Some(mount),
        })
    }

    /// Runs a shell command where the tree is at `/sys/kernel/config`, `modprobe` does nothing, and
    /// what would be saved on this host is saved in the folder.
    pub(crate) fn run(&self, command: &str) -> Output {
        Command::new("unshare")
            .args(["-m", "--propagation", "private", "dbus-run-session", "--"])
            .arg("sh")
            .arg(script("namespace.sh"))
            .arg(&self.folder)
            .arg(command)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap()
    }

    /// As [`Rig::run`], of a command that must succeed; gives what it printed.
    pub(crate) fn must(&self, command: &str) -> String {
        let output = self.run(command);
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}\n{out}\n{err}");
        out
    }

    /// The configuration that the daemon was given last.
    pub(crate) fn last(&self) -> Value {
        last(&self.given)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(mount) = self.mount.take() {
            let _ = mount.unmount();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// What a configuration means, or why it means nothing.
pub(crate) fn parse(document: &Value) -> Result<riser_config::Config, String> {
    riser_config::Config::parse(&document.to_string(), "given").map_err(|e| e.to_string())
}

/// The path of a script beside this file.
pub(crate) fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/rig")
        .join(name)
}
