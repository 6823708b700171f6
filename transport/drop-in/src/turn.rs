//! The right of one thread to a part of an object, from one call of the program to another.

use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::errno::Errno;

/// A part of an object that one thread uses at a time, from a call that begins to one that ends.
#[derive(Default)]
pub(crate) struct Turn {
    /// Mark of the thread that has it, or 0.
    owner: AtomicUsize,
}

impl Turn {
    /// Waits until no other thread has the part, and takes it.
    ///
    /// # Errors
    /// `EINVAL` where the calling thread has it already, which would wait for itself.
    pub(crate) fn begin(&self) -> Result<(), Errno> {
        let me = mark();
        loop {
            match self
                .owner
                .compare_exchange_weak(0, me, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return Ok(()),
                Err(owner) if owner == me => return Err(Errno::INVALID),
                // Others hold it for a few calls that never wait.
                Err(_) => thread::yield_now(),
            }
        }
    }

    /// Returns whether a thread has it.
    pub(crate) fn is_taken(&self) -> bool {
        self.owner.load(Ordering::Relaxed) != 0
    }

    /// Gives it back.
    pub(crate) fn end(&self) {
        self.owner.store(0, Ordering::Release);
    }
}

/// A number of the calling thread, which no other living thread has.
fn mark() -> usize {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.with(|mark| ptr::from_ref(mark).addr())
}
