//! Task management, and what it does to commands.
//!
//! ABORT TASK names a tag of this channel, since SRP tags are unique on their channel only. The
//! other functions concern tasks that may belong to other channels, on other workers: the unit's
//! task set names them, their channels are told ([`Action::AbortTask`]) and report back
//! ([`Action::TaskGone`]). The function is answered when the last task is gone, so that an initiator
//! never sees data move for a task that it was told is over.

use std::sync::Arc;

use riser_scsi::attention::{Attention, AttentionScope};
use riser_scsi::nexus::NexusId;
use riser_scsi::srp::{RspCode, TskMgmt, TskMgmtFunction};
use riser_scsi::task::{TaskManagement, TmfResponse};

use super::action::Action;
use super::channel::{Channel, Cx};
use super::command::End;
use super::ioctx::{IoctxState, SendIdx};
use super::unit::{TaskRef, Unit};

/// A task-management function under way.
#[derive(Debug)]
pub struct Mgmt {
    /// What it is.
    function: TskMgmtFunction,
    /// The unit.
    unit: Arc<Unit>,
    /// Whether the unit is reset when the tasks are gone.
    resets: bool,
    /// Nexuses that lost tasks.
    cleared: Vec<NexusId>,
    /// Tasks not yet gone.
    waiting: u32,
}

impl Channel {
    pub(super) fn on_tsk_mgmt(&mut self, cx: &mut Cx<'_>, request: &TskMgmt) {
        self.counters.task_management += 1;
        let idx = self.take_in(request.tag, IoctxState::Mgmt);
        let io = &mut self.ioctx[usize::from(idx.0)];
        io.notify_success = request.notify_success;
        io.notify_failure = request.notify_failure;
        let Some(unit) = self.config.luns.addressed(request.lun) else {
            let code = RspCode::RequestFieldsInvalid;
            return self.answer_function(cx, idx, request.function, code);
        };
        self.ioctx[usize::from(idx.0)].mgmt = Some(Mgmt {
            function: request.function,
            unit: Arc::clone(&unit),
            resets: request.function == TskMgmtFunction::LogicalUnitReset,
            cleared: Vec::new(),
            waiting: 0,
        });
        let function = match request.function {
            TskMgmtFunction::AbortTask => {
                self.abort_tagged(cx, idx, request, &unit);
                unit.count_abort(self.mgmt_mut(idx).waiting > 0);
                return self.check_mgmt(cx, idx);
            }
            TskMgmtFunction::AbortTaskSet => TaskManagement::AbortTaskSet,
            TskMgmtFunction::ClearTaskSet => TaskManagement::ClearTaskSet,
            TskMgmtFunction::LogicalUnitReset => TaskManagement::LogicalUnitReset,
            TskMgmtFunction::ClearAca => TaskManagement::ClearAca,
            TskMgmtFunction::Other(_) => {
                let code = RspCode::TskMgmtNotSupported;
                return self.answer_function(cx, idx, request.function, code);
            }
        };
        let managed = unit.manage(self.config.nexus, function);
        if managed.response == TmfResponse::Rejected {
            let code = RspCode::TskMgmtNotSupported;
            return self.answer_function(cx, idx, request.function, code);
        }
        let watcher = self.task_ref(idx);
        let mgmt = self.mgmt_mut(idx);
        mgmt.cleared = managed.cleared;
        mgmt.waiting = managed.aborted.len() as u32;
        let aborts = managed
            .aborted
            .into_iter()
            .map(|task| Action::AbortTask { task, watcher });
        self.actions.extend(aborts);
        self.check_mgmt(cx, idx);
    }

    fn mgmt_mut(&mut self, idx: SendIdx) -> &mut Mgmt {
        let io = &mut self.ioctx[usize::from(idx.0)];
        io.mgmt.as_mut().expect("a function runs")
    }

    /// Aborts the commands of this channel with the tag that ABORT TASK names.
    fn abort_tagged(&mut self, cx: &mut Cx<'_>, idx: SendIdx, request: &TskMgmt, unit: &Arc<Unit>) {
        let watcher = self.task_ref(idx);
        for other in (0..self.config.params.req_lim as u16).map(SendIdx) {
            let io = &self.ioctx[usize::from(other.0)];
            let named = io.tag == request.task_tag && io.exec.is_of(unit);
            if named && other != idx && io.is_command() {
                self.mgmt_mut(idx).waiting += 1;
                self.abort(cx, other, watcher);
            }
        }
    }

