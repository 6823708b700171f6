//! Operations on their way to a disk's thread and back.

use std::ops::Range;

use crate::block::{BlockError, Buffer, Extent, ZeroOptions};
use crate::engine::Sender;

/// Kind of an operation and its place. Offsets and lengths are whole blocks within the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// Fills the buffer.
    Read { offset: u64 },
    /// Writes the buffer.
    Write { offset: u64, fua: bool },
    /// Puts finished writes on stable storage.
    Flush,
    /// Gives up contents.
    Discard(Range<u64>),
    /// Makes a range read as zeroes.
    WriteZeroes(Range<u64>, ZeroOptions),
    /// Asks which parts of a range are allocated.
    Status(Range<u64>),
}

/// End of an operation.
#[derive(Debug)]
pub(super) struct Ended {
    /// Extents of a status; empty for other operations.
    pub(super) result: Result<Vec<Extent>, BlockError>,
    /// Buffer that was given with the operation.
    pub(super) buffer: Option<Buffer>,
}

/// An operation. If it is dropped, its caller is notified that the disk is gone.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) command: Command,
    /// Memory of a read or write.
    pub(super) buffer: Option<Buffer>,
    pub(super) done: Sender<Ended>,
}

impl Operation {
    /// Memory of a read or write.
    pub(super) fn memory(&self) -> &Buffer {
        self.buffer
            .as_ref()
            .expect("reads and writes have a buffer")
    }

    /// Reports the end. The caller's task may run within this call.
    pub(super) fn end(self, result: Result<Vec<Extent>, BlockError>) {
        self.done.send(Ended {
            result,
            buffer: self.buffer,
        });
    }
}
