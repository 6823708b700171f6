//! An iSCSI connection on TCP: a socket, the received stream and the sent stream.
//!
//! The socket is non-blocking. The engine calls [`TcpConn`] in each round and parks on its
//! descriptor.
//!
//! # Memory
//! The data of a command is sent from and received into its buffers, with `sendmsg` and `recvmsg`
//! on the buffers' addresses. Only data received together with a header is copied, from a receive
//! buffer of [`recv::BUFFER`] bytes. The kernel copies the data before the call returns, so a
//! buffer is free once none of its data is queued for sending.

mod recv;
mod send;
mod socket;

use std::io;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use riser_memory::MemSlice;

pub(super) use self::recv::{Incoming, Item as Received};
pub(super) use self::send::{Item, Outgoing, Source};
use self::socket::{Connecting, Socket};

/// Silence of the peer's host, while an acknowledgement is outstanding, after which it is treated
/// as lost.
const SILENCE: Duration = Duration::from_secs(4);

/// Minimum and maximum interval between these checks.
const CHECKS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// A socket with both streams.
#[derive(Debug)]
pub(super) struct TcpConn {
    socket: Socket,
    connected: bool,
    /// Bytes acknowledged by the peer at the last poll.
    acknowledged: u64,
    /// Time of the next [`Self::check`], once connected.
    check_at: Option<Instant>,
    pub(super) incoming: Incoming,
    pub(super) outgoing: Outgoing,
}

impl TcpConn {
    /// Creates a connection for a connecting socket.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket: Socket::new(socket),
            connected: false,
            acknowledged: 0,
            check_at: None,
            incoming: Incoming::new(),
            outgoing: Outgoing::default(),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    /// Returns whether the engine waits for the socket to become writable or connected.
    pub(super) fn wants_write(&self) -> bool {
        !self.connected || self.outgoing.has_work()
    }

    /// Returns whether the connection was established since the last call.
    ///
    /// # Errors
    /// The connection attempt failed.
    pub(super) fn poll_connected(&mut self, now: Instant) -> io::Result<bool> {
        if self.connected {
            return Ok(false);
        }
        match self.socket.poll_connected()? {
            Connecting::Pending => Ok(false),
            Connecting::Done => {
                self.connected = true;
                self.check_at = Some(now + CHECKS.1);
                Ok(true)
            }
        }
    }

    /// Sends as much queued data as the socket accepts; returns whether anything was sent.
    ///
    /// # Errors
    /// The connection is broken.
    pub(super) fn flush(&mut self, source: &Source<'_>) -> io::Result<bool> {
        if !self.connected {
            return Ok(false);
        }
        let mut sent_any = false;
        while self.outgoing.fill(source) {
            match self.socket.send(&self.outgoing)? {
                0 => return Ok(sent_any),
                sent => {
                    sent_any = true;
                    self.outgoing.advance(sent);
                }
            }
        }
        Ok(sent_any)
    }

    /// Polls the number of bytes acknowledged by the peer. Returns the newly acknowledged range of
    /// the stream, if any.
    pub(super) fn poll_acknowledged(&mut self) -> Option<Range<u64>> {
        let position = self.outgoing.position();
        let acknowledged = position.saturating_sub(self.socket.unacknowledged());
        // A socket that counts the memory of unread bytes may report a smaller value than before.
        let acknowledged = acknowledged.max(self.acknowledged);
        let last = std::mem::replace(&mut self.acknowledged, acknowledged);
        (acknowledged > last).then_some(last..acknowledged)
    }

    /// Returns the time of the next [`Self::check`].
    pub(super) fn check_at(&self) -> Option<Instant> {
        self.check_at
    }

    /// Returns whether the peer's host has vanished, because it does not acknowledge data. If only
    /// the target hangs, its host still does.
    pub(super) fn check(&mut self, now: Instant) -> bool {
        if self.check_at.is_none_or(|at| at > now) {
            return false;
        }
        let silence = self.socket.peer_silence().unwrap_or_default();
        let left = SILENCE.saturating_sub(silence);
        self.check_at = Some(now + left.clamp(CHECKS.0, CHECKS.1));
        left.is_zero()
    }

