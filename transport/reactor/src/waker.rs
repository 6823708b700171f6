//! [`Waker`]: ends a worker's park from any thread.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
    #[allow(
        unsafe_code,
        reason = "eventfd(2) has no wrapper in the standard library"
    )]
    pub(crate) fn new() -> io::Result<Self> {
        // The descriptor blocks on purpose: io_uring answers EAGAIN at once, instead of waiting,
        // for descriptors that do not.
        // SAFETY: a plain system call; its result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self(Arc::new(Shared {
            counter: Arc::new(fd),
            pending: AtomicBool::new(false),
        })))
    }

    /// Wakes the ring's thread; no system call where a wake is already under way.
    #[allow(
        unsafe_code,
        reason = "writes eight bytes of its own to its own descriptor"
    )]
    pub fn wake(&self) {
        use std::os::fd::AsRawFd;
        if self.0.pending.swap(true, Ordering::AcqRel) {
            return;
        }
        let one = 1u64.to_ne_bytes();
        // SAFETY: the pointer and length are those of a local array; the descriptor is open. The
        // call cannot block: the counter is at most a few units high, since `pending` admits one
        // write between two reads by the ring.
        let n = unsafe { libc::write(self.0.counter.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        assert_eq!(
            n,
            8,
            "an eventfd refused a write: {}",
            io::Error::last_os_error()
        );
    }

    /// The ring has seen a wake. Whatever a waking thread stored before its `wake` is visible after
    /// this call.
    pub(crate) fn acknowledge(&self) {
        self.0.pending.swap(false, Ordering::AcqRel);
    }

    pub(crate) fn counter(&self) -> &Arc<OwnedFd> {
        &self.0.counter
    }
}
