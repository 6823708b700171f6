//! The state directory: files that are replaced as a whole, also if the process is killed
//! meanwhile.
//!
//! ```text
//! hidden file written → made durable → takes the name → the directory made durable
//!                                                              └─ not: the old file is put back
//! ```
//! If the process is killed at any of these steps, the name refers to the complete old file or the
//! complete new one. After a replacement that fails it refers to the old one, so the caller and the
//! next start agree. Hidden files have fixed names, so leftovers are overwritten by the next
//! replacement.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use riser_scsi::config::Identity;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::holder;
use crate::patience::until_free;

/// The file that says that the daemon which has the directory is ending.
const ENDING: &str = "ending";

/// Longest time for which a daemon may end: its sessions, then the last flush.
const LAST_FLUSH: Duration = Duration::from_secs(90);

/// A directory of ours alone: no other daemon uses it as long as this value lives.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    /// Keeps the lock held.
    _lock: File,
}

/// Field that a file of any version has.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// A file as it is written.
#[derive(Serialize)]
struct Versioned<'a, T> {
    version: u32,
    #[serde(flatten)]
    content: &'a T,
}

/// Default directory: `$STATE_DIRECTORY`, which a service manager sets; for root
/// `/var/lib/riserd`; none for others.
#[must_use]
pub fn default_path() -> Option<PathBuf> {
    if let Some(dirs) = std::env::var_os("STATE_DIRECTORY").filter(|v| !v.is_empty()) {
        return std::env::split_paths(&dirs).next();
    }
    let is_root = rustix::process::geteuid().is_root();
    is_root.then(|| PathBuf::from("/var/lib/riserd"))
}

impl StateDir {
    /// Takes a directory, which is made if need be.
    ///
    /// # Errors
    /// `AddrInUse` if another daemon has it, and does not end within seconds; those of the file
    /// system.
    pub fn take(path: &Path) -> io::Result<Self> {
        make_durable(path, &mut sync_dir)?;
        // The directory itself is locked, so that no lock file is left behind or removed under a
        // lock.
        let lock = File::open(path)?;
        let attempt = || match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(())),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(io::Error::from(error)),
        };
        let ending = path.join(ENDING);
        // A bound even though the file says so: a daemon that was killed while it ended leaves the
        // file behind.
        let until = Instant::now() + LAST_FLUSH;
        let mut locked = until_free(attempt)?;
        if locked.is_none() && ending.exists() {
            let directory = path.display();
            tracing::info!(%directory, "waiting for the daemon before, which is ending");
        }
        // It flushes its backends first.
        while locked.is_none() && ending.exists() && Instant::now() < until {
            locked = until_free(attempt)?;
        }
        if locked.is_none() {
            let holder = holder::of_file(path);
            let holder = holder.map_or("another daemon".to_owned(), |holder| holder.to_string());
            let why = format!("{holder} uses it");
            return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
        }
        // With the lock held: the file is of a daemon that is gone, and the next one must not wait
        // for us by it.
        match remove_if_there(&ending) {
            // Even if there is none. What is kept there can be read all the same.
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                let directory = path.display();
                tracing::warn!(%directory, %error, "nothing can be kept");
            }
            removed => removed?,
        }
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
        })
    }

    /// The daemon is ending: the next one waits for that, instead of refusing to start.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn note_ending(&self) -> io::Result<()> {
        File::create(self.path.join(ENDING)).map(drop)
    }

    /// Path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes of a file; `None` where there is none.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        read(&self.path.join(name))
    }

    /// Content of a file in this version of its form; `None` where there is none.
    ///
    /// # Errors
    /// Those of the file system; or it is damaged, or of another version. All name the file.
    pub fn load<T: DeserializeOwned>(&self, name: &str, version: u32) -> io::Result<Option<T>> {
        load(&self.path.join(name), version)
    }

    /// Replaces a file by this version of its form.
    ///
    /// # Errors
    /// As [`StateDir::replace`].
    pub fn save<T: Serialize>(&self, name: &str, version: u32, content: &T) -> io::Result<()> {
        let file = Versioned { version, content };
        self.replace(name, &serde_json::to_vec_pretty(&file)?)
    }

    /// Removes a file, if it is there.
    ///
    /// # Errors
    /// Those of the file system. The file may or may not exist afterwards.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        remove_if_there(&self.path.join(name))?;
        sync_dir(&self.path)
    }

    /// Replaces a file.
    ///
    /// # Errors
    /// Those of the file system. The file is the old one then, as far as the file system can still
    /// be changed at all.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.path.join(name);
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        replace(&path, bytes).map_err(named)
    }
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Content of a file of a state directory in this version of its form, also while another process
/// has the directory; `None` where there is none.
///
/// # Errors
/// As [`StateDir::load`].
pub fn load<T: DeserializeOwned>(path: &Path, version: u32) -> io::Result<Option<T>> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    let Some(bytes) = read(path).map_err(named)? else {
        return Ok(None);
    };
    let error = |why: String| {
        let why = format!("{}: {why}", path.display());
        io::Error::new(io::ErrorKind::InvalidData, why)
    };
    let damaged = |e: serde_json::Error| error(format!("the file is damaged ({e})"));
    // The version alone first: the fields of another version need not parse as ours.
    let found: Version = serde_json::from_slice(&bytes).map_err(damaged)?;
    if found.version != version {
        let found = found.version;
        return Err(error(format!(
            "the file is of another riserd (its form has version {found}, here it has {version})"
        )));
    }
    let content = serde_json::from_slice(&bytes).map_err(damaged)?;
    Ok(Some(content))
}

