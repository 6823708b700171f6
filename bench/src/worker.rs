//! A clone of a job as a workload of a device: keeps operations in flight, measures them and
//! verifies data.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use riser_block::{Buffer, Completion, Operation, Submissions, Workload};

use super::error::BenchError;
use super::outcome::{OpKind, Verified};
use super::plan::{Arrivals, Op};
use super::reports::{Reporter, WorkerReport};
use super::source::Source;
use super::stats::{Completed, Recorder};
use super::verify::{Check, Verifier};

/// The thread wakes up this time before a planned arrival, because timers of the kernel may be
/// late.
const LEAD: Duration = Duration::from_micros(70);

/// Interval for retrying a write if its blocks are being written by another clone.
const RETRY: Duration = Duration::from_micros(50);

/// Maximum time before checking whether another worker has failed.
const LOOK: Duration = Duration::from_millis(100);

/// Limits from this value on are treated as unlimited.
const ENDLESS: u64 = 1 << 62;

/// State shared by all workers of a job.
pub(super) struct Shared {
    pub(super) verifier: Verifier,
    /// Set to generate new contents for each write.
    pub(super) refill: bool,
    pub(super) fua: bool,
    pub(super) end_fsync: bool,
    /// Set if each trim is followed by a write of the same blocks.
    pub(super) trim_write: bool,
    /// Set if the job measures flushes, instead of using them after writes.
    pub(super) flushes_count: bool,
    /// Pauses between operations.
    pub(super) think: Option<Think>,
    pub(super) clock: Clock,
    /// Set on error to stop all workers in the group.
    pub(super) stop: Arc<AtomicBool>,
}

/// Times of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// Start of the run. Planned arrivals are relative to this.
    pub(super) begun: Instant,
    pub(super) measured_from: Instant,
    pub(super) ends: Option<Instant>,
}

/// Pauses of a job.
#[derive(Clone, Copy, Debug)]
pub(super) struct Think {
    /// Number of operations between two pauses.
    pub(super) blocks: u64,
    /// Duration of a pause after the last completion.
    pub(super) time: Duration,
}

/// Remaining amount of work for a worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct RemainingWork {
    pub(super) ios: u64,
    pub(super) bytes: u64,
}

impl RemainingWork {
    /// Returns completed work relative to this amount, starting from 0. Values that can't be
    /// reached are unlimited.
    pub(super) fn part(self, ios: u64, bytes: u64) -> f64 {
        let part = |done: u64, of: u64| match of < ENDLESS {
            true => done as f64 / of.max(1) as f64,
            false => 0.0,
        };
        part(ios, self.ios).max(part(bytes, self.bytes))
    }

    fn is_nothing(self) -> bool {
        self.ios == 0 || self.bytes == 0
    }

