//! Commands of a connection delayed by limits.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_config::MAX_WAIT;

use super::UnitIdx;
use crate::qos::{Cost, Limiter};

/// Number of commands of a connection that may always wait.
const MIN_WAITING: usize = 4;

/// Cost of a command, to be booked before it continues. The limits of the initiator are booked
/// first, then the limits of the unit.
#[derive(Clone, Debug)]
pub struct Toll {
    unit: UnitIdx,
    cost: Cost,
    /// Limits of the initiator and of the unit, indexed by [`Gate`].
    limiters: [Option<Arc<Limiter>>; 2],
    /// Epoch of each limiter when the command was booked.
    paid: [Option<u64>; 2],
}

/// The limits that a command is waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Initiator,
    Unit,
}

impl Toll {
    /// Creates the toll for a command to a unit.
    #[must_use]
    pub fn new(
        unit: UnitIdx,
        cost: Cost,
        initiator: Option<Arc<Limiter>>,
        of_unit: Arc<Limiter>,
    ) -> Self {
        Self {
            unit,
            cost,
            limiters: [initiator, Some(of_unit)],
            paid: [None; 2],
        }
    }

    /// Returns whether the command is a write.
    #[must_use]
    pub fn is_write(&self) -> bool {
        self.cost.is_write
    }

    /// Books the command, starting with the limits `from`. If it has to wait, returns the limits it
    /// is waiting for and the time when they allow it to start. The unit is not booked until the
    /// limits of the initiator allow the command to start. Otherwise the command would delay other
    /// initiators while waiting for its own limits.
    fn book(&mut self, from: Gate, now: Instant) -> Option<(Gate, Instant)> {
        let gates = [Gate::Initiator, Gate::Unit];
        for gate in &gates[from as usize..] {
            let at = *gate as usize;
            if let Some(limiter) = &self.limiters[at] {
                self.paid[at] = Some(limiter.epoch());
                let due = limiter.book(self.cost, now);
                if due > now {
                    return Some((*gate, due));
                }
            }
        }
        None
    }

    /// Cancels the booking with these limits.
    fn refund_at(&mut self, gate: Gate) {
        let at = gate as usize;
        if let (Some(limiter), Some(epoch)) = (&self.limiters[at], self.paid[at].take()) {
            limiter.refund(self.cost, epoch);
        }
    }

    /// Cancels all bookings of a command that is refused immediately.
    fn refund(&mut self) {
        self.refund_at(Gate::Initiator);
        self.refund_at(Gate::Unit);
    }

    /// Returns whether a booking is invalid, because these limits have changed.
    fn is_void(&self, gate: Gate) -> bool {
        match (&self.limiters[gate as usize], self.paid[gate as usize]) {
            (Some(limiter), Some(epoch)) => limiter.epoch() != epoch,
            _ => true,
        }
    }

    /// Switches to other limits of the initiator.
    fn follow(&mut self, initiator: Option<&Arc<Limiter>>) {
        let own = &mut self.limiters[Gate::Initiator as usize];
        let is_same = match (&own, initiator) {
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            (own, other) => own.is_none() && other.is_none(),
        };
        if !is_same {
            self.refund_at(Gate::Initiator);
            self.limiters[Gate::Initiator as usize] = initiator.cloned();
        }
    }

    fn line(&self) -> (UnitIdx, bool) {
        (self.unit, self.cost.is_write)
    }
}

/// Admission of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    /// Start immediately, because all limits are booked.
    Pass,
    /// Start when returned by [`Throttle::poll`].
    Wait,
    /// Refuse it with TASK SET FULL, because too many commands of the channel are waiting, or the
    /// delay would be too long.
    Full,
}

/// An admitted command.
#[derive(Debug)]
pub struct Passage {
    /// Set if it must wait. True for a write.
    pub limited: Option<bool>,
    /// Its bookings, if it may start immediately.
    paid: Option<Toll>,
}

