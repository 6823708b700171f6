//! A single task in a set.

use riser_state::State;

use super::list::{Linked, Neighbours};
use super::{Footprint, NewTask, TaskTag};
use crate::nexus::NexusId;
use crate::step::TaskAttribute;

/// State of a task.
///
/// ```text
///   Arriving -> (Held) -> Dormant -> (Blocked) -> Enabled
///       |          |         |           |           |
///       +----------+---------+-----------+-----------+-> Aborted
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TaskState {
    /// Waiting for Data-Out.
    Arriving,
    /// Waiting for older commands from the same nexus which are still receiving data.
    Held,
    /// Waiting for other tasks to complete.
    Dormant,
    /// Waiting for older commands that change the same blocks.
    Blocked,
    /// The command is running.
    Enabled,
    /// Aborted by task management.
    Aborted,
}

impl State for TaskState {
    fn may_become(&self, next: &Self) -> bool {
        match self {
            Self::Arriving => matches!(next, Self::Held | Self::Dormant | Self::Aborted),
            Self::Held => matches!(next, Self::Dormant | Self::Aborted),
            Self::Dormant => matches!(next, Self::Blocked | Self::Enabled | Self::Aborted),
            Self::Blocked => matches!(next, Self::Enabled | Self::Aborted),
            Self::Enabled => matches!(next, Self::Aborted),
            Self::Aborted => false,
        }
    }
}

/// Link used for tasks of a nexus that have not been ordered yet, then for ORDERED tasks.
pub(super) const GATE: usize = 0;
/// Link used for all tasks that have been ordered, except for HEAD OF QUEUE.
pub(super) const ORDER: usize = 1;
/// Link used for tasks that change the medium.
pub(super) const MEDIUM: usize = 2;
/// Link used for the queue in which a task is waiting. Before a task is ordered, it's used for the
/// tasks of a nexus that hold other tasks.
pub(super) const QUEUE: usize = 3;

#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub(super) nexus: NexusId,
    /// Index of the nexus in the set.
    pub(super) own: usize,
    pub(super) tag: TaskTag,
    pub(super) attribute: TaskAttribute,
    pub(super) footprint: Footprint,
    pub(super) state: TaskState,
    /// Set when this was aborted by another nexus, but not by its own nexus.
    pub(super) is_cleared: bool,
    /// Increasing number, set when the task is registered.
    pub(super) id: u64,
    /// Increasing number in the order in which tasks can start, set when the task is ordered.
    pub(super) age: Option<u64>,
    /// Increasing number, set when the task has passed all ordering checks.
    pub(super) pass: Option<u64>,
    /// Number of older commands that change the same blocks.
    pub(super) blockers: u32,
    pub(super) links: [Neighbours; 4],
}

impl Linked for Task {
    fn link_mut(&mut self, link: usize) -> &mut Neighbours {
        &mut self.links[link]
    }
}

impl Task {
    /// Creates a new task that is not in any list yet.
    pub(super) fn new((nexus, own): (NexusId, usize), tag: TaskTag, new: NewTask, id: u64) -> Self {
        Self {
            nexus,
            own,
            tag,
            attribute: new.attribute,
            footprint: new.footprint,
            state: TaskState::Arriving,
            is_cleared: false,
            id,
            age: None,
            pass: None,
            blockers: 0,
            links: [Neighbours::default(); 4],
        }
    }

    pub(super) fn is_head(&self) -> bool {
        self.attribute == TaskAttribute::HeadOfQueue
    }

    pub(super) fn is_ordered(&self) -> bool {
        self.attribute == TaskAttribute::Ordered
    }

    /// Returns whether newer commands from the same nexus have to wait until this has been ordered.
    pub(super) fn holds(&self) -> bool {
        self.is_head() || self.is_ordered()
    }

    pub(super) fn conflicts(&self, other: &Self) -> bool {
        // There is no conflict between two normal writes to the same blocks. If the initiator needs
        // them in order, it can use ORDERED or wait for the first status. Only an atomic command
        // depends on the data that it has read.
        (self.footprint.is_atomic() || other.footprint.is_atomic())
            && self
                .footprint
                .blocks()
                .zip(other.footprint.blocks())
                .is_some_and(|(a, b)| a.overlaps(b))
    }
}
