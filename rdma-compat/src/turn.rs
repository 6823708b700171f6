//! Exclusive use of a part of an object by one thread, across calls of the program.

use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::errno::Errno;

/// A part of an object that is used by one thread at a time, from a starting call to a finishing
/// call.
#[derive(Default)]
pub(crate) struct Turn {
    /// Identifies the thread that owns it, or 0.
    owner: AtomicUsize,
}

impl Turn {
    /// Waits until no other thread owns the part, and acquires it.
    ///
    /// # Errors
    /// Returns `EINVAL` if the calling thread already owns it, because it would deadlock.
    pub(crate) fn acquire(&self) -> Result<(), Errno> {
        let me = mark();
        loop {
            match self
                .owner
                .compare_exchange_weak(0, me, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return Ok(()),
                Err(owner) if owner == me => return Err(Errno::INVALID),
                // Other threads own it only during a few calls that never block.
                Err(_) => thread::yield_now(),
            }
        }
    }

    /// Returns whether a thread owns it.
    pub(crate) fn is_taken(&self) -> bool {
        self.owner.load(Ordering::Relaxed) != 0
    }

    /// Releases it.
    pub(crate) fn release(&self) {
        self.owner.store(0, Ordering::Release);
    }
}

/// Returns a number that identifies the calling thread. It is unique among existing threads.
fn mark() -> usize {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.with(|mark| ptr::from_ref(mark).addr())
}
