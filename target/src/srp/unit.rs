//! What a channel knows of logical units, and how it names a task to other channels.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use riser_scsi::config::Identity;
use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::LunId;
use riser_scsi::nexus::NexusId;
use riser_scsi::reservation::Preempted;
use riser_scsi::srp::WireLun;
use riser_scsi::task::{
    NewTask, RegisterError, TaskKey, TaskManagement, TaskSet, TaskTag, TmfResponse,
};

use super::ioctx::SendIdx;
use crate::qos::Limiter;
use crate::stats::LunStats;

/// Number of a logical unit within the server: the same for every worker, portal and initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitIdx(pub u32);

/// A task, named so that any worker can find it: worker, channel, context, and the context's use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskRef {
    /// The worker's number.
    pub worker: u16,
    /// The channel's number at that worker, never used again.
    pub channel: u64,
    /// The context.
    pub ioctx: SendIdx,
    /// Which use of the context.
    pub generation: u32,
}

impl TaskRef {
    /// The tag under which the task is in its unit's task set: the whole name, which no other task
    /// has. SRP tags are unique on their channel only, and a nexus may have channels at several workers.
    fn tag(self) -> TaskTag {
        TaskTag(
            u128::from(self.worker) << 112
                | u128::from(self.channel) << 48
                | u128::from(self.generation) << 16
                | u128::from(self.ioctx.0),
        )
    }
}

/// Tasks of one nexus that a unit always accepts, if its set has room for as many.
const MIN_SHARE: u32 = 256;

/// A logical unit as channels share it.
#[derive(Debug)]
pub struct Unit {
    /// Its number.
    pub index: UnitIdx,
    /// The unit itself.
    pub lu: Arc<LogicalUnit>,
    /// How fast it may be used by all initiators together.
    pub limits: Arc<Limiter>,
    tasks: Mutex<Tasks>,
    resets: AtomicU64,
    aborts: AtomicU64,
    vain_aborts: AtomicU64,
}

/// The task set, and who each task is.
#[derive(Debug)]
struct Tasks {
    set: TaskSet,
    refs: Vec<Option<TaskRef>>,
    /// The numbers that their initiators used for the unit, and the tags that they have in the set, by slot.
    names: Vec<(LunId, TaskTag)>,
    /// No more than the contexts of all channels.
    left: Vec<Left>,
    /// Those that wait for limits; no more than the channels, twice.
    limited: Vec<Limited>,
}

/// Tasks of one channel that wait for limits, and either read or write.
#[derive(Debug)]
struct Limited {
    nexus: NexusId,
    line: LimitedLine,
    tasks: u32,
}

/// A worker, a channel there, and whether its tasks write.
type LimitedLine = (u16, u64, bool);

/// A task that has left the set, but whose answer, or data that go with it, have yet to be sent.
#[derive(Debug)]
struct Left {
    nexus: NexusId,
    lun: LunId,
    task: TaskRef,
    /// Its own nexus has ended it.
    is_ended: bool,
}

/// Task management that a unit has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Management {
    /// Resets of the unit.
    pub resets: u64,
    /// ABORT TASK of a task that was there.
    pub aborts: u64,
    /// ABORT TASK of a task that was not there, or not any more.
    pub vain_aborts: u64,
}

/// A unit's task set has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the task set is full")]
pub struct SetFull;

/// What a task-management function concerns.
#[derive(Debug)]
pub struct Managed {
    /// The answer, once the tasks are gone.
    pub response: TmfResponse,
    /// Tasks to stop.
    pub aborted: Vec<TaskRef>,
}

