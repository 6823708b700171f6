//! Task management for iSCSI (RFC 7143 11.5).
//!
//! This handles functions that refer to a single task, which can be on any connection of the
//! session. TASK REASSIGN is implemented in `allegiance`. Everything else is shared by all fabrics:
//! see [`task_mgmt`].

use std::sync::Arc;

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{
    FromTarget, RejectReason, TmfFunction, TmfRequest, TmfResponse, TmfStatus,
};

use super::context::Cx;
use super::datamover::{Control, Datamover};
use super::executor::Executor;
use super::task::TaskState;
use crate::fabric::task_mgmt::{self, Effect, Function, FunctionResponse, PendingFunction};
use crate::fabric::{CommandFlow as _, TaskAction, TaskIdx, TaskRef, Unit};

impl<D: Datamover> Executor<D> {
    pub(super) fn on_tmf(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, request: &TmfRequest) {
        // Functions and commands share a single number space for tags (RFC 7143 11.2.1.8).
        if !self.tasks.is_tag_free(request.itt) {
            return self.reject(
                cx,
                frame,
                RejectReason::TaskInProgress,
                &"the tag is in use",
            );
        }
        let key = (request.itt, request.immediate);
        let wait = self.timers.pace.start_wait(cx.now);
        let accepted = self
            .tasks
            .accept_request(cx.spare, key, TaskState::Mgmt, wait);
        let Some(idx) = accepted else {
            if request.immediate {
                return self.reject(cx, frame, RejectReason::TooManyImmediate, &"functions");
            }
            let response = TmfResponse {
                itt: request.itt,
                status: TmfStatus::Rejected,
            };
            return self.send(FromTarget::TmfResponse(response), Vec::new(), true);
        };
        self.stats.counters.task_management += 1;
        let function = function_of(request.function);
        self.tasks[idx].mgmt = Some(PendingFunction::new(function));
        // The response must be sent before the command continues, so this doesn't wait like other
        // functions.
        if function == Function::TaskReassign {
            return self.on_task_reassign(cx, idx, request);
        }
        match self.carry_out(cx, idx, function, request) {
            Some(response) => self.respond_function(idx, response),
            None => self.check_mgmt(idx),
        }
    }

    /// Starts a function. Returns the response if it's known immediately.
    fn carry_out(
        &mut self,
        cx: &mut Cx<'_>,
        idx: TaskIdx,
        function: Function,
        request: &TmfRequest,
    ) -> Option<FunctionResponse> {
        let session = self.session.as_ref().expect("full-feature phase");
        // Include previous units of this LUN: after a configuration change, an initiator must still
        // be able to abort commands sent to these units.
        let units = session.luns.with_former(request.lun);
        match function {
            Function::AbortTask
            | Function::QueryTask
            | Function::QueryTaskSet
            | Function::QueryAsyncEvent
                if units.is_empty() =>
            {
                Some(FunctionResponse::NoSuchLun)
            }
            Function::AbortTask => self.abort_named(cx, idx, request, &units),
            // If the session has several connections, the task may be on any of them. We must check
            // the window, which contains all tasks, so that we don't report an active task as
            // complete.
            Function::QueryTask => {
                let found = self.tasks.find_command(request.referenced, &units);
                let elsewhere = self.window().tagged(request.referenced);
                Some(presence(found.is_some() || elsewhere.is_some()))
            }
            Function::QueryTaskSet => {
                let mut tasks = self.tasks.iter();
                let any = tasks.any(|(_, task)| task.is_command() && task.exec.is_of_any(&units));
                // It might be on another connection of the session.
                let nexus = session.nexus;
                let elsewhere = units.iter().any(|unit| unit.has_tasks_of(nexus));
                Some(presence(any || elsewhere))
            }
            Function::QueryAsyncEvent => Some(FunctionResponse::Complete),
            _ => {
                let (luns, nexus) = (&session.luns, session.nexus);
                match task_mgmt::manage(function, request.lun, luns, nexus) {
                    Ok(effect) => self.await_effect(idx, effect),
                    Err(response) => return Some(response),
                }
                None
            }
        }
    }

    /// Aborts the command referenced by ABORT TASK.
    fn abort_named(
        &mut self,
        cx: &mut Cx<'_>,
        idx: TaskIdx,
        request: &TmfRequest,
        units: &[Arc<Unit>],
    ) -> Option<FunctionResponse> {
        let Some(task) = self.tasks.find_command(request.referenced, units) else {
            let response = self.abort_elsewhere(idx, request);
            units[0].count_abort(response.is_none());
            return response;
        };
        units[0].count_abort(true);
        self.tasks[idx].pending_function().await_tasks(1);
        let watcher = self.tasks.task_ref(idx);
        self.abort(cx, task, Some(watcher));
        None
    }

