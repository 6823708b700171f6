//! A task in a set.

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
    /// Its Data-Out is on its way.
    Arriving,
    /// Waits for older commands of its nexus whose data are on their way.
    Held,
    /// Waits for tasks that must end first.
    Dormant,
    /// Waits for older commands that change the same blocks.
    Blocked,
    /// Enabled task: its command runs.
    Enabled,
    /// Marked by task management.
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

/// Links of a task: commands of its nexus that are not in the order yet; later, ORDERED commands.
pub(super) const GATE: usize = 0;
/// Links of a task: all in the order, those of HEAD OF QUEUE apart.
pub(super) const ORDER: usize = 1;
/// Links of a task: what changes the medium.
pub(super) const MEDIUM: usize = 2;
/// Links of a task: the queue in which it waits; before it is in the order, the tasks of its nexus
/// that hold others.
pub(super) const QUEUE: usize = 3;

#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub(super) nexus: NexusId,
    pub(super) tag: TaskTag,
    pub(super) attribute: TaskAttribute,
    pub(super) footprint: Footprint,
    pub(super) state: TaskState,
    /// Another nexus has ended it, and not its own.
    pub(super) is_cleared: bool,
    /// Position in the order of arrival.
    pub(super) id: u64,
    /// Position in the order in which tasks start, once it has one.
    pub(super) age: Option<u64>,
    /// Position among those that the order has let start, once it did.
    pub(super) pass: Option<u64>,
    /// Older commands in the way, which change the same blocks.
    pub(super) blockers: u32,
    pub(super) links: [Neighbours; 4],
}

impl Linked for Task {
    fn link_mut(&mut self, link: usize) -> &mut Neighbours {
        &mut self.links[link]
    }
}

impl Task {
    /// A task that is in no list yet.
    pub(super) fn new(nexus: NexusId, tag: TaskTag, new: NewTask, id: u64) -> Self {
        Self {
            nexus,
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

    /// Returns whether newer commands of its nexus wait until it is in the order.
    pub(super) fn holds(&self) -> bool {
        self.is_head() || self.is_ordered()
    }

    pub(super) fn conflicts(&self, other: &Self) -> bool {
        // Two plain writes of the same blocks do not conflict: their order is the initiator's
        // business, which it settles by ORDERED or by waiting for the first status. Only an atomic
        // command relies on what it has read.
        (self.footprint.is_atomic() || other.footprint.is_atomic())
            && self
                .footprint
                .blocks()
                .zip(other.footprint.blocks())
                .is_some_and(|(a, b)| a.overlaps(b))
    }
}
