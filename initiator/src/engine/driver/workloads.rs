//! Workloads running on this thread.

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
        let mut queue = std::mem::take(&mut self.work);
        workload.start(&mut queue);
        let id = self.sessions[index].workloads.insert((workload, 0));
        self.submit_work(index, id, &mut queue, now);
        self.work = queue;
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
        let (running, outstanding) = &self.sessions[index].workloads[workload];
        if *outstanding == 0 && running.due().is_none() {
            self.sessions[index].workloads.remove(workload);
        }
    }

    /// Reports completions to workloads, and wakes the workloads that are due; returns whether
    /// there were completions.
    pub(super) fn run_workloads(&mut self, now: Instant) -> bool {
        let ended = self.end_work(now);
        for index in 0..self.sessions.capacity() {
            let Some(session) = self.sessions.get(index) else {
                continue;
            };
            let due = |(id, (workload, _)): (usize, &(Box<dyn Workload>, usize))| {
                workload.due().is_some_and(|at| at <= now).then_some(id)
            };
            // Doesn't allocate if no workload is due.
            let due: Vec<usize> = session.workloads.iter().filter_map(due).collect();
            for id in due {
                let mut queue = std::mem::take(&mut self.work);
                let entry = &mut self.sessions[index].workloads[id];
                entry.0.wake(&mut queue);
                self.submit_work(index, id, &mut queue, now);
                self.work = queue;
            }
        }
        // A command that could not be started has already completed, without an event on a
        // descriptor.
        ended || !self.finished.is_empty()
    }

    /// Returns the time of the next workload wake-up.
    pub(super) fn work_deadline(&self) -> Option<Instant> {
        let workloads = self.sessions.iter().flat_map(|(_, s)| s.workloads.iter());
        workloads.filter_map(|(_, (work, _))| work.due()).min()
    }

    fn end_work(&mut self, now: Instant) -> bool {
        let mut finished = std::mem::take(&mut self.finished);
        let any = !finished.is_empty();
        let mut queue = std::mem::take(&mut self.work);
        for (index, workload, token, end) in finished.drain(..) {
            // A workload exists while one of its commands is outstanding.
            let entry = &mut self.sessions[index].workloads[workload];
            entry.1 -= 1;
            entry.0.complete(token, end, &mut queue);
            self.submit_work(index, workload, &mut queue, now);
        }
        self.work = queue;
        if self.finished.is_empty() {
            self.finished = finished;
        }
        any
    }
}
