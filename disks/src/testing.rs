//! Workloads used for tests.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use riser_block::{Completion, Operation, Submissions, Workload};

/// Completion seen by the workload.
#[derive(Debug)]
pub(super) struct Seen {
    /// Operation number.
    pub(super) tag: u32,
    pub(super) completion: Completion,
    /// Thread name.
    pub(super) thread: String,
}

/// Runs a list of operations, with a limit on the queue depth.
pub(super) struct List {
    operations: VecDeque<Operation>,
    depth: u32,
    /// Number of submitted operations.
    next: u32,
    /// If set, operations are submitted at this interval and don't wait for completions.
    pause: Option<Duration>,
    due: Option<Instant>,
    seen: Sender<Seen>,
}

impl List {
    /// Creates a workload with up to `depth` operations at the same time. The receiver is closed
    /// when the workload is done.
    pub(super) fn new(
        operations: impl IntoIterator<Item = Operation>,
        depth: u32,
    ) -> (Box<Self>, Receiver<Seen>) {
        let (seen, receiver) = channel();
        let list = Self {
            operations: operations.into_iter().collect(),
            depth,
            next: 0,
            pause: None,
            due: None,
            seen,
        };
        (Box::new(list), receiver)
    }

    /// Creates a workload that submits an operation at each interval.
    pub(super) fn timed(
        operations: impl IntoIterator<Item = Operation>,
        pause: Duration,
    ) -> (Box<Self>, Receiver<Seen>) {
        let (mut list, receiver) = Self::new(operations, 1);
        list.pause = Some(pause);
        (list, receiver)
    }

    fn push(&mut self, queue: &mut Submissions) {
        if let Some(operation) = self.operations.pop_front() {
            queue.push(self.next, operation);
            self.next += 1;
        }
    }
}

impl Workload for List {
    fn submit(&mut self, queue: &mut Submissions) {
        for _ in 0..self.depth {
            self.push(queue);
        }
        let pause = self.pause.filter(|_| !self.operations.is_empty());
        self.due = pause.map(|pause| Instant::now() + pause);
    }

    fn complete(&mut self, tag: u32, completion: Completion, queue: &mut Submissions) {
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        let _ = self.seen.send(Seen {
            tag,
            completion,
            thread,
        });
        if self.pause.is_none() {
            self.push(queue);
        }
    }

    fn due(&self) -> Option<Instant> {
        self.due
    }
}