    /// Answers a function when the tasks that it waits for are gone.
    fn check_mgmt(&mut self, cx: &mut Cx<'_>, idx: SendIdx) {
        let mgmt = self.mgmt_mut(idx);
        if mgmt.waiting > 0 {
            return;
        }
        let (unit, resets) = (Arc::clone(&mgmt.unit), mgmt.resets);
        let function = mgmt.function;
        let cleared = std::mem::take(&mut mgmt.cleared);
        if resets {
            unit.reset();
            self.actions.push_back(Action::Event {
                unit: unit.index,
                attention: Attention::DeviceReset,
            });
        }
        for nexus in cleared {
            let scope = AttentionScope::One(nexus);
            unit.lu.raise(Attention::CommandsCleared, scope);
        }
        self.answer_function(cx, idx, function, RspCode::Complete);
    }

    /// Answers a function.
    fn answer_function(
        &mut self,
        cx: &mut Cx<'_>,
        idx: SendIdx,
        function: TskMgmtFunction,
        code: RspCode,
    ) {
        self.functions.count((name_of(function), answer_of(code)));
        self.answer_code(cx, idx, code);
    }

    /// A task of this channel may start: those that held it back are gone.
    pub fn handle_task_start(&mut self, cx: &mut Cx<'_>, task: TaskRef) {
        let io = &self.ioctx[usize::from(task.ioctx.0)];
        if io.generation == task.generation && io.state == IoctxState::AwaitTask {
            self.prepare(cx, task.ioctx);
        }
        self.settle_round(cx);
    }

    /// Task management, here or on another channel, ends a task of this one.
    pub fn handle_abort(&mut self, cx: &mut Cx<'_>, task: TaskRef, watcher: TaskRef) {
        let io = &self.ioctx[usize::from(task.ioctx.0)];
        if io.generation == task.generation && io.is_command() {
            self.abort(cx, task.ioctx, watcher);
        } else {
            self.actions.push_back(Action::TaskGone(watcher));
        }
        self.settle_round(cx);
    }

    /// A task that a function of this channel waited for is gone.
    pub fn handle_task_gone(&mut self, cx: &mut Cx<'_>, watcher: TaskRef) {
        let io = &mut self.ioctx[usize::from(watcher.ioctx.0)];
        if io.generation == watcher.generation
            && io.state == IoctxState::Mgmt
            && let Some(mgmt) = &mut io.mgmt
        {
            mgmt.waiting -= 1;
            self.check_mgmt(cx, watcher.ioctx);
        }
        self.settle_round(cx);
    }

    /// Ends a command without an answer, at once or as soon as no device uses its buffers.
    fn abort(&mut self, cx: &mut Cx<'_>, idx: SendIdx, watcher: TaskRef) {
        let io = &mut self.ioctx[usize::from(idx.0)];
        io.exec.watchers.push(watcher);
        if io.exec.aborted {
            return;
        }
        match io.state {
            IoctxState::FetchTable | IoctxState::NeedData | IoctxState::WriteData => {
                io.exec.aborted = true;
            }
            IoctxState::DataIn => {
                io.exec.aborted = true;
                self.actions.push_back(Action::AbortBlock(idx));
            }
            IoctxState::CmdRspSent => {
                // Its answer is on its way before ours: the task is gone for the initiator.
                io.exec.watchers.pop();
                self.actions.push_back(Action::TaskGone(watcher));
            }
            _ => {
                self.stop_waiting(idx);
                self.finish(cx.pool, idx, End::Aborted);
            }
        }
    }

    /// Takes a context out of the queues that it may stand in.
    pub(super) fn stop_waiting(&mut self, idx: SendIdx) {
        match self.ioctx_state(idx) {
            IoctxState::AwaitCredit(_) => self.send_queue.forget(idx),
            IoctxState::AwaitTable | IoctxState::AwaitBuffer => {
                self.pool_waiters.retain(|&w| w != idx);
            }
            _ => {}
        }
    }
}

/// A function, as a label.
fn name_of(function: TskMgmtFunction) -> &'static str {
    match function {
        TskMgmtFunction::AbortTask => "abort_task",
        TskMgmtFunction::AbortTaskSet => "abort_task_set",
        TskMgmtFunction::ClearTaskSet => "clear_task_set",
        TskMgmtFunction::LogicalUnitReset => "logical_unit_reset",
        TskMgmtFunction::ClearAca => "clear_aca",
        TskMgmtFunction::Other(_) => "unknown",
    }
}

/// The answer to one, as a label.
fn answer_of(code: RspCode) -> &'static str {
    match code {
        RspCode::Complete => "complete",
        RspCode::TskMgmtNotSupported => "not_supported",
        RspCode::RequestFieldsInvalid => "no_such_lun",
        _ => "failed",
    }
}
