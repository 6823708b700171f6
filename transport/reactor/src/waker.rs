//! [`Waker`]: wakes a parked worker from any thread.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use riser_sync::atomic::{AtomicBool, Ordering};
use rustix::event::{EventfdFlags, eventfd};

use crate::handle::Handle;

/// Wakes the [`Ring`](crate::Ring) that created it. It is cheap to clone and can be used from any
/// thread. Wake-ups are never lost: a wake-up before a park makes that park return immediately.
/// Wake-ups that the ring has not seen yet are merged.
#[derive(Debug, Clone)]
pub struct Waker(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The descriptor that wakes a park. `None` if the owner never parks.
    counter: Option<Handle>,
    pending: AtomicBool,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        // The descriptor is blocking, because io_uring immediately fails with EAGAIN on
        // non-blocking descriptors instead of waiting.
        let fd = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self(Arc::new(Shared {
            counter: Some(Handle::new(fd)),
            pending: AtomicBool::new(false),
        })))
    }

    /// Creates a waker without a ring. Its owner calls [`clear`](Self::clear), checks for the
    /// events that wake-ups announce, and sleeps until [`descriptor`](Self::descriptor) is
    /// readable.
    ///
    /// # Errors
    /// Returns errors of `eventfd(2)`.
    pub fn detached() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(Shared {
            counter: Some(Handle::new(fd)),
            pending: AtomicBool::new(false),
        })))
    }

    /// Returns a descriptor that is readable after a wake-up, or `None` for a
    /// [`simulated`](Self::simulated) waker.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.counter().and_then(Handle::fd)
    }

    /// Consumes all previous wake-ups of a [`detached`](Self::detached) waker. Stores of the waking
    /// thread before its `wake` are visible after this call. Must not be used for the waker of a
    /// ring: it would block until a wake-up, and the ring consumes wake-ups itself.
    pub fn clear(&self) {
        if let Some(counter) = self.descriptor() {
            // This fails if there is no wake-up. A wake-up after this read finds the flag set and
            // does not write to the counter, but the owner checks for events after this call
            // anyway.
            let _ = rustix::io::read(counter, &mut [0; 8]);
        }
        self.acknowledge();
    }

    /// Creates a waker without a descriptor. It's a flag for a simulation, which checks it
    /// ([`is_pending`](Self::is_pending)) instead of sleeping.
    #[must_use]
    pub fn simulated() -> Self {
        Self(Arc::new(Shared {
            counter: None,
            pending: AtomicBool::new(false),
        }))
    }

    /// Returns whether both wake the same ring or owner.
    #[must_use]
    pub fn will_wake(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns whether there was a wake-up that the ring has not seen yet.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.0.pending.load(Ordering::Acquire)
    }

    /// Wakes the ring's thread. Doesn't use a system call if a wake-up is already pending.
    pub fn wake(&self) {
        if self.0.pending.swap(true, Ordering::AcqRel) {
            return;
        }
        let Some(counter) = self.0.counter.as_ref().and_then(Handle::fd) else {
            return;
        };
        // This write does not block. The counter is always small, because `pending` allows only one
        // write between two reads by the ring.
        let written = rustix::io::write(counter, &1u64.to_ne_bytes());
        assert_eq!(written, Ok(8), "cannot write to an eventfd");
    }

    /// Acknowledges a wake-up. Stores of the waking thread before its `wake` are visible after this
    /// call.
    pub(crate) fn acknowledge(&self) {
        self.0.pending.swap(false, Ordering::AcqRel);
    }

    /// Like [`acknowledge`](Self::acknowledge), for wakers without a descriptor. Returns whether
    /// there was a wake-up.
    pub(crate) fn take_flag(&self) -> bool {
        self.0.counter.is_none() && self.0.pending.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn counter(&self) -> Option<&Handle> {
        self.0.counter.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use riser_sync::mpsc::channel;
    use riser_sync::testing::explore;
    use riser_sync::thread;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    /// Waits for a wake-up without blocking, because the checker runs all threads on a single
    /// thread. Miri doesn't support `poll`, but has real threads.
    fn sleep(waker: &Waker) {
        let fd = waker.descriptor().unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while !cfg!(miri)
            && poll(
                &mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)],
                Some(&Timespec::default()),
            ) == Ok(0)
        {
            assert!(Instant::now() < deadline, "a wake is lost");
            thread::yield_now();
        }
    }

    #[test]
    fn interleavings_lose_no_detached_wake() {
        const MESSAGES: usize = 4;
        explore(|| {
            let waker = Waker::detached().unwrap();
            let (sender, receiver) = channel();
            let theirs = waker.clone();
            let thread = thread::spawn(move || {
                for number in 0..MESSAGES {
                    sender.send(number).unwrap();
                    theirs.wake();
                }
            });
            let mut got = 0;
            while got < MESSAGES {
                waker.clear();
                let news = std::iter::from_fn(|| receiver.try_recv().ok());
                match news.count() {
                    0 => sleep(&waker),
                    news => got += news,
                }
            }
            thread.join().unwrap();
        });
    }
}
