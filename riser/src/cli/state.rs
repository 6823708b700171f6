//! Attachments on this host, stored as JSON files in a small directory.
//!
//! The directory is `$RISER_STATE_DIR`, or `/run/riser` for root, which is the same for services
//! and logins, or `riser` in `$XDG_RUNTIME_DIR`. Each file is written by the process that serves
//! the attachment before it can be used. When the process exits, it removes the file or marks it as
//! failed. A file is stale if its process has exited without doing this. The next process that
//! lists the directory will remove it, and clean up mounts and sockets of the exited process.
//! Processes are identified by their ID and start time because IDs are reused. All processes using
//! a directory must be in the same PID namespace.

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

/// Contents of the directory.
#[derive(Debug)]
pub(super) struct Listing {
    /// Attachments, sorted by ID.
    pub(super) attachments: Vec<Attachment>,
    /// Files that are not valid attachments, because they use another version, are corrupt, or
    /// don't belong to us.
    pub(super) unknown: Vec<PathBuf>,
}

/// A state directory. See the module documentation.
#[derive(Clone, Debug)]
pub struct StateDir {
    path: PathBuf,
    patience: Duration,
}

impl StateDir {
    /// Opens the directory of this user, and creates it if it doesn't exist.
    ///
    /// # Errors
    /// Fails if the directory can't be created.
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

    /// Opens another directory.
    ///
    /// # Errors
    /// Fails if the directory can't be created.
    pub fn at(path: PathBuf) -> io::Result<Self> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&path)?;
        let patience = lock::PATIENCE;
        Ok(Self { path, patience })
    }

    /// Changes the maximum time to wait for the lock.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Returns the path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn file(&self, id: &str) -> PathBuf {
        self.path.join(format!("{id}.json"))
    }

    /// Locks the directory until the descriptor is closed. During this time, an ID always refers to
    /// the same attachment.
    ///
    /// # Errors
    /// Returns errors from [`lock::lock`].
    pub(super) fn lock(&self) -> io::Result<fs::File> {
        let dir = fs::File::open(&self.path)?;
        lock::lock(&dir, &self.path, self.patience)?;
        Ok(dir)
    }

    /// Locks the directory, so that it can be read and modified atomically.
    ///
    /// # Errors
    /// Fails if another process doesn't release its lock.
    pub(super) fn locked(&self) -> io::Result<LockedDir<'_>> {
        let lock = self.lock()?;
        Ok(LockedDir {
            dir: self,
            _lock: lock,
        })
    }

    /// Adds an attachment using the first unused ID.
    ///
    /// # Errors
    /// Fails if the directory can't be written, or another process doesn't release its lock.
    pub fn register(&self, attachment: Attachment) -> io::Result<Registration> {
        self.locked()?.register(attachment)
    }

    /// Removes an attachment that has failed, and returns the reason. This includes attachments
    /// with a process that has exited without a report.
    ///
    /// # Errors
    /// Fails if the directory can't be read, or another process doesn't release its lock.
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
            format!("process {} exited unexpectedly", entry.pid)
        })))
    }

    /// Returns all attachments that are alive or waiting for another process, sorted by ID. Stale
    /// attachments are removed, and invalid files are logged.
    ///
    /// # Errors
    /// Fails if the directory can't be read, or another process doesn't release its lock.
    pub fn list(&self) -> io::Result<Vec<Attachment>> {
        let Listing {
            attachments,
            unknown,
        } = self.scan()?;
        for file in unknown {
            tracing::warn!("invalid attachment file {}", file.display());
        }
        Ok(attachments)
    }

    /// As for [`StateDir::list`], but also returns invalid files.
    ///
    /// # Errors
    /// Fails if the directory can't be read, or another process doesn't release its lock.
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
                // The process has just exited.
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
                    // The state recorded by its process is outdated.
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

    /// Returns the attachment with this ID or path.
    ///
    /// # Errors
    /// Fails if the directory can't be read, or another process doesn't release its lock.
    pub fn find(&self, what: &str) -> io::Result<Option<Attachment>> {
        let path = resolve(Path::new(what))?;
        Ok(self
            .list()?
            .into_iter()
            .find(|a| a.id == what || a.export.is_named(&path)))
    }

    /// Returns the attachment at this path.
    ///
    /// # Errors
    /// The same as for [`StateDir::find`].
    pub fn find_path(&self, path: &Path) -> io::Result<Option<Attachment>> {
        let path = resolve(path)?;
        let list = self.list()?;
        Ok(list.into_iter().find(|a| a.export.is_named(&path)))
    }
}

