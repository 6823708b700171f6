//! Sleeping in the ring, which also watches the device descriptors.

use riser_reactor::Next;

use super::{Worker, WorkerError};

impl Worker {
    /// Sleeps until something happens, unless there was recent work or a timeout has expired.
    /// Returns what to do next. For a simulated ring this does not sleep: the caller should
    /// continue at the given time or on the next event.
    ///
    /// # Errors
    /// Same as [`Worker::run`].
    pub fn park(&mut self, worked: usize) -> Result<Next, WorkerError> {
        let deadline = self.deadline();
        let next = self.spinner.plan(self.group.now, worked > 0, deadline);
        match next {
            Next::Poll => {}
            Next::Park(timeout) => {
                // There is no event to wake the worker for these: completion queues with more than
                // a single batch, released memory, messages waiting for a full mailbox, and
                // descriptors which could not be added to the ring.
                let is_due = self.group.conns.ready() > 0 || self.group.pool.has_change();
                if self.exiting
                    || is_due
                    || self.group.outbox.waiting() > 0
                    || !self.group.devices.arm_watches(&mut self.group.ring)?
                {
                    return Ok(Next::Poll);
                }
                self.parks += 1;
                self.group.ring.park(timeout)?;
            }
        }
        Ok(next)
    }
}
