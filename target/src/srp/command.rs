//! Execution of SRP_CMD: receives the command, orders its task, fetches its table and data,
//! executes its steps, and responds.

use std::time::{Duration, Instant};

use riser_scsi::srp::{Cmd, DataBuffer, RspCode, Tag, TaskAttr};
use riser_scsi::step::{Expected, Response, Status, Step, StepResult, TaskAttribute};
use riser_state::become_state;

use super::action::Action;
use super::channel::{ChState, Channel, Cx};
use super::ioctx::{ChainKind, Immediate, IoctxState, RecvIdx, SendIoctx};
use crate::fabric::{
    Backlog, CommandFlow, Descriptors, Direction, End, Execution, Hold, TaskAction, TaskIdx,
    Transfer,
};
use crate::pool::Pool;
use crate::stats::Stage;
use crate::warn_limited;

impl Channel {
    /// Allocates a context for a request.
    ///
    /// # Panics
    /// If there is no free context.
    pub(super) fn accept_request(
        &mut self,
        cx: &mut Cx<'_>,
        tag: Tag,
        state: IoctxState,
    ) -> TaskIdx {
        self.sender.req_lim.on_request();
        let context = cx.spare.take_context(SendIoctx::new);
        self.requests.insert_request(context, tag, state)
    }

    pub(super) fn on_cmd(&mut self, cx: &mut Cx<'_>, recv: RecvIdx, cmd: &Cmd<'_>) {
        self.stats.counters.commands += 1;
        let idx = self.accept_request(cx, cmd.tag, IoctxState::New);
        let (luns, worker) = (&self.config.luns, self.config.worker);
        let addressed = self
            .stats
            .accounts
            .addressed(luns, cmd.lun, &cmd.cdb, worker);
        let io = &mut self.requests[idx];
        io.exec.attribute = match cmd.task_attr {
            TaskAttr::Simple => TaskAttribute::Simple,
            TaskAttr::HeadOfQueue => TaskAttribute::HeadOfQueue,
            TaskAttr::Ordered => TaskAttribute::Ordered,
            TaskAttr::Aca => TaskAttribute::Aca,
        };
        io.exec.set_cdb(&cmd.cdb, cmd.additional_cdb);
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
        if let Some(older) = self.requests.insert_tag(cmd.tag, idx) {
            self.recycle_recv(recv);
            self.requests[idx].immediate = None;
            return self.on_overlapped(cx, idx, older);
        }
        let owner = self.backlog.owner();
        let io = &mut self.requests[idx];
        let tables = io.tables.store_descriptors(cmd, cx.pool, owner);
        let descriptors = io.tables.descriptors();
        // Immediate data remains in the receive ring until the command has a buffer. Its receive is
        // not posted again until then.
        if io.immediate.is_none() {
            self.recycle_recv(recv);
        }
        match tables {
            Ok(true) => {
                let name = (idx, self.requests.task_ref(idx));
                self.enter_task_set(cx, name, nexus, descriptors);
            }
            // There is not even room for the descriptor table in the pool. The initiator will
            // retry.
            Ok(false) => self.respond_with_status(cx, idx, Status::Busy),
            Err(error) => {
                self.stats.counters.malformed += 1;
                warn_limited!(self.complaints, cx.now, %error, "invalid data descriptors");
                self.respond_code(idx, RspCode::RequestFieldsInvalid);
            }
        }
    }

    /// Rejects a request if only its tag could be parsed.
    pub(super) fn refuse(&mut self, cx: &mut Cx<'_>, tag: Tag) {
        let idx = self.accept_request(cx, tag, IoctxState::New);
        self.requests[idx].notify_failure = true;
        self.respond_code(idx, RspCode::RequestFieldsInvalid);
    }

    pub(super) fn on_table_fetched(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let io = &mut self.requests[idx];
        io.transfer = None;
        match io.tables.on_fetched() {
            Ok(()) => self.prepare(cx, idx),
            Err(error) => {
                self.stats.counters.malformed += 1;
                warn_limited!(self.complaints, cx.now, %error, "invalid external table");
                self.respond_code(idx, RspCode::RequestFieldsInvalid);
                self.leave_on_response(idx);
            }
        }
    }

