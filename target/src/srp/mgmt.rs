//! Task management over SRP, and commands with the tag of another one.
//!
//! ABORT TASK names a tag of this channel, since SRP tags are unique on their channel only. All
//! else is common to the fabrics: [`task_mgmt`].

use riser_scsi::sense::{AdditionalSense, Sense, SenseFormat, SenseKey};
use riser_scsi::srp::{RspCode, TskMgmt, TskMgmtFunction};
use riser_scsi::step::Response;
use riser_scsi::task::TaskManagement;
use riser_state::become_state;

use super::channel::{Channel, Cx};
use super::ioctx::{Cause, IoctxState};
use crate::fabric::task_mgmt::{self, Effect, Function, FunctionAnswer, PendingFunction};
use crate::fabric::{CommandFlow as _, TaskAction, TaskIdx, TaskRef, Unit};
use crate::pool::Pool;
use crate::warn_limited;

impl Channel {
    pub(super) fn on_tsk_mgmt(&mut self, cx: &mut Cx<'_>, request: &TskMgmt) {
        self.counters.task_management += 1;
        let idx = self.take_in(cx, request.tag, IoctxState::Mgmt);
        let function = function_of(request.function);
        let io = &mut self.ioctx[usize::from(idx.0)];
        io.notify_success = request.notify_success;
        io.notify_failure = request.notify_failure;
        io.mgmt = Some(PendingFunction::new(Cause::Function(function)));
        let begun = match function {
            Function::AbortTask => self.abort_tagged(cx, idx, request),
            _ => {
                let (luns, nexus) = (&self.config.luns, self.config.nexus);
                task_mgmt::manage(function, request.lun, luns, nexus)
                    .map(|effect| self.await_effect(idx, effect))
            }
        };
        match begun {
            Ok(()) => self.check_mgmt(cx, idx),
            Err(answer) => self.answer_function(cx, idx, function, answer),
        }
    }

    /// A command has the tag of one that is not answered yet, so an answer to either could be taken
    /// for the other's. All commands of the nexus in the unit's task set end without an answer, and
    /// so does the older one where it is for another unit (SAM-5 5.10).
    pub(super) fn on_overlapped(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, older: TaskIdx) {
        self.counters.malformed += 1;
        let tag = self.ioctx[usize::from(idx.0)].tag.0;
        warn_limited!(
            self.complaints,
            cx.now,
            nexus = self.config.nexus.0,
            tag,
            "a command with the tag of another one"
        );
        let io = &mut self.ioctx[usize::from(idx.0)];
        let unit = io.exec.unit.clone();
        become_state(&mut io.state, IoctxState::Mgmt);
        let cause = Cause::Overlap(unit.clone());
        // The older one.
        io.mgmt.insert(PendingFunction::new(cause)).await_tasks(1);
        if let Some(unit) = unit {
            let outcome = unit.manage(self.config.nexus, TaskManagement::AbortTaskSet);
            self.await_effect(idx, outcome.into());
        }
        let watcher = self.task_ref(idx);
        self.abort_own(cx, older, watcher);
    }

    /// Has the tasks aborted that a function ends, which waits for them.
    fn await_effect(&mut self, idx: TaskIdx, effect: Effect) {
        let watcher = self.task_ref(idx);
        self.mgmt_mut(idx).await_tasks(effect.tasks());
        effect
            .into_actions(watcher)
            .for_each(|action| self.ask(action));
    }

    fn mgmt_mut(&mut self, idx: TaskIdx) -> &mut PendingFunction<Cause> {
        let io = &mut self.ioctx[usize::from(idx.0)];
        io.mgmt.as_mut().expect("a function runs")
    }

    /// Aborts the commands of this channel with the tag that ABORT TASK names.
    fn abort_tagged(
        &mut self,
        cx: &mut Cx<'_>,
        idx: TaskIdx,
        request: &TskMgmt,
    ) -> Result<(), FunctionAnswer> {
        let units = self.config.luns.with_former(request.lun);
        let unit = units.first().ok_or(FunctionAnswer::NoSuchLun)?;
        let watcher = self.task_ref(idx);
        // Not by `tags`, which forgets a command as soon as its answer is written.
        for other in self.ioctx.numbers() {
            let Some(io) = self.ioctx.get(other) else {
                continue;
            };
            let named = io.tag == request.task_tag && io.exec.is_of_any(&units);
            if named && other != idx && io.is_command() {
                self.mgmt_mut(idx).await_tasks(1);
                self.abort_own(cx, other, watcher);
            }
        }
        unit.count_abort(!self.mgmt_mut(idx).is_over());
        Ok(())
    }

    /// Answers a function when the tasks that it waits for are gone.
    fn check_mgmt(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let pending = self.mgmt_mut(idx);
        if !pending.is_over() {
            return;
        }
        match pending.function.clone() {
            Cause::Function(function) => {
                self.answer_function(cx, idx, function, FunctionAnswer::Complete);
            }
            Cause::Overlap(unit) => self.answer_overlapped(cx, idx, unit.as_deref()),
        }
    }

