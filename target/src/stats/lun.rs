//! Totals and times of the commands to a logical unit of a target.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use riser_config::MAX_WORKERS;
use riser_scsi::opcode::Kind;

use super::histogram::{Counter, Histogram, Times};
use super::outcome::{Clock, Done, Fault};
use super::{CLASSES, Stage, Tally, Tracer};

/// Bytes that a unit takes at a worker that has served it.
pub const WORKER_BYTES: usize = size_of::<WorkerStats>();

/// Interval of the commands that are timed.
pub const SAMPLE: u64 = 16;

/// Returns true if the command with this number is in the sample. Multiples of the golden ratio
/// are spread evenly, so no pattern of a workload (a read, a write, a read, …) keeps a kind of
/// command out of it.
fn is_sampled(n: u64) -> bool {
    n.wrapping_mul(0x9e37_79b9_7f4a_7c15) < u64::MAX / SAMPLE
}

/// Initiators whose sessions are over and whose names a unit keeps.
pub const MAX_INITIATORS: usize = 256;

/// Failed commands, by how they failed.
#[derive(Debug, Default)]
pub struct Faults(Mutex<Tally<Fault>>);

impl Faults {
    fn count(&self, fault: Fault) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .count(fault);
    }

    /// Returns the failures and their numbers.
    #[must_use]
    pub fn tally(&self) -> Tally<Fault> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// Commands of one kind at one worker.
#[derive(Debug, Default)]
struct ClassStats {
    /// Of commands that were timed.
    stages: [Histogram; Stage::ALL.len()],
    total: Histogram,
    bytes: Counter,
}

/// All commands at one worker.
#[derive(Debug, Default)]
struct WorkerStats {
    classes: [ClassStats; CLASSES.len()],
    begun: Counter,
    ended: Counter,
}

/// Totals of commands of one kind at all workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCounts {
    /// By stage, of commands that were timed.
    pub stages: [Times; Stage::ALL.len()],
    /// From the command to the end of its answer.
    pub total: Times,
    /// Data of commands that succeeded, both ways, in bytes.
    pub bytes: u64,
}

/// A logical unit of a target. Commands that were aborted or torn down are in `queue_depth` while
/// they last, and nowhere else.
#[derive(Debug)]
pub struct LunStats {
    target: String,
    lun: u16,
    workers: Box<[OnceLock<Arc<WorkerStats>>]>,
    faults: Faults,
    kept: Mutex<BTreeMap<String, InitiatorStats>>,
    /// Gives the time to commands that are timed.
    clock: Option<Clock>,
    /// There is a tracer.
    is_traced: AtomicBool,
    tracer: Mutex<Option<Arc<Tracer>>>,
}

impl LunStats {
    /// Nothing was done yet. Without a clock, stages begin and end at the times of workers' rounds,
    /// as under virtual time.
    #[must_use]
    pub fn new(target: &str, lun: u16, clock: Option<Clock>) -> Self {
        Self {
            target: target.to_owned(),
            lun,
            workers: (0..MAX_WORKERS).map(|_| OnceLock::new()).collect(),
            faults: Faults::default(),
            kept: Mutex::default(),
            clock,
            is_traced: AtomicBool::new(false),
            tracer: Mutex::new(None),
        }
    }

    /// Looks at commands that begin from now on, or at none.
    pub fn trace(&self, tracer: Option<Arc<Tracer>>) {
        let mut own = self.tracer.lock().unwrap_or_else(PoisonError::into_inner);
        // Looked at by each command without the lock; a command too early or too late in a trace
        // does no harm.
        self.is_traced.store(tracer.is_some(), Ordering::Relaxed);
        *own = tracer;
    }

    pub(super) fn clock(&self) -> Option<Clock> {
        self.clock
    }

    /// The target's name in the configuration.
    #[must_use]
    pub fn target(&self) -> &str {
        &self.target
    }

    /// The unit's number in the target.
    #[must_use]
    pub fn lun(&self) -> u16 {
        self.lun
    }

    /// Failed commands at all workers, by kind, status and sense key.
    #[must_use]
    pub fn faults(&self) -> Tally<Fault> {
        self.faults.tally()
    }

    fn served(&self) -> impl Iterator<Item = &WorkerStats> {
        self.workers.iter().filter_map(|w| Some(&**w.get()?))
    }

    /// Returns the totals of commands of a kind.
    #[must_use]
    pub fn class(&self, class: Kind) -> ClassCounts {
        let mut counts = self.total(class);
        for worker in self.served() {
            let stats = &worker.classes[class as usize];
            for (times, stage) in counts.stages.iter_mut().zip(&stats.stages) {
                stage.add_to(times);
            }
        }
        counts
    }

    /// The same without its stages.
    #[must_use]
    pub fn total(&self, class: Kind) -> ClassCounts {
        let mut counts = ClassCounts::default();
        for worker in self.served() {
            let stats = &worker.classes[class as usize];
            stats.total.add_to(&mut counts.total);
            counts.bytes += stats.bytes.get();
        }
        counts
    }

    /// Commands that have begun and not ended, at all workers.
    #[must_use]
    pub fn queue_depth(&self) -> u64 {
        // A command may end at another worker than it began at.
        let sum =
            |of: fn(&WorkerStats) -> u64| self.served().fold(0u64, |n, w| n.wrapping_add(of(w)));
        // Before `begun`: a command that ends in between is then counted as under way, and not as
        // a negative one.
        let ended = sum(|w| w.ended.get());
        let begun = sum(|w| w.begun.get());
        begun.saturating_sub(ended)
    }

