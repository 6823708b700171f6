//! Runs workloads on the disk thread: [`Workloads`].

use std::sync::Arc;
use std::time::Instant;

use riser_block::{Buffer, Command, CommandKind, Submissions, Workload};
use slab::Slab;

use super::backend::Backend;
use super::limits::{Limits, Plan};
use super::operation::{Done, Ended, EndedQueue, Operation, Ticket};

struct Running {
    workload: Box<dyn Workload>,
    /// Number of operations that have not been reported to the workload yet.
    outstanding: usize,
}

/// Workloads on a thread. Completions are queued until the next call to [`Workloads::run`], so that
/// a workload with operations that complete immediately can't block the thread.
pub(super) struct Workloads {
    limits: Arc<Limits>,
    running: Slab<Running>,
    ended: EndedQueue,
    /// Empty between calls; we keep it to reuse the memory.
    ends: Vec<(Ticket, Ended)>,
    submissions: Submissions,
}

impl Workloads {
    /// Creates an empty set for a disk with these limits.
    pub(super) fn new(limits: Arc<Limits>) -> Self {
        Self {
            limits,
            running: Slab::new(),
            ended: EndedQueue::default(),
            ends: Vec::new(),
            submissions: Submissions::default(),
        }
    }

    /// Starts a workload.
    pub(super) fn start_workload(
        &mut self,
        workload: Box<dyn Workload>,
        backend: &mut impl Backend,
        now: Instant,
    ) {
        let id = self.running.insert(Running {
            workload,
            outstanding: 0,
        });
        self.wake(id, backend, now);
    }

    /// Calls all workloads with completed operations or an expired timer. Returns whether there
    /// were any.
    pub(super) fn run(&mut self, backend: &mut impl Backend, now: Instant) -> bool {
        let mut worked = self.run_ended(backend, now);
        let due = |(id, running): (usize, &Running)| {
            let due = running.workload.due()?;
            (due <= now).then_some(id)
        };
        // This doesn't allocate if the list is empty.
        let due: Vec<usize> = self.running.iter().filter_map(due).collect();
        for id in due {
            worked = true;
            self.wake(id, backend, now);
        }
        worked
    }

    /// Returns whether there is a completion that has not been reported to its workload.
    pub(super) fn has_ended(&self) -> bool {
        !self.ended.borrow().is_empty()
    }

    /// Latest time for the next call to [`Workloads::run`].
    pub(super) fn due(&self) -> Option<Instant> {
        let running = self.running.iter();
        running.filter_map(|(_, r)| r.workload.due()).min()
    }

    fn run_ended(&mut self, backend: &mut impl Backend, now: Instant) -> bool {
        let mut ends = std::mem::take(&mut self.ends);
        std::mem::swap(&mut *self.ended.borrow_mut(), &mut ends);
        let any = !ends.is_empty();
        for (ticket, Ended { result, buffer }) in ends.drain(..) {
            if ticket.then_flush && result.is_ok() {
                let ticket = Ticket {
                    then_flush: false,
                    ..ticket
                };
                // Keep the buffer until the flush has completed.
                let flush = Command::new(CommandKind::Flush, 0, 0);
                self.submit(flush, buffer, ticket, backend, now);
                continue;
            }
            let running = &mut self.running[ticket.workload];
            running.outstanding -= 1;
            let completion = result.map(|_| buffer);
            let workload = &mut running.workload;
            workload.complete(ticket.tag, completion, &mut self.submissions);
            self.forward(ticket.workload, backend, now);
        }
        self.ends = ends;
        any
    }

    fn wake(&mut self, id: usize, backend: &mut impl Backend, now: Instant) {
        self.running[id].workload.submit(&mut self.submissions);
        self.forward(id, backend, now);
    }

    /// Submits operations from a workload to the backend. If there are no outstanding or planned
    /// operations after this, the workload is done.
    fn forward(&mut self, id: usize, backend: &mut impl Backend, now: Instant) {
        let mut submissions = std::mem::take(&mut self.submissions);
        self.running[id].outstanding += submissions.len();
        for (tag, operation) in submissions.drain() {
            self.start_operation(id, tag, operation, backend, now);
        }
        self.submissions = submissions;
        let running = &self.running[id];
        if running.outstanding == 0 && running.workload.due().is_none() {
            self.running.remove(id);
        }
    }

    fn start_operation(
        &self,
        workload: usize,
        tag: u32,
        operation: riser_block::Operation,
        backend: &mut impl Backend,
        now: Instant,
    ) {
        let mut ticket = Ticket {
            workload,
            tag,
            then_flush: false,
        };
        let ended = match self.limits.plan(operation) {
            Ok(Plan {
                command: Some(command),
                buffer,
                then_flush,
            }) => {
                ticket.then_flush = then_flush;
                return self.submit(command, buffer, ticket, backend, now);
            }
            Ok(Plan { buffer, .. }) => Ended {
                result: Ok(Vec::new()),
                buffer,
            },
            Err(error) => Ended {
                result: Err(error),
                buffer: None,
            },
        };
        self.ended.borrow_mut().push((ticket, ended));
    }

    fn submit(
        &self,
        command: Command,
        buffer: Option<Buffer>,
        ticket: Ticket,
        backend: &mut impl Backend,
        now: Instant,
    ) {
        let operation = Operation {
            command,
            buffer,
            done: Done::Workload(self.ended.clone(), ticket),
        };
        backend.submit(operation, now);
    }
}
