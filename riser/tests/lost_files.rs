//! Files of an attachment that are lost or not writable while the disk is in use: its entry in the
//! state directory, its log, and its socket.

#![allow(missing_docs, reason = "a test")]

mod foreign_target;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use foreign_target::{Disk, ForeignTarget, Nbd, Reply};
use riser_testkit::eventually;
use riser_testkit::skip::skip;
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);

/// Damage to a file's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    Full,
    ReadOnly,
    Removed,
}

/// A directory of the attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    State,
    Log,
    Socket,
}

impl Place {
    const ALL: [Self; 3] = [Self::State, Self::Log, Self::Socket];

    const fn name(self) -> &'static str {
        match self {
            Self::State => "state",
            Self::Log => "log",
            Self::Socket => "socket",
        }
    }
}

fn run(tool: &str, args: &[&str]) -> bool {
    let ended = Command::new(tool).args(args).stderr(Stdio::null()).status();
    ended.is_ok_and(|status| status.success())
}

/// A small file system for each directory, unmounted on drop.
struct Home(PathBuf);

impl Home {
    fn new(name: &str) -> Option<Self> {
        let dir = format!("riser-lost-files-{name}-{}", std::process::id());
        let home = Self(std::env::temp_dir().join(dir));
        let mount = |place: Place| {
            let at = home.dir(place);
            fs::create_dir_all(&at).unwrap();
            let at = at.to_str().unwrap();
            run("mount", &["-t", "tmpfs", "-o", "size=256k", "none", at])
        };
        Place::ALL.into_iter().all(mount).then_some(home)
    }

    fn dir(&self, place: Place) -> PathBuf {
        self.0.join(place.name())
    }

    fn path(&self, place: Place, name: &str) -> String {
        self.dir(place).join(name).to_str().unwrap().to_owned()
    }

    /// Runs `riser`; returns the exit status, standard output and standard error.
    fn riser(&self, args: &[&str]) -> (i32, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_riser"));
        command
            .args(args)
            .env("RISER_STATE_DIR", self.dir(Place::State))
            .env_remove("RISER_LOG")
            .stdin(Stdio::null());
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let code = output.status.code().unwrap_or(-1);
        (code, text(&output.stdout), text(&output.stderr))
    }

