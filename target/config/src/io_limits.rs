//! [`IoLimits`]: how fast a backend or an initiator may be used.

use std::time::Duration;

/// Maximum time for which a command may have to wait behind others of its line. Linux initiators
/// give up after 30 s by default.
pub const MAX_WAIT: Duration = Duration::from_secs(10);

/// For how long what is not used of a rate is kept, where the configuration does not say it.
pub const BURST: Duration = Duration::from_millis(100);

/// Limits as they are configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IoLimits {
    /// Reads and writes a second, together.
    pub iops: Option<u64>,
    /// Commands a second that read.
    pub read_iops: Option<u64>,
    /// Commands a second that write.
    pub write_iops: Option<u64>,
    /// Bytes a second, of reads and writes together.
    pub bandwidth: Option<u64>,
    /// Bytes a second that are read.
    pub read_bandwidth: Option<u64>,
    /// Bytes a second that are written.
    pub write_bandwidth: Option<u64>,
    /// For how long what is not used of these is kept, to be used at once.
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
    /// Returns true if it limits anything.
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.rates().iter().any(Option::is_some)
    }

    /// The rates by their names.
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

    /// The rates, commands before bytes: of all, of reads, of writes.
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
