//! Locks after a panic.

use std::sync::{LockResult, PoisonError};

/// The guard of a lock, also after a thread has panicked with it. A C interface has no way to report
/// that, and a call of a program that panics ends the process: only a thread of this library's can
/// leave a lock like this, and no change that it may have left half done keeps calls from working.
pub(crate) fn unpoisoned<G>(locked: LockResult<G>) -> G {
    locked.unwrap_or_else(PoisonError::into_inner)
}
