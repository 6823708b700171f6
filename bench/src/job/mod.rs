//! Jobs: the operations to run, using fio's terminology.
//!
//! - [`Job`]: a job that can be created directly or from named options.
//! - [`Units`]: units of sizes and times.
//! - [`IGNORED`], [`NOTED`], [`LIMITED`], [`UNSUPPORTED`]: fio's options that have no effect here,
//!   that have restricted values, and that are not supported.

mod options;
mod tables;
mod values;

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

pub use tables::{IGNORED, LIMITED, Limited, NOTED, UNSUPPORTED, is_ignored};
pub use values::{KbBase, Units};

use super::outcome::OpKind;

/// Order of offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Any block in the region, according to the [`Distribution`] of the job.
    Random,
    /// Consecutive blocks.
    Sequential,
}

/// Operations of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Reads and writes, according to [`Job::rwmixread`].
    Mixed,
    /// Trims.
    Trim,
    /// Trims, each followed by a write of the same blocks.
    TrimWrite,
    /// Flushes. This is not supported by fio.
    Flush,
}

impl Access {
    /// Returns the kinds of operations that this contains.
    #[must_use]
    pub fn kinds(self) -> &'static [OpKind] {
        match self {
            Self::Read => &[OpKind::Read],
            Self::Write => &[OpKind::Write],
            Self::Mixed => &[OpKind::Read, OpKind::Write],
            Self::Trim => &[OpKind::Trim],
            Self::TrimWrite => &[OpKind::Write, OpKind::Trim],
            Self::Flush => &[OpKind::Flush],
        }
    }

    /// Returns the kinds of operations that are planned. All other operations follow a planned one.
    #[must_use]
    pub fn planned(self) -> &'static [OpKind] {
        match self {
            Self::TrimWrite => &[OpKind::Trim],
            other => other.kinds(),
        }
    }

    /// Returns whether this changes the data on the device.
    #[must_use]
    pub fn is_destructive(self) -> bool {
        !matches!(self, Self::Read | Self::Flush)
    }

    /// Returns whether this writes data.
    #[must_use]
    pub fn writes(self) -> bool {
        self.kinds().contains(&OpKind::Write)
    }
}

/// Sizes of operations, in bytes.
#[derive(Clone, Debug, PartialEq)]
pub enum BlockSizes {
    /// All operations have the same size.
    Fixed(u32),
    /// Multiples of the smallest size, with equal probability.
    Range {
        /// Smallest size.
        min: u32,
        /// Largest size.
        max: u32,
    },
    /// Sizes with their percentages, which add up to 100.
    Split(Vec<(u32, f64)>),
}

impl BlockSizes {
    /// Returns the smallest size in bytes.
    #[must_use]
    pub fn min(&self) -> u32 {
        match self {
            Self::Fixed(size) => *size,
            Self::Range { min, .. } => *min,
            Self::Split(parts) => parts.iter().map(|(size, _)| *size).min().unwrap_or(0),
        }
    }

    /// Returns the largest size in bytes.
    #[must_use]
    pub fn max(&self) -> u32 {
        match self {
            Self::Fixed(size) => *size,
            Self::Range { max, .. } => *max,
            Self::Split(parts) => parts.iter().map(|(size, _)| *size).max().unwrap_or(0),
        }
    }

    /// Returns the mean size, rounded down to bytes.
    #[must_use]
    pub fn mean(&self) -> u64 {
        match self {
            Self::Fixed(size) => (*size).into(),
            Self::Range { min, max } => u64::from(*min) * (1 + u64::from(max / min)) / 2,
            Self::Split(parts) => {
                let part = |(size, percent): &(u32, f64)| f64::from(*size) * percent / 100.0;
                parts.iter().map(part).sum::<f64>() as u64
            }
        }
    }
}

/// Distribution of random offsets.
#[derive(Clone, Debug, PartialEq)]
pub enum Distribution {
    /// All blocks have equal probability.
    Uniform,
    /// The n-th most frequent block is accessed `n^theta` times less often than the most frequent
    /// one. Ranks are scattered across the region.
    Zipf(f64),
    /// Consecutive parts of the region, as a percentage of operations and a percentage of the
    /// region. Each adds up to 100.
    Zoned(Vec<(f64, f64)>),
}