impl Unit {
    /// A unit whose task set holds at most `capacity` tasks of all channels together. One nexus
    /// gets a quarter of them at most, so that no host can keep the others out.
    #[must_use]
    pub fn new(index: UnitIdx, lu: Arc<LogicalUnit>, capacity: u32) -> Self {
        let share = (capacity / 4).max(MIN_SHARE).min(capacity);
        Self {
            index,
            lu,
            tasks: Mutex::new(Tasks {
                set: TaskSet::new(capacity, share),
                refs: vec![None; capacity as usize],
                names: vec![(LunId::ZERO, TaskTag(0)); capacity as usize],
                left: Vec::new(),
                limited: Vec::new(),
            }),
            limits: Arc::default(),
            resets: AtomicU64::new(0),
            aborts: AtomicU64::new(0),
            vain_aborts: AtomicU64::new(0),
        }
    }

    /// Resets the unit itself; its tasks are aborted apart from that.
    fn reset(&self) {
        self.resets.fetch_add(1, Ordering::Relaxed);
        self.lu.reset();
    }

    /// An initiator has asked for a task to be aborted, which was there or not.
    pub fn count_abort(&self, is_there: bool) {
        let count = if is_there {
            &self.aborts
        } else {
            &self.vain_aborts
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Task management so far.
    #[must_use]
    pub fn management(&self) -> Management {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Management {
            resets: count(&self.resets),
            aborts: count(&self.aborts),
            vain_aborts: count(&self.vain_aborts),
        }
    }

    /// Tasks in the set.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.lock().set.len()
    }

    /// Takes a task into the set, whose initiator calls the unit by a number, and says whether it may start at once.
    ///
    /// A task that `keeps_memory` (data or tables) and would have to wait in the order for one that waits for limits is refused, unless
    /// it waits behind that one anyway (`limited`: it waits for limits, to write or to read): it would
    /// keep that until then.
    ///
    /// # Errors
    /// The set is full: TASK SET FULL.
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
    ) -> Result<(TaskKey, bool), SetFull> {
        let mut tasks = self.lock();
        let own = limited.map(|is_write| (task.worker, task.channel, is_write));
        let others = |other: &Limited| other.nexus == nexus && Some(other.line) != own;
        if keeps_memory
            && tasks.limited.iter().any(others)
            && tasks.set.would_hold(nexus, new.attribute)
        {
            return Err(SetFull);
        }
        let key = match tasks.set.register(nexus, task.tag(), new) {
            Ok(key) => key,
            Err(RegisterError::Full) => return Err(SetFull),
            Err(RegisterError::Overlapped(_)) => panic!("{task:?} is in the set already"),
        };
        tasks.refs[key.slot()] = Some(task);
        tasks.names[key.slot()] = (lun, task.tag());
        let started = tasks.set.try_start(key);
        if let Some(line) = own {
            let same = |other: &&mut Limited| other.nexus == nexus && other.line == line;
            match tasks.limited.iter_mut().find(same) {
                Some(known) => known.tasks += 1,
                None => tasks.limited.push(Limited {
                    nexus,
                    line,
                    tasks: 1,
                }),
            }
        }
        Ok((key, started))
    }

    /// Tasks that wait for limits.
    #[must_use]
    pub fn limit_waits(&self) -> u32 {
        self.lock().limited.iter().map(|line| line.tasks).sum()
    }

    /// Channels whose tasks wait for limits, apart for reads and writes.
    #[cfg(test)]
    pub(crate) fn limited(&self) -> usize {
        self.lock().limited.len()
    }

    /// A task that was registered so waits for limits no longer.
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

    /// The Data-Out of a task has come: whether it may start now, and which others.
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

    /// Removes a task; returns whether another nexus had ended it, and which tasks may start now.
    ///
    /// # Panics
    /// If it is not in the set.
    pub fn remove(&self, key: TaskKey) -> (bool, Vec<TaskRef>) {
        let mut tasks = self.lock();
        let Tasks { set, refs, .. } = &mut *tasks;
        let was_cleared = set.is_cleared(key);
        assert!(set.remove(key), "a task leaves its set once");
        refs[key.slot()] = None;
        let started = std::iter::from_fn(|| set.poll_start())
            .filter_map(|key| refs[key.slot()])
            .collect();
        (was_cleared, started)
    }

