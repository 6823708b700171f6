//! Rate limits for queue pairs (`ibv_modify_qp_rate_limit(3)`).
//!
//! A rate limit restricts the number of packets a queue pair can send each time it is scheduled, so
//! there is no overhead for queue pairs without a limit. All packets are counted: requests, READ
//! responses and acknowledgements. However, a standalone acknowledgement is never delayed.

use std::time::{Duration, Instant};

use crate::verbs::RateLimit;

/// Minimum rate in kbit/s. At this rate, a full packet takes 35 ms, which is well below the retry
/// timeout of a reliable connection.
pub(super) const MIN_RATE: u32 = 1000;
/// Max rate in kbit/s.
pub(super) const MAX_RATE: u32 = u32::MAX;

/// Default burst size in bytes, if a packet is not larger than this.
const BURST: u32 = 16 << 10;

/// State of a rate limiter.
#[derive(Debug)]
pub(super) struct Limiter {
    pub(super) limit: RateLimit,
    /// Time when all sent data would have been sent at the configured rate.
    even: Instant,
    /// Time when the next packet can be sent.
    release: Option<Instant>,
}

impl Limiter {
    pub(super) fn new(limit: RateLimit, now: Instant) -> Self {
        Self {
            limit,
            even: now,
            release: None,
        }
    }

    /// Returns the time required to send this number of bytes.
    fn time_of(&self, bytes: usize) -> Duration {
        let bits = bytes as u64 * 8;
        // 1 kbit/s is one bit per millisecond.
        Duration::from_nanos(bits * 1_000_000 / u64::from(self.limit.rate_kbps.max(1)))
    }

    /// Returns the number of packets of up to `len` bytes that can be sent now, up to `max`. If
    /// this is 0, the first packet must wait until [`Limiter::release`].
    pub(super) fn allow(&mut self, now: Instant, len: usize, max: usize) -> usize {
        let burst = match self.limit.max_burst {
            0 => BURST,
            burst => burst,
        };
        let (each, burst) = (self.time_of(len), self.time_of(len.max(burst as usize)));
        let room = (now + burst).saturating_duration_since(self.even.max(now));
        let count = room.as_nanos() / each.as_nanos().max(1);
        let count = usize::try_from(count).map_or(max, |count| count.min(max));
        self.release = (count == 0).then(|| (self.even + each).checked_sub(burst).unwrap_or(now));
        count
    }

    /// Accounts for sent data.
    pub(super) fn on_sent(&mut self, now: Instant, bytes: usize) {
        self.even = self.even.max(now) + self.time_of(bytes);
    }

    /// Stops waiting if the time has passed.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        self.release = self.release.filter(|&at| at > now);
    }

    /// Returns when the next packet can be sent, if it needs to wait.
    pub(super) fn release(&self) -> Option<Instant> {
        self.release
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limiter(rate_kbps: u32, max_burst: u32, now: Instant) -> Limiter {
        let limit = RateLimit {
            rate_kbps,
            max_burst,
        };
        Limiter::new(limit, now)
    }

    #[test]
    fn burst_is_sent_at_once() {
        let start = Instant::now();
        let mut now = start;
        // 8 Mbit/s is one byte per microsecond.
        let mut limiter = limiter(8000, 5000, now);
        assert_eq!(limiter.allow(now, 1000, 64), 5);
        limiter.on_sent(now, 4 * 1000);
        assert_eq!(limiter.allow(now, 1000, 64), 1);
        limiter.on_sent(now, 1000);
        let mut sent = 5000;
        for _ in 0..1000 {
            assert_eq!(limiter.allow(now, 1000, 64), 0);
            now = limiter.release().unwrap();
            limiter.handle_timeout(now - Duration::from_nanos(1));
            assert_eq!(limiter.release(), Some(now));
            limiter.handle_timeout(now);
            assert_eq!(limiter.release(), None);
            assert_eq!(limiter.allow(now, 1000, 64), 1);
            assert_eq!(limiter.release(), None);
            limiter.on_sent(now, 1000);
            sent += 1000;
        }
        let took = now - start;
        assert_eq!(took, Duration::from_micros(sent - 5000));
        // After an idle time, we can send a single burst, but not more.
        now += Duration::from_secs(100);
        assert_eq!(limiter.allow(now, 1000, 64), 5);
        assert_eq!(limiter.allow(now, 1000, 3), 3);
    }

    #[test]
    fn packet_larger_than_burst_is_sent() {
        let now = Instant::now();
        let mut small = limiter(MIN_RATE, 1, now);
        assert_eq!(small.allow(now, 4200, 64), 1);
        small.on_sent(now, 4200);
        assert_eq!(small.allow(now, 4200, 64), 0);
        let wait = small.release().unwrap() - now;
        assert_eq!(wait, Duration::from_nanos(33_600_000));
        let mut large = limiter(MAX_RATE, u32::MAX, now);
        assert_eq!(large.allow(now, 4200, 64), 64);
    }
}
