//! The commands of one channel that wait for limits.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::{Cost, Limiter};
use crate::srp::UnitIdx;

/// What a command has to pay before it goes on.
#[derive(Clone, Debug)]
pub struct Toll {
    /// The unit that it is for.
    pub unit: UnitIdx,
    /// What it takes.
    pub cost: Cost,
    /// The limits of the unit and of the initiator.
    pub limiters: [Option<Arc<Limiter>>; 2],
}

impl Toll {
    /// Pays: when the command may go, and which of the limiters it is that it waits for.
    fn book(&self, now: Instant) -> (Instant, usize) {
        let mut last = (now, 0);
        for (at, limiter) in self.limiters.iter().enumerate() {
            if let Some(limiter) = limiter {
                let due = limiter.book(self.cost, now);
                if due > last.0 {
                    last = (due, at);
                }
            }
        }
        last
    }

    fn refund(&self) {
        for limiter in self.limiters.iter().flatten() {
            limiter.refund(self.cost);
        }
    }

    fn line(&self) -> (UnitIdx, bool) {
        (self.unit, self.cost.is_write)
    }
}

/// Commands for one unit that either read or write. The first of them has paid.
#[derive(Clone, Copy, Debug)]
struct Line {
    of: (UnitIdx, bool),
    /// When that was.
    paid: Instant,
    /// When the first of them may go.
    due: Instant,
    /// Which of its limiters it waits for.
    waits_for: usize,
}

#[derive(Debug)]
struct Waiting<I> {
    command: I,
    toll: Toll,
    since: Instant,
}

/// Commands of one channel that wait; bounded by the channel's contexts.
#[derive(Debug)]
pub struct Throttle<I> {
    lines: Vec<Line>,
    /// In the order of arrival.
    waiting: VecDeque<Waiting<I>>,
}

impl<I> Default for Throttle<I> {
    fn default() -> Self {
        Self {
            lines: Vec::new(),
            waiting: VecDeque::new(),
        }
    }
}

impl<I: Copy + PartialEq> Throttle<I> {
    /// A command that has to pay: whether it may go at once. Otherwise it waits, until
    /// [`Throttle::poll`] names it.
    pub fn admit(&mut self, command: I, toll: Toll, now: Instant) -> bool {
        if !self.lines.iter().any(|line| line.of == toll.line()) {
            let (due, waits_for) = toll.book(now);
            if due <= now {
                return true;
            }
            self.lines.push(Line {
                of: toll.line(),
                paid: now,
                due,
                waits_for,
            });
        }
        self.waiting.push_back(Waiting {
            command,
            toll,
            since: now,
        });
        false
    }

    /// A command that may go now.
    pub fn poll(&mut self, now: Instant) -> Option<I> {
        let at = self.lines.iter().position(|line| line.due <= now)?;
        let line = self.lines[at];
        let first = self.first_of(line.of)?;
        let gone = self.waiting.remove(first)?;
        if let Some(limiter) = &gone.toll.limiters[line.waits_for] {
            limiter.count(now.saturating_duration_since(gone.since));
        }
        self.next_of(at, now);
        Some(gone.command)
    }

    /// When [`Throttle::poll`] wants to be called.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.lines.iter().map(|line| line.due).min()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// A command waits no longer, if it does: it has been ended. The next one has its turn.
    pub fn remove(&mut self, command: I) {
        let mut all = self.waiting.iter();
        let Some(at) = all.position(|waiting| waiting.command == command) else {
            return;
        };
        let of = self.waiting[at].toll.line();
        let was_first = self.first_of(of) == Some(at);
        let Some(gone) = self.waiting.remove(at) else {
            return;
        };
        if was_first {
            gone.toll.refund();
            if let Some(line) = self.lines.iter().position(|line| line.of == of) {
                self.next_of(line, self.lines[line].paid);
            }
        }
    }

    /// Limits may have changed, and the initiator has these: what waits books once more.
    pub fn rebook(&mut self, initiator: Option<&Arc<Limiter>>, now: Instant) {
        for at in 0..self.lines.len() {
            if let Some(first) = self.first_of(self.lines[at].of) {
                self.waiting[first].toll.refund();
            }
        }
        for waiting in &mut self.waiting {
            waiting.toll.limiters[1] = initiator.cloned();
        }
        for at in (0..self.lines.len()).rev() {
            self.next_of(at, now);
        }
    }

    fn first_of(&self, of: (UnitIdx, bool)) -> Option<usize> {
        self.waiting.iter().position(|w| w.toll.line() == of)
    }

