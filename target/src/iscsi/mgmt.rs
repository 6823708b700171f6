//! Task management, and what it does to commands.
//!
//! Functions concern tasks that may belong to other channels, of other protocols, on other workers:
//! the unit's task set names them, their channels are told ([`Action::AbortTask`]) and report back
//! ([`Action::TaskGone`]). The function is answered when the last task is gone.

use std::sync::Arc;

use riser_scsi::attention::Attention;
use riser_scsi::iscsi::Itt;
use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{
    FromTarget, RejectReason, TmfFunction, TmfRequest, TmfResponse, TmfStatus,
};
use riser_scsi::lun::LunId;
use riser_scsi::task::TaskManagement;

use super::channel::{Action, Channel, Cx};
use super::datamover::{Control, Datamover};
use super::task::TaskState;
use crate::fabric::{TaskIdx, TaskRef, TmfOutcome, Unit};

/// A task-management function under way.
#[derive(Debug)]
pub(super) struct Mgmt {
    /// What it is.
    function: TmfFunction,
    /// Tasks not yet gone.
    waiting: u32,
}

impl Mgmt {
    fn new(function: TmfFunction) -> Self {
        Self {
            function,
            waiting: 0,
        }
    }
}

impl<D: Datamover> Channel<D> {
    pub(super) fn on_tmf(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, request: &TmfRequest) {
        if request.itt == Itt::NONE || self.find(request.itt).is_some() {
            return self.reject(
                cx,
                frame,
                RejectReason::TaskInProgress,
                &"the tag is in use",
            );
        }
        let taken = self.take_in(request.itt, request.immediate, TaskState::Mgmt);
        let Some(idx) = taken else {
            if request.immediate {
                return self.reject(cx, frame, RejectReason::TooManyImmediate, &"functions");
            }
            let answer = TmfResponse {
                itt: request.itt,
                status: TmfStatus::Rejected,
            };
            return self.send(FromTarget::TmfResponse(answer), Vec::new(), true);
        };
        self.counters.task_management += 1;
        self.tasks[usize::from(idx.0)].mgmt = Some(Mgmt::new(request.function));
        if request.function == TmfFunction::TaskReassign {
            return self.on_task_reassign(idx, request);
        }
        match self.carry_out(cx, idx, request) {
            Some(status) => self.answer_tmf(idx, status),
            None => self.check_mgmt(idx),
        }
    }

