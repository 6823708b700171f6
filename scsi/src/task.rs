//! Task sets: which commands are in flight, in what order they may start, and
//! what task management does to them (SAM-5 chapters 7 and 8).
//!
//! ```text
//!   register -> Dormant --try_start / poll_start--> Enabled
//!                  |                                   |
//!                  +-------- manage: aborted ----------+
//!                  |                                   |
//!                  +------------- remove --------------+
//! ```
//!
//! A [`TaskSet`] is pure bookkeeping. It never ends a task: task management
//! marks tasks and names them, the caller stops their work and then removes
//! them, and only then answers the function. TAS is zero, so an aborted task
//! gets no status.
//!
//! Queueing follows QUEUE ALGORITHM MODIFIER 1 (unrestricted reordering) of
//! our Control mode page: SIMPLE commands start at once unless a HEAD OF QUEUE
//! or an older ORDERED command is in the set. An [exclusive](Concurrency) command,
//! whatever its attribute, runs alone: that is what makes reading and writing in
//! one command atomic. The set is as large as it was
//! made and never grows; finding a task by tag and starting a SIMPLE one among
//! SIMPLE ones take constant time.

use std::collections::HashMap;

use crate::nexus::NexusId;
use crate::step::TaskAttribute;

/// A command identifier as its transport carries it (SRP TAG, iSCSI Initiator
/// Task Tag); unique per nexus.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TaskTag(pub u64);

/// How a command gets along with others of its unit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Concurrency {
    /// It may run beside others.
    #[default]
    Shared,
    /// It runs alone.
    Exclusive,
}

/// A task in a [`TaskSet`]; never valid for another task of the same set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TaskKey {
    slot: u32,
    age: u64,
}

impl TaskKey {
    /// The task's place, below the capacity of its set: an index for whatever
    /// the caller keeps beside the task.
    #[must_use]
    pub fn slot(self) -> usize {
        self.slot as usize
    }
}

/// Why a task was not taken into the set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RegisterError {
    /// The nexus already has a task with this tag (SAM-5 5.10). The old task
    /// and all others of the nexus are to be aborted.
    #[error("the task tag is in use")]
    Overlapped(TaskKey),
    /// The set is full: TASK SET FULL status.
    #[error("the task set is full")]
    Full,
}

/// A task management function.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TaskManagement {
    /// ABORT TASK.
    AbortTask(TaskTag),
    /// ABORT TASK SET: the tasks of this nexus.
    AbortTaskSet,
    /// CLEAR TASK SET: the tasks of all nexuses.
    ClearTaskSet,
    /// LOGICAL UNIT RESET.
    LogicalUnitReset,
    /// I_T NEXUS RESET.
    NexusReset,
    /// CLEAR ACA: rejected, as there never is one.
    ClearAca,
    /// QUERY TASK.
    QueryTask(TaskTag),
    /// QUERY TASK SET: is there any task of this nexus.
    QueryTaskSet,
}

/// SERVICE RESPONSE of a task management function (SAM-5 7.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TmfResponse {
    /// FUNCTION COMPLETE.
    Complete,
    /// FUNCTION SUCCEEDED: a queried task is there.
    Succeeded,
    /// FUNCTION REJECTED.
    Rejected,
    /// The referenced task is not in the set. SAM-5 calls this FUNCTION
    /// COMPLETE; iSCSI tells it apart.
    TaskDoesNotExist,
    /// INCORRECT LOGICAL UNIT NUMBER; for callers that find no unit.
    IncorrectLun,
}

/// What a task management function asks of the caller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TmfOutcome {
    /// The answer, to be sent when the aborted tasks are gone.
    pub response: TmfResponse,
    /// Tasks to stop and remove without a status.
    pub aborted: Vec<TaskKey>,
    /// Nexuses that lost tasks to another one: they get COMMANDS CLEARED BY
    /// ANOTHER INITIATOR.
    pub cleared: Vec<NexusId>,
}

