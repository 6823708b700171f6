//! Configuration of a benchmark.

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

/// Percentage of operations that are reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Mix(u8);

impl Mix {
    /// A mix of reads only.
    pub const READ: Self = Self(100);
    /// A mix of writes only.
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

/// End of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// After a time, warm-up not included.
    Time(Duration),
    /// After this number of bytes, all jobs together.
    Bytes(u64),
}

/// Work of a benchmark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BenchConfig {
    /// Order of the offsets.
    pub pattern: Pattern,
    /// Proportion of reads and writes.
    pub mix: Mix,
    /// Bytes of one operation: whole blocks, at most one transfer.
    pub block_size: u32,
    /// Operations of one job in flight.
    pub depth: u32,
    /// Jobs, each with its own offsets.
    pub jobs: u32,
    /// End of the measurement.
    pub until: Until,
    /// Time before the figures count.
    pub warm_up: Duration,
    /// Part of the device in bytes.
    pub region: Range<u64>,
    /// Written data are read back and compared.
    pub verify: bool,
    /// Writes must be on stable storage.
    pub fua: bool,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Reason why there is no result.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BenchError {
    /// The device cannot do what is wanted.
    #[error("{0}")]
    Config(String),
    /// An operation of the device failed.
    #[error("{operation} of {len} bytes at byte {offset} failed: {error}")]
    Operation {
        /// Kind of operation: read or write.
        operation: &'static str,
        /// Offset on the device, in bytes.
        offset: u64,
        /// Length of the operation, in bytes.
        len: u32,
        /// Error of the device.
        error: BlockError,
    },
    /// Data read differ from those written.
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
        // The product is checked and not the factors, since each operation in flight has a buffer
        // of the device.
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
