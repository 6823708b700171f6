//! Clock of a device, which is set by its owner.

use std::time::Instant;

/// Clock of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    /// Creation time, used as the base of device timestamps.
    start: Instant,
    now: Instant,
}

impl Clock {
    /// Creates a clock for a device created at `now`.
    pub(super) fn new(now: Instant) -> Self {
        Self { start: now, now }
    }

    /// Sets the current time.
    #[inline]
    pub(super) fn set_now(&mut self, now: Instant) {
        // Time must not go backwards: the caller may have read the clock before the previous call.
        self.now = self.now.max(now);
    }

    /// Returns the current time, as last set.
    #[inline]
    pub(super) fn now(&self) -> Instant {
        self.now
    }

    /// Returns the time since the device was created in nanoseconds.
    #[inline]
    pub(crate) fn device_time(&self) -> u64 {
        self.now.duration_since(self.start).as_nanos() as u64
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn clock_never_goes_backwards() {
        let start = Instant::now();
        let mut clock = Clock::new(start);
        let later = start + Duration::from_nanos(500);
        clock.set_now(later);
        clock.set_now(start);
        assert_eq!((clock.now(), clock.device_time()), (later, 500));
    }
}
