//! The timers of one channel.
//!
//! A timer that is set cannot be taken back: it lies in the worker's heap until its time. So a channel
//! sets another one only if that is earlier than all of them, and what fires and is not known here is passed
//! over. A channel whose deadline comes and goes, however often, has few timers.

use std::time::Instant;

use arrayvec::ArrayVec;

/// Times for which timers of a channel are set, each earlier than the one before.
#[derive(Debug, Default)]
pub(super) struct Armed(ArrayVec<Instant, 4>);

impl Armed {
    /// A channel wants to be called at a time: whether a timer is to be set for that.
    pub(super) fn set(&mut self, at: Instant) -> bool {
        if self.0.last().is_some_and(|earliest| *earliest <= at) {
            return false;
        }
        if self.0.is_full() {
            // It is passed over when it fires.
            self.0.pop();
        }
        self.0.push(at);
        true
    }

    /// A timer that was set for a time has fired: whether it counts.
    pub(super) fn fire(&mut self, at: Instant) -> bool {
        let known = self.0.iter().position(|set| *set == at);
        known.map(|place| self.0.remove(place)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;
    use std::time::Duration;

    use super::*;

    /// A command at a time waits a millisecond for its limit, and a ping is due 15 seconds after each.
    #[test]
    fn a_deadline_that_comes_and_goes_leaves_no_timers_behind() {
        let (mut armed, mut heap) = (Armed::default(), BinaryHeap::new());
        let mut now = Instant::now();
        let (wait, ping) = (Duration::from_millis(1), Duration::from_secs(15));
        let mut fired = 0;
        for _ in 0..100_000 {
            let due = now + wait;
            let mut is_due = false;
            for at in [now + ping, due] {
                if armed.set(at) {
                    heap.push(Reverse(at));
                }
            }
            while !is_due {
                let Reverse(at) = heap.pop().expect("a timer for every deadline");
                assert!(at <= due, "it comes in time");
                now = now.max(at);
                if !armed.fire(at) {
                    continue;
                }
                fired += 1;
                is_due = at == due;
                let next = if is_due { now + ping } else { due };
                if armed.set(next) {
                    heap.push(Reverse(next));
                }
            }
            assert!(heap.len() <= 8, "{} timers", heap.len());
        }
        assert!(fired < 110_000, "{fired}");
    }

    #[test]
    fn the_earliest_is_set_even_where_there_are_many() {
        let mut armed = Armed::default();
        let now = Instant::now();
        let at = |n: u64| now + Duration::from_secs(10 - n);
        for n in 0..9 {
            assert!(armed.set(at(n)));
            assert!(!armed.set(at(n)));
        }
        assert!(armed.fire(at(8)));
        assert!(!armed.fire(at(7)), "it has given its place away");
        assert!(armed.fire(at(2)) && armed.set(at(2)));
    }
}
