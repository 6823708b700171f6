//! One iSCSI connection on TCP: a socket, the stream that arrives and the stream that leaves.
//!
//! The socket never blocks; the engine asks [`TcpConn`] to go on in every round, and parks on its
//! descriptor.
//!
//! # Memory
//! Data of a command are sent from its buffers and received into them, by `sendmsg` and `recvmsg`
//! with the buffers' own addresses. Only what comes in one go with a header is copied, from a
//! receive buffer of [`recv::BUFFER`] bytes. The system has taken what it wants of a buffer when
//! the call returns, so a buffer is free as soon as nothing of it waits to be sent.

mod recv;
mod send;
mod socket;

use std::io;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

use riser_memory::MemSlice;

pub(super) use self::recv::{Incoming, Item as Received};
pub(super) use self::send::{Item, Outgoing, Source};
use self::socket::{Connecting, Socket};

/// A socket with its two streams.
#[derive(Debug)]
pub(super) struct TcpConn {
    socket: Socket,
    connected: bool,
    /// Bytes that the peer had acknowledged at the last look.
    acknowledged: u64,
    pub(super) incoming: Incoming,
    pub(super) outgoing: Outgoing,
}

impl TcpConn {
    /// A connection on a socket that has begun to connect.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket: Socket::new(socket),
            connected: false,
            acknowledged: 0,
            incoming: Incoming::new(),
            outgoing: Outgoing::default(),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    /// Returns whether the engine waits for room to send, or for the connection to be made.
    pub(super) fn wants_write(&self) -> bool {
        !self.connected || self.outgoing.has_work()
    }

    /// Returns whether the connection has been made since the last call.
    ///
    /// # Errors
    /// It could not be made.
    pub(super) fn poll_connected(&mut self) -> io::Result<bool> {
        if self.connected {
            return Ok(false);
        }
        match self.socket.poll_connected()? {
            Connecting::Pending => Ok(false),
            Connecting::Done => {
                self.connected = true;
                Ok(true)
            }
        }
    }

    /// Sends what there is to send, as much as the socket takes; whether anything was sent.
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

    /// Looks how much the peer has acknowledged since the last look. Returns that part of the
    /// stream if there is one.
    pub(super) fn poll_acknowledged(&mut self) -> Option<Range<u64>> {
        let position = self.outgoing.position();
        let acknowledged = position.saturating_sub(self.socket.unacknowledged());
        // A socket that counts the memory of unread bytes may say less than before.
        let acknowledged = acknowledged.max(self.acknowledged);
        let last = std::mem::replace(&mut self.acknowledged, acknowledged);
        (acknowledged > last).then_some(last..acknowledged)
    }

    /// Receives once; how many bytes came, `None` where there are none.
    ///
    /// # Errors
    /// The connection is broken, or closed by the peer.
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

/// The part of some memory that begins `offset` bytes in and has `len` bytes.
///
/// # Panics
/// If there is no such part.
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

/// Copies memory out in small parts.
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
