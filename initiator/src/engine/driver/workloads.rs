//! Work that runs on this thread.

use std::time::Instant;

use super::Driver;
use crate::engine::env::Env;
use crate::engine::io::{Done, Io, WorkQueue, Workload};

impl<E: Env> Driver<E> {
    pub(super) fn start_workload(
        &mut self,
        index: usize,
        mut workload: Box<dyn Workload>,
        now: Instant,
    ) {
        let mut queue = WorkQueue::default();
        workload.start(&mut queue);
        let id = self.sessions[index].workloads.insert((workload, 0));
        self.submit_work(index, id, &mut queue, now);
    }

    pub(super) fn submit_work(
        &mut self,
        index: usize,
        workload: usize,
        queue: &mut WorkQueue,
        now: Instant,
    ) {
        self.sessions[index].workloads[workload].1 += queue.submitted.len();
        for (token, io) in queue.submitted.drain(..) {
            let done = Done::Workload { workload, token };
            self.submit(index, Io::new(io, done, now), now);
        }
        if self.sessions[index].workloads[workload].1 == 0 {
            self.sessions[index].workloads.remove(workload);
        }
    }

    /// Reports the ends of their commands to workloads; whether there were any.
    pub(super) fn run_workloads(&mut self, now: Instant) -> bool {
        let mut finished = std::mem::take(&mut self.finished);
        let any = !finished.is_empty();
        let mut queue = WorkQueue::default();
        for (index, workload, token, end) in finished.drain(..) {
            // A workload is there as long as a command of it is outstanding.
            let entry = &mut self.sessions[index].workloads[workload];
            entry.1 -= 1;
            entry.0.complete(token, end, &mut queue);
            self.submit_work(index, workload, &mut queue, now);
        }
        if self.finished.is_empty() {
            self.finished = finished;
        }
        any
    }
}
