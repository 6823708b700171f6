//! Requests of connections to their worker.

use riser_scsi::attention::Attention;
use riser_scsi::step::BlockOp;

use super::{TaskIdx, TaskRef, UnitIdx};

/// A request of a connection to its worker on behalf of a command or a task-management function,
/// the same on every fabric. Each fabric adds requests of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TaskAction {
    /// Start a block operation; when it ends, call the connection's `handle_block_done`.
    SubmitBlock {
        /// Context of the command at its connection.
        task: TaskIdx,
        /// Unit whose backend carries it out.
        unit: UnitIdx,
        /// Operation, without its data.
        op: BlockOp,
    },
    /// Try to end a block operation early. It still ends with `handle_block_done`.
    AbortBlock(TaskIdx),
    /// Notify a task's connection that it may start: `handle_task_start`.
    StartTask(TaskRef),
    /// Have a task's connection abort it: `handle_abort`.
    AbortTask {
        /// Name of the task, on any worker.
        task: TaskRef,
        /// The function that waits for its end.
        watcher: TaskRef,
    },
    /// Notify a function that a task it waited for is gone: `handle_task_gone`.
    TaskGone(TaskRef),
    /// Notify the connections of all workers of an event at a unit: `handle_event`.
    UnitEvent {
        /// Unit that it has happened to.
        unit: UnitIdx,
        /// Event, as a unit attention.
        attention: Attention,
    },
}
