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

use super::{Descriptors, Entry, Execution, TaskAction, TaskIdx, TaskRef, Throttle, UnitIdx};
use crate::pool::{Claim, Owner, Pool};
use crate::stats::Stage;

/// Bytes of unsolicited data with which commands of a connection may always wait for pool memory, and
/// most with which they wait for limits.
pub(crate) const MAX_STAGED: usize = 256 << 10;

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
    memory: Vec<MemoryQueue>,
    /// Waits for memory for one unit that have begun.
    waits_begun: u64,
    /// Bytes of unsolicited data of the commands that wait for memory.
    staged: usize,
    /// Contexts that wait for limits.
    pub(crate) limits: Throttle<TaskIdx>,
}

/// Commands for one unit that wait for pool memory, oldest first; each once. Each unit has its own
/// queue: commands for a disk that hangs must not hold back those for another.
///
/// The pool has separate memory for commands that gather their data and for commands that have
/// started, because the former may wait for the latter in the order of the task set. So commands of
/// one kind do not queue behind commands of the other kind.
#[derive(Debug)]
struct MemoryQueue {
    unit: Option<UnitIdx>,
    gathering: VecDeque<Waiting>,
    started: VecDeque<Waiting>,
    /// The claim waits at the pool.
    waits: bool,
}

/// A command that waits for pool memory, with the bytes of its unsolicited data.
type Waiting = (TaskIdx, usize);

impl MemoryQueue {
    fn with_capacity(unit: Option<UnitIdx>, commands: usize) -> Self {
        Self {
            unit,
            gathering: VecDeque::with_capacity(commands),
            started: VecDeque::with_capacity(commands),
            waits: false,
        }
    }

    fn is_empty(&self) -> bool {
        self.gathering.is_empty() && self.started.is_empty()
    }

    fn tasks(&mut self, gathers: bool) -> &mut VecDeque<Waiting> {
        match gathers {
            true => &mut self.gathering,
            false => &mut self.started,
        }
    }

    fn claim(&self, owner: Owner) -> Claim {
        let unit = self.unit.map(|unit| unit.0);
        Claim { owner, unit }
    }
}

impl Backlog {
    /// The backlog of a connection with this serial number and up to `commands` commands at once.
    pub(crate) fn new(serial: u64, commands: usize) -> Self {
        Self {
            owner: Owner(serial),
            // A queue is kept when it is empty, for whichever unit needs one next.
            memory: vec![MemoryQueue::with_capacity(None, commands)],
            waits_begun: 0,
            staged: 0,
            limits: Throttle::new(commands),
        }
    }

    /// Returns the name of the connection at the pool.
    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    /// Number of units for which commands wait for memory.
    pub(crate) fn memory_waits(&self) -> usize {
        let waiting = self.memory.iter().filter(|queue| !queue.is_empty());
        waiting.count()
    }

    /// Number of waits for memory for one unit that have begun.
    pub(crate) fn waits_begun(&self) -> u64 {
        self.waits_begun
    }

    /// Whether commands for a unit wait for memory.
    fn has_waiting(&self, unit: Option<UnitIdx>) -> bool {
        let mut queues = self.memory.iter();
        queues.any(|queue| queue.unit == unit && !queue.is_empty())
    }

    /// Whether a command with `staged` bytes of unsolicited data may wait for memory. The data lie
    /// outside the pool, so a worker has at most the size of its pool of them, and [`MAX_STAGED`] for
    /// each connection.
    fn may_stage(&self, pool: &Pool, staged: usize) -> bool {
        self.staged == 0
            || self.staged + staged <= MAX_STAGED
            || pool.staged() + staged <= pool.size()
    }

    /// Appends a command to the queue of its unit, as one that gathers its data or has started.
    fn push_memory(
        &mut self,
        pool: &mut Pool,
        (unit, gathers): (Option<UnitIdx>, bool),
        (task, staged): Waiting,
    ) {
        self.staged += staged;
        pool.stage(staged);
        // The unit's own queue first, also while it is empty: no unit has two of them.
        let own = self.memory.iter().position(|queue| queue.unit == unit);
        let at = own.or_else(|| {
            let mut queues = self.memory.iter();
            queues.position(|queue| !queue.waits)
        });
        let at = at.unwrap_or_else(|| {
            self.memory.push(MemoryQueue::with_capacity(unit, 0));
            self.memory.len() - 1
        });
        let queue = &mut self.memory[at];
        queue.unit = unit;
        queue.tasks(gathers).push_back((task, staged));
        self.waits_begun += u64::from(!std::mem::replace(&mut queue.waits, true));
    }

    /// Removes a command from a queue.
    fn remove_memory(
        &mut self,
        pool: &mut Pool,
        (queue, gathers): (usize, bool),
        at: usize,
    ) -> Option<TaskIdx> {
        let (task, staged) = self.memory[queue].tasks(gathers).remove(at)?;
        self.staged -= staged;
        pool.unstage(staged);
        Some(task)
    }

    /// Ends a command's wait for memory.
    pub(crate) fn leave_memory(&mut self, pool: &mut Pool, task: TaskIdx) {
        for queue in 0..self.memory.len() {
            for gathers in [true, false] {
                let mut tasks = self.memory[queue].tasks(gathers).iter();
                let Some(at) = tasks.position(|&(waiter, _)| waiter == task) else {
                    continue;
                };
                self.remove_memory(pool, (queue, gathers), at);
                pool.withdraw(self.memory[queue].claim(self.owner));
                self.leave_empty_line(pool, queue);
            }
        }
    }