/// Adds to the error of [`load`] what can be done about a file that is damaged or of another
/// version, and what is so without the file.
#[must_use]
pub fn advise(error: io::Error, without: &str) -> io::Error {
    // What the file system refuses says itself what is wrong, and the file may be sound.
    if error.kind() != io::ErrorKind::InvalidData {
        return error;
    }
    let advice = format!(
        "{error}; restore it from a backup, or move it away and start riserd again: {without}"
    );
    io::Error::new(error.kind(), advice)
}

/// The name of the file for something of a logical unit, by its world-wide name.
#[must_use]
pub fn file_of_unit(what: &str, unit: &Identity) -> String {
    let naa = unit.naa.bytes();
    let naa: String = naa.iter().map(|b| format!("{b:02x}")).collect();
    format!("{what}-{naa}.json")
}

/// Replaces a file, which only its owner may read.
///
/// # Errors
/// As [`StateDir::replace`].
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_by_steps(path, bytes, None, &mut |_| Ok(()), &mut sync_dir)
}

/// Users that may use a file.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// User id and group id.
    pub owner: (u32, u32),
    /// Permission bits of the file.
    pub mode: u32,
}

/// Replaces a file, for those who are named here.
///
/// # Errors
/// As [`StateDir::replace`]; this process may not give files to that owner.
pub fn replace_as(path: &Path, bytes: &[u8], access: &Access) -> io::Result<()> {
    let access = Some(access);
    replace_by_steps(path, bytes, access, &mut |_| Ok(()), &mut sync_dir)
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Makes a directory, and those above it that are missing. With a name that is lost with the
/// machine's power, all that was made durable below it would be lost as well. So the names of this
/// file system are synced even if they were there: the start that made them may have failed before.
fn make_durable(path: &Path, sync: &mut dyn FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    let device = fs::metadata(path)?.dev();
    for parent in path.ancestors().skip(1) {
        let parent = if parent.as_os_str().is_empty() {
            Path::new(".")
        } else {
            parent
        };
        if fs::metadata(parent)?.dev() != device {
            break;
        }
        match sync(parent) {
            // One that may be written to and not read: nothing can be done there.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            synced => synced?,
        }
    }
    Ok(())
}

/// Removes a file, if it is there.
fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Stage of a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Created,
    HalfWritten,
    Written,
    Synced,
    Renamed,
}