/// A locked directory that can't be modified by other processes.
#[derive(Debug)]
pub(super) struct LockedDir<'a> {
    dir: &'a StateDir,
    _lock: fs::File,
}

impl LockedDir<'_> {
    /// The same as [`StateDir::scan`].
    ///
    /// # Errors
    /// Fails if the directory can't be read.
    pub(super) fn scan(&self) -> io::Result<Listing> {
        self.dir.scan_locked()
    }

    /// Adds an attachment using the first unused ID. Failed attachments at the same path are
    /// removed.
    ///
    /// # Errors
    /// Fails if the directory can't be written.
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

    /// Replaces the attachment with this ID, which was taken over by this process.
    ///
    /// # Errors
    /// Fails if the directory can't be written.
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

/// Resolves a path in the same way as for exports.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    // If the path can't be resolved, e.g. because its mount is dead, we use the absolute path.
    Ok(path.canonicalize().unwrap_or(path))
}

/// Cleans up after a process that has exited.
fn clean_up(export: &Export) {
    match export {
        Export::Fuse { path, .. } => unmount_dead(path),
        Export::Mount { fuse, .. } => {
            // These remain if the process was killed while mounting the file system.
            loops::release_loops_below(fuse);
            // The process has exited, even if the mount doesn't return errors yet. The directory
            // was only created for this mount.
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
        // If the device still existed, the attachment would not be stale.
        Export::Ublk { .. } => {}
    }
}

/// Unmounts a FUSE mount if its process has exited.
fn unmount_dead(path: &Path) {
    // stat(2) may use cached attributes, but statfs(2) always sends a request. Requests that were
    // pending when the process exited are aborted.
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
    //! Returns an attachment of this process.

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
            protection: None,
            log: None,
            unit: None,
            link: None,
            paths: Vec::new(),
            cache: None,
            was_redirected: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use riser_initiator::engine::{
        LinkReport, LinkState, PathReport, ProtectionErrors, SessionReport,
    };

    use super::fixture::attachment;
    use super::*;

    fn dir(name: &str) -> StateDir {
        let path = std::env::temp_dir().join(format!("riser-state-{}-{name}", std::process::id()));
        StateDir::at(path).unwrap()
    }

    #[test]
    fn paths_are_updated_until_detached() {
        let dir = dir("paths");
        let registration = dir.register(attachment(&dir.path().join("a"))).unwrap();
        let mut entry = registration.link();
        let paths = vec![PathReport {
            portal: "10.0.0.1:3260".into(),
            state: riser_initiator::paths::PathState::Lost,
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
                protection_errors: ProtectionErrors {
                    guard: 2,
                    ..ProtectionErrors::default()
                },
            },
            paths,
            cache: Some([0xa5; 16]),
            is_redirected: true,
        };
        assert!(entry.update(report.clone(), |_| Ok(())).unwrap());
        let listed = dir.list().unwrap().remove(0);
        assert_eq!(
            (
                listed.link,
                listed.paths,
                listed.cache,
                listed.was_redirected
            ),
            (
                Some(report.link.clone()),
                report.paths.clone(),
                report.cache,
                true
            )
        );
        drop(registration);
        assert!(!entry.update(report, |_| Ok(())).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn ids_are_unique_and_reused() {
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
    fn stale_attachment_is_removed() {
        let dir = dir("stale");
        let socket = dir.path().join("socket");
        // A socket without a listener.
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let mut stale = attachment(&socket);
        // A process with our ID, but a different start time.
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
                protection_errors: ProtectionErrors::default(),
            },
            paths: Vec::new(),
            cache: None,
            is_redirected: false,
        };
        assert!(!link.update(report, |_| Ok(())).unwrap(), "it is final");
        let listed = dir.list().unwrap().remove(0);
        assert_eq!(listed.phase, Phase::Failed);
        assert!(listed.is_over());
        let reason = dir.remove_failed(&dead).unwrap();
        assert_eq!(reason.as_deref(), Some("cannot flush the disk"));
        assert_eq!(dir.remove_failed(&dead).unwrap(), None);
        assert_eq!(dir.list().unwrap(), []);
        // This is replaced by the next attachment at the same path.
        let again = dir.register(dead.clone()).unwrap();
        again.fail("the same".into()).unwrap();
        let next = dir.register(attachment(&dir.path().join("a"))).unwrap();
        assert_eq!(dir.list().unwrap(), [next.attachment()]);
        drop(next);
        fs::remove_dir_all(dir.path()).unwrap();
    }
}
