//! Pacing of READ responses, for requesters that don't limit their READs to the path capacity.
//!
//! A responder doesn't know the window of its requester. Our own requester only requests as much
//! data as the path can handle, but other adapters can request megabytes and rely on congestion
//! notifications to slow down the responder. We therefore use pacing if more than [`BURST`]
//! response packets are pending. The first notification sets the gap between two responses to the
//! recently measured value. This is increased by 1/8 for each additional notification, at most once
//! per [`PERIOD`]. Without notifications, the gap is reduced by 1/8 per period, and pacing stops
//! when it is less than [`SHORTEST`]. Since it takes 57 periods to get there from [`LONGEST`],
//! pacing always stops in a limited time, and a connection can't be stopped by any number of
//! notifications.

use std::time::{Duration, Instant};

/// Minimum interval between changes of the gap.
const PERIOD: Duration = Duration::from_millis(1);
/// Maximum gap between two responses.
const LONGEST: Duration = Duration::from_millis(2);
/// Minimum gap between two responses.
const SHORTEST: Duration = Duration::from_micros(1);
/// Number of responses that can be sent as a burst, after a pause or if no more are pending.
pub(super) const BURST: u32 = 16;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pacer {
    /// Current gap between two responses, if pacing is active.
    gap: Option<Duration>,
    /// Time at which the next response should be sent.
    next: Option<Instant>,
    /// Time of the last change to the gap.
    changed: Option<Instant>,
    /// Start of the current measurement, about one period ago.
    since: Option<Instant>,
    count: u32,
}

impl Pacer {
    /// Returns true if pacing is active.
    pub(super) fn is_active(&self) -> bool {
        self.gap.is_some()
    }

    /// Returns the time at which the next response can be sent, or `None` if it can be sent now.
    pub(super) fn wait(&mut self, now: Instant) -> Option<Instant> {
        self.gap?;
        // Reduce the gap based on the time since the last change.
        self.quicken(now);
        let (gap, next) = (self.gap?, self.next?);
        // Allow a burst after a pause.
        let at = next.checked_sub(gap * BURST).unwrap_or(next);
        (at > now).then_some(at)
    }

    /// Updates the state when a response is sent.
    pub(super) fn on_response(&mut self, now: Instant) {
        // We need to count even if pacing is not active, because the current rate is used for the
        // first notification.
        if self.since.is_none_or(|since| now > since + PERIOD) {
            self.since = Some(now);
            self.count = 0;
        }
        self.count += 1;
        if let Some(gap) = self.gap {
            let next = self.next.map_or(now, |next| next.max(now)) + gap;
            // Responses that are sent without waiting can use up at most one burst of the following
            // time.
            self.next = Some(next.min(now + gap * (BURST + 1)));
        }
    }

    /// Handles a congestion notification.
    pub(super) fn on_cnp(&mut self, now: Instant) {
        self.quicken(now);
        // Multiple notifications within a period are for the same queue, as the last change had no
        // effect yet.
        if self.changed.is_some_and(|at| now < at + PERIOD) {
            return;
        }
        // If no responses were sent, we don't need to slow down.
        let Some(gap) = self.gap.or_else(|| self.measured(now)) else {
            return;
        };
        self.gap = Some((gap + gap / 8).clamp(SHORTEST, LONGEST));
        self.changed = Some(now);
    }

    /// Returns the recent average gap, or `None` if there were too few responses.
    fn measured(&self, now: Instant) -> Option<Duration> {
        let taken = now.saturating_duration_since(self.since?);
        // Ignore measurements older than two periods, because the rate may have changed before the
        // packet was marked.
        (self.count > 1 && taken < PERIOD * 2).then(|| taken / self.count)
    }

    /// Reduces the gap by 1/8 for each period since the last change.
    fn quicken(&mut self, now: Instant) {
        while let (Some(gap), Some(at)) = (self.gap, self.changed)
            && now >= at + PERIOD * 2
        {
            let shorter = gap - gap / 8;
            self.gap = (shorter >= SHORTEST).then_some(shorter);
            self.changed = Some(at + PERIOD);
            if self.gap.is_none() {
                // This must also be reset, as otherwise the first response would be delayed when
                // pacing is activated again.
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
    fn unpaced_responses_do_not_delay_later_responses() {
        let start = Instant::now();
        let at = |micros| start + Duration::from_micros(micros);
        let mut pacer = Pacer::default();
        (0..10).for_each(|n| pacer.on_response(at(n * 10)));
        pacer.on_cnp(at(100));
        let gap = pacer.gap.unwrap();
        assert!((10..13).contains(&gap.as_micros()), "{gap:?}");
        // Small READs whose responses are sent at ten times the pace.
        (100..1100).for_each(|n| pacer.on_response(at(n)));
        let wait = pacer.wait(at(1100)).unwrap() - at(1100);
        assert!(wait <= gap, "{wait:?}");
    }
}