    /// A task has another name from now on.
    ///
    /// # Panics
    /// If it is not in the set.
    pub fn rename(&self, key: TaskKey, name: TaskRef) {
        let mut tasks = self.lock();
        let known = tasks.refs[key.slot()].as_mut();
        *known.expect("the task is in its set") = name;
    }

    /// A task is about to leave the set while its answer has to wait: functions of its own nexus name it until
    /// [`Unit::forget_left`], so that nothing of it follows their responses.
    pub fn note_left(&self, nexus: NexusId, (task, lun): (TaskRef, LunId)) {
        self.lock().left.push(Left {
            nexus,
            lun,
            task,
            is_ended: false,
        });
    }

    /// Nothing of a task that has left the set is to be sent any more.
    pub fn forget_left(&self, task: TaskRef) {
        let left = &mut self.lock().left;
        if let Some(at) = left.iter().position(|left| left.task == task) {
            left.swap_remove(at);
        }
    }

    /// A task that has left the set has another name from now on.
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

    /// Carries out a task-management function on the set, and on the nexus's tasks that have left it.
    ///
    /// What it means to others takes effect here, with the abort of their tasks: those are answered with TASK
    /// ABORTED, and a reset resets the unit. So it does not matter whether the connection that
    /// asked for it is still there at its end.
    pub fn manage(&self, nexus: NexusId, function: TaskManagement) -> Managed {
        let (response, aborted) = {
            let mut tasks = self.lock();
            let outcome = tasks.set.manage(nexus, function);
            let refs = outcome.aborted.iter();
            let mut aborted: Vec<_> = refs.filter_map(|key| tasks.refs[key.slot()]).collect();
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
        if function == TaskManagement::LogicalUnitReset {
            self.reset();
        }
        Managed { response, aborted }
    }

    /// Ends the tasks that a nexus has sent by a number which leads to this unit no longer: its tasks by other numbers
    /// go on.
    pub fn abort_by_number(&self, nexus: NexusId, lun: LunId) -> Managed {
        let mut tasks = self.lock();
        let Tasks {
            set,
            refs,
            names,
            left,
            ..
        } = &mut *tasks;
        let all = refs.iter().zip(&*names).filter(|(_, (of, _))| *of == lun);
        let mut aborted = Vec::new();
        // A task that has another name now keeps its tag.
        for (task, tag) in all.filter_map(|(task, (_, tag))| Some(((*task)?, *tag))) {
            // One of another nexus is not there for this one.
            let outcome = set.manage(nexus, TaskManagement::AbortTask(tag));
            aborted.extend(outcome.aborted.iter().map(|_| task));
        }
        let left = left.iter_mut();
        for left in left.filter(|left| left.nexus == nexus && left.lun == lun) {
            left.is_ended = true;
            aborted.push(left.task);
        }
        Managed {
            response: TmfResponse::Complete,
            aborted,
        }
    }

    /// Marks the commands that a PREEMPT AND ABORT aborts: those of this list are to be stopped.
    #[must_use]
    pub fn preempt(&self, preempted: &Preempted) -> Vec<TaskRef> {
        let mut tasks = self.lock();
        let Tasks { set, refs, .. } = &mut *tasks;
        let aborted = set.abort_nexuses(|nexus| self.lu.is_preempted(preempted, nexus));
        aborted.iter().filter_map(|key| refs[key.slot()]).collect()
    }

    /// Whether a task was ended by another nexus than its own, and is to be answered with TASK ABORTED.
    #[must_use]
    pub fn is_cleared(&self, key: TaskKey) -> bool {
        self.lock().set.is_cleared(key)
    }

    /// Carries out ABORT TASK on one task.
    pub fn abort_task(&self, nexus: NexusId, task: TaskRef) -> Managed {
        self.manage(nexus, TaskManagement::AbortTask(task.tag()))
    }

    /// A panic elsewhere cannot have left the set half changed, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a number leads to.
#[derive(Clone, Debug)]
pub struct Mapping {
    /// The unit.
    pub unit: Arc<Unit>,
    /// Where the commands to it are counted.
    pub stats: Arc<LunStats>,
    /// Whether writes through this LUN are refused, even if the unit allows them.
    pub read_only: bool,
}

/// Units that numbers led to in earlier maps than the last one, at most.
const MAX_LEFT: usize = 64;

/// Numbers that lead nowhere and whose units are remembered, at most.
const MAX_GONE: usize = 256;

/// Whether a number leads to another unit than its initiator takes it for. The maps of a session that lead the
/// number to one unit have this in common.
#[derive(Clone, Debug, Default)]
pub struct Moved(Arc<AtomicBool>);

impl Moved {
    fn new(moved: bool) -> Self {
        Self(Arc::new(AtomicBool::new(moved)))
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The initiator knows which unit it is.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Which units an initiator takes numbers for. A unit is known by its names: one that was without a medium is
/// made again when its disk is there.
#[derive(Clone, Debug, Default)]
pub struct Meant {
    units: BTreeMap<LunId, Identity>,
    /// There were too many. A number that is not among `units` may be taken for any unit.
    is_partial: bool,
}

impl Meant {
    /// Numbers whose units are known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.units.len()
    }

    /// Whether it says nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.units.is_empty() && !self.is_partial
    }
}

/// The logical units that one initiator may see at one target port. Several numbers may lead to one.
///
/// # A number that comes to lead to another unit
/// The initiator may send commands for the unit before until it has learned of the change. So all of them are
/// answered with REPORTED LUNS DATA HAS CHANGED, and not only the first one, until the initiator has an INQUIRY page
/// with the unit's names. That the number led nowhere in between makes no difference; if it leads back to the unit
/// before, nothing has changed. Commands under way at the unit before go on, and functions for the number find them.
#[derive(Debug, Default)]
pub struct LunMap {
    luns: Vec<LunId>,
    mappings: Vec<Mapping>,
    moved: Vec<Moved>,
    /// What the initiator takes numbers for that have moved, or lead nowhere.
    meant: Meant,
    /// Units that numbers led to before.
    left: Vec<(LunId, Weak<Unit>)>,
    /// How fast the initiator may be at this target.
    limiter: Option<Arc<Limiter>>,
}

impl LunMap {
    /// A map of these, in ascending order of their numbers. Of two with one number the first counts.
    #[must_use]
    pub fn new(entries: impl IntoIterator<Item = (LunId, Mapping)>) -> Self {
        let mut entries: Vec<_> = entries.into_iter().collect();
        entries.sort_by_key(|(lun, _)| *lun);
        entries.dedup_by_key(|(lun, _)| *lun);
        let (luns, mappings): (Vec<_>, Vec<_>) = entries.into_iter().unzip();
        Self {
            moved: luns.iter().map(|_| Moved::default()).collect(),
            meant: Meant::default(),
            left: Vec::new(),
            luns,
            mappings,
            limiter: None,
        }
    }

    /// It takes the place of another one in the same session.
    pub fn follow(&mut self, old: &Self) {
        self.inherit(old.meant());
        for (place, lun) in self.luns.iter().enumerate() {
            if let Ok(before) = old.luns.binary_search(lun)
                && self.has_moved(place)
                && self.identity(place) == old.identity(before)
            {
                self.moved[place] = old.moved[before].clone();
            }
        }
        let is_there = |lun: &LunId, unit: &Weak<Unit>| {
            let place = self.luns.binary_search(lun);
            place.is_ok_and(|place| {
                let present = Arc::as_ptr(&self.mappings[place].unit);
                std::ptr::eq(present, unit.as_ptr())
            })
        };
        // Workers go on with the last one for a moment: a unit that is idle now may get commands by it still.
        let last = old.luns.iter().zip(&old.mappings);
        let last = last.map(|(lun, mapping)| (*lun, Arc::downgrade(&mapping.unit)));
        let mut left: Vec<_> = last.filter(|(lun, unit)| !is_there(lun, unit)).collect();
        let most = left.len() + MAX_LEFT;
        for (lun, unit) in &old.left {
            let mut known = left.iter();
            let is_known = known.any(|(other, left)| other == lun && left.ptr_eq(unit));
            let is_idle = unit.upgrade().is_none_or(|unit| unit.tasks() == 0);
            if !is_there(lun, unit) && !is_known && !is_idle && left.len() < most {
                left.push((*lun, unit.clone()));
            }
        }
        self.left = left;
    }

    /// The session's initiator takes numbers for these units.
    pub fn inherit(&mut self, mut meant: Meant) {
        for (place, lun) in self.luns.iter().enumerate() {
            let known = meant.units.get(lun);
            let Some(identity) = self.identity(place) else {
                // It may be the unit that the initiator takes it for, and nothing gets there yet.
                continue;
            };
            let is_other = known.map_or(meant.is_partial, |known| known != identity);
            if !is_other {
                meant.units.remove(lun);
            }
            self.moved[place] = Moved::new(is_other);
        }
        let is_gone = |lun: &&LunId| self.luns.binary_search(lun).is_err();
        let surplus = meant.units.keys().filter(is_gone).skip(MAX_GONE);
        for lun in surplus.copied().collect::<Vec<_>>() {
            meant.units.remove(&lun);
            meant.is_partial = true;
        }
        self.meant = meant;
    }

    /// Which units the initiator takes numbers for at present.
    #[must_use]
    pub fn meant(&self) -> Meant {
        let mut meant = self.meant.clone();
        for (place, lun) in self.luns.iter().enumerate() {
            if !self.has_moved(place) {
                let identity = self.identity(place).cloned();
                meant
                    .units
                    .extend(identity.map(|identity| (*lun, identity)));
            }
        }
        meant
    }

    /// The names of the unit at a place, if they are known.
    fn identity(&self, place: usize) -> Option<&Identity> {
        let lu = &self.mappings[place].unit.lu;
        lu.has_names().then(|| &lu.config().identity)
    }

    /// The units that may have commands for a number: the one that it leads to, then those that it led to before.
    #[must_use]
    pub fn with_left(&self, lun: WireLun) -> Vec<Arc<Unit>> {
        self.addressed(lun)
            .into_iter()
            .chain(self.left(lun))
            .collect()
    }

    /// Units that a number led to before, which may have commands for it.
    pub fn left(&self, lun: WireLun) -> impl Iterator<Item = Arc<Unit>> {
        let wanted = LunId::addressed(lun);
        let left = self.left.iter();
        let left = left.filter(move |(lun, _)| Some(*lun) == wanted);
        left.filter_map(|(_, unit)| unit.upgrade())
    }

    fn has_moved(&self, place: usize) -> bool {
        self.moved[place].is_set()
    }

    /// There if the number at a place leads to another unit than the initiator takes it for.
    #[must_use]
    pub fn moved(&self, place: usize) -> Option<&Moved> {
        Some(&self.moved[place]).filter(|moved| moved.is_set())
    }

    /// Whether a number leads to another unit than the initiator takes it for. By such a number it ends no commands
    /// of others: it means those at the unit before.
    #[must_use]
    pub fn is_moved(&self, lun: WireLun) -> bool {
        self.find(lun).is_some_and(|place| self.has_moved(place))
    }

    /// The same, for an initiator with limits.
    #[must_use]
    pub fn with_limiter(mut self, limiter: Option<Arc<Limiter>>) -> Self {
        self.limiter = limiter;
        self
    }

    /// The initiator's limits.
    #[must_use]
    pub fn limiter(&self) -> Option<&Arc<Limiter>> {
        self.limiter.as_ref()
    }

    /// Whether the initiator has the same limits, and what it does is counted in the same places, where
    /// [`LunMap::is_same`] holds.
    #[must_use]
    pub fn is_accounted_alike(&self, other: &Self) -> bool {
        let mut pairs = self.mappings.iter().zip(&other.mappings);
        let is_as_fast = match (&self.limiter, &other.limiter) {
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            (own, other) => own.is_none() && other.is_none(),
        };
        is_as_fast && pairs.all(|(a, b)| Arc::ptr_eq(&a.stats, &b.stats))
    }

    /// The numbers, for REPORT LUNS.
    #[must_use]
    pub fn luns(&self) -> &[LunId] {
        &self.luns
    }

    /// Where an addressed unit stands in the map.
    #[must_use]
    pub fn find(&self, lun: WireLun) -> Option<usize> {
        self.luns.binary_search(&LunId::addressed(lun)?).ok()
    }

    /// What a place of the map leads to.
    ///
    /// # Panics
    /// If there is no such place.
    #[must_use]
    pub fn mapping(&self, place: usize) -> &Mapping {
        &self.mappings[place]
    }

    /// An addressed unit.
    #[must_use]
    pub fn addressed(&self, lun: WireLun) -> Option<Arc<Unit>> {
        let place = self.find(lun)?;
        Some(Arc::clone(&self.mappings[place].unit))
    }

    /// Whether the number that addresses a unit is read-only. By such a number an initiator ends no
    /// commands of others: one that may not write must not stop others.
    #[must_use]
    pub fn is_read_only(&self, lun: WireLun) -> bool {
        let place = self.find(lun);
        place.is_some_and(|place| self.mappings[place].read_only)
    }

    /// Whether the same numbers lead to the same units, with the same rights.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let mut pairs = self.mappings.iter().zip(&other.mappings);
        self.luns == other.luns
            && pairs.all(|(a, b)| Arc::ptr_eq(&a.unit, &b.unit) && a.read_only == b.read_only)
    }

    /// Whether some number leads to a unit.
    #[must_use]
    pub fn has(&self, unit: &Arc<Unit>) -> bool {
        self.mappings.iter().any(|m| Arc::ptr_eq(&m.unit, unit))
    }

    /// Units that some number leads to that is not read-only and has not moved, each once.
    #[must_use]
    pub fn resettable(&self) -> Vec<Arc<Unit>> {
        let mut units: Vec<Arc<Unit>> = Vec::new();
        let known = self.mappings.iter().enumerate();
        let known = known.filter(|(place, mapping)| !mapping.read_only && !self.has_moved(*place));
        for (_, mapping) in known {
            if !units.iter().any(|unit| Arc::ptr_eq(unit, &mapping.unit)) {
                units.push(Arc::clone(&mapping.unit));
            }
        }
        units
    }

    /// Every number and its unit.
    pub fn iter(&self) -> impl Iterator<Item = (LunId, &Arc<Unit>)> {
        let units = self.mappings.iter().map(|mapping| &mapping.unit);
        self.luns.iter().copied().zip(units)
    }
}

#[cfg(test)]
mod tests {
    use riser_scsi::step::TaskAttribute;

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
                ioctx: SendIdx(0),
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
        assert_eq!(register(2, 1), Err(SetFull));
    }