/// A number of bytes or a percentage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// Bytes.
    Bytes(u64),
    /// Percentage of the device or region.
    Percent(u8),
}

impl Amount {
    /// Returns the number of bytes, where `whole` is the total. This is not rounded to blocks.
    #[must_use]
    pub fn exact(self, whole: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => (u128::from(whole) * u128::from(percent) / 100) as u64,
        }
    }

    /// Returns the number of bytes, where `whole` is the total. Percentages are rounded down to a
    /// multiple of `block`.
    #[must_use]
    pub fn of(self, whole: u64, block: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(_) => self.exact(whole) / block * block,
        }
    }
}

/// Intervals between the arrivals of operations if a job has a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateProcess {
    /// Constant.
    Linear,
    /// Exponentially distributed.
    Poisson,
}

/// Rate of operations of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// Operations per second.
    Iops(u64),
    /// Bytes per second.
    Bytes(u64),
}

/// Contents of write buffers, excluding headers of verified blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Generate new contents for each write. Otherwise a buffer is only filled once.
    pub refill: bool,
    /// Percentage of each block that can be removed by compression. The rest is random.
    pub compress_percentage: Option<u8>,
    /// Pattern for the compressible part, or for the whole block if this isn't set. Replaces zeroes
    /// or random bytes.
    pub pattern: Vec<u8>,
}

/// Type of the checksum in the header of a verified block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// CRC-32C.
    Crc32c,
    /// CRC-32 as used by Ethernet.
    Crc32,
    /// CRC-64 as used by NVMe.
    Crc64,
}

/// Name in reports for the job from the command line. It's not included in error messages because
/// it was not chosen by the user.
pub const COMMAND_LINE: &str = "riser bench";

/// A job.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Name used in reports.
    pub name: String,
    /// Address of the device, if specified for this job (`filename`).
    pub filename: Option<String>,
    /// If the device is a file on this host, bypass the page cache.
    pub direct: bool,
    /// Operations.
    pub access: Access,
    /// Order of the offsets.
    pub pattern: Pattern,
    /// Sequential: number of bytes skipped after each operation. Random: number of consecutive
    /// operations at each random offset, or 0 for one.
    pub modifier: u64,
    /// Percentage of reads if there are both reads and writes, and no rates.
    pub rwmixread: u8,
    /// Sizes of reads, writes and trims.
    pub sizes: [BlockSizes; 3],
    /// Number of operations in flight for each clone.
    pub iodepth: u32,
    /// Number of clones, each with its own offsets.
    pub numjobs: u32,
    /// Number of connections to the device. Clones are distributed over these.
    pub sessions: u32,
    /// Rates of reads, writes and trims for each clone. If set, operations are started at planned
    /// times (open loop).
    pub rates: [Option<Rate>; 3],
    /// Intervals between arrivals.
    pub rate_process: RateProcess,
    /// Distribution of random offsets.
    pub distribution: Distribution,
    /// Start of the region.
    pub offset: Amount,
    /// Distance between the regions of two consecutive clones, in bytes.
    pub offset_increment: Amount,
    /// Length of the region. Defaults to the rest of the device.
    pub size: Option<Amount>,
    /// Split the region of a sequential job between its clones. In job files, each clone uses the
    /// whole region.
    pub splits_region: bool,
    /// Time before the measurement is started.
    pub ramp_time: Duration,
    /// Maximum duration of the measurement, not including `ramp_time`.
    pub runtime: Option<Duration>,
    /// Always continue until the end of `runtime`, regardless of the amount transferred.
    pub time_based: bool,
    /// Number of bytes to transfer for each clone. Defaults to the length of the region.
    pub io_size: Option<Amount>,
    /// Number of bytes to transfer for all clones together.
    pub total: Option<u64>,
    /// Maximum number of operations for each clone.
    pub number_ios: Option<u64>,
    /// Number of times that each clone repeats its bytes or operations.
    pub loops: u64,
    /// Delay between the start of the group and the start of the job.
    pub startdelay: Duration,
    /// Pause after `thinktime_blocks` operations have completed.
    pub thinktime: Duration,
    /// Number of operations between two pauses.
    pub thinktime_blocks: u64,
    /// Number of writes between two flushes, or 0 to disable flushes.
    pub fsync: u32,
    /// Flush after the last operation.
    pub end_fsync: bool,
    /// Writes must be persisted on stable storage before they complete.
    pub fua: bool,
    /// Contents of writes.
    pub content: Content,
    /// Add a header to each block, which is then checked when the block is read.
    pub verify: Option<Checksum>,
    /// Read and verify all written blocks after the run.
    pub do_verify: bool,
    /// Only read and verify the blocks that are recorded in a state file.
    pub verify_only: bool,
    /// File that records acknowledged writes.
    pub state: Option<PathBuf>,
    /// Seed for random numbers.
    pub randseed: u64,
    /// Use the same seed for each command. Otherwise the seed was generated for this command.
    pub randrepeat: bool,
    /// Wait for the previous jobs.
    pub stonewall: bool,
}

