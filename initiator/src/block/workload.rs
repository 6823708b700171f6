//! Operations that are submitted from a device's own thread: [`Workload`].

use std::ops::Range;
use std::time::Instant;

use super::{BlockError, Buffer};

/// An operation on a block device. Ranges and buffers are within the device's
/// [`Geometry`](super::Geometry), as those of [`BlockDevice`](super::BlockDevice)'s calls are.
#[derive(Debug)]
pub enum Operation {
    /// Fills the whole buffer from `offset` on.
    Read {
        /// First byte.
        offset: u64,
        /// Memory of the data.
        buffer: Buffer,
    },
    /// Writes the whole buffer.
    Write {
        /// First byte.
        offset: u64,
        /// Memory of the data.
        buffer: Buffer,
        /// The data are on stable storage when it completes.
        fua: bool,
    },
    /// Gives up the contents of a range of at most `max_discard` bytes.
    Discard(Range<u64>),
    /// Puts completed writes onto stable storage.
    Flush,
}

/// Result of an operation: its buffer, if it had one.
pub type Completion = Result<Option<Buffer>, BlockError>;

/// Operations that a [`Workload`] submits in one call.
#[derive(Debug, Default)]
pub struct Submissions(Vec<(u32, Operation)>);

impl Submissions {
    /// Adds an operation. Its completion bears the same tag.
    pub fn push(&mut self, tag: u32, operation: Operation) {
        self.0.push((tag, operation));
    }

    /// Takes the operations, in the order of their submission.
    pub fn drain(&mut self) -> impl Iterator<Item = (u32, Operation)> + '_ {
        self.0.drain(..)
    }

    /// Number of operations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A load on a device that runs on the device's thread
/// ([`BlockDevice::drive`](super::BlockDevice::drive)): a completion and the submission that
/// follows from it need no lock, no message and no switch of threads.
///
/// No call blocks. The workload is over, and is dropped, when none of its operations is outstanding
/// after a call and [`Workload::due`] returns `None`.
pub trait Workload: Send {
    /// Submits what may start by now: the first call, and again when [`Workload::due`] has passed.
    fn submit(&mut self, queue: &mut Submissions);

    /// Handles the completion of an operation, and submits what may start then.
    fn complete(&mut self, tag: u32, completion: Completion, queue: &mut Submissions);

    /// Time at which it has something to submit, completions apart.
    fn due(&self) -> Option<Instant>;
}
