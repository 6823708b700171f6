//! What a run has measured, before any form of output.

use std::ops::AddAssign;
use std::time::{Duration, SystemTime};

use hdrhistogram::Histogram;

/// Percentiles of the JSON, which are those that fio prints by default.
pub const PERCENTILES: [f64; 17] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
    99.99,
];

/// Kinds of operations, in the order of fio's JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Trims: contents that are given up.
    Trim,
    /// Flushes, fio's `sync`.
    Flush,
}

impl OpKind {
    /// All of them; `kind as usize` is an index into it.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Trim, Self::Flush];

    /// Name in fio's JSON.
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

/// Figures of the operations of one kind. Histograms hold nanoseconds, with three digits.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Bytes moved; none by flushes.
    pub bytes: u64,
    /// From the start of an operation to its completion (fio's `clat`). Its length is the number of
    /// operations.
    pub service: Histogram<u64>,
    /// From the time when an operation was due to its completion (fio's `lat`), where arrivals are
    /// planned (open loop). In a closed loop an operation is due when it starts.
    pub response: Option<Histogram<u64>>,
}

/// Figures of a part of the run.
#[derive(Clone, Debug, PartialEq)]
pub struct Interval {
    /// Its begin, from that of the measurement.
    pub at: Duration,
    /// Its length.
    pub length: Duration,
    /// Figures of what completed in it, by [`OpKind`].
    pub measured: [Measured; 4],
}

/// Processor time and context switches of a process between begin and end of the measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Time in user mode.
    pub user: Duration,
    /// Time in the kernel.
    pub system: Duration,
    /// Context switches because the process waited.
    pub voluntary: u64,
    /// Context switches because others had to run.
    pub involuntary: u64,
}

/// Data that were compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Blocks that were read and were right; one that is not ends the run.
    pub blocks: u64,
    /// Blocks of writes that a crash has interrupted, which are old in part and new in part, as
    /// disks may leave them.
    pub torn: u64,
}

impl AddAssign for Verified {
    fn add_assign(&mut self, more: Self) {
        self.blocks += more.blocks;
        self.torn += more.torn;
    }
}

/// Reads of the parts of the disk that have no blocks allocated: their figures say nothing about a
/// disk that holds data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holes {
    /// Bytes of the region that are not allocated, as far as the disk says.
    pub bytes: u64,
    /// Bytes of the region.
    pub of: u64,
}

/// One section of a job file, or the workload of the command line, as it was run.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Name of the job.
    pub name: String,
    /// Address of the disk.
    pub address: String,
    /// Name of the RDMA device that it was reached over, which begins with its provider's: figures
    /// of memory that is shared are never taken for those of a network.
    pub device: Option<String>,
    /// Its options with fio's names, in fio's form: `("bs", "4k")`.
    pub options: Vec<(String, String)>,
    /// When the measurement began.
    pub started: SystemTime,
    /// Its length.
    pub runtime: Duration,
    /// Figures of the whole, by [`OpKind`].
    pub measured: [Measured; 4],
    /// Figures over time, in order and without gaps; the last one may be shorter.
    pub intervals: Vec<Interval>,
    /// Of this process. Where jobs run side by side, each has the part that its operations are of
    /// those of all.
    pub client: Usage,
    /// Of the process that serves the disk, if it is known and on this host; divided likewise.
    pub server: Option<Usage>,
    /// Data that were compared, if that was wanted.
    pub verified: Option<Verified>,
    /// Unallocated parts of the region, if the disk reports them and there were reads.
    pub holes: Option<Holes>,
    /// It asked for stable storage, by flushes or with its writes, and the disk has no way to be
    /// asked for that.
    pub unstable: bool,
    /// Operations of an open loop that were due before the end and had not started then: the disk
    /// does not reach the rate. It is the mean where times or sizes are random.
    pub not_started: u64,
}

impl Measured {
    /// Number of operations.
    #[must_use]
    pub fn ios(&self) -> u64 {
        self.service.len()
    }
}

impl Outcome {
    /// The disk, with the RDMA device that it was reached over.
    #[must_use]
    pub fn disk(&self) -> String {
        show_disk(&self.address, self.device.as_deref())
    }

    /// Figures of one kind of operation.
    #[must_use]
    pub fn of(&self, kind: OpKind) -> &Measured {
        &self.measured[kind as usize]
    }

    /// Operations per second of one kind.
    #[must_use]
    pub fn iops(&self, kind: OpKind) -> f64 {
        self.of(kind).ios() as f64 / self.seconds()
    }

    /// Bytes per second of one kind.
    #[must_use]
    pub fn bytes_per_second(&self, kind: OpKind) -> f64 {
        self.of(kind).bytes as f64 / self.seconds()
    }

    fn seconds(&self) -> f64 {
        self.runtime.as_secs_f64().max(1e-9)
    }
}

/// Writes a disk with the RDMA device that it was reached over.
#[must_use]
pub fn show_disk(address: &str, device: Option<&str>) -> String {
    match device {
        Some(device) => format!("{address} over {device}"),
        None => address.to_owned(),
    }
}
