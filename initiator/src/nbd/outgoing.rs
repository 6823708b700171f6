//! The sending side of a connection, shared by its thread and by the threads that complete
//! requests.
//!
//! A reply that is small, alone and finds room in the socket is sent by the thread that completes
//! the request. Everything else waits in a queue for the connection's own thread, which sends many
//! replies with one system call.
//!
//! Bounds: [`MAX_IN_FLIGHT`] requests and [`MAX_BYTES`] (and one request) bytes per connection are
//! between the moment a request is read and the moment its last reply is in the socket; beyond
//! them the connection is not read. The device's buffers among them, and the memory of replies that
//! are assembled, are shared with the export's other connections: see [`super::budget`].

use std::collections::VecDeque;
use std::io;
use std::iter;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use riser_memory::sys::{self, SendPiece};

use super::budget::{Account, Share};
use crate::block::{Bell, Buffer};

/// Most requests of a connection in flight.
pub(super) const MAX_IN_FLIGHT: u32 = 256;
/// Most bytes of a connection in flight, beyond which no further request is read.
pub(super) const MAX_BYTES: u64 = 64 << 20;
/// Largest reply that a completing thread sends itself.
const INLINE_BYTES: usize = 16 << 10;
/// With more requests in flight than this, replies are left to the connection's thread, which
/// sends several at once.
const INLINE_IN_FLIGHT: u32 = 4;
/// Most I/O vectors per system call.
const MAX_IOV: usize = 64;

/// A part of the stream to the client: bytes, and bytes of a buffer after them.
pub(super) struct Piece {
    pub(super) head: Vec<u8>,
    pub(super) data: Option<(Buffer, Range<usize>)>,
    /// The buffer's share of what the export has of them.
    #[expect(dead_code, reason = "held for its drop")]
    pub(super) share: Option<Share>,
    /// Given back when the piece is sent.
    #[expect(dead_code, reason = "held for its drop")]
    pub(super) ticket: Option<Arc<Ticket>>,
}

impl Piece {
    fn len(&self) -> usize {
        self.head.len() + self.data.as_ref().map_or(0, |(_, range)| range.len())
    }
}

#[derive(Default)]
struct Queue {
    pieces: VecDeque<Piece>,
    /// Bytes of all pieces.
    bytes: usize,
    /// Bytes of the first piece that are sent.
    sent: usize,
    /// The socket failed; nothing more goes out.
    dead: bool,
}

/// State that a connection's thread and the completions of its requests share.
pub(super) struct Shared {
    socket: UnixStream,
    queue: Mutex<Queue>,
    bell: Arc<Bell>,
    /// The thread wants to know when a request is finished.
    wants_tickets: AtomicBool,
    in_flight: AtomicU32,
    bytes: AtomicU64,
    account: Arc<Account>,
}

/// The share of the connection's bounds that one request takes until its replies are sent.
pub(super) struct Ticket {
    shared: Arc<Shared>,
    bytes: u64,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.shared.bytes.fetch_sub(self.bytes, Ordering::SeqCst);
        self.shared.in_flight.fetch_sub(1, Ordering::SeqCst);
        if self.shared.wants_tickets.load(Ordering::SeqCst) {
            self.shared.bell.ring();
        }
    }
}

