//! Command counts and latencies for a logical unit of a target.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use riser_admin_api::live::LiveShare;
use riser_config::MAX_WORKERS;
use riser_scsi::opcode::Kind;
use riser_scsi::protection::ProtectionError;

use super::histogram::{Counter, Histogram, Times};
use super::outcome::{Clock, Done, Fault};
use super::{CLASSES, Stage, Tally, Tracer, class_name};
use crate::log::RateLimit;
use crate::warn_limited;

/// Memory used by a unit for each worker that has served it, in bytes.
pub const WORKER_BYTES: usize = size_of::<WorkerStats>();

/// Average interval between timed commands.
pub const SAMPLE: u64 = 16;

/// Returns true if the command with this number is in the sample. Multiples of the golden ratio are
/// evenly distributed, so a periodic workload (a read, a write, a read, …) does not exclude any
/// kind of command.
fn is_sampled(n: u64) -> bool {
    n.wrapping_mul(0x9e37_79b9_7f4a_7c15) < u64::MAX / SAMPLE
}

/// Maximum number of initiators without a session kept by a unit.
pub const MAX_INITIATORS: usize = 256;

/// Failed commands by reason.
#[derive(Debug, Default)]
pub struct Faults(Mutex<Tally<Fault>>);

impl Faults {
    fn count(&self, fault: Fault) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .count(fault);
    }

    /// Returns the number of failed commands by reason.
    #[must_use]
    pub fn tally(&self) -> Tally<Fault> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// Commands of the same kind on a worker.
#[derive(Debug, Default)]
struct ClassStats {
    /// Timed commands only.
    stages: [Histogram; Stage::ALL.len()],
    total: Histogram,
    bytes: Counter,
}

/// All commands on a worker.
#[derive(Debug, Default)]
struct WorkerStats {
    classes: [ClassStats; CLASSES.len()],
    begun: Counter,
    ended: Counter,
}

/// Totals for commands of the same kind on all workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassCounts {
    /// By stage, for timed commands only.
    pub stages: [Times; Stage::ALL.len()],
    /// From receiving the command until its response was sent.
    pub total: Times,
    /// Number of bytes transferred by successful commands, in both directions.
    pub bytes: u64,
}

/// Statistics for a logical unit of a target. Aborted commands and commands of closed connections
/// are only counted in `queue_depth`, while they are active.
#[derive(Debug)]
pub struct LunStats {
    target: String,
    lun: u16,
    workers: Box<[OnceLock<Arc<WorkerStats>>]>,
    faults: Faults,
    /// Limit for messages about failed checks of protection information.
    complaints: Mutex<RateLimit>,
    kept: Mutex<BTreeMap<String, LiveShare>>,
    /// Clock for timed commands.
    clock: Option<Clock>,
    /// True if there is a tracer.
    is_traced: AtomicBool,
    tracer: Mutex<Option<Arc<Tracer>>>,
}

impl LunStats {
    /// Creates empty statistics. Without a clock, stages start and end at the start times of worker
    /// rounds, which is suitable for virtual time.
    #[must_use]
    pub fn new(target: &str, lun: u16, clock: Option<Clock>) -> Self {
        Self {
            target: target.to_owned(),
            lun,
            workers: (0..MAX_WORKERS).map(|_| OnceLock::new()).collect(),
            faults: Faults::default(),
            complaints: Mutex::default(),
            kept: Mutex::default(),
            clock,
            is_traced: AtomicBool::new(false),
            tracer: Mutex::new(None),
        }
    }

    /// Traces new commands, or stops tracing if `None`.
    pub fn trace(&self, tracer: Option<Arc<Tracer>>) {
        let mut own = self.tracer.lock().unwrap_or_else(PoisonError::into_inner);
        // Commands read this flag without locking. It's harmless if a trace includes or misses a
        // few commands at its start and end.
        self.is_traced.store(tracer.is_some(), Ordering::Relaxed);
        *own = tracer;
    }

    pub(super) fn clock(&self) -> Option<Clock> {
        self.clock
    }

    /// Returns the name of the target in the configuration.
    #[must_use]
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Returns the LUN of the unit on the target.
    #[must_use]
    pub fn lun(&self) -> u16 {
        self.lun
    }

    /// Returns the number of failed commands on all workers, by kind, status and sense key.
    #[must_use]
    pub fn faults(&self) -> Tally<Fault> {
        self.faults.tally()
    }

    /// Logs a failed check of protection information.
    #[cold]
    pub(super) fn log_check(
        &self,
        class: Kind,
        check: ProtectionError,
        lba: Option<u64>,
        now: Instant,
    ) {
        let limit = self.complaints.lock();
        let mut limit = limit.unwrap_or_else(PoisonError::into_inner);
        let (target, lun, op) = (self.target(), self.lun, class_name(class));
        warn_limited!(limit, now, target, lun, op, lba, "{check}");
    }

