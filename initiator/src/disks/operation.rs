//! Operations on their way to a disk's thread and back.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

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

/// Operation of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    /// Which of the workloads of the thread.
    pub(super) workload: usize,
    /// Tag that the workload has given it.
    pub(super) tag: u32,
    /// A flush has to follow on its success.
    pub(super) then_flush: bool,
}

/// Ends of operations of workloads, on the disk's thread.
pub(super) type EndedQueue = Rc<RefCell<Vec<(Ticket, Ended)>>>;

/// Where the end of an operation is reported.
#[derive(Debug)]
pub(super) enum Done {
    /// To a task. If this is dropped, the task is notified that the disk is gone.
    Task(Sender<Ended>),
    /// To a workload of the thread.
    Workload(EndedQueue, Ticket),
}

/// An operation on the disk's thread.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) command: Command,
    /// Memory of a read or write. A flush may have that of the write that it follows.
    pub(super) buffer: Option<Buffer>,
    pub(super) done: Done,
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
        let buffer = self.buffer;
        let ended = Ended { result, buffer };
        match self.done {
            Done::Task(done) => done.send(ended),
            Done::Workload(queue, ticket) => queue.borrow_mut().push((ticket, ended)),
        }
    }
}