    /// Begins a function; its answer, if it is known at once.
    fn carry_out(
        &mut self,
        cx: &mut Cx<'_>,
        idx: TaskIdx,
        request: &TmfRequest,
    ) -> Option<TmfStatus> {
        let session = self.session.as_ref().expect("full-feature phase");
        let present = session.luns.addressed(request.lun);
        let units = session.luns.with_former(request.lun);
        let is_moved = session.luns.is_stale(request.lun);
        let whole_target = match request.function {
            TmfFunction::TargetWarmReset | TmfFunction::TargetColdReset => {
                Some(TaskManagement::LogicalUnitReset)
            }
            TmfFunction::NexusReset => Some(TaskManagement::NexusReset),
            TmfFunction::Other(_) => return Some(TmfStatus::NotSupported),
            _ => None,
        };
        if let Some(function) = whole_target {
            // A reset ends commands of others, which a host must not do that may not write, or that may mean
            // another unit.
            let is_reset = function == TaskManagement::LogicalUnitReset;
            let units: Vec<_> = match is_reset {
                true => session.luns.resettable(),
                false => session.luns.iter().map(|(_, u)| Arc::clone(u)).collect(),
            };
            if units.is_empty() && is_reset {
                return Some(TmfStatus::AuthorizationFailed);
            }
            units
                .iter()
                .for_each(|unit| self.manage(idx, unit, function));
            return None;
        }
        let Some(unit) = units.first() else {
            return Some(TmfStatus::LunDoesNotExist);
        };
        let is_about_others = matches!(
            request.function,
            TmfFunction::ClearTaskSet | TmfFunction::LogicalUnitReset
        );
        if is_about_others && session.luns.is_read_only(request.lun) {
            return Some(TmfStatus::AuthorizationFailed);
        }
        let function = match request.function {
            TmfFunction::AbortTask => {
                let Some(task) = self.find_command(request.referenced, &units) else {
                    let answer = self.abort_elsewhere(idx, request);
                    unit.count_abort(answer.is_none());
                    return answer;
                };
                unit.count_abort(true);
                self.mgmt_mut(idx).waiting += 1;
                let watcher = self.task_ref(idx);
                self.abort(cx.pool, task, Some(watcher));
                return None;
            }
            TmfFunction::QueryTask => {
                let found = self.find_command(request.referenced, &units);
                let elsewhere = self.window().tagged(request.referenced);
                return Some(presence(found.is_some() || elsewhere.is_some()));
            }
            TmfFunction::QueryTaskSet => {
                let mut tasks = self.tasks.iter();
                let any = tasks.any(|task| task.is_command() && task.exec.is_of_any(&units));
                return Some(presence(any));
            }
            TmfFunction::QueryAsyncEvent => return Some(TmfStatus::Complete),
            TmfFunction::AbortTaskSet => TaskManagement::AbortTaskSet,
            TmfFunction::ClearTaskSet => TaskManagement::ClearTaskSet,
            TmfFunction::LogicalUnitReset => TaskManagement::LogicalUnitReset,
            // There is never an auto contingent allegiance.
            _ => return Some(TmfStatus::NotSupported),
        };
        // Of a unit that the number led to before, they end what the initiator has sent there by it.
        let left = units.iter().skip(usize::from(present.is_some()));
        let nexus = session.nexus;
        if let Some(lun) = LunId::addressed(request.lun) {
            for unit in left {
                self.await_aborted(idx, unit.abort_by_lun(nexus, lun));
            }
        }
        if let Some(unit) = present {
            // What a function would do to others is meant for the unit before.
            let function = match is_moved {
                true => TaskManagement::AbortTaskSet,
                false => function,
            };
            self.manage(idx, &unit, function);
        }
        None
    }

    /// ABORT TASK of a command that is none of this connection: it may be one of another, or on its
    /// way still.
    fn abort_elsewhere(&mut self, idx: TaskIdx, request: &TmfRequest) -> Option<TmfStatus> {
        let window = self.window();
        if let Some(task) = window.abort_tag(request.referenced) {
            self.mgmt_mut(idx).waiting += 1;
            let watcher = self.task_ref(idx);
            self.actions.push_back(Action::AbortTask { task, watcher });
            return None;
        }
        Some(if window.forgo(request.ref_cmd_sn, request.cmd_sn) {
            TmfStatus::Complete
        } else {
            TmfStatus::TaskDoesNotExist
        })
    }

    fn find_command(&self, itt: Itt, units: &[Arc<Unit>]) -> Option<TaskIdx> {
        self.find(itt).filter(|idx| {
            let task = &self.tasks[usize::from(idx.0)];
            task.exec.is_of_any(units) && task.is_command()
        })
    }

    fn manage(&mut self, idx: TaskIdx, unit: &Arc<Unit>, function: TaskManagement) {
        let session = self.session.as_ref().expect("full-feature phase");
        let managed = unit.manage(session.nexus, function);
        if function == TaskManagement::LogicalUnitReset {
            self.actions.push_back(Action::Event {
                unit: unit.index,
                attention: Attention::DeviceReset,
            });
        }
        self.await_aborted(idx, managed);
    }

    /// Has the tasks aborted that a function concerns, which waits for them.
    fn await_aborted(&mut self, idx: TaskIdx, managed: TmfOutcome) {
        let watcher = self.task_ref(idx);
        self.mgmt_mut(idx).waiting += managed.aborted.len() as u32;
        let aborts = managed
            .aborted
            .into_iter()
            .map(|task| Action::AbortTask { task, watcher });
        self.actions.extend(aborts);
    }

    fn mgmt_mut(&mut self, idx: TaskIdx) -> &mut Mgmt {
        let task = &mut self.tasks[usize::from(idx.0)];
        task.mgmt.as_mut().expect("a function runs")
    }

