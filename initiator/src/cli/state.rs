//! The attachments of this host: a small directory with a JSON file for each.
//!
//! It is `$RISER_STATE_DIR`; or `/run/riser` for root, whose services and logins see the same; or
//! `riser` in `$XDG_RUNTIME_DIR`. A file is written by the process that serves the attachment,
//! before anything can be used, and removed by it at its end, or marked as failed. A file whose
//! process has exited is stale: the next process that lists the directory removes it, and cleans up
//! the mounts and sockets of that process. A process is identified by its id and its start time,
//! because ids are reused. All processes that use a directory must be in the same PID namespace.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::mount::UnmountFlags;

pub use super::attachment::{Attachment, Export, Phase, process_start};
pub(super) use super::attachment::{generation, process_name};
pub use super::registration::{LinkEntry, Registration};
use super::{lock, loops};

/// Content of the directory.
#[derive(Debug)]
pub(super) struct Listing {
    /// The attachments, by id.
    pub(super) attachments: Vec<Attachment>,
    /// Files that cannot be read as attachments: of another version, damaged, or not ours.
    pub(super) unknown: Vec<PathBuf>,
}

/// The directory. See the module documentation.
#[derive(Clone, Debug)]
pub struct StateDir {
    path: PathBuf,
    patience: Duration,
}

impl StateDir {
    /// The directory of this user, made if it is missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn open() -> io::Result<Self> {
        let is_root = rustix::process::geteuid().is_root();
        let path = match (
            std::env::var_os("RISER_STATE_DIR"),
            std::env::var_os("XDG_RUNTIME_DIR"),
        ) {
            (Some(own), _) if !own.is_empty() => PathBuf::from(own),
            (_, Some(runtime)) if !is_root && !runtime.is_empty() => {
                Path::new(&runtime).join("riser")
            }
            _ => PathBuf::from("/run/riser"),
        };
        Self::at(path)
    }

    /// A directory somewhere else.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn at(path: PathBuf) -> io::Result<Self> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&path)?;
        let patience = lock::PATIENCE;
        Ok(Self { path, patience })
    }

    /// The same, with another time that its lock is waited for.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn file(&self, id: &str) -> PathBuf {
        self.path.join(format!("{id}.json"))
    }

    /// Keeps other processes from changing the directory until the descriptor is closed. An id that
    /// was looked up means the same attachment for as long.
    ///
    /// # Errors
    /// As [`lock::lock`].
    pub(super) fn lock(&self) -> io::Result<fs::File> {
        let dir = fs::File::open(&self.path)?;
        lock::lock(&dir, &self.path, self.patience)?;
        Ok(dir)
    }

    /// Locks the directory, so that a decision about its content and a change of it are one step.
    ///
    /// # Errors
    /// Another process does not release its lock.
    pub(super) fn locked(&self) -> io::Result<LockedDir<'_>> {
        let lock = self.lock()?;
        Ok(LockedDir {
            dir: self,
            _lock: lock,
        })
    }

    /// Writes down an attachment under the first free id, which it gets.
    ///
    /// # Errors
    /// The directory cannot be written, or another process does not release its lock.
    pub fn register(&self, attachment: Attachment) -> io::Result<Registration> {
        self.locked()?.register(attachment)
    }

    /// Removes the entry of an attachment that has failed; returns the reason. An entry
    /// whose process exited without a report counts as well.
    ///
    /// # Errors
    /// The directory cannot be read, or another process does not release its lock.
    pub(super) fn remove_failed(&self, attachment: &Attachment) -> io::Result<Option<String>> {
        let _lock = self.lock()?;
        let file = self.file(&attachment.id);
        let entry = match fs::read(&file) {
            Ok(text) => serde_json::from_slice::<Attachment>(&text)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let is_same = (entry.pid, entry.started) == (attachment.pid, attachment.started);
        if !is_same || entry.is_alive() || entry.waits() {
            return Ok(None);
        }
        clean_up(&entry.export);
        fs::remove_file(&file)?;
        let failure = entry.failure;
        Ok(Some(failure.unwrap_or_else(|| {
            format!("process {} ended unexpectedly", entry.pid)
        })))
    }

    /// All attachments that are alive, or wait for a process that takes them over, by id. Stale
    /// ones are removed on the way, and files that cannot be read are logged.
    ///
    /// # Errors
    /// The directory cannot be read, or another process does not release its lock.
    pub fn list(&self) -> io::Result<Vec<Attachment>> {
        let Listing {
            attachments,
            unknown,
        } = self.scan()?;
        for file in unknown {
            tracing::warn!("{} cannot be read as an attachment", file.display());
        }
        Ok(attachments)
    }

    /// As [`StateDir::list`], with the files that cannot be read.
    ///
    /// # Errors
    /// The directory cannot be read, or another process does not release its lock.
    pub(super) fn scan(&self) -> io::Result<Listing> {
        self.locked()?.scan()
    }

    fn scan_locked(&self) -> io::Result<Listing> {
        let mut found = Vec::new();
        let mut unknown = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            if path.extension().is_none_or(|e| e != "json") {
                continue;
            }
            let text = match fs::read(&path) {
                // Its process has ended meanwhile.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                text => text,
            };
            let Some(mut attachment) = text
                .ok()
                .and_then(|text| serde_json::from_slice::<Attachment>(&text).ok())
            else {
                unknown.push(path);
                continue;
            };
            let is_alive = attachment.is_alive();
            if is_alive || attachment.waits() || attachment.phase == Phase::Failed {
                if !is_alive {
                    // What its process wrote down last is no longer so.
                    attachment.link = None;
                    attachment.paths.clear();
                }
                found.push(attachment);
            } else {
                tracing::info!(
                    id = attachment.id,
                    pid = attachment.pid,
                    "removing a stale attachment"
                );
                clean_up(&attachment.export);
                let _ = fs::remove_file(&path);
            }
        }
        found.sort_by_key(|a| (a.id.len(), a.id.clone()));
        Ok(Listing {
            attachments: found,
            unknown,
        })
    }

    /// The attachment with that id or path.
    ///
    /// # Errors
    /// The directory cannot be read, or another process does not release its lock.
    pub fn find(&self, what: &str) -> io::Result<Option<Attachment>> {
        let path = resolve(Path::new(what))?;
        Ok(self
            .list()?
            .into_iter()
            .find(|a| a.id == what || a.export.is_named(&path)))
    }

    /// The attachment that shows at that path.
    ///
    /// # Errors
    /// As [`StateDir::find`].
    pub fn find_path(&self, path: &Path) -> io::Result<Option<Attachment>> {
        let path = resolve(path)?;
        let list = self.list()?;
        Ok(list.into_iter().find(|a| a.export.is_named(&path)))
    }
}

