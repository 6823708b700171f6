//! [`Store`]: one opened backend, shared by all workers.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use riser_config::{Faults, Source, Spec};
use riser_scsi::config::Identity;
use riser_scsi::step::BackendError;

use super::file_id::FileId;
use super::flush::{FlushFailure, FlushKeeper, FlushState};
use super::health::{Errors, Failing, Measured, Space};
use super::hints;
use super::look::Waiting;
use super::medium::{check_mount, extend, measure_file, open_device, open_file};
use super::opening;
use super::ram::{self, Ram};
use super::sys::{self, Align};
use crate::holder::Holder;

/// Names the host's boot; where the kernel does not, this process.
static BOOT: LazyLock<[u8; 16]> = LazyLock::new(|| {
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits = uuid.trim().replace('-', "");
    let id = u128::from_str_radix(&digits, 16).map(u128::to_be_bytes);
    id.unwrap_or_else(|_| ram::random_generation())
});

/// Geometry of a backend, as its logical unit needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes, a multiple of `block_size`.
    pub capacity: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Bytes that the medium writes at once; at least `block_size`.
    pub physical_block: u32,
    /// The unit in which space can be given back, in bytes; `None` where it cannot.
    pub unmap_granularity: Option<u32>,
    /// Writes fail.
    pub read_only: bool,
    /// Completed writes may be volatile until a flush.
    pub write_cache: bool,
    /// The medium turns.
    pub rotational: bool,
    /// The page cache is bypassed.
    pub direct: bool,
}

/// A backend changed its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resized {
    /// Capacity before, in bytes.
    pub from: u64,
    /// Capacity now, in bytes.
    pub to: u64,
}

/// Reason for which a backend could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A system call failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The backend.
        path: PathBuf,
        /// Action that failed.
        action: &'static str,
        /// Error of the system.
        source: io::Error,
    },
    /// A file cannot be opened, and it is known what may help.
    #[error("{}: cannot {action}: {source}; {hint}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Action that failed.
        action: &'static str,
        /// Error of the system.
        source: io::Error,
        /// Advice, or nothing.
        hint: String,
    },
    /// The path leads to something else than what is open.
    #[error("{}: is not what is served any more; another file has taken its place", path.display())]
    Moved {
        /// The backend.
        path: PathBuf,
    },
    /// The path is something else.
    #[error("{}: is not a {expected}", path.display())]
    Kind {
        /// The backend.
        path: PathBuf,
        /// Kind of file that it should be.
        expected: &'static str,
    },
    /// Another process, or another backend of this one, has it.
    #[error(
        "{}: is in use: {} holds its lock",
        path.display(),
        holder.as_ref().map_or("another backend or another program".to_owned(), ToString::to_string)
    )]
    Locked {
        /// The backend.
        path: PathBuf,
        /// The process that has it open, if that can be seen.
        holder: Option<Holder>,
    },
    /// A file that was there before is missing.
    #[error(
        "{}: is missing, and it was there before: is its file system mounted? It is not created again; for an \
         empty disk, create an empty file there",
        path.display()
    )]
    Gone {
        /// The file.
        path: PathBuf,
    },
    /// Its unit would have no names: those that are kept cannot be read.
    #[error(
        "the names of logical units cannot be read: {why}; restore the file from a backup, or move it away and \
         restart riserd: then there are new names, and initiators see new disks"
    )]
    Unnamed {
        /// Fault of the file, with its path.
        why: String,
    },
    /// The file is smaller than it should be, and nothing says to extend it.
    #[error(
        "{}: is {actual} bytes, fewer than {wanted}; `create: true` extends a file",
        path.display()
    )]
    Size {
        /// The backend.
        path: PathBuf,
        /// Size on disk in bytes.
        actual: u64,
        /// Size asked for in bytes.
        wanted: u64,
    },
    /// The path leads to a file system that asks this daemon.
    #[error("{}", riser_config::mounts::why(path, mount))]
    AsksUs {
        /// The backend.
        path: PathBuf,
        /// Mount point of that file system.
        mount: PathBuf,
    },
    /// A backend that is served would become smaller.
    #[error("it has {from} bytes and nothing shrinks one to {to}")]
    Shrinks {
        /// Capacity in bytes.
        from: u64,
        /// Capacity asked for in bytes.
        to: u64,
    },
    /// There is not one whole block.
    #[error("a backend of {size} bytes holds no block of {block_size} bytes")]
    Empty {
        /// Size in bytes.
        size: u64,
        /// Block size in bytes.
        block_size: u32,
    },
    /// A failed flush was not cleared: acknowledged writes may be lost, and the flush at shutdown
    /// would fail.
    #[error(
        "a flush failed ({0}): deal with what was lost, and clear it (riserd clear-flush-failure)"
    )]
    FlushFailed(io::Error),
    /// The block size is not supported.
    #[error("a block size of {0} bytes; 512 and 4096 are supported")]
    BlockSize(u32),
    /// `direct: on` cannot be had.
    #[error("{}: cannot be served with direct I/O: {reason}", path.display())]
    Direct {
        /// The backend.
        path: PathBuf,
        /// Reason, for people.
        reason: String,
    },
}

