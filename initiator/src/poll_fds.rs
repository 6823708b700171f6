//! Waiting for a device's descriptors.

use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Sleeps until one of the descriptors is readable or the time is over; `None` waits without end.
/// Interruption by a signal ends the wait too.
#[allow(unsafe_code, reason = "a device names its descriptors by number")]
pub fn wait_readable(fds: &[RawFd], timeout: Option<Duration>) {
    // SAFETY: the descriptors are those of a device that the caller holds, so they stay open.
    let borrowed = fds.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(*fd) });
    let owned: Vec<_> = borrowed.collect();
    let mut set: Vec<_> = owned
        .iter()
        .map(|fd| PollFd::new(fd, PollFlags::IN))
        .collect();
    let timeout = timeout.map(|t| Timespec {
        tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let _ = poll(&mut set, timeout.as_ref());
}