/// The directory while no other process changes it.
#[derive(Debug)]
pub(super) struct LockedDir<'a> {
    dir: &'a StateDir,
    _lock: fs::File,
}

impl LockedDir<'_> {
    /// As [`StateDir::scan`].
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn scan(&self) -> io::Result<Listing> {
        self.dir.scan_locked()
    }

    /// Writes down an attachment under the first free id, which it gets. It replaces attachments at
    /// its path that have failed.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub(super) fn register(&self, mut attachment: Attachment) -> io::Result<Registration> {
        let path = attachment.export.path();
        for other in self.scan()?.attachments {
            if other.is_over() && other.export.path() == path {
                let _ = fs::remove_file(self.dir.file(&other.id));
            }
        }
        let id = (0..u32::MAX)
            .map(|n| n.to_string())
            .find(|id| !self.dir.file(id).exists())
            .ok_or(io::ErrorKind::QuotaExceeded)?;
        attachment.id = id;
        self.write(attachment)
    }

    /// Writes down an attachment in place of the one with that id, which this process has taken
    /// over.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub(super) fn replace(&self, id: &str, mut attachment: Attachment) -> io::Result<Registration> {
        attachment.id = id.to_owned();
        self.write(attachment)
    }

    fn write(&self, attachment: Attachment) -> io::Result<Registration> {
        let path = self.dir.file(&attachment.id);
        let temporary = format!(".{}.tmp", process_name());
        Registration::create(path, self.dir.path.join(temporary), attachment)
    }
}

/// A path as exports name theirs.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    // A dead mount cannot be resolved, but its parent can.
    Ok(path.canonicalize().unwrap_or(path))
}

/// Undoes what a process left behind.
fn clean_up(export: &Export) {
    match export {
        Export::Fuse { path, .. } => unmount_dead(path),
        Export::Mount { fuse, .. } => {
            // Of a process that was killed while it mounted the file system.
            loops::release_loops_below(fuse);
            // It is dead, though it may not show yet, and its directory was made for it.
            let _ = rustix::mount::unmount(fuse, UnmountFlags::DETACH);
            let _ = fs::remove_dir(fuse);
        }
        Export::Nbd { socket, .. } => {
            let refused = UnixStream::connect(socket)
                .is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused);
            if refused {
                let _ = fs::remove_file(socket);
            }
        }
        // It is gone, or it would not be stale.
        Export::Ublk { .. } => {}
    }
}

/// Unmounts a FUSE mount whose process has ended.
fn unmount_dead(path: &Path) {
    // stat(2) may be answered from cached attributes, statfs(2) never is. What was under way when
    // its process died is aborted.
    let dead =
        rustix::fs::statfs(path).is_err_and(|e| matches!(e, Errno::NOTCONN | Errno::CONNABORTED));
    if dead && rustix::mount::unmount(path, UnmountFlags::DETACH).is_err() {
        let _ = std::process::Command::new("fusermount3")
            .args(["-uz", "--"])
            .arg(path)
            .output();
    }
}

#[cfg(test)]
pub(super) mod fixture {
    //! An attachment of this process.

    use std::path::Path;

    use super::{Attachment, Export, Phase, process_start};

