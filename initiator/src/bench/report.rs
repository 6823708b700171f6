//! Results as one document.
//!
//! Units bear their names: `_ns` nanoseconds, `_bytes` bytes, `bytes_per_second` bytes, `iops`
//! operations per second. They are those of fio's JSON (`lat_ns`, `bw_bytes`, `iops`).

use hdrhistogram::Histogram;
use serde::Serialize;

use super::job::Pattern;
use super::outcome::{Holes, OpKind, Outcome, Usage};

/// Times of operations, in nanoseconds.
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

impl Latency {
    fn of(times: &Histogram<u64>) -> Option<Self> {
        let at = |percent: f64| times.value_at_percentile(percent);
        (!times.is_empty()).then(|| Self {
            min: times.min(),
            mean: times.mean(),
            stddev: times.stdev(),
            p50: at(50.0),
            p90: at(90.0),
            p95: at(95.0),
            p99: at(99.0),
            p99_9: at(99.9),
            p99_99: at(99.99),
            max: times.max(),
        })
    }
}

/// Figures of the operations of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Direction {
    /// Number of operations done.
    pub total_ios: u64,
    /// Number of bytes moved.
    pub io_bytes: u64,
    /// Operations per second, all clones.
    pub iops: f64,
    /// Bytes per second, all clones.
    pub bw_bytes: f64,
    /// Times from the start of an operation to its completion; none without operations. In an open
    /// loop they say nothing about the wait before, which `response_ns` includes.
    pub lat_ns: Option<Latency>,
    /// Times from the planned start of an operation to its completion, in an open loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_ns: Option<Latency>,
}

impl Direction {
    fn new(outcome: &Outcome, kind: OpKind) -> Self {
        let measured = outcome.of(kind);
        Self {
            total_ios: measured.ios(),
            io_bytes: measured.bytes,
            iops: outcome.iops(kind),
            bw_bytes: outcome.bytes_per_second(kind),
            lat_ns: Latency::of(&measured.service),
            response_ns: measured.response.as_ref().and_then(Latency::of),
        }
    }

    fn some(outcome: &Outcome, kind: OpKind) -> Option<Self> {
        Some(Self::new(outcome, kind)).filter(|direction| direction.total_ios > 0)
    }
}

/// Data that were compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct VerifiedReport {
    /// Blocks that were read and were right; one that is not ends the run.
    pub blocks: u64,
}

/// Use of the processor by a process.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct UsageReport {
    /// Time in user mode, in seconds.
    pub user_seconds: f64,
    /// Time in the kernel, in seconds.
    pub system_seconds: f64,
    /// Context switches because the process waited.
    pub voluntary_switches: u64,
    /// Context switches because others had to run.
    pub involuntary_switches: u64,
}

impl From<Usage> for UsageReport {
    fn from(usage: Usage) -> Self {
        Self {
            user_seconds: usage.user.as_secs_f64(),
            system_seconds: usage.system.as_secs_f64(),
            voluntary_switches: usage.voluntary,
            involuntary_switches: usage.involuntary,
        }
    }
}

/// Unallocated parts of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HolesReport {
    /// Bytes that are not allocated.
    pub bytes: u64,
    /// Bytes of the region.
    pub of: u64,
}

impl From<Holes> for HolesReport {
    fn from(Holes { bytes, of }: Holes) -> Self {
        Self { bytes, of }
    }
}

/// Result of a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Name of the job.
    pub name: String,
    /// Order of the offsets.
    pub pattern: Pattern,
    /// Reads of a hundred operations.
    pub read_percent: u8,
    /// Sizes of operations, in fio's form.
    pub bs: String,
    /// Bytes of one operation, where all have the same size.
    pub block_size: Option<u64>,
    /// Operations of one clone in flight.
    pub depth: u32,
    /// Number of concurrent clones.
    pub jobs: u32,
    /// Time that the figures are from, in seconds.
    pub runtime_seconds: f64,
    /// Figures of the reads.
    pub read: Direction,
    /// Figures of the writes.
    pub write: Direction,
    /// Figures of the trims, if there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trim: Option<Direction>,
    /// Figures of the flushes, if there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sync: Option<Direction>,
    /// Data that were compared, if that was wanted.
    pub verified: Option<VerifiedReport>,
    /// Unallocated parts of the region, if the device reports them and there were reads.
    pub holes: Option<HolesReport>,
    /// Use of the processor by this process.
    pub client: UsageReport,
    /// Use of the processor by the process that serves the device, if it was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<UsageReport>,
}

impl Report {
    /// The report of a result.
    #[must_use]
    pub fn new(outcome: &Outcome) -> Self {
        let option = |name: &str| {
            let mut options = outcome.options.iter();
            options
                .find(|(known, _)| known == name)
                .map(|(_, value)| value.as_str())
        };
        let number = |name| option(name).and_then(|text| text.parse().ok());
        let rw = option("rw").unwrap_or_default();
        let is_random = rw.starts_with("rand");
        let kind = rw
            .split(':')
            .next()
            .unwrap_or_default()
            .trim_start_matches("rand");
        let reads = match kind {
            "read" => 100,
            "rw" => number("rwmixread").map_or(50, |percent: u32| percent as u8),
            _ => 0,
        };
        let sizes = ["bs", "bsrange", "bssplit"].into_iter().find_map(option);
        let fixed = option("bs").and_then(|text| riser_units::parse_size(text).ok());
        Self {
            name: outcome.name.clone(),
            pattern: if is_random {
                Pattern::Random
            } else {
                Pattern::Sequential
            },
            read_percent: reads,
            bs: sizes.unwrap_or_default().to_owned(),
            block_size: fixed,
            depth: number("iodepth").unwrap_or(1),
            jobs: number("numjobs").unwrap_or(1),
            runtime_seconds: outcome.runtime.as_secs_f64(),
            read: Direction::new(outcome, OpKind::Read),
            write: Direction::new(outcome, OpKind::Write),
            trim: Direction::some(outcome, OpKind::Trim),
            sync: Direction::some(outcome, OpKind::Flush),
            verified: outcome.verified.map(|verified| VerifiedReport {
                blocks: verified.blocks,
            }),
            holes: outcome.holes.map(Into::into),
            client: outcome.client.into(),
            server: outcome.server.map(Into::into),
        }
    }

    /// Figures of all kinds that there were operations of, with their names.
    #[must_use]
    pub fn directions(&self) -> Vec<(&'static str, &Direction)> {
        let all = [
            (OpKind::Read, Some(&self.read)),
            (OpKind::Write, Some(&self.write)),
            (OpKind::Trim, self.trim.as_ref()),
            (OpKind::Flush, self.sync.as_ref()),
        ];
        let present = all
            .into_iter()
            .filter_map(|(kind, direction)| Some((kind.name(), direction?)));
        present
            .filter(|(_, direction)| direction.total_ios > 0)
            .collect()
    }
}
