//! Command processing in a connection, the same for all fabrics.
//!
//! ```text
//! enter_task_set ─→ limits ─→ prepare: Data-Out ─→ order ─→ run ─→ Step ─→ done ─→ advance ─→ Step
//!                      (each only if required)               │                        │
//!                                                            └─→ memory ─→ resume     └─→ respond
//! ```
//!
//! A connection implements [`CommandFlow`], which includes all fabric-specific functions (data
//! transfer, response format, state transitions), and inherits the common command processing.

use std::collections::VecDeque;
use std::time::Instant;

use riser_scsi::nexus::NexusId;
use riser_scsi::step::{Response, Status, Step, StepResult};

use super::{Descriptors, Entry, Execution, TaskAction, TaskIdx, TaskRef, Throttle, UnitIdx};
use crate::pool::{Claim, Owner, Pool};
use crate::stats::Stage;

/// Maximum number of bytes of unsolicited data for commands of a connection waiting for limits.
/// Commands can always wait for pool memory with this amount of data.
pub(crate) const MAX_STAGED: usize = 256 << 10;

/// Reason for completing a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The response was sent.
    Responded,
    /// Aborted by task management.
    Aborted,
    /// The connection is being closed, so no response can be sent.
    TornDown,
}

/// Reason why a command is waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// Limits of its unit or initiator.
    Limits,
    /// The order of tasks on the unit.
    Order,
    /// Memory from the pool.
    Memory,
    /// A block operation not yet completed by the backend.
    Backend,
}

/// Time and memory of the worker, borrowed by a connection during a call.
pub(crate) trait CallContext {
    /// Returns the start time of the worker's current round.
    fn now(&self) -> Instant;

    /// Returns the data buffers of the worker.
    fn pool(&mut self) -> &mut Pool;
}

/// Commands of a connection waiting for memory or limits.
#[derive(Debug)]
pub(crate) struct Backlog {
    owner: Owner,
    memory: Vec<MemoryQueue>,
    /// Counts the times that commands for a unit started waiting for memory.
    waits_begun: u64,
    /// Number of bytes of unsolicited data for commands waiting for memory.
    staged: usize,
    /// Contexts waiting for limits.
    pub(crate) limits: Throttle<TaskIdx>,
}

/// Commands for a unit waiting for pool memory, in FIFO order without duplicates. Each unit has a
/// separate queue, because commands for a hanging disk must not block commands for other disks.
///
/// The pool has separate memory for commands that are receiving their data and for commands that
/// have started, because the former may be waiting for the latter in the order of the task set.
/// Therefore the two kinds of commands do not queue behind each other.
#[derive(Debug)]
struct MemoryQueue {
    unit: Option<UnitIdx>,
    gathering: VecDeque<Waiting>,
    started: VecDeque<Waiting>,
    /// The claim is queued by the pool.
    waits: bool,
}

