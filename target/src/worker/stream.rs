//! The socket of a connection on TCP, and what it has in the ring: at most one receive and one
//! send.

use std::io;
use std::ops::Range;

use riser_memory::{MemSlice, Memory};
use riser_reactor::Handle;

use crate::iscsi::{Batch, Chunk};

/// Bytes taken from a socket at once before full-feature phase, and in discovery sessions.
const LOGIN_RECEIVE: usize = 8 << 10;

/// Bytes of headers sent at once, to begin with.
const HEADS: usize = 4 << 10;

/// A batch on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sending {
    /// Bytes of it that are sent.
    pub(super) sent: usize,
    /// Whether the rest is in the ring, or waits for a slot there.
    pub(super) is_submitted: bool,
}

/// A connection's socket and what it has in the ring.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) handle: Handle,
    /// The receive buffer, which is taken out while the channel reads it.
    pub(super) receive: Option<Memory>,
    pub(super) receiving: bool,
    /// A receive has filled the buffer: there is more at once than it has room for.
    pub(super) is_filled: bool,
    /// What was received and not looked at: the channel has enough to do.
    pub(super) unread: Range<usize>,
    pub(super) batch: Batch,
    pub(super) heads: Memory,
    /// The batch, while it is being sent.
    pub(super) sending: Option<Sending>,
    /// The socket was shut down.
    pub(super) is_shut: bool,
    /// The channel knows that the connection is gone.
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

    /// Returns its memory in bytes.
    pub(super) fn memory(&self) -> usize {
        self.receive.as_ref().map_or(0, Memory::len) + self.heads.len()
    }

    /// Appends the rest of the batch after `sent` bytes to a list.
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