/// Access to the bytes.
#[derive(Debug)]
pub(super) enum Medium {
    /// Through a descriptor.
    File {
        fd: Arc<OwnedFd>,
        /// Alignment, where I/O is direct.
        align: Option<Align>,
        device: bool,
        /// Least that it zeroes and frees, in bytes.
        unit: u64,
    },
    /// In memory.
    Ram(Arc<Ram>),
    /// Not at all.
    Null,
    /// Not now: see [`Store::absent`].
    Absent,
}

/// One opened backend. Shared by all workers; each reaches it through its own
/// [`Driver`](super::Driver). Closing the last reference unlocks it.
#[derive(Debug)]
pub struct Store {
    pub(super) medium: Medium,
    pub(super) faults: Option<Arc<Faults>>,
    flush: FlushState,
    geometry: Geometry,
    /// Description of the source, for people.
    label: String,
    capacity: AtomicU64,
    made: Mutex<Option<Made>>,
    errors: Errors,
    pub(super) space: Measured,
    /// Threads that wait for its file system.
    pub(super) waiting: Waiting,
    /// Its file when it was opened, if it is one.
    file: Option<FileId>,
    notes: Vec<String>,
}

/// Change on disk by opening or growing a backend.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) path: PathBuf,
    pub(super) file: File,
    /// Its length before; `None` if it was not there.
    pub(super) before: Option<u64>,
}

/// Lets taking back changes of a file wait until the sender is gone.
#[cfg(test)]
pub(crate) static HANGING_UNDO: Mutex<Option<(PathBuf, std::sync::mpsc::Receiver<()>)>> =
    Mutex::new(None);

impl Made {
    fn undo(&self) {
        #[cfg(test)]
        {
            let hangs = HANGING_UNDO
                .lock()
                .unwrap()
                .take_if(|(path, _)| *path == self.path);
            if let Some((_, hangs)) = hangs {
                let _ = hangs.recv_timeout(std::time::Duration::from_secs(20));
            }
        }
        let undone = match self.before {
            None => self.remove(),
            Some(len) => self.file.set_len(len),
        };
        if let Err(error) = undone {
            tracing::warn!(path = %self.path.display(), %error, "a file keeps its new size");
        }
    }

    /// Removes the file that was created, and no other that has got its name.
    fn remove(&self) -> io::Result<()> {
        let made = self.file.metadata()?;
        let there = std::fs::symlink_metadata(&self.path)?;
        if (there.dev(), there.ino()) != (made.dev(), made.ino()) {
            return Err(io::Error::other("another file has its name"));
        }
        std::fs::remove_file(&self.path)
    }
}

impl Store {
    /// Opens, locks and measures a backend.
    ///
    /// # Errors
    /// As named in [`OpenError`]; every message says which backend.
    pub fn open(spec: &Spec) -> Result<Arc<Self>, OpenError> {
        Self::open_with(spec, Arc::default())
    }

    /// As [`Store::open`], with what a RAM disk has in it.
    ///
    /// # Errors
    /// Those of [`Store::open`].
    pub fn open_with(spec: &Spec, ram: Arc<Ram>) -> Result<Arc<Self>, OpenError> {
        if !matches!(spec.block_size, 512 | 4096) {
            return Err(OpenError::BlockSize(spec.block_size));
        }
        let mut made = None;
        let opened = Self::open_medium(spec, ram, &mut made);
        let (medium, geometry, notes) = opened.inspect_err(|_| {
            if let Some(made) = &made {
                made.undo();
            }
        })?;
        let store = Self::of(spec, medium, geometry, made);
        for note in &notes {
            tracing::warn!(backend = store.label, "{note}");
        }
        let file = store.file_id();
        Ok(Arc::new(Self {
            notes,
            file,
            ..store
        }))
    }

