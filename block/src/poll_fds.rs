//! Polling device descriptors and sockets.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smallvec::SmallVec;

/// Descriptor with the events to wait for.
#[derive(Clone, Copy, Debug)]
pub struct PollInterest<'a> {
    /// File descriptor to poll.
    pub fd: BorrowedFd<'a>,
    /// Wait until data can be read.
    pub to_read: bool,
    /// Wait until data can be written.
    pub to_write: bool,
}

impl<'a> PollInterest<'a> {
    /// Waits until data can be read.
    #[must_use]
    pub fn reading(fd: BorrowedFd<'a>) -> Self {
        Self {
            fd,
            to_read: true,
            to_write: false,
        }
    }
}

/// Descriptors to poll. At queue depth 1, a loaded thread sleeps once per operation, so we avoid
/// heap allocation for the usual number.
pub type PollInterests<'a> = SmallVec<[PollInterest<'a>; 8]>;

/// Sleeps until a descriptor is readable or the timeout expires; waits indefinitely if `None`. This
/// also returns if it is interrupted by a signal.
pub fn wait_readable(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) {
    wait(fds.iter().copied().map(PollInterest::reading), timeout);
}

/// Sleeps until a descriptor is ready or the timeout expires, see [`wait_readable`].
pub fn wait<'a>(fds: impl IntoIterator<Item = PollInterest<'a>>, timeout: Option<Duration>) {
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
