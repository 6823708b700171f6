//! Jobs: what is done, with fio's words.
//!
//! - [`Job`]: a job, made by hand or from options by name.
//! - [`Units`]: forms of sizes and times.
//! - [`IGNORED`], [`NOTED`], [`LIMITED`], [`UNSUPPORTED`]: fio's options without an effect here,
//!   options with restricted values, and unsupported options.

mod options;
mod tables;
mod values;

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

pub use tables::{IGNORED, LIMITED, Limited, NOTED, UNSUPPORTED, is_ignored};
pub use values::{KbBase, Units};

use super::outcome::OpKind;

/// Order of the offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Any block of the region, by the job's [`Distribution`].
    Random,
    /// One after the other.
    Sequential,
}

/// Operations of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Reads and writes, by [`Job::rwmixread`].
    Mixed,
    /// Trims.
    Trim,
    /// Trims, each followed by a write of the same blocks.
    TrimWrite,
    /// Flushes. Not one of fio's.
    Flush,
}

impl Access {
    /// Kinds of operations that it is made of.
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

    /// Kinds of operations that are planned; others follow from these.
    #[must_use]
    pub fn planned(self) -> &'static [OpKind] {
        match self {
            Self::TrimWrite => &[OpKind::Trim],
            other => other.kinds(),
        }
    }

    /// Returns whether it changes what is on the device.
    #[must_use]
    pub fn is_destructive(self) -> bool {
        !matches!(self, Self::Read | Self::Flush)
    }

    /// Returns whether it writes data.
    #[must_use]
    pub fn writes(self) -> bool {
        self.kinds().contains(&OpKind::Write)
    }
}

/// Sizes of operations, in bytes.
#[derive(Clone, Debug, PartialEq)]
pub enum BlockSizes {
    /// Always the same.
    Fixed(u32),
    /// Multiples of the smallest, each as likely as another.
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
    /// Smallest size, in bytes.
    #[must_use]
    pub fn min(&self) -> u32 {
        match self {
            Self::Fixed(size) => *size,
            Self::Range { min, .. } => *min,
            Self::Split(parts) => parts.iter().map(|(size, _)| *size).min().unwrap_or(0),
        }
    }

    /// Largest size, in bytes.
    #[must_use]
    pub fn max(&self) -> u32 {
        match self {
            Self::Fixed(size) => *size,
            Self::Range { max, .. } => *max,
            Self::Split(parts) => parts.iter().map(|(size, _)| *size).max().unwrap_or(0),
        }
    }

    /// Mean size, in whole bytes.
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
    /// Each block as likely as another.
    Uniform,
    /// The n-th most frequent block is `n^theta` times rarer than the most frequent one. Ranks are
    /// scattered over the region.
    Zipf(f64),
    /// Parts of the region, in order: percentage of operations, percentage of the region. Each adds
    /// up to 100.
    Zoned(Vec<(f64, f64)>),
}

/// A number of bytes, or a part of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// Bytes.
    Bytes(u64),
    /// Percentage of the device, or of the region.
    Percent(u8),
}

impl Amount {
    /// In bytes of a whole, not rounded to blocks.
    #[must_use]
    pub fn exact(self, whole: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => (u128::from(whole) * u128::from(percent) / 100) as u64,
        }
    }

    /// In bytes of a whole; a percentage is rounded down to multiples of `block`.
    #[must_use]
    pub fn of(self, whole: u64, block: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(_) => self.exact(whole) / block * block,
        }
    }
}

/// Times between arrivals, where a job has a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateProcess {
    /// Always the same.
    Linear,
    /// Exponentially distributed.
    Poisson,
}

/// Rate of the operations of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// Operations per second.
    Iops(u64),
    /// Bytes per second.
    Bytes(u64),
}

/// Content of written buffers, apart from what verification puts there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Each write gets new content. Without it, a buffer is filled once.
    pub refill: bool,
    /// Part of each block that a compressor removes, in percent; the rest is random.
    pub compress_percentage: Option<u8>,
    /// Bytes that are repeated instead of random ones, and in the compressible part.
    pub pattern: Vec<u8>,
}

/// Checksum in the header of a verified block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// CRC-32C.
    Crc32c,
    /// CRC-32 of Ethernet.
    Crc32,
    /// CRC-64 of NVMe.
    Crc64,
}

/// Name of the job of the command line in reports. Errors leave it out: no user has given it.
pub const COMMAND_LINE: &str = "riser bench";

