//! Socket of a connection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use arrayvec::ArrayVec;
use riser_memory::sys::{self, ReceivePiece, SendPiece};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::recv::Incoming;
use super::send::{Chunk, Outgoing};

/// Maximum number of segments per system call.
pub(super) const MAX_PIECES: usize = 64;

/// Progress of connecting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Connecting {
    /// The peer has not responded.
    Pending,
    /// The connection is established.
    Done,
}

#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    /// Takes a non-blocking, connecting socket.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub(super) fn poll_connected(&self) -> io::Result<Connecting> {
        let mut set = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::OUT)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        match poll(&mut set, Some(&now)) {
            Ok(0) | Err(Errno::INTR) => Ok(Connecting::Pending),
            Ok(_) => match sockopt::socket_error(&self.0)? {
                Ok(()) => Ok(Connecting::Done),
                Err(error) => Err(error.into()),
            },
            Err(error) => Err(error.into()),
        }
    }

    /// Sends from the front of the batch; returns the number of bytes, or 0 if the socket is full.
    pub(super) fn send(&self, outgoing: &Outgoing) -> io::Result<usize> {
        let pieces = outgoing.chunks().iter().map(|chunk| match chunk {
            Chunk::Head(range) => SendPiece::from(&outgoing.heads()[range.clone()]),
            Chunk::Data(slice) => SendPiece::from(slice),
        });
        let pieces: ArrayVec<_, MAX_PIECES> = sys::skip(pieces, outgoing.sent())
            .take(MAX_PIECES)
            .collect();
        match sys::send(self.0.as_fd(), &pieces) {
            Err(error) if is_temporary(&error) => Ok(0),
            result => result,
        }
    }

    /// Returns the number of sent, unacknowledged bytes, or 0 if the system does not report it.
    pub(super) fn unacknowledged(&self) -> u64 {
        sys::unacknowledged(self.0.as_fd()).unwrap_or(0)
    }

    /// Returns the time since the last acknowledgement from the peer's host, if one is outstanding.
    /// Returns `None` if not, or if the system does not report it.
    pub(super) fn peer_silence(&self) -> Option<Duration> {
        sys::peer_silence(self.0.as_fd()).ok().flatten()
    }

    /// Receives to the memory for the next bytes of the stream; returns `None` if there is no data.
    pub(super) fn receive(&self, incoming: &mut Incoming) -> io::Result<Option<usize>> {
        let (direct, room) = incoming.room();
        let mut pieces: ArrayVec<_, MAX_PIECES> = direct
            .iter()
            .take(MAX_PIECES - 1)
            .map(ReceivePiece::from)
            .collect();
        // If some data segment does not fit here, the buffer must not be filled after it.
        if direct.len() < MAX_PIECES {
            pieces.push(room.into());
        }
        match sys::receive(self.0.as_fd(), &mut pieces) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => Ok(Some(received)),
            Err(error) if is_temporary(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Returns whether a call failed only because it would block or was interrupted by a signal.
fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
