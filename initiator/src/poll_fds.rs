//! Waiting for a device's descriptors, and for sockets.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smallvec::SmallVec;

/// A descriptor, and what it is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Waited<'a> {
    /// File descriptor to wait for.
    pub fd: BorrowedFd<'a>,
    /// It is waited for until it has bytes.
    pub to_read: bool,
    /// It is waited for until it takes bytes.
    pub to_write: bool,
}

impl<'a> Waited<'a> {
    /// Until it has something to read.
    #[must_use]
    pub fn reading(fd: BorrowedFd<'a>) -> Self {
        Self {
            fd,
            to_read: true,
            to_write: false,
        }
    }
}

/// Descriptors that end a sleep. A thread under load sleeps for each of its operations where it
/// has one at a time, so the usual number of them takes no memory of the heap.
pub type WaitedFds<'a> = SmallVec<[Waited<'a>; 8]>;

/// Sleeps until one of the descriptors is readable or the time is over; `None` waits without end.
/// Interruption by a signal ends the wait too.
pub fn wait_readable(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) {
    wait(fds.iter().copied().map(Waited::reading), timeout);
}

/// Sleeps until one of the descriptors is ready or the time is over, as [`wait_readable`].
pub fn wait<'a>(fds: impl IntoIterator<Item = Waited<'a>>, timeout: Option<Duration>) {
    let mut set: SmallVec<[PollFd<'_>; 16]> = fds
        .into_iter()
        .map(|waited| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, waited.to_read);
            flags.set(PollFlags::OUT, waited.to_write);
            PollFd::from_borrowed_fd(waited.fd, flags)
        })
        .collect();
    let timeout = timeout.map(|t| Timespec {
        tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let _ = poll(&mut set, timeout.as_ref());
}
