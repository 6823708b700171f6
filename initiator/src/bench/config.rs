//! What a benchmark does.

use std::ops::Range;
use std::time::Duration;

use serde::Serialize;
use thiserror::Error;

use crate::block::{BlockError, Geometry};

/// Order of the offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Any block of the region, each as likely as another.
    Random,
    /// One after the other; every job has its own part of the region.
    Sequential,
}

/// How many of a hundred operations are reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Mix(u8);

impl Mix {
    /// Reads only.
    pub const READ: Self = Self(100);
    /// Writes only.
    pub const WRITE: Self = Self(0);

    /// Reads of a hundred operations; `None` above 100.
    #[must_use]
    pub fn new(read_percent: u8) -> Option<Self> {
        (read_percent <= 100).then_some(Self(read_percent))
    }

    /// Reads of a hundred operations.
    #[must_use]
    pub fn read_percent(self) -> u8 {
        self.0
    }
}

/// When a benchmark is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// After a time, warm-up not included.
    Time(Duration),
    /// After so many bytes, all jobs together.
    Bytes(u64),
}

/// What a benchmark does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BenchConfig {
    /// Order of the offsets.
    pub pattern: Pattern,
    /// Reads and writes.
    pub mix: Mix,
    /// Bytes of one operation: whole blocks, at most one transfer.
    pub block_size: u32,
    /// Operations of one job in flight.
    pub depth: u32,
    /// Jobs, each with its own offsets.
    pub jobs: u32,
    /// When it is over.
    pub until: Until,
    /// Time before the figures count.
    pub warm_up: Duration,
    /// Part of the device in bytes.
    pub region: Range<u64>,
    /// Whether what is written is read back and compared.
    pub verify: bool,
    /// Whether writes must be on stable storage.
    pub fua: bool,
    /// Where the random numbers start.
    pub seed: u64,
}

/// Why there is no result.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BenchError {
    /// The device cannot do what is wanted.
    #[error("{0}")]
    Config(String),
    /// An operation failed.
    #[error("{operation} of {len} bytes at byte {offset} failed: {error}")]
    Operation {
        /// Read or write.
        operation: &'static str,
        /// Where.
        offset: u64,
        /// How much.
        len: u32,
        /// Why.
        error: BlockError,
    },
    /// What was read is not what was written.
    #[error("byte {offset} reads back differently from what was written there")]
    Mismatch {
        /// The first wrong byte.
        offset: u64,
    },
}

impl BenchConfig {
    /// Most operations in flight.
    pub const MAX_IN_FLIGHT: u32 = 4096;

    pub(super) fn check(&self, geometry: &Geometry) -> Result<(), BenchError> {
        let fail = |what: String| Err(BenchError::Config(what));
        let size = u64::from(self.block_size);
        if size == 0 || !self.block_size.is_multiple_of(geometry.block_size) {
            return fail(format!(
                "the block size {size} is no multiple of the device's {}",
                geometry.block_size
            ));
        }
        if self.block_size > geometry.max_transfer {
            return fail(format!(
                "the block size {size} is more than one transfer takes, {}",
                geometry.max_transfer
            ));
        }
        let in_flight = self.depth.checked_mul(self.jobs);
        if in_flight.is_none_or(|n| n == 0 || n > Self::MAX_IN_FLIGHT) {
            return fail(format!(
                "{} jobs of depth {}: the product must be from 1 to {}",
                self.jobs,
                self.depth,
                Self::MAX_IN_FLIGHT
            ));
        }
        let (start, end) = (self.region.start, self.region.end);
        if end > geometry.capacity {
            return fail(format!(
                "the region ends at byte {end}, beyond the end of the device, which has {} bytes",
                geometry.capacity
            ));
        }
        if !start.is_multiple_of(u64::from(geometry.block_size)) {
            return fail(format!(
                "the region begins at byte {start}, which is not a multiple of the device's blocks \
                 of {} bytes",
                geometry.block_size
            ));
        }
        if end.saturating_sub(start) / size < u64::from(self.jobs) {
            return fail("the region has less than one block for each job".into());
        }
        if self.mix != Mix::READ && geometry.read_only {
            return fail("the device is read-only".into());
        }
        Ok(())
    }
}
