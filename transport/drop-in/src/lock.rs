//! Locks after a panic, the lock that comes before all others, and the locks that come after them.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::{LockResult, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

/// Its holder may change on which devices identifiers at all devices are (`cm::returns`).
pub(crate) static AT_ALL: Mutex<()> = Mutex::new(());

/// Held while the list of devices is made: a process that forks waits for its end, as the child does
/// not have the thread that makes it. No lock is taken with it.
pub(crate) static LISTING: Mutex<()> = Mutex::new(());

/// Held with the list of open ports for management datagrams (`umad`), and while the process forks.
pub(crate) static PORTS: Mutex<()> = Mutex::new(());

/// Held for writing while the process forks, and for reading by each [`Shield`].
pub(crate) static SHIELDS: RwLock<()> = RwLock::new(());

thread_local! {
    /// Shields of the thread.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Delays forks of the process while the thread holds the lock of an object, which the child would
/// find taken. A thread has it before such a lock, and takes no lock of a device with it: `fork` waits
/// with those.
pub(crate) struct Shield {
    /// None for a shield within another.
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

/// Takes the lock of an object.
pub(crate) fn shielded<T>(lock: &Mutex<T>) -> Shielded<'_, T> {
    let shield = Shield::new();
    Shielded {
        guard: unpoisoned(lock.lock()),
        _shield: shield,
    }
}

/// The guard of a lock, also after a thread has panicked with it. A C interface has no way to report
/// that, and a call of a program that panics ends the process: only a thread of this library's can
/// leave a lock like this, and no change that it may have left half done keeps calls from working.
pub(crate) fn unpoisoned<G>(locked: LockResult<G>) -> G {
    locked.unwrap_or_else(PoisonError::into_inner)
}