impl TmfOutcome {
    fn answer(response: TmfResponse) -> Self {
        Self {
            response,
            aborted: Vec::new(),
            cleared: Vec::new(),
        }
    }
}

/// Where a task is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TaskState {
    /// Waits for tasks that must end first.
    Dormant,
    /// Runs.
    Enabled,
    /// Marked by task management; ends without status.
    Aborted,
}

#[derive(Clone, Copy, Debug)]
struct Task {
    nexus: NexusId,
    tag: TaskTag,
    attribute: TaskAttribute,
    concurrency: Concurrency,
    state: TaskState,
    /// Position in the order of arrival.
    age: u64,
}

impl Task {
    fn is_exclusive(&self) -> bool {
        self.concurrency == Concurrency::Exclusive
    }

    /// Whether others may have to wait for it, or it for them.
    fn is_restricting(&self) -> bool {
        self.is_exclusive()
            || matches!(
                self.attribute,
                TaskAttribute::Ordered | TaskAttribute::HeadOfQueue
            )
    }
}

/// The tasks of a logical unit.
#[derive(Debug)]
pub struct TaskSet {
    slots: Vec<Option<Task>>,
    free: Vec<u32>,
    by_tag: HashMap<(NexusId, TaskTag), u32>,
    next_age: u64,
    /// Tasks in the set that are not SIMPLE and shared.
    restricting: usize,
    dormant: usize,
}

