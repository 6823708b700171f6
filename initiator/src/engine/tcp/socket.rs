//! The system calls.

#![allow(
    unsafe_code,
    reason = "the system reads and writes data buffers by address"
)]

use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use arrayvec::ArrayVec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, connect, ipproto, socket_with, sockopt,
};

use super::recv::Incoming;
use super::send::{Chunk, Outgoing};

/// Pieces of one system call at most.
pub(super) const MAX_PIECES: usize = 64;

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Connecting {
    /// The peer has not answered.
    Pending,
    /// It is made.
    Done,
}

#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    /// A socket that does not block and has begun to connect.
    pub(super) fn connect(src: Option<SocketAddr>, dst: SocketAddr) -> io::Result<Self> {
        let family = match dst {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        if let Some(src) = src {
            bind(&socket, &src)?;
        }
        match connect(&socket, &dst) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(Self(socket)),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
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
        let mut pieces: ArrayVec<libc::iovec, MAX_PIECES> = ArrayVec::new();
        let mut skip = outgoing.sent();
        for chunk in outgoing.chunks() {
            let (base, len) = match chunk {
                Chunk::Head(range) => {
                    let bytes = &outgoing.heads()[range.clone()];
                    (bytes.as_ptr().cast_mut(), bytes.len())
                }
                Chunk::Data(slice) => (slice.ptr(), slice.len()),
            };
            if skip >= len {
                skip -= len;
                continue;
            }
            if pieces.is_full() {
                break;
            }
            pieces.push(libc::iovec {
                iov_base: base.wrapping_add(skip).cast(),
                iov_len: len - skip,
            });
            skip = 0;
        }
        let message = header(&mut pieces);
        // SAFETY: every piece is within bytes or memory that `outgoing` holds, and is only read.
        let sent = unsafe {
            libc::sendmsg(
                self.0.as_raw_fd(),
                &raw const message,
                libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
            )
        };
        match usize::try_from(sent) {
            Ok(sent) => Ok(sent),
            Err(_) => would_block().map(|()| 0),
        }
    }

    /// Receives to where the stream goes next; `None` if nothing has come.
    pub(super) fn receive(&self, incoming: &mut Incoming) -> io::Result<Option<usize>> {
        let mut pieces: ArrayVec<libc::iovec, MAX_PIECES> = ArrayVec::new();
        for slice in incoming.direct().iter().take(MAX_PIECES - 1) {
            pieces.push(libc::iovec {
                iov_base: slice.ptr().cast(),
                iov_len: slice.len(),
            });
        }
        // Behind data of which some piece has no room here nothing else may be put.
        if incoming.direct().len() < MAX_PIECES {
            let room = incoming.room();
            pieces.push(libc::iovec {
                iov_base: room.as_mut_ptr().cast(),
                iov_len: room.len(),
            });
        }
        let mut message = header(&mut pieces);
        // SAFETY: every piece is within memory that `incoming` holds, into which the system may
        // write: data buffers have no Rust reference to them, and `room` was lent for this.
        let received =
            unsafe { libc::recvmsg(self.0.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        match usize::try_from(received) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => Ok(Some(received)),
            Err(_) => would_block().map(|()| None),
        }
    }
}

fn header(pieces: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all zeroes is a message header without address, pieces and control data.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    message
}

/// Whether the last call failed for want of room or bytes only.
fn would_block() -> io::Result<()> {
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}
