//! Submitting operations from the device thread: [`Workload`].

use std::ops::Range;
use std::time::Instant;

use super::{BlockError, Buffer};

/// Block device operation. As with [`BlockDevice`](super::BlockDevice) calls, ranges and buffers
/// must be within the [`Geometry`](super::Geometry) of the device.
#[derive(Debug)]
pub enum Operation {
    /// Reads from `offset` to fill the whole buffer.
    Read {
        /// First byte.
        offset: u64,
        /// Data buffer.
        buffer: Buffer,
    },
    /// Writes the whole buffer.
    Write {
        /// First byte.
        offset: u64,
        /// Data buffer.
        buffer: Buffer,
        /// Data must be on stable storage before completion.
        fua: bool,
    },
    /// Discards a range of up to `max_discard` bytes.
    Discard(Range<u64>),
    /// Flushes completed writes to stable storage.
    Flush,
}

/// Result of an operation, with its buffer if it had one.
pub type Completion = Result<Option<Buffer>, BlockError>;

/// Operations submitted by a [`Workload`] in a call.
#[derive(Debug, Default)]
pub struct Submissions(Vec<(u32, Operation)>);

impl Submissions {
    /// Adds an operation. The same tag will be used for the completion.
    pub fn push(&mut self, tag: u32, operation: Operation) {
        self.0.push((tag, operation));
    }

    /// Removes all operations, in the order in which they were added.
    pub fn drain(&mut self) -> impl Iterator<Item = (u32, Operation)> + '_ {
        self.0.drain(..)
    }

    /// Number of operations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// I/O load that runs on the device thread ([`BlockDevice::drive`](super::BlockDevice::drive)).
/// This way, we don't need a lock, a message or a thread switch for each completion and submission.
///
/// An implementation must not block in these calls. If there are no outstanding operations after a
/// call, and [`Workload::due`] returns `None`, the workload is done and will be dropped.
pub trait Workload: Send {
    /// Submits operations that can be started now. This is the first call, and it is called again
    /// when [`Workload::due`] has expired.
    fn submit(&mut self, queue: &mut Submissions);

    /// Handles a completed operation, and submits new operations.
    fn complete(&mut self, tag: u32, completion: Completion, queue: &mut Submissions);

    /// Returns the time for the next submit call, not including completions.
    fn due(&self) -> Option<Instant>;
}
