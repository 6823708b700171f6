//! Names of connections and tasks.

use riser_scsi::task::TaskTag;

/// Number of a connection's context: of a command, a task-management function, or a message of the
/// target's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskIdx(pub u16);

/// A connection's name on all workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnRef {
    /// Number of the worker.
    pub worker: u16,
    /// Serial number of the connection at that worker, never used again.
    pub serial: u64,
}

/// A task's name on all workers: worker, connection, context, and the context's use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskRef {
    /// Number of the worker.
    pub worker: u16,
    /// Serial number of the connection at that worker, never used again.
    pub channel: u64,
    /// Place of its context at that connection.
    pub index: TaskIdx,
    /// Counts the uses of the context.
    pub generation: u32,
}

impl TaskRef {
    /// Returns the name of the task's connection.
    #[must_use]
    pub fn conn(self) -> ConnRef {
        ConnRef {
            worker: self.worker,
            serial: self.channel,
        }
    }

    /// Returns the tag under which the task is in its unit's task set: the whole name, which no
    /// other task has. A fabric's own tags do not do: SRP's are unique on their channel only, and
    /// a nexus may have channels at several workers.
    pub(super) fn tag(self) -> TaskTag {
        TaskTag(
            u128::from(self.worker) << 112
                | u128::from(self.channel) << 48
                | u128::from(self.generation) << 16
                | u128::from(self.index.0),
        )
    }
}
