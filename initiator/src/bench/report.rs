//! Results of a benchmark.
//!
//! Units bear their names: `_ns` nanoseconds, `_bytes` bytes, `bytes_per_second` bytes, `iops`
//! operations per second. They are those of fio's JSON (`lat_ns`, `bw_bytes`, `iops`).

use hdrhistogram::Histogram;
use serde::Serialize;

use super::config::{Mix, Pattern};

/// Latencies of one direction, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// Shortest time, in nanoseconds.
    pub min: u64,
    /// Mean time, in nanoseconds.
    pub mean: f64,
    /// Standard deviation, in nanoseconds.
    pub stddev: f64,
    /// Half took no longer.
    pub p50: u64,
    /// 90 % took no longer.
    pub p90: u64,
    /// 95 % took no longer.
    pub p95: u64,
    /// 99 % took no longer.
    pub p99: u64,
    /// 99.9 % took no longer.
    pub p99_9: u64,
    /// 99.99 % took no longer.
    pub p99_99: u64,
    /// Longest time, in nanoseconds.
    pub max: u64,
}

/// Figures of reads or of writes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Direction {
    /// Number of operations done.
    pub total_ios: u64,
    /// Number of bytes moved.
    pub io_bytes: u64,
    /// Operations per second, all jobs.
    pub iops: f64,
    /// Bytes per second, all jobs.
    pub bw_bytes: f64,
    /// Latencies; none without operations.
    pub lat_ns: Option<Latency>,
}

impl Direction {
    pub(super) fn new(latencies: &Histogram<u64>, block_size: u32, seconds: f64) -> Self {
        let total_ios = latencies.len();
        let io_bytes = total_ios * u64::from(block_size);
        let at = |percent: f64| latencies.value_at_percentile(percent);
        Self {
            total_ios,
            io_bytes,
            iops: total_ios as f64 / seconds,
            bw_bytes: io_bytes as f64 / seconds,
            lat_ns: (total_ios > 0).then(|| Latency {
                min: latencies.min(),
                mean: latencies.mean(),
                stddev: latencies.stdev(),
                p50: at(50.0),
                p90: at(90.0),
                p95: at(95.0),
                p99: at(99.0),
                p99_9: at(99.9),
                p99_99: at(99.99),
                max: latencies.max(),
            }),
        }
    }
}

/// Data that were compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Blocks that were read and were right; one that is not ends the benchmark.
    pub blocks: u64,
}

/// Result of a benchmark.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Order of the offsets.
    pub pattern: Pattern,
    /// Reads of a hundred operations.
    pub read_percent: Mix,
    /// Bytes of one operation.
    pub block_size: u32,
    /// Operations of one job in flight.
    pub depth: u32,
    /// Number of concurrent jobs.
    pub jobs: u32,
    /// Time that the figures are from, in seconds.
    pub runtime_seconds: f64,
    /// Figures of the reads.
    pub read: Direction,
    /// Figures of the writes.
    pub write: Direction,
    /// Data that were compared, if that was wanted.
    pub verified: Option<Verified>,
}
