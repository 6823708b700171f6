//! [`Storage`]: the interface to be implemented by users of a driver.

use std::fmt::Display;
use std::ops::Range;
use std::time::{Duration, Instant};

use riser_block::Command;
use riser_memory::MemSlice;
use riser_reactor::{Handle, SystemThreads, Threads, Waker};

use super::open_file::OpenFile;

/// A file, device or other medium, as attached to a [`Driver`](super::Driver) by its user, and what
/// the user records about it. It is never a trait object, so calls on the data path are inlined.
#[allow(unused_variables, reason = "for the documentation")]
pub trait Storage {
    /// Result of a command for the user.
    type Result;
    /// Reason why a command has failed.
    type Error: Copy + Send + 'static;
    /// Result of a [`call`](Self::call).
    type Extents: Send + 'static;

    /// Converts a result. There are extents after a [`call`](Self::call).
    fn result(&self, result: Result<Option<Self::Extents>, Self::Error>) -> Self::Result;

    /// Converts a failure. The first incomplete byte is at `offset`.
    fn error(failure: Failure, offset: u64) -> Self::Error;

    /// Returns the file or device, or `None` for a medium that [executes](Self::execute) commands.
    fn file(&self) -> Option<&OpenFile>;

    /// Returns the size of a block in bytes. Commands consist of whole blocks, and no read returns
    /// parts of two versions of a block.
    fn block_size(&self) -> u32;

    /// Returns whether completed writes may be volatile until a flush.
    fn has_write_cache(&self) -> bool;

    /// Returns whether the file system may report an error of a write only to a flush with the same
    /// descriptor, so that no other descriptor can be used for flushes. Only supported for a file
    /// with a single driver, because the drivers would compete for the error.
    fn keeps_write_errors(&self) -> bool {
        false
    }

    /// Returns whether other drivers use the same open file. The kernel reports a lost write once
    /// for each descriptor, so a flush could succeed because another driver has received the error.
    /// If a driver cannot open a separate descriptor, its flushes therefore fail.
    fn has_other_drivers(&self) -> bool {
        false
    }

    /// Returns threads for system calls that may block.
    fn threads(&self) -> &dyn Threads {
        &SystemThreads
    }

    /// Queries the allocation on a helper thread, or discards without zeroes.
    fn call(file: &Handle, op: &Command, block_size: u32) -> Result<Self::Extents, Self::Error>;

    /// Returns the result of a call that is not executed: the whole range contains data.
    fn unknown_extents(op: &Command) -> Self::Extents;

    /// Returns the error number of a failed flush. Until it is cleared, every flush fails.
    fn flush_failure(&self) -> Option<i32>;

    /// Returns the number of flush failures that were cleared.
    fn flush_clears(&self) -> u64 {
        0
    }

    /// Records a failed flush.
    fn on_flush_failed(&mut self, errno: i32, now: Instant);

    /// Releases a detached store and its descriptor for flushes, as the last users of its file in
    /// this driver. Closing a file may take long, because the kernel may write back its cached data.
    fn release(self, descriptor: Option<Handle>)
    where
        Self: Sized,
    {
    }

    /// Closes a descriptor for flushes that was replaced. This may take as long as
    /// [`Storage::release`].
    fn close(&self, descriptor: Handle) {}

    /// Called for a successful command.
    fn on_success(&mut self, op: &Command, now: Instant) {}

    /// Called for a command that has failed on the medium, or with `None` for a failed flush, which
    /// may serve several commands.
    fn on_failure(
        &mut self,
        op: Option<&Command>,
        error: Self::Error,
        why: &dyn Display,
        now: Instant,
    ) {
    }

    /// Called once for each command if faults are injected. These only affect requests, so no
    /// command completes synchronously.
    fn fault(&self, op: &Command) -> Option<Fault<Self::Error>> {
        None
    }

    /// Returns whether an injected fault holds a command.
    fn holds(&self, op: &Command) -> bool {
        false
    }

    /// Converts the data of a write in place before it is transferred, to the format of the medium. It
    /// is always followed by [`Storage::decode`].
    fn encode(&self, op: &Command, data: &[MemSlice]) {}

    /// Converts the data of a completed read or write to the caller's format, including data that was
    /// not transferred.
    fn decode(&self, op: &Command, data: &[MemSlice]) {}

    /// Returns whether changes have to be recorded before they start.
    fn records_changes(&self) -> bool {
        false
    }

    /// Starts a change of these bytes, if they are recorded. Otherwise, returns a number, and calls
    /// `waker`. The driver calls this again when it is woken, with this number as `waited`.
    ///
    /// # Errors
    /// Returns an error number if they cannot be recorded.
    fn begin_change(
        &self,
        bytes: Range<u64>,
        waited: Option<u64>,
        waker: impl FnOnce() -> Waker,
        now: Instant,
    ) -> Result<Option<u64>, i32> {
        Ok(None)
    }

    /// Called when a change of these bytes that was started is complete.
    fn end_change(&self, bytes: Range<u64>, now: Instant) {}

    /// Executes a command on a medium that is not a file. The first `done` bytes are complete.
    /// `window` is a list for the part of the buffer to transfer. Returns `None` to continue after
    /// other commands, because the whole range would take too long.
    fn execute(
        &self,
        op: &Command,
        done: &mut u64,
        data: &[MemSlice],
        window: &mut Vec<MemSlice>,
    ) -> Option<Result<Option<Self::Extents>, Self::Error>> {
        unreachable!("a file's commands are put into the ring")
    }
}

/// Failure of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// Error number of the kernel.
    Errno(i32),
    /// The file is shorter than the range.
    Truncated,
    /// It was cancelled.
    Cancelled,
    /// The ring can no longer be used.
    Ring,
}

/// Injected fault for a command.
#[derive(Debug, Clone, Copy)]
pub struct Fault<E> {
    /// Delay before it fails or continues.
    pub delay: Duration,
    /// Error after the delay. `None` if it continues.
    pub error: Option<E>,
    /// Maximum number of bytes per transfer.
    pub most: usize,
}
