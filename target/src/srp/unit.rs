//! What a channel knows of logical units, and how it names a task to other channels.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_scsi::lu::LogicalUnit;
use riser_scsi::lun::{LunAddress, LunId};
use riser_scsi::nexus::NexusId;
use riser_scsi::srp::WireLun;
use riser_scsi::step::TaskAttribute;
use riser_scsi::task::{
    Concurrency, RegisterError, TaskKey, TaskManagement, TaskSet, TaskTag, TmfResponse,
};

use super::ioctx::SendIdx;
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
    pub channel: u32,
    /// The context.
    pub ioctx: SendIdx,
    /// Which use of the context.
    pub generation: u32,
}

impl TaskRef {
    /// The tag under which the task stands in its unit's task set. SRP tags are unique on their
    /// channel only, so a nexus of several channels needs another name.
    fn tag(self) -> TaskTag {
        TaskTag(
            u64::from(self.channel) << 32
                | u64::from(self.generation & 0xffff) << 16
                | u64::from(self.ioctx.0),
        )
    }
}

/// A logical unit as channels share it.
#[derive(Debug)]
pub struct Unit {
    /// Its number.
    pub index: UnitIdx,
    /// The unit itself.
    pub lu: Arc<LogicalUnit>,
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

/// What a task-management function concerns.
#[derive(Debug)]
pub struct Managed {
    /// The answer, once the tasks are gone.
    pub response: TmfResponse,
    /// Tasks to stop.
    pub aborted: Vec<TaskRef>,
    /// Nexuses that lost tasks to another one.
    pub cleared: Vec<NexusId>,
}

impl Unit {
    /// A unit whose task set holds at most `capacity` tasks of all channels together.
    #[must_use]
    pub fn new(index: UnitIdx, lu: Arc<LogicalUnit>, capacity: u32) -> Self {
        Self {
            index,
            lu,
            tasks: Mutex::new(Tasks {
                set: TaskSet::new(capacity),
                refs: vec![None; capacity as usize],
            }),
            resets: AtomicU64::new(0),
            aborts: AtomicU64::new(0),
            vain_aborts: AtomicU64::new(0),
        }
    }

    /// Resets the unit, when the tasks of its set are gone.
    pub fn reset(&self) {
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

    /// Takes a task into the set, and says whether it may start at once.
    ///
    /// # Errors
    /// The set is full.
    pub fn register(
        &self,
        nexus: NexusId,
        attribute: TaskAttribute,
        concurrency: Concurrency,
        task: TaskRef,
    ) -> Result<(TaskKey, bool), RegisterError> {
        let mut tasks = self.lock();
        let key = tasks
            .set
            .register(nexus, task.tag(), attribute, concurrency)?;
        tasks.refs[key.slot()] = Some(task);
        let started = tasks.set.try_start(key);
        Ok((key, started))
    }

    /// Takes a task out of the set, and tells which may start now.
    ///
    /// # Panics
    /// If it is not in the set.
    pub fn remove(&self, key: TaskKey) -> Vec<TaskRef> {
        let mut tasks = self.lock();
        let Tasks { set, refs } = &mut *tasks;
        assert!(set.remove(key), "a task leaves its set once");
        refs[key.slot()] = None;
        std::iter::from_fn(|| set.poll_start())
            .filter_map(|key| refs[key.slot()])
            .collect()
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

    /// Carries out a task-management function on the set.
    pub fn manage(&self, nexus: NexusId, function: TaskManagement) -> Managed {
        let mut tasks = self.lock();
        let outcome = tasks.set.manage(nexus, function);
        Managed {
            response: outcome.response,
            aborted: outcome
                .aborted
                .iter()
                .filter_map(|key| tasks.refs[key.slot()])
                .collect(),
            cleared: outcome.cleared,
        }
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

/// The logical units that one initiator may see at one target port.
#[derive(Debug, Default)]
pub struct LunMap {
    luns: Vec<LunId>,
    units: Vec<Arc<Unit>>,
    stats: Vec<Arc<LunStats>>,
}

impl LunMap {
    /// A map of these, in ascending order of their numbers. Of two with one number the first counts.
    #[must_use]
    pub fn new(entries: impl IntoIterator<Item = (LunId, Arc<Unit>, Arc<LunStats>)>) -> Self {
        let mut entries: Vec<_> = entries.into_iter().collect();
        entries.sort_by_key(|(lun, ..)| *lun);
        entries.dedup_by_key(|(lun, ..)| *lun);
        let mut map = Self::default();
        for (lun, unit, stats) in entries {
            map.luns.push(lun);
            map.units.push(unit);
            map.stats.push(stats);
        }
        map
    }

    /// The numbers, for REPORT LUNS.
    #[must_use]
    pub fn luns(&self) -> &[LunId] {
        &self.luns
    }

    /// Where an addressed unit stands in the map.
    #[must_use]
    pub fn find(&self, lun: WireLun) -> Option<usize> {
        match LunAddress::parse(lun) {
            Ok(LunAddress::Unit(lun)) => self.luns.binary_search(&lun).ok(),
            Ok(LunAddress::WellKnown(_)) | Err(_) => None,
        }
    }

    /// The unit at a place of the map.
    ///
    /// # Panics
    /// If there is no such place.
    #[must_use]
    pub fn unit(&self, place: usize) -> &Arc<Unit> {
        &self.units[place]
    }

    /// Where the commands to the unit at a place of the map are counted.
    ///
    /// # Panics
    /// If there is no such place.
    #[must_use]
    pub fn stats(&self, place: usize) -> &Arc<LunStats> {
        &self.stats[place]
    }

    /// An addressed unit.
    #[must_use]
    pub fn addressed(&self, lun: WireLun) -> Option<Arc<Unit>> {
        self.find(lun).map(|place| Arc::clone(self.unit(place)))
    }

    /// Whether the same numbers lead to the same units.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let units = self.units.iter().zip(&other.units);
        self.luns == other.luns && units.into_iter().all(|(a, b)| Arc::ptr_eq(a, b))
    }

    /// Whether some number leads to a unit.
    #[must_use]
    pub fn has(&self, unit: &Arc<Unit>) -> bool {
        self.units.iter().any(|u| Arc::ptr_eq(u, unit))
    }

    /// Every number and its unit.
    pub fn iter(&self) -> impl Iterator<Item = (LunId, &Arc<Unit>)> {
        self.luns.iter().copied().zip(&self.units)
    }
}
