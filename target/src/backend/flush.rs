//! Flush failures of a backend, shared by all workers and saved persistently.
//!
//! The protocol is in [`riser_block`]. Each worker has a [`FlushQueue`](riser_block::FlushQueue) and
//! a separate [`FlushDescriptor`](riser_block::FlushDescriptor) for each of its stores, so that it
//! does not receive errors intended for other workers. The [`Store`](super::Store) has the
//! [`FlushRecord`]: after a failure, all flushes on all workers fail until an administrator clears
//! it. A write with FUA is checked individually and is not affected, but a flush is executed after
//! it has failed, because its error may be due to data of other writes.
//!
//! A failure also survives a restart, because it is saved by a [`FlushKeeper`]. This uses a
//! separate thread, so that workers do not have to wait for the file system where it is saved.

use std::fmt::Debug;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use riser_block::FlushRecord;
use riser_reactor::{Spawned, Threads};
use riser_scsi::config::Identity;

use super::threads::Entry;

/// Acknowledged writes of a backend did not reach the medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlushFailure {
    /// Error number of the first failed flush.
    pub errno: i32,
    /// Time of the first failed flush.
    pub at: SystemTime,
}

/// Persistent storage for flush failures, by logical unit.
pub trait FlushKeeper: Debug + Send + Sync {
    /// Returns the failure of a unit's backend that was not cleared.
    ///
    /// # Errors
    /// Fails if the saved state cannot be read, so there may be a failure.
    fn load(&self, unit: &Identity) -> io::Result<Option<FlushFailure>>;

    /// Replaces the saved failure durably.
    ///
    /// # Errors
    /// If this fails, the saved state may be the old or the new one.
    fn save(&self, unit: &Identity, failure: Option<&FlushFailure>) -> io::Result<()>;
}

/// Flush failure of a unit's backend, if any. It is shared by all stores of the unit: its data is
/// also lost if the device was removed and has returned.
#[derive(Debug, Default)]
pub(crate) struct FlushFailures {
    inner: Arc<Inner>,
    /// Thread that saves the failure, until it is joined.
    saver: Mutex<Option<Box<dyn Spawned>>>,
    /// Cloned by each store that uses this record.
    users: Arc<()>,
}

#[derive(Debug, Default)]
struct Inner {
    record: Mutex<FlushRecord<FlushFailure>>,
    /// Persistent storage, if available. This is locked while saving, to ensure that the last saved
    /// state is the current one.
    kept: Mutex<Option<Kept>>,
}

#[derive(Debug)]
struct Kept {
    keeper: Arc<dyn FlushKeeper>,
    unit: Identity,
    /// The last attempt to save was successful.
    is_saved: bool,
}

/// Values are replaced as a whole, so ignore poisoning.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn save(&self) {
        let mut kept = lock(&self.kept);
        let Some(kept) = &mut *kept else {
            return;
        };
        // Read this while `kept` is locked, so that the last of several saves uses the current
        // state.
        let failure = lock(&self.record).failure().copied();
        // This also applies if the keeper panics.
        kept.is_saved = false;
        match kept.keeper.save(&kept.unit, failure.as_ref()) {
            Ok(()) => kept.is_saved = true,
            Err(error) => {
                let serial = &kept.unit.serial;
                tracing::error!(serial, %error, "cannot save the record of a failed flush");
            }
        }
    }
}

impl FlushFailures {
    /// Returns a token to be owned by a store that uses this record.
    pub(super) fn user(&self) -> Arc<()> {
        Arc::clone(&self.users)
    }

    /// Returns whether the record is needed: there is a failure, or a store that could add one. A
    /// removed store is in use until all of its requests have completed.
    pub(crate) fn is_needed(&self) -> bool {
        // Check this first, because the last store could add a failure in between.
        Arc::strong_count(&self.users) > 1 || self.failure().is_some()
    }

    pub(crate) fn failure(&self) -> Option<FlushFailure> {
        lock(&self.inner.record).failure().copied()
    }

    /// Returns the number of failures that were cleared.
    pub(super) fn clears(&self) -> u64 {
        lock(&self.inner.record).clears()
    }

    /// Loads a saved failure for a unit, and saves the current failure and future failures. If the
    /// saved state cannot be read, this is treated as a failure at `date`. This has no effect if
    /// failures are already saved, because the current state is newer than the saved one.
    pub(super) fn keep(
        &self,
        keeper: Arc<dyn FlushKeeper>,
        unit: &Identity,
        date: SystemTime,
    ) -> Option<FlushFailure> {
        if lock(&self.inner.kept).is_some() {
            return None;
        }
        let loaded = keeper.load(unit).unwrap_or_else(|error| {
            let serial = &unit.serial;
            tracing::error!(serial, %error, "cannot read the record of failed flushes");
            Some(FlushFailure {
                errno: error.raw_os_error().unwrap_or(libc::EIO),
                at: date,
            })
        });
        // Lock in the same order as `Inner::save`.
        let mut kept = lock(&self.inner.kept);
        let mut record = lock(&self.inner.record);
        let is_saved = loaded.is_some() || record.failure().is_none();
        if let Some(failure) = loaded {
            record.record(failure);
        }
        *kept = Some(Kept {
            keeper,
            unit: unit.clone(),
            is_saved,
        });
        drop((record, kept));
        if !is_saved {
            self.inner.save();
        }
        loaded
    }

    /// Records and saves the failure of a store that was dropped before it was served.
    pub(crate) fn record_lost(
        &self,
        errno: i32,
        keeper: Option<&Arc<dyn FlushKeeper>>,
        unit: &Identity,
    ) {
        let at = SystemTime::now();
        lock(&self.inner.record).record(FlushFailure { errno, at });
        if let Some(keeper) = keeper {
            self.keep(Arc::clone(keeper), unit, at);
        }
        self.inner.save();
    }

    /// Stores the first failure. Returns true if this is the first one. The entry lists the thread
    /// that saves it.
    pub(super) fn fail(
        &self,
        errno: i32,
        at: SystemTime,
        threads: &dyn Threads,
        entry: Option<Entry>,
    ) -> bool {
        if !lock(&self.inner.record).record(FlushFailure { errno, at }) {
            return false;
        }
        // The thread may outlive the store, so it owns a reference to its state.
        let inner = Arc::clone(&self.inner);
        let save = move || {
            inner.save();
            drop(entry);
        };
        match threads.spawn("flush-failure", Box::new(save)) {
            Ok(saver) => *lock(&self.saver) = Some(saver),
            Err(error) => {
                tracing::error!(%error, "cannot start a thread to save a failed flush");
                self.inner.save();
            }
        }
        true
    }

    /// Waits until the failure is saved. If this failed before, for example because the file system
    /// was full, this tries again.
    pub(crate) fn wait_saved(&self) {
        if let Some(saver) = lock(&self.saver).take() {
            // If it panicked, the failure wasn't saved.
            saver.join();
        }
        let is_saved = lock(&self.inner.kept)
            .as_ref()
            .is_none_or(|kept| kept.is_saved);
        if !is_saved {
            self.inner.save();
        }
    }

    pub(super) fn clear(&self) -> Option<FlushFailure> {
        // Workers will open new descriptors, which don't report the old error.
        let cleared = lock(&self.inner.record).clear()?;
        // Save this before responding to the administrator, so that a restart doesn't restore a
        // failure that was cleared.
        self.inner.save();
        Some(cleared)
    }
}