    pub(in crate::cli) fn attachment(socket: &Path) -> Attachment {
        Attachment {
            id: String::new(),
            url: "mem:1M".into(),
            pid: std::process::id(),
            started: process_start(std::process::id()).unwrap(),
            since: 0,
            phase: Phase::Serving,
            failure: None,
            export: Export::Nbd {
                socket: socket.to_owned(),
                uri: String::new(),
            },
            capacity: 1 << 20,
            block_size: 512,
            read_only: false,
            device: None,
            log: None,
            unit: None,
            link: None,
            paths: Vec::new(),
            cache: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fixture::attachment;
    use super::*;
    use crate::engine::{LinkReport, LinkState, PathReport, SessionReport};

    fn dir(name: &str) -> StateDir {
        let path = std::env::temp_dir().join(format!("riser-state-{}-{name}", std::process::id()));
        StateDir::at(path).unwrap()
    }

    #[test]
    fn paths_are_kept_up_to_date_until_the_attachment_is_gone() {
        let dir = dir("paths");
        let registration = dir.register(attachment(&dir.path().join("a"))).unwrap();
        let mut entry = registration.link();
        let paths = vec![PathReport {
            portal: "10.0.0.1:3260".into(),
            state: crate::paths::PathState::Lost,
            losses: 1,
            why: Some("connection lost".into()),
        }];
        let report = SessionReport {
            link: LinkReport {
                state: LinkState::Reconnecting,
                since: 5,
                last_error: Some("connection lost".into()),
                pending: None,
                grown: Some(1 << 30),
            },
            paths,
            cache: Some([0xa5; 16]),
        };
        assert!(entry.update(report.clone(), |_| Ok(())).unwrap());
        let listed = dir.list().unwrap().remove(0);
        assert_eq!(
            (listed.link, listed.paths, listed.cache),
            (
                Some(report.link.clone()),
                report.paths.clone(),
                report.cache
            )
        );
        drop(registration);
        assert!(!entry.update(report, |_| Ok(())).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn ids_are_given_once_and_freed() {
        let dir = dir("ids");
        let a = dir.register(attachment(&dir.path().join("a"))).unwrap();
        let b = dir.register(attachment(&dir.path().join("b"))).unwrap();
        assert_eq!(
            (a.attachment().id.as_str(), b.attachment().id.as_str()),
            ("0", "1")
        );
        assert_eq!(dir.list().unwrap().len(), 2);
        assert_eq!(dir.find("1").unwrap(), Some(b.attachment()));
        let path = dir.path().join("a");
        assert_eq!(dir.find(path.to_str().unwrap()).unwrap().unwrap().id, "0");
        drop(a);
        assert_eq!(dir.find("0").unwrap(), None);
        let c = dir.register(attachment(&path)).unwrap();
        assert_eq!(c.attachment().id, "0");
        drop((b, c));
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn what_a_dead_process_left_is_removed() {
        let dir = dir("stale");
        let socket = dir.path().join("socket");
        // A socket without a listener.
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let mut stale = attachment(&socket);
        // A process with our id, but of another time.
        stale.started += 1;
        let registration = dir.register(stale).unwrap();
        fs::write(dir.path().join("x.json"), b"{").unwrap();
        let listing = dir.scan().unwrap();
        assert_eq!(listing.attachments, []);
        assert_eq!(
            listing.unknown,
            [dir.path().join("x.json")],
            "never ignored"
        );
        assert!(!socket.exists());
        assert!(!dir.file("0").exists());
        drop(registration);
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn failed_attachment_stays_until_removed() {
        let dir = dir("failed");
        let mut dead = attachment(&dir.path().join("a"));
        dead.started += 1;
        let registration = dir.register(dead.clone()).unwrap();
        let mut link = registration.link();
        dead.id = registration.attachment().id;
        registration.fail("cannot flush the disk".into()).unwrap();
        let report = SessionReport {
            link: LinkReport {
                state: LinkState::Live,
                since: 5,
                last_error: None,
                pending: None,
                grown: None,
            },
            paths: Vec::new(),
            cache: None,
        };
        assert!(!link.update(report, |_| Ok(())).unwrap(), "it is final");
        let listed = dir.list().unwrap().remove(0);
        assert_eq!(listed.phase, Phase::Failed);
        assert!(listed.is_over());
        let reason = dir.remove_failed(&dead).unwrap();
        assert_eq!(reason.as_deref(), Some("cannot flush the disk"));
        assert_eq!(dir.remove_failed(&dead).unwrap(), None);
        assert_eq!(dir.list().unwrap(), []);
        // The next attachment at the path replaces it.
        let again = dir.register(dead.clone()).unwrap();
        again.fail("the same".into()).unwrap();
        let next = dir.register(attachment(&dir.path().join("a"))).unwrap();
        assert_eq!(dir.list().unwrap(), [next.attachment()]);
        drop(next);
        fs::remove_dir_all(dir.path()).unwrap();
    }
}
