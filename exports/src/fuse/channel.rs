//! Responses to the kernel, and pending requests.
//!
//! A request is a [`Reply`] until the response is sent. Dropping it sends an error response, so we
//! can't lose any request. Responses with a lot of data are copied to the kernel when the queue is
//! polled, not in the completion handler.
//!
//! Limits: each queue can have up to [`MAX_IN_FLIGHT`] requests and [`MAX_BYTES`] bytes (plus one
//! request) in flight. When a limit is reached we stop reading, and new requests are queued by the
//! kernel.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_block::{BlockError, Buffer};
use riser_memory::sys::{SendPiece, write_pieces};
use zerocopy::IntoBytes;

use super::sys::OutHeader;
use crate::bell::Bell;

/// Max requests in flight per queue.
pub(super) const MAX_IN_FLIGHT: u32 = 256;
/// When the requests in flight use this many bytes, we stop reading new requests.
pub(super) const MAX_BYTES: u64 = 64 << 20;
/// Max response data which a completion can copy to the kernel directly, in bytes.
const INLINE_BYTES: usize = 32 << 10;

/// Queued response with data.
struct QueuedResponse {
    reply: Reply,
    buffer: Buffer,
    range: Range<usize>,
}

/// Queue descriptor, and state shared by its thread and the requests in flight.
pub(super) struct Channel {
    fd: OwnedFd,
    bell: Bell,
    queue: Mutex<VecDeque<QueuedResponse>>,
    in_flight: AtomicU32,
    bytes: AtomicU64,
    /// Set if the thread should be notified when a request completes.
    wants_room: AtomicBool,
}

impl Channel {
    /// Creates a channel for a non-blocking descriptor which accepts each response as a whole.
    ///
    /// # Errors
    /// Returns an error if an eventfd can't be created.
    pub(super) fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            fd,
            bell: Bell::new()?,
            queue: Mutex::default(),
            in_flight: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            wants_room: AtomicBool::new(false),
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Bytes used by requests in flight.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }

    /// Returns whether a new request can be read. If not, the bell will ring when this may have
    /// changed.
    pub(super) fn has_room(&self) -> bool {
        let has_room =
            || self.in_flight.load(Ordering::SeqCst) < MAX_IN_FLIGHT && self.bytes() < MAX_BYTES;
        if !has_room() {
            self.wants_room.store(true, Ordering::SeqCst);
            // Check again, because the last request may have completed before the flag was set.
            if !has_room() {
                return false;
            }
        }
        self.wants_room.store(false, Ordering::SeqCst);
        true
    }

    /// Returns whether all requests are complete. If not, the bell will ring when a request
    /// completes.
    pub(super) fn is_idle(&self) -> bool {
        self.wants_room.store(true, Ordering::SeqCst);
        self.in_flight.load(Ordering::SeqCst) == 0
    }

    /// Sends queued responses until at least `most` bytes are sent; returns whether there were any.
    pub(super) fn send_waiting(&self, most: usize) -> bool {
        let mut sent = 0;
        let mut any = false;
        while sent < most {
            // Don't hold the lock while copying data: it's used by completions on other threads.
            let Some(queued) = self.queue().pop_front() else {
                break;
            };
            any = true;
            sent += queued.range.len();
            queued.reply.send_data(&queued.buffer, queued.range);
        }
        any
    }

    /// Drops queued responses, because the kernel side is closed.
    pub(super) fn forget_waiting(&self) {
        let queue = std::mem::take(&mut *self.queue());
        // Unlock first: this drop releases buffers, which may run tasks.
        drop(queue);
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<QueuedResponse>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, unique: u64, error: i32, data: SendPiece<'_>) {
        let header = OutHeader {
            len: ((size_of::<OutHeader>() + data.len()) as u32).into(),
            error: (-error).into(),
            unique: unique.into(),
        };
        let pieces = [SendPiece::from(header.as_bytes()), data];
        if let Err(error) = write_pieces(self.fd(), &pieces) {
            // The process was killed, or the file system was unmounted.
            tracing::debug!(%error, unique, "cannot send a FUSE response");
        }
    }
}

/// Request without a response yet.
pub(super) struct Reply {
    channel: Arc<Channel>,
    unique: u64,
    /// Memory used by this request, in bytes.
    bytes: u64,
    is_sent: bool,
}

impl Reply {
    pub(super) fn new(channel: &Arc<Channel>, unique: u64, bytes: u64) -> Self {
        channel.in_flight.fetch_add(1, Ordering::SeqCst);
        channel.bytes.fetch_add(bytes, Ordering::SeqCst);
        Self {
            channel: channel.clone(),
            unique,
            bytes,
            is_sent: false,
        }
    }

    /// Completes the request with this response body.
    pub(super) fn succeed(mut self, body: &[u8]) {
        self.is_sent = true;
        self.channel.send(self.unique, 0, SendPiece::from(body));
    }

    /// Completes the request with data from a buffer, without copying it first.
    pub(super) fn succeed_with(self, buffer: Buffer, range: Range<usize>) {
        if range.len() <= INLINE_BYTES {
            return self.send_data(&buffer, range);
        }
        let channel = self.channel.clone();
        channel.queue().push_back(QueuedResponse {
            reply: self,
            buffer,
            range,
        });
        channel.bell.ring();
    }

    fn send_data(mut self, buffer: &Buffer, range: Range<usize>) {
        self.is_sent = true;
        let data = SendPiece::part(buffer.slice(), range);
        self.channel.send(self.unique, 0, data);
    }

    /// Completes the request with an error code.
    pub(super) fn refuse(mut self, errno: i32) {
        self.is_sent = true;
        self.channel
            .send(self.unique, errno, SendPiece::from(&[][..]));
    }

    /// Completes the request with an operation error.
    pub(super) fn fail(self, error: &BlockError) {
        tracing::debug!(%error, "FUSE request failed");
        self.refuse(error.errno());
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        let channel = &self.channel;
        if !self.is_sent {
            channel.send(self.unique, libc::EIO, SendPiece::from(&[][..]));
        }
        channel.bytes.fetch_sub(self.bytes, Ordering::SeqCst);
        channel.in_flight.fetch_sub(1, Ordering::SeqCst);
        if channel.wants_room.load(Ordering::SeqCst) {
            channel.bell.ring();
        } else {
            // After receiving the response, the process will likely send a new request.
            channel.bell.note();
        }
    }
}
