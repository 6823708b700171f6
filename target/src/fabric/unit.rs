//! A logical unit and its task set, shared by connections of all fabrics.

use std::sync::{Arc, PoisonError};

use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::LunId;
use riser_scsi::nexus::{Nexus, NexusId};
use riser_scsi::reservation::Preemption;
use riser_scsi::task::{NewTask, RegisterError, TaskKey, TaskManagement, TaskSet, TmfResponse};
use riser_sync::atomic::{AtomicU64, Ordering};
use riser_sync::{Mutex, MutexGuard};

use super::TaskRef;
use crate::qos::Limiter;
use crate::stats::Throttle;

/// Number of a logical unit on the server. It is the same for all workers, portals and initiators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitIdx(pub u32);

/// Number of tasks that a unit always accepts from a nexus, if permitted by the size of the task
/// set.
const MIN_SHARE: u32 = 256;

/// A logical unit, its task set and its limits.
#[derive(Debug)]
pub struct Unit {
    /// Number of the unit on all workers.
    pub index: UnitIdx,
    /// SCSI logical unit, without its tasks.
    pub lu: Arc<LogicalUnit>,
    /// Limits for all initiators together.
    pub limits: Arc<Limiter>,
    tasks: Mutex<Tasks>,
    resets: AtomicU64,
    aborts: AtomicU64,
    vain_aborts: AtomicU64,
}

/// The task set, and the identifiers of its tasks.
#[derive(Debug)]
struct Tasks {
    set: TaskSet,
    /// Task by slot, up to the highest slot used so far.
    refs: Vec<Option<TaskRef>>,
    /// LUN used by the initiator, with the same length as `refs`.
    luns: Vec<LunId>,
    /// Limited by the number of contexts of all connections.
    left: Vec<PendingResponse>,
    /// At most two entries per connection.
    limited: Vec<LimitQueue>,
    /// Nexuses without access to the unit that still have tasks in the set.
    leaving: Vec<NexusId>,
    /// Replaced nexuses with their successors, until their sessions are closed.
    successions: Vec<Succession>,
    /// Replaced nexuses with tasks in the set. A RESERVE is released when the last task completes.
    reserving: Vec<NexusId>,
}

/// A nexus that was replaced by another nexus with the same ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Succession {
    old: NexusId,
    new: NexusId,
}

/// Reads or writes of a connection waiting for limits.
#[derive(Debug)]
struct LimitQueue {
    nexus: NexusId,
    line: LimitLine,
    tasks: u32,
}

/// Worker, connection, and whether the tasks are writes.
type LimitLine = (u16, u64, bool);

/// A task that has left the set before its response or remaining data was sent.
#[derive(Debug)]
struct PendingResponse {
    nexus: NexusId,
    lun: LunId,
    task: TaskRef,
    /// Aborted by its own nexus.
    is_ended: bool,
}

/// Counts of task management functions executed by a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TmfCounts {
    /// Number of unit resets.
    pub resets: u64,
    /// Number of ABORT TASK functions that found the task.
    pub aborts: u64,
    /// Number of ABORT TASK functions for a task that did not exist, or had already completed.
    pub vain_aborts: u64,
}

/// Reason for refusing a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TaskRefused {
    /// The set is full, for this reason: TASK SET FULL.
    #[error("the task set is full")]
    Full(Throttle),
    /// A nexus replaced by this nexus still has tasks on the unit, which could change the medium
    /// after this task. Or this nexus was replaced itself. BUSY.
    #[error("the unit has tasks of the nexus that was replaced")]
    Busy,
}

/// Result of a task management function.
#[derive(Debug)]
pub struct TmfOutcome {
    /// Response, to be sent after these tasks have completed.
    pub response: TmfResponse,
    /// Tasks to abort. Their connections must be notified.
    pub aborted: Vec<TaskRef>,
}