    fn mapping(serial: u32) -> Mapping {
        let mut config = unit_config(2048);
        config.identity.serial = serial.to_string();
        let lu = Arc::new(LogicalUnit::new(config).unwrap());
        Mapping {
            unit: Arc::new(Unit::new(UnitIdx(serial), lu, 3)),
            stats: Arc::new(LunStats::new("demo", 3, None)),
            read_only: false,
        }
    }

    fn map(numbers: impl IntoIterator<Item = u32>, mapping: &Mapping) -> LunMap {
        let number = |n| (LunId::new(n).unwrap(), mapping.clone());
        LunMap::new(numbers.into_iter().map(number))
    }

    #[test]
    fn numbers_that_went_away_are_remembered_within_a_bound() {
        let (one, other) = (mapping(1), mapping(2));
        let most = MAX_GONE as u32;
        let mut luns = LunMap::default();
        luns.follow(&map(0..most + 9, &one));
        assert_eq!(luns.meant().len(), MAX_GONE);
        let mut back = map([0, most, most + 100], &one);
        back.follow(&luns);
        let moved = |luns: &LunMap| luns.moved.iter().map(Moved::is_set).collect::<Vec<_>>();
        // One that is not known any more may have been another unit, and so may one that never was there.
        assert_eq!(moved(&back), [false, true, true]);
        let mut once_more = map([0, most, most + 100], &one);
        once_more.follow(&back);
        back.moved(1).unwrap().clear();
        assert_eq!(
            moved(&once_more),
            [false, false, true],
            "an answer was on its way"
        );
        let mut elsewhere = map([0, most], &other);
        elsewhere.follow(&once_more);
        assert_eq!(moved(&elsewhere), [true, true]);
    }

