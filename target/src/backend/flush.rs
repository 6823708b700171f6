//! Failed flushes of a backend, and what they mean for the next ones.
//!
//! Linux reports a failed write-back once to each open file description and then takes the pages
//! for clean, so the next `fdatasync` succeeds although the data are lost. Three things keep such a
//! success from an initiator:
//!
//! - a failure is remembered in the [`Store`](super::Store): every flush fails from then on, on
//!   every worker, until an administrator clears it. A write with FUA is checked by itself and goes
//!   on. Its error may be the only report of what others have lost, so one that fails is followed
//!   by a flush;
//! - each worker flushes through a descriptor of its own, so that none takes another's error. After
//!   a failure was cleared it opens a new one, for which the kernel does not report the old error
//!   again;
//! - a worker has one flush of a backend under way at a time, which serves everyone that waits for
//!   one, so that two flushes do not race for one error.
//!
//! Nor does a restart end it: a [`FlushKeeper`] keeps the failure, by a thread of its own, since a
//! worker does not wait for the file system that it is kept in.

use std::fmt::Debug;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use riser_reactor::{Spawned, Threads};
use riser_scsi::config::Identity;

/// Acknowledged writes of a backend did not reach its medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlushFailure {
    /// The error number of the first flush that failed.
    pub errno: i32,
    /// Time at which that flush failed.
    pub at: SystemTime,
}

/// Keeps failures of flushes beyond the end of the process, by logical unit.
pub trait FlushKeeper: Debug + Send + Sync {
    /// The failure of a unit's backend that was not cleared.
    ///
    /// # Errors
    /// It cannot be read, so there may be one.
    fn load(&self, unit: &Identity) -> io::Result<Option<FlushFailure>>;

    /// Replaces what is kept, durably.
    ///
    /// # Errors
    /// What is kept may be the old failure or the new one.
    fn save(&self, unit: &Identity, failure: Option<&FlushFailure>) -> io::Result<()>;
}

/// The failure of a backend, if there is one.
#[derive(Debug, Default)]
pub(super) struct FlushState {
    inner: Arc<Inner>,
    /// Thread that saves the failure, until it is waited for.
    saver: Mutex<Option<Box<dyn Spawned>>>,
}

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    /// The keeper of failures, once there is one. Locked while it is saved, so that what is saved
    /// last is what is so.
    kept: Mutex<Option<Kept>>,
}

#[derive(Debug)]
struct Kept {
    keeper: Arc<dyn FlushKeeper>,
    unit: Identity,
    /// The last save has succeeded.
    is_saved: bool,
}

#[derive(Debug, Default)]
struct State {
    failure: Option<FlushFailure>,
    clears: u64,
}

/// The values in these are set as a whole, so poison is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn save(&self) {
        let mut kept = lock(&self.kept);
        let Some(kept) = &mut *kept else {
            return;
        };
        // Read with `kept` locked: of two saves, the later one writes the later state.
        let failure = lock(&self.state).failure;
        // Also if the keeper panics.
        kept.is_saved = false;
        match kept.keeper.save(&kept.unit, failure.as_ref()) {
            Ok(()) => kept.is_saved = true,
            Err(error) => {
                let serial = &kept.unit.serial;
                tracing::error!(serial, %error, "the record of a failed flush cannot be saved");
            }
        }
    }
}

impl FlushState {
    pub(super) fn failure(&self) -> Option<FlushFailure> {
        lock(&self.inner.state).failure
    }

    /// Returns the number of failures that were cleared.
    pub(super) fn clears(&self) -> u64 {
        lock(&self.inner.state).clears
    }

    /// Takes the failure that is kept for a unit, and keeps those that come. What cannot be read is
    /// taken for a failure, of `date`.
    pub(super) fn keep(
        &self,
        keeper: Arc<dyn FlushKeeper>,
        unit: &Identity,
        date: SystemTime,
    ) -> Option<FlushFailure> {
        let loaded = keeper.load(unit).unwrap_or_else(|error| {
            let serial = &unit.serial;
            tracing::error!(serial, %error, "the record of failed flushes cannot be read");
            Some(FlushFailure {
                errno: error.raw_os_error().unwrap_or(libc::EIO),
                at: date,
            })
        });
        // In the order of `Inner::save`.
        let mut kept = lock(&self.inner.kept);
        let mut state = lock(&self.inner.state);
        state.failure = state.failure.or(loaded);
        *kept = Some(Kept {
            keeper,
            unit: unit.clone(),
            is_saved: true,
        });
        loaded
    }

    /// Remembers the first failure; whether this is it.
    pub(super) fn fail(&self, errno: i32, at: SystemTime, threads: &dyn Threads) -> bool {
        let mut state = lock(&self.inner.state);
        // The first failure stays: those after it are its consequences.
        if state.failure.is_some() {
            return false;
        }
        state.failure = Some(FlushFailure { errno, at });
        drop(state);
        // The thread may outlive the store, so it shares what it needs.
        let inner = Arc::clone(&self.inner);
        match threads.spawn("flush-failure", Box::new(move || inner.save())) {
            Ok(saver) => *lock(&self.saver) = Some(saver),
            Err(error) => {
                tracing::error!(%error, "no thread to save a failed flush");
                self.inner.save();
            }
        }
        true
    }

    /// Returns when what was found is saved. What could not be saved then, as where the file system
    /// was full, is tried once more.
    pub(super) fn wait_saved(&self) {
        if let Some(saver) = lock(&self.saver).take() {
            // After a panic, nothing is saved.
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
        let mut state = lock(&self.inner.state);
        let cleared = state.failure.take()?;
        // By this number workers know that they need other descriptors, which do not report the
        // old error.
        state.clears += 1;
        drop(state);
        // Saved before the answer to the administrator: a restart must not bring back what he has
        // cleared.
        self.inner.save();
        Some(cleared)
    }
}
