use TaskAttribute::{HeadOfQueue, Ordered, Simple};
use proptest::prelude::*;
use riser_state::testing::{assert_all_taken, table};

use super::*;
use crate::task::Blocks;
use crate::task::list::Neighbours;

const A: NexusId = NexusId(1);
const B: NexusId = NexusId(2);

fn of(attribute: TaskAttribute) -> NewTask {
    NewTask {
        attribute,
        ..NewTask::default()
    }
}

fn arriving(attribute: TaskAttribute) -> NewTask {
    NewTask {
        awaits_data: true,
        ..of(attribute)
    }
}

fn add(set: &mut TaskSet, nexus: NexusId, tag: u64, attribute: TaskAttribute) -> TaskKey {
    set.register(nexus, TaskTag(tag.into()), of(attribute))
        .unwrap()
}

#[test]
fn ordered_command_is_barrier() {
    let mut set = TaskSet::new(8, 8);
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
    assert!(!set.try_start(newer), "already running");
}

#[test]
fn head_of_queue_blocks_newer_tasks() {
    let mut set = TaskSet::new(8, 8);
    let ordered = add(&mut set, A, 1, Ordered);
    assert!(set.try_start(ordered));
    let head = add(&mut set, A, 2, HeadOfQueue);
    assert!(set.try_start(head));
    let simple = add(&mut set, A, 3, Simple);
    set.remove(ordered);
    assert_eq!(set.poll_start(), None);
    set.remove(head);
    assert_eq!(set.poll_start(), Some(simple));
}

/// There is always at least one of them in flight, but the other tasks should still start.
#[test]
fn overlapping_head_of_queue_allows_progress() {
    for attribute in [Simple, Ordered] {
        let mut set = TaskSet::new(8, 8);
        let first = add(&mut set, A, 1, HeadOfQueue);
        assert!(set.try_start(first));
        let other = add(&mut set, B, 1, attribute);
        assert!(!set.try_start(other));
        let second = add(&mut set, A, 2, HeadOfQueue);
        assert!(set.try_start(second));
        assert_eq!(set.poll_start(), None);
        set.remove(first);
        assert_eq!(set.poll_start(), Some(other));
    }
}

fn touching(footprint: Footprint) -> NewTask {
    NewTask {
        footprint,
        ..of(Simple)
    }
}

fn blocks(first: u64, end: u64) -> Blocks {
    Blocks { first, end }
}

#[test]
fn atomic_command_blocks_overlapping_writes() {
    let mut set = TaskSet::new(8, 8);
    let add = |set: &mut TaskSet, tag, footprint| {
        let key = set.register(A, TaskTag(tag), touching(footprint)).unwrap();
        (key, set.try_start(key))
    };
    let (before, started) = add(&mut set, 1, Footprint::Writes(blocks(8, 16)));
    assert!(started);
    let (atomic, started) = add(&mut set, 2, Footprint::Atomic(blocks(10, 11)));
    assert!(!started, "blocked by an older write");
    let (elsewhere, started) = add(&mut set, 3, Footprint::Writes(blocks(11, 12)));
    assert!(started, "different blocks");
    let (behind, started) = add(&mut set, 4, Footprint::Writes(Blocks::ALL));
    assert!(!started, "blocked by an older atomic command");
    let (reads, started) = add(&mut set, 5, Footprint::None);
    assert!(started);
    set.remove(before);
    assert_eq!(set.poll_start(), Some(atomic));
    assert_eq!(set.poll_start(), None);
    let (second, started) = add(&mut set, 6, Footprint::Atomic(blocks(0, 11)));
    assert!(!started, "blocked by older commands");
    set.remove(atomic);
    assert_eq!(set.poll_start(), Some(behind));
    assert_eq!(set.poll_start(), None);
    set.remove(behind);
    assert_eq!(set.poll_start(), Some(second));
    for key in [elsewhere, reads, second] {
        set.remove(key);
    }
    assert!(set.is_empty());
}