impl Unit {
    /// Creates a unit with a task set for up to `capacity` tasks of all connections. A single nexus
    /// can use up to a quarter of this, so that a host cannot exclude other hosts.
    #[must_use]
    pub fn new(index: UnitIdx, lu: Arc<LogicalUnit>, capacity: u32) -> Self {
        let share = (capacity / 4).max(MIN_SHARE).min(capacity);
        Self {
            index,
            lu,
            tasks: Mutex::new(Tasks {
                set: TaskSet::new(capacity, share),
                refs: Vec::new(),
                luns: Vec::new(),
                left: Vec::new(),
                limited: Vec::new(),
                leaving: Vec::new(),
                successions: Vec::new(),
                reserving: Vec::new(),
            }),
            limits: Arc::default(),
            resets: AtomicU64::new(0),
            aborts: AtomicU64::new(0),
            vain_aborts: AtomicU64::new(0),
        }
    }

    /// Adds a nexus with access to the unit. If the nexus is already known, its state is preserved.
    pub fn admit(&self, nexus: NexusId, ports: &Nexus) {
        let mut tasks = self.lock();
        tasks.leaving.retain(|other| *other != nexus);
        if self.lu.nexus(nexus).is_none() {
            self.lu.add_nexus(nexus, ports.clone());
        }
    }

    /// Removes a nexus that no longer has access to the unit, when its last task completes. It is
    /// kept until then, because an unknown nexus conflicts with any reservation. There will not be
    /// any new tasks of this nexus.
    pub fn dismiss(&self, nexus: NexusId) {
        // Lock the task set here, as in `admit` and `remove`. If a nexus is added again, it must
        // not be removed because of a task that completes at the same time.
        let mut tasks = self.lock();
        tasks.successions.retain(|s| s.new != nexus);
        if !tasks.set.has_tasks_of(nexus) {
            self.lu.remove_nexus(nexus);
        } else if !tasks.leaving.contains(&nexus) {
            tasks.leaving.push(nexus);
        }
    }

    /// Called when a nexus replaces another nexus with the same ports. The old nexus cannot start
    /// any tasks on this unit. While it has tasks in the set, a hanging disk may still execute
    /// them. Therefore tasks of the new nexus are refused, and a RESERVE of the old nexus continues
    /// to exclude other initiators.
    pub fn succeed(&self, old: NexusId, new: NexusId) {
        let succession = Succession { old, new };
        let mut tasks = self.lock();
        if !tasks.successions.contains(&succession) {
            tasks.successions.push(succession);
        }
        if !tasks.set.has_tasks_of(old) {
            self.lu.release_unit(old);
        } else if !tasks.reserving.contains(&old) {
            tasks.reserving.push(old);
        }
    }

    /// Called when the session of a nexus is closed. It does not have any tasks.
    pub fn end_nexus(&self, nexus: NexusId) {
        let is_of = |s: &Succession| s.old == nexus || s.new == nexus;
        self.lock().successions.retain(|s| !is_of(s));
        self.lu.remove_nexus(nexus);
    }

    /// Resets the unit. Its tasks are aborted separately.
    fn reset(&self) {
        self.resets.fetch_add(1, Ordering::Relaxed);
        self.lu.reset();
    }

