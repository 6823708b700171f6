//! Operations sent to the disk thread, and their completions.

use std::cell::RefCell;
use std::rc::Rc;

use riser_block::oneshot::Sender;
use riser_block::{BlockError, Buffer, Command, Extent};

/// Completed operation.
#[derive(Debug)]
pub(super) struct Ended {
    /// Extents for a status request; empty for other operations.
    pub(super) result: Result<Vec<Extent>, BlockError>,
    /// Buffer that was passed with the operation.
    pub(super) buffer: Option<Buffer>,
}

/// Operation submitted by a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    /// Workload index on this thread.
    pub(super) workload: usize,
    /// Tag set by the workload.
    pub(super) tag: u32,
    /// If the operation succeeds, we need to send a flush.
    pub(super) then_flush: bool,
}

/// Completions for the workloads on this disk thread.
pub(super) type EndedQueue = Rc<RefCell<Vec<(Ticket, Ended)>>>;

/// How to report the completion of an operation.
#[derive(Debug)]
pub(super) enum Done {
    /// Notify a task. If this is dropped, the task is notified that the disk is closed.
    Task(Sender<Ended>),
    /// Notify a workload on this thread.
    Workload(EndedQueue, Ticket),
}

/// Operation on the disk thread.
#[derive(Debug)]
pub(super) struct Operation {
    /// Offsets and lengths must be aligned to blocks, and within the disk.
    pub(super) command: Command,
    /// Buffer for a read or write. A flush may also have a buffer, if it is sent after a write.
    pub(super) buffer: Option<Buffer>,
    pub(super) done: Done,
}

impl Operation {
    /// Returns the buffer for a read or write.
    pub(super) fn memory(&self) -> &Buffer {
        self.buffer
            .as_ref()
            .expect("reads and writes have a buffer")
    }

    /// Completes the operation. The caller's task may run within this call.
    pub(super) fn complete(self, result: Result<Vec<Extent>, BlockError>) {
        let buffer = self.buffer;
        let ended = Ended { result, buffer };
        match self.done {
            Done::Task(done) => done.send(ended),
            Done::Workload(queue, ticket) => queue.borrow_mut().push((ticket, ended)),
        }
    }
}
