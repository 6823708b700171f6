//! Completion queues that should notify their user, and their notification state.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::verbs::CqId;

/// How often to check the descriptors while there are completions. This limits the delay for
/// connection events, and for events of armed queues.
const LOOK_INTERVAL: Duration = Duration::from_micros(50);

/// Notification state of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arming {
    /// The application has not requested another notification.
    Idle,
    /// We poll for completions in each round.
    Watched,
    /// The device will generate an event for the next completion.
    Armed,
    /// The device will generate an event for the next solicited completion.
    Solicited,
}

/// Notification state for all queues of a device.
pub(super) struct Notices {
    /// Watched queues. The first entry has been empty for the longest time.
    pub(super) watched: VecDeque<CqId>,
    /// Queues with a completion that has not been reported to the application.
    pub(super) fired: VecDeque<CqId>,
    /// Set if the application has received completions since the last round.
    is_busy: bool,
    /// When to check the descriptors even if there is other work.
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

    /// Returns the next queue with an unreported completion.
    pub(super) fn take_fired(&mut self) -> Option<CqId> {
        self.fired.pop_front()
    }

    pub(super) fn has_fired(&self) -> bool {
        !self.fired.is_empty()
    }

    /// Removes a queue that is being destroyed.
    pub(super) fn forget(&mut self, cq: CqId) {
        self.watched.retain(|id| *id != cq);
        self.fired.retain(|id| *id != cq);
    }

    /// Called when the application has received completions.
    pub(super) fn note_completions(&mut self) {
        self.is_busy = true;
    }

    /// Returns whether we should check the descriptors in this round, which requires a system call.
    /// This is the case if there is no other work (including `has_fired`), or if the last check was
    /// too long ago.
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
    fn descriptors_are_checked_when_idle() {
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
