//! The limits of one logical unit or initiator.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use riser_config::{BURST, IoLimits};

use super::Bucket;

/// InitiatorStats of a rate that a command takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// True if it writes, as opposed to reads.
    pub is_write: bool,
    /// Bytes that the command moves.
    pub bytes: u64,
}

/// Commands that had to wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Number of these commands.
    pub commands: u64,
    /// Sum of the times that they waited.
    pub time: Duration,
}

/// Rates that several channels at several workers share.
#[derive(Debug)]
pub struct Limiter {
    /// Times are counted from the first one that it is given.
    began: OnceLock<Instant>,
    /// Commands, bytes: of all, of reads, of writes.
    buckets: [Bucket; 6],
    /// Burst in nanoseconds of each rate.
    burst: AtomicU64,
    /// Number of rates that are set.
    active: AtomicU64,
    /// Number of changes of the limits so far.
    epoch: AtomicU64,
    waits: AtomicU64,
    waited: AtomicU64,
}

impl Default for Limiter {
    fn default() -> Self {
        Self {
            began: OnceLock::new(),
            buckets: Default::default(),
            burst: AtomicU64::new(nanos(BURST)),
            active: AtomicU64::new(0),
            epoch: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            waited: AtomicU64::new(0),
        }
    }
}

impl Limiter {
    /// One with these limits.
    #[must_use]
    pub fn new(limits: &IoLimits) -> Self {
        let limiter = Self::default();
        limiter.set(limits);
        limiter
    }

    /// Has these limits from now on. Where they are others than before, nothing is owed any more,
    /// and what waits is to book once more.
    pub fn set(&self, limits: &IoLimits) {
        // A reload that changes nothing here must not forgive what is owed, or reloads would be a
        // way past limits.
        if self.limits() == *limits {
            return;
        }
        self.epoch.fetch_add(1, Ordering::Relaxed);
        self.burst.store(nanos(limits.burst), Ordering::Relaxed);
        let rates = limits.rates();
        for (bucket, rate) in self.buckets.iter().zip(rates) {
            bucket.set(rate);
        }
        let active = rates.iter().flatten().count() as u64;
        self.active.store(active, Ordering::Relaxed);
        // Once more: what was booked meanwhile may have been booked by the limits before.
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// Limits that are in force.
    #[must_use]
    pub fn limits(&self) -> IoLimits {
        let rate = |n: usize| self.buckets[n].rate();
        IoLimits {
            iops: rate(0),
            bandwidth: rate(1),
            read_iops: rate(2),
            read_bandwidth: rate(3),
            write_iops: rate(4),
            write_bandwidth: rate(5),
            burst: Duration::from_nanos(self.burst.load(Ordering::Relaxed)),
        }
    }

    /// Returns true if it limits anything.
    #[inline]
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed) > 0
    }

    /// Takes what a command costs: when it may go, `now` or later.
    pub fn book(&self, cost: Cost, now: Instant) -> Instant {
        let (at, burst) = (self.nanos(now), self.burst.load(Ordering::Relaxed));
        // All of them are booked, even where one alone decides: the command takes from each rate
        // when it goes.
        let dues = self.concerned(cost);
        let due = dues.map(|(bucket, units)| bucket.book(units, at, burst));
        let wait = due.into_iter().max().map_or(0, |due| due - at);
        now + Duration::from_nanos(wait)
    }

    /// Number of changes of the limits so far.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Gives back what was booked in an epoch and not used. What other limits have forgiven
    /// meanwhile is not given back once more.
    pub fn refund(&self, cost: Cost, epoch: u64) {
        // The buckets were emptied since, so the units would be a gift.
        if epoch != self.epoch() {
            return;
        }
        for (bucket, units) in self.concerned(cost) {
            bucket.refund(units);
        }
    }

    /// Time that these commands take at the limits, which cost `all` together.
    #[must_use]
    pub fn span(&self, commands: u64, all: Cost) -> Duration {
        let own = if all.is_write { 4 } else { 2 };
        let spans = [
            (0, commands),
            (1, all.bytes),
            (own, commands),
            (own + 1, all.bytes),
        ]
        .map(|(n, units)| self.buckets[n].span(units));
        Duration::from_nanos(spans.into_iter().max().unwrap_or_default())
    }

    /// Returns whether something has been taken that is not paid for.
    #[must_use]
    pub fn owes(&self, now: Instant) -> bool {
        let at = self.nanos(now);
        self.buckets.iter().any(|bucket| bucket.owes(at))
    }

    /// A command has waited so long.
    pub fn count(&self, wait: Duration) {
        self.waits.fetch_add(1, Ordering::Relaxed);
        self.waited.fetch_add(nanos(wait), Ordering::Relaxed);
    }

    /// Commands that have waited.
    #[must_use]
    pub fn waits(&self) -> Waits {
        Waits {
            commands: self.waits.load(Ordering::Relaxed),
            time: Duration::from_nanos(self.waited.load(Ordering::Relaxed)),
        }
    }

    /// The limits, and what has waited for them.
    #[must_use]
    pub fn view(&self) -> (IoLimits, Waits) {
        (self.limits(), self.waits())
    }

    /// The rates that a command takes from, and how much.
    fn concerned(&self, cost: Cost) -> [(&Bucket, u64); 4] {
        let own = if cost.is_write { 4 } else { 2 };
        [(0, 1), (1, cost.bytes), (own, 1), (own + 1, cost.bytes)]
            .map(|(n, units)| (&self.buckets[n], units))
    }

    fn nanos(&self, at: Instant) -> u64 {
        nanos(at.saturating_duration_since(*self.began.get_or_init(|| at)))
    }
}

