//! Answers to the kernel, and the requests that wait for them.
//!
//! A request is a [`Reply`] from the moment it is read until its answer is written: dropping it
//! answers with an error, so that no request can be forgotten. An answer with much data is copied
//! to the kernel in a turn of its queue, not by the completion that has brought the data.
//!
//! Bounds: [`MAX_IN_FLIGHT`] requests and [`MAX_BYTES`] (and one request) bytes of a queue are
//! between the read of a request and its answer; beyond them the queue is not read, and the kernel
//! holds what comes.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_memory::sys::{SendPiece, write_pieces};
use zerocopy::IntoBytes;

use super::sys::OutHeader;
use crate::block::{Bell, BlockError, Buffer};

/// Most requests of a queue in flight.
pub(super) const MAX_IN_FLIGHT: u32 = 256;
/// Bytes of a queue in flight from which on no further request is read.
pub(super) const MAX_BYTES: u64 = 64 << 20;
/// Data of an answer that a completion copies to the kernel itself, in bytes.
const INLINE_BYTES: usize = 32 << 10;

/// An answer whose data wait for their turn.
struct Answer {
    reply: Reply,
    buffer: Buffer,
    range: Range<usize>,
}

/// A queue's descriptor, and what its thread shares with the requests in flight.
pub(super) struct Channel {
    fd: OwnedFd,
    bell: Bell,
    answers: Mutex<VecDeque<Answer>>,
    in_flight: AtomicU32,
    bytes: AtomicU64,
    /// The thread wants to know when a request is answered.
    wants_room: AtomicBool,
}

impl Channel {
    /// The channel of a descriptor that does not block, which takes each answer as a whole.
    ///
    /// # Errors
    /// Those of making an eventfd.
    pub(super) fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            fd,
            bell: Bell::new()?,
            answers: Mutex::default(),
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

    /// Bytes of the requests in flight.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }

    /// Returns whether another request may be read; if not, the bell rings when that may change.
    pub(super) fn has_room(&self) -> bool {
        let has_room =
            || self.in_flight.load(Ordering::SeqCst) < MAX_IN_FLIGHT && self.bytes() < MAX_BYTES;
        if !has_room() {
            self.wants_room.store(true, Ordering::SeqCst);
            // Once more: the last answer may have come before it was known who waits.
            if !has_room() {
                return false;
            }
        }
        self.wants_room.store(false, Ordering::SeqCst);
        true
    }

    /// Returns whether every request is answered; if not, the bell rings when one is.
    pub(super) fn is_idle(&self) -> bool {
        self.wants_room.store(true, Ordering::SeqCst);
        self.in_flight.load(Ordering::SeqCst) == 0
    }

    /// Sends answers that wait until these have `most` bytes or more; whether there were any.
    pub(super) fn send_waiting(&self, most: usize) -> bool {
        let mut sent = 0;
        let mut any = false;
        while sent < most {
            // The lock is free while bytes are copied: completions on other threads need it.
            let Some(answer) = self.answers().pop_front() else {
                break;
            };
            any = true;
            sent += answer.range.len();
            answer.reply.send_data(&answer.buffer, answer.range);
        }
        any
    }

    /// Answers nothing any more: there is no kernel side that waits.
    pub(super) fn forget_waiting(&self) {
        let answers = std::mem::take(&mut *self.answers());
        // Without the lock, since dropping them gives buffers back, which may run tasks.
        drop(answers);
    }

    fn answers(&self) -> MutexGuard<'_, VecDeque<Answer>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, unique: u64, error: i32, data: SendPiece<'_>) {
        let header = OutHeader {
            len: ((size_of::<OutHeader>() + data.len()) as u32).into(),
            error: (-error).into(),
            unique: unique.into(),
        };
        let pieces = [SendPiece::from(header.as_bytes()), data];
        if let Err(error) = write_pieces(self.fd(), &pieces) {
            // The process that waited was killed, or the mount is gone.
            tracing::debug!(%error, unique, "the answer to a FUSE request is not taken");
        }
    }
}

/// A request that has not been answered.
pub(super) struct Reply {
    channel: Arc<Channel>,
    unique: u64,
    /// Bytes of memory that the request takes.
    bytes: u64,
    is_answered: bool,
}

impl Reply {
    pub(super) fn new(channel: &Arc<Channel>, unique: u64, bytes: u64) -> Self {
        channel.in_flight.fetch_add(1, Ordering::SeqCst);
        channel.bytes.fetch_add(bytes, Ordering::SeqCst);
        Self {
            channel: channel.clone(),
            unique,
            bytes,
            is_answered: false,
        }
    }

    /// Answers with success and what belongs to it.
    pub(super) fn succeed(mut self, body: &[u8]) {
        self.is_answered = true;
        self.channel.send(self.unique, 0, SendPiece::from(body));
    }

    /// Answers with a part of a buffer, straight from there.
    pub(super) fn succeed_with(self, buffer: Buffer, range: Range<usize>) {
        if range.len() <= INLINE_BYTES {
            return self.send_data(&buffer, range);
        }
        let channel = self.channel.clone();
        channel.answers().push_back(Answer {
            reply: self,
            buffer,
            range,
        });
        channel.bell.ring();
    }

    fn send_data(mut self, buffer: &Buffer, range: Range<usize>) {
        self.is_answered = true;
        let data = SendPiece::part(buffer.slice(), range);
        self.channel.send(self.unique, 0, data);
    }

    /// Answers with an error number.
    pub(super) fn refuse(mut self, errno: i32) {
        self.is_answered = true;
        self.channel
            .send(self.unique, errno, SendPiece::from(&[][..]));
    }

    /// Answers with the error of an operation.
    pub(super) fn fail(self, error: &BlockError) {
        tracing::debug!(%error, "FUSE request failed");
        self.refuse(error.errno());
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        let channel = &self.channel;
        if !self.is_answered {
            channel.send(self.unique, libc::EIO, SendPiece::from(&[][..]));
        }
        channel.bytes.fetch_sub(self.bytes, Ordering::SeqCst);
        channel.in_flight.fetch_sub(1, Ordering::SeqCst);
        if channel.wants_room.load(Ordering::SeqCst) {
            channel.bell.ring();
        } else {
            // A process that has its answer is likely to send the next request.
            channel.bell.note();
        }
    }
}
