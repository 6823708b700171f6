//! Rate limits for queue pairs (`ibv_modify_qp_rate_limit(3)`).
//!
//! A rate limit restricts the number of packets a queue pair can send each time it is scheduled, so
//! there is no overhead for queue pairs without a limit. All packets are counted: requests, READ
//! responses and acknowledgements. However, a standalone acknowledgement is never delayed.

use std::time::{Duration, Instant};

use super::{Nic, Qp, TURN};
use crate::verbs::{Mtu, QpId, QpState, QpType, RateLimit, VerbsError};
use crate::wire::MAX_HEADER_LEN;

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
    fn new(limit: RateLimit, now: Instant) -> Self {
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

impl Qp {
    /// Returns the number of packets that the QP can send when it is scheduled, based on a path MTU
    /// of `mtu` bytes.
    pub(super) fn turn_budget(&mut self, now: Instant, mtu: u32) -> usize {
        let mtu = self.attr.path_mtu.map_or(mtu, Mtu::bytes) as usize;
        match &mut self.limiter {
            None => TURN,
            Some(limiter) => limiter.allow(now, mtu + MAX_HEADER_LEN, TURN),
        }
    }

    /// Updates the limiter after the QP has sent this number of bytes.
    pub(super) fn on_sent(&mut self, now: Instant, bytes: usize) {
        if let Some(limiter) = &mut self.limiter {
            limiter.on_sent(now, bytes);
        }
    }
}

#[allow(
    missing_docs,
    reason = "the calls of the verbs traits, documented there"
)]
impl Nic {
    pub fn modify_qp_rate_limit(&mut self, id: QpId, limit: RateLimit) -> Result<(), VerbsError> {
        let now = self.now;
        self.config.check_packets("rate limits")?;
        let qp = self.qps.get_mut(id)?;
        if qp.qp_type == QpType::Gsi {
            return Err(VerbsError::WrongQpType("rate limit"));
        }
        if matches!(qp.state(), QpState::Reset | QpState::Error) {
            return Err(VerbsError::InvalidState("rate limit"));
        }
        if limit.rate_kbps != 0 && !(MIN_RATE..=MAX_RATE).contains(&limit.rate_kbps) {
            return Err(VerbsError::InvalidParameter("rate limit"));
        }
        let is_limited = limit.rate_kbps != 0;
        qp.limiter = is_limited.then(|| Box::new(Limiter::new(limit, now)));
        // Packets may have been waiting for the previous limit.
        self.schedule(id);
        Ok(())
    }

    pub fn query_qp_rate_limit(&self, id: QpId) -> Result<RateLimit, VerbsError> {
        let limiter = self.qps.get(id)?.limiter.as_ref();
        Ok(limiter.map_or_else(RateLimit::default, |limiter| limiter.limit))
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
