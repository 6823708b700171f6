//! A logical unit and its task set, as connections of all fabrics share it.

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

/// Number of a logical unit within the server: the same for every worker, portal and initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitIdx(pub u32);

/// Tasks of one nexus that a unit always accepts, if its set has room for as many.
const MIN_SHARE: u32 = 256;

/// A logical unit, its task set and its limits.
#[derive(Debug)]
pub struct Unit {
    /// Number of the unit, the same on all workers.
    pub index: UnitIdx,
    /// Logical unit as SCSI defines it, without its tasks.
    pub lu: Arc<LogicalUnit>,
    /// Limits of all initiators together.
    pub limits: Arc<Limiter>,
    tasks: Mutex<Tasks>,
    resets: AtomicU64,
    aborts: AtomicU64,
    vain_aborts: AtomicU64,
}

/// The task set, and the names of its tasks.
#[derive(Debug)]
struct Tasks {
    set: TaskSet,
    /// By slot, as far as slots were used.
    refs: Vec<Option<TaskRef>>,
    /// Likewise: the LUN that the initiator used for the unit.
    luns: Vec<LunId>,
    /// At most as many as all connections have contexts.
    left: Vec<PendingAnswer>,
    /// At most two for each connection.
    limited: Vec<LimitQueue>,
    /// Nexuses that no longer see the unit, and have tasks in the set.
    leaving: Vec<NexusId>,
    /// Nexuses that newer ones have replaced, until their sessions end.
    successions: Vec<Succession>,
    /// Replaced nexuses with tasks in the set: RESERVE ends with the last one.
    reserving: Vec<NexusId>,
}

/// A nexus that another one of the same ports has replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Succession {
    old: NexusId,
    new: NexusId,
}

/// Tasks of one connection that wait for limits, and either read or write.
#[derive(Debug)]
struct LimitQueue {
    nexus: NexusId,
    line: LimitLine,
    tasks: u32,
}

/// A worker, a connection there, and whether its tasks write.
type LimitLine = (u16, u64, bool);

/// A task that has left the set, but whose answer, or data that go with it, have yet to be sent.
#[derive(Debug)]
struct PendingAnswer {
    nexus: NexusId,
    lun: LunId,
    task: TaskRef,
    /// Its own nexus has ended it.
    is_ended: bool,
}

/// Task-management functions that a unit has carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TmfCounts {
    /// Resets of the unit.
    pub resets: u64,
    /// ABORT TASK of a task that was there.
    pub aborts: u64,
    /// ABORT TASK of a task that was not, or no longer, there.
    pub vain_aborts: u64,
}

/// Reason for which a task does not enter the set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TaskRefused {
    /// The set has no room, for this reason: TASK SET FULL.
    #[error("the task set is full")]
    Full(Throttle),
    /// The nexus that this one has replaced still has tasks at the unit, which could change the
    /// medium after this one; or the nexus has been replaced itself: BUSY.
    #[error("the unit has tasks of the nexus that was replaced")]
    Busy,
}

/// Outcome of a task-management function.
#[derive(Debug)]
pub struct TmfOutcome {
    /// The answer, once the tasks are gone.
    pub response: TmfResponse,
    /// Tasks to stop, whose connections have yet to be notified.
    pub aborted: Vec<TaskRef>,
}

impl Unit {
    /// A unit whose task set holds at most `capacity` tasks of all connections together. One nexus
    /// gets a quarter of them at most, so that no host can keep the others out.
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

    /// Enters a nexus that sees the unit, or sees it again; what the unit knows of it stays.
    pub fn admit(&self, nexus: NexusId, ports: &Nexus) {
        let mut tasks = self.lock();
        tasks.leaving.retain(|other| *other != nexus);
        if self.lu.nexus(nexus).is_none() {
            self.lu.add_nexus(nexus, ports.clone());
        }
    }

    /// Forgets a nexus that no longer sees the unit, at the end of its last task: one whose nexus
    /// is not known conflicts with any reservation. No more of its tasks come.
    pub fn dismiss(&self, nexus: NexusId) {
        // Under the lock of the set, as `admit` and `remove`: a nexus that is admitted again is
        // not forgotten for a task that ends at the same moment.
        let mut tasks = self.lock();
        tasks.successions.retain(|s| s.new != nexus);
        if !tasks.set.has_tasks_of(nexus) {
            self.lu.remove_nexus(nexus);
        } else if !tasks.leaving.contains(&nexus) {
            tasks.leaving.push(nexus);
        }
    }

    /// A nexus replaces another one of the same ports. The old one starts no further tasks here. As
    /// long as it has tasks in the set, a disk that hangs may still execute them: tasks of the new
    /// nexus are refused, and RESERVE of the old one keeps other initiators out.
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

