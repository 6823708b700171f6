//! The way of a command through a connection, the same on every fabric.
//!
//! ```text
//! enter_task_set ─→ limits ─→ prepare: Data-Out ─→ order ─→ run ─→ Step ─→ done ─→ advance ─→ Step
//!                      (each only where it is needed)        │                        │
//!                                                            └─→ memory ─→ resume     └─→ respond
//! ```
//!
//! A connection is a [`CommandFlow`]: it provides what its fabric decides (how data travel, what an
//! answer looks like, the names of its states) and gets the loop around them.

use std::collections::VecDeque;
use std::time::Instant;

use riser_scsi::nexus::NexusId;
use riser_scsi::step::{Response, Status, Step, StepResult};

use super::{Descriptors, Entry, Execution, TaskAction, TaskIdx, TaskRef, Throttle};
use crate::pool::{Owner, Pool};
use crate::stats::Stage;

/// End of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Its answer has been sent.
    Answered,
    /// Task management aborted it.
    Aborted,
    /// Its connection ends, which leaves no way for an answer.
    TornDown,
}

/// Reason why a command does not go on for the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// The limits of its unit or initiator.
    Limits,
    /// The order of the unit's task set.
    Order,
    /// Memory of the pool.
    Memory,
    /// A block operation that the backend has not ended.
    Backend,
}

/// The worker's time and memory, lent to a connection for the length of a call.
pub(crate) trait Lent {
    /// Returns the time of the worker's present round.
    fn now(&self) -> Instant;

    /// Returns the worker's data buffers.
    fn pool(&mut self) -> &mut Pool;
}

/// The commands of a connection that wait for memory or limits.
#[derive(Debug)]
pub(crate) struct Backlog {
    owner: Owner,
    /// Contexts that wait for pool memory, oldest first; each once.
    memory: VecDeque<TaskIdx>,
    /// Contexts that wait for limits.
    pub(crate) limits: Throttle<TaskIdx>,
}

impl Backlog {
    /// The backlog of a connection with this serial number and up to `commands` commands at once.
    pub(crate) fn new(serial: u64, commands: usize) -> Self {
        Self {
            owner: Owner(serial),
            memory: VecDeque::with_capacity(commands),
            limits: Throttle::new(commands),
        }
    }

    /// Returns the name of the connection at the pool.
    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    /// Whether commands wait for memory.
    pub(crate) fn waits_for_memory(&self) -> bool {
        !self.memory.is_empty()
    }

    /// Ends a command's wait for memory.
    pub(crate) fn leave_memory(&mut self, pool: &mut Pool, task: TaskIdx) {
        self.memory.retain(|&waiter| waiter != task);
        self.leave_empty_line(pool);
    }

    fn leave_empty_line(&self, pool: &mut Pool) {
        if self.memory.is_empty() {
            pool.leave_line(self.owner);
        }
    }
}

/// A connection that carries commands. The methods that it has to provide are what fabrics differ
/// in.
pub(crate) trait CommandFlow {
    /// The worker's things, and what else the fabric needs for a call.
    type Cx<'a>: Lent;

    /// Returns its commands that wait.
    fn backlog(&mut self) -> &mut Backlog;

    /// Returns the command of a context.
    fn exec(&mut self, task: TaskIdx) -> &mut Execution;

    /// Asks the worker something.
    fn ask(&mut self, action: TaskAction);

    /// Takes the context to the state of a command that is held back.
    fn hold(&mut self, task: TaskIdx, hold: Hold);

    /// Starts a command whose turn has come; returns its first step.
    fn first_step(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx) -> Step;

    /// Brings the external descriptors of a command, if it has such; whether they are on their way.
    fn fetch_descriptors(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx) -> bool {
        let _ = (cx, task);
        false
    }

    /// Brings `len` bytes of Data-Out, from `from` on, into the buffer. Returns the result if they
    /// are there already; otherwise [`CommandFlow::go_on`] follows.
    fn receive_data(
        &mut self,
        cx: &mut Self::Cx<'_>,
        task: TaskIdx,
        from: u32,
        len: u32,
    ) -> Option<StepResult>;

