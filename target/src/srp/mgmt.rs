//! Task management, and what it does to commands.
//!
//! ABORT TASK names a tag of this channel, since SRP tags are unique on their channel only. The
//! other functions concern tasks that may belong to other channels, on other workers: the unit's
//! task set names them, their channels are told ([`Action::AbortTask`]) and report back
//! ([`Action::TaskGone`]). The function is answered when the last task is gone, so that no data are posted for a
//! task that its initiator takes for over. What was posted before, with the answer, on another channel may
//! arrive after that.

use std::sync::Arc;

use riser_scsi::attention::Attention;
use riser_scsi::lun::LunId;
use riser_scsi::sense::{AdditionalSense, Sense, SenseFormat, SenseKey};
use riser_scsi::srp::{RspCode, TskMgmt, TskMgmtFunction};
use riser_scsi::step::Response;
use riser_scsi::task::{TaskManagement, TmfResponse};

use super::action::Action;
use super::channel::{Channel, Cx};
use super::ioctx::IoctxState;
use crate::fabric::{TaskIdx, TaskRef, TmfOutcome, Unit};
use crate::pool::Pool;
use crate::warn_limited;

/// What ends tasks, and is answered when they are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// A task-management function.
    Function(TskMgmtFunction),
    /// A command with the tag of another one.
    Overlap,
}

/// A task-management function under way, or a command that has the effect of one.
#[derive(Debug)]
pub struct Mgmt {
    /// What it is.
    cause: Cause,
    /// The unit; none of an overlapped command for a unit that is not there.
    unit: Option<Arc<Unit>>,
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
        let present = self.config.luns.addressed(request.lun);
        let units = self.config.luns.with_former(request.lun);
        let Some(unit) = units.first() else {
            let code = RspCode::RequestFieldsInvalid;
            return self.answer_function(cx, idx, request.function, code);
        };
        let is_about_others = matches!(
            request.function,
            TskMgmtFunction::ClearTaskSet | TskMgmtFunction::LogicalUnitReset
        );
        if is_about_others && self.config.luns.is_read_only(request.lun) {
            let code = RspCode::TskMgmtFailed;
            return self.answer_function(cx, idx, request.function, code);
        }
        self.ioctx[usize::from(idx.0)].mgmt = Some(Mgmt {
            cause: Cause::Function(request.function),
            unit: Some(Arc::clone(unit)),
            waiting: 0,
        });
        let function = match request.function {
            TskMgmtFunction::AbortTask => {
                self.abort_tagged(cx, idx, request, &units);
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
        // Of a unit that the number led to before, they end what the initiator has sent there by it.
        let left = units.iter().skip(usize::from(present.is_some()));
        if let Some(lun) = LunId::addressed(request.lun)
            && function != TaskManagement::ClearAca
        {
            for unit in left {
                let managed = unit.abort_by_lun(self.config.nexus, lun);
                self.abort_managed(idx, managed);
            }
        }
        let Some(unit) = present else {
            return self.check_mgmt(cx, idx);
        };
        // What a function would do to others is meant for the unit before.
        let function = match is_about_others && self.config.luns.is_stale(request.lun) {
            true => TaskManagement::AbortTaskSet,
            false => function,
        };
        let managed = unit.manage(self.config.nexus, function);
        if managed.response == TmfResponse::Rejected {
            let code = RspCode::TskMgmtNotSupported;
            return self.answer_function(cx, idx, request.function, code);
        }
        self.abort_managed(idx, managed);
        if function == TaskManagement::LogicalUnitReset {
            self.actions.push_back(Action::Event {
                unit: unit.index,
                attention: Attention::DeviceReset,
            });
        }
        self.check_mgmt(cx, idx);
    }

    /// A command has the tag of one that is not answered yet, so an answer to either could be taken
    /// for the other's. All commands of the nexus in the unit's task set end without an answer, and so
    /// does the older one where it is for another unit (SAM-5 5.10).
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
        io.state = IoctxState::Mgmt;
        io.mgmt = Some(Mgmt {
            cause: Cause::Overlap,
            unit: unit.clone(),
            // The older one.
            waiting: 1,
        });
        if let Some(unit) = unit {
            let managed = unit.manage(self.config.nexus, TaskManagement::AbortTaskSet);
            self.abort_managed(idx, managed);
        }
        let watcher = self.task_ref(idx);
        self.abort_own(cx, older, watcher);
    }

    /// Has the tasks aborted that a function concerns.
    fn abort_managed(&mut self, idx: TaskIdx, managed: TmfOutcome) {
        let watcher = self.task_ref(idx);
        let mgmt = self.mgmt_mut(idx);
        mgmt.waiting += managed.aborted.len() as u32;
        let aborts = managed
            .aborted
            .into_iter()
            .map(|task| Action::AbortTask { task, watcher });
        self.actions.extend(aborts);
    }