    /// Subtracts an operation.
    fn subtract_operation(&mut self, bytes: u64) {
        self.ios = self.ios.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// A slot for an operation in flight.
struct Slot {
    buffer: Option<Buffer>,
    op: Op,
    due: Instant,
    started: Instant,
    /// Set if this is included in the amount of work.
    counts: bool,
    /// Oldest generation that a read may return, for each block.
    oldest: Vec<Option<u32>>,
    is_filled: bool,
}

/// The next operation to start.
struct Next {
    op: Op,
    due: Instant,
    /// Set if this is included in the amount of work, and wasn't caused by another operation.
    counts: bool,
}

/// A clone of a job.
pub(super) struct Worker {
    shared: Arc<Shared>,
    source: Source,
    arrivals: Option<Arrivals>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Writes that are waiting for another operation on the same blocks, or that follow a trim.
    held: Vec<Next>,
    left: RemainingWork,
    writes: u64,
    /// Number of operations since the last pause.
    unpaused: u64,
    salt: u64,
    recorder: Recorder,
    scratch: Vec<u8>,
    due: Option<Instant>,
    is_synced: bool,
    is_over: bool,
    is_by_time: bool,
    checked: Verified,
    last: Instant,
    error: Option<BenchError>,
    reporter: Reporter,
}

/// Parameters of a worker.
pub(super) struct Parts {
    pub(super) source: Source,
    pub(super) arrivals: Option<Arrivals>,
    pub(super) buffers: Vec<Option<Buffer>>,
    pub(super) left: RemainingWork,
    pub(super) recorder: Recorder,
    /// Size of the largest operation in bytes.
    pub(super) max_block: usize,
    /// Makes the contents different from all other workers.
    pub(super) salt: u64,
    pub(super) reporter: Reporter,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, parts: Parts) -> Self {
        let begun = shared.clock.begun;
        let blocks = parts.max_block / shared.verifier.block.max(1) as usize;
        let slot = |buffer| Slot {
            buffer,
            op: Op::FLUSH,
            due: begun,
            started: begun,
            counts: false,
            oldest: Vec::with_capacity(blocks),
            is_filled: false,
        };
        let slots: Vec<Slot> = parts.buffers.into_iter().map(slot).collect();
        Self {
            free: (0..slots.len() as u32).rev().collect(),
            source: parts.source,
            arrivals: parts.arrivals,
            held: Vec::new(),
            left: parts.left,
            writes: 0,
            unpaused: 0,
            salt: parts.salt,
            recorder: parts.recorder,
            scratch: vec![0; parts.max_block],
            due: None,
            is_synced: !shared.end_fsync,
            // If there are no slots, there is nothing to do.
            is_over: slots.is_empty(),
            is_by_time: false,
            checked: Verified::default(),
            last: begun,
            error: None,
            reporter: parts.reporter,
            slots,
            shared,
        }
    }

    fn outstanding(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    fn fail(&mut self, error: BenchError) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.error.get_or_insert(error);
    }

    /// Starts as many operations as possible. `now` is a recent time.
    fn start_all(&mut self, now: Instant, queue: &mut Submissions) {
        self.due = None;
        // Reading the clock is the most expensive part of planning an operation. The first
        // operation therefore uses the time of the completion that has freed its slot.
        let mut just_now = Some(now);
        while !self.is_over && !self.free.is_empty() {
            let now = just_now.take().unwrap_or_else(Instant::now);
            match self.plan_next(now) {
                Some(next) => self.start(next, now, queue),
                None => break,
            }
        }
        let is_stopped = self.shared.stop.load(Ordering::Relaxed);
        if self.is_over && !self.is_synced && !is_stopped && self.outstanding() == 0 {
            self.is_synced = true;
            let flush = Next {
                op: Op::FLUSH,
                due: now,
                counts: false,
            };
            self.start(flush, now, queue);
        }
    }

    /// Returns the next operation if it can start now. Otherwise, sets `due` if it has to wait, or
    /// `is_over` if there are no more operations.
    fn plan_next(&mut self, now: Instant) -> Option<Next> {
        if self.shared.stop.load(Ordering::Relaxed) {
            self.is_over = true;
            return None;
        }
        if self.is_after(now) {
            self.stop_by_time();
            return None;
        }
        let next = match self.held.pop() {
            Some(next) => next,
            None => self.next_due(now)?,
        };
        self.record_start(next, now)
    }

    /// Returns whether a time is after the end of the run.
    fn is_after(&self, time: Instant) -> bool {
        self.shared.clock.ends.is_some_and(|end| time >= end)
    }

    fn stop_by_time(&mut self) {
        self.is_over = true;
        self.is_by_time = true;
    }

    /// Returns an operation from the source if it is due.
    fn next_due(&mut self, now: Instant) -> Option<Next> {
        if self.left.is_nothing() {
            // A trim in flight will be followed by a write.
            self.is_over = !self.shared.trim_write || self.outstanding() == 0;
            return None;
        }
        let resume = self.resume_time()?;
        if resume > now {
            self.due = Some(resume.min(now + LOOK));
            return None;
        }
        let mut due = now;
        let mut kind = None;
        if let Some(arrivals) = &self.arrivals {
            let (next, at) = arrivals.peek();
            due = self.shared.clock.begun + at;
            kind = Some(next);
            if self.is_after(due) {
                self.stop_by_time();
                return None;
            }
            if due > now {
                self.due = Some((due - LEAD).min(now + LOOK));
                return None;
            }
        }
        let Some(op) = self.source.next(&self.shared.verifier, kind) else {
            self.is_over = true;
            return None;
        };
        if op.kind == OpKind::Flush {
            // Flushes after writes don't have a planned arrival.
            due = now;
        } else if let Some(arrivals) = &mut self.arrivals {
            arrivals.advance(op.len());
        }
        // As in fio, `number_ios` only includes reads, writes and trims.
        let counts = op.kind != OpKind::Flush || self.shared.flushes_count;
        self.unpaused += u64::from(counts);
        Some(Next { op, due, counts })
    }

    /// Returns the earliest start time of the next operation. Returns `None` if operations before a
    /// pause are still in flight.
    fn resume_time(&mut self) -> Option<Instant> {
        match self.shared.think {
            Some(think) if self.unpaused >= think.blocks => {
                if self.outstanding() > 0 {
                    return None;
                }
                let resume = self.last + think.time;
                if Instant::now() >= resume {
                    self.unpaused = 0;
                }
                Some(resume)
            }
            _ => Some(self.shared.clock.begun),
        }
    }

    /// Records the start of a write or trim in the ledger. If another operation on the same blocks
    /// is in flight, it's deferred.
    fn record_start(&mut self, mut next: Next, now: Instant) -> Option<Next> {
        // The offset of the write after a trim must not change.
        let may_move = !self.shared.trim_write;
        let verifier = &self.shared.verifier;
        match self.source.record_start(verifier, &mut next.op, may_move) {
            Ok(true) => return Some(next),
            Ok(false) => {
                self.held.push(next);
                self.due = Some(now + RETRY);
            }
            Err(error) => {
                self.fail(error);
                self.is_over = true;
            }
        }
        None
    }

    fn start(&mut self, next: Next, now: Instant, queue: &mut Submissions) {
        let tag = self.free.pop().expect("the caller has looked");
        let Next { op, due, counts } = next;
        // The time to generate contents must not be included in the latency.
        let mut was_filled = false;
        let operation = match op.kind {
            OpKind::Flush => Operation::Flush,
            OpKind::Trim => Operation::Discard(op.range.clone()),
            OpKind::Read => {
                let slot = &mut self.slots[tag as usize];
                // The read will overwrite the buffer, so it must be filled again before the next
                // write.
                slot.is_filled = false;
                self.shared
                    .verifier
                    .note_oldest(&op.range, &mut slot.oldest);
                let buffer = self.take_buffer(tag, op.len());
                let offset = op.range.start;
                Operation::Read { offset, buffer }
            }
            OpKind::Write => {
                let buffer = self.take_buffer(tag, op.len());
                was_filled = self.fill(tag, &op.range, &buffer);
                Operation::Write {
                    offset: op.range.start,
                    buffer,
                    fua: self.shared.fua,
                }
            }
        };
        let slot = &mut self.slots[tag as usize];
        slot.started = if was_filled { Instant::now() } else { now };
        slot.due = if self.arrivals.is_some() {
            due
        } else {
            slot.started
        };
        // Operations during ramp time are not included, unless they turn out to complete after it.
        if counts && slot.started >= self.shared.clock.measured_from {
            self.left.subtract_operation(op.len());
        }
        slot.counts = counts;
        slot.op = op;
        queue.push(tag, operation);
    }

    fn take_buffer(&mut self, tag: u32, len: u64) -> Buffer {
        let buffer = self.slots[tag as usize].buffer.take();
        let mut buffer = buffer.expect("a free place has its buffer");
        buffer.set_len(len as usize);
        buffer
    }

    /// Fills the buffer of a write. Returns false if it was already filled.
    fn fill(&mut self, tag: u32, range: &Range<u64>, buffer: &Buffer) -> bool {
        let verifier = &self.shared.verifier;
        let bytes = &mut self.scratch[..buffer.len()];
        if let Some(ledger) = verifier.ledger() {
            verifier.fill(ledger, range, bytes);
            buffer.slice().write(0, bytes);
        } else if self.shared.refill {
            self.writes += 1;
            let key = self.salt.wrapping_add(self.writes);
            verifier.filler.fill(key, bytes);
            buffer.slice().write(0, bytes);
        } else if !std::mem::replace(&mut self.slots[tag as usize].is_filled, true) {
            // Fill the whole buffer, because the next write may be longer.
            let start = buffer.slice().offset();
            let whole = buffer
                .slice()
                .memory()
                .slice(start..start + self.scratch.len());
            let key = self.salt.wrapping_add(tag.into());
            verifier.filler.fill(key, &mut self.scratch);
            whole
                .expect("a buffer has room for the largest block")
                .write(0, &self.scratch);
        } else {
            return false;
        }
        true
    }

    fn finish(&mut self, tag: u32, completion: Completion, now: Instant) {
        self.last = now;
        self.free.push(tag);
        let slot = &mut self.slots[tag as usize];
        match completion {
            Ok(Some(buffer)) => slot.buffer = Some(buffer),
            Ok(None) => {}
            Err(error) => {
                let op = &slot.op;
                let error = BenchError::Operation {
                    operation: verb(op.kind),
                    offset: op.range.start,
                    len: op.len(),
                    error,
                };
                return self.fail(error);
            }
        }
        self.record(tag, now);
        if let Err(error) = self.finish_operation(tag) {
            self.fail(error);
        }
    }

    fn record(&mut self, tag: u32, now: Instant) {
        let Clock {
            measured_from,
            ends,
            ..
        } = self.shared.clock;
        // In an open loop, operations that complete after the end are included. Otherwise we would
        // hide the longest latencies.
        let is_late = ends.is_some_and(|end| now > end) && self.arrivals.is_none();
        let is_of_ramp = self.slots[tag as usize].started < measured_from;
        if is_late || is_of_ramp && !self.straddles(tag, now) {
            return;
        }
        let slot = &self.slots[tag as usize];
        let done = Completed {
            kind: slot.op.kind,
            bytes: slot.op.len(),
            service: now.saturating_duration_since(slot.started),
            response: now.saturating_duration_since(slot.due),
            at: now.saturating_duration_since(measured_from),
        };
        if let Some((index, measurements)) = self.recorder.record(&done)
            && let Some(measurements) = self.reporter.report_interval(index, measurements)
        {
            self.recorder.restore_interval(measurements);
        }
    }

    /// Returns whether an operation started during ramp time is included because it completes after
    /// it, and subtracts it from the remaining work. In a closed loop, operations in flight at the
    /// end of the ramp time are included instead of those in flight at the end of the run. In an
    /// open loop, the latter are included.
    fn straddles(&mut self, tag: u32, now: Instant) -> bool {
        let counts = self.arrivals.is_none()
            && now >= self.shared.clock.measured_from
            && !self.left.is_nothing();
        let slot = &self.slots[tag as usize];
        if counts && slot.counts {
            self.left.subtract_operation(slot.op.len());
        }
        counts
    }

    /// Returns the number of operations that were due before the end, but not started.
    fn not_started(&self) -> u64 {
        let clock = self.shared.clock;
        let (Some(end), Some(arrivals)) = (clock.ends, &self.arrivals) else {
            return 0;
        };
        let held = self.held.iter().filter(|next| next.counts).count() as u64;
        let due = arrivals.before(end.saturating_duration_since(clock.begun));
        let block = self.shared.verifier.block.max(1);
        let left = self.left.ios.min(self.left.bytes.div_ceil(block));
        due.saturating_add(held).min(left)
    }

    /// Updates the ledger for a completed write, or verifies the data of a completed read.
    fn finish_operation(&mut self, tag: u32) -> Result<(), BenchError> {
        let slot = &self.slots[tag as usize];
        let verifier = &self.shared.verifier;
        match slot.op.kind {
            OpKind::Flush => {}
            OpKind::Read if matches!(verifier.check, Check::Nothing) => {}
            OpKind::Read => {
                let buffer = slot.buffer.as_ref().expect("it was returned with the read");
                let bytes = &mut self.scratch[..buffer.len()];
                buffer.slice().read(0, bytes);
                self.checked += verifier.check(&slot.op.range, &slot.oldest, bytes)?;
            }
            OpKind::Write | OpKind::Trim => {
                if let Some(ledger) = verifier.ledger() {
                    ledger.acknowledge_change(&slot.op.range)?;
                }
                if slot.op.kind == OpKind::Trim && self.shared.trim_write {
                    let op = Op {
                        kind: OpKind::Write,
                        range: slot.op.range.clone(),
                    };
                    self.held.push(Next {
                        op,
                        due: self.last,
                        counts: false,
                    });
                }
            }
        }
        Ok(())
    }
}

fn verb(kind: OpKind) -> &'static str {
    match kind {
        OpKind::Read => "reading",
        OpKind::Write => "writing",
        OpKind::Trim => "trim",
        OpKind::Flush => "flush",
    }
}

