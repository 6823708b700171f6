//! Task management over SRP, and commands with a duplicate tag.
//!
//! ABORT TASK refers to a tag of this channel, because SRP tags are only unique per channel.
//! Everything else is common to all fabrics: [`task_mgmt`].

use riser_scsi::srp::{RspCode, TskMgmt, TskMgmtFunction};
use riser_scsi::task::TaskManagement;
use riser_state::become_state;

use super::channel::{Channel, Cx};
use super::ioctx::{Cause, IoctxState};
use crate::fabric::task_mgmt::{self, Effect, Function, FunctionResponse, PendingFunction};
use crate::fabric::{CommandFlow as _, TaskAction, TaskIdx, TaskRef};
use crate::pool::Pool;
use crate::warn_limited;

impl Channel {
    pub(super) fn on_tsk_mgmt(&mut self, cx: &mut Cx<'_>, request: &TskMgmt) {
        self.stats.counters.task_management += 1;
        let idx = self.accept_request(cx, request.tag, IoctxState::Mgmt);
        let function = function_of(request.function);
        let io = &mut self.requests[idx];
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
            Err(response) => self.respond_function(idx, function, response),
        }
    }

    /// Handles a command with the tag of a command in flight: a response could be for either of
    /// them. We abort all commands of the nexus in the unit's task set without a response, and also
    /// the older command if it is for another unit (SAM-5 5.10).
    pub(super) fn on_overlapped(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, older: TaskIdx) {
        self.stats.counters.malformed += 1;
        let tag = self.requests[idx].tag.0;
        warn_limited!(
            self.complaints,
            cx.now,
            nexus = self.config.nexus.0,
            tag,
            "a command with the tag of another one"
        );
        let io = &mut self.requests[idx];
        let unit = io.exec.unit.clone();
        become_state(&mut io.state, IoctxState::Mgmt);
        let cause = Cause::Overlap(unit.clone());
        // For the older command.
        io.mgmt.insert(PendingFunction::new(cause)).await_tasks(1);
        if let Some(unit) = unit {
            let outcome = unit.manage(self.config.nexus, TaskManagement::AbortTaskSet);
            self.await_effect(idx, outcome.into());
        }
        let watcher = self.requests.task_ref(idx);
        // There is no response, as requested by its own nexus.
        self.requests[older].exec.renounce();
        self.abort(cx, older, watcher);
    }

    /// Aborts the tasks affected by a function, and waits for them.
    fn await_effect(&mut self, idx: TaskIdx, effect: Effect) {
        let watcher = self.requests.task_ref(idx);
        self.requests[idx]
            .pending_function()
            .await_tasks(effect.tasks());
        effect
            .into_actions(watcher)
            .for_each(|action| self.request_action(action));
    }

    /// Aborts the commands of this channel with the tag in ABORT TASK.
    fn abort_tagged(
        &mut self,
        cx: &mut Cx<'_>,
        idx: TaskIdx,
        request: &TskMgmt,
    ) -> Result<(), FunctionResponse> {
        let units = self.config.luns.with_former(request.lun);
        let unit = units.first().ok_or(FunctionResponse::NoSuchLun)?;
        let watcher = self.requests.task_ref(idx);
        // We can't use `tags`, because it no longer contains a command once its response was
        // written.
        for other in self.requests.numbers() {
            let Some(io) = self.requests.get(other) else {
                continue;
            };
            let named = io.tag == request.task_tag && io.exec.is_of_any(&units);
            if named && other != idx && io.is_command() {
                self.requests[idx].pending_function().await_tasks(1);
                // There is no response, as requested by its own nexus.
                self.requests[other].exec.renounce();
                self.abort(cx, other, watcher);
            }
        }
        unit.count_abort(!self.requests[idx].pending_function().is_over());
        Ok(())
    }

    /// Completes a function when the tasks that it was waiting for are removed.
    fn check_mgmt(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let pending = self.requests[idx].pending_function();
        if !pending.is_over() {
            return;
        }
        match pending.function.clone() {
            Cause::Function(function) => {
                self.respond_function(idx, function, FunctionResponse::Complete);
            }
            Cause::Overlap(unit) => {
                let response = self.requests[idx].overlapped_response(unit.as_deref());
                self.respond(cx, idx, response);
            }
        }
    }

    /// Counts a function by result, and completes it.
    fn respond_function(&mut self, idx: TaskIdx, function: Function, response: FunctionResponse) {
        let functions = &mut self.stats.functions;
        functions.count((function.label(), response.label()));
        self.respond_code(idx, code_of(response));
    }

    /// Called when a task of this channel can start, because the tasks before it have been removed.
    pub fn handle_task_start(&mut self, cx: &mut Cx<'_>, task: TaskRef) {
        // The message may be late, and the context may be used by a different command now.
        let io = self.requests.of_use(task.index, task.generation);
        if io.is_some_and(|io| io.state == IoctxState::AwaitTask) {
            self.start(cx, task.index);
        }
        self.finish_input(cx);
    }

    /// Called when a task of this channel is aborted by task management, from this or another
    /// channel.
    pub fn handle_abort(&mut self, cx: &mut Cx<'_>, task: TaskRef, watcher: TaskRef) {
        let io = self.requests.of_use(task.index, task.generation);
        if io.is_some_and(|io| io.is_command()) {
            self.abort(cx, task.index, watcher);
        } else {
            self.request_action(TaskAction::TaskGone(watcher));
        }
        self.finish_input(cx);
    }

    /// Called when a task was removed that a function of this channel is waiting for.
    pub fn handle_task_gone(&mut self, cx: &mut Cx<'_>, watcher: TaskRef) {
        let io = self.requests.of_use(watcher.index, watcher.generation);
        if let Some(io) = io
            && io.state == IoctxState::Mgmt
            && let Some(pending) = &mut io.mgmt
        {
            pending.on_task_gone();
            self.check_mgmt(cx, watcher.index);
        }
        self.finish_input(cx);
    }

    /// Aborts a command, immediately or as soon as its buffers are no longer used by a device.
    /// There is a response only if it was aborted by another nexus alone.
    fn abort(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, watcher: TaskRef) {
        let own = self.requests.task_ref(idx);
        let is_elsewhere = (watcher.worker, watcher.channel) != (own.worker, own.channel);
        let io = &mut self.requests[idx];
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
                self.request_action(TaskAction::AbortBlock(idx));
            }
            // The function was received on another channel, and the command was found because its
            // response was still waiting. The last of its data may still be in flight. `finish`
            // will report its completion.
            IoctxState::CmdRspSent if is_elsewhere && io.exec.is_left_ended() => {}
            IoctxState::CmdRspSent => {
                // Its response will be sent before ours, so the initiator no longer has this task.
                io.exec.watchers.pop();
                self.request_action(TaskAction::TaskGone(watcher));
            }
            _ => {
                self.stop_waiting(cx.pool, idx);
                self.end_aborted(cx, idx);
            }
        }
    }

    /// Removes a context from any queue that it is waiting in.
    pub(super) fn stop_waiting(&mut self, pool: &mut Pool, idx: TaskIdx) {
        match self.requests.state(idx) {
            IoctxState::AwaitCredit(_) => self.sender.queue.remove_waiting(idx),
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

/// Returns the RSP_CODE for a result. SRP does not have a code for an initiator without permission.
fn code_of(response: FunctionResponse) -> RspCode {
    match response {
        FunctionResponse::Complete => RspCode::Complete,
        FunctionResponse::NotSupported => RspCode::TskMgmtNotSupported,
        FunctionResponse::NoSuchLun => RspCode::RequestFieldsInvalid,
        _ => RspCode::TskMgmtFailed,
    }
}
