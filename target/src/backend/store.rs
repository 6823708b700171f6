//! [`Store`]: an open backend, shared by all workers.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Instant, SystemTime};

use riser_config::{Faults, Source, Spec};
use riser_file::OpenFile;
use riser_reactor::Handle;
use riser_reactor::simulated::Disk;
use riser_scsi::config::{Identity, ProtectionFormat};
use riser_scsi::step::BackendError;
use rustix::fs::{FileType, SeekFrom, Stat, fstat, seek, stat};

use super::cause::Cause;
use super::file_id::FileId;
use super::flush::{FlushFailure, FlushFailures, FlushKeeper};
use super::health::{Errors, Failing, Measured, Space};
use super::hints;
use super::lost_flushes;
use super::made::Made;
use super::medium::{
    Geometry, Medium, check_mount, file_len, measure_file, open_device, open_file, plain, simulated,
};
use super::medium_faults::{MediumFaults, too_small};
use super::open_error::{OpenError, io_error};
use super::protected::{Intents, Layout};
use super::ram::{self, Ram};
use super::sys;
use super::threads::{Entry, close};
use super::waiting::{Waiting, is_waiting};
use crate::host::{Host, SystemHost};

/// Change of a backend's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resized {
    /// Previous capacity in bytes.
    pub from: u64,
    /// New capacity in bytes.
    pub to: u64,
}

/// An open backend, shared by all workers. Each worker accesses it via its own
/// [`Driver`](super::Driver). It is unlocked when the last reference is dropped.
#[derive(Debug)]
pub struct Store {
    pub(super) medium: Medium,
    host: Arc<dyn Host>,
    pub(super) faults: Option<Arc<Faults>>,
    /// The record and our user token. They are created by the first access, unless the record is
    /// shared with previous stores.
    flush: OnceLock<(Arc<FlushFailures>, Arc<()>)>,
    pub(super) geometry: Geometry,
    /// Frames of the medium, if blocks have protection information.
    pub(super) layout: Option<Layout>,
    /// Log of changes, if it is a protected file that can be changed.
    pub(super) intents: Option<Intents>,
    /// Error number of a failed flush during its recovery. It is added to the record.
    pub(super) recovery_failure: Option<i32>,
    /// Current type of the protection information, if FORMAT UNIT can change it.
    pub(super) protection_format: Mutex<ProtectionFormat>,
    /// Name in the configuration, for the log.
    name: String,
    /// Description of the source for users.
    label: String,
    /// Path of the file or device.
    path: Option<PathBuf>,
    capacity: AtomicU64,
    made: Mutex<Option<Made>>,
    errors: Errors,
    pub(super) medium_faults: MediumFaults,
    pub(super) space: Measured,
    /// Threads waiting for its file system.
    pub(super) waiting: Waiting,
    /// Time of the first query to its file system without a response, until there is a response.
    pub(super) silent: Mutex<Option<Instant>>,
    /// File identifier from when it was opened, if it is a file.
    file: Option<FileId>,
    notes: Vec<String>,
    /// Lists the thread that closes the file. Dropped after all other fields.
    closing: Option<Entry>,
}

impl Drop for Store {
    fn drop(&mut self) {
        self.closing = self.list_thread();
    }
}

impl Store {
    /// Opens, locks and measures a backend.
    ///
    /// # Errors
    /// Returns [`OpenError`]. Every message identifies the backend.
    pub fn open(spec: &Spec) -> Result<Arc<Self>, OpenError> {
        Self::open_with(spec, Arc::default())
    }

    /// Same as [`Store::open`], with the content of a RAM disk.
    ///
    /// # Errors
    /// Same as [`Store::open`].
    pub fn open_with(spec: &Spec, ram: Arc<Ram>) -> Result<Arc<Self>, OpenError> {
        let open = |made: &mut _| Self::open_medium(spec, ram, made);
        Self::open_by(spec, Arc::new(SystemHost), open)
    }

