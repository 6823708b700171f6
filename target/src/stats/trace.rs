//! Traces individual commands on request.
//!
//! [`Tracer`] selects the commands. If there is a tracer for a logical unit ([`LunStats::trace`]),
//! each new command has a [`Trace`] that is updated by its [`CommandTimer`](super::CommandTimer).
//! Without a tracer, the overhead of a command is to check a flag.
//!
//! The number of records is limited by the tracer. [`Tracer::take_records`] removes all records.
//! Records that do not fit until then are counted.
//!
//! [`LunStats::trace`]: super::LunStats::trace

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;

use super::Stage;
use super::outcome::Done;

/// Maximum number of stages recorded for a command. A write that is split into many pieces
/// alternates between stages.
const STEPS: usize = 64;

/// Maximum number of CDB bytes to record. This is sufficient for all opcodes with a logical block
/// address.
pub const CDB_TRACED: usize = 16;

/// Identifies a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceKey {
    /// Tag of the transport.
    pub tag: u64,
    /// I_T nexus number.
    pub nexus: u64,
    /// The CDB, truncated if it is too long.
    pub cdb: ArrayVec<u8, CDB_TRACED>,
}

/// Record of a completed command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Name of the target in the configuration.
    pub target: String,
    /// LUN on the target.
    pub lun: u16,
    /// Nexus, tag and CDB of the command.
    pub subject: TraceKey,
    /// Time when the command was received.
    pub begun: Instant,
    /// Stages of the command, with the time from receiving it until entering each stage.
    pub steps: ArrayVec<(Stage, Duration), STEPS>,
    /// Time from receiving the command until its response was sent.
    pub took: Duration,
    /// Number of bytes transferred in both directions.
    pub bytes: u64,
    /// SCSI status.
    pub status: u8,
}

/// A command filter with the records of matching commands.
#[derive(Debug)]
pub struct Tracer {
    tag: Option<u64>,
    slower_than: Duration,
    most: usize,
    records: Mutex<Vec<Record>>,
    missed: AtomicU64,
}

impl Tracer {
    /// Creates a tracer for commands with this tag, or any tag if `None`, that take at least
    /// `slower_than`. It stores up to `most` records.
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
    pub fn take_records(&self) -> Vec<Record> {
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

/// Trace of an active command.
#[derive(Debug)]
pub(super) struct Trace {
    tracer: Arc<Tracer>,
    record: Record,
}

impl Trace {
    /// Starts tracing a command. Returns `None` if it does not match the filter.
    pub(super) fn start(
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

    /// Records a stage entered at `since`.
    pub(super) fn record_stage(&mut self, stage: Stage, since: Instant) {
        let reached = since.saturating_duration_since(self.record.begun);
        // If a command has too many stages, the last ones aren't recorded.
        let _ = self.record.steps.try_push((stage, reached));
    }

    /// Adds the record of a completed command if it was slow enough. Called when its response was
    /// sent.
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
