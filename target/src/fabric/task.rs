//! Identifiers of connections and tasks.

use riser_scsi::task::TaskTag;

/// Context number on a connection, for a command, a task management function, or a message from the
/// target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskIdx(pub u16);

/// Identifies a connection on any worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnRef {
    /// Worker number.
    pub worker: u16,
    /// Serial number of the connection on this worker. Serial numbers are never reused.
    pub serial: u64,
}

/// Identifies a task on any worker: worker, connection, context, and context generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskRef {
    /// Worker number.
    pub worker: u16,
    /// Serial number of the connection on this worker. Serial numbers are never reused.
    pub channel: u64,
    /// Context of the task on this connection.
    pub index: TaskIdx,
    /// Counts the uses of the context.
    pub generation: u32,
}

impl TaskRef {
    /// Returns the connection of the task.
    #[must_use]
    pub fn conn(self) -> ConnRef {
        ConnRef {
            worker: self.worker,
            serial: self.channel,
        }
    }

    /// Returns the tag for the unit's task set. It contains all fields, so it is unique. Tags of
    /// the fabric cannot be used: SRP tags are only unique within a channel, and a nexus can have
    /// channels on several workers.
    pub(super) fn tag(self) -> TaskTag {
        TaskTag(
            u128::from(self.worker) << 112
                | u128::from(self.channel) << 48
                | u128::from(self.generation) << 16
                | u128::from(self.index.0),
        )
    }
}