    fn served(&self) -> impl Iterator<Item = &WorkerStats> {
        self.workers.iter().filter_map(|w| Some(&**w.get()?))
    }

    /// Returns the totals for commands of a kind.
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

    /// Returns the same totals without stages.
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

    /// Returns the number of active commands on all workers.
    #[must_use]
    pub fn queue_depth(&self) -> u64 {
        // A command can start and complete on different workers.
        let sum =
            |of: fn(&WorkerStats) -> u64| self.served().fold(0u64, |n, w| n.wrapping_add(of(w)));
        // Read this before `begun`. If a command completes in the meantime, it's counted as active
        // instead of causing an underflow.
        let ended = sum(|w| w.ended.get());
        let begun = sum(|w| w.begun.get());
        begun.saturating_sub(ended)
    }

    /// Adds the totals of a closed session to its initiator. They are lost if there are too many
    /// initiators.
    pub fn keep(&self, initiator: &str, share: LiveShare) {
        let mut kept = self.lock_kept();
        if let Some(sum) = kept.get_mut(initiator) {
            *sum += share;
        // A peer can use a new name for each login, so limit the number of names.
        } else if kept.len() < MAX_INITIATORS {
            kept.insert(initiator.to_owned(), share);
        }
    }

    /// Returns the totals of closed sessions by initiator.
    #[must_use]
    pub fn kept(&self) -> BTreeMap<String, LiveShare> {
        self.lock_kept().clone()
    }

    fn lock_kept(&self) -> MutexGuard<'_, BTreeMap<String, LiveShare>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the memory usage in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        let kept = self.lock_kept();
        let names = kept.keys().map(|name| name.len() + size_of::<String>());
        size_of::<Self>()
            + size_of_val(&*self.workers)
            + self.served().count() * WORKER_BYTES
            + names.sum::<usize>()
            + kept.len() * size_of::<LiveShare>()
    }

    /// Returns the statistics for a worker.
    ///
    /// # Panics
    /// Panics if the worker number is out of range.
    fn worker(&self, worker: u16) -> Arc<WorkerStats> {
        Arc::clone(self.workers[usize::from(worker)].get_or_init(Arc::default))
    }
}

/// Statistics for a session on a logical unit. They belong to the worker of the session's
/// connection.
#[derive(Debug)]
pub struct SessionStats {
    lun: Arc<LunStats>,
    stats: Arc<WorkerStats>,
    commands: [Counter; CLASSES.len()],
    bytes: [Counter; CLASSES.len()],
    faults: Faults,
}

/// Totals for commands of the same kind in a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassTotals {
    /// Number of completed commands with GOOD or any other status.
    pub commands: u64,
    /// Number of bytes transferred from and to the initiator.
    pub bytes: u64,
}

impl SessionStats {
    /// Creates empty statistics.
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

    /// Returns the statistics for the unit.
    #[must_use]
    pub fn lun(&self) -> &Arc<LunStats> {
        &self.lun
    }

    /// Returns the totals for commands of a kind.
    #[must_use]
    pub fn class(&self, class: Kind) -> ClassTotals {
        ClassTotals {
            commands: self.commands[class as usize].get(),
            bytes: self.bytes[class as usize].get(),
        }
    }

    /// Returns the totals for all commands. The kind of a command determines the direction for its
    /// data.
    #[must_use]
    pub fn share(&self) -> LiveShare {
        let mut share = LiveShare::default();
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

    /// Returns the number of failed commands in this session, by kind, status and sense key.
    #[must_use]
    pub fn faults(&self) -> Tally<Fault> {
        self.faults.tally()
    }

    /// Returns true if commands to the unit are traced.
    #[inline]
    pub(super) fn is_traced(&self) -> bool {
        self.lun.is_traced.load(Ordering::Relaxed)
    }

    /// Returns the tracer, if any.
    pub(super) fn tracer(&self) -> Option<Arc<Tracer>> {
        let tracer = self.lun.tracer.lock();
        tracer.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts a new command. Returns true if it is in the sample of timed commands.
    pub(super) fn count_started(&self) -> bool {
        let n = self.stats.begun.get();
        self.stats.begun.add(1);
        is_sampled(n)
    }

    /// Removes an active command. `done` is the outcome if it was completed with a response.
    pub(super) fn count_finished(&self, done: Option<&Done>) {
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
            // Data of a failed command had no effect, so it isn't counted.
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
    fn sample_covers_periodic_workloads() {
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
