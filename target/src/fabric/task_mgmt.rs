//! Task management functions, the same for all fabrics (SAM-5 clause 7).
//!
//! A function can affect tasks of other connections, protocols and workers. The task set of the
//! unit identifies these tasks. Their connections are requested to abort them
//! ([`TaskAction::AbortTask`]) and respond when this is done ([`TaskAction::TaskGone`]). The
//! response to the function is sent after the last task has completed, so that no data is posted
//! for a task that the initiator considers complete. Data posted before this on another connection,
//! and its response, may still arrive later.
//!
//! ```text
//!   request ─→ manage ─→ Effect ─→ AbortTask … ─→ TaskGone … ─→ PendingFunction::is_over ─→ respond
//!                └─→ refused: respond
//! ```

use riser_scsi::attention::Attention;
use riser_scsi::lun::LunId;
use riser_scsi::lun::WireLun;
use riser_scsi::nexus::NexusId;
use riser_scsi::task::TaskManagement;

use super::{LunMap, TaskAction, TaskRef, TmfOutcome, Unit, UnitIdx};

/// Task management function (SAM-5 clause 7, RFC 7143 11.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// ABORT TASK: abort the task with this tag.
    AbortTask,
    /// ABORT TASK SET: abort all tasks of the nexus.
    AbortTaskSet,
    /// CLEAR ACA. An auto contingent allegiance is never established.
    ClearAca,
    /// CLEAR TASK SET: abort the tasks of all nexuses.
    ClearTaskSet,
    /// LOGICAL UNIT RESET: abort the tasks of all nexuses and reset the unit.
    LogicalUnitReset,
    /// TARGET WARM RESET: reset all units that the initiator may reset.
    TargetWarmReset,
    /// TARGET COLD RESET, which is not supported.
    TargetColdReset,
    /// TASK REASSIGN, handled by iSCSI connections.
    TaskReassign,
    /// QUERY TASK: check for a specific task.
    QueryTask,
    /// QUERY TASK SET: check for any task of the nexus.
    QueryTaskSet,
    /// I_T NEXUS RESET: abort the tasks of the nexus on all its units. This closes the session.
    NexusReset,
    /// QUERY ASYNCHRONOUS EVENT, which never reports an event.
    QueryAsyncEvent,
    /// Unknown function code.
    Unknown,
}

impl Function {
    /// Returns the name, to be used as a label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::AbortTask => "abort_task",
            Self::AbortTaskSet => "abort_task_set",
            Self::ClearAca => "clear_aca",
            Self::ClearTaskSet => "clear_task_set",
            Self::LogicalUnitReset => "logical_unit_reset",
            Self::TargetWarmReset => "target_warm_reset",
            Self::TargetColdReset => "target_cold_reset",
            Self::TaskReassign => "task_reassign",
            Self::QueryTask => "query_task",
            Self::QueryTaskSet => "query_task_set",
            Self::NexusReset => "nexus_reset",
            Self::QueryAsyncEvent => "query_async_event",
            Self::Unknown => "unknown",
        }
    }

    /// Returns whether this aborts tasks of other nexuses.
    fn ends_others(self) -> bool {
        matches!(self, Self::ClearTaskSet | Self::LogicalUnitReset)
    }
}

/// Response to a function (SAM-5 7.1, RFC 7143 11.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FunctionResponse {
    /// FUNCTION COMPLETE: the function was executed, or a query did not find a task.
    Complete,
    /// FUNCTION SUCCEEDED: a query has found a task.
    Succeeded,
    /// The task does not exist.
    NoSuchTask,
    /// INCORRECT LOGICAL UNIT NUMBER.
    NoSuchLun,
    /// The task is still allegiant to its connection.
    StillAllegiant,
    /// Task reassignment is not supported.
    ReassignmentNotSupported,
    /// The function is not supported.
    NotSupported,
    /// The initiator is not authorized for this function.
    NotAuthorized,
    /// FUNCTION REJECTED: no context is available.
    Rejected,
}

impl FunctionResponse {
    /// Returns the name, to be used as a label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Succeeded => "succeeded",
            Self::NoSuchTask => "no_such_task",
            Self::NoSuchLun => "no_such_lun",
            Self::StillAllegiant => "still_allegiant",
            Self::ReassignmentNotSupported => "reassignment_not_supported",
            Self::NotSupported => "not_supported",
            Self::NotAuthorized => "not_authorized",
            Self::Rejected => "rejected",
        }
    }
}

/// Result of a function: tasks to abort, and units that were reset.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Effect {
    aborted: Vec<TaskRef>,
    reset: Vec<UnitIdx>,
}

impl Effect {
    /// Executes a function on a single unit.
    fn manage(&mut self, unit: &Unit, nexus: NexusId, function: TaskManagement) {
        let TmfOutcome { aborted, .. } = unit.manage(nexus, function);
        self.aborted.extend(aborted);
        if function == TaskManagement::LogicalUnitReset {
            self.reset.push(unit.index);
        }
    }