    /// Receives once; returns the number of bytes, or `None` if there is no data.
    ///
    /// # Errors
    /// The connection is broken, or was closed by the peer.
    pub(super) fn receive(&mut self) -> io::Result<Option<usize>> {
        if !self.connected {
            return Ok(None);
        }
        let received = self.socket.receive(&mut self.incoming)?;
        if let Some(len) = received {
            self.incoming.advance(len);
        }
        Ok(received)
    }
}

/// Passes the range of `pieces` that starts at `offset` and has `len` bytes to `take`.
///
/// # Panics
/// Panics if `pieces` is too short.
fn cut<'a>(
    pieces: impl IntoIterator<Item = &'a MemSlice>,
    mut offset: usize,
    mut len: usize,
    mut take: impl FnMut(MemSlice),
) {
    for piece in pieces {
        if len == 0 {
            return;
        }
        if offset >= piece.len() {
            offset -= piece.len();
            continue;
        }
        let end = piece.len().min(offset + len);
        take(piece.slice(offset..end).expect("within the piece"));
        len -= end - offset;
        offset = 0;
    }
    assert_eq!(len, 0, "data beyond the buffers");
}

/// Passes the memory to `take` in small parts.
fn read_parts(slice: &MemSlice, mut take: impl FnMut(&[u8])) {
    let mut bytes = [0; 4096];
    let mut at = 0;
    while at < slice.len() {
        let part = &mut bytes[..(slice.len() - at).min(4096)];
        slice.read(at, part);
        take(part);
        at += part.len();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use riser_memory::sys::{self, SendPiece};
    use riser_transport::loopback::Endpoint;
    use rustix::net::sockopt;

    use super::*;
    use crate::engine::env::Env;
    use crate::engine::system::System;

    /// Maximum time from the last packet of a host until its connection is abandoned.
    const BOUND: Duration = Duration::from_secs(5);

    fn connection() -> (TcpConn, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut system: System<Endpoint> = System::new(Box::new(|| Ok(None)));
        let socket = system.connect_tcp(None, listener.local_addr().unwrap());
        let mut conn = TcpConn::new(socket.unwrap());
        let (peer, _) = listener.accept().unwrap();
        while !conn.poll_connected(Instant::now()).unwrap() {}
        (conn, peer)
    }

    /// Drops all packets received for a socket, like a vanished host.
    #[allow(unsafe_code, reason = "the standard library attaches no filters")]
    fn vanish(peer: &TcpStream) {
        use std::os::fd::AsRawFd as _;
        let mut drop_all = [libc::sock_filter {
            code: (libc::BPF_RET | libc::BPF_K) as u16,
            jt: 0,
            jf: 0,
            k: 0,
        }];
        let program = libc::sock_fprog {
            len: 1,
            filter: drop_all.as_mut_ptr(),
        };
        // SAFETY: the kernel copies the program, which outlives the call.
        let result = unsafe {
            libc::setsockopt(
                peer.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const program).cast(),
                size_of::<libc::sock_fprog>() as libc::socklen_t,
            )
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
    }

    fn send(conn: &TcpConn, bytes: &[u8]) -> io::Result<usize> {
        sys::send(conn.fd(), &[SendPiece::from(bytes)])
    }

    /// Checks a connection until it fails; returns `None` if it does not fail within the bound.
    fn time_until_left(conn: &mut TcpConn) -> Option<Duration> {
        let begun = Instant::now();
        while begun.elapsed() < BOUND {
            let failed = sockopt::socket_error(conn.fd()).unwrap();
            if conn.check(Instant::now()) || failed.is_err() {
                return Some(begun.elapsed());
            }
            thread::sleep(Duration::from_millis(20));
        }
        None
    }

    #[test]
    fn vanished_host_is_detected_while_idle() {
        let (mut conn, peer) = connection();
        vanish(&peer);
        assert!(time_until_left(&mut conn).is_some());
    }

    #[test]
    fn vanished_host_is_detected_with_unacknowledged_data() {
        let (mut conn, peer) = connection();
        vanish(&peer);
        send(&conn, b"a command").unwrap();
        assert!(time_until_left(&mut conn).is_some());
    }

    /// This simulates a target with a hanging disk.
    #[test]
    fn host_with_full_window_is_kept() {
        let (mut conn, mut peer) = connection();
        while send(&conn, &[0; 1 << 16]).is_ok() {}
        assert_eq!(time_until_left(&mut conn), None);
        peer.read_exact(&mut [0; 1 << 16]).unwrap();
    }
}
