//! Decides when a busy thread checks the descriptor of a service: [`Looks`].

use std::time::{Duration, Instant};

/// After this number of unsuccessful checks, a service will only check its descriptor every
/// [`LOOK`].
const VAIN: u32 = 64;
const LOOK: Duration = Duration::from_micros(50);

/// Decides when a service should check its descriptor. This requires a system call, and if the
/// thread is busy with other services, it would be done very often.
#[derive(Debug)]
pub(crate) struct Looks {
    /// Number of unsuccessful checks in a row.
    vain: u32,
    last: Instant,
}

impl Looks {
    pub(crate) fn new() -> Self {
        Self {
            vain: 0,
            last: Instant::now(),
        }
    }

    /// Returns whether the descriptor should be checked now.
    pub(crate) fn is_due(&mut self) -> bool {
        if self.vain < VAIN {
            return true;
        }
        let now = Instant::now();
        let is_due = now.saturating_duration_since(self.last) >= LOOK;
        if is_due {
            self.last = now;
        }
        is_due
    }

    /// Must be called after an unsuccessful check.
    pub(crate) fn note_vain(&mut self) {
        self.vain = self.vain.saturating_add(1);
    }

    /// Must be called after data was received, or if new data is likely, for example because we
    /// sent a response or a sleep was interrupted.
    pub(crate) fn expect(&mut self) {
        self.vain = 0;
    }

    /// Returns whether the descriptor is only checked at intervals.
    #[cfg(test)]
    pub(crate) fn is_quiet(&self) -> bool {
        self.vain >= VAIN
    }

    /// Disables the interval, so that a test can see other reasons for a check.
    #[cfg(test)]
    pub(crate) fn defer_check(&mut self) {
        self.vain = VAIN;
        self.last = Instant::now() + Duration::from_secs(3600);
    }
}
