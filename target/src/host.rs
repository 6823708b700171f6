//! [`Host`]: threads, dates and the boot ID, for code that can run in a simulation.
//!
//! The time of a worker's round is passed as an argument, and random bytes are from its
//! [`Env`](crate::worker::Env). This trait contains everything else that backends and workers need,
//! so that a simulation can run their blocking calls as part of its schedule, and provide dates.

use std::fmt::Debug;
use std::sync::LazyLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use riser_reactor::{SystemThreads, Threads, simulated};

/// The host, or a simulated host.
pub trait Host: Debug + Send + Sync {
    /// Returns threads for calls that may block.
    fn threads(&self) -> &dyn Threads;

    /// Returns the date for the time of a round.
    fn date(&self, now: Instant) -> SystemTime;

    /// Returns the boot ID. While it is the same, data in the page cache is not lost, even if it
    /// was not flushed.
    fn boot(&self) -> [u8; 16];
}

/// The boot ID of the host, or a random ID for this process if the kernel does not provide it.
static BOOT: LazyLock<[u8; 16]> = LazyLock::new(|| {
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits = uuid.trim().replace('-', "");
    let id = u128::from_str_radix(&digits, 16).map(u128::to_be_bytes);
    id.unwrap_or_else(|_| {
        let mut random = [0; 16];
        getrandom::fill(&mut random).expect("the system has random numbers");
        random
    })
});

/// The host of this process.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemHost;

impl Host for SystemHost {
    fn threads(&self) -> &dyn Threads {
        &SystemThreads
    }

    /// Returns the current date, because rounds are short.
    fn date(&self, _: Instant) -> SystemTime {
        SystemTime::now()
    }

    fn boot(&self) -> [u8; 16] {
        *BOOT
    }
}

/// Start date of a simulation, since 1970.
const SIMULATED_DATE: Duration = Duration::from_secs(1_700_000_000);

/// A simulated host: threads run in its schedule, the date is based on its clock, and boots are
/// numbered.
#[derive(Clone, Debug)]
pub struct SimulatedHost {
    threads: simulated::Threads,
    start: Instant,
    boot: u64,
}

impl SimulatedHost {
    /// Creates a host with a clock that starts at `start`.
    #[must_use]
    pub fn new(threads: simulated::Threads, start: Instant) -> Self {
        Self {
            threads,
            start,
            boot: 1,
        }
    }

    /// Returns the same host with this boot number.
    #[must_use]
    pub fn with_boot(self, boot: u64) -> Self {
        Self { boot, ..self }
    }
}

impl Host for SimulatedHost {
    fn threads(&self) -> &dyn Threads {
        &self.threads
    }

    fn date(&self, now: Instant) -> SystemTime {
        UNIX_EPOCH + SIMULATED_DATE + now.duration_since(self.start)
    }

    fn boot(&self) -> [u8; 16] {
        u128::from(self.boot).to_be_bytes()
    }
}
