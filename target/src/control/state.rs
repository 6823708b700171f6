//! The state directory: files are replaced atomically, even if the process is killed.
//!
//! ```text
//! hidden file written → made durable → takes the name → the directory made durable
//!                                                              └─ not: the old file is put back
//! ```
//! If the process is killed at any of these steps, the name refers to either the complete old file
//! or the complete new file. If a replacement fails, the name refers to the old file, so the caller
//! and the next start have the same state. The names of hidden files are fixed, so leftover files
//! are overwritten by the next replacement.
//!
//! # Previous generations
//! For files that are required to serve disks, or that are otherwise important
//! ([`StateDir::save_generation`]), the previous generation is kept as `NAME~`. If the file is
//! damaged at startup, we use the previous generation, and move the damaged file to `NAME.damaged`.

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

/// File which indicates that the daemon using this directory is terminating.
const ENDING: &str = "ending";

/// Maximum time for a daemon to terminate: its sessions, followed by the last flush.
const LAST_FLUSH: Duration = Duration::from_secs(90);

/// A locked directory: it cannot be used by another daemon as long as this value exists.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    /// Holds the lock.
    _lock: File,
}

/// The version field, which is included in all files.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// The contents of a file with its version.
#[derive(Serialize)]
struct Versioned<'a, T> {
    version: u32,
    #[serde(flatten)]
    content: &'a T,
}

/// Returns the default directory: `$STATE_DIRECTORY`, which is set by a service manager;
/// `/var/lib/riserd` for root; or `None` for other users.
#[must_use]
pub fn default_path() -> Option<PathBuf> {
    if let Some(dirs) = std::env::var_os("STATE_DIRECTORY").filter(|v| !v.is_empty()) {
        return std::env::split_paths(&dirs).next();
    }
    let is_root = rustix::process::geteuid().is_root();
    is_root.then(|| PathBuf::from("/var/lib/riserd"))
}