    /// A session is over: what it has done stays with its initiator's name, unless there are too
    /// many.
    pub fn keep(&self, initiator: &str, share: InitiatorStats) {
        let mut kept = self.lock_kept();
        if let Some(sum) = kept.get_mut(initiator) {
            *sum += share;
        // A peer may log in under a new name each time, so the number of names is bounded.
        } else if kept.len() < MAX_INITIATORS {
            kept.insert(initiator.to_owned(), share);
        }
    }

    /// Returns the totals of initiators in sessions that are over.
    #[must_use]
    pub fn kept(&self) -> BTreeMap<String, InitiatorStats> {
        self.lock_kept().clone()
    }

    fn lock_kept(&self) -> MutexGuard<'_, BTreeMap<String, InitiatorStats>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn memory(&self) -> usize {
        let kept = self.lock_kept();
        let names = kept.keys().map(|name| name.len() + size_of::<String>());
        size_of::<Self>()
            + size_of_val(&*self.workers)
            + self.served().count() * WORKER_BYTES
            + names.sum::<usize>()
            + kept.len() * size_of::<InitiatorStats>()
    }

    /// Returns the statistics of a worker.
    ///
    /// # Panics
    /// If there cannot be such a worker.
    fn worker(&self, worker: u16) -> Arc<WorkerStats> {
        Arc::clone(self.workers[usize::from(worker)].get_or_init(Arc::default))
    }
}

/// Statistics of one session at a logical unit: of one worker, as the session's connection is.
#[derive(Debug)]
pub struct SessionStats {
    lun: Arc<LunStats>,
    stats: Arc<WorkerStats>,
    commands: [Counter; CLASSES.len()],
    bytes: [Counter; CLASSES.len()],
    faults: Faults,
}

/// Totals of one session's commands of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassTotals {
    /// Commands that were answered, with GOOD status or another.
    pub commands: u64,
    /// Data from and to the initiator, in bytes.
    pub bytes: u64,
}

/// Totals of an initiator at a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InitiatorStats {
    /// Commands that were answered, with GOOD status or another.
    pub commands: u64,
    /// Data to the initiator, in bytes.
    pub read: u64,
    /// Data from the initiator, in bytes.
    pub written: u64,
}

impl std::ops::AddAssign for InitiatorStats {
    fn add_assign(&mut self, other: Self) {
        self.commands += other.commands;
        self.read += other.read;
        self.written += other.written;
    }
}

impl SessionStats {
    /// Nothing was done yet.
    #[must_use]
    pub fn new(lun: Arc<LunStats>, worker: u16) -> Self {
        Self {
            stats: lun.worker(worker),
            lun,
            commands: Default::default(),
            bytes: Default::default(),
            faults: Faults::default(),
        }
    }

    /// The unit that these are a part of.
    #[must_use]
    pub fn lun(&self) -> &Arc<LunStats> {
        &self.lun
    }

    /// Returns the totals of commands of a kind.
    #[must_use]
    pub fn class(&self, class: Kind) -> ClassTotals {
        ClassTotals {
            commands: self.commands[class as usize].get(),
            bytes: self.bytes[class as usize].get(),
        }
    }

    /// Returns the totals of all commands. The kind of a command decides in which direction its
    /// data count.
    #[must_use]
    pub fn share(&self) -> InitiatorStats {
        let mut share = InitiatorStats::default();
        for class in CLASSES {
            let view = self.class(class);
            share.commands += view.commands;
            match class {
                Kind::Write | Kind::Unmap | Kind::Compare => share.written += view.bytes,
                Kind::Read | Kind::Flush | Kind::Other => share.read += view.bytes,
            }
        }
        share
    }

    /// Failed commands of this session, by kind, status and sense key.
    #[must_use]
    pub fn faults(&self) -> Tally<Fault> {
        self.faults.tally()
    }

    /// Returns true if a tracer looks at commands to the unit.
    #[inline]
    pub(super) fn is_traced(&self) -> bool {
        self.lun.is_traced.load(Ordering::Relaxed)
    }

    /// Returns the tracer that does.
    pub(super) fn tracer(&self) -> Option<Arc<Tracer>> {
        let tracer = self.lun.tracer.lock();
        tracer.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A command has begun; whether it is in the sample that is timed.
    pub(super) fn begin(&self) -> bool {
        let n = self.stats.begun.get();
        self.stats.begun.add(1);
        is_sampled(n)
    }

    /// A command has ended; `done` if it was answered.
    pub(super) fn end(&self, done: Option<&Done>) {
        self.stats.ended.add(1);
        let Some(done) = done else {
            return;
        };
        let class = done.class as usize;
        let of_class = &self.stats.classes[class];
        if let Some(spent) = done.spent {
            for (histogram, nanos) in of_class.stages.iter().zip(spent) {
                histogram.record(nanos);
            }
        }
        of_class.total.record(done.took);
        self.commands[class].add(1);
        match done.fault {
            // Data of a command that failed were moved to no effect.
            Some(fault) => {
                self.faults.count(fault);
                self.lun.faults.count(fault);
            }
            None => {
                of_class.bytes.add(done.bytes);
                self.bytes[class].add(done.bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_pattern_of_commands_is_in_the_sample() {
        assert!(is_sampled(0), "the first command");
        for period in [1, 2, 3, 4, 8, 16, 17, 32] {
            for first in 0..period {
                let all = (0..10_000).map(|n| first + n * period);
                let sampled = all.filter(|n| is_sampled(*n)).count();
                let expected = 10_000 / SAMPLE as usize;
                assert!(
                    (expected / 2..expected * 2).contains(&sampled),
                    "{sampled} of those at {first} in {period}"
                );
            }
        }
    }
}
