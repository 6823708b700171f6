//! What a failed flush means for a backend.
//!
//! Linux reports a failed write-back once to each open file description and then takes the pages for
//! clean, so the next `fdatasync` succeeds although the data are lost. Three things keep such a success
//! from an initiator:
//!
//! - a failure is remembered in the [`Store`](super::Store): every flush fails from then on, on every
//!   worker, until an administrator clears it. A write with FUA is checked by itself and goes on;
//! - each worker flushes through a descriptor of its own, so that none takes another's error. After
//!   a failure was cleared it opens a new one, for which the kernel does not report the old error again;
//! - a worker has one flush of a backend under way at a time, which serves everyone that waits for one,
//!   so that two flushes do not race for one error.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Acknowledged writes of a backend did not reach its medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlushFailure {
    /// The error number of the first flush that failed.
    pub errno: i32,
    /// When that was.
    pub at: SystemTime,
}

/// The failure of a backend, if there is one.
#[derive(Debug, Default)]
pub(super) struct FlushState(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    failure: Option<FlushFailure>,
    clears: u64,
}

impl FlushState {
    /// Both are set at once, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn failure(&self) -> Option<FlushFailure> {
        self.lock().failure
    }

    /// How many failures were cleared.
    pub(super) fn clears(&self) -> u64 {
        self.lock().clears
    }

    /// Remembers the first failure; whether this is it.
    pub(super) fn fail(&self, errno: i32) -> bool {
        let mut state = self.lock();
        let is_first = state.failure.is_none();
        state.failure.get_or_insert_with(|| FlushFailure {
            errno,
            at: SystemTime::now(),
        });
        is_first
    }

    pub(super) fn clear(&self) -> Option<FlushFailure> {
        let mut state = self.lock();
        let cleared = state.failure.take();
        state.clears += u64::from(cleared.is_some());
        cleared
    }
}