#[test]
fn aborted_atomic_command_releases_blocks() {
    let mut set = TaskSet::new(8, 8);
    let atomic = touching(Footprint::Atomic(blocks(0, 1)));
    let keys = [1, 2, 3].map(|tag| set.register(A, TaskTag(tag), atomic).unwrap());
    assert_eq!(set.poll_start(), Some(keys[0]));
    assert_eq!(set.poll_start(), None);
    set.manage(A, TaskManagement::AbortTask(TaskTag(2)));
    set.remove(keys[0]);
    assert_eq!(set.poll_start(), None, "aborted task has not been removed");
    set.remove(keys[1]);
    assert_eq!(set.poll_start(), Some(keys[2]));
}

#[test]
fn missing_data_blocks_only_own_nexus() {
    let mut set = TaskSet::new(8, 8);
    let ordered = set.register(A, TaskTag(1), arriving(Ordered)).unwrap();
    assert!(!set.try_start(ordered));
    let own = add(&mut set, A, 2, Simple);
    assert!(!set.try_start(own), "held by an older ORDERED command");
    let other = add(&mut set, B, 1, Simple);
    assert!(set.try_start(other));
    set.data_arrived(ordered);
    assert_eq!(set.poll_start(), None, "waits for the older command");
    set.remove(other);
    assert_eq!(set.poll_start(), Some(ordered));
    assert_eq!(set.poll_start(), None);
    set.remove(ordered);
    assert_eq!(set.poll_start(), Some(own));
}

#[test]
fn ordered_waits_for_older_data() {
    let mut set = TaskSet::new(8, 8);
    let write = set.register(A, TaskTag(1), arriving(Simple)).unwrap();
    let ordered = add(&mut set, A, 2, Ordered);
    let late = set.register(A, TaskTag(3), arriving(Simple)).unwrap();
    let newer = add(&mut set, A, 4, Simple);
    let head = add(&mut set, A, 5, HeadOfQueue);
    assert_eq!(set.poll_start(), Some(head));
    set.remove(head);
    assert_eq!(set.poll_start(), None);
    set.data_arrived(write);
    assert_eq!(set.poll_start(), Some(write));
    assert_eq!(set.poll_start(), None);
    set.remove(write);
    assert_eq!(set.poll_start(), Some(ordered));
    set.remove(ordered);
    assert_eq!(set.poll_start(), Some(newer));
    set.data_arrived(late);
    assert_eq!(set.poll_start(), Some(late));
}

#[test]
fn removing_aborted_task_releases_held_tasks() {
    let mut set = TaskSet::new(8, 8);
    let write = set.register(A, TaskTag(1), arriving(Simple)).unwrap();
    let ordered = set.register(A, TaskTag(2), arriving(Ordered)).unwrap();
    let newer = add(&mut set, A, 3, Simple);
    set.manage(A, TaskManagement::AbortTask(TaskTag(2)));
    set.data_arrived(ordered);
    assert_eq!(set.poll_start(), None);
    set.remove(ordered);
    assert_eq!(set.poll_start(), Some(newer));
    set.remove(write);
    set.remove(newer);
    assert!(set.is_empty() && set.nexuses.is_empty());
}

#[test]
fn single_nexus_cannot_fill_set() {
    let mut set = TaskSet::new(8, 2);
    let first = add(&mut set, A, 1, Simple);
    add(&mut set, A, 2, Simple);
    let third = set.register(A, TaskTag(3), of(Simple));
    assert_eq!(third, Err(RegisterError::Full));
    add(&mut set, B, 1, Simple);
    set.remove(first);
    add(&mut set, A, 3, Simple);
}

/// Returns a command of type 0 to 11 for the blocks starting at `at`.
fn anything(kind: u8, at: u64) -> NewTask {
    let range = blocks(at, at + 2);
    NewTask {
        attribute: [Simple, Ordered, HeadOfQueue][usize::from(kind % 3)],
        footprint: [
            Footprint::None,
            Footprint::Writes(range),
            Footprint::Atomic(range),
        ][usize::from(kind / 4)],
        awaits_data: kind % 4 == 1,
    }
}

