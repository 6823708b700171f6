//! [`Kernel`]: the backend that executes the operations of a ring.
//!
//! A ring has tokens, slots and bounds. A kernel has queues and executes operations. It receives an
//! operation together with the slot that keeps its file and memory alive, and returns the
//! operation's user data in its completions. There are two implementations: `io_uring` of the host,
//! and an in-memory implementation ([`simulated`](crate::simulated)).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use riser_memory::Memory;

use crate::error::{RegisterError, SubmitError};
use crate::handle::{FileTable, Handle};
use crate::op::Op;
use crate::simulated;
use crate::slot::Slot;
use crate::uring::Uring;

/// The kernel under a ring. An enum instead of a trait object, so matching costs a comparison and
/// the compiler can inline each arm.
#[allow(
    clippy::large_enum_variant,
    reason = "every ring that serves has the large one, without an indirection"
)]
pub(crate) enum Kernel {
    Uring(Uring),
    Simulated(simulated::Queue),
}

impl Kernel {
    pub(crate) fn register_memory(&mut self, memory: &Memory) -> Result<(), RegisterError> {
        match self {
            Self::Uring(uring) => uring.register_memory(memory),
            Self::Simulated(_) => Ok(()),
        }
    }

    /// Returns the number of registered mappings or parts of mappings.
    pub(crate) fn buffers(&self) -> usize {
        match self {
            Self::Uring(uring) => uring.buffers(),
            Self::Simulated(_) => 0,
        }
    }

    /// Stores a file in an entry of the file table, or clears the entry.
    pub(crate) fn update_file(&mut self, index: u32, file: Option<&Handle>) -> io::Result<()> {
        match self {
            Self::Uring(uring) => uring.update_file(index, file),
            Self::Simulated(_) => Ok(()),
        }
    }

    /// Ensures that one operation can be queued.
    #[inline]
    pub(crate) fn make_room(&mut self) -> Result<(), SubmitError> {
        match self {
            Self::Uring(uring) => uring.make_room(),
            Self::Simulated(_) => Ok(()),
        }
    }

    /// Queues the operation that the slot was prepared for, after calling
    /// [`make_room`](Self::make_room). The slot keeps all resources of the operation alive until
    /// its last completion.
    #[inline(always)]
    #[allow(
        clippy::inline_always,
        reason = "callers name the operation: one arm of a match on it is left"
    )]
    pub(crate) fn submit(
        &mut self,
        op: Op,
        user_data: u64,
        file: &Handle,
        slot: &mut Slot,
        files: &Arc<FileTable>,
    ) {
        match self {
            Self::Uring(uring) => uring.submit(op, user_data, file, slot, files),
            Self::Simulated(queue) => queue.submit(op, user_data, file, slot),
        }
    }

    /// Requests the cancellation of an operation, after calling [`make_room`](Self::make_room).
    pub(crate) fn cancel(&mut self, user_data: u64) {
        match self {
            Self::Uring(uring) => uring.cancel(user_data),
            Self::Simulated(queue) => queue.cancel(user_data),
        }
    }

    /// Returns whether [`enter`](Self::enter) must be called because of queued operations or
    /// deferred completions.
    #[inline]
    pub(crate) fn must_enter(&mut self) -> bool {
        match self {
            Self::Uring(uring) => uring.must_enter(),
            Self::Simulated(_) => true,
        }
    }

    /// Submits queued operations. With `wait`, blocks until a completion is available or the
    /// timeout in `wait` expires. The simulated kernel never blocks.
    pub(crate) fn enter(&mut self, wait: Option<Option<Duration>>) -> io::Result<()> {
        match self {
            Self::Uring(uring) => uring.enter(wait),
            Self::Simulated(queue) => {
                queue.enter();
                Ok(())
            }
        }
    }

    /// Releases registered files and memory. Must only be called if there are no operations in
    /// flight.
    pub(crate) fn release(&mut self) {
        match self {
            Self::Uring(uring) => uring.release(),
            Self::Simulated(_) => {}
        }
    }

    /// Leaks registered memory, because the kernel may still write to it.
    pub(crate) fn leak_memory(&mut self) {
        match self {
            Self::Uring(uring) => uring.leak_memory(),
            Self::Simulated(_) => {}
        }
    }
}