    fn leave_empty_line(&mut self, pool: &mut Pool, queue: usize) {
        let queue = &mut self.memory[queue];
        if queue.is_empty() && std::mem::take(&mut queue.waits) {
            pool.leave_line(queue.claim(self.owner));
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

    /// Returns the bytes of unsolicited data that a command has, or may still receive, while it has no
    /// buffer.
    fn staged(&mut self, task: TaskIdx) -> usize {
        let _ = task;
        0
    }

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
            self.exec(task).timer.limit();
            return self.answer_status(cx, task, Status::TaskSetFull);
        };
        // A command that may not wait gives its entry back, or those behind it would wait for it.
        let limited = passage.limited;
        if limited.is_some()
            && let Err(status) = self.check_held(cx, task, descriptors)
        {
            self.backlog().limits.refuse(task, passage);
            self.exec(task).timer.limit();
            return self.answer_status(cx, task, status);
        }
        let exec = self.exec(task);
        match exec.register(nexus, name, descriptors, limited, cx.pool(), now) {
            Entry::Now => self.start(cx, task),
            Entry::Later => self.hold(task, Hold::Order),
            Entry::Refused(status) => {
                self.backlog().limits.refuse(task, passage);
                self.answer_status(cx, task, status);
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
        let unit = self.exec(task).charged_unit();
        let waits_for_memory = self.backlog().has_waiting(unit);
        let owner = self.backlog().owner;
        let exec = self.exec(task);
        match exec.early_data() {
            Some(len) => {
                let step = Step::ReceiveData { from: 0, len };
                if exec.buffer.is_none() && (waits_for_memory || !exec.has_buffer(cx.pool(), owner))
                {
                    return self.gather_later(cx, task, step);
                }
                self.run(cx, task, step);
            }
            None if self.fetch_descriptors(cx, task) => {}
            None => self.go_on(cx, task, StepResult::Done),
        }
    }

    /// Waits for pool memory before data are gathered, unless too many unsolicited data wait already.
    fn gather_later(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx, step: Step) {
        let staged = self.staged(task);
        match staged == 0 || self.backlog().may_stage(cx.pool(), staged) {
            true => self.await_memory(cx, task, step),
            false => self.answer_status(cx, task, Status::TaskSetFull),
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
        let exec = self.exec(task);
        let claimant = (exec.charged_unit(), exec.is_gathering());
        let staged = self.staged(task);
        let backlog = self.backlog();
        let owner = backlog.owner;
        backlog.push_memory(cx.pool(), claimant, (task, staged));
        let exec = self.exec(task);
        exec.step = Some(step);
        exec.await_buffer(cx.pool(), owner, now);
    }

    /// Tries again what waited for pool memory.
    fn resume(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx) {
        let step = self.exec(task).step.take();
        self.run(cx, task, step.expect("a step waits"));
    }

    /// Resumes commands for which the pool has room now: the commands of each kind for each unit in
    /// their order.
    fn poll_memory(&mut self, cx: &mut Self::Cx<'_>) {
        for queue in 0..self.backlog().memory.len() {
            self.poll_queue(cx, (queue, true));
            self.poll_queue(cx, (queue, false));
            self.take_reserve(cx, queue);
            self.backlog().leave_empty_line(cx.pool(), queue);
        }
    }

    fn poll_queue(&mut self, cx: &mut Self::Cx<'_>, (queue, gathers): (usize, bool)) {
        for _ in 0..self.backlog().memory[queue].tasks(gathers).len() {
            let backlog = self.backlog();
            let Some(task) = backlog.remove_memory(cx.pool(), (queue, gathers), 0) else {
                return;
            };
            self.resume(cx, task);
            let tasks = self.backlog().memory[queue].tasks(gathers);
            if tasks.back().is_some_and(|&(last, _)| last == task) {
                // Still not enough: it keeps its place, and those behind it keep theirs.
                tasks.rotate_right(1);
                return;
            }
        }
    }

    /// Gives a part of the pool's reserve to the first command for a unit that has started and still
    /// waits for memory.
    fn take_reserve(&mut self, cx: &mut Self::Cx<'_>, queue: usize) {
        let owner = self.backlog().owner;
        let claim = self.backlog().memory[queue].claim(owner);
        if !cx.pool().has_reserve(claim, 1) {
            return;
        }
        for at in 0..self.backlog().memory[queue].started.len() {
            let (task, _) = self.backlog().memory[queue].started[at];
            if self.exec(task).take_reserve(cx.pool(), owner) {
                let backlog = self.backlog();
                backlog.remove_memory(cx.pool(), (queue, false), at);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of units is the same, but the second wait may be for a disk that hangs.
    #[test]
    fn wait_for_another_unit_begins() {
        let mut pool = Pool::new(1 << 20).unwrap();
        let mut backlog = Backlog::new(1, 4);
        let wait = |backlog: &mut Backlog, pool: &mut Pool, unit, task| {
            let claimant = (Some(UnitIdx(unit)), task == 1);
            backlog.push_memory(pool, claimant, (TaskIdx(task), 0));
            pool.wait(Claim {
                owner: Owner(1),
                unit: Some(unit),
            });
            backlog.waits_begun()
        };
        assert_eq!(wait(&mut backlog, &mut pool, 1, 1), 1);
        assert_eq!(wait(&mut backlog, &mut pool, 1, 2), 1);
        for task in [1, 2] {
            backlog.leave_memory(&mut pool, TaskIdx(task));
        }
        assert_eq!(wait(&mut backlog, &mut pool, 2, 1), 2);
        assert_eq!(backlog.memory_waits(), 1);
        backlog.leave_memory(&mut pool, TaskIdx(1));
        assert_eq!(pool.waiting().count(), 0);
    }
}
