//! The socket of a connection.

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

/// Pieces of one system call at most.
pub(super) const MAX_PIECES: usize = 64;

/// Progress of a connection that is being made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Connecting {
    /// The peer has not answered.
    Pending,
    /// The connection is made.
    Done,
}

#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    /// A socket that does not block and has begun to connect.
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

    /// Sends from the front of what is to be sent; how many bytes, 0 if there is no room.
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

    /// Bytes that were sent and are not acknowledged; none where the system does not say.
    pub(super) fn unacknowledged(&self) -> u64 {
        sys::unacknowledged(self.0.as_fd()).unwrap_or(0)
    }

    /// Time since the peer's host last acknowledged anything, if it owes an acknowledgement; `None`
    /// where the system does not report it.
    pub(super) fn peer_silence(&self) -> Option<Duration> {
        sys::peer_silence(self.0.as_fd()).ok().flatten()
    }

    /// Receives to where the stream goes next; `None` if nothing has come.
    pub(super) fn receive(&self, incoming: &mut Incoming) -> io::Result<Option<usize>> {
        let (direct, room) = incoming.room();
        let mut pieces: ArrayVec<_, MAX_PIECES> = direct
            .iter()
            .take(MAX_PIECES - 1)
            .map(ReceivePiece::from)
            .collect();
        // Behind data of which some piece has no room here nothing else may be put.
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

/// Returns whether a call failed only for want of room or bytes, or because of a signal.
fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