/// Queue of reads or writes for a unit. The first command is booked.
#[derive(Clone, Copy, Debug)]
struct Line {
    of: (UnitIdx, bool),
    /// Time when the first command was booked.
    paid: Instant,
    /// Limits the first command is waiting for.
    gate: Gate,
    /// Time when these limits allow it to start.
    due: Instant,
}

#[derive(Debug)]
struct Waiting<I> {
    command: I,
    toll: Toll,
    since: Instant,
}

/// Commands of a channel that are waiting.
#[derive(Debug)]
pub struct Throttle<I> {
    most: usize,
    lines: Vec<Line>,
    /// In order of arrival.
    waiting: VecDeque<Waiting<I>>,
}

impl<I: Copy + PartialEq> Throttle<I> {
    /// Creates a throttle for a connection with up to `commands` concurrent commands. A quarter of
    /// them may wait, as well as the first command of each queue. The remaining commands are
    /// available for units without limits. An initiator may use only half of the commands it was
    /// granted (ib_srp: 64 by default).
    #[must_use]
    pub fn new(commands: usize) -> Self {
        Self {
            most: (commands / 4).max(MIN_WAITING),
            lines: Vec::new(),
            waiting: VecDeque::new(),
        }
    }

    /// Adds a command with an optional toll. Returns `None` if the command must be refused with
    /// TASK SET FULL.
    pub fn admit_command(
        &mut self,
        command: I,
        toll: Option<Toll>,
        now: Instant,
    ) -> Option<Passage> {
        let Some(mut toll) = toll else {
            return Some(Passage {
                limited: None,
                paid: None,
            });
        };
        match self.admit(command, &mut toll, now) {
            Admission::Pass => Some(Passage {
                limited: None,
                paid: Some(toll),
            }),
            Admission::Wait => Some(Passage {
                limited: Some(toll.is_write()),
                paid: None,
            }),
            Admission::Full => None,
        }
    }

    /// Refuses a command after it was added, and cancels all its bookings.
    pub fn refuse(&mut self, command: I, passage: Passage) {
        if let Some(mut paid) = passage.paid {
            paid.refund();
        }
        self.withdraw(command);
    }

    /// Admits or refuses a command with a toll. The first command of a queue is always admitted.
    fn admit(&mut self, command: I, toll: &mut Toll, now: Instant) -> Admission {
        match self.lines.iter().find(|line| line.of == toll.line()) {
            Some(line) => {
                if self.waiting.len() >= self.most || self.wait_behind(line, toll, now) > MAX_WAIT {
                    return Admission::Full;
                }
            }
            None => {
                // The first command of a queue is booked before it waits. Subsequent commands are
                // booked when they become the first. This ensures that commands that may still be
                // aborted don't use up the capacity for other initiators.
                let Some((gate, due)) = toll.book(Gate::Initiator, now) else {
                    return Admission::Pass;
                };
                self.lines.push(Line {
                    of: toll.line(),
                    paid: now,
                    gate,
                    due,
                });
            }
        }
        self.waiting.push_back(Waiting {
            command,
            toll: toll.clone(),
            since: now,
        });
        Admission::Wait
    }

    /// Returns the delay of a command in a queue, if no other queue was using the limits.
    fn wait_behind(&self, line: &Line, toll: &Toll, now: Instant) -> Duration {
        let (mut commands, mut bytes) = (0, 0u64);
        for ahead in self.waiting.iter().filter(|w| w.toll.line() == line.of) {
            commands += 1;
            bytes = bytes.saturating_add(ahead.toll.cost.bytes);
        }
        let of_all = Cost { bytes, ..toll.cost };
        let limiters = toll.limiters.iter().flatten();
        let spans = limiters.map(|limiter| limiter.span(commands, of_all));
        let first = line.due.saturating_duration_since(now);
        first.saturating_add(spans.max().unwrap_or_default())
    }

