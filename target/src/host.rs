//! [`Host`]: threads, dates and the name of the boot, for code that makes none of them.
//!
//! The time of a worker's round comes with the round, and random bytes from its
//! [`Env`](crate::worker::Env). What backends and workers need beyond that is here, behind one
//! trait, so that a simulation can run their blocking calls as steps of its schedule and date what
//! they note.

use std::fmt::Debug;
use std::sync::LazyLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use riser_reactor::{SystemThreads, Threads, simulated};

/// The machine, or a simulation of one.
pub trait Host: Debug + Send + Sync {
    /// Threads for calls that may block.
    fn threads(&self) -> &dyn Threads;

    /// Date at the time of a round.
    fn date(&self, now: Instant) -> SystemTime;

    /// Names the time since the machine was started, for which its page cache has kept what was not
    /// flushed.
    fn boot(&self) -> [u8; 16];
}

/// Names the host's boot; where the kernel does not, this process.
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

/// The machine that we run on.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemHost;

impl Host for SystemHost {
    fn threads(&self) -> &dyn Threads {
        &SystemThreads
    }

    /// The date of now: rounds are short.
    fn date(&self, _: Instant) -> SystemTime {
        SystemTime::now()
    }

    fn boot(&self) -> [u8; 16] {
        *BOOT
    }
}

/// The date at which a simulation begins, from 1970 on.
const SIMULATED_DATE: Duration = Duration::from_secs(1_700_000_000);

/// A simulation's machine: threads of its schedule, a date that goes with its clock, and boots that
/// it counts.
#[derive(Clone, Debug)]
pub struct SimulatedHost {
    threads: simulated::Threads,
    start: Instant,
    boot: u64,
}

impl SimulatedHost {
    /// A machine whose clock begins at `start`.
    #[must_use]
    pub fn new(threads: simulated::Threads, start: Instant) -> Self {
        Self {
            threads,
            start,
            boot: 1,
        }
    }

    /// The same machine, started for the `boot`th time.
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