    /// Creates a backend on a disk in memory, for simulations. Its threads and dates are provided
    /// by `host`. The disk replaces the file or device of the specification.
    ///
    /// # Errors
    /// Same as [`Store::open`].
    ///
    /// # Panics
    /// Panics if the specification is not for a file or device.
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
        if spec.protection.is_some() && matches!(spec.source, Source::Device { .. }) {
            return Err(OpenError::ProtectedDevice);
        }
        let mut made = None;
        let opened = open(&mut made);
        let (medium, geometry, notes) = opened.inspect_err(|_| {
            if let Some(made) = &made {
                made.undo();
            }
        })?;
        let mut store = Self::of(spec, medium, geometry, made, host);
        store.file = store.file_id();
        store.open_intents().inspect_err(|_| store.undo())?;
        for note in &notes {
            tracing::warn!(backend = store.name, "{note}");
        }
        // Provide this from the start, before the first periodic measurement.
        if let Err(error) = store.measure_space() {
            tracing::debug!(backend = store.name, %error, "cannot measure the free space of a file \
                                                           system");
        }
        store.notes = notes;
        Ok(Arc::new(store))
    }

    /// Creates a placeholder for a backend that cannot be opened. All reads and writes fail because
    /// it is not ready. The geometry is based on the specification. If this does not include the
    /// capacity, it is a single block.
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
            flush: OnceLock::new(),
            capacity: AtomicU64::new(geometry.capacity),
            geometry,
            layout: spec.protection.map(|_| Layout::new(spec.block_size)),
            intents: None,
            recovery_failure: None,
            protection_format: Mutex::new(geometry.protection_format),
            name: spec.name.clone(),
            label: match &spec.source {
                Source::File { path, .. } | Source::Device { path } => path.display().to_string(),
                Source::Ram { .. } => "RAM".into(),
                Source::Null { .. } => "nothing".into(),
            },
            path: spec.source.path().map(Path::to_owned),
            made: Mutex::new(made),
            errors: Errors::default(),
            medium_faults: MediumFaults::default(),
            space: Measured::default(),
            waiting: Waiting::default(),
            silent: Mutex::default(),
            file: None,
            notes: Vec::new(),
            closing: None,
        }
    }

    /// Opens and measures a medium. Changes made for this are recorded in `made`.
    fn open_medium(
        spec: &Spec,
        ram: Arc<Ram>,
        made: &mut Option<Made>,
    ) -> Result<(Medium, Geometry, Vec<String>), OpenError> {
        // Do this before opening anything, because opening a path on an export of this daemon would
        // block waiting for us.
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
                    unmap_granularity: Some(match spec.protection {
                        Some(_) => Layout::new(spec.block_size).blocks_of(ram::CHUNK) as u32,
                        None => ram::CHUNK as u32,
                    }),
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

    /// Returns the provider of threads and dates.
    pub(super) fn host(&self) -> &Arc<dyn Host> {
        &self.host
    }

    /// Returns the open file or device, unless it is another medium.
    pub(super) fn open_file(&self) -> Option<&OpenFile> {
        match &self.medium {
            Medium::File(file) => Some(file),
            Medium::Ram(_) | Medium::Null | Medium::Absent => None,
        }
    }

    /// Returns whether system calls are used to access this backend, which may hang.
    pub(super) fn may_hang(&self) -> bool {
        self.open_file()
            .is_some_and(|file| file.handle.fd().is_some())
    }

    /// Lists a thread that accesses or closes the file until the entry is dropped, unless it cannot
    /// hang.
    #[must_use]
    pub(crate) fn list_thread(&self) -> Option<Entry> {
        self.may_hang().then(|| Entry::new(self.label.clone()))
    }

    /// Returns notes for the administrator, created when the backend was opened.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the geometry with the current capacity and protection information.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry {
            capacity: self.capacity(),
            protection_format: self.protection_format(),
            ..self.geometry
        }
    }

    /// Identifies the cache that holds data before a flush. This is the content of a RAM disk,
    /// which is lost together with it. Otherwise, it is the page cache of the kernel and the
    /// devices below, which survive this process but not a reboot.
    #[must_use]
    pub fn cache_generation(&self) -> [u8; 16] {
        match &self.medium {
            Medium::Ram(ram) => ram.generation(),
            Medium::File(_) | Medium::Null | Medium::Absent => self.host.boot(),
        }
    }

    /// Returns the content if it is a RAM disk.
    #[must_use]
    pub fn ram(&self) -> Option<Arc<Ram>> {
        match &self.medium {
            Medium::Ram(ram) => Some(Arc::clone(ram)),
            Medium::File(_) | Medium::Null | Medium::Absent => None,
        }
    }

    /// Checks that the backend could be opened again. This fails if a file was renamed, replaced or
    /// truncated, or is shorter than configured. It also fails if a flush failure was not cleared,
    /// because the shutdown before starting the next program would fail.
    ///
    /// # Errors
    /// Returns [`OpenError`] with the reason.
    pub fn check_reopen(&self, spec: &Spec) -> Result<(), OpenError> {
        if let Some(failure) = self.flush_failure() {
            let error = io::Error::from_raw_os_error(failure.errno);
            return Err(OpenError::FlushFailed(error));
        }
        if let (Medium::Absent, Source::File { path, .. } | Source::Device { path }) =
            (&self.medium, &spec.source)
            && is_waiting(path)
        {
            // execve(2) waits for all threads to exit, and nothing would be served in the meantime.
            let why = "a thread is blocked by its file system, which does not respond";
            let error = io::Error::new(io::ErrorKind::TimedOut, why);
            return Err(io_error(path, "release it")(error));
        }
        let (Medium::File(file), Source::File { path, .. } | Source::Device { path }) =
            (&self.medium, &spec.source)
        else {
            return Ok(());
        };
        // A disk in memory doesn't have a path, so it can't be replaced.
        let Some(fd) = file.handle.fd() else {
            return Ok(());
        };
        check_mount(&spec.source)?;
        let open = fstat(fd).map_err(|errno| io_error(path, "examine it")(errno.into()))?;
        let found = stat(path).map_err(|errno| io_error(path, "find it again")(errno.into()))?;
        if !is_same(&open, &found, file.device.is_some()) {
            return Err(OpenError::Moved { path: path.clone() });
        }
        let actual = sys::file_size(&file.handle).map_err(io_error(path, "examine it"))?;
        match spec.source {
            Source::File {
                size: Some(wanted),
                create,
                ..
            } if file_len(spec, wanted) > actual && !create => Err(OpenError::Size {
                path: path.clone(),
                actual,
                wanted: file_len(spec, wanted),
            }),
            _ => Ok(()),
        }
    }

    /// Returns the current capacity in bytes, as last measured.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Acquire)
    }

    /// Grows the medium to the configured size of the backend. Returns the new capacity, to be
    /// applied by [`Store::set_capacity`], or `None` if it is unchanged. A file that is larger than
    /// configured is not changed.
    ///
    /// # Errors
    /// Returns [`OpenError`] if it would shrink, or if its file is too small and must not be
    /// extended.
    pub fn grow(&self, spec: &Spec) -> Result<Option<u64>, OpenError> {
        let from = self.capacity();
        let to = match (&self.medium, &spec.source) {
            (Medium::File(file), Source::File { path, size, create }) => {
                let (device, file) = (file.device.is_some(), &file.handle);
                let error = |action| io_error(path, action);
                let actual = sys::file_size(file).map_err(error("examine it"))?;
                // A file that is longer than configured is served as it is, because we never shrink
                // a disk. An extension is recorded, so that it can be reverted if the change fails
                // later.
                match size.map(|size| file_len(spec, size)) {
                    Some(wanted) if wanted > actual && *create && !device && !spec.read_only => {
                        sys::extend(file, wanted).map_err(error("extend it"))?;
                        self.note_made(path, file.clone(), actual);
                        self.served(wanted)
                    }
                    Some(wanted) if wanted > actual => {
                        return Err(OpenError::Size {
                            path: path.clone(),
                            actual,
                            wanted,
                        });
                    }
                    _ => self.served(actual),
                }
            }
            (_, Source::Ram { size } | Source::Null { size }) => self.whole_blocks(*size),
            _ => from,
        };
        if to < from {
            return Err(OpenError::Shrinks { from, to });
        }
        Ok((to > from).then_some(to))
    }

    /// Sets the capacity in bytes.
    pub fn set_capacity(&self, bytes: u64) {
        self.capacity.store(bytes, Ordering::Release);
    }

    fn note_made(&self, path: &Path, file: Handle, before: u64) {
        let mut made = self.made();
        made.get_or_insert(Made {
            path: path.to_owned(),
            file,
            before: Some(before),
            has_new_header: false,
        });
    }

    /// Returns true for a placeholder of a backend that cannot be opened. See [`Store::absent`].
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self.medium, Medium::Absent)
    }

    /// Returns the file identifier from when it was opened, if it is a file.
    #[must_use]
    pub const fn file(&self) -> Option<FileId> {
        self.file
    }

    fn file_id(&self) -> Option<FileId> {
        let file = self.open_file()?;
        let fd = file.handle.fd().filter(|_| file.device.is_none())?;
        let file = File::from(fd.try_clone_to_owned().ok()?);
        FileId::of(&file).ok()
    }

    /// Returns the path of a file or device.
    pub(super) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns the name of the backend in the configuration.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the path of a file or device, or `RAM` or `nothing`.
    pub(crate) fn label(&self) -> &str {
        &self.label
    }

    /// Called for a failed operation. Returns true if this is a failure of the medium, which is
    /// counted.
    pub(super) fn count_error(
        &self,
        now: Instant,
        error: BackendError,
        why: &dyn fmt::Display,
    ) -> bool {
        self.errors.count(now, error, why)
    }

    /// Called for a successful operation. Returns true if this clears a failure.
    pub(super) fn note_success(&self, now: Instant, is_write: bool) -> bool {
        self.errors.clear(now, is_write)
    }

    /// Returns all reasons why the backend requires an operator at `now`, starting with the most
    /// serious one. `date` is the corresponding date, and `wanted` is the configured size.
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

    /// Returns the fault of a file with a smaller size than configured, which is served since a
    /// rescan.
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

    /// Returns the current failure of operations at `now`, if any. `date` is the corresponding
    /// date.
    #[must_use]
    pub fn failing(&self, now: Instant, date: SystemTime) -> Option<Failing> {
        self.errors.failing(now, date)
    }

    /// Returns the number of failed operations of the medium, by kind: `medium`, `no_space`,
    /// `read_only`, `not_ready`, `internal`. Each kind is included.
    pub fn errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.errors.counts()
    }

    /// Returns the last measurement of available space. `None` if it is not a file, or was not
    /// measured yet.
    #[must_use]
    pub fn space(&self) -> Option<Space> {
        self.space.get()
    }

    fn flush(&self) -> &FlushFailures {
        let create = || {
            let failures = Arc::default();
            self.record_recovery(&failures);
            (failures, Arc::default())
        };
        &self.flush.get_or_init(create).0
    }

    fn record_recovery(&self, failures: &FlushFailures) {
        if let Some(errno) = self.recovery_failure {
            let host = &self.host;
            let date = host.date(Instant::now());
            failures.fail(errno, date, host.threads(), self.list_thread());
        }
    }

    /// Uses the flush failures of previous stores for the same unit. Must be called before the
    /// store is used.
    pub(crate) fn share_flush_failures(&self, failures: Arc<FlushFailures>) {
        let user = failures.user();
        self.record_recovery(&failures);
        let is_shared = self.flush.set((failures, user)).is_ok();
        debug_assert!(is_shared, "the store is already in use");
    }

    /// Returns the flush failure that was not cleared, if any. Acknowledged writes may be lost.
    #[must_use]
    pub fn flush_failure(&self) -> Option<FlushFailure> {
        self.flush().failure()
    }

    /// Clears the flush failure, so that flushes can succeed again. Called after an administrator
    /// has handled the loss of data.
    pub fn clear_flush_failure(&self) -> Option<FlushFailure> {
        // Data that was written since the failure may be lost as well.
        self.keep_intents();
        self.flush().clear()
    }

    /// Closes a descriptor on a separate thread, because the kernel may write back all cached data
    /// of its file.
    pub(crate) fn close_descriptor(&self, descriptor: Handle) {
        if self.may_hang() {
            close(self.host.threads(), self.label().to_owned(), descriptor);
        }
    }

    /// Loads a saved flush failure for a unit, and saves future failures. If the saved state cannot
    /// be read, this is treated as a failure at `now`.
    pub fn keep_flush_failures(&self, keeper: Arc<dyn FlushKeeper>, unit: &Identity, now: Instant) {
        if let Some(failure) = self.flush().keep(keeper, unit, self.host.date(now)) {
            let error = io::Error::from_raw_os_error(failure.errno);
            tracing::error!(
                backend = self.name,
                %error,
                "a flush failed before the start: flushes fail until an administrator clears the \
                 failure (riserd clear-flush-failure)"
            );
        }
    }

    /// Returns the number of flush failures that were cleared.
    pub(super) fn flush_clears(&self) -> u64 {
        self.flush().clears()
    }

    /// Called when a flush has failed, so that all subsequent flushes fail.
    pub(crate) fn on_flush_failed(&self, errno: i32, now: Instant) {
        self.keep_intents();
        let host = &self.host;
        let date = host.date(now);
        // Until the failure is saved, this program must not be replaced by another one.
        let entry = self.list_thread();
        if self.flush().fail(errno, date, host.threads(), entry) {
            let error = io::Error::from_raw_os_error(errno);
            tracing::error!(
                backend = self.name,
                %error,
                "a flush failed: acknowledged writes may be lost; flushes fail until an \
                 administrator clears the failure (riserd clear-flush-failure)"
            );
        }
    }

    /// Keeps the changes made on disk when opening or growing the backend, because it is served now.
    pub fn keep(&self) {
        *self.made() = None;
        if let (Some(_), Some(file)) = (self.recovery_failure, self.file) {
            // The unit that is served has the failure, and an administrator can clear it.
            self.flush();
            lost_flushes::remove(file);
        }
    }

    /// Returns the previous length of its file in bytes, if it was extended when opening or growing
    /// it.
    #[must_use]
    pub fn extended_from(&self) -> Option<u64> {
        self.made().as_ref().and_then(|made| made.before)
    }

    /// Returns the file that was changed when opening or growing it, if these changes may still be
    /// reverted.
    #[must_use]
    pub fn changed_file(&self) -> Option<PathBuf> {
        self.made().as_ref().map(|made| made.path.clone())
    }

    /// Reverts the changes made on disk when opening or growing it, before it was served: removes a
    /// file that was created, and truncates a file that was extended.
    pub fn undo(&self) {
        // Don't hold the lock while waiting for the file system.
        let made = self.made().take();
        if let Some(made) = made {
            made.undo();
        }
    }

    /// The value is replaced as a whole, so ignore poisoning.
    fn made(&self) -> std::sync::MutexGuard<'_, Option<Made>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Measures the backend again, for a rescan by an administrator or periodically. Returns the
    /// change, to be applied by [`Store::set_capacity`].
    ///
    /// # Errors
    /// Fails if the file or device cannot be measured.
    pub fn measure(&self) -> io::Result<Option<Resized>> {
        let Some(file) = self.open_file() else {
            return Ok(None);
        };
        let (from, to) = (self.capacity(), self.size(file)?);
        Ok((from != to).then_some(Resized { from, to }))
    }

    /// Measures the file or device, rounded down to whole blocks.
    pub(super) fn size(&self, file: &OpenFile) -> io::Result<u64> {
        let size = match file.handle.fd() {
            Some(fd) if file.device.is_some() => seek(fd, SeekFrom::End(0))?,
            _ => sys::file_size(&file.handle)?,
        };
        Ok(self.served(size))
    }

    /// Returns the capacity of a file or device of this size.
    fn served(&self, size: u64) -> u64 {
        match self.layout {
            Some(layout) => layout.capacity(size),
            None => self.whole_blocks(size),
        }
    }

    fn whole_blocks(&self, size: u64) -> u64 {
        size - size % u64::from(self.geometry.block_size)
    }
}

/// Rounds the capacity down to whole blocks, because the size of files and devices does not have to
/// be a multiple of the configured block size.
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
