//! The way of an SRP_CMD: taken in, its task ordered, its table and data fetched, its steps carried
//! out, answered.

use std::time::Duration;

use riser_memory::Memory;
use riser_scsi::srp::{Cmd, DataBuffer, RspCode, Tag, TaskAttr};
use riser_scsi::step::{Expected, Status, Step, StepResult, TaskAttribute};

use super::channel::{ChState, Channel, Cx};
use super::ioctx::{CDB_LEN, CommandToken, Immediate, IoctxState, RecvIdx, Then};
use crate::fabric::{Direction, Entry, TaskAction, TaskIdx, Transfer};
use crate::pool::{Owner, Pool};
use crate::stats::Stage;
use crate::warn_limited;

/// How a request ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Its answer has been sent.
    Answered,
    /// Task management aborted it.
    Aborted,
    /// Its channel is going.
    TornDown,
}

impl Channel {
    /// Takes a request into an idle context.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn take_in(&mut self, tag: Tag, state: IoctxState) -> TaskIdx {
        let idx = self.idle.pop().expect("an idle context");
        self.req_lim.on_request();
        let io = &mut self.ioctx[usize::from(idx.0)];
        debug_assert_eq!(io.state, IoctxState::Done);
        io.generation = io.generation.wrapping_add(1);
        io.state = state;
        io.tag = tag;
        io.exec.unit = None;
        io.notify_success = false;
        io.notify_failure = false;
        io.exec.expected = Expected::default();
        io.token = Some(CommandToken::taken_in());
        idx
    }

    pub(super) fn on_cmd(&mut self, cx: &mut Cx<'_>, recv: RecvIdx, cmd: &Cmd<'_>) {
        self.counters.commands += 1;
        let idx = self.take_in(cmd.tag, IoctxState::New);
        let (luns, worker) = (&self.config.luns, self.config.worker);
        let addressed = self.accounts.addressed(luns, cmd.lun, worker);
        let io = &mut self.ioctx[usize::from(idx.0)];
        io.lun = cmd.lun;
        io.exec.attribute = match cmd.task_attr {
            TaskAttr::Simple => TaskAttribute::Simple,
            TaskAttr::HeadOfQueue => TaskAttribute::HeadOfQueue,
            TaskAttr::Ordered => TaskAttribute::Ordered,
            TaskAttr::Aca => TaskAttribute::Aca,
        };
        io.exec.cdb.clear();
        io.exec.cdb.extend(
            cmd.cdb
                .iter()
                .chain(cmd.additional_cdb)
                .copied()
                .take(CDB_LEN),
        );
        let nexus = self.config.nexus;
        io.exec.take_in(addressed, nexus, cmd.tag.0, cx.now);
        io.exec.expected = Expected {
            data_out: cmd.data_out.data_len(),
            data_in: cmd.data_in.data_len(),
        };
        io.notify_success = cmd.notify_success;
        io.notify_failure = cmd.notify_failure;
        if let DataBuffer::Immediate { offset, len, .. } = cmd.data_out {
            io.immediate = Some(Immediate {
                recv,
                offset: offset.bytes() as u32,
                len,
            });
        }
        if let Some(&older) = self.tags.get(&cmd.tag) {
            self.recycle_recv(recv);
            self.ioctx[usize::from(idx.0)].immediate = None;
            return self.on_overlapped(cx, idx, older);
        }
        self.tags.insert(cmd.tag, idx);
        let owner = self.owner();
        let io = &mut self.ioctx[usize::from(idx.0)];
        let tables = io.tables.take(cmd, cx.pool, owner);
        if io.immediate.is_none() {
            self.recycle_recv(recv);
        }
        match tables {
            Ok(true) => self.enter_task_set(cx, idx),
            // The pool cannot even hold the table of descriptors: the initiator tries again.
            Ok(false) => self.answer_status(cx, idx, Status::Busy),
            Err(error) => {
                self.counters.malformed += 1;
                warn_limited!(self.complaints, cx.now, %error, "unusable data descriptors");
                self.answer_code(cx, idx, RspCode::RequestFieldsInvalid);
            }
        }
    }

    /// A request that could not be parsed, except for its tag.
    pub(super) fn refuse(&mut self, cx: &mut Cx<'_>, tag: Tag) {
        let idx = self.take_in(tag, IoctxState::New);
        self.ioctx[usize::from(idx.0)].notify_failure = true;
        self.answer_code(cx, idx, RspCode::RequestFieldsInvalid);
    }

    fn enter_task_set(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let task = self.task_ref(idx);
        let io = &mut self.ioctx[usize::from(idx.0)];
        let descriptors = io.tables.descriptors();
        let nexus = self.config.nexus;
        let Some(passage) = self.throttle.enter(idx, io.exec.toll(nexus), cx.now) else {
            return self.answer_status(cx, idx, Status::TaskSetFull);
        };
        let limited = passage.limited;
        let lacks_tables = || !cx.pool.has_spare_tables(Owner(self.config.serial));
        if limited.is_some() && descriptors.pooled && lacks_tables() {
            // Tables of commands that wait for limits must not keep others from theirs.
            self.throttle.refuse(idx, passage);
            return self.answer_status(cx, idx, Status::Busy);
        }
        let entry = io
            .exec
            .register(nexus, task, descriptors, limited, cx.pool, cx.now);
        match entry {
            Entry::Now => self.start(cx, idx),
            Entry::Later => self.ioctx[usize::from(idx.0)].state = IoctxState::AwaitTask,
            Entry::Full => {
                self.throttle.refuse(idx, passage);
                self.answer_status(cx, idx, Status::TaskSetFull);
            }
            Entry::Gather => self.prepare(cx, idx),
            Entry::Limited => self.ioctx[usize::from(idx.0)].state = IoctxState::AwaitLimit,
        }
    }

    /// Lets commands go on for which limits have room by now.
    pub(super) fn poll_limits(&mut self, cx: &mut Cx<'_>) {
        while let Some(idx) = self.throttle.poll(cx.now) {
            let io = &mut self.ioctx[usize::from(idx.0)];
            debug_assert_eq!(io.state, IoctxState::AwaitLimit);
            io.exec.pass_limits(cx.now);
            self.prepare(cx, idx);
        }
    }

    /// Brings what the command needs from its initiator before it takes its place in the order: external
    /// tables, then data. The buffer for these comes first of all: newer commands may have to wait for this
    /// one, and must not have its memory by then.
    fn prepare(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let io = &mut self.ioctx[usize::from(idx.0)];
        let step = match io.exec.early_data() {
            Some(len) => {
                let step = Step::ReceiveData { from: 0, len };
                if io.exec.buffer.is_none() && !self.pool_waiters.is_empty() {
                    // Newer commands may have to wait for older ones, with their data in memory.
                    io.exec.step = Some(step);
                    return self.await_pool(cx, idx);
                }
                Some(step)
            }
            None if self.fetch_table(cx, idx) => None,
            None => self.advance(cx, idx, StepResult::Done),
        };
        if let Some(step) = step {
            self.run(cx, idx, step);
        }
    }

    /// Fetches a command's external table, or answers BUSY without room for it; `false` if there is none
    /// to be fetched.
    fn fetch_table(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) -> bool {
        let owner = self.owner();
        let io = &mut self.ioctx[usize::from(idx.0)];
        let Some(remote) = io.tables.external() else {
            return false;
        };
        let Some(buffer) = cx.pool.take_table(owner, remote.data_len()) else {
            self.answer_status(cx, idx, Status::Busy);
            return true;
        };
        io.exec.timer.enter(Stage::FabricIn, cx.now);
        io.tables.begin_fetch(remote, buffer);
        io.transfer = Some(Transfer::new(Direction::FromInitiator, remote.data_len()));
        self.try_post(idx, Then::FetchTable);
        true
    }

    pub(super) fn on_table_fetched(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let io = &mut self.ioctx[usize::from(idx.0)];
        io.transfer = None;
        match io.tables.on_fetched() {
            Ok(()) => self.prepare(cx, idx),
            Err(error) => {
                self.counters.malformed += 1;
                warn_limited!(self.complaints, cx.now, %error, "unusable external table");
                self.answer_code(cx, idx, RspCode::RequestFieldsInvalid);
                self.leave_answering(idx);
            }
        }
    }

    /// The task may run.
    pub(super) fn start(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let step = self.first_step(cx, idx);
        self.run(cx, idx, step);
    }

    fn first_step(&mut self, cx: &Cx<'_>, idx: TaskIdx) -> Step {
        let io = &mut self.ioctx[usize::from(idx.0)];
        let luns = self.config.luns.luns();
        io.exec.start(self.config.nexus, luns, cx.pool, cx.now)
    }

    /// Carries out steps until one takes time.
    pub(super) fn run(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, mut step: Step) {
        loop {
            let next = match step {
                Step::Respond(response) => return self.respond(cx, idx, response),
                Step::ReceiveData { .. } | Step::Block(_) if !self.has_buffer(cx.pool, idx) => {
                    self.ioctx[usize::from(idx.0)].exec.step = Some(step);
                    return self.await_pool(cx, idx);
                }
                Step::SendData { from, len } => {
                    self.counters.bytes_in += u64::from(len);
                    let io = &mut self.ioctx[usize::from(idx.0)];
                    io.exec.timer.enter(Stage::FabricOut, cx.now);
                    io.exec.timer.carry(len);
                    let direction = Direction::ToInitiator;
                    self.begin_piece(cx.now, idx);
                    let io = &mut self.ioctx[usize::from(idx.0)];
                    io.transfer = Some(Transfer::of_piece(direction, from, len));
                    return self.try_post(idx, Then::SendData);
                }
                Step::ReceiveData { .. } if self.fetch_table(cx, idx) => return,
                Step::ReceiveData { from, len } => {
                    self.counters.bytes_out += u64::from(len);
                    let io = &mut self.ioctx[usize::from(idx.0)];
                    io.exec.timer.enter(Stage::FabricIn, cx.now);
                    io.exec.timer.carry(len);
                    if io.immediate.is_some() {
                        self.take_immediate(idx, len);
                        self.advance(cx, idx, StepResult::Done)
                    } else if len == 0 {
                        self.advance(cx, idx, StepResult::Done)
                    } else {
                        let direction = Direction::FromInitiator;
                        self.begin_piece(cx.now, idx);
                        let io = &mut self.ioctx[usize::from(idx.0)];
                        io.transfer = Some(Transfer::of_piece(direction, from, len));
                        return self.try_post(idx, Then::NeedData);
                    }
                }
                Step::Block(op) => {
                    let io = &mut self.ioctx[usize::from(idx.0)];
                    let unit = io.exec.unit.as_ref().expect("block operations have a unit");
                    let unit = unit.index;
                    io.exec.timer.enter(Stage::Backend, cx.now);
                    io.state = IoctxState::DataIn;
                    self.blocks_in_flight += 1;
                    self.ask(TaskAction::SubmitBlock {
                        task: idx,
                        unit,
                        op,
                    });
                    return;
                }
            };
            match next {
                Some(next) => step = next,
                None => return,
            }
        }
    }

    /// Makes sure of the command's data buffer.
    fn has_buffer(&mut self, pool: &mut Pool, idx: TaskIdx) -> bool {
        let owner = self.owner();
        let io = &mut self.ioctx[usize::from(idx.0)];
        io.exec.has_buffer(pool, owner)
    }

    pub(super) fn owner(&self) -> Owner {
        Owner(self.config.serial)
    }

    /// Moves immediate data from the receive ring to the buffer, and frees its receive context when it has
    /// been all.
    fn take_immediate(&mut self, idx: TaskIdx, len: u32) {
        let io = &mut self.ioctx[usize::from(idx.0)];
        let held = io.immediate.as_mut().expect("immediate data is held");
        let immediate = *held;
        let len = len.min(immediate.len);
        held.offset += len;
        held.len -= len;
        let io = &self.ioctx[usize::from(idx.0)];
        let (ring, start) = self.receive_memory(immediate.recv);
        let mut from = start + immediate.offset as usize;
        if let Some(buffer) = &io.exec.buffer {
            let memory = buffer.memory();
            for range in buffer.ranges(0..len) {
                Memory::copy(ring, from, memory, range.start, range.len());
                from += range.len();
            }
        }
        if len == immediate.len {
            self.ioctx[usize::from(idx.0)].immediate = None;
            self.recycle_recv(immediate.recv);
        }
    }

    /// Advances the command with the result of its last step, and returns the next step. A command
    /// whose data have come takes its place in the order, and may have to wait there.
    pub(super) fn advance(
        &mut self,
        cx: &Cx<'_>,
        idx: TaskIdx,
        result: StepResult,
    ) -> Option<Step> {
        let io = &mut self.ioctx[usize::from(idx.0)];
        if !io.exec.is_gathering() {
            return Some(io.exec.advance(result, cx.now));
        }
        io.state = IoctxState::AwaitTask;
        let (may_start, others) = io.exec.data_arrived(result, cx.now);
        for other in others {
            self.ask(TaskAction::StartTask(other));
        }
        may_start.then(|| self.first_step(cx, idx))
    }

    /// Waits for pool memory, behind the others.
    pub(super) fn await_pool(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        self.ioctx[usize::from(idx.0)].state = IoctxState::AwaitBuffer;
        self.counters.buffer_waits += 1;
        self.pool_waiters.push_back(idx);
        let owner = self.owner();
        self.ioctx[usize::from(idx.0)]
            .exec
            .await_buffer(cx.pool, owner, cx.now);
    }

    /// Tries again what waited for pool memory.
    pub(super) fn resume(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let io = &mut self.ioctx[usize::from(idx.0)];
        debug_assert_eq!(io.state, IoctxState::AwaitBuffer);
        let step = io.exec.step.take().expect("a step waits");
        self.run(cx, idx, step);
    }

    pub(super) fn on_block_done(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, result: StepResult) {
        if self.ends_early(cx, idx) {
            return;
        }
        if let Some(step) = self.advance(cx, idx, result) {
            self.run(cx, idx, step);
        }
    }

    /// Ends a command that was aborted, or whose channel is going, now that no device uses it.
    pub(super) fn ends_early(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) -> bool {
        if self.ioctx[usize::from(idx.0)].exec.aborted {
            self.end_aborted(cx, idx);
            return true;
        }
        if self.torn_down {
            self.finish(cx.pool, idx, End::TornDown);
            return true;
        }
        false
    }

    /// Ends an aborted command that no device uses any more. One that another nexus has ended is answered
    /// with TASK ABORTED (SPC-4 7.5.8: TAS), since its initiator waits for it.
    pub(super) fn end_aborted(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let is_live = self.state == ChState::Live && !self.torn_down;
        if !is_live || !self.ioctx[usize::from(idx.0)].exec.is_cleared() {
            return self.finish(cx.pool, idx, End::Aborted);
        }
        let io = &mut self.ioctx[usize::from(idx.0)];
        io.transfer = None;
        let watchers = io.exec.interrupt(cx.pool);
        let immediate = io.immediate.take();
        for watcher in watchers {
            self.ask(TaskAction::TaskGone(watcher));
        }
        if let Some(immediate) = immediate {
            self.recycle_recv(immediate.recv);
        }
        self.answer_status(cx, idx, Status::TaskAborted);
    }

    /// Takes the task out of the unit's set; those it held back may start.
    pub(super) fn leave_task_set(&mut self, idx: TaskIdx) {
        let started = self.ioctx[usize::from(idx.0)].exec.leave();
        for task in started {
            self.ask(TaskAction::StartTask(task));
        }
    }

    /// A tag stands for this command no longer.
    pub(super) fn forget_tag(&mut self, tag: Tag, idx: TaskIdx) {
        if self.tags.get(&tag) == Some(&idx) {
            self.tags.remove(&tag);
        }
    }

    /// Ends a request: releases its resources and notifies its watchers.
    pub(super) fn finish(&mut self, pool: &mut Pool, idx: TaskIdx, end: End) {
        self.leave_task_set(idx);
        let io = &mut self.ioctx[usize::from(idx.0)];
        debug_assert_eq!(io.wrs, 0, "its chain has completed");
        match (io.token.take(), end) {
            (None, End::Answered) => {}
            (Some(token), End::Aborted) => {
                token.aborted();
                self.counters.aborted += 1;
                self.req_lim.on_silence();
            }
            (Some(token), End::TornDown) => {
                token.torn_down();
                self.counters.torn_down += 1;
                self.req_lim.on_silence();
            }
            // The answer was on its way when the channel broke.
            (None, End::TornDown | End::Aborted) => {}
            (Some(_), End::Answered) => unreachable!("an answer takes the token"),
        }
        let tag = io.tag;
        io.tables.release(pool);
        let watchers = io.exec.finish(pool);
        io.transfer = None;
        io.wait = None;
        io.waited = Duration::ZERO;
        io.response = None;
        io.code = None;
        io.mgmt = None;
        io.state = IoctxState::Done;
        let immediate = io.immediate.take();
        self.forget_tag(tag, idx);
        for watcher in watchers {
            self.ask(TaskAction::TaskGone(watcher));
        }
        if let Some(immediate) = immediate {
            self.recycle_recv(immediate.recv);
        }
        self.idle.push(idx);
    }
}
