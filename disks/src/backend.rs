//! Executes the operations of a disk: [`Backend`].

use std::time::Instant;

use riser_block::poll_fds::PollInterests;

use super::operation::Operation;

/// The part of a disk that executes operations. It is only used on the disk thread.
pub(super) trait Backend {
    /// Adds an operation. It will be started by the next call to [`Backend::flush`].
    fn submit(&mut self, operation: Operation, now: Instant);

    /// Submits all added operations to the kernel.
    fn flush(&mut self, now: Instant);

    /// Processes completions. Returns whether there were any.
    fn complete(&mut self, now: Instant) -> bool;

    /// Must be called before the thread goes to sleep. Returns false if there are new completions.
    fn prepare_sleep(&mut self) -> bool;

    /// Adds the file descriptors to poll while sleeping.
    fn add_interests<'a>(&'a self, out: &mut PollInterests<'a>);

    /// Latest time for the next call to [`Backend::complete`].
    fn deadline(&self) -> Option<Instant>;

    /// Closes the backend. Operations in flight will still complete.
    fn close(&mut self);

    /// Returns whether the backend is closed and there are no operations in flight.
    fn is_over(&self) -> bool;
}
