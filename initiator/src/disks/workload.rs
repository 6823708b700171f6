//! Workloads on a disk's thread: [`Workloads`].

use std::sync::Arc;
use std::time::Instant;

use slab::Slab;

use super::backend::Backend;
use super::limits::{Limits, Plan};
use super::operation::{Command, Done, Ended, EndedQueue, Operation, Ticket};
use crate::block::{self, Buffer, Submissions, Workload};

struct Running {
    workload: Box<dyn Workload>,
    /// Operations that it was not called back for.
    outstanding: usize,
}

/// The workloads that a thread runs. Ends of operations wait for [`Workloads::run`], so that one
/// whose operations end at once does not keep the thread from others.
pub(super) struct Workloads {
    limits: Arc<Limits>,
    running: Slab<Running>,
    ended: EndedQueue,
    /// Empty between calls; kept for their memory.
    ends: Vec<(Ticket, Ended)>,
    submissions: Submissions,
}

impl Workloads {
    /// None yet, on a disk with these limits.
    pub(super) fn new(limits: Arc<Limits>) -> Self {
        Self {
            limits,
            running: Slab::new(),
            ended: EndedQueue::default(),
            ends: Vec::new(),
            submissions: Submissions::default(),
        }
    }

    /// Begins with a workload.
    pub(super) fn start(
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

    /// Calls those of which operations have ended, and those that are due. Returns whether there
    /// were any.
    pub(super) fn run(&mut self, backend: &mut impl Backend, now: Instant) -> bool {
        let mut worked = self.run_ended(backend, now);
        let due = |(id, running): (usize, &Running)| {
            let due = running.workload.due()?;
            (due <= now).then_some(id)
        };
        // No allocation where none is due.
        let due: Vec<usize> = self.running.iter().filter_map(due).collect();
        for id in due {
            worked = true;
            self.wake(id, backend, now);
        }
        worked
    }

    /// Returns whether an operation has ended that its workload was not called for.
    pub(super) fn has_ended(&self) -> bool {
        !self.ended.borrow().is_empty()
    }

    /// Time of the next call of [`Workloads::run`] at the latest.
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
                // The buffer goes along until the whole has ended.
                self.submit(Command::Flush, buffer, ticket, backend, now);
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

    /// Gives the backend what a workload has submitted. The workload is over if nothing of it is
    /// outstanding or planned then.
    fn forward(&mut self, id: usize, backend: &mut impl Backend, now: Instant) {
        let mut submissions = std::mem::take(&mut self.submissions);
        self.running[id].outstanding += submissions.len();
        for (tag, operation) in submissions.drain() {
            self.begin(id, tag, operation, backend, now);
        }
        self.submissions = submissions;
        let running = &self.running[id];
        if running.outstanding == 0 && running.workload.due().is_none() {
            self.running.remove(id);
        }
    }

    fn begin(
        &self,
        workload: usize,
        tag: u32,
        operation: block::Operation,
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
