//! Lock poisoning, the lock that must be acquired before all other locks, and the locks that must
//! be acquired after them.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

/// Protects which devices are used by identifiers that are bound to all devices (`cm::returns`).
pub(crate) static AT_ALL: Mutex<()> = Mutex::new(());

/// Held while the list of devices is being created. A fork waits until it is released, because the
/// child doesn't have the thread that creates the list. No other lock may be acquired while it is
/// held.
pub(crate) static LISTING: Mutex<()> = Mutex::new(());

/// Held with the list of open ports for management datagrams (`umad`), and during a fork.
pub(crate) static PORTS: Mutex<()> = Mutex::new(());

/// Write-locked during a fork, and read-locked by each [`Shield`].
pub(crate) static SHIELDS: RwLock<()> = RwLock::new(());

thread_local! {
    /// Number of shields of this thread.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Delays forks of the process while this thread holds the lock of an object, because otherwise the
/// lock would never be released in the child. It must be acquired before such a lock. While it is
/// held, the thread must not lock a device, because `fork` holds these locks while it waits.
pub(crate) struct Shield {
    /// `None` for a nested shield.
    _held: Option<RwLockReadGuard<'static, ()>>,
}

impl Shield {
    pub(crate) fn new() -> Self {
        let is_first = DEPTH.replace(DEPTH.get() + 1) == 0;
        Self {
            _held: is_first.then(|| unpoisoned(SHIELDS.read())),
        }
    }
}

impl Drop for Shield {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// The guard of a lock with its shield.
pub(crate) struct Shielded<'a, T> {
    guard: MutexGuard<'a, T>,
    // Dropped after the guard.
    _shield: Shield,
}

impl<T> Deref for Shielded<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Shielded<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// Locks an object.
pub(crate) fn shielded<T>(lock: &Mutex<T>) -> Shielded<'_, T> {
    let shield = Shield::new();
    Shielded {
        guard: unpoisoned(lock.lock()),
        _shield: shield,
    }
}

/// Returns the guard of a lock, ignoring poisoning. A C interface has no way to report it, and a
/// call of a program that panics aborts the process: only a thread of this library can poison a
/// lock, and calls still work if it was interrupted by a panic.
pub(crate) fn unpoisoned<G>(locked: LockResult<G>) -> G {
    locked.unwrap_or_else(PoisonError::into_inner)
}
