//! Limits the time a command can wait for its initiator on a connection that transfers data.
//!
//! The data of a command is queued behind the data of other commands on the same connection. With a
//! slow link and a deep queue of long commands, this can take several minutes even if data is
//! transferred all the time. Therefore we subtract the time required for the data transferred by
//! the connection since then, at the rate [`SLOWEST`]. A faster connection is never too slow.
//! Transferring a small amount of data is not sufficient to keep a command waiting. Each piece of
//! data is queued behind at most one piece of every other command. We do not subtract time for more
//! data than this, so an initiator cannot keep a command waiting forever by transferring data of
//! other commands.

use std::time::{Duration, Instant};

use crate::pool::MAX_BLOCK;

/// Slowest rate of a connection where commands may wait for each other without a limit, in bytes
/// per second.
pub const SLOWEST: u64 = 4 << 20;

/// Same, while other initiators are waiting for the memory used by the command, or for the command
/// itself.
pub const SLOWEST_AWAITED: u64 = 512 << 10;

/// Maximum time without a transfer while other initiators are waiting for memory of this initiator,
/// or for its position in the order. This is sufficient for several retransmissions of a TCP
/// segment.
pub const OWED: Duration = Duration::from_secs(5);

/// Interval between checks whether other initiators are waiting for commands of a connection in the
/// order of their unit, since a connection is not notified of this.
pub const ORDER_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Amount of data transferred by a connection.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Number of bytes transferred in both directions since the connection was created.
    moved: u64,
    /// Maximum number of bytes that a piece of data may have to wait for, including itself.
    most: u64,
}

/// A command waiting for its initiator to send or receive a piece of its data.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// Start time.
    pub since: Instant,
    /// Number of bytes the connection had transferred at this time.
    moved: u64,
}

impl Wait {
    /// Returns the more recent wait.
    #[must_use]
    pub fn later(self, other: Self) -> Self {
        match other.since > self.since {
            true => other,
            false => self,
        }
    }
}

impl Pace {
    /// Returns the pace of a new connection with up to `commands` concurrent commands.
    #[must_use]
    pub fn new(commands: u32) -> Self {
        Self {
            moved: 0,
            most: u64::from(commands) * MAX_BLOCK as u64,
        }
    }

    /// Returns the number of bytes transferred.
    #[must_use]
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Counts `bytes` of data that was received, or that the initiator has received.
    pub fn on_moved(&mut self, bytes: u32) {
        self.moved += u64::from(bytes);
    }

    /// Starts a wait.
    #[must_use]
    pub fn start_wait(&self, now: Instant) -> Wait {
        Wait {
            since: now,
            moved: self.moved,
        }
    }

    /// Returns the time spent waiting until now, excluding the time required for transferred data.
    #[must_use]
    pub fn waited(&self, wait: Wait, now: Instant) -> Duration {
        let elapsed = now.saturating_duration_since(wait.since);
        elapsed.saturating_sub(self.explained(wait))
    }

    /// Returns the time when this wait exceeds `left`, unless more data is transferred until then.
    #[must_use]
    pub fn due(&self, wait: Wait, left: Duration) -> Instant {
        wait.since + left + self.explained(wait)
    }

    /// Same as [`Pace::due`], for a wait that delays other initiators. The required rate is only
    /// [`SLOWEST_AWAITED`], but `left` is short.
    #[must_use]
    pub fn due_awaited(&self, wait: Wait, left: Duration) -> Instant {
        wait.since + left + self.explained_at(wait, SLOWEST_AWAITED)
    }

    /// Returns the time required for the data transferred during the wait.
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

    /// Transfers `rate` bytes per second until the wait times out. Returns the elapsed time, or
    /// `None` if there was no timeout within `most`.
    fn ends_after(rate: u32, most: Duration) -> Option<Duration> {
        let start = Instant::now();
        let mut pace = Pace::new(COMMANDS);
        let wait = pace.start_wait(start);
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
    fn transferred_data_extends_wait() {
        assert_eq!(ends_after(0, LIMIT * 2), Some(LIMIT));
        // A slow transfer gains only a little time.
        let dribbled = ends_after(40_000, LIMIT * 2).unwrap();
        assert!(
            (LIMIT..LIMIT + 3 * SECOND).contains(&dribbled),
            "{dribbled:?}"
        );
        let half = ends_after(2 << 20, LIMIT * 4).unwrap();
        assert!(half > LIMIT && half < LIMIT * 2, "{half:?}");
        // A transfer at the required rate is allowed to continue until all data that might be
        // queued before it was transferred.
        let all = Duration::from_secs(u64::from(COMMANDS) / (SLOWEST >> 20));
        assert_eq!(ends_after(4 << 20, LIMIT + all - SECOND), None);
        let most = ends_after(1 << 30, LIMIT * 100);
        assert_eq!(most, Some(LIMIT + all), "and not for ever");
    }

    /// Data transferred before the wait does not extend it.
    #[test]
    fn wait_ignores_earlier_transfers() {
        let start = Instant::now();
        let mut pace = Pace::new(COMMANDS);
        pace.on_moved(100 << 20);
        let wait = pace.start_wait(start);
        assert_eq!(pace.due(wait, LIMIT), start + LIMIT);
        assert_eq!(pace.waited(wait, start + SECOND), SECOND);
        pace.on_moved(2 << 20);
        assert_eq!(pace.waited(wait, start + SECOND), SECOND / 2);
    }

    /// A deep queue is not too slow, even if other initiators are waiting for its memory, while
    /// data is transferred at the required rate.
    #[test]
    fn awaited_queue_survives_at_its_rate() {
        let cut_after = |rate: u64| {
            let start = Instant::now();
            let mut pace = Pace::new(COMMANDS);
            let wait = pace.start_wait(start);
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
