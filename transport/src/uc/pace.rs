//! How fast the packets of an unreliable connection leave.
//!
//! UC has no acknowledgements, and a packet that finds the peer's socket full is lost, with its whole
//! message. So at most one burst leaves at once, which fits in the socket's buffer, and then one burst
//! in each [`BURST_TIME`]. The peer has to empty its socket that often; its network need not be faster
//! than this rate.

use std::time::{Duration, Instant};

/// Time in which the peer is taken to empty its socket of a burst.
const BURST_TIME: Duration = Duration::from_nanos(BURST_NANOS);
const BURST_NANOS: u64 = 500_000;

#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Bytes of a burst, of packets as they lie in the peer's socket buffer.
    burst: u32,
    /// Time at which what has left would have left at an even pace.
    even: Option<Instant>,
    /// The end of the wait that a packet has found.
    until: Option<Instant>,
}

impl Pace {
    pub(super) fn new(burst: u32) -> Self {
        Self {
            burst: burst.max(1),
            even: None,
            until: None,
        }
    }

    pub(super) fn set_burst(&mut self, burst: u32) {
        self.burst = burst.max(1);
    }

    /// Returns whether a packet has to wait.
    pub(super) fn waits(&mut self, now: Instant) -> bool {
        let at = self.even.and_then(|even| even.checked_sub(BURST_TIME));
        self.until = at.filter(|&at| at > now);
        self.until.is_some()
    }

    /// A packet leaves that takes `cost` bytes there.
    pub(super) fn on_sent(&mut self, now: Instant, cost: u32) {
        let nanos = BURST_NANOS * u64::from(cost) / u64::from(self.burst);
        let even = self.even.map_or(now, |even| even.max(now));
        self.even = Some(even + Duration::from_nanos(nanos));
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.until
    }

    /// Ends a wait whose time has come.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        self.until = self.until.filter(|&at| at > now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_leaves_at_once_and_the_rest_at_its_pace() {
        let start = Instant::now();
        let mut pace = Pace::new(1000);
        let sent = |pace: &mut Pace, now| {
            let mut count = 0;
            while !pace.waits(now) {
                pace.on_sent(now, 100);
                count += 1;
            }
            count
        };
        // The packet that ends the burst is not cut in two.
        assert_eq!(sent(&mut pace, start), 11);
        let at = pace.deadline().unwrap();
        assert_eq!(at - start, BURST_TIME / 10);
        assert_eq!(sent(&mut pace, at), 1);
        assert_eq!(sent(&mut pace, start + BURST_TIME), 9);
        // A pause is made up for by one burst, however long it was.
        assert_eq!(sent(&mut pace, start + BURST_TIME * 100), 11);
        pace.handle_timeout(start + BURST_TIME * 101);
        assert_eq!(pace.deadline(), None);
    }
}