impl TaskSet {
    /// An empty set for at most `capacity` tasks.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        Self {
            slots: vec![None; capacity as usize],
            free: (0..capacity).rev().collect(),
            // Twice as large as it gets: a table at most half full makes room
            // for itself without allocating.
            by_tag: HashMap::with_capacity(2 * capacity as usize),
            next_age: 0,
            restricting: 0,
            dormant: 0,
        }
    }

    /// Number of tasks in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether there are no tasks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes in a command that has arrived. It is dormant until started.
    ///
    /// # Errors
    ///
    /// Its tag is in use by the same nexus, or the set is full.
    pub fn register(
        &mut self,
        nexus: NexusId,
        tag: TaskTag,
        attribute: TaskAttribute,
        concurrency: Concurrency,
    ) -> Result<TaskKey, RegisterError> {
        if let Some(old) = self.find(nexus, tag) {
            return Err(RegisterError::Overlapped(old));
        }
        let slot = self.free.pop().ok_or(RegisterError::Full)?;
        let age = self.next_age;
        self.next_age += 1;
        let task = Task {
            nexus,
            tag,
            attribute,
            concurrency,
            state: TaskState::Dormant,
            age,
        };
        self.slots[slot as usize] = Some(task);
        self.by_tag.insert((nexus, tag), slot);
        self.restricting += usize::from(task.is_restricting());
        self.dormant += 1;
        Ok(TaskKey { slot, age })
    }

    /// The task of a nexus with a tag.
    #[must_use]
    pub fn find(&self, nexus: NexusId, tag: TaskTag) -> Option<TaskKey> {
        let slot = *self.by_tag.get(&(nexus, tag))?;
        let age = self.slots[slot as usize]?.age;
        Some(TaskKey { slot, age })
    }

    /// Whether the ordering rules let a task start now.
    ///
    /// - HEAD OF QUEUE: at once.
    /// - SIMPLE: when no HEAD OF QUEUE and no older ORDERED task is in the set.
    /// - ORDERED: when no HEAD OF QUEUE and no older task is in the set.
    /// - Exclusive: as ORDERED, and so it is to others; one that is HEAD OF
    ///   QUEUE waits for what runs already.
    /// - HEAD OF QUEUE beside a running exclusive one: after it.
    #[must_use]
    pub fn can_start(&self, key: TaskKey) -> bool {
        self.task(key)
            .is_some_and(|task| task.state == TaskState::Dormant && self.is_unblocked(task))
    }

    fn is_unblocked(&self, task: &Task) -> bool {
        if self.restricting == 0 {
            return true;
        }
        if task.attribute == TaskAttribute::HeadOfQueue {
            return !self.tasks().any(|(_, other)| {
                other.state != TaskState::Dormant && (other.is_exclusive() || task.is_exclusive())
            });
        }
        let ordered = task.attribute == TaskAttribute::Ordered || task.is_exclusive();
        !self.tasks().any(|(_, other)| {
            let older = other.age < task.age;
            match other.attribute {
                TaskAttribute::HeadOfQueue => true,
                TaskAttribute::Ordered => older,
                TaskAttribute::Simple | TaskAttribute::Aca => {
                    older && (ordered || other.is_exclusive())
                }
            }
        })
    }

    /// Starts a task if it may start.
    pub fn try_start(&mut self, key: TaskKey) -> bool {
        let may = self.can_start(key);
        if may {
            self.enable(key.slot);
        }
        may
    }

    /// Starts the oldest dormant task that may start, if there is one. To be
    /// asked again after every [`remove`](Self::remove) until it has none.
    pub fn poll_start(&mut self) -> Option<TaskKey> {
        if self.dormant == 0 {
            return None;
        }
        let (slot, task) = self
            .tasks()
            .filter(|(_, task)| task.state == TaskState::Dormant && self.is_unblocked(task))
            .min_by_key(|(_, task)| task.age)?;
        let key = TaskKey {
            slot,
            age: task.age,
        };
        self.enable(slot);
        Some(key)
    }

    /// Whether task management has marked a task: its work is to be stopped
    /// and no status sent.
    #[must_use]
    pub fn is_aborted(&self, key: TaskKey) -> bool {
        self.task(key)
            .is_some_and(|task| task.state == TaskState::Aborted)
    }

    /// Removes a task that has ended, or whose abort is done. `false` when it
    /// was not in the set.
    pub fn remove(&mut self, key: TaskKey) -> bool {
        let Some(&task) = self.task(key) else {
            return false;
        };
        self.slots[key.slot as usize] = None;
        self.free.push(key.slot);
        self.by_tag.remove(&(task.nexus, task.tag));
        self.restricting -= usize::from(task.is_restricting());
        self.dormant -= usize::from(task.state == TaskState::Dormant);
        true
    }

    /// Marks every task of a nexus, for overlapped commands and nexus loss.
    pub fn abort_nexus(&mut self, nexus: NexusId) -> Vec<TaskKey> {
        self.abort(|task| task.nexus == nexus)
    }

    /// Carries out a task management function for a nexus.
    ///
    /// After [`TaskManagement::LogicalUnitReset`] the caller also calls
    /// [`LogicalUnit::reset`](crate::lu::LogicalUnit::reset), whose unit
    /// attention covers what `cleared` would say.
    pub fn manage(&mut self, nexus: NexusId, function: TaskManagement) -> TmfOutcome {
        match function {
            TaskManagement::AbortTask(tag) => match self.find(nexus, tag) {
                None => TmfOutcome::answer(TmfResponse::TaskDoesNotExist),
                Some(_) => self.aborting(nexus, |task| task.nexus == nexus && task.tag == tag),
            },
            TaskManagement::AbortTaskSet | TaskManagement::NexusReset => {
                self.aborting(nexus, |task| task.nexus == nexus)
            }
            TaskManagement::ClearTaskSet => self.aborting(nexus, |_| true),
            TaskManagement::LogicalUnitReset => TmfOutcome {
                cleared: Vec::new(),
                ..self.aborting(nexus, |_| true)
            },
            TaskManagement::ClearAca => TmfOutcome::answer(TmfResponse::Rejected),
            TaskManagement::QueryTask(tag) => {
                TmfOutcome::answer(presence(self.find(nexus, tag).is_some()))
            }
            TaskManagement::QueryTaskSet => {
                TmfOutcome::answer(presence(self.tasks().any(|(_, task)| task.nexus == nexus)))
            }
        }
    }

    fn aborting(&mut self, by: NexusId, matches: impl Fn(&Task) -> bool) -> TmfOutcome {
        let aborted = self.abort(matches);
        let mut cleared: Vec<NexusId> = aborted
            .iter()
            .filter_map(|&key| self.task(key).map(|task| task.nexus))
            .filter(|&nexus| nexus != by)
            .collect();
        cleared.sort_unstable();
        cleared.dedup();
        TmfOutcome {
            response: TmfResponse::Complete,
            aborted,
            cleared,
        }
    }

    /// Marks tasks, oldest first. A task that is marked already is named
    /// again, because this function must wait for it, too.
    fn abort(&mut self, matches: impl Fn(&Task) -> bool) -> Vec<TaskKey> {
        let mut keys: Vec<TaskKey> = self
            .tasks()
            .filter(|(_, task)| matches(task))
            .map(|(slot, task)| TaskKey {
                slot,
                age: task.age,
            })
            .collect();
        keys.sort_unstable_by_key(|key| key.age);
        for key in &keys {
            if let Some(task) = &mut self.slots[key.slot as usize] {
                self.dormant -= usize::from(task.state == TaskState::Dormant);
                task.state = TaskState::Aborted;
            }
        }
        keys
    }

    fn enable(&mut self, slot: u32) {
        if let Some(task) = &mut self.slots[slot as usize] {
            task.state = TaskState::Enabled;
            self.dormant -= 1;
        }
    }

    fn task(&self, key: TaskKey) -> Option<&Task> {
        self.slots
            .get(key.slot as usize)?
            .as_ref()
            .filter(|task| task.age == key.age)
    }

    fn tasks(&self) -> impl Iterator<Item = (u32, &Task)> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(slot, task)| Some((slot as u32, task.as_ref()?)))
    }
}

