//! Waiting for a device's descriptors, and for sockets.

use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A descriptor, and what it is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waited {
    /// The descriptor.
    pub fd: RawFd,
    /// Whether it is also waited for until it takes bytes, besides until it has some.
    pub to_write: bool,
}

impl Waited {
    /// Until it has something to read.
    #[must_use]
    pub fn reading(fd: RawFd) -> Self {
        let to_write = false;
        Self { fd, to_write }
    }
}

/// Sleeps until one of the descriptors is readable or the time is over; `None` waits without end.
/// Interruption by a signal ends the wait too.
pub fn wait_readable(fds: &[RawFd], timeout: Option<Duration>) {
    let all: Vec<Waited> = fds.iter().copied().map(Waited::reading).collect();
    wait(&all, timeout);
}

/// Sleeps until one of the descriptors is ready or the time is over, as [`wait_readable`].
#[allow(unsafe_code, reason = "a device names its descriptors by number")]
pub fn wait(fds: &[Waited], timeout: Option<Duration>) {
    // SAFETY: the descriptors are those of a device or connection that the caller holds, so they
    // stay open.
    let borrowed = fds.iter().map(|w| unsafe { BorrowedFd::borrow_raw(w.fd) });
    let owned: Vec<_> = borrowed.collect();
    let mut set: Vec<_> = owned
        .iter()
        .zip(fds)
        .map(|(fd, waited)| {
            let flags = match waited.to_write {
                true => PollFlags::IN | PollFlags::OUT,
                false => PollFlags::IN,
            };
            PollFd::new(fd, flags)
        })
        .collect();
    let timeout = timeout.map(|t| Timespec {
        tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let _ = poll(&mut set, timeout.as_ref());
}