    fn mgmt_mut(&mut self, idx: TaskIdx) -> &mut Mgmt {
        let io = &mut self.ioctx[usize::from(idx.0)];
        io.mgmt.as_mut().expect("a function runs")
    }

    /// Aborts the commands of this channel with the tag that ABORT TASK names.
    fn abort_tagged(
        &mut self,
        cx: &mut Cx<'_>,
        idx: TaskIdx,
        request: &TskMgmt,
        units: &[Arc<Unit>],
    ) {
        let watcher = self.task_ref(idx);
        for other in (0..self.config.params.req_lim as u16).map(TaskIdx) {
            let io = &self.ioctx[usize::from(other.0)];
            let named = io.tag == request.task_tag && io.exec.is_of_any(units);
            if named && other != idx && io.is_command() {
                self.mgmt_mut(idx).waiting += 1;
                self.abort_own(cx, other, watcher);
            }
        }
    }

    /// Answers a function when the tasks that it waits for are gone.
    fn check_mgmt(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let mgmt = self.mgmt_mut(idx);
        if mgmt.waiting > 0 {
            return;
        }
        let Cause::Function(function) = mgmt.cause else {
            return self.answer_overlapped(cx, idx);
        };
        self.answer_function(cx, idx, function, RspCode::Complete);
    }

    /// Answers a command with the tag of another one.
    fn answer_overlapped(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let io = &mut self.ioctx[usize::from(idx.0)];
        let mgmt = io.mgmt.take().expect("it waits for the others");
        let format = mgmt.unit.map(|unit| unit.lu.sense_format());
        let overlapped = AdditionalSense::OVERLAPPED_COMMANDS;
        let sense = Sense::new(SenseKey::AbortedCommand, overlapped);
        let format = format.unwrap_or(SenseFormat::Fixed);
        let response = Response::check_condition(&sense, format, io.exec.expected);
        io.state = IoctxState::New;
        self.respond(cx, idx, response);
    }

    /// Answers a function.
    fn answer_function(
        &mut self,
        cx: &mut Cx<'_>,
        idx: TaskIdx,
        function: TskMgmtFunction,
        code: RspCode,
    ) {
        self.functions.count((name_of(function), answer_of(code)));
        self.answer_code(cx, idx, code);
    }

    /// A task of this channel may start: those that held it back are gone.
    pub fn handle_task_start(&mut self, cx: &mut Cx<'_>, task: TaskRef) {
        let io = &self.ioctx[usize::from(task.index.0)];
        if io.generation == task.generation && io.state == IoctxState::AwaitTask {
            self.start(cx, task.index);
        }
        self.settle_round(cx);
    }

    /// Task management, here or on another channel, ends a task of this one.
    pub fn handle_abort(&mut self, cx: &mut Cx<'_>, task: TaskRef, watcher: TaskRef) {
        let io = &self.ioctx[usize::from(task.index.0)];
        if io.generation == task.generation && io.is_command() {
            self.abort(cx, task.index, watcher);
        } else {
            self.actions.push_back(Action::TaskGone(watcher));
        }
        self.settle_round(cx);
    }

    /// A task that a function of this channel waited for is gone.
    pub fn handle_task_gone(&mut self, cx: &mut Cx<'_>, watcher: TaskRef) {
        let io = &mut self.ioctx[usize::from(watcher.index.0)];
        if io.generation == watcher.generation
            && io.state == IoctxState::Mgmt
            && let Some(mgmt) = &mut io.mgmt
        {
            mgmt.waiting -= 1;
            self.check_mgmt(cx, watcher.index);
        }
        self.settle_round(cx);
    }

    /// Ends a command of this channel without an answer, since its own nexus asks for that.
    fn abort_own(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, watcher: TaskRef) {
        self.ioctx[usize::from(idx.0)].exec.renounce();
        self.abort(cx, idx, watcher);
    }

    /// Ends a command, at once or as soon as no device uses its buffers. It is answered if only another nexus
    /// has ended it.
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
                self.actions.push_back(Action::AbortBlock(idx));
            }
            // It was named while its answer waited, by a function that comes over another channel: the last of
            // its data may still be on their way. `finish` reports their end.
            IoctxState::CmdRspSent if is_elsewhere && io.exec.is_left_ended() => {}
            IoctxState::CmdRspSent => {
                // Its answer is on its way before ours: the task is gone for the initiator.
                io.exec.watchers.pop();
                self.actions.push_back(Action::TaskGone(watcher));
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
            IoctxState::AwaitLimit => self.throttle.remove(idx),
            IoctxState::AwaitBuffer => {
                self.pool_waiters.retain(|&w| w != idx);
                if self.pool_waiters.is_empty() {
                    pool.leave_line(self.owner());
                }
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
