//! How fast the packets of an unreliable connection leave.
//!
//! Nothing says how many of them the peer has taken, and what finds its socket full is lost, with
//! the whole message. So no more than a burst leaves at once, which fits the socket's buffer, and a
//! burst's worth in each [`BURST_TIME`] after that: the peer's process has to look at its socket
//! that often, and no faster network is needed.

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

    /// A packet leaves that takes so many bytes there.
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
