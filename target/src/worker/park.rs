//! Sleep of a worker: in its ring, which watches the devices' descriptors as well.

use riser_reactor::Next;

use super::{Worker, WorkerError};

impl Worker {
    /// Sleeps, unless there was work a moment ago or something is due; returns what it has done. On
    /// a ring of a simulation it does not sleep: who drives the worker comes back then, or when
    /// something has happened.
    ///
    /// # Errors
    /// As [`Worker::run`].
    pub fn park(&mut self, worked: usize) -> Result<Next, WorkerError> {
        let deadline = self.deadline();
        let next = self.spinner.plan(self.now, worked > 0, deadline);
        match next {
            Next::Poll => {}
            Next::Park(timeout) => {
                // Nothing wakes the worker for these: completion queues with more than a batch,
                // memory that has come back, and mail that a full mailbox has refused. Nor for
                // descriptors for which the ring has no room.
                let is_due = self.conns.ready() > 0 || self.pool.has_change();
                if self.exiting
                    || is_due
                    || self.outbox.waiting() > 0
                    || !self.devices.arm_watches(&mut self.ring)?
                {
                    return Ok(Next::Poll);
                }
                self.parks += 1;
                self.ring.park(timeout)?;
            }
        }
        Ok(next)
    }
}
