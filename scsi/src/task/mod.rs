//! Task sets: which commands are in flight, in what order they may start, and
//! what task management does to them (SAM-5 chapters 7 and 8).
//!
//! ```text
//!   register -> Arriving -data_arrived-> (Held) -> Dormant -> (Blocked) -> Enabled
//!                  |                       |          |           |           |
//!                  +-----------------------+- manage: Aborted ----+-----------+
//!                                                     |
//!                                                   remove
//! ```
//!
//! A [`TaskSet`] is pure bookkeeping. It never ends a task: task management
//! marks tasks and names them, the caller stops their work and then removes
//! them, and only then answers the function. TAS is one (SPC-4 7.5.8): a task that
//! another nexus ended is answered with TASK ABORTED status, one that its own nexus
//! ended gets no status.
//!
//! # Order
//!
//! Queueing follows QUEUE ALGORITHM MODIFIER 1 (unrestricted reordering) of
//! our Control mode page: SIMPLE commands start at once unless an older HEAD OF
//! QUEUE or ORDERED command is in the set. HEAD OF QUEUE commands start at once.
//!
//! This departs from the command attributes of SAM-5 chapter 8 in one respect. There a
//! dormant SIMPLE or ORDERED command waits until no HEAD OF QUEUE command is in the set
//! at all, newer ones included. All initiators share the set (TST is zero), so with that
//! rule one initiator that always has a HEAD OF QUEUE command under way would stop the
//! others. Here only older HEAD OF QUEUE commands count, of which there is a bounded
//! number. So a command that was already waiting when a HEAD OF QUEUE command came may
//! start before the latter has ended; what comes later waits as in SAM-5.
//!
//! A command whose Data-Out is still on its way can be named and aborted, but
//! takes part in that order only against commands of its own nexus: those that
//! came after it wait behind it (`Held`) where its attribute or theirs asks for
//! that. To other nexuses it is as old as its data. So every initiator sees its
//! own commands ordered by their arrival, and none can hold up another one by
//! sending a command without its data.
//!
//! Data-Out that goes in pieces is here when the first piece is. The task keeps its
//! place in the order, and its blocks, until it is removed.
//!
//! # Blocks
//!
//! A command that reads blocks, decides and writes them (a [`Footprint::Atomic`])
//! runs when no older command changes any of these blocks, and newer ones that
//! do wait for it (`Blocked`). Commands for other blocks are not affected.
//!
//! # Bounds
//!
//! The set is as large as it was made and never grows. Registering, starting and
//! removing a task take constant time, except that an atomic command looks at the
//! commands under way that change the medium.

mod entry;
mod list;
mod set;

pub use set::TaskSet;

use crate::step::TaskAttribute;

/// A command identifier, unique per nexus. Wide enough for a name that the caller
/// makes up where the tags of a transport are unique within less than that.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TaskTag(pub u128);

/// A run of logical blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Blocks {
    /// LBA of the first block.
    pub first: u64,
    /// The block after the last one.
    pub end: u64,
}

impl Blocks {
    /// The whole medium, for any capacity.
    pub const ALL: Self = Self {
        first: 0,
        end: u64::MAX,
    };

    fn overlaps(self, other: Self) -> bool {
        self.first < other.end && other.first < self.end
    }
}

/// The blocks that a command changes on the medium.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Footprint {
    /// Changes nothing on the medium.
    #[default]
    None,
    /// Changes these blocks of the medium.
    Writes(Blocks),
    /// These blocks, by what it reads there: nothing else may change them meanwhile.
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

/// A command that enters a [`TaskSet`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NewTask {
    /// Task attribute of the command.
    pub attribute: TaskAttribute,
    /// The blocks that it changes on the medium.
    pub footprint: Footprint,
    /// Its Data-Out is yet to come; [`TaskSet::data_arrived`] follows then.
    pub awaits_data: bool,
}

/// A task in a [`TaskSet`]; never valid for another task of the same set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TaskKey {
    slot: u32,
    id: u64,
}

impl TaskKey {
    /// The task's place, below the capacity of its set: an index for what the
    /// caller keeps beside the task.
    #[must_use]
    pub fn slot(self) -> usize {
        self.slot as usize
    }
}

/// Reason for which a task was not taken into the set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RegisterError {
    /// The nexus already has a task with this tag (SAM-5 5.10). The old task
    /// and all others of the nexus are to be aborted.
    #[error("the task tag is in use")]
    Overlapped(TaskKey),
    /// The set is full, or the nexus has as many tasks as it may: TASK SET FULL status.
    #[error("the task set is full")]
    Full,
}

/// A task management function.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TaskManagement {
    /// ABORT TASK of the task with this tag.
    AbortTask(TaskTag),
    /// ABORT TASK SET: the tasks of this nexus.
    AbortTaskSet,
    /// CLEAR TASK SET: the tasks of all nexuses.
    ClearTaskSet,
    /// LOGICAL UNIT RESET, for all nexuses.
    LogicalUnitReset,
    /// I_T NEXUS RESET, of the asking nexus.
    NexusReset,
    /// CLEAR ACA: rejected, as there never is one.
    ClearAca,
    /// QUERY TASK: is the task with this tag in the set?
    QueryTask(TaskTag),
    /// QUERY TASK SET: is there any task of this nexus.
    QueryTaskSet,
}

/// SERVICE RESPONSE of a task management function (SAM-5 7.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TmfResponse {
    /// FUNCTION COMPLETE (SAM-5 7.1).
    Complete,
    /// FUNCTION SUCCEEDED: a queried task is there.
    Succeeded,
    /// FUNCTION REJECTED: not supported (SAM-5 7.1).
    Rejected,
    /// The referenced task is not in the set. SAM-5 calls this FUNCTION
    /// COMPLETE; iSCSI has an answer of its own for it.
    TaskDoesNotExist,
    /// INCORRECT LOGICAL UNIT NUMBER; for callers that find no unit.
    IncorrectLun,
}

/// The work that a task management function leaves to the caller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TmfOutcome {
    /// The answer, to be sent when the aborted tasks are gone.
    pub response: TmfResponse,
    /// Tasks to stop and remove: with TASK ABORTED status where
    /// [`TaskSet::is_cleared`] says so, otherwise without a status.
    pub aborted: Vec<TaskKey>,
}

impl TmfOutcome {
    fn answer(response: TmfResponse) -> Self {
        Self {
            response,
            aborted: Vec::new(),
        }
    }
}