    /// Completes a command that was aborted, or whose channel is being closed, if it is no longer
    /// used by a device. Returns whether it did.
    pub(super) fn ends_early(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) -> bool {
        if self.requests[idx].exec.aborted {
            self.end_aborted(cx, idx);
            return true;
        }
        if self.torn_down {
            self.finish(cx, idx, End::TornDown);
            return true;
        }
        false
    }

    /// Completes an aborted command after all devices have released its buffers. If it was aborted
    /// by another nexus, its initiator is waiting for a response, so we return TASK ABORTED (SPC-4
    /// 7.5.8: TAS).
    pub(super) fn end_aborted(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let is_live = self.state == ChState::Live && !self.torn_down;
        if !is_live || !self.requests[idx].exec.is_cleared() {
            return self.finish(cx, idx, End::Aborted);
        }
        let io = &mut self.requests[idx];
        io.transfer = None;
        let watchers = io.exec.interrupt(cx.pool);
        let immediate = io.immediate.take();
        self.report_gone(watchers);
        if let Some(immediate) = immediate {
            self.recycle_recv(immediate.recv);
        }
        self.respond_with_status(cx, idx, Status::TaskAborted);
    }

    /// Completes a request: releases its resources and notifies its watchers.
    pub(super) fn finish(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, end: End) {
        let context = self.end_request(cx.pool, idx, end);
        cx.spare.return_context(context);
    }

    /// Same as [`Channel::finish`], but returns the context, which no longer holds any resources.
    pub(super) fn end_request(
        &mut self,
        pool: &mut Pool,
        idx: TaskIdx,
        end: End,
    ) -> Box<SendIoctx> {
        self.leave_task_set(idx);
        let io = &mut self.requests[idx];
        debug_assert_eq!(io.wrs, 0, "its chain has completed");
        let token = io.token.take();
        // The tag was already removed when the response was written.
        let is_known = token.is_some();
        match (token, end) {
            (None, End::Responded) => {}
            (Some(token), End::Aborted) => {
                token.aborted();
                self.stats.counters.aborted += 1;
                self.sender.req_lim.on_silence();
            }
            (Some(token), End::TornDown) => {
                token.torn_down();
                self.stats.counters.torn_down += 1;
                self.sender.req_lim.on_silence();
            }
            // The channel failed after the response was posted.
            (None, End::TornDown | End::Aborted) => {}
            (Some(_), End::Responded) => unreachable!("a response consumes the token"),
        }
        let tag = io.tag;
        io.tables.release(pool);
        let watchers = io.exec.finish(pool);
        io.transfer = None;
        io.wait = None;
        (io.began, io.ordered) = (None, None);
        io.waited = Duration::ZERO;
        io.response = None;
        io.code = None;
        io.mgmt = None;
        become_state(&mut io.state, IoctxState::Done);
        let immediate = io.immediate.take();
        if is_known {
            self.requests.remove_tag(tag, idx);
        }
        self.report_gone(watchers);
        if let Some(immediate) = immediate {
            self.recycle_recv(immediate.recv);
        }
        self.requests.remove(idx)
    }
}

impl CommandFlow for Channel {
    type Cx<'a> = Cx<'a>;

    fn backlog(&mut self) -> &mut Backlog {
        &mut self.backlog
    }

    fn exec(&mut self, task: TaskIdx) -> &mut Execution {
        &mut self.requests[task].exec
    }

    fn request_action(&mut self, action: TaskAction) {
        self.actions.push_back(Action::Task(action));
    }

    fn hold(&mut self, task: TaskIdx, hold: Hold) {
        let io = &mut self.requests[task];
        let next = match hold {
            Hold::Limits => IoctxState::AwaitLimit,
            Hold::Order => IoctxState::AwaitTask,
            Hold::Memory => IoctxState::AwaitBuffer,
            Hold::Backend => IoctxState::DataIn,
        };
        become_state(&mut io.state, next);
        self.stats.counters.buffer_waits += u64::from(hold == Hold::Memory);
        self.blocks_in_flight += u32::from(hold == Hold::Backend);
    }