    /// Answers a function when the tasks that it waits for are gone.
    fn check_mgmt(&mut self, idx: TaskIdx) {
        let mgmt = self.mgmt_mut(idx);
        if mgmt.waiting > 0 {
            return;
        }
        self.answer_tmf(idx, TmfStatus::Complete);
    }

    pub(super) fn answer_tmf(&mut self, idx: TaskIdx, status: TmfStatus) {
        let function = self.mgmt_mut(idx).function;
        self.functions.count((name_of(function), answer_of(status)));
        self.mark_sent(idx);
        let task = &self.tasks[usize::from(idx.0)];
        self.mover.send_control(Control {
            pdu: FromTarget::TmfResponse(TmfResponse {
                itt: task.itt,
                status,
            }),
            data: Vec::new(),
            counts: true,
            ends: Some(idx),
        });
    }

    /// A task of this channel may start: those that held it back are gone.
    pub fn handle_task_start(&mut self, cx: &mut Cx<'_>, name: TaskRef) {
        let idx = name.index;
        let task = &self.tasks[usize::from(idx.0)];
        if task.generation == name.generation && task.state == TaskState::AwaitTask {
            self.start(cx, idx);
        }
        self.settle(cx);
    }

    /// Task management, here or on another channel, ends a task of this one.
    pub fn handle_abort(&mut self, cx: &mut Cx<'_>, name: TaskRef, watcher: TaskRef) {
        let idx = name.index;
        if let Some(task) = self.allegiance.moved(name) {
            self.actions.push_back(Action::AbortTask { task, watcher });
        } else if self.tasks[usize::from(idx.0)].generation == name.generation {
            self.end_managed(cx, idx, watcher);
        } else {
            self.actions.push_back(Action::TaskGone(watcher));
        }
        self.settle(cx);
    }

    /// A task that a function of this channel waited for is gone.
    pub fn handle_task_gone(&mut self, cx: &mut Cx<'_>, watcher: TaskRef) {
        let idx = watcher.index;
        let task = &mut self.tasks[usize::from(idx.0)];
        if task.generation == watcher.generation
            && task.state == TaskState::Mgmt
            && let Some(mgmt) = &mut task.mgmt
        {
            mgmt.waiting -= 1;
            self.check_mgmt(idx);
        }
        self.settle(cx);
    }
}

fn presence(is_there: bool) -> TmfStatus {
    if is_there {
        TmfStatus::Succeeded
    } else {
        TmfStatus::Complete
    }
}

/// A function, as a label.
fn name_of(function: TmfFunction) -> &'static str {
    match function {
        TmfFunction::AbortTask => "abort_task",
        TmfFunction::AbortTaskSet => "abort_task_set",
        TmfFunction::ClearAca => "clear_aca",
        TmfFunction::ClearTaskSet => "clear_task_set",
        TmfFunction::LogicalUnitReset => "logical_unit_reset",
        TmfFunction::TargetWarmReset => "target_warm_reset",
        TmfFunction::TargetColdReset => "target_cold_reset",
        TmfFunction::TaskReassign => "task_reassign",
        TmfFunction::QueryTask => "query_task",
        TmfFunction::QueryTaskSet => "query_task_set",
        TmfFunction::NexusReset => "nexus_reset",
        TmfFunction::QueryAsyncEvent => "query_async_event",
        TmfFunction::Other(_) => "unknown",
    }
}

/// The answer to one, as a label.
fn answer_of(status: TmfStatus) -> &'static str {
    match status {
        TmfStatus::Complete => "complete",
        TmfStatus::Succeeded => "succeeded",
        TmfStatus::TaskDoesNotExist => "no_such_task",
        TmfStatus::LunDoesNotExist => "no_such_lun",
        TmfStatus::TaskStillAllegiant => "still_allegiant",
        TmfStatus::ReassignmentNotSupported => "reassignment_not_supported",
        TmfStatus::NotSupported => "not_supported",
        TmfStatus::AuthorizationFailed => "not_authorized",
        TmfStatus::Rejected => "rejected",
    }
}
