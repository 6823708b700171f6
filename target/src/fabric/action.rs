//! Requests from connections to their worker.

use riser_scsi::attention::Attention;
use riser_scsi::step::BlockOp;

use super::{TaskIdx, TaskRef, UnitIdx};

/// A request from a connection to its worker, for a command or a task management function. These
/// requests are the same for all fabrics, and each fabric defines additional ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TaskAction {
    /// Start a block operation, and call `handle_block_done` of the connection when it completes.
    SubmitBlock {
        /// Context of the command on its connection.
        task: TaskIdx,
        /// Unit with the backend that executes the operation.
        unit: UnitIdx,
        /// Operation, without its data.
        op: BlockOp,
    },
    /// Try to abort a block operation. `handle_block_done` is called in any case.
    AbortBlock(TaskIdx),
    /// Notify the connection of a task that the task may start: `handle_task_start`.
    StartTask(TaskRef),
    /// Request the connection of a task to abort it: `handle_abort`.
    AbortTask {
        /// Task on any worker.
        task: TaskRef,
        /// Function that waits for the task to complete.
        watcher: TaskRef,
    },
    /// Notify a function that a task it was waiting for has completed: `handle_task_gone`.
    TaskGone(TaskRef),
    /// Notify the connections of all workers of a unit event: `handle_event`.
    UnitEvent {
        /// Unit with the event.
        unit: UnitIdx,
        /// Event, as a unit attention.
        attention: Attention,
    },
}
