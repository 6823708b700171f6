//! The last minutes of a daemon: samples of each second, and events.

use serde::{Deserialize, Serialize};

use crate::rates::Rates;

/// All units over one interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Numbers the samples of this process.
    pub number: u64,
    /// The end of the second, in seconds since 1970, as the host's clock said then.
    pub time: f64,
    /// Seconds for which the daemon had served then: no step of that clock changes this.
    pub uptime: f64,
    /// Reads per second, of all units together.
    pub reads: f64,
    /// Writes per second, of all units together.
    pub writes: f64,
    /// Other commands per second.
    pub others: f64,
    /// Bytes read per second.
    pub read_bytes: f64,
    /// Bytes written per second.
    pub write_bytes: f64,
    /// The time that half of all commands kept, in seconds; nothing without any.
    pub p50: Option<f64>,
    /// The time that 99 % of them kept.
    pub p99: Option<f64>,
    /// The mean time, in seconds.
    pub mean: Option<f64>,
    /// Commands under way at its end.
    pub queue_depth: u64,
    /// Commands per second that ended with an error.
    pub errors: f64,
}

/// A request for what is newer than what the asker has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Since {
    /// Samples after the one with this number.
    pub sample: u64,
    /// Events after the one with this number.
    pub event: u64,
}

/// Samples and events that are newer than a request's numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Recent {
    /// The last interval, by unit; without sessions and workers.
    pub rates: Rates,
    /// Samples in the order of time.
    pub samples: Vec<Sample>,
    /// Events in the order of time.
    pub events: Vec<Event>,
}

/// One line of the log that the status page shows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Numbers the events of this process.
    pub number: u64,
    /// Seconds since 1970 at which it was logged.
    pub time: f64,
    /// `info`, `warn` or `error`.
    pub level: String,
    /// Message, and the fields that say more: `session ended reason=logout …`.
    pub text: String,
    /// True if it is a line of the audit log of what was done as asked. Others are kept apart, so
    /// that logins do not displace them.
    #[serde(default)]
    pub routine: bool,
}
