//! The attachments of this host: a small directory with a JSON file for each.
//!
//! It is `$RISER_STATE_DIR`; or `/run/riser` for root, whose services and logins see the same; or
//! `riser` in `$XDG_RUNTIME_DIR`. A file is written by the process that serves the attachment,
//! when it is usable, and removed by it at its end. A file whose process is gone is stale: the
//! next process that lists the directory removes it, and what that process could not undo. A
//! process is known by its id and the time it was started, so that another one with the same id is
//! not taken for it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use serde::{Deserialize, Serialize};

use super::lock;
use crate::engine::{LinkReport, PathReport, SessionReport};
use crate::mounts::MountId;
use crate::ublk;

/// Form in which an attachment shows on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Export {
    /// A file through FUSE.
    Fuse {
        /// Path that is mounted over: a directory or a file.
        path: PathBuf,
        /// Path of the disk's file.
        file: PathBuf,
        /// The mount, among those that its process sees. One of an older version does not say.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<MountId>,
    },
    /// A network block device.
    Nbd {
        /// Path of its socket.
        socket: PathBuf,
        /// Its URI, for clients.
        uri: String,
    },
    /// A block device of `ublk_drv`.
    Ublk {
        /// Number of the device.
        number: u32,
        /// Path of the device's file.
        device: PathBuf,
        /// Number that its initiator port follows from, which a process that takes it over must
        /// have too.
        port: u64,
        /// The GUID of that port.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        guid: Option<u64>,
        /// Properties by which udev names it.
        properties: BTreeMap<String, String>,
    },
    /// A mounted file system.
    Mount {
        /// Path that it is mounted on.
        path: PathBuf,
        /// The loop device below it.
        device: PathBuf,
        /// The FUSE mount below that.
        fuse: PathBuf,
        /// The mount, among those that its process sees. One of an older version does not say.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<MountId>,
    },
}

impl Export {
    /// The path that people know it by.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Fuse { path, .. } | Self::Mount { path, .. } => path,
            Self::Nbd { socket, .. } => socket,
            Self::Ublk { device, .. } => device,
        }
    }

    fn is_named(&self, path: &Path) -> bool {
        match self {
            Self::Fuse {
                path: own, file, ..
            } => own == path || file == path,
            Self::Nbd { socket, .. } => socket == path,
            Self::Ublk { device, .. } => device == path,
            Self::Mount {
                path: own, device, ..
            } => own == path || device == path,
        }
    }
}

/// An attachment as its file has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Its name on this host.
    pub id: String,
    /// Address of the logical unit, without secrets.
    pub url: String,
    /// Process that serves it.
    pub pid: u32,
    /// Start of that process, in clock ticks since the boot.
    pub started: u64,
    /// Time of the attachment, in seconds since 1970.
    pub since: u64,
    /// Form in which it shows.
    pub export: Export,
    /// Size of the disk in bytes.
    pub capacity: u64,
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// The attachment refuses writes.
    pub read_only: bool,
    /// The logical unit's world-wide name, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Name of the RDMA device that it is reached over, which begins with its provider's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Log file of the process, if it does not log to its terminal.
    pub log: Option<PathBuf>,
    /// Report of its session, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<LinkReport>,
    /// The paths to the logical unit, where there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<PathReport>,
    /// The generation of the unit's volatile cache, if it offers one: 32 hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "generation")]
    pub cache: Option<[u8; 16]>,
}

/// The generation of a cache in files.
pub(super) mod generation {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(in crate::cli) fn serialize<S: Serializer>(
        generation: &Option<[u8; 16]>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match generation {
            Some(bytes) => {
                serializer.collect_str(&format_args!("{:032x}", u128::from_be_bytes(*bytes)))
            }
            None => serializer.serialize_none(),
        }
    }

    pub(in crate::cli) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<[u8; 16]>, D::Error> {
        let Some(text) = Option::<String>::deserialize(deserializer)? else {
            return Ok(None);
        };
        let number = u128::from_str_radix(&text, 16).map_err(serde::de::Error::custom)?;
        Ok(Some(number.to_be_bytes()))
    }
}

impl Attachment {
    /// Returns whether it outlives its process: a block device, in which requests wait for another
    /// process, or which was added and never started.
    #[must_use]
    pub fn waits(&self) -> bool {
        match &self.export {
            Export::Ublk { number, device, .. } => device.exists() || ublk::is_added(*number),
            _ => false,
        }
    }

    /// Returns whether the process that serves it is alive.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        process_start(self.pid) == Some(self.started)
    }
}