/// A SIMPLE command that can run immediately should not be added to a queue, but an ORDERED command
/// after it should.
#[test]
fn immediate_start_skips_queue() {
    let mut set = TaskSet::new(8, 8);
    let (simple, started) = set.register_and_start(A, TaskTag(1), of(Simple)).unwrap();
    assert!(started);
    assert_eq!(set.at(simple.slot).links[QUEUE], Neighbours::default());
    assert_eq!(set.at(simple.slot).links[GATE], Neighbours::default());
    assert_eq!(set.nexuses[set.by_nexus[&A]].arriving, List::default());
    let (ordered, started) = set.register_and_start(A, TaskTag(2), of(Ordered)).unwrap();
    assert!(!started);
    assert_eq!(set.dormant.first(), Some(ordered.slot));
    let (behind, started) = set.register_and_start(B, TaskTag(1), of(Simple)).unwrap();
    assert!(!started);
    assert!(set.remove(simple));
    assert_eq!(set.poll_start(), Some(ordered));
    assert_eq!(set.poll_start(), None);
    assert!(set.remove(ordered));
    assert_eq!(set.poll_start(), Some(behind));
}

/// The number of tasks we check when a task is started or removed should not depend on the total
/// number.
#[test]
fn task_events_take_constant_work() {
    let mut set = TaskSet::new(32_768, 32_768);
    let mut most = 0;
    let mut watch = |set: &TaskSet| {
        most = most.max(set.looks.replace(0));
    };
    let mut running = Vec::new();
    for tag in 0..4096 {
        let key = add(&mut set, A, tag, Simple);
        assert!(set.try_start(key));
        running.push(key);
        watch(&set);
    }
    let ordered = add(&mut set, A, 1 << 32, Ordered);
    assert!(!set.try_start(ordered));
    for tag in 5000..9095 {
        let key = add(&mut set, A, tag, Simple);
        assert!(!set.try_start(key));
        watch(&set);
    }
    for key in running {
        set.remove(key);
        watch(&set);
        let is_last = set.len() == 4096;
        assert_eq!(set.poll_start(), is_last.then_some(ordered));
        watch(&set);
    }
    set.remove(ordered);
    while set.poll_start().is_some() {
        watch(&set);
    }
    assert!(most < 20, "one event has looked at {most} tasks");
}

#[test]
fn overlapped_tag_and_full_set_fail() {
    let mut set = TaskSet::new(2, 2);
    let key = add(&mut set, A, 1, Simple);
    let again = set.register(A, TaskTag(1), of(Simple));
    assert_eq!(again, Err(RegisterError::Overlapped(key)));
    add(&mut set, B, 1, Simple);
    let third = set.register(A, TaskTag(2), of(Simple));
    assert_eq!(third, Err(RegisterError::Full));
    assert!(set.remove(key));
    assert!(!set.remove(key));
    let reused = add(&mut set, A, 1, Simple);
    assert_ne!(reused, key);
    assert!(!set.remove(key), "old key must not match the new task");
    assert!(set.remove(reused));
}

#[test]
fn abort_functions_select_matching_tasks() {
    let scene = || {
        let mut set = TaskSet::new(8, 8);
        let keys = [(A, 1), (A, 2), (B, 1)].map(|(n, t)| add(&mut set, n, t, Simple));
        (set, keys)
    };
    let cases = [
        (TaskManagement::AbortTask(TaskTag(2)), vec![1]),
        (TaskManagement::AbortTaskSet, vec![0, 1]),
        (TaskManagement::NexusReset, vec![0, 1]),
        (TaskManagement::ClearTaskSet, vec![0, 1, 2]),
        (TaskManagement::LogicalUnitReset, vec![0, 1, 2]),
    ];
    for (function, indices) in cases {
        let (mut set, keys) = scene();
        let aborted: Vec<_> = indices
            .into_iter()
            .map(|index: usize| keys[index])
            .collect();
        let outcome = set.manage(A, function);
        let response = TmfResponse::Complete;
        assert!(aborted.iter().all(|&key| set.is_aborted(key)));
        assert_eq!(outcome, TmfOutcome { response, aborted }, "{function:?}");
        // TAS: only the last of these tasks is from a different nexus.
        let cleared = keys.map(|key| set.is_cleared(key));
        let others = set.is_aborted(keys[2]);
        assert_eq!(cleared, [false, false, others], "{function:?}");
    }
}

