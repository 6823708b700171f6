//! Blocking socket with a deadline.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// Connected stream socket, used for negotiation.
pub(super) struct TimedStream {
    socket: OwnedFd,
    until: Instant,
}

impl TimedStream {
    pub(super) fn new(socket: OwnedFd, until: Instant) -> Self {
        Self { socket, until }
    }

    /// Returns the socket in non-blocking mode.
    pub(super) fn into_socket(self) -> io::Result<OwnedFd> {
        rustix::io::ioctl_fionbio(&self.socket, true)?;
        Ok(self.socket)
    }

    /// Sets the timeout to the remaining time, so the deadline also applies if a server sends
    /// single bytes.
    fn arm(&self, which: Timeout) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // A smaller value would be rounded to 0, which means no timeout.
        let left = left.max(Duration::from_millis(1));
        Ok(set_socket_timeout(&self.socket, which, Some(left))?)
    }
}

/// If the timeout expires, the kernel returns `EAGAIN`.
fn in_time<T>(result: rustix::io::Result<T>) -> io::Result<T> {
    match result {
        Err(rustix::io::Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
        other => Ok(other?),
    }
}

impl Read for TimedStream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.arm(Timeout::Recv)?;
        in_time(recv(&self.socket, out, RecvFlags::empty()).map(|(n, _)| n))
    }
}

impl Write for TimedStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.arm(Timeout::Send)?;
        in_time(send(&self.socket, bytes, SendFlags::NOSIGNAL))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
