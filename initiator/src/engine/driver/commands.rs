//! Commands of a session: those submitted to its machine, and those waiting for room.

use std::collections::VecDeque;

use crate::engine::io::{Done, Io};
use crate::request::{RequestId, Retry};

/// See the documentation of the module.
#[derive(Default)]
pub(super) struct CommandQueue {
    /// Commands owned by the machine, by request.
    submitted: Vec<Option<Io>>,
    /// Commands that exceed the machine's capacity, or were submitted while we were processing its
    /// outputs.
    waiting: VecDeque<Io>,
}

impl CommandQueue {
    /// Returns the commands owned by the machine, by request.
    pub(super) fn submitted(&self) -> &[Option<Io>] {
        &self.submitted
    }

    /// Stores the command of a request accepted by the machine.
    pub(super) fn insert(&mut self, request: RequestId, io: Io) {
        let at = request.0 as usize;
        if at >= self.submitted.len() {
            self.submitted.resize_with(at + 1, || None);
        }
        self.submitted[at] = Some(io);
    }

    /// Removes the command of a request.
    ///
    /// # Panics
    /// Panics if there is no such request.
    pub(super) fn remove(&mut self, request: RequestId) -> Io {
        let io = self.submitted[request.0 as usize].take();
        io.expect("every request has its command")
    }

    /// Queues a command after the waiting ones, to ensure that commands start in the order of
    /// submission. Probes don't wait, because these commands may be held until the probe completes.
    pub(super) fn push_waiting(&mut self, io: Io) {
        match io.io.retry {
            Retry::Probe => self.waiting.push_front(io),
            Retry::Standard | Retry::Never => self.waiting.push_back(io),
        }
    }

    /// Removes the next waiting command.
    pub(super) fn pop_waiting(&mut self) -> Option<Io> {
        self.waiting.pop_front()
    }

    /// Returns a command to the front of the queue, because the machine has no room for it.
    pub(super) fn return_waiting(&mut self, io: Io) {
        self.waiting.push_front(io);
    }

    /// Removes all waiting commands.
    pub(super) fn remove_waiting(&mut self) -> VecDeque<Io> {
        std::mem::take(&mut self.waiting)
    }

    /// Returns whether commands are waiting.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns the number of commands of users, without the engine's pings and checks.
    pub(super) fn count_of_users(&self) -> usize {
        let is_own = |io: &Io| {
            matches!(
                io.done,
                Done::Ping | Done::PathPing { .. } | Done::Unit { .. } | Done::Check { .. }
            )
        };
        let ios = self.submitted.iter().flatten().chain(&self.waiting);
        ios.filter(|io| !is_own(io)).count()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use riser_scsi::lun::LunId;

    use super::*;
    use crate::engine::io::{IoData, ScsiIo};
    use crate::scsi::Command;

    /// Returns a command with this timeout in seconds.
    fn io(retry: Retry, seconds: u64, done: Done, now: Instant) -> Io {
        let timeout = Duration::from_secs(seconds);
        let command = Command::test_unit_ready();
        let mut io = ScsiIo::new(LunId::ZERO, command, IoData::None, timeout);
        io.retry = retry;
        Io::new(io, done, now)
    }

    #[test]
    fn probe_precedes_waiting_commands() {
        let now = Instant::now();
        let user = |seconds| {
            let done = Done::Workload {
                workload: 0,
                token: 0,
            };
            io(Retry::Standard, seconds, done, now)
        };
        let mut queue = CommandQueue::default();
        queue.push_waiting(user(1));
        queue.push_waiting(user(2));
        queue.push_waiting(io(Retry::Probe, 3, Done::Ping, now));
        assert_eq!(queue.count_of_users(), 2);
        let next = |queue: &mut CommandQueue| {
            let io = queue.pop_waiting();
            io.map(|io| (io.deadline - now).as_secs())
        };
        assert_eq!(next(&mut queue), Some(3));
        let first = queue.pop_waiting().unwrap();
        queue.insert(RequestId(5), first);
        assert_eq!((queue.submitted().len(), queue.count_of_users()), (6, 2));
        let first = queue.remove(RequestId(5));
        queue.return_waiting(first);
        assert_eq!((next(&mut queue), next(&mut queue)), (Some(1), Some(2)));
        assert!(!queue.has_waiting());
    }
}