    /// Returns a command that may start now.
    pub fn poll(&mut self, now: Instant) -> Option<I> {
        while let Some(at) = self.lines.iter().position(|line| line.due <= now) {
            let line = self.lines[at];
            let first = self.first_of(line.of)?;
            let waiting = &mut self.waiting[first];
            if let Some(limiter) = &waiting.toll.limiters[line.gate as usize] {
                limiter.count(now.saturating_duration_since(waiting.since));
                // The delay due to the unit is counted separately.
                waiting.since = now;
            }
            if line.gate == Gate::Initiator
                && let Some((gate, due)) = waiting.toll.book(Gate::Unit, now)
            {
                self.lines[at] = Line {
                    paid: now,
                    gate,
                    due,
                    ..line
                };
                continue;
            }
            let gone = self.waiting.remove(first)?;
            self.next_of(at, now);
            return Some(gone.command);
        }
        None
    }

    /// Returns the time when [`Throttle::poll`] must be called.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.lines.iter().map(|line| line.due).min()
    }

    /// Returns whether there are no commands waiting for limits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns the commands that are waiting, in order of arrival.
    pub fn waiting(&self) -> impl Iterator<Item = I> {
        self.waiting.iter().map(|waiting| waiting.command)
    }

    /// Removes an aborted command if it is waiting, so that the next command is booked. This
    /// cancels the booking with the limits it is waiting for. If it has already passed the
    /// initiator's limits, these are not refunded, because an initiator could delay a unit at no
    /// cost otherwise.
    pub fn remove(&mut self, command: I) {
        self.remove_waiting(command, Toll::refund_at);
    }

    /// Refuses a command after it was admitted.
    fn withdraw(&mut self, command: I) {
        self.remove_waiting(command, |toll, _| toll.refund());
    }

    fn remove_waiting(&mut self, command: I, refund: impl FnOnce(&mut Toll, Gate)) {
        let mut all = self.waiting.iter();
        let Some(at) = all.position(|waiting| waiting.command == command) else {
            return;
        };
        let of = self.waiting[at].toll.line();
        let was_first = self.first_of(of) == Some(at);
        let Some(mut gone) = self.waiting.remove(at) else {
            return;
        };
        if was_first && let Some(line) = self.lines.iter().position(|line| line.of == of) {
            refund(&mut gone.toll, self.lines[line].gate);
            self.next_of(line, self.lines[line].paid);
        }
    }

    /// Applies changed limits. Commands booked with previous limits are booked again.
    pub fn rebook(&mut self, initiator: Option<&Arc<Limiter>>, now: Instant) {
        for waiting in &mut self.waiting {
            waiting.toll.follow(initiator);
        }
        for at in 0..self.lines.len() {
            let line = self.lines[at];
            if let Some(first) = self.first_of(line.of)
                && self.waiting[first].toll.is_void(line.gate)
            {
                self.pay(at, first, line.gate, now);
            }
        }
    }

    fn first_of(&self, of: (UnitIdx, bool)) -> Option<usize> {
        self.waiting.iter().position(|w| w.toll.line() == of)
    }

    /// Books the new first command of a queue.
    fn next_of(&mut self, at: usize, now: Instant) {
        match self.first_of(self.lines[at].of) {
            Some(first) => self.pay(at, first, Gate::Initiator, now),
            None => {
                self.lines.swap_remove(at);
            }
        }
    }

    /// Books the first command of a queue, starting with the limits `from`.
    fn pay(&mut self, at: usize, first: usize, from: Gate, now: Instant) {
        let booked = self.waiting[first].toll.book(from, now);
        let (gate, due) = booked.unwrap_or((Gate::Unit, now));
        self.lines[at] = Line {
            of: self.lines[at].of,
            paid: now,
            gate,
            due,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qos::IoLimits;

    fn limiter(iops: u64) -> Arc<Limiter> {
        Arc::new(Limiter::new(&IoLimits {
            iops: Some(iops),
            burst: Duration::ZERO,
            ..IoLimits::default()
        }))
    }

    fn toll(unit: u32, is_write: bool, [of_unit, own]: [Option<&Arc<Limiter>>; 2]) -> Toll {
        let cost = Cost {
            is_write,
            bytes: 512,
        };
        let of_unit = of_unit.cloned().unwrap_or_default();
        Toll::new(UnitIdx(unit), cost, own.cloned(), of_unit)
    }

    impl Throttle<u32> {
        fn passes(&mut self, command: u32, mut toll: Toll, now: Instant) -> bool {
            self.admit(command, &mut toll, now) == Admission::Pass
        }
    }

    #[test]
    fn commands_start_in_order_at_rate() {
        let (limiter, now) = (limiter(10), Instant::now());
        let mut throttle = Throttle::new(1000);
        let read = || toll(0, false, [Some(&limiter), None]);
        assert!(throttle.passes(0, read(), now));
        for n in 1..4 {
            assert!(!throttle.passes(n, read(), now));
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
        assert!(throttle.passes(4, read(), now + Duration::from_secs(1)));
    }

    #[test]
    fn units_and_directions_queue_separately() {
        let (slow, now) = (limiter(1), Instant::now());
        let mut throttle = Throttle::new(1000);
        let of = |unit, is_write| toll(unit, is_write, [(unit == 0).then_some(&slow), None]);
        assert!(throttle.passes(0, of(0, true), now));
        assert!(!throttle.passes(1, of(0, true), now));
        assert!(!throttle.passes(2, of(0, false), now));
        assert!(throttle.passes(3, of(1, true), now));
        assert_eq!(throttle.poll(now + Duration::from_secs(1)), Some(1));
        assert_eq!(throttle.poll(now + Duration::from_secs(2)), Some(2));
    }

    #[test]
    fn channels_alternate_at_any_queue_depth() {
        let (limiter, now) = (limiter(100), Instant::now());
        let (mut deep, mut shallow) = (Throttle::new(1000), Throttle::new(1000));
        let read = || toll(0, false, [Some(&limiter), None]);
        for n in 0..100 {
            deep.passes(n, read(), now);
        }
        assert!(!shallow.passes(0, read(), now));
        // Only a single command of the deep queue is ahead.
        assert_eq!(shallow.deadline(), Some(now + Duration::from_millis(20)));
    }

    #[test]
    fn removed_command_is_refunded() {
        let (limiter, now) = (limiter(10), Instant::now());
        let mut throttle = Throttle::new(1000);
        let read = || toll(0, false, [Some(&limiter), None]);
        assert!(throttle.passes(0, read(), now));
        for n in 1..4 {
            throttle.passes(n, read(), now);
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
    fn waiting_commands_follow_changed_limits() {
        let (unit, own, now) = (limiter(1), limiter(1), Instant::now());
        let mut throttle = Throttle::new(1000);
        let read = || toll(0, false, [Some(&unit), Some(&own)]);
        for n in 0..4 {
            assert_eq!(throttle.passes(n, read(), now), n == 0);
        }
        unit.set(&IoLimits {
            iops: Some(10),
            burst: Duration::ZERO,
            ..IoLimits::default()
        });
        // Still waiting for the initiator's limits.
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

    /// A command waiting for the initiator's own limits does not use any capacity of a shared unit,
    /// even if this is repeated.
    #[test]
    fn initiator_limit_does_not_delay_other_initiators() {
        let (unit, own, now) = (limiter(10), limiter(1), Instant::now());
        let (mut slow, mut quick) = (Throttle::new(1000), Throttle::new(1000));
        let tenth = Duration::from_millis(100);
        let limited = || toll(0, false, [Some(&unit), Some(&own)]);
        let free = || toll(0, false, [Some(&unit), None]);
        assert!(slow.passes(0, limited(), now));
        for n in 1..4 {
            assert!(!slow.passes(n, limited(), now));
            slow.remove(n);
        }
        assert!(!slow.passes(4, limited(), now));
        assert!(!quick.passes(0, free(), now));
        assert_eq!(quick.deadline(), Some(now + tenth));
        // After passing the initiator's limits, a command waits for the unit.
        let second = now + Duration::from_secs(1);
        assert_eq!(quick.poll(now + tenth), Some(0));
        assert!(quick.passes(1, free(), second));
        assert_eq!(slow.poll(second), None);
        assert_eq!(slow.deadline(), Some(second + tenth));
        // If it's aborted at this point, the initiator's capacity isn't refunded.
        slow.remove(4);
        assert!(quick.passes(2, free(), second + tenth));
        assert!(!slow.passes(5, limited(), second + tenth));
        assert_eq!(slow.deadline(), Some(second + Duration::from_secs(1)));
        let waits = [&own, &unit].map(|limiter| limiter.waits().commands);
        assert_eq!(waits, [1, 1]);
    }

    #[test]
    fn refused_command_costs_nothing() {
        let (unit, own, now) = (limiter(1), limiter(10), Instant::now());
        let mut throttle = Throttle::new(1000);
        let read = || toll(0, false, [Some(&unit), Some(&own)]);
        assert!(throttle.passes(0, read(), now));
        let later = now + Duration::from_millis(100);
        assert!(!throttle.passes(1, read(), later));
        throttle.withdraw(1);
        assert!(!throttle.passes(2, read(), later));
        assert_eq!(throttle.deadline(), Some(now + Duration::from_secs(1)));
        let mut passed = read();
        let second = now + Duration::from_secs(2);
        assert_eq!(throttle.poll(second), Some(2));
        let last = second + Duration::from_secs(1);
        assert_eq!(throttle.admit(3, &mut passed, last), Admission::Pass);
        passed.refund();
        assert!(throttle.passes(4, read(), last));
    }

    #[test]
    fn quarter_of_commands_and_queue_heads_wait() {
        let (unit, now) = (limiter(100), Instant::now());
        let mut throttle = Throttle::new(16);
        let of = |n, is_write| toll(n, is_write, [Some(&unit), None]);
        assert!(throttle.passes(0, of(0, false), now));
        for n in 1..5 {
            assert!(!throttle.passes(n, of(0, false), now));
        }
        assert_eq!(throttle.admit(5, &mut of(0, false), now), Admission::Full);
        assert_eq!(throttle.admit(6, &mut of(0, true), now), Admission::Wait);
        assert_eq!(throttle.admit(7, &mut of(1, true), now), Admission::Wait);
        assert_eq!(throttle.admit(8, &mut of(1, true), now), Admission::Full);
        for _ in 0..4 {
            throttle.poll(now + Duration::from_secs(1));
        }
        assert_eq!(throttle.admit(9, &mut of(0, false), now), Admission::Wait);
    }

    #[test]
    fn command_with_long_delay_is_refused() {
        let (unit, now) = (limiter(1), Instant::now());
        let mut throttle = Throttle::new(1000);
        let read = || toll(0, false, [Some(&unit), None]);
        assert!(throttle.passes(0, read(), now));
        for n in 1..11 {
            assert_eq!(throttle.admit(n, &mut read(), now), Admission::Wait, "{n}");
        }
        assert_eq!(throttle.admit(11, &mut read(), now), Admission::Full);
        let other = toll(0, true, [Some(&unit), None]);
        assert!(!throttle.passes(12, other, now), "the first of its line");
        assert_eq!(throttle.waiting().count(), 11);
        assert_eq!(throttle.poll(now + MAX_WAIT), Some(1));
    }

    /// Debt forgiven by changed limits is not refunded as well.
    #[test]
    fn changed_limit_grants_no_free_command() {
        let (unit, now) = (limiter(1), Instant::now());
        let mut throttles = [Throttle::new(1000), Throttle::new(1000)];
        let read = || toll(0, false, [Some(&unit), None]);
        assert!(throttles[0].passes(0, read(), now));
        for throttle in &mut throttles {
            assert!(!throttle.passes(1, read(), now));
        }
        unit.set(&IoLimits {
            iops: Some(10),
            burst: Duration::ZERO,
            ..IoLimits::default()
        });
        for throttle in &mut throttles {
            throttle.rebook(None, now);
            // Applying the limits again has no effect.
            throttle.rebook(None, now);
        }
        assert_eq!(throttles[0].poll(now), Some(1));
        let tenth = now + Duration::from_millis(100);
        assert_eq!(throttles[1].deadline(), Some(tenth));
    }
}