impl Default for Job {
    /// Returns the default job of fio.
    fn default() -> Self {
        Self {
            name: "job".into(),
            filename: None,
            direct: false,
            access: Access::Read,
            pattern: Pattern::Sequential,
            modifier: 0,
            rwmixread: 50,
            sizes: std::array::from_fn(|_| BlockSizes::Fixed(4096)),
            iodepth: 1,
            numjobs: 1,
            sessions: 1,
            rates: [None; 3],
            rate_process: RateProcess::Linear,
            distribution: Distribution::Uniform,
            offset: Amount::Bytes(0),
            offset_increment: Amount::Bytes(0),
            size: None,
            splits_region: false,
            ramp_time: Duration::ZERO,
            runtime: None,
            time_based: false,
            io_size: None,
            total: None,
            number_ios: None,
            loops: 1,
            startdelay: Duration::ZERO,
            thinktime: Duration::ZERO,
            thinktime_blocks: 1,
            fsync: 0,
            end_fsync: false,
            fua: false,
            content: Content::default(),
            verify: None,
            do_verify: true,
            verify_only: false,
            state: None,
            randseed: 1,
            randrepeat: true,
            stonewall: false,
        }
    }
}

impl Job {
    /// Sets an option, using the name from fio. `value` is `None` if only the name was specified.
    /// Returns false for options in [`IGNORED`], [`NOTED`] or [`LIMITED`].
    ///
    /// # Errors
    /// Describes why the option or its value is invalid, in a single line.
    pub fn set(&mut self, name: &str, value: Option<&str>, units: Units) -> Result<bool, String> {
        options::set(self, name, value, units)
    }

    /// Returns the options using fio's names and format. Includes options that describe the
    /// workload and all other options that differ from their defaults.
    #[must_use]
    pub fn options(&self) -> Vec<(String, String)> {
        options::describe(self)
    }

    /// Returns whether this changes the data on the device.
    #[must_use]
    pub fn is_destructive(&self) -> bool {
        self.access.is_destructive() && !self.verify_only
    }

    /// Returns whether operations are started at planned times.
    #[must_use]
    pub fn is_open_loop(&self) -> bool {
        let mut kinds = self.access.planned().iter();
        kinds.any(|kind| self.rate_of(*kind).is_some())
    }

    /// Returns the rate for this kind of operation.
    #[must_use]
    pub fn rate_of(&self, kind: OpKind) -> Option<Rate> {
        self.rates.get(kind as usize).copied().flatten()
    }

    /// Returns the sizes for this kind of operation. Flushes have no size, and return the sizes of
    /// writes.
    #[must_use]
    pub fn sizes_of(&self, kind: OpKind) -> &BlockSizes {
        &self.sizes[(kind as usize).min(2)]
    }

    /// Returns the size of the largest operation in bytes.
    #[must_use]
    pub fn max_block(&self) -> u32 {
        self.extreme(BlockSizes::max).max().unwrap_or(0)
    }

    /// Returns the size of the smallest operation in bytes.
    #[must_use]
    pub fn min_block(&self) -> u32 {
        self.extreme(BlockSizes::min).min().unwrap_or(0)
    }

    fn extreme(&self, of: fn(&BlockSizes) -> u32) -> impl Iterator<Item = u32> {
        let kinds = self.access.kinds().iter();
        kinds.map(move |kind| of(self.sizes_of(*kind)))
    }
}