    /// Returns the number of tasks to abort.
    #[must_use]
    pub fn tasks(&self) -> u32 {
        self.aborted.len() as u32
    }

    /// Returns the requests to the worker. `watcher` is the function that waits for the tasks.
    pub fn into_actions(self, watcher: TaskRef) -> impl Iterator<Item = TaskAction> {
        let aborts = self.aborted.into_iter();
        let aborts = aborts.map(move |task| TaskAction::AbortTask { task, watcher });
        let events = self.reset.into_iter().map(|unit| TaskAction::UnitEvent {
            unit,
            attention: Attention::DeviceReset,
        });
        aborts.chain(events)
    }
}

impl From<TmfOutcome> for Effect {
    fn from(outcome: TmfOutcome) -> Self {
        Self {
            aborted: outcome.aborted,
            reset: Vec::new(),
        }
    }
}

/// Executes a function of a nexus that does not specify a task, for the unit addressed by `lun` or
/// for all units.
///
/// # Errors
/// Returns the response if the function is refused.
pub fn manage(
    function: Function,
    lun: WireLun,
    luns: &LunMap,
    nexus: NexusId,
) -> Result<Effect, FunctionResponse> {
    match function {
        // An unknown function may not refer to a unit. A cold reset is optional and would close the
        // sessions of all initiators (RFC 7143 11.5.1), which must not be possible for a single
        // host. LIO rejects it as well.
        Function::Unknown | Function::TargetColdReset => Err(FunctionResponse::NotSupported),
        Function::TargetWarmReset => reset_target(luns, nexus),
        Function::NexusReset => {
            let mut effect = Effect::default();
            for (_, unit) in luns.iter() {
                effect.manage(unit, nexus, TaskManagement::NexusReset);
            }
            Ok(effect)
        }
        _ => manage_unit(function, lun, luns, nexus),
    }
}

/// Resets all units. A reset aborts commands of other initiators, so units are excluded if the
/// initiator does not have write access or may expect a different unit.
fn reset_target(luns: &LunMap, nexus: NexusId) -> Result<Effect, FunctionResponse> {
    let units = luns.resettable();
    if units.is_empty() {
        return Err(FunctionResponse::NotAuthorized);
    }
    let mut effect = Effect::default();
    for unit in &units {
        effect.manage(unit, nexus, TaskManagement::LogicalUnitReset);
    }
    Ok(effect)
}

/// Executes a function for a LUN, on the unit mapped to it and on its former units. On former
/// units, this only aborts tasks of this initiator that were sent to this LUN.
fn manage_unit(
    function: Function,
    lun: WireLun,
    luns: &LunMap,
    nexus: NexusId,
) -> Result<Effect, FunctionResponse> {
    let present = luns.addressed(lun);
    if present.is_none() && luns.former(lun).next().is_none() {
        return Err(FunctionResponse::NoSuchLun);
    }
    if function.ends_others() && luns.is_read_only(lun) {
        return Err(FunctionResponse::NotAuthorized);
    }
    let of_unit = match function {
        Function::AbortTaskSet => TaskManagement::AbortTaskSet,
        // An initiator that expects a different unit at this LUN refers to the tasks on that unit.
        _ if function.ends_others() && luns.is_stale(lun) => TaskManagement::AbortTaskSet,
        Function::ClearTaskSet => TaskManagement::ClearTaskSet,
        Function::LogicalUnitReset => TaskManagement::LogicalUnitReset,
        _ => return Err(FunctionResponse::NotSupported),
    };
    let mut effect = Effect::default();
    if let Some(number) = LunId::addressed(lun) {
        for unit in luns.former(lun) {
            effect
                .aborted
                .extend(unit.abort_by_lun(nexus, number).aborted);
        }
    }
    if let Some(unit) = present {
        effect.manage(&unit, nexus, of_unit);
    }
    Ok(effect)
}

/// A pending function. The response is sent when all aborted tasks have completed.
#[derive(Debug)]
pub struct PendingFunction<F> {
    /// Pending function, or another reason to abort tasks.
    pub function: F,
    /// Number of tasks not completed yet.
    waiting: u32,
}

impl<F> PendingFunction<F> {
    /// Creates a pending function that does not wait for any tasks yet.
    #[must_use]
    pub fn new(function: F) -> Self {
        Self {
            function,
            waiting: 0,
        }
    }

    /// Waits for additional tasks.
    pub fn await_tasks(&mut self, tasks: u32) {
        self.waiting += tasks;
    }

    /// Called when a task has completed.
    pub fn on_task_gone(&mut self) {
        self.waiting -= 1;
    }

    /// Returns whether all tasks have completed.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.waiting == 0
    }
}
