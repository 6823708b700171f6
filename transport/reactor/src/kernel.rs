//! [`Kernel`]: what carries out the operations of a ring.
//!
//! A ring has tokens, slots and bounds; a kernel has queues and does the work. It gets an operation
//! with the slot that keeps its file and memory, and gives each back, by the slot's user data, as
//! completions. The host's `io_uring` is one, and one in memory the other
//! ([`simulated`](crate::simulated)).

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

/// The kernel under a ring. A match on it costs a compare, and the compiler sees through each arm.
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

    /// Mappings, or parts of some, that are registered.
    pub(crate) fn buffers(&self) -> usize {
        match self {
            Self::Uring(uring) => uring.buffers(),
            Self::Simulated(_) => 0,
        }
    }

    /// Puts a file into an entry of the table of files, or takes it out.
    pub(crate) fn update_file(&mut self, index: u32, file: Option<&Handle>) -> io::Result<()> {
        match self {
            Self::Uring(uring) => uring.update_file(index, file),
            Self::Simulated(_) => Ok(()),
        }
    }

    /// Makes sure that one operation can be queued.
    #[inline]
    pub(crate) fn make_room(&mut self) -> Result<(), SubmitError> {
        match self {
            Self::Uring(uring) => uring.make_room(),
            Self::Simulated(_) => Ok(()),
        }
    }

    /// Queues the operation that a slot was prepared for, after [`make_room`](Self::make_room). The
    /// slot keeps all that it names until its last completion.
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

    /// Asks for the end of an operation, after [`make_room`](Self::make_room).
    pub(crate) fn cancel(&mut self, user_data: u64) {
        match self {
            Self::Uring(uring) => uring.cancel(user_data),
            Self::Simulated(queue) => queue.cancel(user_data),
        }
    }

    /// Whether what is queued, or what has finished, needs a call of [`enter`](Self::enter).
    #[inline]
    pub(crate) fn must_enter(&mut self) -> bool {
        match self {
            Self::Uring(uring) => uring.must_enter(),
            Self::Simulated(_) => true,
        }
    }

    /// Hands over what is queued; with `wait`, until a completion is there or the time in it has
    /// passed. Nothing waits in memory.
    pub(crate) fn enter(&mut self, wait: Option<Option<Duration>>) -> io::Result<()> {
        match self {
            Self::Uring(uring) => uring.enter(wait),
            Self::Simulated(queue) => {
                queue.enter();
                Ok(())
            }
        }
    }

    /// Releases registered files and memory, once nothing is in flight.
    pub(crate) fn release(&mut self) {
        match self {
            Self::Uring(uring) => uring.release(),
            Self::Simulated(_) => {}
        }
    }

    /// Leaves registered memory to a kernel that may still write there.
    pub(crate) fn leak_memory(&mut self) {
        match self {
            Self::Uring(uring) => uring.leak_memory(),
            Self::Simulated(_) => {}
        }
    }
}
