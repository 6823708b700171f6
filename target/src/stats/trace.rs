//! The ways of single commands, on request.
//!
//! [`Tracer`] says which commands; a logical unit that has one ([`LunStats::trace`]) gives every
//! command that begins there a [`Trace`], which its [`CommandTimer`](super::CommandTimer) fills in.
//! Without one a command costs one look at a flag.
//!
//! What is kept is bounded by the tracer: [`Tracer::take`] empties it, and what does not fit
//! meanwhile is counted.
//!
//! [`LunStats::trace`]: super::LunStats::trace

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;

use super::Stage;
use super::outcome::Done;

/// Stages of a command that are recorded; a write that comes in many parts goes to and fro.
const STEPS: usize = 64;

/// Bytes of a CDB that are kept: all that the opcodes with a logical block address have.
pub const CDB_TRACED: usize = 16;

/// A command, as its initiator named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceKey {
    /// The tag of the transport.
    pub tag: u64,
    /// Number of the I_T nexus.
    pub nexus: u64,
    /// The CDB, or its first bytes.
    pub cdb: ArrayVec<u8, CDB_TRACED>,
}

/// A command that was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Target's name in the configuration.
    pub target: String,
    /// The logical unit's number there.
    pub lun: u16,
    /// The command's nexus, tag and CDB.
    pub subject: TraceKey,
    /// Time at which it came.
    pub begun: Instant,
    /// The stages that it was in, and how long after it came it reached each.
    pub steps: ArrayVec<(Stage, Duration), STEPS>,
    /// Time from the command to the end of its answer.
    pub took: Duration,
    /// Data both ways, in bytes.
    pub bytes: u64,
    /// SCSI status of the answer.
    pub status: u8,
}

/// A filter for commands, and those that were found.
#[derive(Debug)]
pub struct Tracer {
    tag: Option<u64>,
    slower_than: Duration,
    most: usize,
    records: Mutex<Vec<Record>>,
    missed: AtomicU64,
}

impl Tracer {
    /// A tracer of commands with this tag, or any, that take at least `slower_than`; it keeps
    /// `most` of them.
    #[must_use]
    pub fn new(tag: Option<u64>, slower_than: Duration, most: usize) -> Self {
        Self {
            tag,
            slower_than,
            most,
            records: Mutex::new(Vec::new()),
            missed: AtomicU64::new(0),
        }
    }

    /// Returns the records since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<Record> {
        std::mem::take(&mut *self.records.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the number of records that did not fit.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }

    fn keep(&self, record: Record) {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        if records.len() < self.most {
            records.push(record);
        } else {
            self.missed.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The way of one command so far.
#[derive(Debug)]
pub(super) struct Trace {
    tracer: Arc<Tracer>,
    record: Record,
}

impl Trace {
    /// A command has come to a unit that is looked at; `None` if it is not the one.
    pub(super) fn begin(
        tracer: Arc<Tracer>,
        (target, lun): (&str, u16),
        subject: TraceKey,
        now: Instant,
    ) -> Option<Self> {
        if tracer.tag.is_some_and(|tag| tag != subject.tag) {
            return None;
        }
        Some(Self {
            tracer,
            record: Record {
                target: target.to_owned(),
                lun,
                subject,
                begun: now,
                steps: ArrayVec::new(),
                took: Duration::ZERO,
                bytes: 0,
                status: 0,
            },
        })
    }

    /// It leaves a stage, which it had reached at `since`.
    pub(super) fn leave(&mut self, stage: Stage, since: Instant) {
        let reached = since.saturating_duration_since(self.record.begun);
        // The last steps of a command of very many are not recorded.
        let _ = self.record.steps.try_push((stage, reached));
    }

    /// Its answer has gone.
    pub(super) fn finish(mut self, done: &Done) {
        let took = Duration::from_nanos(done.took);
        if took < self.tracer.slower_than {
            return;
        }
        self.record.took = took;
        self.record.bytes = done.bytes;
        self.record.status = done.fault.map_or(0, |fault| fault.status);
        self.tracer.keep(self.record);
    }
}