/// If a task is aborted by its own nexus, before or after another nexus, it doesn't get a status.
#[test]
fn own_abort_is_not_cleared() {
    for functions in [[A, B], [B, A]] {
        let mut set = TaskSet::new(8, 8);
        let key = add(&mut set, A, 1, Simple);
        for nexus in functions {
            assert!(!set.is_cleared(key) || nexus == A);
            set.manage(nexus, TaskManagement::ClearTaskSet);
        }
        assert!(set.is_aborted(key) && !set.is_cleared(key));
    }
    let mut set = TaskSet::new(8, 8);
    let keys = [A, B].map(|nexus| add(&mut set, nexus, 1, Simple));
    set.abort_nexuses(|nexus| nexus == B);
    assert_eq!(keys.map(|key| set.is_cleared(key)), [false, true]);
}

#[test]
fn functions_return_correct_response() {
    let mut set = TaskSet::new(2, 2);
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
    /// For any attributes and any order of completion, all tasks should start, an ORDERED task
    /// should never be reordered, and the counters should be zero at the end.
    #[test]
    fn tasks_start_in_order(
        attributes in proptest::collection::vec(0..3_u8, 1..40),
        picks in proptest::collection::vec(any::<prop::sample::Index>(), 40),
    ) {
        let mut set = TaskSet::new(64, 64);
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
        prop_assert!(set.by_tag.is_empty() && set.nexuses.is_empty());
        prop_assert!([set.heads, set.order, set.ordered].iter().all(|list| *list == List::default()));
    }

    /// For any state of the set, registering and starting a command in a single call should have
    /// the same result as using two calls.
    #[test]
    fn register_and_start_matches_separate_calls(
        script in proptest::collection::vec((0..8_u8, 0..2_u64, 0..6_u64, 0..12_u8, 0..4_u64), 1..80),
    ) {
        let (mut once, mut twice) = (TaskSet::new(10, 7), TaskSet::new(10, 7));
        for (what, nexus, tag, kind, at) in script {
            let (nexus, tag) = (NexusId(nexus), TaskTag(tag.into()));
            let new = anything(kind, at);
            match what {
                0..=3 => {
                    let started = once.register_and_start(nexus, tag, new);
                    let registered = twice.register(nexus, tag, new);
                    prop_assert_eq!(started, registered.map(|key| (key, twice.try_start(key))));
                }
                4 => {
                    let abort = TaskManagement::AbortTask(tag);
                    prop_assert_eq!(once.manage(nexus, abort), twice.manage(nexus, abort));
                }
                5 => {
                    for set in [&mut once, &mut twice] {
                        if let Some(key) = set.find(nexus, tag) {
                            set.data_arrived(key);
                        }
                    }
                }
                6 => {
                    for set in [&mut once, &mut twice] {
                        if let Some(key) = set.find(nexus, tag) {
                            set.remove(key);
                        }
                    }
                }
                _ => prop_assert_eq!(once.poll_start(), twice.poll_start()),
            }
            let state = |set: &TaskSet| -> Vec<_> {
                set.tasks().map(|(slot, task)| (slot, task.id, task.state)).collect()
            };
            prop_assert_eq!(state(&once), state(&twice));
        }
        // The remaining tasks should start in the same order.
        while let Some(key) = once.poll_start() {
            prop_assert_eq!(twice.poll_start(), Some(key));
        }
        prop_assert_eq!(twice.poll_start(), None);
    }

    /// For any history, the set should start the same tasks as a simple implementation of the
    /// rules.
    #[test]
    fn task_set_matches_reference(
        script in proptest::collection::vec((0..9_u8, 0..2_u64, 0..6_u64, 0..12_u8, 0..4_u64), 1..80),
    ) {
        let mut set = TaskSet::new(10, 7);
        for (what, nexus, tag, kind, at) in script {
            let (nexus, tag) = (NexusId(nexus), TaskTag(tag.into()));
            let new = anything(kind, at);
            let key = set.find(nexus, tag);
            match what {
                0..=1 => { let _ = set.register(nexus, tag, new); }
                2 => { let _ = set.register_and_start(nexus, tag, new); }
                3 => { let _ = set.manage(nexus, TaskManagement::AbortTask(tag)); }
                4 => { let _ = key.map(|key| set.data_arrived(key)); }
                5 => { let _ = key.map(|key| set.try_start(key)); }
                6 | 7 => { let _ = key.map(|key| set.remove(key)); }
                _ => { set.abort_nexuses(|other| other == nexus); }
            }
            let mut tasks: Vec<Task> = set.tasks().map(|(_, task)| *task).collect();
            tasks.sort_unstable_by_key(|task| task.id);
            prop_assert_eq!(set.len(), tasks.len());
            for task in &tasks {
                let others = || tasks.iter().filter(|t| t.id != task.id);
                if task.state == TaskState::Held {
                    let own = || others().filter(|t| t.nexus == task.nexus && t.id < task.id && t.age.is_none());
                    let is_held = if task.is_ordered() { own().count() > 0 } else { own().any(Task::holds) };
                    prop_assert!(is_held && !task.is_head());
                }
                if task.state == TaskState::Dormant {
                    let older = || others().filter(|t| t.age.is_some() && t.age < task.age);
                    let due = match task.attribute {
                        HeadOfQueue => true,
                        Ordered => older().count() == 0,
                        _ => !older().any(Task::holds),
                    };
                    prop_assert_eq!(set.is_due(task), due);
                }
                if task.pass.is_some() && task.state != TaskState::Aborted {
                    let blockers = others()
                        .filter(|t| t.pass.is_some() && t.pass < task.pass && t.conflicts(task))
                        .count();
                    prop_assert_eq!(task.blockers as usize, blockers);
                    prop_assert!(blockers == 0 || task.state == TaskState::Blocked);
                }
            }
            // This should find all tasks that can be started.
            if what % 3 == 0 {
                while set.poll_start().is_some() {}
                let stuck = set.tasks().find(|(_, t)| {
                    (t.state == TaskState::Dormant && set.is_due(t))
                        || (t.state == TaskState::Blocked && t.blockers == 0)
                });
                prop_assert!(stuck.is_none());
            }
        }
    }
}