    /// Stands for a backend that cannot be opened: what reads or writes it finds that it is not ready. Its
    /// geometry is that of the specification, and its capacity one block where that names none.
    #[must_use]
    pub fn absent(spec: &Spec) -> Arc<Self> {
        let capacity = match &spec.source {
            Source::File { size, .. } => size.unwrap_or(0),
            Source::Device { .. } => 0,
            Source::Ram { size } | Source::Null { size } => *size,
        };
        let block = u64::from(spec.block_size);
        let geometry = plain(spec, (capacity - capacity % block).max(block));
        Arc::new(Self::of(spec, Medium::Absent, geometry, None))
    }

    fn of(spec: &Spec, medium: Medium, geometry: Geometry, made: Option<Made>) -> Self {
        Self {
            medium,
            faults: spec.faults.clone(),
            flush: FlushState::default(),
            capacity: AtomicU64::new(geometry.capacity),
            geometry,
            label: match &spec.source {
                Source::File { path, .. } | Source::Device { path } => path.display().to_string(),
                Source::Ram { .. } => "RAM".into(),
                Source::Null { .. } => "nothing".into(),
            },
            made: Mutex::new(made),
            errors: Errors::default(),
            space: Measured::default(),
            waiting: Waiting::default(),
            file: None,
            notes: Vec::new(),
        }
    }

    /// Opens a medium and measures it; what is changed for that is noted in `made`.
    fn open_medium(
        spec: &Spec,
        ram: Arc<Ram>,
        made: &mut Option<Made>,
    ) -> Result<(Medium, Geometry, Vec<String>), OpenError> {
        // Before anything is opened: on an export of ours, the open itself would wait for us.
        check_mount(&spec.source)?;
        let (medium, mut geometry) = match &spec.source {
            Source::File { path, size, create } => {
                let file = open_file(spec, path, *size, *create, made)?;
                measure_file(spec, path, file)?
            }
            Source::Device { path } => open_device(spec, path)?,
            Source::Ram { size } => (
                Medium::Ram(ram),
                Geometry {
                    unmap_granularity: Some(ram::CHUNK as u32),
                    ..plain(spec, *size)
                },
            ),
            Source::Null { size } => (
                Medium::Null,
                Geometry {
                    unmap_granularity: Some(spec.block_size),
                    ..plain(spec, *size)
                },
            ),
        };
        // What files and devices report need not be a multiple of the block size that the
        // configuration chooses.
        let size = geometry.capacity;
        geometry.capacity = size - size % u64::from(spec.block_size);
        if geometry.capacity == 0 {
            return Err(OpenError::Empty {
                size,
                block_size: spec.block_size,
            });
        }
        Ok((medium, geometry, hints::notes(spec, size)))
    }

