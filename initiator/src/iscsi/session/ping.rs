//! Timeout of an outstanding ping.

use std::time::{Duration, Instant};

/// Maximum silence of a target before we abandon it, in multiples of the ping interval, regardless
/// of how slowly the data before the ping arrives. With the default of 5 seconds, this equals the
/// timeout of a request, which may be a single write that needs all of this time.
const MAX_SILENCE: u32 = 12;

/// An outstanding ping.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ping {
    /// Time for abandoning the target.
    until: Instant,
    /// Maximum for `until`.
    limit: Instant,
}

impl Ping {
    /// Creates a ping sent at `now`. `interval` is both the time without a message after which a
    /// ping is sent and the timeout for the response.
    pub(super) fn new(last_received: Instant, interval: Duration, now: Instant) -> Self {
        let until = now + interval;
        Self {
            until,
            limit: until.max(last_received + interval * MAX_SILENCE),
        }
    }

    /// Returns the time for abandoning the target.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Called when bytes were received: the response might be behind them.
    pub(super) fn on_bytes_received(&mut self, interval: Duration, now: Instant) {
        self.until = (now + interval).min(self.limit);
    }

    /// Called when sent data has arrived at the target's host, and the ping is in transit behind
    /// it. Data received after the ping was sent also counts, because the response may be behind
    /// it.
    pub(super) fn on_bytes_acknowledged(
        &mut self,
        last_received: Instant,
        interval: Duration,
        now: Instant,
    ) {
        self.limit = self.limit.max(last_received + interval * MAX_SILENCE);
        self.until = (now + interval).min(self.limit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEC: Duration = Duration::from_secs(1);

    #[test]
    fn extensions_end_after_maximum_silence() {
        let begun = Instant::now();
        let mut ping = Ping::new(begun, SEC, begun + SEC);
        assert_eq!(ping.until(), begun + 2 * SEC);
        for second in 1..20 {
            ping.on_bytes_acknowledged(begun, SEC, begun + second * SEC);
            assert_eq!(ping.until(), begun + (second + 1).min(12) * SEC);
        }
        // The target was heard again.
        ping.on_bytes_acknowledged(begun + 10 * SEC, SEC, begun + 20 * SEC);
        assert_eq!(ping.until(), begun + 21 * SEC);
        ping.on_bytes_received(SEC, begun + 30 * SEC);
        assert_eq!(ping.until(), begun + 22 * SEC);
    }
}