    /// Sends `len` bytes of Data-In, from `from` on, that others follow. Returns the result if the
    /// initiator has them already; otherwise [`CommandFlow::go_on`] follows.
    fn send_data(
        &mut self,
        cx: &mut Self::Cx<'_>,
        task: TaskIdx,
        from: u32,
        len: u32,
    ) -> Option<StepResult>;

    /// Ends a command's wait for its initiator, if it waits.
    fn end_wait(&mut self, now: Instant, task: TaskIdx);

    /// Sends the answer, with the last data before it.
    fn respond(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx, response: Response);

    /// Says whether a command may keep waiting for limits with what it holds.
    ///
    /// # Errors
    /// The status that refuses it.
    fn check_held(
        &mut self,
        cx: &mut Self::Cx<'_>,
        task: TaskIdx,
        descriptors: Descriptors,
    ) -> Result<(), Status>;

    /// Enters a command into its unit's task set, and goes on with it as far as it may.
    ///
    /// Limits come first: a command that waits for them is in the set, so that functions find it
    /// and the order holds, but has no buffer yet.
    fn enter_task_set(
        &mut self,
        cx: &mut Self::Cx<'_>,
        (task, name): (TaskIdx, TaskRef),
        nexus: NexusId,
        descriptors: Descriptors,
    ) {
        let now = cx.now();
        let toll = self.exec(task).toll(nexus);
        let Some(passage) = self.backlog().limits.enter(task, toll, now) else {
            return self.answer_status(cx, task, Status::TaskSetFull);
        };
        // A command that may not wait gives its entry back, or those behind it would wait for it.
        let limited = passage.limited;
        if limited.is_some()
            && let Err(status) = self.check_held(cx, task, descriptors)
        {
            self.backlog().limits.refuse(task, passage);
            return self.answer_status(cx, task, status);
        }
        let exec = self.exec(task);
        match exec.register(nexus, name, descriptors, limited, cx.pool(), now) {
            Entry::Now => self.start(cx, task),
            Entry::Later => self.hold(task, Hold::Order),
            Entry::Full => {
                self.backlog().limits.refuse(task, passage);
                self.answer_status(cx, task, Status::TaskSetFull);
            }
            Entry::Gather => self.prepare(cx, task),
            Entry::Limited => self.hold(task, Hold::Limits),
        }
    }

    /// Lets commands go on for which limits have room by now.
    fn poll_limits(&mut self, cx: &mut Self::Cx<'_>) {
        let now = cx.now();
        while let Some(task) = self.backlog().limits.poll(now) {
            self.exec(task).pass_limits(now);
            self.prepare(cx, task);
        }
    }

    /// Brings what the command needs from its initiator before it takes its place in the order:
    /// external descriptors, then data. The buffer for these comes first of all: newer commands may
    /// have to wait for this one, and must not have its memory by then.
    fn prepare(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx) {
        let waits_for_memory = self.backlog().waits_for_memory();
        let exec = self.exec(task);
        match exec.early_data() {
            Some(len) => {
                let step = Step::ReceiveData { from: 0, len };
                if exec.buffer.is_none() && waits_for_memory {
                    return self.await_memory(cx, task, step);
                }
                self.run(cx, task, step);
            }
            None if self.fetch_descriptors(cx, task) => {}
            None => self.go_on(cx, task, StepResult::Done),
        }
    }

    /// Starts a task whose turn has come.
    fn start(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx) {
        let step = self.first_step(cx, task);
        self.run(cx, task, step);
    }