    /// Returns notes for the administrator, from when it was opened.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns its geometry; the capacity is the present one.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry {
            capacity: self.capacity(),
            ..self.geometry
        }
    }

    /// Identifies the cache that holds data before a flush: the content of a RAM disk, which is lost with it,
    /// or the kernel's page cache and the devices below, which survive this process but not a reboot.
    #[must_use]
    pub fn cache_generation(&self) -> [u8; 16] {
        match &self.medium {
            Medium::Ram(ram) => ram.generation(),
            Medium::File { .. } | Medium::Null | Medium::Absent => *BOOT,
        }
    }

    /// Returns its content, if it is a RAM disk.
    #[must_use]
    pub fn ram(&self) -> Option<Arc<Ram>> {
        match &self.medium {
            Medium::Ram(ram) => Some(Arc::clone(ram)),
            Medium::File { .. } | Medium::Null | Medium::Absent => None,
        }
    }

    /// Checks that it would be opened again as it is: a file that was moved or replaced under us, or that
    /// is shorter than the configuration says, would not. Nor would one with a failure of a flush
    /// that was not cleared: the shutdown before the next program starts would fail.
    ///
    /// # Errors
    /// [`OpenError`]: why not.
    pub fn check_reopen(&self, spec: &Spec) -> Result<(), OpenError> {
        if let Some(failure) = self.flush_failure() {
            let error = io::Error::from_raw_os_error(failure.errno);
            return Err(OpenError::FlushFailed(error));
        }
        if let (Medium::Absent, Source::File { path, .. } | Source::Device { path }) =
            (&self.medium, &spec.source)
            && opening::is_waiting(path)
        {
            // execve(2) waits for all threads to end, and nothing would be served meanwhile.
            let why = "a thread waits for its file system, which does not answer";
            let error = io::Error::new(io::ErrorKind::TimedOut, why);
            return Err(io_error(path, "release it")(error));
        }
        let (Medium::File { fd, device, .. }, Source::File { path, .. } | Source::Device { path }) =
            (&self.medium, &spec.source)
        else {
            return Ok(());
        };
        check_mount(&spec.source)?;
        let file = File::from(fd.try_clone().map_err(io_error(path, "examine it"))?);
        let open = file.metadata().map_err(io_error(path, "examine it"))?;
        let there = std::fs::metadata(path).map_err(io_error(path, "find it again"))?;
        let is_same = if *device {
            there.file_type().is_block_device() && there.rdev() == open.rdev()
        } else {
            (there.dev(), there.ino()) == (open.dev(), open.ino())
        };
        if !is_same {
            return Err(OpenError::Moved { path: path.clone() });
        }
        match spec.source {
            Source::File {
                size: Some(wanted),
                create,
                ..
            } if wanted > open.len() && !create => Err(OpenError::Size {
                path: path.clone(),
                actual: open.len(),
                wanted,
            }),
            _ => Ok(()),
        }
    }

    /// Present capacity in bytes, as last measured.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Acquire)
    }

    /// Makes room for the size that a backend is to have, and gives the capacity that it would have
    /// then; [`Store::set_capacity`] makes it so. `None` where that is the present one. A file that is larger
    /// already stays so.
    ///
    /// # Errors
    /// [`OpenError`]: it would shrink, or its file is smaller and may not be extended.
    pub fn grow(&self, spec: &Spec) -> Result<Option<u64>, OpenError> {
        let from = self.capacity();
        let to = match (&self.medium, &spec.source) {
            (Medium::File { fd, device, .. }, Source::File { path, size, create }) => {
                let error = |action| io_error(path, action);
                let file = File::from(fd.try_clone().map_err(error("examine it"))?);
                let actual = file.metadata().map_err(error("examine it"))?.len();
                // A file that is longer than the configuration says is served as it is: a disk is never
                // cut. An extension is noted, to be undone if the change fails elsewhere.
                match *size {
                    Some(wanted) if wanted > actual && *create && !device && !spec.read_only => {
                        extend(&file, path, wanted)?;
                        self.note_made(path, file, actual);
                        wanted
                    }
                    Some(wanted) if wanted > actual => {
                        return Err(OpenError::Size {
                            path: path.clone(),
                            actual,
                            wanted,
                        });
                    }
                    _ => actual,
                }
            }
            (_, Source::Ram { size } | Source::Null { size }) => *size,
            _ => from,
        };
        let to = to - to % u64::from(self.geometry.block_size);
        if to < from {
            return Err(OpenError::Shrinks { from, to });
        }
        Ok((to > from).then_some(to))
    }

    /// The capacity is another one from now on, in bytes.
    pub fn set_capacity(&self, bytes: u64) {
        self.capacity.store(bytes, Ordering::Release);
    }

    fn note_made(&self, path: &Path, file: File, before: u64) {
        let mut made = self.made();
        made.get_or_insert(Made {
            path: path.to_owned(),
            file,
            before: Some(before),
        });
    }

    /// Whether it stands for one that cannot be opened: see [`Store::absent`].
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self.medium, Medium::Absent)
    }

    /// Its file when it was opened, if it is one.
    #[must_use]
    pub const fn file(&self) -> Option<FileId> {
        self.file
    }

    fn file_id(&self) -> Option<FileId> {
        let Medium::File {
            fd, device: false, ..
        } = &self.medium
        else {
            return None;
        };
        let file = File::from(fd.try_clone().ok()?).metadata().ok()?;
        let born = file.created().ok();
        let born = born.and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        Some(FileId {
            device: file.dev(),
            inode: file.ino(),
            born: born.map(|born| born.as_nanos() as u64),
        })
    }

    /// The path of a file or device, or `RAM` or `nothing`.
    pub(crate) fn label(&self) -> &str {
        &self.label
    }

    /// An operation failed; whether that is a failure of the medium, which is counted.
    pub(super) fn count_error(
        &self,
        now: Instant,
        error: BackendError,
        why: &dyn fmt::Display,
    ) -> bool {
        self.errors.count(now, error, why)
    }

    /// An operation succeeded; whether the medium works again by that.
    pub(super) fn note_success(&self, now: Instant, is_write: bool) -> bool {
        self.errors.clear(now, is_write)
    }

    /// Returns the error with which operations fail at present, if they do.
    #[must_use]
    pub fn failing(&self) -> Option<Failing> {
        self.errors.failing(Instant::now(), SystemTime::now())
    }

    /// Returns the number of operations that the medium failed, by kind: `medium`, `no_space`, `read_only`, `not_ready`,
    /// `internal`.
    pub fn errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.errors.counts()
    }

    /// The room that it had when it was measured last; `None` if it is no file, or was not measured yet.
    #[must_use]
    pub fn space(&self) -> Option<Space> {
        self.space.get()
    }

    /// The flush that failed, unless it has been cleared since: acknowledged writes may be lost.
    #[must_use]
    pub fn flush_failure(&self) -> Option<FlushFailure> {
        self.flush.failure()
    }

    /// Lets flushes succeed again, after an administrator has dealt with what was lost.
    pub fn clear_flush_failure(&self) -> Option<FlushFailure> {
        self.flush.clear()
    }

    /// Takes the failure of a flush that is kept for a unit, and keeps those that come.
    pub fn keep_flush_failures(&self, keeper: Arc<dyn FlushKeeper>, unit: &Identity) {
        if let Some(failure) = self.flush.keep(keeper, unit) {
            let error = io::Error::from_raw_os_error(failure.errno);
            tracing::error!(
                backend = self.label,
                %error,
                "a flush had failed before the start: flushes fail until an administrator clears it \
                 (riserd clear-flush-failure)"
            );
        }
    }

    /// Returns when a failure of a flush is saved where failures are kept.
    pub fn wait_flush_failure_saved(&self) {
        self.flush.wait_saved();
    }

    /// Returns the number of failures of flushes that were cleared.
    pub(super) fn flush_clears(&self) -> u64 {
        self.flush.clears()
    }

    /// A flush failed: all do from now on.
    pub(super) fn on_flush_failed(&self, errno: i32) {
        if self.flush.fail(errno) {
            let error = io::Error::from_raw_os_error(errno);
            tracing::error!(
                backend = self.label,
                %error,
                "a flush failed: writes that were acknowledged may be lost; flushes fail until an \
                 administrator clears it (riserd clear-flush-failure)"
            );
        }
    }

    /// Keeps what opening or growing has changed on disk.
    pub fn keep(&self) {
        *self.made() = None;
    }

    /// The file that opening or growing has changed, if that may not stay.
    #[must_use]
    pub fn changed_file(&self) -> Option<PathBuf> {
        self.made().as_ref().map(|made| made.path.clone())
    }

    /// Takes back what opening or growing has changed on disk, before anything was served from it:
    /// removes a file that was created, and cuts one that was extended.
    pub fn undo(&self) {
        // Nothing may wait for the file system with it.
        let made = self.made().take();
        if let Some(made) = made {
            made.undo();
        }
    }

    /// It is set or taken as a whole, so poison is ignored.
    fn made(&self) -> std::sync::MutexGuard<'_, Option<Made>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Measures the backend again, for an administrator's rescan or a timer, and says what changed;
    /// [`Store::set_capacity`] makes it so.
    ///
    /// # Errors
    /// Where the file or device cannot be measured any more.
    pub fn measure(&self) -> io::Result<Option<Resized>> {
        let Medium::File { fd, device, .. } = &self.medium else {
            return Ok(None);
        };
        let size = if *device {
            sys::device_size(fd.as_fd())?
        } else {
            // Closing a copy of the descriptor would have some file systems write everything back first.
            u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0)
        };
        let to = size - size % u64::from(self.geometry.block_size);
        let from = self.capacity();
        Ok((from != to).then_some(Resized { from, to }))
    }
}

/// The geometry of a medium that is not a file; nothing is volatile where nothing survives anyway,
/// but the initiator sees the cache it was configured with.
pub(super) fn plain(spec: &Spec, capacity: u64) -> Geometry {
    Geometry {
        capacity,
        block_size: spec.block_size,
        // Memory has no larger block that a small write would have to read first.
        physical_block: spec.block_size,
        unmap_granularity: None,
        read_only: spec.read_only,
        write_cache: spec.write_cache,
        rotational: false,
        direct: false,
    }
}

pub(super) fn io_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> OpenError {
    let path = path.to_owned();
    move |source| OpenError::Io {
        path,
        action,
        source,
    }
}
