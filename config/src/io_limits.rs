//! [`IoLimits`]: rate limits for a backend or an initiator.

use std::time::Duration;

/// Maximum time that a command should wait in its queue. By default, Linux initiators time out
/// after 30 s.
pub const MAX_WAIT: Duration = Duration::from_secs(10);

/// Default burst time, if the configuration does not set it.
pub const BURST: Duration = Duration::from_millis(100);

/// Configured limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IoLimits {
    /// Reads and writes per second in total.
    pub iops: Option<u64>,
    /// Read commands per second.
    pub read_iops: Option<u64>,
    /// Write commands per second.
    pub write_iops: Option<u64>,
    /// Bytes per second for reads and writes in total.
    pub bandwidth: Option<u64>,
    /// Bytes read per second.
    pub read_bandwidth: Option<u64>,
    /// Bytes written per second.
    pub write_bandwidth: Option<u64>,
    /// Time for which unused capacity is kept, so that it can be used in a burst.
    pub burst: Duration,
}

impl Default for IoLimits {
    fn default() -> Self {
        Self {
            iops: None,
            read_iops: None,
            write_iops: None,
            bandwidth: None,
            read_bandwidth: None,
            write_bandwidth: None,
            burst: BURST,
        }
    }
}

impl IoLimits {
    /// Returns true if any limit is set.
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.rates().iter().any(Option::is_some)
    }

    /// Returns the rates with their names.
    #[must_use]
    pub fn named(&self) -> [(&'static str, Option<u64>); 6] {
        [
            ("iops", self.iops),
            ("read_iops", self.read_iops),
            ("write_iops", self.write_iops),
            ("bandwidth", self.bandwidth),
            ("read_bandwidth", self.read_bandwidth),
            ("write_bandwidth", self.write_bandwidth),
        ]
    }

    /// Returns the rates, commands before bytes: total, read, write.
    #[must_use]
    pub fn rates(&self) -> [Option<u64>; 6] {
        [
            self.iops,
            self.bandwidth,
            self.read_iops,
            self.read_bandwidth,
            self.write_iops,
            self.write_bandwidth,
        ]
    }
}
