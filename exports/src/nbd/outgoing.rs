//! Send side of a connection, used by its thread and by threads which complete requests.
//!
//! If a reply is small and fits into the socket buffer, and there are no other replies, it is sent
//! directly by the thread which completes the request. All other replies are queued for the
//! connection thread, which can send many replies in a single system call.
//!
//! Limits: each connection can have up to [`MAX_IN_FLIGHT`] requests and [`MAX_BYTES`] bytes (plus
//! one request) in flight, until the last reply has been sent to the socket. When a limit is
//! reached, we stop reading from this connection. Device buffers and memory for assembled replies
//! are shared with the other connections, see [`super::budget`].

use std::collections::VecDeque;
use std::io;
use std::iter;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use riser_block::Buffer;
use riser_memory::sys::{self, SendPiece};

use super::budget::{Account, Share};
use crate::bell::Bell;

/// Max requests in flight per connection.
pub(super) const MAX_IN_FLIGHT: u32 = 256;
/// Max bytes in flight per connection. Above this, we stop reading new requests.
pub(super) const MAX_BYTES: u64 = 64 << 20;
/// Max reply size which can be sent by the completing thread.
const INLINE_BYTES: usize = 16 << 10;
/// If there are more requests in flight, replies are sent by the connection thread, which can send
/// multiple replies at the same time.
const INLINE_IN_FLIGHT: u32 = 4;
/// Max I/O vectors per system call.
const MAX_IOV: usize = 64;

/// Data to send to the client: bytes, and then a buffer range.
pub(super) struct Piece {
    pub(super) head: Vec<u8>,
    pub(super) data: Option<(Buffer, Range<usize>)>,
    /// Share of the export's buffers used by this buffer.
    #[expect(dead_code, reason = "held for its drop")]
    pub(super) share: Option<Share>,
    /// Released when the piece has been sent.
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
    /// Total bytes in all pieces.
    bytes: usize,
    /// Bytes already sent from the first piece.
    sent: usize,
    /// Socket error; nothing more can be sent.
    dead: bool,
}

/// State shared by the connection thread and request completions.
pub(super) struct Shared {
    socket: UnixStream,
    queue: Mutex<Queue>,
    bell: Arc<Bell>,
    /// Set if the thread should be notified when a request completes.
    wants_tickets: AtomicBool,
    in_flight: AtomicU32,
    bytes: AtomicU64,
    account: Arc<Account>,
}

/// Counts a request against the connection limits until its replies have been sent.
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

    /// Stops reading from the client; requests in flight can still complete.
    pub(super) fn stop_reading(&self) {
        // It may already be closed.
        let _ = self.socket.shutdown(std::net::Shutdown::Read);
    }

    /// Closes the connection; unsent replies are lost.
    pub(super) fn hang_up(&self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        self.bell.ring();
    }

    /// Creates a ticket for a new request.
    pub(super) fn ticket(self: &Arc<Self>, bytes: u64) -> Arc<Ticket> {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        self.bytes.fetch_add(bytes, Ordering::SeqCst);
        Arc::new(Ticket {
            shared: self.clone(),
            bytes,
        })
    }

    /// Returns whether a new request can be read. If not, there will be a notification via `waker`
    /// or a released ticket.
    pub(super) fn has_room(&self, waker: &Waker) -> bool {
        self.in_flight.load(Ordering::SeqCst) < MAX_IN_FLIGHT
            && self.bytes.load(Ordering::SeqCst) < MAX_BYTES
            && self.account.has_room(waker)
    }

    /// Budget account for this connection.
    pub(super) fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Returns whether all requests are complete and all replies have been sent.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::SeqCst) == 0 && self.lock().pieces.is_empty()
    }

    /// Number of queued bytes, or `None` if nothing more can be sent.
    pub(super) fn backlog(&self) -> Option<usize> {
        let queue = self.lock();
        (!queue.dead).then(|| queue.bytes - queue.sent)
    }

    /// Sends a piece, or adds it to the queue for the connection thread.
    pub(super) fn push(&self, piece: Piece) {
        let mut sent = Vec::new();
        let notify = {
            let mut queue = self.lock();
            if queue.dead {
                // Will be dropped below, after unlocking.
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
        // Dropping a piece releases its buffer, which may wake a waiter.
        drop(sent);
        if notify {
            self.bell.ring();
        } else {
            // After receiving the reply, the client will likely send a new request.
            self.bell.note();
        }
    }

    /// Sends as much of the queue as possible; returns whether anything was sent.
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
                        tracing::debug!(%error, "NBD client disconnected");
                        queue.dead = true;
                        sent.extend(queue.pieces.drain(..));
                        (queue.bytes, queue.sent) = (0, 0);
                        self.stop_reading();
                        return;
                    }
                },
            };
            queue.sent += n;
            // A partially sent piece must keep its buffer until the remaining bytes are sent.
            // Completed pieces are dropped by the caller after unlocking, because this can wake
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

    /// Used to notify the connection thread about new events.
    pub(super) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    /// Enables or disables notification when a request completes.
    pub(super) fn want_tickets(&self, wanted: bool) {
        self.wants_tickets.store(wanted, Ordering::SeqCst);
    }
}