impl Workload for Worker {
    fn submit(&mut self, queue: &mut Submissions) {
        self.start_all(Instant::now(), queue);
    }

    fn complete(&mut self, tag: u32, completion: Completion, queue: &mut Submissions) {
        let now = Instant::now();
        self.finish(tag, completion, now);
        // The time for verification must not be included in the latency of the next operation.
        let now = match self.shared.verifier.check {
            Check::Nothing => now,
            Check::Own | Check::Ledger(_) => Instant::now(),
        };
        self.start_all(now, queue);
    }

    fn due(&self) -> Option<Instant> {
        self.due.filter(|_| !self.is_over)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let is_complete = self.is_over && self.outstanding() == 0;
        let result = match self.error.take() {
            Some(error) => Err(error),
            None if is_complete => Ok(()),
            None => Err(BenchError::Closed),
        };
        // Release all buffers before reporting the end, because they may be needed in the next
        // phase.
        self.slots.clear();
        let end = WorkerReport {
            at: self.last,
            checked: self.checked,
            is_by_time: self.is_by_time,
            not_started: self.not_started(),
            result,
        };
        self.reporter.report_end(self.recorder.take_interval(), end);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use fastrand::Rng;

    use super::super::content::Filler;
    use super::super::job::{Checksum, Content, Job, Rate};
    use super::super::plan::Plan;
    use super::super::reports::{Report, channel};
    use super::*;

    /// Returns the number of reads counted by a worker when its first read completes after the ramp
    /// time, and the number of reads started at this point.
    fn straddling_reads(job: &Job, ios: u64) -> (u64, usize) {
        let (reporter, reports) = channel(usize::MAX);
        let begun = Instant::now();
        let shared = Shared {
            verifier: Verifier {
                filler: Filler::new(Content::default(), 1),
                check: Check::Nothing,
                checksum: Checksum::Crc32c,
                block: 4096,
                atom: 512,
                resolves: false,
            },
            refill: false,
            fua: false,
            end_fsync: false,
            trim_write: false,
            flushes_count: false,
            think: None,
            clock: Clock {
                begun,
                measured_from: begun + Duration::from_millis(5),
                ends: Some(begun + Duration::from_secs(3600)),
            },
            stop: Arc::default(),
        };
        let parts = Parts {
            source: Source::Plan(Plan::new(job, &(0..8192), Rng::with_seed(1))),
            arrivals: Arrivals::new(job, 0.0, Rng::with_seed(1)),
            buffers: vec![Some(Buffer::anonymous(4096).unwrap())],
            left: RemainingWork {
                ios,
                bytes: u64::MAX,
            },
            recorder: Recorder::new(Duration::from_secs(7200), job.is_open_loop()),
            max_block: 4096,
            salt: 0,
            reporter,
        };
        let mut worker = Worker::new(Arc::new(shared), parts);
        let mut queue = Submissions::default();
        worker.start_all(begun, &mut queue);
        let (tag, operation) = queue.drain().next().expect("a read");
        let Operation::Read { buffer, .. } = operation else {
            panic!("it is no read");
        };
        thread::sleep(Duration::from_millis(10));
        worker.complete(tag, Ok(Some(buffer)), &mut queue);
        let started = queue.drain().count();
        drop(worker);
        let reports = std::iter::from_fn(|| reports.receive(Duration::ZERO).ok());
        let reads = reports.map(|(_, report)| match report {
            Report::Measurements(_, measurements) => measurements[OpKind::Read as usize].ios(),
            Report::Ended(_) => 0,
        });
        (reads.sum(), started)
    }

    #[test]
    fn progress_uses_operation_limit() {
        let left = |ios, bytes| RemainingWork { ios, bytes };
        assert_eq!(left(100, u64::MAX - 4095).part(25, 25 * 4096), 0.25);
        assert_eq!(left(u64::MAX, 8192).part(1, 4096), 0.5);
        assert_eq!(left(4, 8192).part(1, 4096), 0.5);
        assert_eq!(left(u64::MAX, u64::MAX).part(1, 4096), 0.0);
    }

    #[test]
    fn straddling_read_counts_towards_amount() {
        let closed = Job::default();
        assert_eq!(straddling_reads(&closed, u64::MAX), (1, 1));
        assert_eq!(straddling_reads(&closed, 1), (1, 0));
        let open = Job {
            rates: [Some(Rate::Iops(1000)), None, None],
            ..Job::default()
        };
        assert_eq!(straddling_reads(&open, u64::MAX), (0, 1));
        assert_eq!(straddling_reads(&open, 1), (0, 1));
    }
}