    /// Handles ABORT TASK for a command that isn't on this connection: it may be on another
    /// connection, or may not have been received yet.
    fn abort_elsewhere(&mut self, idx: TaskIdx, request: &TmfRequest) -> Option<FunctionResponse> {
        let window = Arc::clone(self.window());
        if let Some(task) = window.abort_tag(request.referenced) {
            self.tasks[idx].pending_function().await_tasks(1);
            let watcher = self.tasks.task_ref(idx);
            self.request_action(TaskAction::AbortTask { task, watcher });
            return None;
        }
        Some(if window.forgo(request.ref_cmd_sn, request.cmd_sn) {
            FunctionResponse::Complete
        } else {
            FunctionResponse::NoSuchTask
        })
    }

    /// Aborts the tasks affected by a function, which then waits for them.
    fn await_effect(&mut self, idx: TaskIdx, effect: Effect) {
        let watcher = self.tasks.task_ref(idx);
        self.tasks[idx]
            .pending_function()
            .await_tasks(effect.tasks());
        effect
            .into_actions(watcher)
            .for_each(|action| self.request_action(action));
    }

    /// Responds to a function if all its tasks have completed.
    fn check_mgmt(&mut self, idx: TaskIdx) {
        if self.tasks[idx].pending_function().is_over() {
            self.respond_function(idx, FunctionResponse::Complete);
        }
    }

    pub(super) fn respond_function(&mut self, idx: TaskIdx, response: FunctionResponse) {
        let function = self.tasks[idx].pending_function().function;
        self.stats
            .functions
            .count((function.label(), response.label()));
        self.is_reset |= function == Function::NexusReset && response == FunctionResponse::Complete;
        self.mark_sent(idx);
        let task = &self.tasks[idx];
        self.mover.send_control(Control {
            pdu: FromTarget::TmfResponse(TmfResponse {
                itt: task.itt,
                status: status_of(response),
            }),
            data: Vec::new(),
            counts: true,
            ends: Some(idx),
        });
    }

    /// Called when a task can start because the tasks it was waiting for have completed.
    pub(super) fn on_task_start(&mut self, cx: &mut Cx<'_>, name: TaskRef) {
        let idx = name.index;
        // The message may be old, and the context may be in use by another command.
        let task = self.tasks.of_use(idx, name.generation);
        if task.is_some_and(|task| task.state == TaskState::AwaitTask) {
            self.start(cx, idx);
        }
    }

    /// Handles an abort of one of our tasks by task management on this or another channel.
    pub(super) fn on_abort(&mut self, cx: &mut Cx<'_>, name: TaskRef, watcher: TaskRef) {
        let idx = name.index;
        // The task was handed over before the message was received, so forward it.
        if let Some(task) = self.allegiance.moved(name) {
            self.request_action(TaskAction::AbortTask { task, watcher });
        } else if self.tasks.of_use(idx, name.generation).is_some() {
            self.end_managed(cx, idx, watcher);
        } else {
            self.request_action(TaskAction::TaskGone(watcher));
        }
    }

    /// Called when a task that a function is waiting for has completed.
    pub(super) fn on_task_gone(&mut self, watcher: TaskRef) {
        let idx = watcher.index;
        let task = self.tasks.of_use(idx, watcher.generation);
        if let Some(task) = task
            && task.state == TaskState::Mgmt
            && let Some(pending) = &mut task.mgmt
        {
            pending.on_task_gone();
            self.check_mgmt(idx);
        }
    }
}

fn presence(is_there: bool) -> FunctionResponse {
    if is_there {
        FunctionResponse::Succeeded
    } else {
        FunctionResponse::Complete
    }
}

fn function_of(function: TmfFunction) -> Function {
    match function {
        TmfFunction::AbortTask => Function::AbortTask,
        TmfFunction::AbortTaskSet => Function::AbortTaskSet,
        TmfFunction::ClearAca => Function::ClearAca,
        TmfFunction::ClearTaskSet => Function::ClearTaskSet,
        TmfFunction::LogicalUnitReset => Function::LogicalUnitReset,
        TmfFunction::TargetWarmReset => Function::TargetWarmReset,
        TmfFunction::TargetColdReset => Function::TargetColdReset,
        TmfFunction::TaskReassign => Function::TaskReassign,
        TmfFunction::QueryTask => Function::QueryTask,
        TmfFunction::QueryTaskSet => Function::QueryTaskSet,
        TmfFunction::NexusReset => Function::NexusReset,
        TmfFunction::QueryAsyncEvent => Function::QueryAsyncEvent,
        TmfFunction::Other(_) => Function::Unknown,
    }
}

fn status_of(response: FunctionResponse) -> TmfStatus {
    match response {
        FunctionResponse::Complete => TmfStatus::Complete,
        FunctionResponse::Succeeded => TmfStatus::Succeeded,
        FunctionResponse::NoSuchTask => TmfStatus::TaskDoesNotExist,
        FunctionResponse::NoSuchLun => TmfStatus::LunDoesNotExist,
        FunctionResponse::StillAllegiant => TmfStatus::TaskStillAllegiant,
        FunctionResponse::ReassignmentNotSupported => TmfStatus::ReassignmentNotSupported,
        FunctionResponse::NotSupported => TmfStatus::NotSupported,
        FunctionResponse::NotAuthorized => TmfStatus::AuthorizationFailed,
        FunctionResponse::Rejected => TmfStatus::Rejected,
    }
}