/// `at` is called after every step; an error that it returns ends the replacement there.
fn replace_by_steps(
    path: &Path,
    bytes: &[u8],
    access: Option<&Access>,
    at: &mut dyn FnMut(Step) -> io::Result<()>,
    sync: &mut dyn FnMut(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let beside = |end| {
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(end);
        parent.join(hidden)
    };
    let (hidden, old) = (beside(".new"), beside(".old"));
    // A mode is given to new files only.
    remove_if_there(&hidden)?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&hidden)?;
    if let Some(access) = access {
        let (user, group) = access.owner;
        fchown(&file, Some(user), Some(group))?;
        file.set_permissions(Permissions::from_mode(access.mode))?;
    }
    at(Step::Created)?;
    let (first, rest) = bytes.split_at(bytes.len() / 2);
    file.write_all(first)?;
    at(Step::HalfWritten)?;
    file.write_all(rest)?;
    at(Step::Written)?;
    file.sync_all()?;
    at(Step::Synced)?;
    // A second name of the old file, if there is one, and where the file system has such.
    remove_if_there(&old)?;
    let is_kept = match fs::hard_link(path, &old) {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    fs::rename(&hidden, path)?;
    at(Step::Renamed)?;
    if let Err(error) = sync(parent) {
        if is_kept {
            let back = match fs::rename(&old, path) {
                Err(missing) if missing.kind() == io::ErrorKind::NotFound => fs::remove_file(path),
                done => done,
            };
            let _ = back.and_then(|()| sync(parent));
        }
        return Err(error);
    }
    // It does no harm there.
    let _ = remove_if_there(&old);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("riserd-state-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        dir
    }

    #[test]
    fn a_kill_at_any_step_leaves_the_old_file_or_the_new_one() {
        let path = dir("steps");
        let state = StateDir::take(&path).unwrap();
        let steps = [
            Step::Created,
            Step::HalfWritten,
            Step::Written,
            Step::Synced,
            Step::Renamed,
        ];
        let killed = || io::Error::other("killed");
        for step in steps {
            state.replace("f", b"the old one").unwrap();
            let mut at = |s| if s == step { Err(killed()) } else { Ok(()) };
            let file = path.join("f");
            let new = b"the new one, which is longer";
            replace_by_steps(&file, new, None, &mut at, &mut sync_dir).unwrap_err();
            let expected: &[u8] = match step {
                Step::Renamed => b"the new one, which is longer",
                _ => b"the old one",
            };
            assert_eq!(state.read("f").unwrap().unwrap(), expected, "{step:?}");
            // What the killed one has left is in the way of no other.
            state.replace("f", b"short").unwrap();
            assert_eq!(state.read("f").unwrap().unwrap(), b"short");
        }
        let names: Vec<_> = fs::read_dir(&path).unwrap().collect();
        assert_eq!(names.len(), 1);
        let mode = |p: &Path| fs::metadata(p).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(&path.join("f"))), (0o700, 0o600));
        fs::remove_dir_all(&path).unwrap();
    }

    /// What is reported as failed has not happened, for the next start either.
    #[test]
    fn a_directory_that_cannot_be_made_durable_keeps_the_old_file() {
        let path = dir("undone");
        let state = StateDir::take(&path).unwrap();
        let file = path.join("f");
        for old in [None, Some(&b"the old one"[..])] {
            if let Some(old) = old {
                state.replace("f", old).unwrap();
            }
            let mut failing = |_: &Path| Err(io::Error::other("no space"));
            replace_by_steps(&file, b"the new one", None, &mut |_| Ok(()), &mut failing)
                .unwrap_err();
            assert_eq!(state.read("f").unwrap().as_deref(), old);
        }
        state.replace("f", b"another").unwrap();
        let names: Vec<_> = fs::read_dir(&path).unwrap().collect();
        assert_eq!(names.len(), 1);
        fs::remove_dir_all(&path).unwrap();
    }

    /// Else the second start would build on a name that the machine's power can take away.
    #[test]
    fn the_name_of_a_directory_is_synced_by_the_start_after_one_that_could_not() {
        let path = dir("names").join("inner");
        let mut failing = |_: &Path| Err(io::Error::other("no space"));
        make_durable(&path, &mut failing).unwrap_err();
        assert!(path.exists());
        let mut synced = Vec::new();
        let mut recording = |dir: &Path| {
            synced.push(dir.to_owned());
            Ok(())
        };
        make_durable(&path, &mut recording).unwrap();
        let outer = path.parent().unwrap();
        assert_eq!(synced[..2], [outer, outer.parent().unwrap()]);
        fs::remove_dir_all(outer).unwrap();
    }

    #[test]
    fn one_daemon_has_a_directory() {
        let path = dir("lock");
        let state = StateDir::take(&path).unwrap();
        let second = StateDir::take(&path).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::AddrInUse);
        assert_eq!(state.read("nothing").unwrap(), None);
        // One that was killed may hold it for a while.
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(200));
                drop(state);
            });
            StateDir::take(&path).unwrap();
        });
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn a_daemon_that_is_ending_is_waited_for() {
        let path = dir("ending");
        let state = StateDir::take(&path).unwrap();
        state.note_ending().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                // Longer than one that is not ending is waited for.
                thread::sleep(Duration::from_secs(4));
                drop(state);
            });
            let next = StateDir::take(&path).unwrap();
            assert_eq!(next.read(ENDING).unwrap(), None);
        });
        fs::remove_dir_all(&path).unwrap();
    }
}
