//! [`Spinner`]: whether a worker with nothing to do looks again or sleeps.
//!
//! Sleeping costs two context switches when work comes a microsecond later; polling costs a core
//! when none comes. The policy polls only after work, for a span that grows while polling finds
//! work and shrinks while it does not, so a loaded worker polls, and an idle one sleeps and costs
//! nothing.

use std::time::{Duration, Instant};

/// The step after a round of the worker's loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Go round again at once.
    Poll,
    /// Park, for at most this long where a deadline is given.
    Park(Option<Duration>),
}

/// The policy's memory: one per worker.
#[derive(Debug, Clone)]
pub struct Spinner {
    max: Duration,
    budget: Duration,
    /// Time since which polling has found nothing.
    since: Option<Instant>,
    /// Anything was found since the last park; a wake without work does not earn polling.
    worked: bool,
}

/// The share of the longest span with which polling starts and to which it shrinks.
const FLOOR: u32 = 8;

impl Spinner {
    /// A policy that polls for at most `max` after the last work; zero never polls.
    #[must_use]
    pub fn new(max: Duration) -> Self {
        Self {
            max,
            budget: max / FLOOR,
            since: None,
            worked: false,
        }
    }

    /// Decides after a round at `now` that did some work or none. `deadline` is when the worker's
    /// next timer fires.
    pub fn plan(&mut self, now: Instant, worked: bool, deadline: Option<Instant>) -> Next {
        if worked {
            if self.since.take().is_some() {
                // Polling found it: a longer span would have found more.
                self.budget = (self.budget * 2).min(self.max);
            }
            self.worked = true;
            return Next::Poll;
        }
        let remaining = deadline.map(|d| d.saturating_duration_since(now));
        // A timer that is due is work: parking would only come back at once.
        if remaining.is_some_and(|r| r.is_zero()) {
            return Next::Poll;
        }
        // After a wake without work the worker sleeps again at once.
        if self.worked {
            let since = *self.since.get_or_insert(now);
            if now.saturating_duration_since(since) < self.budget {
                return Next::Poll;
            }
            // Polling found nothing for a whole span, so the next one is shorter. It never goes
            // below the floor, from which one success doubles it.
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
    fn an_idle_worker_parks_at_once_and_until_its_timer() {
        let t = Instant::now();
        let mut s = Spinner::new(80 * US);
        assert_eq!(s.plan(t, false, None), Next::Park(None));
        assert_eq!(s.plan(t, false, Some(t + 5 * US)), Next::Park(Some(5 * US)));
        assert_eq!(s.plan(t, false, Some(t)), Next::Poll);
    }

    #[test]
    fn polling_grows_while_it_pays_and_shrinks_while_it_does_not() {
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
    fn no_budget_means_no_polling() {
        let t = Instant::now();
        let mut s = Spinner::new(Duration::ZERO);
        assert_eq!(s.plan(t, true, None), Next::Poll);
        assert_eq!(s.plan(t, false, None), Next::Park(None));
    }
}
