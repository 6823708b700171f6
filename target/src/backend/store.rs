//! [`Store`]: one opened backend, shared by all workers.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use riser_config::{Faults, Source, Spec};
use riser_reactor::Handle;
use riser_reactor::simulated::Disk;
use riser_scsi::config::Identity;
use riser_scsi::step::BackendError;
use rustix::fs::{FileType, Stat, fstat, stat};

use super::cause::Cause;
use super::file_id::FileId;
use super::flush::{FlushFailure, FlushKeeper, FlushState};
use super::health::{Errors, Failing, Measured, Space};
use super::hints;
use super::made::Made;
use super::medium::{
    Geometry, Medium, check_mount, measure_file, open_device, open_file, plain, simulated,
};
use super::medium_faults::{MediumFaults, too_small};
use super::open_error::{OpenError, io_error};
use super::ram::{self, Ram};
use super::sys;
use super::turns::Turns;
use super::waiting::{Waiting, is_waiting};
use crate::host::{Host, SystemHost};

/// A backend changed its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resized {
    /// Capacity before, in bytes.
    pub from: u64,
    /// Capacity now, in bytes.
    pub to: u64,
}

/// One opened backend. Shared by all workers; each reaches it through its own
/// [`Driver`](super::Driver). Closing the last reference unlocks it.
#[derive(Debug)]
pub struct Store {
    pub(super) medium: Medium,
    host: Arc<dyn Host>,
    pub(super) faults: Option<Arc<Faults>>,
    flush: FlushState,
    geometry: Geometry,
    /// Description of the source, for people.
    /// Name in the configuration, for the log.
    name: String,
    label: String,
    /// Path of the file or device.
    path: Option<PathBuf>,
    capacity: AtomicU64,
    made: Mutex<Option<Made>>,
    /// Requests that read or change a file through the page cache.
    pub(super) turns: Arc<Turns>,
    /// Long changes of a file in memory that are in a ring. The kernel makes one after the other, and
    /// gives back gigabytes in one.
    pub(super) changing: AtomicUsize,
    errors: Errors,
    pub(super) medium_faults: MediumFaults,
    pub(super) space: Measured,
    /// Threads that wait for its file system.
    pub(super) waiting: Waiting,
    /// Time of the first question to its file system that was not answered, until one is.
    pub(super) silent: Mutex<Option<Instant>>,
    /// Its file when it was opened, if it is one.
    file: Option<FileId>,
    notes: Vec<String>,
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
        let open = |made: &mut _| Self::open_medium(spec, ram, made);
        Self::open_by(spec, Arc::new(SystemHost), open)
    }

    /// A backend on a disk in memory, for simulations; its threads and dates are those of `host`.
    /// The disk stands for the specification's file or device.
    ///
    /// # Errors
    /// Those of [`Store::open`].
    ///
    /// # Panics
    /// If the specification is that of no file or device.
    pub fn on_disk(spec: &Spec, disk: &Disk, host: Arc<dyn Host>) -> Result<Arc<Self>, OpenError> {
        Self::open_by(spec, host, |made| {
            let (medium, geometry) = simulated(spec, disk, made)?;
            whole_blocks(spec, medium, geometry)
        })
    }

    fn open_by(
        spec: &Spec,
        host: Arc<dyn Host>,
        open: impl FnOnce(&mut Option<Made>) -> Result<(Medium, Geometry, Vec<String>), OpenError>,
    ) -> Result<Arc<Self>, OpenError> {
        if !matches!(spec.block_size, 512 | 4096) {
            return Err(OpenError::BlockSize(spec.block_size));
        }
        let mut made = None;
        let opened = open(&mut made);
        let (medium, geometry, notes) = opened.inspect_err(|_| {
            if let Some(made) = &made {
                made.undo();
            }
        })?;
        let store = Self::of(spec, medium, geometry, made, host);
        for note in &notes {
            tracing::warn!(backend = store.name, "{note}");
        }
        let file = store.file_id();
        // Known from the start on, before it is examined regularly.
        if let Err(error) = store.measure_space() {
            tracing::debug!(backend = store.name, %error, "cannot measure the room of a file system");
        }
        Ok(Arc::new(Self {
            notes,
            file,
            ..store
        }))
    }

    /// Stands for a backend that cannot be opened: what reads or writes it finds that it is not
    /// ready. Its geometry is that of the specification, and its capacity one block where that
    /// names none.
    #[must_use]
    pub fn absent(spec: &Spec) -> Arc<Self> {
        let capacity = match &spec.source {
            Source::File { size, .. } => size.unwrap_or(0),
            Source::Device { .. } => 0,
            Source::Ram { size } | Source::Null { size } => *size,
        };
        let block = u64::from(spec.block_size);
        let geometry = plain(spec, (capacity - capacity % block).max(block));
        let host = Arc::new(SystemHost);
        Arc::new(Self::of(spec, Medium::Absent, geometry, None, host))
    }

    fn of(
        spec: &Spec,
        medium: Medium,
        geometry: Geometry,
        made: Option<Made>,
        host: Arc<dyn Host>,
    ) -> Self {
        Self {
            medium,
            host,
            faults: spec.faults.clone(),
            flush: FlushState::default(),
            capacity: AtomicU64::new(geometry.capacity),
            geometry,
            name: spec.name.clone(),
            label: match &spec.source {
                Source::File { path, .. } | Source::Device { path } => path.display().to_string(),
                Source::Ram { .. } => "RAM".into(),
                Source::Null { .. } => "nothing".into(),
            },
            path: spec.source.path().map(Path::to_owned),
            made: Mutex::new(made),
            turns: Arc::default(),
            changing: AtomicUsize::new(0),
            errors: Errors::default(),
            medium_faults: MediumFaults::default(),
            space: Measured::default(),
            waiting: Waiting::default(),
            silent: Mutex::default(),
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
        let (medium, geometry) = match &spec.source {
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
        whole_blocks(spec, medium, geometry)
    }

    /// Where its threads and dates come from.
    pub(super) fn host(&self) -> &dyn Host {
        &*self.host
    }

    /// Whether it is on a disk in memory, which never hangs.
    pub(super) fn is_simulated(&self) -> bool {
        matches!(&self.medium, Medium::File { file, .. } if file.fd().is_none())
    }

    /// Returns notes for the administrator, from when it was opened.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Whether no reader can get a block of which a part is old and the rest new. No disk divides its
    /// own blocks; but the page cache does, and file systems may use it for direct I/O as well.
    pub(super) fn keeps_blocks_whole(&self) -> bool {
        let least = match self.medium {
            Medium::File {
                align: Some(_),
                device: true,
                unit,
                ..
            } => unit,
            _ => 0,
        };
        u64::from(self.geometry.block_size) <= least
    }

    /// Returns its geometry; the capacity is the present one.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry {
            capacity: self.capacity(),
            ..self.geometry
        }
    }

    /// Identifies the cache that holds data before a flush: the content of a RAM disk, which is
    /// lost with it, or the kernel's page cache and the devices below, which survive this process
    /// but not a reboot.
    #[must_use]
    pub fn cache_generation(&self) -> [u8; 16] {
        match &self.medium {
            Medium::Ram(ram) => ram.generation(),
            Medium::File { .. } | Medium::Null | Medium::Absent => self.host.boot(),
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

    /// Checks that it would be opened again as it is: a file that was moved or replaced under us,
    /// or that is shorter than the configuration says, would not. Nor would one with a failure of a
    /// flush that was not cleared: the shutdown before the next program starts would fail.
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
            && is_waiting(path)
        {
            // execve(2) waits for all threads to end, and nothing would be served meanwhile.
            let why = "a thread waits for its file system, which does not answer";
            let error = io::Error::new(io::ErrorKind::TimedOut, why);
            return Err(io_error(path, "release it")(error));
        }
        let (
            Medium::File { file, device, .. },
            Source::File { path, .. } | Source::Device { path },
        ) = (&self.medium, &spec.source)
        else {
            return Ok(());
        };
        // A disk in memory has no name under which there could be another one.
        let Some(fd) = file.fd() else {
            return Ok(());
        };
        check_mount(&spec.source)?;
        let open = fstat(fd).map_err(|errno| io_error(path, "examine it")(errno.into()))?;
        let found = stat(path).map_err(|errno| io_error(path, "find it again")(errno.into()))?;
        if !is_same(&open, &found, *device) {
            return Err(OpenError::Moved { path: path.clone() });
        }
        let actual = sys::file_size(file).map_err(io_error(path, "examine it"))?;
        match spec.source {
            Source::File {
                size: Some(wanted),
                create,
                ..
            } if wanted > actual && !create => Err(OpenError::Size {
                path: path.clone(),
                actual,
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
    /// then; [`Store::set_capacity`] makes it so. `None` where that is the present one. A file that
    /// is larger already stays so.
    ///
    /// # Errors
    /// [`OpenError`]: it would shrink, or its file is smaller and may not be extended.
    pub fn grow(&self, spec: &Spec) -> Result<Option<u64>, OpenError> {
        let from = self.capacity();
        let to = match (&self.medium, &spec.source) {
            (Medium::File { file, device, .. }, Source::File { path, size, create }) => {
                let error = |action| io_error(path, action);
                let actual = sys::file_size(file).map_err(error("examine it"))?;
                // A file that is longer than the configuration says is served as it is: a disk is
                // never cut. An extension is noted, to be undone if the change fails elsewhere.
                match *size {
                    Some(wanted) if wanted > actual && *create && !device && !spec.read_only => {
                        sys::extend(file, wanted).map_err(error("extend it"))?;
                        self.note_made(path, file.clone(), actual);
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

    fn note_made(&self, path: &Path, file: Handle, before: u64) {
        let mut made = self.made();
        made.get_or_insert(Made {
            path: path.to_owned(),
            file,
            before: Some(before),
        });
    }

    /// Returns true if it stands for one that cannot be opened: see [`Store::absent`].
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
            file,
            device: false,
            ..
        } = &self.medium
        else {
            return None;
        };
        let file = File::from(file.fd()?.try_clone_to_owned().ok()?);
        FileId::of(&file).ok()
    }

    /// The path of a file or device.
    pub(super) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The backend's name in the configuration.
    pub(crate) fn name(&self) -> &str {
        &self.name
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

    /// Returns everything for which the backend needs an operator at `now`, whose date is `date`, the
    /// most serious first. `wanted` is the size in the configuration.
    #[must_use]
    pub fn problems(&self, wanted: Option<u64>, now: Instant, date: SystemTime) -> Vec<Failing> {
        let failing = self.failing(now, date);
        let (gone, failing) = failing.into_iter().partition(Failing::is_gone);
        let mut all: Vec<Failing> = gone;
        all.extend(self.medium_faults());
        all.extend(self.smaller_than(wanted, date));
        all.extend(self.flush_failure().map(|failure| Failing {
            since: failure.at,
            why: format!(
                "a flush failed ({}): acknowledged writes may be lost, and flushes fail until `riserd \
                 clear-flush-failure`",
                io::Error::from_raw_os_error(failure.errno)
            ),
            cause: Cause::FlushFailed,
        }));
        all.extend::<Vec<_>>(failing);
        all
    }

    /// Returns the fault of a file that has been served smaller than the configuration says since
    /// a rescan.
    fn smaller_than(&self, wanted: Option<u64>, date: SystemTime) -> Option<Failing> {
        let (wanted, served) = (wanted?, self.capacity());
        let is_smaller = served < wanted - wanted % u64::from(self.geometry.block_size);
        let path = self.path().filter(|_| is_smaller && !self.is_absent())?;
        Some(Failing {
            since: date,
            why: too_small(path, served, wanted),
            cause: Cause::Truncated,
        })
    }

    /// Returns the error with which operations fail at `now`, whose date is `date`, if they do.
    #[must_use]
    pub fn failing(&self, now: Instant, date: SystemTime) -> Option<Failing> {
        self.errors.failing(now, date)
    }

    /// Returns the number of operations that the medium failed, by kind: `medium`, `no_space`,
    /// `read_only`, `not_ready`, `internal`. Each kind has an entry.
    pub fn errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.errors.counts()
    }

    /// The room that it had when it was measured last; `None` if it is no file, or was not measured
    /// yet.
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

    /// Takes the failure of a flush that is kept for a unit, and keeps those that come. What cannot
    /// be read is taken for a failure of `now`.
    pub fn keep_flush_failures(&self, keeper: Arc<dyn FlushKeeper>, unit: &Identity, now: Instant) {
        if let Some(failure) = self.flush.keep(keeper, unit, self.host.date(now)) {
            let error = io::Error::from_raw_os_error(failure.errno);
            tracing::error!(
                backend = self.name,
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
    pub(super) fn on_flush_failed(&self, errno: i32, now: Instant) {
        let host = &self.host;
        if self.flush.fail(errno, host.date(now), host.threads()) {
            let error = io::Error::from_raw_os_error(errno);
            tracing::error!(
                backend = self.name,
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

    /// The length that its file had before opening or growing extended it, in bytes.
    #[must_use]
    pub fn extended_from(&self) -> Option<u64> {
        self.made().as_ref().and_then(|made| made.before)
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
        let Medium::File { file, device, .. } = &self.medium else {
            return Ok(None);
        };
        let (from, to) = (self.capacity(), self.size(file, *device)?);
        Ok((from != to).then_some(Resized { from, to }))
    }

    /// Measures its file or device, in whole blocks.
    pub(super) fn size(&self, file: &Handle, is_device: bool) -> io::Result<u64> {
        let size = match file.fd() {
            Some(fd) if is_device => sys::device_size(fd)?,
            _ => sys::file_size(file)?,
        };
        Ok(size - size % u64::from(self.geometry.block_size))
    }
}

/// A medium with its capacity in whole blocks: what files and devices report need not be a multiple
/// of the block size that the configuration chooses.
fn whole_blocks(
    spec: &Spec,
    medium: Medium,
    mut geometry: Geometry,
) -> Result<(Medium, Geometry, Vec<String>), OpenError> {
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

/// Returns whether the file found at a path is the open file or device.
pub(super) fn is_same(open: &Stat, found: &Stat, is_device: bool) -> bool {
    match is_device {
        true => {
            FileType::from_raw_mode(found.st_mode) == FileType::BlockDevice
                && found.st_rdev == open.st_rdev
        }
        false => (found.st_dev, found.st_ino) == (open.st_dev, open.st_ino),
    }
}