    #[test]
    fn a_unit_whose_names_are_not_known_yet_is_not_another_one() {
        let (one, other) = (mapping(1), mapping(2));
        let mut nameless = mapping(9);
        let mut config = unit_config(2048);
        config.identity.serial = "unknown".to_owned();
        let lu = LogicalUnit::new(config).unwrap().without_names();
        nameless.unit = Arc::new(Unit::new(UnitIdx(9), Arc::new(lu), 3));
        for (before, after, is_moved) in [
            (&one, &one, false),
            (&one, &other, true),
            (&nameless, &one, false),
        ] {
            let mut between = map([5], &nameless);
            between.follow(&map([5], before));
            assert!(!between.moved[0].is_set());
            let mut last = map([5], after);
            last.follow(&between);
            assert_eq!(last.moved[0].is_set(), is_moved);
        }
    }

    #[test]
    fn functions_find_units_whose_commands_come_after_the_change() {
        let (one, other) = (mapping(1), mapping(2));
        let lun = [0, 5, 0, 0, 0, 0, 0, 0];
        let mut second = map([5], &other);
        second.follow(&map([5], &one));
        assert_eq!(one.unit.tasks(), 0);
        let found = |luns: &LunMap, unit: &Arc<Unit>| {
            let units = luns.with_left(lun);
            units.iter().any(|known| Arc::ptr_eq(known, unit))
        };
        assert!(found(&second, &one.unit) && found(&second, &other.unit));
        let mut third = LunMap::default();
        third.follow(&second);
        assert!(found(&third, &other.unit));
        assert!(!found(&third, &one.unit), "it is idle still");
    }