/// A job.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Name in reports.
    pub name: String,
    /// Address of the device, if the job has one of its own (`filename`).
    pub filename: Option<String>,
    /// Reads and writes go past the page cache, where the device is a file of this host.
    pub direct: bool,
    /// Operations.
    pub access: Access,
    /// Order of the offsets.
    pub pattern: Pattern,
    /// Sequential: bytes that are skipped behind each operation. Random: operations that follow one
    /// another from each random offset on, if more than one.
    pub modifier: u64,
    /// Reads of a hundred operations, where there are both and no rates.
    pub rwmixread: u8,
    /// Sizes of reads, writes and trims.
    pub sizes: [BlockSizes; 3],
    /// Operations of one clone in flight.
    pub iodepth: u32,
    /// Clones, each with its own offsets.
    pub numjobs: u32,
    /// Connections to the device, over which the clones are distributed.
    pub sessions: u32,
    /// Rates of reads, writes and trims of one clone. Operations then start at planned times (open
    /// loop).
    pub rates: [Option<Rate>; 3],
    /// Times between arrivals.
    pub rate_process: RateProcess,
    /// Distribution of random offsets.
    pub distribution: Distribution,
    /// First byte of the region.
    pub offset: Amount,
    /// Bytes by which the region of each clone begins behind that of the one before it.
    pub offset_increment: Amount,
    /// Length of the region; to the end of the device if it is not given.
    pub size: Option<Amount>,
    /// Each clone of a sequential job has a part of the region of its own. In job files each has
    /// the whole region.
    pub splits_region: bool,
    /// Time before the figures count.
    pub ramp_time: Duration,
    /// Longest time to measure, `ramp_time` not included.
    pub runtime: Option<Duration>,
    /// Goes on until the end of `runtime`, however much was moved.
    pub time_based: bool,
    /// Bytes that a clone moves; the length of the region if it is not given.
    pub io_size: Option<Amount>,
    /// Bytes that all clones move together.
    pub total: Option<u64>,
    /// Operations that a clone does at most.
    pub number_ios: Option<u64>,
    /// Times that a clone moves its bytes or does its operations.
    pub loops: u64,
    /// Time between the start of the group and that of the job.
    pub startdelay: Duration,
    /// Pause after `thinktime_blocks` operations, once they have completed.
    pub thinktime: Duration,
    /// Operations between two pauses.
    pub thinktime_blocks: u64,
    /// Writes after which there is a flush; 0: none.
    pub fsync: u32,
    /// A flush is the last operation.
    pub end_fsync: bool,
    /// Writes must be on stable storage.
    pub fua: bool,
    /// Content of the writes.
    pub content: Content,
    /// Blocks have headers, by which they are checked when they are read.
    pub verify: Option<Checksum>,
    /// What was written is read back after the run.
    pub do_verify: bool,
    /// Nothing but what a state file says was written is read.
    pub verify_only: bool,
    /// File that records what was acknowledged.
    pub state: Option<PathBuf>,
    /// Seed of the random numbers.
    pub randseed: u64,
    /// The seed is the same for each command. Without it, one was drawn for this command.
    pub randrepeat: bool,
    /// Waits for the jobs before it.
    pub stonewall: bool,
}

impl Default for Job {
    /// The defaults of fio.
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
    /// Sets an option by fio's name of it; `value` is `None` where it stands alone. Returns false
    /// for one of [`IGNORED`], [`NOTED`] or [`LIMITED`].
    ///
    /// # Errors
    /// A line that says why the option or its value is refused.
    pub fn set(&mut self, name: &str, value: Option<&str>, units: Units) -> Result<bool, String> {
        options::set(self, name, value, units)
    }

    /// Its options in fio's form, by fio's names: those of the workload, and others that are not as
    /// by default.
    #[must_use]
    pub fn options(&self) -> Vec<(String, String)> {
        options::describe(self)
    }

    /// Returns whether it changes what is on the device.
    #[must_use]
    pub fn is_destructive(&self) -> bool {
        self.access.is_destructive() && !self.verify_only
    }

    /// Operations start at planned times.
    #[must_use]
    pub fn is_open_loop(&self) -> bool {
        let mut kinds = self.access.planned().iter();
        kinds.any(|kind| self.rate_of(*kind).is_some())
    }

    /// Rate of the operations of a kind.
    #[must_use]
    pub fn rate_of(&self, kind: OpKind) -> Option<Rate> {
        self.rates.get(kind as usize).copied().flatten()
    }

    /// Sizes of the operations of a kind; flushes have none, and get those of writes.
    #[must_use]
    pub fn sizes_of(&self, kind: OpKind) -> &BlockSizes {
        &self.sizes[(kind as usize).min(2)]
    }

    /// Largest operation, in bytes.
    #[must_use]
    pub fn max_block(&self) -> u32 {
        self.extreme(BlockSizes::max).max().unwrap_or(0)
    }

    /// Smallest operation, in bytes.
    #[must_use]
    pub fn min_block(&self) -> u32 {
        self.extreme(BlockSizes::min).min().unwrap_or(0)
    }

    fn extreme(&self, of: fn(&BlockSizes) -> u32) -> impl Iterator<Item = u32> {
        let kinds = self.access.kinds().iter();
        kinds.map(move |kind| of(self.sizes_of(*kind)))
    }
}
