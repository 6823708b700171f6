//! [`Host`]: threads and dates, for code that makes neither.
//!
//! The time of a worker's round comes with the round, and random bytes from its
//! [`Env`](crate::worker::Env). What backends and workers need beyond that is here, behind one
//! trait, so that a simulation can run their blocking calls as steps of its schedule and date what
//! they note.

use std::fmt::Debug;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use riser_reactor::{SystemThreads, Threads, simulated};

/// The machine, or a simulation of one.
pub trait Host: Debug + Send + Sync {
    /// Threads for calls that may block.
    fn threads(&self) -> &dyn Threads;

    /// Date at the time of a round.
    fn date(&self, now: Instant) -> SystemTime;
}

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
}

/// The date at which a simulation begins, from 1970 on.
const SIMULATED_DATE: Duration = Duration::from_secs(1_700_000_000);

/// A simulation's machine: threads of its schedule, and a date that goes with its clock.
#[derive(Clone, Debug)]
pub struct SimulatedHost {
    threads: simulated::Threads,
    start: Instant,
}

impl SimulatedHost {
    /// A machine whose clock begins at `start`.
    #[must_use]
    pub fn new(threads: simulated::Threads, start: Instant) -> Self {
        Self { threads, start }
    }
}

impl Host for SimulatedHost {
    fn threads(&self) -> &dyn Threads {
        &self.threads
    }

    fn date(&self, now: Instant) -> SystemTime {
        UNIX_EPOCH + SIMULATED_DATE + now.duration_since(self.start)
    }
}