    /// Carries out steps until one takes time.
    fn run(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx, mut step: Step) {
        let owner = self.backlog().owner;
        loop {
            let result = match step {
                Step::Respond(response) => return self.respond(cx, task, response),
                // Before the initiator or the backend is asked for anything: what it gives needs a
                // place.
                step if !self.exec(task).has_buffer(cx.pool(), owner) => {
                    return self.await_memory(cx, task, step);
                }
                Step::ReceiveData { from, len } => self.receive_data(cx, task, from, len),
                Step::SendData { from, len } => self.send_data(cx, task, from, len),
                Step::Block(op) => {
                    let exec = self.exec(task);
                    let unit = exec.unit.as_ref().expect("block operations have a unit");
                    let unit = unit.index;
                    exec.timer.enter(Stage::Backend, cx.now());
                    self.hold(task, Hold::Backend);
                    return self.ask(TaskAction::SubmitBlock { task, unit, op });
                }
            };
            let next = result.and_then(|result| self.advance(cx, task, result));
            match next {
                Some(next) => step = next,
                None => return,
            }
        }
    }

    /// Goes on with a command whose step has ended.
    fn go_on(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx, result: StepResult) {
        if let Some(step) = self.advance(cx, task, result) {
            self.run(cx, task, step);
        }
    }

    /// Advances a command with the result of its last step; returns the next one. A command whose
    /// data have come takes its place in the order, and may have to wait there.
    fn advance(
        &mut self,
        cx: &mut Self::Cx<'_>,
        task: TaskIdx,
        result: StepResult,
    ) -> Option<Step> {
        let now = cx.now();
        self.end_wait(now, task);
        let exec = self.exec(task);
        if !exec.is_gathering() {
            return Some(exec.advance(result, now));
        }
        let (may_start, others) = exec.data_arrived(result, now);
        self.hold(task, Hold::Order);
        for other in others {
            self.ask(TaskAction::StartTask(other));
        }
        may_start.then(|| self.first_step(cx, task))
    }

    /// Waits for pool memory with a step, behind the others.
    fn await_memory(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx, step: Step) {
        let now = cx.now();
        self.hold(task, Hold::Memory);
        let backlog = self.backlog();
        let owner = backlog.owner;
        backlog.memory.push_back(task);
        let exec = self.exec(task);
        exec.step = Some(step);
        exec.await_buffer(cx.pool(), owner, now);
    }

    /// Tries again what waited for pool memory.
    fn resume(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx) {
        let step = self.exec(task).step.take();
        self.run(cx, task, step.expect("a step waits"));
    }

    /// Lets commands go on, in their order, for which the pool has room by now.
    fn poll_memory(&mut self, cx: &mut Self::Cx<'_>) {
        for _ in 0..self.backlog().memory.len() {
            let Some(task) = self.backlog().memory.pop_front() else {
                break;
            };
            self.resume(cx, task);
            let memory = &mut self.backlog().memory;
            if memory.back() == Some(&task) {
                // Still not enough: it keeps its place, and those behind it keep theirs.
                memory.rotate_right(1);
                break;
            }
        }
        self.take_reserve(cx);
        self.backlog().leave_empty_line(cx.pool());
    }

    /// Gives the pool's reserve to the first command that has started and still waits for memory.
    fn take_reserve(&mut self, cx: &mut Self::Cx<'_>) {
        let owner = self.backlog().owner;
        for at in 0..self.backlog().memory.len() {
            let task = self.backlog().memory[at];
            if self.exec(task).take_reserve(cx.pool(), owner) {
                self.backlog().memory.remove(at);
                return self.resume(cx, task);
            }
        }
    }

    /// Answers with a status alone.
    fn answer_status(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx, status: Status) {
        let response = self.exec(task).status_only(status);
        self.respond(cx, task, response);
    }

    /// Takes a task out of the unit's set; those it held back may start.
    fn leave_task_set(&mut self, task: TaskIdx) {
        for started in self.exec(task).leave() {
            self.ask(TaskAction::StartTask(started));
        }
    }

    /// Notifies the functions that waited for a task which is gone.
    fn report_gone(&mut self, watchers: Vec<TaskRef>) {
        for watcher in watchers {
            self.ask(TaskAction::TaskGone(watcher));
        }
    }
}