    /// The session of a nexus ends, which has no tasks any more.
    pub fn end_nexus(&self, nexus: NexusId) {
        let is_of = |s: &Succession| s.old == nexus || s.new == nexus;
        self.lock().successions.retain(|s| !is_of(s));
        self.lu.remove_nexus(nexus);
    }

    /// Resets the unit itself; its tasks are aborted apart from that.
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

    /// Returns the functions so far.
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

    /// Whether a nexus has tasks in the set.
    #[must_use]
    pub fn has_tasks_of(&self, nexus: NexusId) -> bool {
        self.lock().set.has_tasks_of(nexus)
    }

    /// Returns the number of entries of each kind that it has for sessions.
    #[must_use]
    pub fn entries(&self) -> [(&'static str, usize); 5] {
        let tasks = self.lock();
        [
            ("tasks", tasks.set.len()),
            ("unsent answers", tasks.left.len()),
            ("waits for limits", tasks.limited.len()),
            ("leaving nexuses", tasks.leaving.len()),
            ("nexuses", self.lu.nexuses()),
        ]
    }

    /// Takes a task into the set; returns whether it may start at once. Its initiator uses `lun`
    /// for the unit. `limited` is there if it waits for limits first: to write or to read.
    ///
    /// A task that `keeps_memory` (data or tables) is refused where the order would make it wait
    /// for one that waits for limits, since it would keep the memory until then. One that waits
    /// behind that one for the same limits is not.
    ///
    /// # Errors
    /// [`TaskRefused`].
    ///
    /// # Panics
    /// If a task of this name is in the set.
    pub fn register(
        &self,
        nexus: NexusId,
        new: NewTask,
        (task, lun): (TaskRef, LunId),
        keeps_memory: bool,
        limited: Option<bool>,
    ) -> Result<(TaskKey, bool), TaskRefused> {
        // One lock for all of it: between the look at those that wait for limits and its own entry,
        // no other worker may add one.
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

    /// Returns the number of tasks that wait for limits.
    #[must_use]
    pub fn limit_waits(&self) -> u32 {
        self.lock().limited.iter().map(|line| line.tasks).sum()
    }

    /// Returns the number of connections whose tasks wait for limits, apart for reads and writes.
    #[cfg(test)]
    pub(crate) fn limited(&self) -> usize {
        self.lock().limited.len()
    }

    /// Ends the wait for limits of a task that was registered with one.
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

    /// Notes that the Data-Out of a task has come; returns whether it may start now, and which
    /// others may.
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

    /// Whether tasks of other nexuses wait for the end of a task that has started.
    #[must_use]
    pub fn holds_others(&self, key: TaskKey) -> bool {
        self.lock().set.holds_others(key)
    }

    /// Removes a task; returns whether another nexus had ended it, and which tasks may start now.
    ///
    /// # Panics
    /// If it is not in the set.
    pub fn remove(&self, key: TaskKey) -> (bool, Vec<TaskRef>) {
        let mut tasks = self.lock();
        let Tasks {
            set,
            refs,
            leaving,
            reserving,
            ..
        } = &mut *tasks;
        // Before the slot is free, and perhaps another task's.
        let was_cleared = set.is_cleared(key);
        assert!(set.remove(key), "a task leaves its set once");
        refs[key.slot()] = None;
        // Before others start, which RESERVE of the nexus would still keep out.
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

    /// Gives a task another name.
    ///
    /// # Panics
    /// If it is not in the set.
    pub fn rename(&self, key: TaskKey, name: TaskRef) {
        let mut tasks = self.lock();
        let known = tasks.refs[key.slot()].as_mut();
        *known.expect("the task is in its set") = name;
    }

    /// Notes that a task is about to leave the set while its answer has to wait. Functions of its
    /// own nexus find it until [`Unit::forget_left`], so that nothing of it follows their
    /// responses.
    pub fn note_left(&self, nexus: NexusId, (task, lun): (TaskRef, LunId)) {
        self.lock().left.push(PendingAnswer {
            nexus,
            lun,
            task,
            is_ended: false,
        });
    }

    /// Notes that nothing of a task that has left the set remains to be sent.
    pub fn forget_left(&self, task: TaskRef) {
        let left = &mut self.lock().left;
        if let Some(at) = left.iter().position(|left| left.task == task) {
            left.swap_remove(at);
        }
    }

    /// Gives a task that has left the set another name.
    pub fn rename_left(&self, task: TaskRef, name: TaskRef) {
        let mut tasks = self.lock();
        let left = tasks.left.iter_mut().filter(|left| left.task == task);
        left.for_each(|left| left.task = name);
    }

    /// Whether its own nexus has ended a task since it left the set.
    #[must_use]
    pub fn is_left_ended(&self, task: TaskRef) -> bool {
        let tasks = self.lock();
        let mut left = tasks.left.iter();
        left.any(|left| left.task == task && left.is_ended)
    }

    /// Carries out a task-management function on the set, and on the nexus's tasks that have left
    /// it.
    ///
    /// Its effect on other nexuses happens here, with the abort of their tasks: those are answered
    /// with TASK ABORTED, and a reset resets the unit. So it does not matter whether the connection
    /// that asked for the function is still there at its end.
    pub fn manage(&self, nexus: NexusId, function: TaskManagement) -> TmfOutcome {
        let (response, aborted) = {
            let mut tasks = self.lock();
            let outcome = tasks.set.manage(nexus, function);
            let refs = outcome.aborted.iter();
            let mut aborted: Vec<_> = refs.filter_map(|key| tasks.refs[key.slot()]).collect();
            // ABORT TASK is for a task in the set; these end the nexus's tasks wherever they have
            // come to.
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
        // After the lock of the set is released: the unit has locks of its own.
        if function == TaskManagement::LogicalUnitReset {
            self.reset();
        }
        TmfOutcome { response, aborted }
    }

    /// Ends the tasks that a nexus has sent to a LUN which no longer leads to this unit. Its tasks
    /// by other LUNs go on.
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
            // By its tag, which a task keeps that has another name now.
            let (Some(task), Some(tag)) = (*task, set.tag_at(slot)) else {
                continue;
            };
            // One of another nexus is not there for this one.
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

    /// Marks the commands that a PREEMPT AND ABORT aborts; returns those to stop.
    #[must_use]
    pub fn preempt(&self, preempted: &Preemption) -> Vec<TaskRef> {
        let mut tasks = self.lock();
        let Tasks { set, refs, .. } = &mut *tasks;
        let aborted = set.abort_nexuses(|nexus| self.lu.is_preempted(preempted, nexus));
        aborted.iter().filter_map(|key| refs[key.slot()]).collect()
    }

    /// Whether a task was ended by another nexus than its own, and is to be answered with TASK
    /// ABORTED.
    #[must_use]
    pub fn is_cleared(&self, key: TaskKey) -> bool {
        self.lock().set.is_cleared(key)
    }

    /// Carries out ABORT TASK on one task.
    pub fn abort_task(&self, nexus: NexusId, task: TaskRef) -> TmfOutcome {
        self.manage(nexus, TaskManagement::AbortTask(task.tag()))
    }

    /// A panic elsewhere cannot have left the set half changed, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tasks {
    /// Whether a nexus may start no task, because it has been replaced, or because the nexus that
    /// it replaces still has tasks here.
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
    fn tasks_of_one_nexus_at_two_workers_do_not_collide() {
        let lu = LogicalUnit::new(unit_config(2048)).unwrap();
        let unit = Unit::new(UnitIdx(0), Arc::new(lu), 3);
        let register = |worker, generation| {
            // Every worker numbers its channels from 0.
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
    fn replaced_nexus_holds_its_successor_up() {
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

    /// A write of the replaced nexus may still reach the disk, after one of another initiator.
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
        // Without tasks it ends at once.
        assert_eq!(run(2, RESERVE), Status::Good);
        unit.succeed(NexusId(2), NexusId(4));
        assert_eq!(run(3, TEST_UNIT_READY), Status::Good);
    }

    /// Registers a task of the next generation that was sent to a LUN.
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
    fn a_nexus_that_is_dismissed_is_known_until_its_last_task_has_ended() {
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
        // It comes back while it has a task.
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
    fn functions_for_a_number_that_leads_elsewhere_end_what_was_sent_by_it() {
        let lu = LogicalUnit::new(unit_config(2048)).unwrap();
        let unit = Unit::new(UnitIdx(0), Arc::new(lu), 64);
        let mut generation = 0;
        let mut register =
            |nexus, number| register_next(&unit, &mut generation, NexusId(nexus), number);
        let ((first, five), (_, six)) = (register(7, 5), register(7, 6));
        // Another connection carries it on.
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
    fn a_task_keeps_no_data_behind_one_that_waits_for_limits() {
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
        // Behind it in its line, or not behind it in the order.
        register(7, 0, ordered, Some(true)).unwrap();
        register(8, 1, ordered, None).unwrap();
        register(7, 1, TaskAttribute::HeadOfQueue, None).unwrap();
        // Behind the ORDERED one, elsewhere.
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