    fn damage(&self, place: Place, damage: Damage) {
        let dir = self.dir(place);
        match damage {
            Damage::Full => {
                let mut fill = File::create(dir.join("fill")).unwrap();
                while fill.write_all(&[0; 4096]).is_ok() {}
            }
            Damage::ReadOnly => {
                let options = ["-o", "remount,ro", dir.to_str().unwrap()];
                // This fails if a file is open for writing, for example a log.
                if !run("mount", &options) {
                    assert_eq!(place, Place::Log);
                }
            }
            Damage::Removed => {
                for entry in fs::read_dir(&dir).unwrap() {
                    fs::remove_file(entry.unwrap().path()).unwrap();
                }
                run("umount", &["-l", dir.to_str().unwrap()]);
                fs::remove_dir(&dir).unwrap();
            }
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        for place in Place::ALL {
            run("umount", &["-l", self.dir(place).to_str().unwrap()]);
        }
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Offset and first byte of each block written to the target.
type Written = Arc<Mutex<Vec<(u64, u8)>>>;

/// Starts a target that records writes. If the flag is set, it closes the connection once, instead
/// of executing a write.
fn start_target() -> (ForeignTarget, Written, Arc<AtomicBool>) {
    let (written, cut) = (Written::default(), Arc::new(AtomicBool::new(false)));
    let script = {
        let (written, cut) = (Arc::clone(&written), Arc::clone(&cut));
        move |cdb: &[u8], data: &[u8]| {
            let is_write = cdb[0] == 0x8a;
            if is_write && cut.swap(false, Ordering::Relaxed) {
                return Some(Reply {
                    disconnect: true,
                    ..Reply::default()
                });
            }
            if is_write {
                let lba = u64::from_be_bytes(cdb[2..10].try_into().unwrap());
                written.lock().unwrap().push((lba * 512, data[0]));
            }
            None
        }
    };
    let target = ForeignTarget::start(Disk::default(), Box::new(script));
    (target, written, cut)
}

fn check_damage(place: Place, damage: Damage) {
    let case = format!("{}-{damage:?}", place.name());
    let Some(home) = Home::new(&case) else {
        return skip(&case, "nothing may be mounted");
    };
    let (target, written, cut) = start_target();
    let (url, socket) = (target.url.to_string(), home.path(Place::Socket, "nbd"));
    let log = home.path(Place::Log, "log");
    let attach = ["attach", &url, "--nbd", &socket, "--log-file", &log];
    let (code, _, error) = home.riser(&attach);
    assert_eq!(code, 0, "{case}: {error}");
    let list = |home: &Home| -> Value {
        serde_json::from_str(&home.riser(&["list", "-o", "json"]).1).unwrap()
    };
    let pid = list(&home)[0]["pid"].as_u64().unwrap().to_string();
    let mut nbd = Nbd::connect(Path::new(&socket));
    let mut expected = Vec::new();
    for n in 0..20 {
        match n {
            5 => home.damage(place, damage),
            // This changes the state of the link, and logs a line.
            8 | 12 => cut.store(true, Ordering::Relaxed),
            _ => {}
        }
        let offset = u64::from(n) * 4096;
        let error = nbd.execute(Nbd::WRITE, 0, offset, &[n; 4096]);
        assert_eq!(error, 0, "{case}: write {n}");
        expected.push((offset, n));
    }
    assert_eq!(nbd.execute(Nbd::FLUSH, 0, 0, &[]), 0, "{case}");
    assert_eq!(*written.lock().unwrap(), expected, "{case}");
    if place == Place::State {
        let reason = match damage {
            Damage::Full => "No space left",
            Damage::ReadOnly => "Read-only file system",
            Damage::Removed => "No such file",
        };
        eventually("the log names the reason", PATIENCE, || {
            let log = fs::read_to_string(&log).unwrap();
            log.contains("cannot record the state of the link") && log.contains(reason)
        });
    }
    // A disk in use cannot be replaced.
    let (code, _, error) = home.riser(&attach);
    assert_ne!(code, 0, "{case}");
    assert!(!error.is_empty(), "{case}");
    assert_eq!(nbd.execute(Nbd::WRITE, 0, 0, &[99; 4096]), 0, "{case}");

    drop(nbd);
    assert!(run("kill", &[&pid]));
    let process = PathBuf::from(format!("/proc/{pid}"));
    eventually("the process ends", PATIENCE, || !process.exists());
    assert_eq!(written.lock().unwrap().last(), Some(&(0, 99)), "{case}");
    if damage != Damage::ReadOnly {
        assert!(!Path::new(&socket).exists(), "{case}");
    }
}

#[test]
fn damaged_state_directory_stops_no_disk() {
    for damage in [Damage::Full, Damage::ReadOnly, Damage::Removed] {
        check_damage(Place::State, damage);
    }
}

#[test]
fn damaged_log_directory_stops_no_disk() {
    for damage in [Damage::Full, Damage::ReadOnly, Damage::Removed] {
        check_damage(Place::Log, damage);
    }
}

#[test]
fn damaged_socket_directory_stops_no_disk() {
    for damage in [Damage::Full, Damage::ReadOnly, Damage::Removed] {
        check_damage(Place::Socket, damage);
    }
}

/// An attachment that is not listed could be attached a second time.
#[test]
fn attach_fails_if_state_directory_is_damaged() {
    for (damage, reason) in [
        (Damage::Full, "No space left"),
        (Damage::ReadOnly, "Read-only file system"),
    ] {
        let Some(home) = Home::new(&format!("attach-{damage:?}")) else {
            return skip("attach_fails_if_state_directory_is_damaged", "mount");
        };
        let (target, ..) = start_target();
        home.damage(Place::State, damage);
        let socket = home.path(Place::Socket, "nbd");
        let (code, _, error) = home.riser(&["attach", &target.url.to_string(), "--nbd", &socket]);
        assert_ne!(code, 0, "{damage:?}");
        let state = home.dir(Place::State);
        let text = error.replace(['\n', ' ', '│'], "");
        assert!(text.contains(&reason.replace(' ', "")), "{error}");
        assert!(text.contains(state.to_str().unwrap()), "{error}");
        assert!(!Path::new(&socket).exists());
    }
}
