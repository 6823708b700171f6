//! Locks after a panic, the one that comes before all others, and the one that comes after them.

use std::sync::{LockResult, Mutex, PoisonError};

/// Its holder may change on which devices identifiers at all devices are (`cm::returns`).
pub(crate) static AT_ALL: Mutex<()> = Mutex::new(());

/// Held while the list of devices is made: a process that forks waits for its end, as the child does
/// not have the thread that makes it. No lock is taken with it.
pub(crate) static LISTING: Mutex<()> = Mutex::new(());

/// The guard of a lock, also after a thread has panicked with it. A C interface has no way to report
/// that, and a call of a program that panics ends the process: only a thread of this library's can
/// leave a lock like this, and no change that it may have left half done keeps calls from working.
pub(crate) fn unpoisoned<G>(locked: LockResult<G>) -> G {
    locked.unwrap_or_else(PoisonError::into_inner)
}
