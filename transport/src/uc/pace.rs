//! Pacing for unreliable connections.
//!
//! UC has no acknowledgements. If the peer's socket buffer is full, the packet is dropped and the
//! message is lost. We therefore limit a burst to the size of a socket buffer and send at most one
//! burst per [`BURST_TIME`]. The peer must be able to read its socket at this rate, and its network
//! doesn't need to be faster than that.

use std::time::{Duration, Instant};

/// Time in which we expect the peer to read a burst from its socket.
const BURST_TIME: Duration = Duration::from_nanos(BURST_NANOS);
const BURST_NANOS: u64 = 500_000;

#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Burst size in bytes, based on the packet size in the peer's socket buffer.
    burst: u32,
    /// Time at which all data sent so far would have been sent at a constant rate.
    even: Option<Instant>,
    /// Time until which a packet must wait.
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

    /// Returns whether the next packet must wait.
    pub(super) fn waits(&mut self, now: Instant) -> bool {
        let at = self.even.and_then(|even| even.checked_sub(BURST_TIME));
        self.until = at.filter(|&at| at > now);
        self.until.is_some()
    }

    /// Updates the state when a packet is sent that will use `cost` bytes in the peer's buffer.
    pub(super) fn on_sent(&mut self, now: Instant, cost: u32) {
        let nanos = BURST_NANOS * u64::from(cost) / u64::from(self.burst);
        let even = self.even.map_or(now, |even| even.max(now));
        self.even = Some(even + Duration::from_nanos(nanos));
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.until
    }

    /// Clears an expired wait.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        self.until = self.until.filter(|&at| at > now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_is_sent_then_paced() {
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
        // The last packet of a burst is not split.
        assert_eq!(sent(&mut pace, start), 11);
        let at = pace.deadline().unwrap();
        assert_eq!(at - start, BURST_TIME / 10);
        assert_eq!(sent(&mut pace, at), 1);
        assert_eq!(sent(&mut pace, start + BURST_TIME), 9);
        // After a pause of any length, only a single burst is allowed.
        assert_eq!(sent(&mut pace, start + BURST_TIME * 100), 11);
        pace.handle_timeout(start + BURST_TIME * 101);
        assert_eq!(pace.deadline(), None);
    }
}
