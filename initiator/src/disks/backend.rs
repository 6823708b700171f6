//! What carries out the operations of a disk: [`Backend`].

use std::time::Instant;

use super::operation::Operation;
use crate::poll_fds::WaitedFds;

/// Part of a disk that carries out operations. It lives on the disk's thread.
pub(super) trait Backend {
    /// Takes an operation, to be started by the next [`Backend::flush`].
    fn submit(&mut self, operation: Operation, now: Instant);

    /// Hands what was submitted to the kernel.
    fn flush(&mut self, now: Instant);

    /// Completes what has ended. Returns whether there was anything.
    fn complete(&mut self, now: Instant) -> bool;

    /// The thread is about to sleep. Returns false if there is something to complete by now.
    fn prepare_sleep(&mut self) -> bool;

    /// Adds the descriptors that end the sleep.
    fn put_waited<'a>(&'a self, out: &mut WaitedFds<'a>);

    /// Time of the next call of [`Backend::complete`] at the latest.
    fn deadline(&self) -> Option<Instant>;

    /// Takes leave: what is in flight still ends.
    fn close(&mut self);

    /// Returns whether it was closed and nothing is in flight.
    fn is_over(&self) -> bool;
}