    /// Answers a command with the tag of another one.
    fn answer_overlapped(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, unit: Option<&Unit>) {
        let format = unit.map_or(SenseFormat::Fixed, |unit| unit.lu.sense_format());
        let overlapped = AdditionalSense::OVERLAPPED_COMMANDS;
        let sense = Sense::new(SenseKey::AbortedCommand, overlapped);
        let io = &mut self.ioctx[usize::from(idx.0)];
        io.mgmt = None;
        become_state(&mut io.state, IoctxState::New);
        let response = Response::check_condition(&sense, format, io.exec.expected);
        self.respond(cx, idx, response);
    }

    /// Counts a function by its answer, and answers it.
    fn answer_function(
        &mut self,
        cx: &mut Cx<'_>,
        idx: TaskIdx,
        function: Function,
        answer: FunctionAnswer,
    ) {
        self.functions.count((function.label(), answer.label()));
        self.answer_code(cx, idx, code_of(answer));
    }

    /// A task of this channel may start: those that held it back are gone.
    pub fn handle_task_start(&mut self, cx: &mut Cx<'_>, task: TaskRef) {
        // The mail may be late, and the context another command's by now.
        let io = self.ioctx.of_use(task.index, task.generation);
        if io.is_some_and(|io| io.state == IoctxState::AwaitTask) {
            self.start(cx, task.index);
        }
        self.settle_round(cx);
    }

    /// Task management, here or on another channel, ends a task of this one.
    pub fn handle_abort(&mut self, cx: &mut Cx<'_>, task: TaskRef, watcher: TaskRef) {
        let io = self.ioctx.of_use(task.index, task.generation);
        if io.is_some_and(|io| io.is_command()) {
            self.abort(cx, task.index, watcher);
        } else {
            self.ask(TaskAction::TaskGone(watcher));
        }
        self.settle_round(cx);
    }

    /// A task that a function of this channel waited for is gone.
    pub fn handle_task_gone(&mut self, cx: &mut Cx<'_>, watcher: TaskRef) {
        let io = self.ioctx.of_use(watcher.index, watcher.generation);
        if let Some(io) = io
            && io.state == IoctxState::Mgmt
            && let Some(pending) = &mut io.mgmt
        {
            pending.on_task_gone();
            self.check_mgmt(cx, watcher.index);
        }
        self.settle_round(cx);
    }

    /// Ends a command of this channel without an answer, since its own nexus asks for that.
    fn abort_own(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, watcher: TaskRef) {
        self.ioctx[usize::from(idx.0)].exec.renounce();
        self.abort(cx, idx, watcher);
    }

    /// Ends a command, at once or as soon as no device uses its buffers. It is answered if only
    /// another nexus has ended it.
    fn abort(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, watcher: TaskRef) {
        let own = self.task_ref(idx);
        let is_elsewhere = (watcher.worker, watcher.channel) != (own.worker, own.channel);
        let io = &mut self.ioctx[usize::from(idx.0)];
        io.exec.watchers.push(watcher);
        if io.exec.aborted {
            return;
        }
        match io.state {
            IoctxState::FetchTable
            | IoctxState::NeedData
            | IoctxState::SendData
            | IoctxState::WriteData => {
                io.exec.aborted = true;
            }
            IoctxState::DataIn => {
                io.exec.aborted = true;
                self.ask(TaskAction::AbortBlock(idx));
            }
            // It was named while its answer waited, by a function that comes over another channel:
            // the last of its data may still be on their way. `finish` reports their end.
            IoctxState::CmdRspSent if is_elsewhere && io.exec.is_left_ended() => {}
            IoctxState::CmdRspSent => {
                // Its answer is on its way before ours: the task is gone for the initiator.
                io.exec.watchers.pop();
                self.ask(TaskAction::TaskGone(watcher));
            }
            _ => {
                self.stop_waiting(cx.pool, idx);
                self.end_aborted(cx, idx);
            }
        }
    }

    /// Takes a context out of the queues that it may stand in.
    pub(super) fn stop_waiting(&mut self, pool: &mut Pool, idx: TaskIdx) {
        match self.ioctx_state(idx) {
            IoctxState::AwaitCredit(_) => self.send_queue.forget(idx),
            IoctxState::AwaitLimit => self.backlog.limits.remove(idx),
            IoctxState::AwaitBuffer => self.backlog.leave_memory(pool, idx),
            _ => {}
        }
    }
}

fn function_of(function: TskMgmtFunction) -> Function {
    match function {
        TskMgmtFunction::AbortTask => Function::AbortTask,
        TskMgmtFunction::AbortTaskSet => Function::AbortTaskSet,
        TskMgmtFunction::ClearTaskSet => Function::ClearTaskSet,
        TskMgmtFunction::LogicalUnitReset => Function::LogicalUnitReset,
        TskMgmtFunction::ClearAca => Function::ClearAca,
        TskMgmtFunction::Other(_) => Function::Unknown,
    }
}

/// RSP_CODE of an answer. SRP has no code for an initiator that may not do something.
fn code_of(answer: FunctionAnswer) -> RspCode {
    match answer {
        FunctionAnswer::Complete => RspCode::Complete,
        FunctionAnswer::NotSupported => RspCode::TskMgmtNotSupported,
        FunctionAnswer::NoSuchLun => RspCode::RequestFieldsInvalid,
        _ => RspCode::TskMgmtFailed,
    }
}
