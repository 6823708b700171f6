//! Workloads running on this thread.

use std::time::Instant;

use slab::Slab;

use super::Driver;
use crate::engine::env::Env;
use crate::engine::io::{Done, Io, IoCompletion, WorkQueue, Workload};

/// A workload and the number of its outstanding commands.
struct RunningWorkload {
    workload: Box<dyn Workload>,
    outstanding: usize,
}

/// Workloads of a session.
#[derive(Default)]
pub(super) struct Workloads {
    running: Slab<RunningWorkload>,
}

impl Workloads {
    /// Starts a workload and returns its number. Its commands are in `queue`.
    fn start(&mut self, mut workload: Box<dyn Workload>, queue: &mut WorkQueue) -> usize {
        workload.start(queue);
        self.running.insert(RunningWorkload {
            workload,
            outstanding: 0,
        })
    }

    /// Reports the completion of a command. A workload exists while one of its commands is
    /// outstanding.
    fn complete(&mut self, id: usize, token: u64, completion: IoCompletion, queue: &mut WorkQueue) {
        let running = &mut self.running[id];
        running.outstanding -= 1;
        running.workload.complete(token, completion, queue);
    }

    /// Wakes a workload.
    fn wake(&mut self, id: usize, queue: &mut WorkQueue) {
        self.running[id].workload.wake(queue);
    }

    /// Called before the commands of a workload are submitted.
    fn on_submitted(&mut self, id: usize, commands: usize) {
        self.running[id].outstanding += commands;
    }

    /// Removes a workload that is neither waiting for a command nor for a time.
    fn remove_if_finished(&mut self, id: usize) {
        let running = &self.running[id];
        if running.outstanding == 0 && running.workload.due().is_none() {
            self.running.remove(id);
        }
    }

    /// Returns the workloads to wake.
    fn due(&self, now: Instant) -> Vec<usize> {
        let is_due = |running: &RunningWorkload| running.workload.due().is_some_and(|at| at <= now);
        // Doesn't allocate if no workload is due.
        let due = self.running.iter().filter(|(_, running)| is_due(running));
        due.map(|(id, _)| id).collect()
    }

    /// Returns the time at which the next workload must be woken.
    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        let running = self.running.iter();
        running.filter_map(|(_, r)| r.workload.due()).min()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }
}

impl<E: Env> Driver<E> {
    pub(super) fn start_workload(
        &mut self,
        index: usize,
        workload: Box<dyn Workload>,
        now: Instant,
    ) {
        let mut queue = self.work_queue(now);
        let id = self.sessions[index].workloads.start(workload, &mut queue);
        self.submit_work(index, id, &mut queue);
        self.work = queue.submitted;
    }

    /// Returns the empty queue for calls of workloads. [`Self::work`] must be restored afterwards.
    fn work_queue(&mut self, now: Instant) -> WorkQueue {
        WorkQueue {
            submitted: std::mem::take(&mut self.work),
            now,
        }
    }

    fn submit_work(&mut self, index: usize, id: usize, queue: &mut WorkQueue) {
        let (commands, now) = (queue.submitted.len(), queue.now);
        self.sessions[index].workloads.on_submitted(id, commands);
        for (token, io) in queue.submitted.drain(..) {
            let done = Done::Workload {
                workload: id,
                token,
            };
            self.submit(index, Io::new(io, done, now), now);
        }
        self.sessions[index].workloads.remove_if_finished(id);
    }

    /// Reports completions to workloads, and wakes the workloads that are due; returns whether
    /// there were completions.
    pub(super) fn run_workloads(&mut self, now: Instant) -> bool {
        let worked = self.complete_work(now);
        for index in 0..self.sessions.capacity() {
            let Some(session) = self.sessions.get(index) else {
                continue;
            };
            for id in session.workloads.due(now) {
                let mut queue = self.work_queue(now);
                self.sessions[index].workloads.wake(id, &mut queue);
                self.submit_work(index, id, &mut queue);
                self.work = queue.submitted;
            }
        }
        // A command that could not be started has already completed, without an event on a
        // descriptor.
        worked || !self.finished.is_empty()
    }

    fn complete_work(&mut self, now: Instant) -> bool {
        let mut finished = std::mem::take(&mut self.finished);
        let any = !finished.is_empty();
        let mut queue = self.work_queue(now);
        for (index, id, token, completion) in finished.drain(..) {
            let workloads = &mut self.sessions[index].workloads;
            workloads.complete(id, token, completion, &mut queue);
            self.submit_work(index, id, &mut queue);
        }
        self.work = queue.submitted;
        if self.finished.is_empty() {
            self.finished = finished;
        }
        any
    }
}
