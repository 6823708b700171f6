//! [`Waker`]: ends a worker's park from any thread.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// Wakes the [`Ring`](crate::Ring) it came from. Cheap to clone, usable from any thread, and never
/// lost: a wake before the park ends that park at once. Wakes that the ring has not yet seen are
/// one wake.
#[derive(Debug, Clone)]
pub struct Waker(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    counter: Arc<OwnedFd>,
    pending: AtomicBool,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        // The descriptor blocks on purpose: io_uring answers EAGAIN at once, instead of waiting,
        // for descriptors that do not.
        let fd = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self(Arc::new(Shared {
            counter: Arc::new(fd),
            pending: AtomicBool::new(false),
        })))
    }

    /// Wakes the ring's thread; no system call where a wake is already under way.
    pub fn wake(&self) {
        if self.0.pending.swap(true, Ordering::AcqRel) {
            return;
        }
        // The write cannot block: the counter is at most a few units high, since `pending` admits
        // one write between two reads by the ring.
        let written = rustix::io::write(&self.0.counter, &1u64.to_ne_bytes());
        assert_eq!(written, Ok(8), "an eventfd refused a write");
    }

    /// The ring has seen a wake. What a waking thread stored before its `wake` is visible after
    /// this call.
    pub(crate) fn acknowledge(&self) {
        self.0.pending.swap(false, Ordering::AcqRel);
    }

    pub(crate) fn counter(&self) -> &Arc<OwnedFd> {
        &self.0.counter
    }
}
