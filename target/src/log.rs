//! Rate limits for lines of the log.
//!
//! A peer that sends nonsense a million times a second must cost its own connection, not our disk.
//! [`RateLimit`] lets a burst through, then one line per interval, and says how many were held
//! back.

use std::time::{Duration, Instant};

/// Lines that go through at once, unless said otherwise.
const BURST: u32 = 10;

/// After the burst, one line per interval, unless said otherwise.
const INTERVAL: Duration = Duration::from_secs(1);

/// A limit for one kind of message of one source.
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
    /// Lets `burst` lines through at once, then one per interval.
    #[must_use]
    pub fn new(burst: u32, interval: Duration) -> Self {
        Self {
            burst,
            interval,
            left: None,
            suppressed: 0,
        }
    }

    /// Returns the number of lines that were held back and not reported yet, which counts as their
    /// report.
    pub fn take_suppressed(&mut self) -> u64 {
        std::mem::take(&mut self.suppressed)
    }

    /// Time from which a line may report the number that was held back; `None` if none were.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        let (_, since) = self.left.filter(|_| self.suppressed > 0)?;
        Some(since + self.interval)
    }

    /// Returns, if a line may be logged at `now`, the number that was held back since the last
    /// one.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        let (tokens, since) = self.left.get_or_insert((self.burst, now));
        let earned = now.saturating_duration_since(*since).as_nanos() / self.interval.as_nanos();
        if earned > 0 {
            // A silence of any length earns one burst, not more: the disk's worst case stays the
            // same.
            *tokens = tokens
                .saturating_add(u32::try_from(earned).unwrap_or(u32::MAX))
                .min(self.burst);
            // The rest of an interval is given up, so lines come slightly slower than the limit
            // says, never faster.
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

/// Logs a warning about a peer if its limit admits it; the number of lines held back goes along.
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
    fn a_burst_passes_then_one_line_a_second() {
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
