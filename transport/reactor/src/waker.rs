//! [`Waker`]: ends a worker's park from any thread.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use riser_sync::atomic::{AtomicBool, Ordering};
use rustix::event::{EventfdFlags, eventfd};

use crate::handle::Handle;

/// Wakes the [`Ring`](crate::Ring) it came from. Cheap to clone, usable from any thread, and never
/// lost: a wake before the park ends that park at once. Wakes that the ring has not yet seen are
/// one wake.
#[derive(Debug, Clone)]
pub struct Waker(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The descriptor that ends a park; none where nothing parks.
    counter: Option<Handle>,
    pending: AtomicBool,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        // The descriptor blocks on purpose: io_uring answers EAGAIN at once, instead of waiting,
        // for descriptors that do not.
        let fd = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self(Arc::new(Shared {
            counter: Some(Handle::new(fd)),
            pending: AtomicBool::new(false),
        })))
    }

    /// A waker of no ring. Its owner calls [`clear`](Self::clear), looks for what wakes announce,
    /// and sleeps until [`descriptor`](Self::descriptor) is readable.
    ///
    /// # Errors
    /// That of `eventfd(2)`.
    pub fn detached() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(Shared {
            counter: Some(Handle::new(fd)),
            pending: AtomicBool::new(false),
        })))
    }

    /// Descriptor that is readable after a wake; none of a [`simulated`](Self::simulated) one.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.counter().and_then(Handle::fd)
    }

    /// Takes the wakes so far of a [`detached`](Self::detached) waker. What a waking thread stored
    /// before its `wake` is visible after this call. That of a ring would wait here for a wake: the
    /// ring takes them by itself.
    pub fn clear(&self) {
        if let Some(counter) = self.descriptor() {
            // Fails if there is none. A wake from here on finds the flag set and writes nothing;
            // its owner looks after this call.
            let _ = rustix::io::read(counter, &mut [0; 8]);
        }
        self.acknowledge();
    }

    /// A waker without a descriptor: a flag, for a simulation, which looks at it
    /// ([`is_pending`](Self::is_pending)) instead of sleeping.
    #[must_use]
    pub fn simulated() -> Self {
        Self(Arc::new(Shared {
            counter: None,
            pending: AtomicBool::new(false),
        }))
    }

    /// Whether there was a wake that the ring has not yet seen.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.0.pending.load(Ordering::Acquire)
    }

    /// Wakes the ring's thread; no system call where a wake is already under way.
    pub fn wake(&self) {
        if self.0.pending.swap(true, Ordering::AcqRel) {
            return;
        }
        let Some(counter) = self.0.counter.as_ref().and_then(Handle::fd) else {
            return;
        };
        // The write cannot block: the counter is at most a few units high, since `pending` admits
        // one write between two reads by the ring.
        let written = rustix::io::write(counter, &1u64.to_ne_bytes());
        assert_eq!(written, Ok(8), "an eventfd refused a write");
    }

    /// The ring has seen a wake. What a waking thread stored before its `wake` is visible after
    /// this call.
    pub(crate) fn acknowledge(&self) {
        self.0.pending.swap(false, Ordering::AcqRel);
    }

    /// As [`acknowledge`](Self::acknowledge), where no descriptor reports wakes; whether there was
    /// one.
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

    /// Waits for a wake without blocking: the threads of a checker are one thread. Miri does not
    /// know the call, and has threads.
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
    fn interleavings_lose_no_wake_of_a_detached_waker() {
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
