//! A socket that waits, but not beyond a point in time.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// A connected stream socket during the negotiation.
pub(super) struct TimedStream {
    socket: OwnedFd,
    until: Instant,
}

impl TimedStream {
    pub(super) fn new(socket: OwnedFd, until: Instant) -> Self {
        Self { socket, until }
    }

    /// The socket, which does not wait from now on.
    pub(super) fn into_socket(self) -> io::Result<OwnedFd> {
        rustix::io::ioctl_fionbio(&self.socket, true)?;
        Ok(self.socket)
    }

    /// Sets what is left of the time. A server that sends byte by byte gets no more than that.
    fn arm(&self, which: Timeout) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // Shorter times would be rounded to none, which waits without end.
        let left = left.max(Duration::from_millis(1));
        Ok(set_socket_timeout(&self.socket, which, Some(left))?)
    }
}

/// The kernel reports the end of the time as the lack of bytes or room.
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
