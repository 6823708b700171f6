//! Time that goes by while processes run.

use std::ffi::c_int;
use std::time::{Duration, Instant};

/// Time between two looks at what another thread or process does.
pub(crate) const LOOK: Duration = Duration::from_millis(1);

/// Most time between two looks that counts: a container, a guest or a group of processes that was paused was
/// not waiting, and none of its processes could do its part.
const MOST: Duration = Duration::from_millis(200);

/// Longest wait between two looks, so that all of it counts.
const WAIT: Duration = Duration::from_millis(100);

/// A watch, at which its user looks often.
pub(crate) struct Watch {
    last: Instant,
    passed: Duration,
}

impl Watch {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            last: now,
            passed: Duration::ZERO,
        }
    }

    /// Time that has passed.
    pub(crate) fn look(&mut self, now: Instant) -> Duration {
        self.passed += now.saturating_duration_since(self.last).min(MOST);
        self.last = now;
        self.passed
    }

    /// Milliseconds to wait until the next look, for a limit that is not over yet; `None` once it is.
    pub(crate) fn wait(&mut self, now: Instant, limit: Duration) -> Option<c_int> {
        let left = limit.saturating_sub(self.look(now));
        (!left.is_zero()).then(|| left.min(WAIT).as_millis() as c_int + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_hardly_counts() {
        let start = Instant::now();
        let after = |ms| start + Duration::from_millis(ms);
        let mut watch = Watch::new(start);
        assert_eq!(watch.look(after(100)), Duration::from_millis(100));
        assert_eq!(watch.look(after(200)), WAIT * 2);
        assert_eq!(watch.look(after(20_200)), WAIT * 2 + MOST);
        assert_eq!(watch.look(after(20_300)), WAIT * 3 + MOST);
        // Of a second, 400 ms are left.
        let limit = Duration::from_secs(1);
        assert_eq!(watch.wait(after(20_400), limit), Some(101));
        assert_eq!(watch.wait(after(20_750), limit), Some(101));
        assert_eq!(watch.wait(after(20_920), limit), Some(31));
        assert_eq!(watch.wait(after(20_950), limit), None);
    }
}