/// A command waiting for pool memory, with the number of bytes of its unsolicited data.
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
    /// Creates a backlog for a connection with this serial number and up to `commands` concurrent
    /// commands.
    pub(crate) fn new(serial: u64, commands: usize) -> Self {
        Self {
            owner: Owner(serial),
            // An empty queue is kept for the next unit that requires a queue.
            memory: vec![MemoryQueue::with_capacity(None, commands)],
            waits_begun: 0,
            staged: 0,
            limits: Throttle::new(commands),
        }
    }

    /// Returns the identifier of the connection in the pool.
    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    /// Returns the number of units with commands waiting for memory.
    pub(crate) fn memory_waits(&self) -> usize {
        let waiting = self.memory.iter().filter(|queue| !queue.is_empty());
        waiting.count()
    }

    /// Returns how many times commands for a unit started waiting for memory.
    pub(crate) fn waits_begun(&self) -> u64 {
        self.waits_begun
    }

    /// Returns whether commands for a unit are waiting for memory.
    fn has_waiting(&self, unit: Option<UnitIdx>) -> bool {
        let mut queues = self.memory.iter();
        queues.any(|queue| queue.unit == unit && !queue.is_empty())
    }

    /// Returns whether a command with `staged` bytes of unsolicited data may wait for memory. This
    /// data is not stored in the pool, so its size per worker is limited by the pool size plus
    /// [`MAX_STAGED`] for each connection.
    fn may_stage(&self, pool: &Pool, staged: usize) -> bool {
        self.staged == 0
            || self.staged + staged <= MAX_STAGED
            || pool.staged() + staged <= pool.size()
    }

    /// Adds a command to the queue of its unit, which is either receiving its data or has started.
    fn push_memory(
        &mut self,
        pool: &mut Pool,
        (unit, gathers): (Option<UnitIdx>, bool),
        (task, staged): Waiting,
    ) {
        self.staged += staged;
        pool.stage(staged);
        // Prefer the queue of this unit, even if it's empty, to avoid several queues for a unit.
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

    /// Removes a command waiting for memory.
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

/// A connection that processes commands. Methods without a default are fabric-specific.
pub(crate) trait CommandFlow {
    /// Worker resources, and any other state the fabric requires for a call.
    type Cx<'a>: CallContext;

    /// Returns the commands that are waiting.
    fn backlog(&mut self) -> &mut Backlog;

    /// Returns the command of a context.
    fn exec(&mut self, task: TaskIdx) -> &mut Execution;

    /// Sends a request to the worker.
    fn request_action(&mut self, action: TaskAction);

    /// Changes the state of a command that must wait.
    fn hold(&mut self, task: TaskIdx, hold: Hold);

    /// Starts a command when it is next in the order, and returns its first step.
    fn first_step(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx) -> Step;

    /// Starts reading the external descriptors of a command, if any. Returns whether they are
    /// pending.
    fn fetch_descriptors(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx) -> bool {
        let _ = (cx, task);
        false
    }

    /// Receives `len` bytes of Data-Out at offset `from` into the buffer. Returns the result if
    /// this has already completed. Otherwise [`CommandFlow::resume_task`] is called later.
    fn receive_data(
        &mut self,
        cx: &mut Self::Cx<'_>,
        task: TaskIdx,
        from: u32,
        len: u32,
    ) -> Option<StepResult>;

    /// Sends `len` bytes of Data-In at offset `from`, to be followed by more data. Returns the
    /// result if this has already completed. Otherwise [`CommandFlow::resume_task`] is called later.
    fn send_data(
        &mut self,
        cx: &mut Self::Cx<'_>,
        task: TaskIdx,
        from: u32,
        len: u32,
    ) -> Option<StepResult>;

    /// Stops the timer of a command waiting for its initiator, if any.
    fn end_wait(&mut self, now: Instant, task: TaskIdx);

    /// Sends the response, preceded by the remaining data.
    fn respond(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx, response: Response);

    /// Returns the number of bytes of unsolicited data that a command without a buffer has received
    /// or may still receive.
    fn staged(&mut self, task: TaskIdx) -> usize {
        let _ = task;
        0
    }

    /// Checks whether a command may wait for limits with the resources it is using.
    ///
    /// # Errors
    /// Returns the status if the command must be refused.
    fn check_held(
        &mut self,
        cx: &mut Self::Cx<'_>,
        task: TaskIdx,
        descriptors: Descriptors,
    ) -> Result<(), Status>;

    /// Adds a command to the task set of its unit, and executes it until it has to wait.
    ///
    /// Limits are checked first. A command waiting for limits is in the task set, so that functions
    /// can find it and the order is preserved, but does not have a buffer yet.
    fn enter_task_set(
        &mut self,
        cx: &mut Self::Cx<'_>,
        (task, name): (TaskIdx, TaskRef),
        nexus: NexusId,
        descriptors: Descriptors,
    ) {
        let now = cx.now();
        let toll = self.exec(task).toll(nexus);
        let Some(passage) = self.backlog().limits.admit_command(task, toll, now) else {
            self.exec(task).timer.limit();
            return self.respond_with_status(cx, task, Status::TaskSetFull);
        };
        // A command that may not wait must be removed, because other commands would wait for it.
        let limited = passage.limited;
        if limited.is_some()
            && let Err(status) = self.check_held(cx, task, descriptors)
        {
            self.backlog().limits.refuse(task, passage);
            self.exec(task).timer.limit();
            return self.respond_with_status(cx, task, status);
        }
        let exec = self.exec(task);
        match exec.register(nexus, name, descriptors, limited, cx.pool(), now) {
            Entry::Now => self.start(cx, task),
            Entry::Later => self.hold(task, Hold::Order),
            Entry::Refused(status) => {
                self.backlog().limits.refuse(task, passage);
                self.respond_with_status(cx, task, status);
            }
            Entry::Gather => self.prepare(cx, task),
            Entry::Limited => self.hold(task, Hold::Limits),
        }
    }

    /// Resumes commands if the limits allow them to continue.
    fn poll_limits(&mut self, cx: &mut Self::Cx<'_>) {
        let now = cx.now();
        while let Some(task) = self.backlog().limits.poll(now) {
            self.exec(task).pass_limits(now);
            self.prepare(cx, task);
        }
    }

    /// Receives data from the initiator before the command is added to the order: first any
    /// external descriptors, then the data. The buffer must be allocated before this, because newer
    /// commands may have to wait for this command and must not use its memory.
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
            None => self.resume_task(cx, task, StepResult::Done),
        }
    }

    /// Waits for pool memory before receiving data, unless too much unsolicited data is already
    /// waiting.
    fn gather_later(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx, step: Step) {
        let staged = self.staged(task);
        match staged == 0 || self.backlog().may_stage(cx.pool(), staged) {
            true => self.await_memory(cx, task, step),
            false => self.respond_with_status(cx, task, Status::TaskSetFull),
        }
    }

    /// Starts a task when it is next in the order.
    fn start(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx) {
        let step = self.first_step(cx, task);
        self.run(cx, task, step);
    }

    /// Executes steps until a step cannot complete immediately.
    fn run(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx, mut step: Step) {
        let owner = self.backlog().owner;
        loop {
            let result = match step {
                Step::Respond(response) => return self.respond(cx, task, response),
                // Do this before requesting anything from the initiator or the backend, because
                // their data requires a buffer.
                step if !self.exec(task).has_buffer(cx.pool(), owner) => {
                    return self.await_memory(cx, task, step);
                }
                Step::ReceiveData { from, len } => self.receive_data(cx, task, from, len),
                Step::SendData { from, len } => self.send_data(cx, task, from, len),
                Step::Block(op) => {
                    let exec = self.exec(task);
                    let unit = exec.unit.as_ref().expect("block operations have a unit");
                    let unit = unit.index;
                    exec.timer.enter_stage(Stage::Backend, cx.now());
                    self.hold(task, Hold::Backend);
                    return self.request_action(TaskAction::SubmitBlock { task, unit, op });
                }
            };
            let next = result.and_then(|result| self.advance(cx, task, result));
            match next {
                Some(next) => step = next,
                None => return,
            }
        }
    }

    /// Resumes a command when its step has completed.
    fn resume_task(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx, result: StepResult) {
        if let Some(step) = self.advance(cx, task, result) {
            self.run(cx, task, step);
        }
    }

    /// Processes the result of the last step of a command, and returns the next step. If the
    /// command has received its data, it is added to the order and may have to wait there.
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
            self.request_action(TaskAction::StartTask(other));
        }
        may_start.then(|| self.first_step(cx, task))
    }

    /// Queues a command with a step waiting for pool memory.
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

    /// Retries a step that was waiting for pool memory.
    fn resume(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx) {
        let step = self.exec(task).step.take();
        self.run(cx, task, step.expect("a step waits"));
    }

    /// Resumes commands if pool memory is available now, in FIFO order for each kind of command and
    /// each unit.
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
                // There still isn't enough memory. It keeps its position, and so do all commands
                // behind it.
                tasks.rotate_right(1);
                return;
            }
        }
    }

    /// Provides a part of the pool's reserve to the first command of a unit that has started and is
    /// still waiting for memory.
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

    /// Responds with a status only.
    fn respond_with_status(&mut self, cx: &mut Self::Cx<'_>, task: TaskIdx, status: Status) {
        let response = self.exec(task).status_only(status);
        self.respond(cx, task, response);
    }

    /// Removes a task from the task set of its unit. Tasks that were waiting for it may start.
    fn leave_task_set(&mut self, task: TaskIdx) {
        for started in self.exec(task).leave_task_set() {
            self.request_action(TaskAction::StartTask(started));
        }
    }

    /// Notifies the functions waiting for a completed task.
    fn report_gone(&mut self, watchers: Vec<TaskRef>) {
        for watcher in watchers {
            self.request_action(TaskAction::TaskGone(watcher));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of units is the same, but the second command may be waiting for a hanging disk.
    #[test]
    fn wait_for_other_unit_is_counted() {
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