/// Start of a process, in clock ticks since the boot; `None` if the process does not exist.
#[must_use]
pub fn process_start(pid: u32) -> Option<u64> {
    start_of(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The same, of its `stat` file (proc(5)).
fn start_of(stat: &str) -> Option<u64> {
    // The name, in parentheses, may hold anything; the state and 16 numbers come before the number
    // of threads.
    let rest = &stat[stat.rfind(')')? + 1..];
    let mut fields = rest.split_ascii_whitespace();
    let is_zombie = fields.next()? == "Z";
    let threads: u64 = fields.nth(16)?.parse().ok()?;
    // A zombie serves nothing any longer once its other threads have released its files, too.
    if is_zombie && threads <= 1 {
        return None;
    }
    fields.nth(1)?.parse().ok()
}

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

    /// Writes down an attachment under the first free id, which it gets.
    ///
    /// # Errors
    /// The directory cannot be written, or another process does not release its lock.
    pub fn register(&self, mut attachment: Attachment) -> io::Result<Registration> {
        let _lock = self.lock()?;
        let id = (0..u32::MAX)
            .map(|n| n.to_string())
            .find(|id| !self.file(id).exists())
            .ok_or(io::ErrorKind::QuotaExceeded)?;
        attachment.id = id;
        self.write(attachment)
    }

    /// Writes down an attachment in place of the one with that id, which this process has taken
    /// over.
    ///
    /// # Errors
    /// The directory cannot be written, or another process does not release its lock.
    pub fn replace(&self, id: &str, mut attachment: Attachment) -> io::Result<Registration> {
        let _lock = self.lock()?;
        attachment.id = id.to_owned();
        self.write(attachment)
    }

    fn write(&self, attachment: Attachment) -> io::Result<Registration> {
        let entry = Entry {
            path: self.file(&attachment.id),
            temporary: self.path.join(format!(".{}.tmp", std::process::id())),
            is_gone: Mutex::new(false),
        };
        entry.write(&attachment)?;
        let entry = Arc::new(entry);
        Ok(Registration { attachment, entry })
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
        let _lock = self.lock()?;
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
            if is_alive || attachment.waits() {
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

/// A written-down attachment; dropping it removes it from the directory.
#[derive(Debug)]
pub struct Registration {
    attachment: Attachment,
    entry: Arc<Entry>,
}

#[derive(Debug)]
struct Entry {
    path: PathBuf,
    temporary: PathBuf,
    /// Held while the file is written, so that none is written after it was removed.
    is_gone: Mutex<bool>,
}

/// The link of a written-down attachment, to be kept up to date as long as it is there.
#[derive(Debug)]
pub struct LinkEntry {
    attachment: Attachment,
    entry: Arc<Entry>,
}

impl LinkEntry {
    /// Writes down the link's state; returns whether the attachment is still there. As long as it
    /// is, `note` is called first, with the generation of the unit's cache.
    ///
    /// # Errors
    /// The directory cannot be written, or the error of `note`.
    pub fn update(
        &mut self,
        report: SessionReport,
        note: impl FnOnce(Option<[u8; 16]>) -> io::Result<()>,
    ) -> io::Result<bool> {
        let is_gone = self.entry.lock();
        if *is_gone {
            return Ok(false);
        }
        self.attachment.link = Some(report.link);
        self.attachment.paths = report.paths;
        self.attachment.cache = report.cache;
        note(report.cache)?;
        self.entry.write(&self.attachment)?;
        Ok(true)
    }
}

impl Entry {
    /// Writes the file, which appears at once and whole.
    fn write(&self, attachment: &Attachment) -> io::Result<()> {
        fs::write(&self.temporary, serde_json::to_vec_pretty(attachment)?)?;
        fs::rename(&self.temporary, &self.path)
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_gone.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registration {
    /// The attachment, with its id.
    #[must_use]
    pub fn attachment(&self) -> &Attachment {
        &self.attachment
    }

    /// A handle with which the state of the link is updated.
    #[must_use]
    pub fn link(&self) -> LinkEntry {
        LinkEntry {
            attachment: self.attachment.clone(),
            entry: self.entry.clone(),
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        *self.entry.lock() = true;
        let _ = fs::remove_file(&self.entry.path);
    }
}

#[cfg(test)]
pub(super) mod fixture {
    //! An attachment of this process.

    use std::path::Path;

    use super::{Attachment, Export, process_start};

    pub(in crate::cli) fn attachment(socket: &Path) -> Attachment {
        Attachment {
            id: String::new(),
            url: "mem:1M".into(),
            pid: std::process::id(),
            started: process_start(std::process::id()).unwrap(),
            since: 0,
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
    use crate::engine::LinkState;

    fn dir(name: &str) -> StateDir {
        let path = std::env::temp_dir().join(format!("riser-state-{}-{name}", std::process::id()));
        StateDir::at(path).unwrap()
    }

    #[test]
    fn a_process_is_there_until_its_last_thread_has_gone() {
        let stat = |state: &str, threads: u32| {
            format!("7 (a) b) {state} 1 7 7 0 -1 4194560 9 0 0 0 1 2 0 0 20 0 {threads} 0 4711 0 0")
        };
        assert_eq!(start_of(&stat("S", 3)), Some(4711));
        assert_eq!(start_of(&stat("Z", 2)), Some(4711));
        assert_eq!(start_of(&stat("Z", 1)), None);
        assert!(process_start(std::process::id()).is_some());
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
        assert_eq!(dir.find("1").unwrap().as_ref(), Some(b.attachment()));
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
        assert!(!registration.entry.path.exists());
        drop(registration);
        fs::remove_dir_all(dir.path()).unwrap();
    }
}