impl StateDir {
    /// Locks a directory, which is created if needed.
    ///
    /// # Errors
    /// Returns `AddrInUse` if the directory is in use by another daemon which does not exit within
    /// a few seconds, or any file system error.
    pub fn lock(path: &Path) -> io::Result<Self> {
        make_durable(path, &mut sync_dir)?;
        // We lock the directory itself, so that a lock file cannot be left behind or removed while
        // locked.
        let lock = File::open(path)?;
        let attempt = || match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(())),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(io::Error::from(error)),
        };
        let ending = path.join(ENDING);
        // We need a limit even if the file exists, because a daemon could have been killed while it
        // was terminating.
        let until = Instant::now() + LAST_FLUSH;
        let mut locked = until_free(attempt)?;
        if locked.is_none() && ending.exists() {
            let directory = path.display();
            tracing::info!(%directory, "waiting for the previous daemon to terminate");
        }
        // It has to flush its backends first.
        while locked.is_none() && ending.exists() && Instant::now() < until {
            locked = until_free(attempt)?;
        }
        if locked.is_none() {
            let holder = holder::of_file(path);
            let holder = holder.map_or("another daemon".to_owned(), |holder| holder.to_string());
            let why = format!("in use by {holder}");
            return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
        }
        // We hold the lock, so this file belongs to a daemon that has exited. Remove it, because
        // the next daemon should not wait for us.
        match remove_if_there(&ending) {
            // This is returned even if the file does not exist. A read-only directory can still be
            // used to read the state.
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                let directory = path.display();
                tracing::warn!(%directory, %error, "state directory is read-only; state will not \
                                                    be persisted");
            }
            removed => removed?,
        }
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
        })
    }

    /// Notes that the daemon is terminating, so that the next daemon waits instead of failing to
    /// start.
    ///
    /// # Errors
    /// Fails on file system errors.
    pub fn note_ending(&self) -> io::Result<()> {
        File::create(self.path.join(ENDING)).map(drop)
    }

    /// Returns the directory path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the contents of a file, or `None` if it does not exist.
    ///
    /// # Errors
    /// Fails on file system errors.
    pub fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        read(&self.path.join(name))
    }

    /// Parses a file with this format version, or returns `None` if it does not exist.
    ///
    /// # Errors
    /// Fails on file system errors, or if the file is damaged or has a different version. All
    /// errors contain the file name.
    pub fn load<T: DeserializeOwned>(&self, name: &str, version: u32) -> io::Result<Option<T>> {
        load(&self.path.join(name), version)
    }

    /// Replaces a file, using this format version.
    ///
    /// # Errors
    /// Same as [`StateDir::replace`].
    pub fn save<T: Serialize>(&self, name: &str, version: u32, content: &T) -> io::Result<()> {
        let file = Versioned { version, content };
        self.replace(name, &serde_json::to_vec_pretty(&file)?)
    }

    /// Same as [`StateDir::save`], but keeps the previous generation of the file.
    ///
    /// # Errors
    /// Same as [`StateDir::replace`].
    pub fn save_generation<T: Serialize>(
        &self,
        name: &str,
        version: u32,
        content: &T,
    ) -> io::Result<()> {
        let new = serde_json::to_vec_pretty(&Versioned { version, content })?;
        let is_sound = |bytes: &Vec<u8>| serde_json::from_slice::<Version>(bytes).is_ok();
        match self.read(name)? {
            Some(old) if is_sound(&old) => self.replace(&previous(name), &old)?,
            // A damaged file must not replace the previous generation.
            Some(_) => {}
            None => self.replace(&previous(name), &new)?,
        }
        self.replace(name, &new)
    }

    /// Same as [`StateDir::load`] for a file with a previous generation, which is used if the file
    /// is damaged.
    ///
    /// # Errors
    /// Same as [`StateDir::load`], if there is no valid generation.
    pub fn load_generation<T: DeserializeOwned>(
        &self,
        name: &str,
        version: u32,
    ) -> io::Result<Generation<T>> {
        let damage = match self.load(name, version) {
            Ok(content) => {
                if content.is_some() {
                    self.make_previous(name);
                }
                return Ok(Generation::Current(content));
            }
            Err(error) if is_damaged(&error) => error,
            Err(error) => return Err(error),
        };
        let (path, spare) = (self.path.join(name), previous(name));
        let content = match self.load(&spare, version) {
            Ok(content) => content,
            Err(error) => {
                tracing::error!(%error, "cannot use the previous generation of a state file");
                None
            }
        };
        let Some(content) = content else {
            return Err(damage);
        };
        tracing::error!(
            %damage,
            "state file is damaged; using its previous generation, and the last change may be missing"
        );
        self.set_aside(name);
        // Restore the file for the next start.
        let repaired = fs::read(self.path.join(&spare)).and_then(|bytes| replace(&path, &bytes));
        if let Err(error) = repaired {
            tracing::warn!(path = %path.display(), %error, "cannot repair a state file");
        }
        Ok(Generation::Previous(content))
    }

    /// Moves a damaged file away, so that it can be analyzed.
    pub fn set_aside(&self, name: &str) {
        let path = self.path.join(name);
        let aside = self.path.join(format!("{name}.damaged"));
        match fs::rename(&path, &aside) {
            Ok(()) => tracing::warn!(path = %aside.display(), "moved a damaged state file"),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot move a damaged state file");
            }
        }
    }

    /// Creates the previous generation for a file written by an older version without generations.
    fn make_previous(&self, name: &str) {
        let spare = previous(name);
        if matches!(self.path.join(&spare).try_exists(), Ok(true)) {
            return;
        }
        let made = fs::read(self.path.join(name)).and_then(|bytes| self.replace(&spare, &bytes));
        if let Err(error) = made {
            tracing::debug!(%error, "cannot create the previous generation of a state file");
        }
    }

    /// Removes a file, if it exists.
    ///
    /// # Errors
    /// Fails on file system errors. The file may or may not exist after this.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        remove_if_there(&self.path.join(name))?;
        sync_dir(&self.path)
    }

    /// Replaces a file.
    ///
    /// # Errors
    /// Fails on file system errors. In this case, the old file is kept, if the file system can
    /// still be modified.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.path.join(name);
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        replace(&path, bytes).map_err(named)
    }
}

/// Contents of a file with a previous generation.
#[derive(Debug)]
pub enum Generation<T> {
    /// The file is valid, or does not exist.
    Current(Option<T>),
    /// The file is damaged, so this is its previous generation.
    Previous(T),
}