impl Shared {
    pub(super) fn new(socket: UnixStream, account: Account) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            queue: Mutex::default(),
            bell: Arc::new(Bell::new()?),
            wants_tickets: AtomicBool::new(false),
            in_flight: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            account: Arc::new(account),
        })
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Ends the stream from the client; what is in flight is still answered.
    pub(super) fn stop_reading(&self) {
        // It may be closed already.
        let _ = self.socket.shutdown(std::net::Shutdown::Read);
    }

    /// Ends the connection; replies that are not sent yet are lost.
    pub(super) fn hang_up(&self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        self.bell.ring();
    }

    /// Takes a request into account.
    pub(super) fn ticket(self: &Arc<Self>, bytes: u64) -> Arc<Ticket> {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        self.bytes.fetch_add(bytes, Ordering::SeqCst);
        Arc::new(Ticket {
            shared: self.clone(),
            bytes,
        })
    }

    /// Returns whether another request may be read; if not, `waker` or a ticket that comes back
    /// ends that.
    pub(super) fn has_room(&self, waker: &Waker) -> bool {
        self.in_flight.load(Ordering::SeqCst) < MAX_IN_FLIGHT
            && self.bytes.load(Ordering::SeqCst) < MAX_BYTES
            && self.account.has_room(waker)
    }

    /// Account of the connection at the export's buffers.
    pub(super) fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Returns whether every request is answered and every answer sent.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::SeqCst) == 0 && self.lock().pieces.is_empty()
    }

    /// Bytes that wait to be sent, or `None` when nothing can be sent any more.
    pub(super) fn backlog(&self) -> Option<usize> {
        let queue = self.lock();
        (!queue.dead).then(|| queue.bytes - queue.sent)
    }

    /// Sends a piece, or leaves it to the connection's thread.
    pub(super) fn push(&self, piece: Piece) {
        let mut sent = Vec::new();
        let notify = {
            let mut queue = self.lock();
            if queue.dead {
                // Dropped below, outside the lock.
                sent.push(piece);
                false
            } else {
                let inline = queue.pieces.is_empty()
                    && piece.len() <= INLINE_BYTES
                    && self.in_flight.load(Ordering::Relaxed) <= INLINE_IN_FLIGHT;
                queue.bytes += piece.len();
                queue.pieces.push_back(piece);
                if inline {
                    self.send(&mut queue, &mut sent);
                }
                !queue.pieces.is_empty()
            }
        };
        // A dropped piece gives back its buffer, which may wake a waiter.
        drop(sent);
        if notify {
            self.bell.ring();
        } else {
            // A client that has its answer is likely to send the next request.
            self.bell.note();
        }
    }

    /// Sends what the socket takes of the queue; whether that was anything.
    pub(super) fn flush(&self) -> bool {
        let mut sent = Vec::new();
        let any = {
            let mut queue = self.lock();
            let before = queue.bytes - queue.sent;
            self.send(&mut queue, &mut sent);
            queue.bytes - queue.sent < before
        };
        drop(sent);
        any
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, queue: &mut Queue, sent: &mut Vec<Piece>) {
        while !queue.pieces.is_empty() && !queue.dead {
            let pieces = queue.pieces.iter().take(MAX_IOV / 2).flat_map(|piece| {
                let data = piece.data.as_ref();
                let data = data.map(|(buffer, part)| SendPiece::part(buffer.slice(), part.clone()));
                iter::once(SendPiece::from(&piece.head[..])).chain(data)
            });
            let pieces: Vec<_> = sys::skip(pieces, queue.sent).collect();
            let n = match sys::send(self.socket.as_fd(), &pieces) {
                Ok(n) => n,
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => return,
                    _ => {
                        tracing::debug!(%error, "NBD client is gone");
                        queue.dead = true;
                        sent.extend(queue.pieces.drain(..));
                        (queue.bytes, queue.sent) = (0, 0);
                        self.stop_reading();
                        return;
                    }
                },
            };
            queue.sent += n;
            // A send may end inside a piece, which stays with its buffer until the rest has gone.
            // Pieces that are done are dropped by the caller, without the lock, as that may wake
            // tasks.
            while let Some(first) = queue.pieces.front() {
                let len = first.len();
                if queue.sent < len {
                    break;
                }
                queue.sent -= len;
                queue.bytes -= len;
                sent.extend(queue.pieces.pop_front());
            }
        }
    }

    /// Notifies the connection's thread that something happened.
    pub(super) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    /// Asks for a notification when a request is finished, or no longer.
    pub(super) fn want_tickets(&self, wanted: bool) {
        self.wants_tickets.store(wanted, Ordering::SeqCst);
    }
}