fn presence(is_there: bool) -> TmfResponse {
    if is_there {
        TmfResponse::Succeeded
    } else {
        TmfResponse::Complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TaskAttribute::{HeadOfQueue, Ordered, Simple};
    use proptest::prelude::*;

    const A: NexusId = NexusId(1);
    const B: NexusId = NexusId(2);

    fn add(set: &mut TaskSet, nexus: NexusId, tag: u64, attribute: TaskAttribute) -> TaskKey {
        set.register(nexus, TaskTag(tag), attribute, Concurrency::Shared)
            .unwrap()
    }

    #[test]
    fn ordered_waits_for_older_and_holds_back_newer() {
        let mut set = TaskSet::new(8);
        let first = add(&mut set, A, 1, Simple);
        assert!(set.try_start(first));
        let ordered = add(&mut set, A, 2, Ordered);
        let newer = add(&mut set, B, 1, Simple);
        assert!(!set.try_start(ordered));
        assert!(!set.try_start(newer));
        assert_eq!(set.poll_start(), None);
        assert!(set.remove(first));
        assert_eq!(set.poll_start(), Some(ordered));
        assert_eq!(set.poll_start(), None);
        assert!(set.remove(ordered));
        assert_eq!(set.poll_start(), Some(newer));
        assert!(!set.can_start(newer), "it runs already");
    }

    #[test]
    fn head_of_queue_starts_at_once_and_holds_back_the_rest() {
        let mut set = TaskSet::new(8);
        let ordered = add(&mut set, A, 1, Ordered);
        assert!(set.try_start(ordered));
        let simple = add(&mut set, A, 2, Simple);
        let head = add(&mut set, A, 3, HeadOfQueue);
        assert!(set.try_start(head));
        set.remove(ordered);
        assert_eq!(set.poll_start(), None);
        set.remove(head);
        assert_eq!(set.poll_start(), Some(simple));
    }

    #[test]
    fn exclusive_runs_alone_whatever_its_attribute() {
        let mut set = TaskSet::new(8);
        let exclusive = |set: &mut TaskSet, tag, attribute| {
            set.register(A, TaskTag(tag), attribute, Concurrency::Exclusive)
                .unwrap()
        };
        let first = add(&mut set, A, 1, Simple);
        assert!(set.try_start(first));
        let head = exclusive(&mut set, 2, HeadOfQueue);
        assert!(!set.try_start(head), "something runs");
        let simple = exclusive(&mut set, 3, Simple);
        let newer = add(&mut set, B, 4, Simple);
        set.remove(first);
        assert_eq!(set.poll_start(), Some(head));
        assert_eq!(set.poll_start(), None);
        set.remove(head);
        assert_eq!(set.poll_start(), Some(simple));
        let late = add(&mut set, B, 5, HeadOfQueue);
        assert!(!set.try_start(late), "even the head waits for it");
        assert!(!set.try_start(newer));
        set.remove(simple);
        assert_eq!(set.poll_start(), Some(late));
        set.remove(late);
        assert_eq!(set.poll_start(), Some(newer));
    }

    #[test]
    fn overlapped_tags_and_a_full_set_are_refused() {
        let mut set = TaskSet::new(2);
        let key = add(&mut set, A, 1, Simple);
        let again = set.register(A, TaskTag(1), Simple, Concurrency::Shared);
        assert_eq!(again, Err(RegisterError::Overlapped(key)));
        add(&mut set, B, 1, Simple);
        let third = set.register(A, TaskTag(2), Simple, Concurrency::Shared);
        assert_eq!(third, Err(RegisterError::Full));
        assert!(set.remove(key));
        assert!(!set.remove(key));
        let reused = add(&mut set, A, 1, Simple);
        assert_ne!(reused, key);
        assert!(!set.remove(key), "the old key is not the new task");
        assert!(set.remove(reused));
    }

    #[test]
    fn a_nexus_that_lost_several_tasks_is_named_once() {
        let mut set = TaskSet::new(8);
        for tag in 1..4 {
            add(&mut set, B, tag, Simple);
        }
        let outcome = set.manage(A, TaskManagement::ClearTaskSet);
        assert_eq!(outcome.cleared, [B]);
    }

    #[test]
    fn abort_functions_reach_the_right_tasks() {
        let scene = || {
            let mut set = TaskSet::new(8);
            let keys = [(A, 1), (A, 2), (B, 1)].map(|(n, t)| add(&mut set, n, t, Simple));
            (set, keys)
        };
        let cases = [
            (TaskManagement::AbortTask(TaskTag(2)), vec![1], vec![]),
            (TaskManagement::AbortTaskSet, vec![0, 1], vec![]),
            (TaskManagement::NexusReset, vec![0, 1], vec![]),
            (TaskManagement::ClearTaskSet, vec![0, 1, 2], vec![B]),
            (TaskManagement::LogicalUnitReset, vec![0, 1, 2], vec![]),
        ];
        for (function, indices, cleared) in cases {
            let (mut set, keys) = scene();
            let aborted: Vec<_> = indices
                .into_iter()
                .map(|index: usize| keys[index])
                .collect();
            let outcome = set.manage(A, function);
            let response = TmfResponse::Complete;
            assert!(aborted.iter().all(|&key| set.is_aborted(key)));
            assert_eq!(
                outcome,
                TmfOutcome {
                    response,
                    aborted,
                    cleared
                },
                "{function:?}"
            );
        }
    }

    #[test]
    fn functions_without_tasks_answer() {
        let mut set = TaskSet::new(2);
        add(&mut set, A, 1, Simple);
        let cases = [
            (
                TaskManagement::AbortTask(TaskTag(9)),
                TmfResponse::TaskDoesNotExist,
            ),
            (TaskManagement::ClearAca, TmfResponse::Rejected),
            (
                TaskManagement::QueryTask(TaskTag(1)),
                TmfResponse::Succeeded,
            ),
            (TaskManagement::QueryTask(TaskTag(9)), TmfResponse::Complete),
            (TaskManagement::QueryTaskSet, TmfResponse::Succeeded),
        ];
        for (function, response) in cases {
            assert_eq!(set.manage(A, function).response, response, "{function:?}");
        }
        assert_eq!(
            set.manage(B, TaskManagement::QueryTaskSet).response,
            TmfResponse::Complete
        );
    }

    proptest! {
        /// Whatever the attributes and the order of completion, every task
        /// starts, no ORDERED one overtakes, and the counters end at zero.
        #[test]
        fn every_task_starts_in_a_legal_order(
            attributes in proptest::collection::vec(0..3_u8, 1..40),
            picks in proptest::collection::vec(any::<prop::sample::Index>(), 40),
        ) {
            let mut set = TaskSet::new(64);
            let mut running = Vec::new();
            let mut gone = std::collections::HashSet::new();
            let keys: Vec<_> = attributes.iter().enumerate().map(|(tag, kind)| {
                let attribute = [Simple, Ordered, HeadOfQueue][usize::from(*kind)];
                (add(&mut set, A, tag as u64, attribute), attribute)
            }).collect();
            for pick in &picks {
                while let Some(key) = set.poll_start() {
                    let index = keys.iter().position(|(k, _)| *k == key).unwrap();
                    if keys[index].1 == Ordered {
                        prop_assert!((0..index).all(|older| gone.contains(&older)));
                    }
                    running.push((index, key));
                }
                if running.is_empty() { break }
                let (index, key) = running.swap_remove(pick.index(running.len()));
                prop_assert!(set.remove(key));
                gone.insert(index);
            }
            prop_assert!(set.is_empty());
            prop_assert_eq!((set.restricting, set.dormant), (0, 0));
            prop_assert!(set.by_tag.is_empty());
        }

        /// Whatever happens to the set, its shortcuts agree with a plain
        /// reading of the rules.
        #[test]
        fn shortcuts_agree_with_the_rules(
            script in proptest::collection::vec((0..8_u8, 0..2_u32, 0..6_u64, 0..6_u8), 1..80),
        ) {
            let mut set = TaskSet::new(10);
            for (what, nexus, tag, kind) in script {
                let (nexus, tag) = (NexusId(nexus), TaskTag(tag));
                let attribute = [Simple, Ordered, HeadOfQueue][usize::from(kind % 3)];
                let concurrency = [Concurrency::Shared, Concurrency::Exclusive][usize::from(kind / 3)];
                let key = set.find(nexus, tag);
                match what {
                    0..=2 => { let _ = set.register(nexus, tag, attribute, concurrency); }
                    3 => { let _ = set.manage(nexus, TaskManagement::AbortTask(tag)); }
                    4 => { let _ = key.map(|key| set.try_start(key)); }
                    5 => { let _ = set.poll_start(); }
                    6 => { let _ = key.map(|key| set.remove(key)); }
                    _ => { set.abort_nexus(nexus); }
                }
                let tasks: Vec<Task> = set.tasks().map(|(_, task)| *task).collect();
                let count = |wanted: &dyn Fn(&Task) -> bool| tasks.iter().filter(|t| wanted(t)).count();
                prop_assert_eq!(set.len(), tasks.len());
                prop_assert_eq!(set.dormant, count(&|t| t.state == TaskState::Dormant));
                prop_assert_eq!(set.restricting, count(&|t| t.attribute != Simple || t.is_exclusive()));
                for task in &tasks {
                    let key = set.find(task.nexus, task.tag).unwrap();
                    let head = count(&|t| t.attribute == HeadOfQueue) > 0;
                    let older_ordered = count(&|t| {
                        (t.attribute == Ordered || t.is_exclusive()) && t.age < task.age
                    }) > 0;
                    let runs = |t: &Task| t.state != TaskState::Dormant;
                    let older = count(&|t| t.age < task.age) > 0;
                    let free = match task.attribute {
                        HeadOfQueue if task.is_exclusive() => count(&runs) == 0,
                        HeadOfQueue => count(&|t| runs(t) && t.is_exclusive()) == 0,
                        Ordered => !head && !older,
                        _ if task.is_exclusive() => !head && !older,
                        _ => !head && !older_ordered,
                    };
                    prop_assert_eq!(set.can_start(key), free && task.state == TaskState::Dormant);
                }
            }
        }
    }
}