impl<T> Generation<T> {
    /// Returns the contents of either generation.
    #[must_use]
    pub fn into_content(self) -> Option<T> {
        match self {
            Self::Current(content) => content,
            Self::Previous(content) => Some(content),
        }
    }
}

/// Returns the file name of the previous generation.
fn previous(name: &str) -> String {
    format!("{name}~")
}

/// Error for a damaged file, including its name.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Damaged(String);

/// Returns true if this is a [`load`] error for a damaged file, but not for a different version.
#[must_use]
pub fn is_damaged(error: &io::Error) -> bool {
    matches!(error.get_ref(), Some(inner) if inner.is::<Damaged>())
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Parses a file in a state directory with this format version, even if the directory is in use by
/// another process. Returns `None` if the file does not exist.
///
/// # Errors
/// Same as [`StateDir::load`].
pub fn load<T: DeserializeOwned>(path: &Path, version: u32) -> io::Result<Option<T>> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    let Some(bytes) = read(path).map_err(named)? else {
        return Ok(None);
    };
    let error = |why: String| {
        let why = format!("{}: {why}", path.display());
        io::Error::new(io::ErrorKind::InvalidData, why)
    };
    let damaged = |e: serde_json::Error| {
        let why = format!("{}: the file is damaged ({e})", path.display());
        io::Error::new(io::ErrorKind::InvalidData, Damaged(why))
    };
    // Check the version first, because we may not be able to parse the fields of another version.
    let found: Version = serde_json::from_slice(&bytes).map_err(damaged)?;
    if found.version != version {
        let found = found.version;
        return Err(error(format!(
            "unsupported file version {found}, expected {version}: written by a different version \
             of riserd"
        )));
    }
    let content = serde_json::from_slice(&bytes).map_err(damaged)?;
    Ok(Some(content))
}

/// Adds a hint to [`load`] errors on how to handle a damaged file or a file with a different
/// version, and the effect of removing the file.
#[must_use]
pub fn advise(error: io::Error, without: &str) -> io::Error {
    // File system errors don't need a hint, and the file may be valid.
    if error.kind() != io::ErrorKind::InvalidData {
        return error;
    }
    let advice = format!(
        "{error}; restore it from a backup, or move it away and start riserd again: {without}"
    );
    io::Error::new(error.kind(), advice)
}

/// Returns the file name for data of a logical unit, which includes its world-wide name.
#[must_use]
pub fn file_of_unit(what: &str, unit: &Identity) -> String {
    let naa = unit.naa.bytes();
    let naa: String = naa.iter().map(|b| format!("{b:02x}")).collect();
    format!("{what}-{naa}.json")
}

/// Replaces a file that should only be readable by its owner.
///
/// # Errors
/// Same as [`StateDir::replace`].
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_by_steps(path, bytes, None, &mut |_| Ok(()), &mut sync_dir)
}

/// File owner and permissions.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// User ID and group ID.
    pub owner: (u32, u32),
    /// Permission bits of the file.
    pub mode: u32,
}

/// Replaces a file, with this owner and permissions.
///
/// # Errors
/// Same as [`StateDir::replace`]; also fails if this process is not allowed to change the owner.
pub fn replace_as(path: &Path, bytes: &[u8], access: &Access) -> io::Result<()> {
    let access = Some(access);
    replace_by_steps(path, bytes, access, &mut |_| Ok(()), &mut sync_dir)
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Creates a directory including missing parents. If the name of a directory was lost on power
/// failure, all durable data below it would be lost as well. So we sync all names on this file
/// system even if they already existed, because the start that created them could have failed
/// before that.
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
            // The directory can be written but not read, so there is nothing we can do.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            synced => synced?,
        }
    }
    Ok(())
}

/// Removes a file, if it exists.
fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Stages of a replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Created,
    HalfWritten,
    Written,
    Synced,
    Renamed,
}

