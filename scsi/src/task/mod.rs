//! Task sets: keep track of commands in flight, the order in which they may start, and the effects
//! of task management (SAM-5 chapters 7 and 8).
//!
//! ```text
//!   register -> Arriving -data_arrived-> (Held) -> Dormant -> (Blocked) -> Enabled
//!                  |                       |          |           |           |
//!                  +-----------------------+- manage: Aborted ----+-----------+
//!                                                     |
//!                                                   remove
//! ```
//!
//! A [`TaskSet`] never aborts a task. For task management, it marks and returns the tasks, and the
//! caller then has to stop and remove each of them before it sends the response to the function.
//! TAS is set (SPC-4 7.5.8): if a task was aborted by another nexus, it should be completed with
//! TASK ABORTED status. If it was aborted by its own nexus, no status is sent.
//!
//! # Order
//!
//! The order is based on QUEUE ALGORITHM MODIFIER 1 (unrestricted reordering) in our Control mode
//! page: SIMPLE commands can start immediately unless there is an older HEAD OF QUEUE or ORDERED
//! command in the set. HEAD OF QUEUE commands always start immediately.
//!
//! There is one difference to the task attributes in SAM-5 chapter 8: there, a dormant SIMPLE or
//! ORDERED command has to wait until there is no HEAD OF QUEUE command in the set, even a newer
//! one. Because all initiators share a single set (TST is zero), an initiator which always has a
//! HEAD OF QUEUE command in flight would then block all other initiators. We only wait for older
//! HEAD OF QUEUE commands, and the number of these is limited. If a command was already waiting
//! when a HEAD OF QUEUE command was received, it may therefore start before this has completed.
//! Newer commands will wait, as in SAM-5.
//!
//! While a command is waiting for Data-Out, it can be found and aborted, but it's only ordered
//! against commands from the same nexus. Newer commands will wait for it (`Held`) if this is
//! required by one of their attributes. For any other nexus, the command is only ordered when its
//! data has been received. This means that each initiator will see its own commands in the order in
//! which they were sent, but cannot block other initiators by sending a command without the data.
//!
//! If Data-Out is received in pieces, the command is ordered after the first piece. The task then
//! keeps its position and its blocks until it is removed.
//!
//! # Blocks
//!
//! If a command reads blocks and then updates them based on the data ([`Footprint::Atomic`]), it
//! has to wait until no older command will change these blocks, and newer commands that change them
//! have to wait for it (`Blocked`). Commands for other blocks can run at the same time.
//!
//! # Bounds
//!
//! The set has a fixed capacity. It takes constant time to register, start or remove a task, except
//! that an atomic command needs to check all commands in flight that change the medium.

mod entry;
mod list;
mod set;

pub use set::TaskSet;

use crate::step::TaskAttribute;

/// A command identifier, which is unique per nexus. This has enough bits for the caller to extend a
/// transport tag if these tags are only unique within some smaller context.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TaskTag(pub u128);

/// A range of logical blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Blocks {
    /// LBA of the first block.
    pub first: u64,
    /// The LBA after the last block.
    pub end: u64,
}

impl Blocks {
    /// The entire medium, for any capacity.
    pub const ALL: Self = Self {
        first: 0,
        end: u64::MAX,
    };

    fn overlaps(self, other: Self) -> bool {
        self.first < other.end && other.first < self.end
    }
}

/// Blocks on the medium that are changed by a command.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Footprint {
    /// No blocks are changed.
    #[default]
    None,
    /// These blocks are changed.
    Writes(Blocks),
    /// These blocks are changed based on the data that was read from them, so no other command may
    /// change them at the same time.
    Atomic(Blocks),
}

impl Footprint {
    fn blocks(self) -> Option<Blocks> {
        match self {
            Self::None => None,
            Self::Writes(blocks) | Self::Atomic(blocks) => Some(blocks),
        }
    }

    fn is_atomic(self) -> bool {
        matches!(self, Self::Atomic(_))
    }
}

/// A command to be added to a [`TaskSet`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NewTask {
    /// Task attribute of the command.
    pub attribute: TaskAttribute,
    /// Blocks on the medium that will be changed.
    pub footprint: Footprint,
    /// Set when [`TaskSet::data_arrived`] will be called when Data-Out has been received.
    pub awaits_data: bool,
}

/// Identifies a task in a [`TaskSet`]. The key is never reused for another task in this set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TaskKey {
    slot: u32,
    id: u64,
}

impl TaskKey {
    /// Returns the slot for this task, which is less than the capacity of the set. It can be used
    /// as an index for data that the caller needs to store for the task.
    #[must_use]
    pub fn slot(self) -> usize {
        self.slot as usize
    }
}

/// The reason why a task could not be added to the set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RegisterError {
    /// The nexus is already using this tag for another task (SAM-5 5.10). The caller must abort
    /// this and all other tasks of the nexus.
    #[error("task tag is already in use")]
    Overlapped(TaskKey),
    /// The set is full, or there are too many tasks for this nexus: return TASK SET FULL status.
    #[error("task set is full")]
    Full,
}

/// A task management function.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TaskManagement {
    /// ABORT TASK, for the task with the given tag.
    AbortTask(TaskTag),
    /// ABORT TASK SET, for all tasks of this nexus.
    AbortTaskSet,
    /// CLEAR TASK SET, for all tasks of any nexus.
    ClearTaskSet,
    /// LOGICAL UNIT RESET, for all tasks of any nexus.
    LogicalUnitReset,
    /// I_T NEXUS RESET, for the nexus that has sent this.
    NexusReset,
    /// CLEAR ACA. This is always rejected.
    ClearAca,
    /// QUERY TASK, to check if a task with the given tag exists.
    QueryTask(TaskTag),
    /// QUERY TASK SET, to check if this nexus has any tasks.
    QueryTaskSet,
}

/// SERVICE RESPONSE for a task management function (SAM-5 7.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TmfResponse {
    /// FUNCTION COMPLETE (SAM-5 7.1).
    Complete,
    /// FUNCTION SUCCEEDED: the task was found.
    Succeeded,
    /// FUNCTION REJECTED: not supported (SAM-5 7.1).
    Rejected,
    /// The task was not found. This is FUNCTION COMPLETE in SAM-5, but a separate response in
    /// iSCSI.
    TaskDoesNotExist,
    /// INCORRECT LOGICAL UNIT NUMBER, used by the caller if there is no LU.
    IncorrectLun,
}

/// The result of a task management function.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TmfOutcome {
    /// The response. This must only be sent after the aborted tasks have been removed.
    pub response: TmfResponse,
    /// Tasks that the caller must stop and remove. If [`TaskSet::is_cleared`] returns true, send
    /// TASK ABORTED status, otherwise don't send any status.
    pub aborted: Vec<TaskKey>,
}

impl TmfOutcome {
    fn with_response(response: TmfResponse) -> Self {
        Self {
            response,
            aborted: Vec::new(),
        }
    }
}
