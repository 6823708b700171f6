//! Rate limits for log messages.
//!
//! If a peer sends malformed data a million times per second, this must not fill our disk.
//! [`RateLimit`] allows a burst, followed by a single message per interval with the number of
//! suppressed messages.

use std::time::{Duration, Instant};

/// Default size of a burst.
const BURST: u32 = 10;

/// Default interval for messages after a burst.
const INTERVAL: Duration = Duration::from_secs(1);

/// A rate limit for a single type of message from a single source.
#[derive(Debug, Clone)]
pub struct RateLimit {
    burst: u32,
    interval: Duration,
    left: Option<(u32, Instant)>,
    suppressed: u64,
}

impl Default for RateLimit {
    fn default() -> Self {
        Self::new(BURST, INTERVAL)
    }
}

impl RateLimit {
    /// Creates a limit which allows a burst of `burst` messages, followed by a message per
    /// interval.
    #[must_use]
    pub fn new(burst: u32, interval: Duration) -> Self {
        Self {
            burst,
            interval,
            left: None,
            suppressed: 0,
        }
    }

    /// Returns the number of suppressed messages that were not reported yet, and resets it.
    pub fn take_suppressed(&mut self) -> u64 {
        std::mem::take(&mut self.suppressed)
    }

    /// Returns the time from which the suppressed messages can be reported, if any.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        let (_, since) = self.left.filter(|_| self.suppressed > 0)?;
        Some(since + self.interval)
    }

    /// If a message can be logged at `now`, returns the number of messages suppressed since the
    /// last one.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        let (tokens, since) = self.left.get_or_insert((self.burst, now));
        let earned = now.saturating_duration_since(*since).as_nanos() / self.interval.as_nanos();
        if earned > 0 {
            // At most one burst is allowed, even after a long time without messages.
            *tokens = tokens
                .saturating_add(u32::try_from(earned).unwrap_or(u32::MAX))
                .min(self.burst);
            // We drop the remainder of the interval. Therefore, the rate may be slightly lower than
            // the limit, but never higher.
            *since = now;
        }
        if *tokens == 0 {
            self.suppressed += 1;
            return None;
        }
        *tokens -= 1;
        Some(self.take_suppressed())
    }
}

/// Logs a warning about a peer if allowed by its limit, including the number of suppressed
/// messages.
#[macro_export]
macro_rules! warn_limited {
    ($limit:expr, $now:expr, $($args:tt)+) => {
        if let Some(suppressed) = $limit.admit($now) {
            ::tracing::warn!(suppressed = (suppressed > 0).then_some(suppressed), $($args)+);
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_is_followed_by_rate_limit() {
        let t = Instant::now();
        let mut limit = RateLimit::default();
        let passed = (0..1000).filter(|_| limit.admit(t).is_some()).count();
        assert_eq!(passed, 10);
        assert_eq!(limit.admit(t + Duration::from_millis(999)), None);
        assert_eq!(limit.admit(t + Duration::from_secs(1)), Some(991));
        assert_eq!(limit.admit(t + Duration::from_secs(1)), None);
        assert_eq!(limit.due(), Some(t + Duration::from_secs(2)));
        let later = t + Duration::from_secs(3600);
        let passed = (0..1000).filter(|_| limit.admit(later).is_some()).count();
        assert_eq!(passed, 10, "silence earns a burst again, not more");
    }
}
