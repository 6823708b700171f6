//! Rate limits for a logical unit or an initiator.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use riser_config::{BURST, IoLimits};

use super::Bucket;

/// Cost of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// True for a write, false for a read.
    pub is_write: bool,
    /// Number of bytes transferred by the command.
    pub bytes: u64,
}

/// Statistics for delayed commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// Number of delayed commands.
    pub commands: u64,
    /// Total delay.
    pub time: Duration,
}

/// Rate limits shared by several channels and workers.
#[derive(Debug)]
pub struct Limiter {
    /// Base for timestamps: the first time passed to this limiter.
    began: OnceLock<Instant>,
    /// Commands and bytes, for all commands, then for reads and writes.
    buckets: [Bucket; 6],
    /// Burst for each rate, in nanoseconds.
    burst: AtomicU64,
    /// Number of rates with a limit.
    active: AtomicU64,
    /// Increased when the limits change.
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
    /// Creates a limiter with these limits.
    #[must_use]
    pub fn new(limits: &IoLimits) -> Self {
        let limiter = Self::default();
        limiter.set(limits);
        limiter
    }

    /// Changes the limits. If the new limits are different, this forgives all debt, and commands
    /// that are waiting must be booked again.
    pub fn set(&self, limits: &IoLimits) {
        // A reload without changes must not forgive the debt, because reloads could be used to
        // exceed the limits.
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
        // Increase it again, because a command that was booked in the meantime may have used the
        // old limits.
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// Returns the active limits.
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

    /// Returns true if any limit is active.
    #[inline]
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed) > 0
    }

    /// Books a command and returns the time when it may start, `now` or later.
    pub fn book(&self, cost: Cost, now: Instant) -> Instant {
        let (at, burst) = (self.nanos(now), self.burst.load(Ordering::Relaxed));
        // Book all rates, even if a single rate determines the delay, because the command consumes
        // units of each rate when it starts.
        let dues = self.concerned(cost);
        let due = dues.map(|(bucket, units)| bucket.book(units, at, burst));
        let wait = due.into_iter().max().map_or(0, |due| due - at);
        now + Duration::from_nanos(wait)
    }

    /// Returns the epoch, which increases when the limits change.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Returns the units of an unused booking made in `epoch`. This has no effect if the debt was
    /// already forgiven by a change of limits.
    pub fn refund(&self, cost: Cost, epoch: u64) {
        // The debt was forgiven by the change, so a refund would add extra units.
        if epoch != self.epoch() {
            return;
        }
        for (bucket, units) in self.concerned(cost) {
            bucket.refund(units);
        }
    }

    /// Returns the time that this number of commands takes at the limits, with the total cost
    /// `all`.
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

    /// Returns whether there is any debt at `now`.
    #[must_use]
    pub fn owes(&self, now: Instant) -> bool {
        let at = self.nanos(now);
        self.buckets.iter().any(|bucket| bucket.owes(at))
    }

    /// Counts a delayed command.
    pub fn count(&self, wait: Duration) {
        self.waits.fetch_add(1, Ordering::Relaxed);
        self.waited.fetch_add(nanos(wait), Ordering::Relaxed);
    }

    /// Returns the statistics for delayed commands.
    #[must_use]
    pub fn waits(&self) -> Waits {
        Waits {
            commands: self.waits.load(Ordering::Relaxed),
            time: Duration::from_nanos(self.waited.load(Ordering::Relaxed)),
        }
    }

    /// Returns the limits and the statistics for delayed commands.
    #[must_use]
    pub fn view(&self) -> (IoLimits, Waits) {
        (self.limits(), self.waits())
    }

    /// Returns the buckets used by a command, and the number of units for each.
    fn concerned(&self, cost: Cost) -> [(&Bucket, u64); 4] {
        let own = if cost.is_write { 4 } else { 2 };
        [(0, 1), (1, cost.bytes), (own, 1), (own + 1, cost.bytes)]
            .map(|(n, units)| (&self.buckets[n], units))
    }

    fn nanos(&self, at: Instant) -> u64 {
        nanos(at.saturating_duration_since(*self.began.get_or_init(|| at)))
    }
}

/// Returns the time in nanoseconds, saturating after several centuries.
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
    fn slowest_applicable_rate_determines_delay() {
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
        // The first read waits for both writes, and the second read waits for the bytes of the
        // first.
        assert_eq!(limiter.book(READ, now), after(2));
        assert_eq!(limiter.book(READ, now), after(100));
        limiter.refund(READ, limiter.epoch());
        assert_eq!(limiter.book(READ, now), after(100));
        assert_eq!(limiter.span(20, WRITE), Duration::from_millis(200));
        assert_eq!(limiter.span(1, READ), Duration::from_millis(100));
    }

    #[test]
    fn only_changed_limits_forgive_debt() {
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
        // The forgiven debt isn't refunded as well.
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
    fn rate_limit_is_shared_across_threads() {
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
