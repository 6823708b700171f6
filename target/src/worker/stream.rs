//! TCP connection socket and its ring operations. There can be a receive and a send at the same
//! time.

use std::io;
use std::ops::Range;

use riser_memory::{MemSlice, Memory};
use riser_reactor::Handle;

use crate::iscsi::{Batch, Chunk};

/// Receive buffer size in bytes before full-feature phase, and for discovery sessions.
const LOGIN_RECEIVE: usize = 8 << 10;

/// Initial header buffer size in bytes.
const HEADS: usize = 4 << 10;

/// Batch being sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sending {
    /// Number of bytes already sent.
    pub(super) sent: usize,
    /// Set if the remaining bytes are in the ring or waiting for a slot.
    pub(super) is_submitted: bool,
}

/// Socket of a connection and its ring operations.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) handle: Handle,
    /// Receive buffer. This is `None` while the channel is reading from it.
    pub(super) receive: Option<Memory>,
    pub(super) receiving: bool,
    /// Set if a receive has filled the buffer, so there may be more data than it can hold.
    pub(super) is_filled: bool,
    /// Received bytes that were not processed because the channel is busy.
    pub(super) unread: Range<usize>,
    pub(super) batch: Batch,
    pub(super) heads: Memory,
    /// Current batch while it is being sent.
    pub(super) sending: Option<Sending>,
    /// Set if the socket was shut down.
    pub(super) is_shut: bool,
    /// Set if the channel was notified that the connection is closed.
    pub(super) is_gone: bool,
}

impl Stream {
    pub(super) fn new(handle: Handle) -> io::Result<Self> {
        Ok(Self {
            handle,
            receive: Some(Memory::new(LOGIN_RECEIVE)?),
            receiving: false,
            is_filled: false,
            unread: 0..0,
            batch: Batch::default(),
            heads: Memory::new(HEADS)?,
            sending: None,
            is_shut: false,
            is_gone: false,
        })
    }

    /// Returns the memory used, in bytes.
    pub(super) fn memory(&self) -> usize {
        self.receive.as_ref().map_or(0, Memory::len) + self.heads.len()
    }

    /// Adds the remaining part of the batch after `sent` bytes to a list.
    pub(super) fn put_rest(&self, mut sent: usize, rest: &mut Vec<MemSlice>) {
        let slices = self.batch.chunks.iter().map(|chunk| match chunk {
            Chunk::Head(range) => self
                .heads
                .slice(range.clone())
                .expect("the heads were copied there"),
            Chunk::Data(slice) => slice.clone(),
        });
        for slice in slices {
            let skipped = sent.min(slice.len());
            sent -= skipped;
            rest.extend(slice.slice(skipped..slice.len()).filter(|s| !s.is_empty()));
        }
    }
}
