//! History of the last minutes: one sample per second, and events.

use serde::{Deserialize, Serialize};

use crate::rates::Rates;

/// Rates of all units over one interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Sequence number within this process.
    pub number: u64,
    /// End of the interval in seconds since 1970, according to the host's clock at that time.
    pub time: f64,
    /// Uptime of the daemon in seconds. This is not affected by clock changes.
    pub uptime: f64,
    /// Reads per second for all units.
    pub reads: f64,
    /// Writes per second for all units.
    pub writes: f64,
    /// Other commands per second.
    pub others: f64,
    /// Bytes read per second.
    pub read_bytes: f64,
    /// Bytes written per second.
    pub write_bytes: f64,
    /// Median latency of all commands in seconds; not set without commands.
    pub p50: Option<f64>,
    /// 99th percentile latency in seconds.
    pub p99: Option<f64>,
    /// Average latency in seconds.
    pub mean: Option<f64>,
    /// Commands in flight at the end of the interval.
    pub queue_depth: u64,
    /// Failed commands per second.
    pub errors: f64,
}

/// A request for new samples and events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Since {
    /// Sequence number of the last sample already received.
    pub sample: u64,
    /// Sequence number of the last event already received.
    pub event: u64,
}

/// Samples and events with higher sequence numbers than requested.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Recent {
    /// Rates of the last interval by unit, without sessions and workers.
    pub rates: Rates,
    /// Samples in chronological order.
    pub samples: Vec<Sample>,
    /// Events in chronological order.
    pub events: Vec<Event>,
}

/// A log line for the status page.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Sequence number within this process.
    pub number: u64,
    /// Seconds since 1970.
    pub time: f64,
    /// `info`, `warn` or `error`.
    pub level: String,
    /// Message with its fields: `session ended reason=logout …`.
    pub text: String,
    /// True for audit log events of successful operations. Other events are stored separately, so
    /// that logins don't displace them.
    #[serde(default)]
    pub routine: bool,
}