    fn first_step(&mut self, cx: &mut Cx<'_>, task: TaskIdx) -> Step {
        let io = &mut self.requests[task];
        let luns = self.config.luns.luns();
        io.exec.start(self.config.nexus, luns, cx.pool, cx.now)
    }

    /// Fetches an external table. Returns BUSY status if there is no room for it.
    fn fetch_descriptors(&mut self, cx: &mut Cx<'_>, task: TaskIdx) -> bool {
        let io = &mut self.requests[task];
        let Some(remote) = io.tables.external() else {
            return false;
        };
        let owner = self.backlog.owner();
        let Some(buffer) = cx.pool.take_table(owner, remote.data_len()) else {
            self.respond_with_status(cx, task, Status::Busy);
            return true;
        };
        io.exec.timer.enter_stage(Stage::FabricIn, cx.now);
        io.tables.begin_fetch(remote, buffer);
        io.transfer = Some(Transfer::new(Direction::FromInitiator, remote.data_len()));
        self.try_post(task, ChainKind::FetchTable);
        true
    }

    /// Reads the data from the initiator's memory, unless it was sent with the command.
    fn receive_data(
        &mut self,
        cx: &mut Cx<'_>,
        task: TaskIdx,
        from: u32,
        len: u32,
    ) -> Option<StepResult> {
        // It is possible that the unit only requests data when the command starts.
        if self.fetch_descriptors(cx, task) {
            return None;
        }
        self.stats.counters.bytes_out += u64::from(len);
        let io = &mut self.requests[task];
        io.exec.timer.enter_stage(Stage::FabricIn, cx.now);
        io.exec.timer.carry(len);
        if io.immediate.is_some() {
            // When all data was copied, the receive context is released.
            if let Some(recv) = self.receives.copy_immediate(io, len) {
                self.recycle_recv(recv);
            }
            return Some(StepResult::Done);
        }
        if len == 0 {
            return Some(StepResult::Done);
        }
        self.timers.start_piece(cx.now, io);
        if from > 0 {
            self.timers.watch_order(cx.now);
        }
        io.transfer = Some(Transfer::of_piece(Direction::FromInitiator, from, len));
        self.try_post(task, ChainKind::NeedData);
        None
    }

    fn send_data(
        &mut self,
        cx: &mut Cx<'_>,
        task: TaskIdx,
        from: u32,
        len: u32,
    ) -> Option<StepResult> {
        self.stats.counters.bytes_in += u64::from(len);
        let io = &mut self.requests[task];
        io.exec.timer.enter_stage(Stage::FabricOut, cx.now);
        io.exec.timer.carry(len);
        self.timers.start_piece(cx.now, io);
        self.timers.watch_order(cx.now);
        io.transfer = Some(Transfer::of_piece(Direction::ToInitiator, from, len));
        self.try_post(task, ChainKind::SendData);
        None
    }

    fn end_wait(&mut self, now: Instant, task: TaskIdx) {
        self.timers.stop_piece(now, &mut self.requests[task]);
    }

    /// Sends the response of the logical unit, after its data.
    fn respond(&mut self, cx: &mut Cx<'_>, task: TaskIdx, response: Response) {
        let owner = self.backlog.owner();
        let io = &mut self.requests[task];
        let Some(len) = io.exec.gather(cx.pool, owner, &response, cx.now) else {
            self.await_memory(cx, task, Step::Respond(response));
            return self.leave_on_response(task);
        };
        if len > 0 {
            let from = response.data_in.from();
            io.transfer = Some(Transfer::of_piece(Direction::ToInitiator, from, len));
            self.stats.counters.bytes_in += u64::from(len);
        }
        io.response = Some(response);
        self.timers.start_piece(cx.now, io);
        self.try_post(task, ChainKind::Respond);
        self.leave_on_response(task);
    }

    /// Commands that wait for rate limits must not use up the pool for the tables of other
    /// commands.
    fn check_held(
        &mut self,
        cx: &mut Cx<'_>,
        _task: TaskIdx,
        descriptors: Descriptors,
    ) -> Result<(), Status> {
        match descriptors.pooled && !cx.pool.has_spare_tables(self.backlog.owner()) {
            true => Err(Status::Busy),
            false => Ok(()),
        }
    }
}