const STATES: [TaskState; 6] = [
    TaskState::Arriving,
    TaskState::Held,
    TaskState::Dormant,
    TaskState::Blocked,
    TaskState::Enabled,
    TaskState::Aborted,
];

#[test]
fn task_states_match_diagram() {
    let expected = "Arriving: Held Dormant Aborted\n\
                    Held: Dormant Aborted\n\
                    Dormant: Blocked Enabled Aborted\n\
                    Blocked: Enabled Aborted\n\
                    Enabled: Aborted\n\
                    Aborted: \n";
    assert_eq!(table(&STATES), expected);
}

#[test]
fn task_transitions_are_covered() {
    assert_all_taken(&STATES, || {
        // The data for an ORDERED command is received while a SIMPLE command is held by it.
        let mut set = TaskSet::new(8, 8);
        let ordered = set.register(A, TaskTag(1), arriving(Ordered)).unwrap();
        add(&mut set, A, 2, Simple);
        set.data_arrived(ordered);
        assert_eq!(set.poll_start(), Some(ordered));
        // A command that waits for blocks should start when these are released.
        let atomic = touching(Footprint::Atomic(Blocks::ALL));
        let mut set = TaskSet::new(8, 8);
        let first = set.register(A, TaskTag(1), atomic).unwrap();
        assert!(set.try_start(first));
        let second = set.register(A, TaskTag(2), atomic).unwrap();
        assert!(!set.try_start(second));
        assert!(set.remove(first));
        assert_eq!(set.poll_start(), Some(second));
        // Reset with a task in each state.
        let third = set.register(A, TaskTag(3), atomic).unwrap();
        assert!(!set.try_start(third));
        set.register(B, TaskTag(1), arriving(Ordered)).unwrap();
        add(&mut set, B, 2, Simple);
        add(&mut set, A, 4, Ordered);
        let reset = set.manage(A, TaskManagement::LogicalUnitReset);
        assert_eq!(reset.aborted.len(), 5);
    });
}