    #[test]
    fn functions_for_a_number_that_leads_elsewhere_end_what_was_sent_by_it() {
        let lu = LogicalUnit::new(unit_config(2048)).unwrap();
        let unit = Unit::new(UnitIdx(0), Arc::new(lu), 64);
        let mut generation = 0;
        let mut register = |nexus, number| {
            generation += 1;
            let task = TaskRef {
                worker: 0,
                channel: 0,
                ioctx: SendIdx(0),
                generation,
            };
            let name = (task, LunId::new(number).unwrap());
            let taken = unit.register(NexusId(nexus), NewTask::default(), name, false, None);
            (taken.unwrap().0, name)
        };
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
        let managed = unit.abort_by_number(NexusId(7), LunId::new(5).unwrap());
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
                ioctx: SendIdx(0),
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
        assert_eq!(register(7, 0, simple, None).unwrap_err(), SetFull);
        assert_eq!(register(7, 1, simple, Some(true)).unwrap_err(), SetFull);
        assert_eq!(register(7, 0, simple, Some(false)).unwrap_err(), SetFull);
        unit.end_limited(NexusId(7), first, true);
        let _ = unit.remove(key);
        assert_eq!(register(7, 1, simple, None).unwrap_err(), SetFull);
        unit.end_limited(NexusId(7), first, true);
        register(7, 1, simple, None).unwrap();
        assert!(unit.lock().limited.is_empty());
    }
}