    /// Counts an ABORT TASK.
    pub fn count_abort(&self, is_there: bool) {
        let count = if is_there {
            &self.aborts
        } else {
            &self.vain_aborts
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the counts of functions.
    #[must_use]
    pub fn management(&self) -> TmfCounts {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        TmfCounts {
            resets: count(&self.resets),
            aborts: count(&self.aborts),
            vain_aborts: count(&self.vain_aborts),
        }
    }

    /// Returns the number of tasks in the set.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.lock().set.len()
    }

    /// Returns whether a nexus has tasks in the set.
    #[must_use]
    pub fn has_tasks_of(&self, nexus: NexusId) -> bool {
        self.lock().set.has_tasks_of(nexus)
    }

    /// Returns the number of entries of each kind stored for sessions.
    #[must_use]
    pub fn entries(&self) -> [(&'static str, usize); 5] {
        let tasks = self.lock();
        [
            ("tasks", tasks.set.len()),
            ("unsent responses", tasks.left.len()),
            ("waits for limits", tasks.limited.len()),
            ("leaving nexuses", tasks.leaving.len()),
            ("nexuses", self.lu.nexuses()),
        ]
    }

    /// Adds a task to the set. Returns whether it may start immediately. The initiator uses `lun`
    /// for the unit. `limited` is set if the task must wait for limits first. It is true for a
    /// write and false for a read.
    ///
    /// A task with `keeps_memory` (data or descriptor tables) is refused if it would have to wait
    /// for a task that waits for limits, because it would keep the memory until then. This does not
    /// apply if it is queued behind this task for the same limits.
    ///
    /// # Errors
    /// Returns [`TaskRefused`].
    ///
    /// # Panics
    /// Panics if a task with this identifier is in the set.
    pub fn register(
        &self,
        nexus: NexusId,
        new: NewTask,
        (task, lun): (TaskRef, LunId),
        keeps_memory: bool,
        limited: Option<bool>,
    ) -> Result<(TaskKey, bool), TaskRefused> {
        // Keep the lock until the end. Other workers must not add tasks between checking for tasks
        // waiting for limits and adding this task.
        let mut tasks = self.lock();
        if !tasks.successions.is_empty() && tasks.is_succession_pending(nexus) {
            return Err(TaskRefused::Busy);
        }
        let own = limited.map(|is_write| (task.worker, task.channel, is_write));
        let others = |other: &LimitQueue| other.nexus == nexus && Some(other.line) != own;
        if keeps_memory
            && tasks.limited.iter().any(others)
            && tasks.set.would_hold(nexus, new.attribute)
        {
            return Err(TaskRefused::Full(Throttle::Limit));
        }
        let (key, started) = match tasks.set.register_and_start(nexus, task.tag(), new) {
            Ok(registered) => registered,
            Err(RegisterError::Full) => return Err(TaskRefused::Full(Throttle::Queue)),
            Err(RegisterError::Overlapped(_)) => panic!("{task:?} is in the set already"),
        };
        if tasks.refs.len() <= key.slot() {
            tasks.refs.resize(key.slot() + 1, None);
            tasks.luns.resize(key.slot() + 1, lun);
        }
        tasks.refs[key.slot()] = Some(task);
        tasks.luns[key.slot()] = lun;
        if let Some(line) = own {
            let same = |other: &&mut LimitQueue| other.nexus == nexus && other.line == line;
            match tasks.limited.iter_mut().find(same) {
                Some(known) => known.tasks += 1,
                None => tasks.limited.push(LimitQueue {
                    nexus,
                    line,
                    tasks: 1,
                }),
            }
        }
        Ok((key, started))
    }

    /// Returns the number of tasks waiting for limits.
    #[must_use]
    pub fn limit_waits(&self) -> u32 {
        self.lock().limited.iter().map(|line| line.tasks).sum()
    }

    /// Returns the number of connections with tasks waiting for limits, counting reads and writes
    /// separately.
    #[cfg(test)]
    pub(crate) fn limited(&self) -> usize {
        self.lock().limited.len()
    }

    /// Called when a task added with `limited` no longer waits for limits.
    pub fn end_limited(&self, nexus: NexusId, task: TaskRef, is_write: bool) {
        let line = (task.worker, task.channel, is_write);
        let limited = &mut self.lock().limited;
        let mut all = limited.iter();
        if let Some(at) = all.position(|other| other.nexus == nexus && other.line == line) {
            limited[at].tasks -= 1;
            if limited[at].tasks == 0 {
                limited.swap_remove(at);
            }
        }
    }

    /// Called when the Data-Out of a task was received. Returns whether the task may start now, and
    /// other tasks that may start.
    pub fn data_arrived(&self, key: TaskKey) -> (bool, Vec<TaskRef>) {
        let mut tasks = self.lock();
        let Tasks { set, refs, .. } = &mut *tasks;
        set.data_arrived(key);
        let mut is_started = false;
        let mut others = Vec::new();
        while let Some(other) = set.poll_start() {
            if other == key {
                is_started = true;
            } else {
                others.extend(refs[other.slot()]);
            }
        }
        (is_started, others)
    }

    /// Returns whether tasks of other nexuses are waiting for a task that has started.
    #[must_use]
    pub fn holds_others(&self, key: TaskKey) -> bool {
        self.lock().set.holds_others(key)
    }

    /// Removes a task. Returns whether it was aborted by another nexus, and the tasks that may
    /// start now.
    ///
    /// # Panics
    /// Panics if the task is not in the set.
    pub fn remove(&self, key: TaskKey) -> (bool, Vec<TaskRef>) {
        let mut tasks = self.lock();
        let Tasks {
            set,
            refs,
            leaving,
            reserving,
            ..
        } = &mut *tasks;
        // Do this before the slot is free and can be reused by another task.
        let was_cleared = set.is_cleared(key);
        assert!(set.remove(key), "a task leaves its set once");
        refs[key.slot()] = None;
        // Do this before other tasks start, because a RESERVE of this nexus would exclude them.
        if !leaving.is_empty() {
            leaving.retain(|&nexus| {
                let has_tasks = set.has_tasks_of(nexus);
                if !has_tasks {
                    self.lu.remove_nexus(nexus);
                }
                has_tasks
            });
        }
        if !reserving.is_empty() {
            reserving.retain(|&nexus| {
                let has_tasks = set.has_tasks_of(nexus);
                if !has_tasks {
                    self.lu.release_unit(nexus);
                }
                has_tasks
            });
        }
        let mut started = Vec::new();
        while let Some(key) = set.poll_start() {
            started.extend(refs[key.slot()]);
        }
        (was_cleared, started)
    }

    /// Changes the identifier of a task.
    ///
    /// # Panics
    /// Panics if the task is not in the set.
    pub fn rename(&self, key: TaskKey, name: TaskRef) {
        let mut tasks = self.lock();
        let known = tasks.refs[key.slot()].as_mut();
        *known.expect("the task is in its set") = name;
    }

    /// Notes that a task is about to leave the set while its response is delayed. Functions of its
    /// own nexus will find it until [`Unit::forget_left`] is called, so that the response is not
    /// sent after theirs.
    pub fn note_left(&self, nexus: NexusId, (task, lun): (TaskRef, LunId)) {
        self.lock().left.push(PendingResponse {
            nexus,
            lun,
            task,
            is_ended: false,
        });
    }

    /// Notes that everything was sent for a task that has left the set.
    pub fn forget_left(&self, task: TaskRef) {
        let left = &mut self.lock().left;
        if let Some(at) = left.iter().position(|left| left.task == task) {
            left.swap_remove(at);
        }
    }

    /// Changes the identifier of a task that has left the set.
    pub fn rename_left(&self, task: TaskRef, name: TaskRef) {
        let mut tasks = self.lock();
        let left = tasks.left.iter_mut().filter(|left| left.task == task);
        left.for_each(|left| left.task = name);
    }

    /// Returns whether a task was aborted by its own nexus after leaving the set.
    #[must_use]
    pub fn is_left_ended(&self, task: TaskRef) -> bool {
        let tasks = self.lock();
        let mut left = tasks.left.iter();
        left.any(|left| left.task == task && left.is_ended)
    }

    /// Executes a task management function on the set, and on tasks of the nexus that have left it.
    ///
    /// All effects on other nexuses are applied here, including aborting their tasks, which
    /// complete with TASK ABORTED, and resetting the unit. Therefore it does not matter if the
    /// connection with the function is closed before the function completes.
    pub fn manage(&self, nexus: NexusId, function: TaskManagement) -> TmfOutcome {
        let (response, aborted) = {
            let mut tasks = self.lock();
            let outcome = tasks.set.manage(nexus, function);
            let refs = outcome.aborted.iter();
            let mut aborted: Vec<_> = refs.filter_map(|key| tasks.refs[key.slot()]).collect();
            // ABORT TASK only applies to tasks in the set. These functions abort all tasks of the
            // nexus, in any state.
            let is_of_all = matches!(
                function,
                TaskManagement::AbortTaskSet
                    | TaskManagement::NexusReset
                    | TaskManagement::ClearTaskSet
                    | TaskManagement::LogicalUnitReset
            );
            let left = tasks.left.iter_mut();
            for left in left.filter(|left| is_of_all && left.nexus == nexus) {
                left.is_ended = true;
                aborted.push(left.task);
            }
            (outcome.response, aborted)
        };
        // Do this after releasing the lock, because the unit has its own locks.
        if function == TaskManagement::LogicalUnitReset {
            self.reset();
        }
        TmfOutcome { response, aborted }
    }

    /// Aborts the tasks sent by a nexus to a LUN that is no longer mapped to this unit. Tasks sent
    /// to other LUNs continue.
    pub fn abort_by_lun(&self, nexus: NexusId, lun: LunId) -> TmfOutcome {
        let mut tasks = self.lock();
        let Tasks {
            set,
            refs,
            luns,
            left,
            ..
        } = &mut *tasks;
        let mut aborted = Vec::new();
        for (slot, (task, _)) in refs
            .iter()
            .zip(&*luns)
            .enumerate()
            .filter(|(_, (_, of))| **of == lun)
        {
            // Use the tag, which doesn't change if the task has a new identifier.
            let (Some(task), Some(tag)) = (*task, set.tag_at(slot)) else {
                continue;
            };
            // Tasks of other nexuses aren't found.
            let outcome = set.manage(nexus, TaskManagement::AbortTask(tag));
            aborted.extend(outcome.aborted.iter().map(|_| task));
        }
        let left = left.iter_mut();
        for left in left.filter(|left| left.nexus == nexus && left.lun == lun) {
            left.is_ended = true;
            aborted.push(left.task);
        }
        TmfOutcome {
            response: TmfResponse::Complete,
            aborted,
        }
    }

    /// Marks the commands aborted by a PREEMPT AND ABORT. Returns the tasks to abort.
    #[must_use]
    pub fn preempt(&self, preempted: &Preemption) -> Vec<TaskRef> {
        let mut tasks = self.lock();
        let Tasks { set, refs, .. } = &mut *tasks;
        let aborted = set.abort_nexuses(|nexus| self.lu.is_preempted(preempted, nexus));
        aborted.iter().filter_map(|key| refs[key.slot()]).collect()
    }

    /// Returns whether a task was aborted by another nexus, so that it must complete with TASK
    /// ABORTED.
    #[must_use]
    pub fn is_cleared(&self, key: TaskKey) -> bool {
        self.lock().set.is_cleared(key)
    }

    /// Executes an ABORT TASK.
    pub fn abort_task(&self, nexus: NexusId, task: TaskRef) -> TmfOutcome {
        self.manage(nexus, TaskManagement::AbortTask(task.tag()))
    }

    /// A panic in another thread cannot leave the task set in an inconsistent state, so ignore
    /// poisoning.
    fn lock(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tasks {
    /// Returns whether a nexus cannot start tasks, because it was replaced, or because the nexus it
    /// has replaced still has tasks on this unit.
    fn is_succession_pending(&self, nexus: NexusId) -> bool {
        let mut all = self.successions.iter();
        all.any(|s| s.old == nexus || (s.new == nexus && self.set.has_tasks_of(s.old)))
    }
}

#[cfg(test)]
mod tests {
    use riser_scsi::device_server::Request;
    use riser_scsi::nexus::{PortName, TargetPort};
    use riser_scsi::opcode::Opcode;
    use riser_scsi::step::{Expected, Status, Step, TaskAttribute};

    use super::super::TaskIdx;
    use super::*;
    use crate::fixture::unit_config;

    #[test]
    fn tasks_on_different_workers_have_unique_tags() {
        let lu = LogicalUnit::new(unit_config(2048)).unwrap();
        let unit = Unit::new(UnitIdx(0), Arc::new(lu), 3);
        let register = |worker, generation| {
            // Each worker numbers its channels starting from 0.
            let task = TaskRef {
                worker,
                channel: 0,
                index: TaskIdx(0),
                generation,
            };
            let taken = unit.register(
                NexusId(7),
                NewTask::default(),
                (task, LunId::ZERO),
                false,
                None,
            );
            taken.map(|(_, started)| started)
        };
        assert_eq!(register(0, 1), Ok(true));
        assert_eq!(register(1, 1), Ok(true));
        assert_eq!(register(0, 1 + (1 << 16)), Ok(true));
        assert_eq!(register(2, 1), Err(TaskRefused::Full(Throttle::Queue)));
    }

    #[test]
    fn replaced_nexus_blocks_successor() {
        let lu = LogicalUnit::new(unit_config(2048)).unwrap();
        let unit = Unit::new(UnitIdx(0), Arc::new(lu), 8);
        let mut generation = 0;
        let mut register = |nexus| {
            let new = NewTask::default();
            let task = TaskRef {
                worker: 0,
                channel: 0,
                index: TaskIdx(0),
                generation,
            };
            generation += 1;
            let entered = unit.register(NexusId(nexus), new, (task, LunId::ZERO), false, None);
            entered.map(|(key, _)| key)
        };
        let held = register(1).unwrap();
        unit.succeed(NexusId(1), NexusId(2));
        assert_eq!(register(1), Err(TaskRefused::Busy), "it starts no more");
        assert_eq!(register(2), Err(TaskRefused::Busy));
        register(3).unwrap();
        let _ = unit.remove(held);
        register(2).unwrap();
        assert_eq!(register(1), Err(TaskRefused::Busy));
        unit.end_nexus(NexusId(1));
        assert!(unit.lock().successions.is_empty());
    }

    /// A write of the replaced nexus may still be executed after a write of another initiator.
    #[test]
    fn reserve_outlives_tasks_of_replaced_nexus() {
        let lu = LogicalUnit::new(unit_config(2048)).unwrap();
        let unit = Unit::new(UnitIdx(0), Arc::new(lu), 8);
        for nexus in 1..=3 {
            let ports = Nexus {
                initiator: PortName::Srp([nexus as u8; 16]),
                target: TargetPort {
                    name: PortName::Srp([9; 16]),
                    relative_id: 1,
                    group: 1,
                },
            };
            unit.lu.add_nexus(NexusId(nexus), ports);
        }
        let run = |nexus, cdb: [u8; 6]| {
            let request = Request {
                nexus: NexusId(nexus),
                cdb: &cdb,
                opcode: Opcode::of(&cdb),
                expected: Expected::default(),
                attribute: TaskAttribute::Simple,
                luns: &[],
                read_only: false,
            };
            match unit.lu.start(&request).1 {
                Step::Respond(response) => response.status,
                step => panic!("{step:?}"),
            }
        };
        const TEST_UNIT_READY: [u8; 6] = [0; 6];
        const RESERVE: [u8; 6] = [0x16, 0, 0, 0, 0, 0];
        for nexus in 1..=3 {
            let _attention = run(nexus, TEST_UNIT_READY);
        }
        assert_eq!(run(1, RESERVE), Status::Good);
        let mut generation = 0;
        let (held, _) = register_next(&unit, &mut generation, NexusId(1), 0);
        unit.succeed(NexusId(1), NexusId(2));
        assert_eq!(run(3, TEST_UNIT_READY), Status::ReservationConflict);
        let _ = unit.remove(held);
        assert_eq!(run(3, TEST_UNIT_READY), Status::Good);
        assert!(unit.lock().reserving.is_empty());
        // If there are no tasks, it's released immediately.
        assert_eq!(run(2, RESERVE), Status::Good);
        unit.succeed(NexusId(2), NexusId(4));
        assert_eq!(run(3, TEST_UNIT_READY), Status::Good);
    }

    /// Registers a task with the next generation, which was sent to `lun`.
    fn register_next(
        unit: &Unit,
        generation: &mut u32,
        nexus: NexusId,
        lun: u32,
    ) -> (TaskKey, (TaskRef, LunId)) {
        *generation += 1;
        let task = TaskRef {
            worker: 0,
            channel: 0,
            index: TaskIdx(0),
            generation: *generation,
        };
        let name = (task, LunId::new(lun).unwrap());
        let taken = unit.register(nexus, NewTask::default(), name, false, None);
        (taken.unwrap().0, name)
    }

    #[test]
    fn dismissed_nexus_is_kept_for_last_task() {
        let lu = LogicalUnit::new(unit_config(2048)).unwrap();
        let unit = Unit::new(UnitIdx(0), Arc::new(lu), 64);
        let ports = Nexus {
            initiator: PortName::Srp([1; 16]),
            target: TargetPort {
                name: PortName::Srp([2; 16]),
                relative_id: 1,
                group: 0,
            },
        };
        let nexus = NexusId(7);
        let is_known = || unit.lu.nexus(nexus).is_some();
        let mut generation = 0;
        let mut register = || register_next(&unit, &mut generation, nexus, 0).0;
        unit.admit(nexus, &ports);
        let (one, two) = (register(), register());
        unit.dismiss(nexus);
        let _ = unit.remove(one);
        assert!(is_known(), "it has a task");
        let _ = unit.remove(two);
        assert!(!is_known());
        // The nexus is added again while it has a task.
        unit.admit(nexus, &ports);
        let three = register();
        unit.dismiss(nexus);
        unit.admit(nexus, &ports);
        let _ = unit.remove(three);
        assert!(is_known(), "it sees the unit again");
        unit.dismiss(nexus);
        assert!(!is_known(), "without a task at once");
    }

    #[test]
    fn abort_by_lun_includes_reassigned_and_pending() {
        let lu = LogicalUnit::new(unit_config(2048)).unwrap();
        let unit = Unit::new(UnitIdx(0), Arc::new(lu), 64);
        let mut generation = 0;
        let mut register =
            |nexus, number| register_next(&unit, &mut generation, NexusId(nexus), number);
        let ((first, five), (_, six)) = (register(7, 5), register(7, 6));
        // It was reassigned to another connection.
        let heir = TaskRef {
            channel: 1,
            ..five.0
        };
        unit.rename(first, heir);
        register(8, 5);
        let (key, gone) = register(7, 5);
        unit.note_left(NexusId(7), gone);
        unit.note_left(NexusId(7), (six.0, LunId::new(6).unwrap()));
        let _ = unit.remove(key);
        let managed = unit.abort_by_lun(NexusId(7), LunId::new(5).unwrap());
        assert_eq!(managed.aborted, [heir, gone.0]);
        assert!(unit.is_left_ended(gone.0) && !unit.is_left_ended(six.0));
    }

    #[test]
    fn task_with_data_is_refused_behind_limits() {
        let lu = LogicalUnit::new(unit_config(2048)).unwrap();
        let unit = Unit::new(UnitIdx(0), Arc::new(lu), 64);
        let mut generation = 0;
        let mut register = |nexus, channel, attribute, limited: Option<bool>| {
            generation += 1;
            let task = TaskRef {
                worker: 0,
                channel,
                index: TaskIdx(0),
                generation,
            };
            let new = NewTask {
                attribute,
                awaits_data: true,
                ..NewTask::default()
            };
            let taken = unit.register(NexusId(nexus), new, (task, LunId::ZERO), true, limited);
            taken.map(|(key, _)| (key, task))
        };
        let (simple, ordered) = (TaskAttribute::Simple, TaskAttribute::Ordered);
        let (key, first) = register(7, 0, simple, Some(true)).unwrap();
        // Queued behind the first task, or not ordered after it.
        register(7, 0, ordered, Some(true)).unwrap();
        register(8, 1, ordered, None).unwrap();
        register(7, 1, TaskAttribute::HeadOfQueue, None).unwrap();
        // Ordered after the ORDERED task, and not in the same queue.
        let full = TaskRefused::Full(Throttle::Limit);
        assert_eq!(register(7, 0, simple, None).unwrap_err(), full);
        assert_eq!(register(7, 1, simple, Some(true)).unwrap_err(), full);
        assert_eq!(register(7, 0, simple, Some(false)).unwrap_err(), full);
        unit.end_limited(NexusId(7), first, true);
        let _ = unit.remove(key);
        assert_eq!(register(7, 1, simple, None).unwrap_err(), full);
        unit.end_limited(NexusId(7), first, true);
        register(7, 1, simple, None).unwrap();
        assert!(unit.lock().limited.is_empty());
    }
}
