//! Task-management functions, the same on every fabric (SAM-5 clause 7).
//!
//! A function concerns tasks that may belong to other connections, of other protocols, on other
//! workers. The unit's task set names them; their connections are asked to abort them
//! ([`TaskAction::AbortTask`]) and report back ([`TaskAction::TaskGone`]). The function is answered
//! when the last task is gone, so that no data are posted for a task that its initiator takes for
//! over. What was posted before, with the answer, on another connection may arrive after that.
//!
//! ```text
//!   request ─→ manage ─→ Effect ─→ AbortTask … ─→ TaskGone … ─→ PendingFunction::is_over ─→ answer
//!                └─→ refused: answer
//! ```

use riser_scsi::attention::Attention;
use riser_scsi::lun::LunId;
use riser_scsi::lun::WireLun;
use riser_scsi::nexus::NexusId;
use riser_scsi::task::TaskManagement;

use super::{LunMap, TaskAction, TaskRef, TmfOutcome, Unit, UnitIdx};

/// A function (SAM-5 clause 7, RFC 7143 11.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// ABORT TASK: one task, named by its tag.
    AbortTask,
    /// ABORT TASK SET: the tasks of the nexus.
    AbortTaskSet,
    /// CLEAR ACA. There is never an auto contingent allegiance.
    ClearAca,
    /// CLEAR TASK SET: the tasks of all nexuses.
    ClearTaskSet,
    /// LOGICAL UNIT RESET: the tasks of all nexuses, and the state of the unit.
    LogicalUnitReset,
    /// TARGET WARM RESET: a reset of every unit that the initiator may reset.
    TargetWarmReset,
    /// TARGET COLD RESET, which is not supported.
    TargetColdReset,
    /// TASK REASSIGN, which connections of iSCSI carry out themselves.
    TaskReassign,
    /// QUERY TASK: looks for one task.
    QueryTask,
    /// QUERY TASK SET: looks for any task of the nexus.
    QueryTaskSet,
    /// I_T NEXUS RESET: the tasks of the nexus at all of its units. The session ends with it.
    NexusReset,
    /// QUERY ASYNCHRONOUS EVENT, which never finds one.
    QueryAsyncEvent,
    /// A code that names none of these.
    Unknown,
}

impl Function {
    /// Returns its name, as a label.
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

    /// Returns whether it ends tasks of other nexuses.
    fn ends_others(self) -> bool {
        matches!(self, Self::ClearTaskSet | Self::LogicalUnitReset)
    }
}

/// The answer to a function (SAM-5 7.1, RFC 7143 11.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FunctionAnswer {
    /// FUNCTION COMPLETE: it was carried out, or a query has found nothing.
    Complete,
    /// FUNCTION SUCCEEDED: what a query asks for is there.
    Succeeded,
    /// The task does not exist.
    NoSuchTask,
    /// INCORRECT LOGICAL UNIT NUMBER.
    NoSuchLun,
    /// The task is still allegiant to its connection.
    StillAllegiant,
    /// Tasks cannot be reassigned.
    ReassignmentNotSupported,
    /// The function is not supported.
    NotSupported,
    /// The initiator may not do that.
    NotAuthorized,
    /// FUNCTION REJECTED: there is no context for it.
    Rejected,
}

impl FunctionAnswer {
    /// Returns its name, as a label.
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

/// Effect of a function: tasks to abort, and units that were reset.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Effect {
    aborted: Vec<TaskRef>,
    reset: Vec<UnitIdx>,
}

impl Effect {
    /// Carries out a function on one unit.
    fn manage(&mut self, unit: &Unit, nexus: NexusId, function: TaskManagement) {
        let TmfOutcome { aborted, .. } = unit.manage(nexus, function);
        self.aborted.extend(aborted);
        if function == TaskManagement::LogicalUnitReset {
            self.reset.push(unit.index);
        }
    }

    /// Returns the number of tasks that it ends.
    #[must_use]
    pub fn tasks(&self) -> u32 {
        self.aborted.len() as u32
    }

    /// Returns the requests to the worker. The function that waits for the tasks is `watcher`.
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

/// Carries out a function of a nexus that names no task, for the unit that `lun` addresses or for
/// all of its units.
///
/// # Errors
/// The answer that refuses it.
pub fn manage(
    function: Function,
    lun: WireLun,
    luns: &LunMap,
    nexus: NexusId,
) -> Result<Effect, FunctionAnswer> {
    match function {
        // An unknown function may concern no unit at all. A cold reset is optional, and would end
        // the sessions of all initiators (RFC 7143 11.5.1): a host must not do that to others. LIO
        // rejects it, too.
        Function::Unknown | Function::TargetColdReset => Err(FunctionAnswer::NotSupported),
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

/// Resets all units. A reset ends commands of others, so units are left out that the initiator may
/// not write to, or may take for other ones.
fn reset_target(luns: &LunMap, nexus: NexusId) -> Result<Effect, FunctionAnswer> {
    let units = luns.resettable();
    if units.is_empty() {
        return Err(FunctionAnswer::NotAuthorized);
    }
    let mut effect = Effect::default();
    for unit in &units {
        effect.manage(unit, nexus, TaskManagement::LogicalUnitReset);
    }
    Ok(effect)
}

/// Carries out a function for one LUN: on the unit that it leads to, and on those that it led to
/// before. There only the initiator's own tasks end, as far as it has sent them to this LUN.
fn manage_unit(
    function: Function,
    lun: WireLun,
    luns: &LunMap,
    nexus: NexusId,
) -> Result<Effect, FunctionAnswer> {
    let present = luns.addressed(lun);
    if present.is_none() && luns.former(lun).next().is_none() {
        return Err(FunctionAnswer::NoSuchLun);
    }
    if function.ends_others() && luns.is_read_only(lun) {
        return Err(FunctionAnswer::NotAuthorized);
    }
    let of_unit = match function {
        Function::AbortTaskSet => TaskManagement::AbortTaskSet,
        // An initiator that takes the LUN for another unit means the tasks there.
        _ if function.ends_others() && luns.is_stale(lun) => TaskManagement::AbortTaskSet,
        Function::ClearTaskSet => TaskManagement::ClearTaskSet,
        Function::LogicalUnitReset => TaskManagement::LogicalUnitReset,
        _ => return Err(FunctionAnswer::NotSupported),
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

/// A function under way. It is answered when all tasks that it ends are gone.
#[derive(Debug)]
pub struct PendingFunction<F> {
    /// Function, or other cause, that waits.
    pub function: F,
    /// Tasks that are not gone yet.
    waiting: u32,
}

impl<F> PendingFunction<F> {
    /// A function that waits for no task yet.
    #[must_use]
    pub fn new(function: F) -> Self {
        Self {
            function,
            waiting: 0,
        }
    }

    /// Waits for more tasks.
    pub fn await_tasks(&mut self, tasks: u32) {
        self.waiting += tasks;
    }

    /// A task is gone.
    pub fn on_task_gone(&mut self) {
        self.waiting -= 1;
    }

    /// Whether no task is left.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.waiting == 0
    }
}
