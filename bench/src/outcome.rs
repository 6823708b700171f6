//! Results of a run, independent of the output format.

use std::ops::AddAssign;
use std::time::{Duration, SystemTime};

use hdrhistogram::Histogram;

/// Percentiles included in the JSON output. These are the defaults of fio.
pub const PERCENTILES: [f64; 17] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
    99.99,
];

/// Kinds of operations, in the same order as fio's JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Trims, which deallocate blocks.
    Trim,
    /// Flushes, named `sync` in fio.
    Flush,
}

impl OpKind {
    /// All kinds, which can be indexed by `kind as usize`.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Trim, Self::Flush];

    /// Returns the name in fio's JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Trim => "trim",
            Self::Flush => "sync",
        }
    }
}

/// Results for one kind of operation. Histograms use nanoseconds with three digits.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Number of bytes transferred, always 0 for flushes.
    pub bytes: u64,
    /// Time between start and completion of an operation (fio's `clat`). Its length is the number
    /// of operations.
    pub service: Histogram<u64>,
    /// Time between planned arrival and completion of an operation (fio's `lat`), only available if
    /// arrivals are planned (open loop). In a closed loop, there is no difference.
    pub response: Option<Histogram<u64>>,
}

/// Results for one interval of the run.
#[derive(Clone, Debug, PartialEq)]
pub struct Interval {
    /// Start, relative to the measurement.
    pub at: Duration,
    /// Its length.
    pub length: Duration,
    /// Results of operations completed in this interval, by [`OpKind`].
    pub measured: [Measured; 4],
}

/// Processor time and context switches of a process during the measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Time in user mode.
    pub user: Duration,
    /// Time in the kernel.
    pub system: Duration,
    /// Context switches caused by waiting.
    pub voluntary: u64,
    /// Context switches caused by preemption.
    pub involuntary: u64,
}

/// Numbers of verified blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Number of blocks read and verified. The first mismatch aborts the run.
    pub blocks: u64,
    /// Number of blocks with a write interrupted by a crash, which contain both old and new data.
    /// Disks may leave such blocks.
    pub torn: u64,
}

impl AddAssign for Verified {
    fn add_assign(&mut self, more: Self) {
        self.blocks += more.blocks;
        self.torn += more.torn;
    }
}

/// Unallocated parts of a region that was read. Reads from these are not representative of a disk
/// that is full of data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holes {
    /// Number of unallocated bytes in the region, as reported by the disk.
    pub bytes: u64,
    /// Size of the region in bytes.
    pub of: u64,
}

/// Results for one section of a job file or for the workload from the command line.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Name of the job.
    pub name: String,
    /// Address of the disk.
    pub address: String,
    /// Name of the RDMA device used for the connection, including the provider. This makes sure
    /// that results for shared memory can't be mistaken for network results.
    pub device: Option<String>,
    /// Type of the protection information that was transferred with the data. Results with and
    /// without it can't be compared.
    pub protection: Option<u8>,
    /// Options with names and values in fio's format, e.g. `("bs", "4k")`.
    pub options: Vec<(String, String)>,
    /// Start time of the measurement.
    pub started: SystemTime,
    /// Duration of the measurement.
    pub runtime: Duration,
    /// Results for the whole measurement, by [`OpKind`].
    pub measured: [Measured; 4],
    /// Results for each interval, in order and without gaps. The last interval may be shorter.
    pub intervals: Vec<Interval>,
    /// Usage of this process. If there are concurrent jobs, it's divided in proportion to their
    /// number of operations.
    pub client: Usage,
    /// Usage of the process serving the disk, if it is known and running on this host. It's divided
    /// in the same way.
    pub server: Option<Usage>,
    /// Number of verified blocks if verification was enabled.
    pub verified: Option<Verified>,
    /// Unallocated parts of the region, if there were reads and this is supported by the disk.
    pub holes: Option<Holes>,
    /// Set if stable storage was requested by flushes or writes, but is not supported by the disk.
    pub unstable: bool,
    /// Number of operations in an open loop that were due before the end, but were never started
    /// because the disk couldn't sustain the rate. If times or sizes are random, this is the mean.
    pub not_started: u64,
}

impl Measured {
    /// Returns the number of operations.
    #[must_use]
    pub fn ios(&self) -> u64 {
        self.service.len()
    }
}

impl Outcome {
    /// Returns the disk, the RDMA device used for the connection, and the protection.
    #[must_use]
    pub fn disk(&self) -> String {
        show_disk(&self.address, self.device.as_deref(), self.protection)
    }

    /// Returns the results for one kind of operation.
    #[must_use]
    pub fn of(&self, kind: OpKind) -> &Measured {
        &self.measured[kind as usize]
    }

    /// Returns operations per second for one kind of operation.
    #[must_use]
    pub fn iops(&self, kind: OpKind) -> f64 {
        self.of(kind).ios() as f64 / self.seconds()
    }

    /// Returns bytes per second for one kind of operation.
    #[must_use]
    pub fn bytes_per_second(&self, kind: OpKind) -> f64 {
        self.of(kind).bytes as f64 / self.seconds()
    }

    fn seconds(&self) -> f64 {
        self.runtime.as_secs_f64().max(1e-9)
    }
}

/// Formats a disk, the RDMA device used for the connection, and the type of protection.
#[must_use]
pub fn show_disk(address: &str, device: Option<&str>, protection: Option<u8>) -> String {
    let mut text = address.to_owned();
    if let Some(device) = device {
        text += &format!(" over {device}");
    }
    if let Some(protection) = protection {
        text += &format!(" with protection type {protection}");
    }
    text
}