/// Nanoseconds, up to some centuries.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Cost = Cost {
        is_write: false,
        bytes: 4096,
    };
    const WRITE: Cost = Cost {
        is_write: true,
        bytes: 4096,
    };

    #[test]
    fn the_slowest_rate_that_concerns_a_command_decides() {
        let limiter = Limiter::new(&IoLimits {
            iops: Some(1000),
            write_iops: Some(100),
            read_bandwidth: Some(40_960),
            burst: Duration::ZERO,
            ..IoLimits::default()
        });
        let now = Instant::now();
        let after = |ms| now + Duration::from_millis(ms);
        assert_eq!(limiter.book(WRITE, now), now);
        assert_eq!(limiter.book(WRITE, now), after(10));
        // The first of the reads waits for both writes, the second one for the first one's bytes.
        assert_eq!(limiter.book(READ, now), after(2));
        assert_eq!(limiter.book(READ, now), after(100));
        limiter.refund(READ, limiter.epoch());
        assert_eq!(limiter.book(READ, now), after(100));
        assert_eq!(limiter.span(20, WRITE), Duration::from_millis(200));
        assert_eq!(limiter.span(1, READ), Duration::from_millis(100));
    }

    #[test]
    fn the_same_limits_change_nothing_and_others_forgive() {
        let limits = IoLimits {
            iops: Some(1),
            burst: Duration::ZERO,
            ..IoLimits::default()
        };
        let limiter = Limiter::new(&limits);
        let now = Instant::now();
        limiter.book(READ, now);
        limiter.set(&limits);
        assert_eq!(limiter.book(READ, now), now + Duration::from_secs(1));
        assert!(limiter.owes(now) && limiter.is_active());
        let before = limiter.epoch();
        limiter.set(&IoLimits {
            iops: Some(2),
            ..limits
        });
        assert_eq!(limiter.book(READ, now), now);
        // What it has forgiven is not given back as well.
        limiter.refund(READ, before);
        assert_eq!(limiter.book(READ, now), now + Duration::from_millis(500));
        limiter.set(&IoLimits::default());
        assert!(!limiter.owes(now) && !limiter.is_active());
        assert_eq!(limiter.limits(), IoLimits::default());
        for _ in 0..10 {
            assert_eq!(limiter.book(WRITE, now), now);
        }
    }

    #[test]
    fn threads_that_share_a_rate_get_it_once() {
        let limiter = Limiter::new(&IoLimits {
            iops: Some(1_000_000),
            burst: Duration::ZERO,
            ..IoLimits::default()
        });
        let now = Instant::now();
        let mut dues: Vec<Instant> = std::thread::scope(|scope| {
            let book = || {
                (0..1000)
                    .map(|_| limiter.book(READ, now))
                    .collect::<Vec<_>>()
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(book)).collect();
            threads
                .into_iter()
                .flat_map(|t| t.join().unwrap())
                .collect()
        });
        dues.sort();
        let expected: Vec<_> = (0..4000).map(|n| now + Duration::from_micros(n)).collect();
        assert_eq!(dues, expected);
    }
}
