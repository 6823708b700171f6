//! The time that a command may wait for its initiator on a connection that moves data.
//!
//! Data of a command wait behind those of others on the same connection, and a deep queue of long
//! commands takes minutes on a slow link although it moves data all the time. So the time that a
//! command waits counts only as far as the data that its connection moved meanwhile do not explain
//! it, at [`SLOWEST`]. A connection that is faster is never too slow. One that moves little, to
//! keep its place, gains nothing by it. A piece of data waits at most behind one piece of every
//! other command, so at most that many bytes explain the wait for one piece: an initiator cannot
//! keep a command waiting for ever by moving the data of others.

use std::time::{Duration, Instant};

use crate::pool::MAX_BLOCK;

/// Rate of the slowest connection whose commands may wait for one another as long as they must, in
/// bytes a second.
pub const SLOWEST: u64 = 4 << 20;

/// The same rate while other initiators wait for the memory that it holds, or for its command.
pub const SLOWEST_AWAITED: u64 = 512 << 10;

/// Silence after which an initiator no longer has memory, or a place in the order, that other
/// initiators wait for. A lost segment of TCP is sent again several times in it.
pub const OWED: Duration = Duration::from_secs(5);

/// Data that a connection has moved.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Bytes moved in both directions since the connection was made.
    moved: u64,
    /// Bytes that a piece of data may have to wait for, itself included.
    most: u64,
}

/// A command's wait for its initiator to send or take a piece of its data.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// Start of the wait.
    pub since: Instant,
    /// Bytes that the connection had moved by then.
    moved: u64,
}

impl Wait {
    /// Returns the one of two waits that began later.
    #[must_use]
    pub fn later(self, other: Self) -> Self {
        match other.since > self.since {
            true => other,
            false => self,
        }
    }
}

impl Pace {
    /// The pace of a connection that has moved nothing, with up to `commands` commands at once.
    #[must_use]
    pub fn new(commands: u32) -> Self {
        Self {
            moved: 0,
            most: u64::from(commands) * MAX_BLOCK as u64,
        }
    }

    /// Returns the number of bytes that it has moved.
    #[must_use]
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Counts `bytes` of data that were received, or taken by the initiator.
    pub fn on_moved(&mut self, bytes: u32) {
        self.moved += u64::from(bytes);
    }

    /// A wait that begins now.
    #[must_use]
    pub fn begin(&self, now: Instant) -> Wait {
        Wait {
            since: now,
            moved: self.moved,
        }
    }

    /// Returns the part of a wait that counts by now.
    #[must_use]
    pub fn waited(&self, wait: Wait, now: Instant) -> Duration {
        let elapsed = now.saturating_duration_since(wait.since);
        elapsed.saturating_sub(self.explained(wait))
    }

    /// Returns the time at which a wait that may count for `left` is too long, unless more data are
    /// moved before.
    #[must_use]
    pub fn due(&self, wait: Wait, left: Duration) -> Instant {
        wait.since + left + self.explained(wait)
    }

    /// As [`Pace::due`], for a wait that delays other initiators: [`SLOWEST_AWAITED`] is enough, but
    /// `left` is short.
    #[must_use]
    pub fn due_awaited(&self, wait: Wait, left: Duration) -> Instant {
        wait.since + left + self.explained_at(wait, SLOWEST_AWAITED)
    }

    /// Returns the part of a wait that the data explain that were moved meanwhile.
    fn explained(&self, wait: Wait) -> Duration {
        self.explained_at(wait, SLOWEST)
    }

    fn explained_at(&self, wait: Wait, rate: u64) -> Duration {
        let moved = (self.moved - wait.moved).min(self.most);
        Duration::from_micros(moved * 1_000_000 / rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMANDS: u32 = 128;
    const SECOND: Duration = Duration::from_secs(1);
    const LIMIT: Duration = Duration::from_secs(120);

    /// Moves `rate` bytes a second until the wait is too long: how long that took, if it was.
    fn ends_after(rate: u32, most: Duration) -> Option<Duration> {
        let start = Instant::now();
        let mut pace = Pace::new(COMMANDS);
        let wait = pace.begin(start);
        let mut now = start;
        while pace.due(wait, LIMIT) > now {
            assert!(pace.waited(wait, now) < LIMIT);
            now += SECOND;
            pace.on_moved(rate);
            if now - start > most {
                return None;
            }
        }
        Some(now - start)
    }

    #[test]
    fn data_that_are_moved_explain_a_wait() {
        assert_eq!(ends_after(0, LIMIT * 2), Some(LIMIT));
        // One that moves a little gains little.
        let dribbled = ends_after(40_000, LIMIT * 2).unwrap();
        assert!(
            (LIMIT..LIMIT + 3 * SECOND).contains(&dribbled),
            "{dribbled:?}"
        );
        let half = ends_after(2 << 20, LIMIT * 4).unwrap();
        assert!(half > LIMIT && half < LIMIT * 2, "{half:?}");
        // One that is fast enough has until everything that might have come before it is through.
        let all = Duration::from_secs(u64::from(COMMANDS) / (SLOWEST >> 20));
        assert_eq!(ends_after(4 << 20, LIMIT + all - SECOND), None);
        let most = ends_after(1 << 30, LIMIT * 100);
        assert_eq!(most, Some(LIMIT + all), "and not for ever");
    }

    /// What was moved before a wait does not explain it.
    #[test]
    fn a_wait_begins_with_nothing() {
        let start = Instant::now();
        let mut pace = Pace::new(COMMANDS);
        pace.on_moved(100 << 20);
        let wait = pace.begin(start);
        assert_eq!(pace.due(wait, LIMIT), start + LIMIT);
        assert_eq!(pace.waited(wait, start + SECOND), SECOND);
        pace.on_moved(2 << 20);
        assert_eq!(pace.waited(wait, start + SECOND), SECOND / 2);
    }

    /// A deep queue for whose memory other initiators wait is not too slow as long as it moves at the
    /// rate.
    #[test]
    fn awaited_queue_survives_at_its_rate() {
        let cut_after = |rate: u64| {
            let start = Instant::now();
            let mut pace = Pace::new(COMMANDS);
            let wait = pace.begin(start);
            let times = (1..=u32::MAX).map(|n| SECOND * n);
            let due = times.take(200).find(|elapsed| {
                pace.on_moved(rate as u32);
                pace.due_awaited(wait, OWED) <= start + *elapsed
            });
            due.map(|elapsed| elapsed.as_secs())
        };
        assert_eq!(cut_after(0), Some(5));
        assert_eq!(cut_after(SLOWEST_AWAITED / 64), Some(6));
        assert_eq!(cut_after(SLOWEST_AWAITED / 2), Some(10));
        assert_eq!(cut_after(SLOWEST_AWAITED), None);
    }
}
