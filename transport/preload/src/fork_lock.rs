//! Locks that `fork` takes, so that a child finds them free and what they guard whole.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a thread holds while it forks.
struct Held<T: 'static>(MutexGuard<'static, T>);

// SAFETY: the thread that forks releases the lock: it goes on in both processes.
unsafe impl<T> Send for Held<T> {}

/// Such a lock. Its user has `fork` call [`Self::hold`] before, and [`Self::release`] afterwards in both
/// processes.
pub(crate) struct ForkLock<T: 'static> {
    guarded: Mutex<T>,
    held: Mutex<Option<Held<T>>>,
}

impl<T> ForkLock<T> {
    pub(crate) const fn new(guarded: T) -> Self {
        Self {
            guarded: Mutex::new(guarded),
            held: Mutex::new(None),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn held(&self) -> MutexGuard<'_, Option<Held<T>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn hold(&'static self) {
        let guard = Held(self.lock());
        *self.held() = Some(guard);
    }

    /// Changes what is guarded, and releases the lock.
    pub(crate) fn release(&'static self, change: impl FnOnce(&mut T)) {
        let held = self.held().take();
        if let Some(Held(mut guard)) = held {
            change(&mut guard);
        }
    }
}
