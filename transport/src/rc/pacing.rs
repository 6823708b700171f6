//! The pace of READ responses, for a requester that does not fit what it asks for to the path.
//!
//! A responder does not know its requester's window. Riser's requester asks only for what the path
//! takes; an adapter may ask for megabytes and leave it to notifications to slow the answer down.
//! So, while more than [`BURST`] responses are asked for, they are paced: a notification sets the
//! time from one response to the next: what it has been of late, and an eighth longer for each
//! further one, once in a [`PERIOD`]. Without notifications it becomes shorter by an eighth in each
//! period, and there is none once it is shorter than [`SHORTEST`]. Between [`LONGEST`] and that are
//! 57 periods, so this ends by itself, and no number of notifications stops a connection.

use std::time::{Duration, Instant};

/// Interval between changes of the gap.
const PERIOD: Duration = Duration::from_millis(1);
/// Longest gap between two responses.
const LONGEST: Duration = Duration::from_millis(2);
/// The shortest gap that is kept.
const SHORTEST: Duration = Duration::from_micros(1);
/// Responses that may leave together, after a pause or because no others are asked for.
pub(super) const BURST: u32 = 16;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pacer {
    /// The time from one response to the next, while there is a pace.
    gap: Option<Duration>,
    /// Time at which the next response is due at that pace.
    next: Option<Instant>,
    /// Time of the last change of the gap.
    changed: Option<Instant>,
    /// Responses since this time, of the last period or so.
    since: Option<Instant>,
    count: u32,
}

impl Pacer {
    /// Whether there is a pace.
    pub(super) fn is_active(&self) -> bool {
        self.gap.is_some()
    }

    /// Time at which the next response may leave; `None` is now.
    pub(super) fn wait(&mut self, now: Instant) -> Option<Instant> {
        self.gap?;
        // A gap that was set long ago has become shorter since, or has ended.
        self.quicken(now);
        let (gap, next) = (self.gap?, self.next?);
        // A pause is made up for by a burst.
        let at = next.checked_sub(gap * BURST).unwrap_or(next);
        (at > now).then_some(at)
    }

    /// Counts a response that leaves.
    pub(super) fn on_response(&mut self, now: Instant) {
        // Counted also without a pace, as the first notification needs the rate that there was.
        if self.since.is_none_or(|since| now > since + PERIOD) {
            self.since = Some(now);
            self.count = 0;
        }
        self.count += 1;
        if let Some(gap) = self.gap {
            let next = self.next.map_or(now, |next| next.max(now)) + gap;
            // Responses that need not wait borrow no more than a burst from later ones.
            self.next = Some(next.min(now + gap * (BURST + 1)));
        }
    }

    /// A notification has come.
    pub(super) fn on_cnp(&mut self, now: Instant) {
        self.quicken(now);
        // Several notifications within a period are about the same queue: a change has not had
        // time to show.
        if self.changed.is_some_and(|at| now < at + PERIOD) {
            return;
        }
        // Before responses were sent there is nothing to slow down.
        let Some(gap) = self.gap.or_else(|| self.measured(now)) else {
            return;
        };
        self.gap = Some((gap + gap / 8).clamp(SHORTEST, LONGEST));
        self.changed = Some(now);
    }

    /// The mean gap of late; `None` where hardly a response was sent.
    fn measured(&self, now: Instant) -> Option<Duration> {
        let taken = now.saturating_duration_since(self.since?);
        // Two periods at most: an old count says nothing about the rate that a router marked.
        (self.count > 1 && taken < PERIOD * 2).then(|| taken / self.count)
    }

    /// Takes back an eighth of the gap for each period that has passed.
    fn quicken(&mut self, now: Instant) {
        while let (Some(gap), Some(at)) = (self.gap, self.changed)
            && now >= at + PERIOD * 2
        {
            let shorter = gap - gap / 8;
            self.gap = (shorter >= SHORTEST).then_some(shorter);
            self.changed = Some(at + PERIOD);
            if self.gap.is_none() {
                // Forgotten as well, or the first response of a later pace would be due at a time
                // of this one.
                self.next = None;
                self.changed = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_that_need_not_wait_make_no_later_one_wait_longer() {
        let start = Instant::now();
        let at = |micros| start + Duration::from_micros(micros);
        let mut pacer = Pacer::default();
        (0..10).for_each(|n| pacer.on_response(at(n * 10)));
        pacer.on_cnp(at(100));
        let gap = pacer.gap.unwrap();
        assert!((10..13).contains(&gap.as_micros()), "{gap:?}");
        // Small READs, whose responses leave at ten times the pace.
        (100..1100).for_each(|n| pacer.on_response(at(n)));
        let wait = pacer.wait(at(1100)).unwrap() - at(1100);
        assert!(wait <= gap, "{wait:?}");
    }
}
