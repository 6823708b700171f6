//! Which completion queues are to notify their user, and how far each has come.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::verbs::CqId;

/// Interval between two looks at the descriptors while completions keep coming: events of
/// connections, and of queues that are armed, wait for no longer.
const LOOK_INTERVAL: Duration = Duration::from_micros(50);

/// State of a queue's notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arming {
    /// The user has not asked for one since the last.
    Idle,
    /// Rounds look for a completion.
    Watched,
    /// The device raises an event for the next completion.
    Armed,
    /// The device raises an event for the next solicited completion.
    Solicited,
}

/// Notifications of all queues of a device.
pub(super) struct Notices {
    /// Queues that are watched, the longest without a completion first.
    pub(super) watched: VecDeque<CqId>,
    /// Queues that have a completion which the user has not been notified of.
    pub(super) fired: VecDeque<CqId>,
    /// The user has taken completions since the last round.
    is_busy: bool,
    /// Next time at which the descriptors are looked at in any case.
    look_due: Instant,
}

impl Notices {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            watched: VecDeque::new(),
            fired: VecDeque::new(),
            is_busy: false,
            look_due: now,
        }
    }

    /// The next queue that has fired.
    pub(super) fn take_fired(&mut self) -> Option<CqId> {
        self.fired.pop_front()
    }

    pub(super) fn has_fired(&self) -> bool {
        !self.fired.is_empty()
    }

    /// Forgets a queue that is destroyed.
    pub(super) fn forget(&mut self, cq: CqId) {
        self.watched.retain(|id| *id != cq);
        self.fired.retain(|id| *id != cq);
    }

    /// The user has taken completions.
    pub(super) fn note_completions(&mut self) {
        self.is_busy = true;
    }

    /// Whether a round at `now` looks at the descriptors, which is a system call: it does where it
    /// has no work, `has_fired` included, and where it has had work for long.
    pub(super) fn must_look(&mut self, now: Instant, has_fired: bool) -> bool {
        let is_busy = std::mem::take(&mut self.is_busy) || has_fired;
        if is_busy && now < self.look_due {
            return false;
        }
        self.look_due = now + LOOK_INTERVAL;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_descriptors_are_looked_at_when_idle_and_under_load_at_times() {
        let mut notices = Notices::new(Instant::now());
        let begin = Instant::now() + LOOK_INTERVAL;
        assert!(notices.must_look(begin, false), "an idle round");
        assert!(notices.must_look(begin, false), "and the next");
        assert!(!notices.must_look(begin, true));
        notices.note_completions();
        assert!(
            !notices.must_look(begin, false),
            "the round before was busy"
        );
        assert!(notices.must_look(begin, false), "this one is not");
        let later = begin + LOOK_INTERVAL;
        assert!(
            notices.must_look(later, true),
            "others have waited for long"
        );
        assert!(!notices.must_look(later, true));
    }
}