    /// The next one of a line is the first now.
    fn next_of(&mut self, at: usize, now: Instant) {
        match self.first_of(self.lines[at].of) {
            Some(first) => {
                let (due, waits_for) = self.waiting[first].toll.book(now);
                self.lines[at].paid = now;
                self.lines[at].due = due;
                self.lines[at].waits_for = waits_for;
            }
            None => {
                self.lines.swap_remove(at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::IoLimits;
    use super::*;

    fn limiter(iops: u64) -> Arc<Limiter> {
        Arc::new(Limiter::new(&IoLimits {
            iops: Some(iops),
            burst: Duration::ZERO,
            ..IoLimits::default()
        }))
    }

    fn toll(unit: u32, is_write: bool, limiters: [Option<&Arc<Limiter>>; 2]) -> Toll {
        Toll {
            unit: UnitIdx(unit),
            cost: Cost {
                is_write,
                bytes: 512,
            },
            limiters: limiters.map(Option::<&Arc<_>>::cloned),
        }
    }

    #[test]
    fn commands_go_in_their_order_at_the_rate() {
        let (limiter, now) = (limiter(10), Instant::now());
        let mut throttle = Throttle::default();
        let read = || toll(0, false, [Some(&limiter), None]);
        assert!(throttle.admit(0, read(), now));
        for n in 1..4 {
            assert!(!throttle.admit(n, read(), now));
        }
        for n in 1..4 {
            let due = now + n * Duration::from_millis(100);
            assert_eq!(throttle.deadline(), Some(due));
            assert_eq!(throttle.poll(due - Duration::from_nanos(1)), None);
            assert_eq!(throttle.poll(due), Some(n));
        }
        assert_eq!((throttle.deadline(), throttle.is_empty()), (None, true));
        let waits = limiter.waits();
        assert_eq!((waits.commands, waits.time.as_millis()), (3, 600));
        assert!(throttle.admit(4, read(), now + Duration::from_secs(1)));
    }

    #[test]
    fn units_and_directions_wait_apart() {
        let (slow, now) = (limiter(1), Instant::now());
        let mut throttle = Throttle::default();
        let of = |unit, is_write| toll(unit, is_write, [(unit == 0).then_some(&slow), None]);
        assert!(throttle.admit(0, of(0, true), now));
        assert!(!throttle.admit(1, of(0, true), now));
        assert!(!throttle.admit(2, of(0, false), now));
        assert!(throttle.admit(3, of(1, true), now));
        assert_eq!(throttle.poll(now + Duration::from_secs(1)), Some(1));
        assert_eq!(throttle.poll(now + Duration::from_secs(2)), Some(2));
    }

    #[test]
    fn channels_take_turns_however_deep_they_queue() {
        let (limiter, now) = (limiter(100), Instant::now());
        let (mut deep, mut shallow) = (Throttle::default(), Throttle::default());
        let read = || toll(0, false, [Some(&limiter), None]);
        for n in 0..100 {
            deep.admit(n, read(), now);
        }
        assert!(!shallow.admit(0, read(), now));
        // One of the deep queue's is ahead, not all of them.
        assert_eq!(shallow.deadline(), Some(now + Duration::from_millis(20)));
    }

    #[test]
    fn an_ended_command_goes_and_gives_back_what_it_has_paid() {
        let (limiter, now) = (limiter(10), Instant::now());
        let mut throttle = Throttle::default();
        let read = || toll(0, false, [Some(&limiter), None]);
        assert!(throttle.admit(0, read(), now));
        for n in 1..4 {
            throttle.admit(n, read(), now);
        }
        throttle.remove(2);
        throttle.remove(1);
        throttle.remove(9);
        let due = now + Duration::from_millis(100);
        assert_eq!(throttle.deadline(), Some(due));
        assert_eq!(throttle.poll(due), Some(3));
        assert!(throttle.is_empty() && throttle.deadline().is_none());
    }

    #[test]
    fn what_waits_goes_by_limits_as_they_become() {
        let (unit, own, now) = (limiter(1), limiter(1), Instant::now());
        let mut throttle = Throttle::default();
        let read = || toll(0, false, [Some(&unit), Some(&own)]);
        for n in 0..4 {
            assert_eq!(throttle.admit(n, read(), now), n == 0);
        }
        unit.set(&IoLimits {
            iops: Some(10),
            burst: Duration::ZERO,
            ..IoLimits::default()
        });
        // Still the initiator's.
        throttle.rebook(Some(&own), now);
        assert_eq!(throttle.deadline(), Some(now + Duration::from_secs(1)));
        throttle.rebook(None, now);
        assert_eq!(throttle.poll(now), Some(1));
        assert_eq!(throttle.poll(now), None);
        unit.set(&IoLimits::default());
        throttle.rebook(None, now);
        assert_eq!([throttle.poll(now), throttle.poll(now)], [Some(2), Some(3)]);
        assert!(throttle.is_empty());
    }
}
