//! [`Spinner`]: decides whether an idle worker polls or sleeps.
//!
//! Sleeping costs two context switches if work arrives a microsecond later. Polling wastes a core
//! if no work arrives. This policy only polls after there was work. The polling interval grows
//! while polling finds work and shrinks otherwise, so a loaded worker polls, and an idle worker
//! sleeps and uses no CPU time.

use std::time::{Duration, Instant};

/// The next step after a round of the worker's loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Run another round immediately.
    Poll,
    /// Park, for at most this time if there is a deadline.
    Park(Option<Duration>),
}

/// The state of the policy. There is one for each worker.
#[derive(Debug, Clone)]
pub struct Spinner {
    max: Duration,
    budget: Duration,
    /// Start of the current interval of polling without work.
    since: Option<Instant>,
    /// Set if there was work since the last park. A wake-up without work does not cause polling.
    worked: bool,
}

/// The initial and minimum polling interval is the maximum divided by this.
const FLOOR: u32 = 8;

impl Spinner {
    /// Creates a policy that polls for at most `max` after the last work. If it is zero, it never
    /// polls.
    #[must_use]
    pub fn new(max: Duration) -> Self {
        Self {
            max,
            budget: max / FLOOR,
            since: None,
            worked: false,
        }
    }

    /// Decides the next step after a round at `now`. `worked` indicates whether it did any work,
    /// `deadline` is the time of the worker's next timer.
    pub fn plan(&mut self, now: Instant, worked: bool, deadline: Option<Instant>) -> Next {
        if worked {
            if self.since.take().is_some() {
                // Polling found work. A longer interval would find more.
                self.budget = (self.budget * 2).min(self.max);
            }
            self.worked = true;
            return Next::Poll;
        }
        let remaining = deadline.map(|d| d.saturating_duration_since(now));
        // A timer that has expired is work, so parking would return immediately.
        if remaining.is_some_and(|r| r.is_zero()) {
            return Next::Poll;
        }
        // After a wake-up without work, the worker goes back to sleep immediately.
        if self.worked {
            let since = *self.since.get_or_insert(now);
            if now.saturating_duration_since(since) < self.budget {
                return Next::Poll;
            }
            // Polling found no work during the whole interval, so the next one is shorter. It never
            // drops below the floor, from which one success doubles it.
            self.budget = (self.budget / 2).max(self.max / FLOOR);
        }
        self.since = None;
        self.worked = false;
        Next::Park(remaining)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn idle_worker_parks_until_timer() {
        let t = Instant::now();
        let mut s = Spinner::new(80 * US);
        assert_eq!(s.plan(t, false, None), Next::Park(None));
        assert_eq!(s.plan(t, false, Some(t + 5 * US)), Next::Park(Some(5 * US)));
        assert_eq!(s.plan(t, false, Some(t)), Next::Poll);
    }

    #[test]
    fn polling_budget_adapts_to_success() {
        let mut t = Instant::now();
        let mut s = Spinner::new(80 * US);
        assert_eq!(s.plan(t, true, None), Next::Poll);
        assert_eq!(s.plan(t, false, None), Next::Poll);
        t += 10 * US;
        assert_eq!(s.plan(t, false, None), Next::Park(None));
        assert_eq!(s.plan(t, false, None), Next::Park(None));
        for _ in 0..4 {
            assert_eq!(s.plan(t, true, None), Next::Poll);
            assert_eq!(s.plan(t, false, None), Next::Poll);
            t += US;
        }
        assert_eq!(s.plan(t, true, None), Next::Poll);
        assert_eq!(s.plan(t, false, None), Next::Poll);
        t += 79 * US;
        assert_eq!(s.plan(t, false, None), Next::Poll);
        t += US;
        assert_eq!(s.plan(t, false, None), Next::Park(None));
        s.plan(t, true, None);
        assert_eq!(s.plan(t, false, None), Next::Poll);
        t += 40 * US;
        assert_eq!(s.plan(t, false, None), Next::Park(None));
    }

    #[test]
    fn zero_budget_disables_polling() {
        let t = Instant::now();
        let mut s = Spinner::new(Duration::ZERO);
        assert_eq!(s.plan(t, true, None), Next::Poll);
        assert_eq!(s.plan(t, false, None), Next::Park(None));
    }
}