/// `at` is called after each step. If it returns an error, the replacement stops there.
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
    let sibling = |end| {
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(end);
        parent.join(hidden)
    };
    let (hidden, old) = (sibling(".new"), sibling(".old"));
    // The mode is only used when a file is created.
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
    // Create a second link to the old file if it exists, and if the file system supports links.
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
    // The link can be left behind without any problems.
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
    fn kill_leaves_old_or_new_file() {
        let path = dir("steps");
        let state = StateDir::lock(&path).unwrap();
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
            // Files left behind by a killed process must not block the next replacement.
            state.replace("f", b"short").unwrap();
            assert_eq!(state.read("f").unwrap().unwrap(), b"short");
        }
        let names: Vec<_> = fs::read_dir(&path).unwrap().collect();
        assert_eq!(names.len(), 1);
        let mode = |p: &Path| fs::metadata(p).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(&path.join("f"))), (0o700, 0o600));
        fs::remove_dir_all(&path).unwrap();
    }

    /// If a replacement reports an error, the next start must see the old file.
    #[test]
    fn failed_directory_sync_keeps_old_file() {
        let path = dir("undone");
        let state = StateDir::lock(&path).unwrap();
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

    /// Otherwise, the second start would use a directory whose name could be lost on power failure.
    #[test]
    fn next_start_syncs_directory_name() {
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
    fn previous_generation_replaces_damaged_file() {
        let path = dir("generations");
        let state = StateDir::lock(&path).unwrap();
        let load = || state.load_generation::<Numbers>("f", 1);
        let save = |n: u32| state.save_generation("f", 1, &Numbers { n }).unwrap();
        let content = |loaded: Generation<Numbers>| match loaded {
            Generation::Current(content) => (true, content.map(|numbers| numbers.n)),
            Generation::Previous(content) => (false, Some(content.n)),
        };
        assert_eq!(content(load().unwrap()), (true, None));
        save(1);
        for damage in [&b"{"[..], b"", &[0xfe; 40]] {
            // The first generation is its own previous generation.
            fs::write(path.join("f"), damage).unwrap();
            assert_eq!(content(load().unwrap()), (false, Some(1)));
            assert_eq!(fs::read(path.join("f.damaged")).unwrap(), damage);
            assert_eq!(content(load().unwrap()), (true, Some(1)), "repaired");
        }
        save(2);
        save(3);
        fs::write(path.join("f"), "{").unwrap();
        // A save before the next start should keep the valid generation.
        save(4);
        fs::write(path.join("f"), "{").unwrap();
        assert_eq!(content(load().unwrap()), (false, Some(2)));
        for name in ["f", "f~"] {
            fs::write(path.join(name), "{").unwrap();
        }
        assert!(is_damaged(&load().unwrap_err()));
        // A file with a different version is valid.
        fs::write(path.join("f~"), r#"{ "version": 1, "n": 5 }"#).unwrap();
        fs::write(path.join("f"), r#"{ "version": 2, "n": 6 }"#).unwrap();
        assert!(!is_damaged(&load().unwrap_err()));
        // If the file was written by an older version without generations, we create one.
        fs::remove_file(path.join("f~")).unwrap();
        fs::write(path.join("f"), r#"{ "version": 1, "n": 7 }"#).unwrap();
        load().unwrap();
        fs::write(path.join("f"), "").unwrap();
        assert_eq!(content(load().unwrap()), (false, Some(7)));
        fs::remove_dir_all(&path).unwrap();
    }

    #[derive(Debug, Serialize, Deserialize)]
    struct Numbers {
        n: u32,
    }

    #[test]
    fn directory_is_locked_by_single_daemon() {
        let path = dir("lock");
        let state = StateDir::lock(&path).unwrap();
        let second = StateDir::lock(&path).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::AddrInUse);
        assert_eq!(state.read("nothing").unwrap(), None);
        // A process that was killed can hold the lock for some time.
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(200));
                drop(state);
            });
            StateDir::lock(&path).unwrap();
        });
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn start_waits_for_terminating_daemon() {
        let path = dir("ending");
        let state = StateDir::lock(&path).unwrap();
        state.note_ending().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                // Longer than the timeout for a daemon that is not terminating.
                thread::sleep(Duration::from_secs(4));
                drop(state);
            });
            let next = StateDir::lock(&path).unwrap();
            assert_eq!(next.read(ENDING).unwrap(), None);
        });
        fs::remove_dir_all(&path).unwrap();
    }
}
