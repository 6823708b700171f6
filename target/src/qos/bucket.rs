//! Rate limiter based on the generic cell rate algorithm (ITU-T I.371), which only needs a single
//! timestamp.
//!
//! This is the theoretical arrival time (TAT), at which all admitted commands are paid for. Each
//! command increases it by its own cost divided by the rate. A command may start if the previous
//! TAT is at most the tolerance ahead of the current time. Unused capacity is therefore available
//! as a burst, limited by the tolerance.

use riser_sync::atomic::{AtomicU64, Ordering};

/// Nanoseconds per second.
const SECOND: u64 = 1_000_000_000;

/// A rate limiter shared by several threads.
#[derive(Debug, Default)]
pub struct Bucket {
    /// Units per second, or zero for no limit.
    rate: AtomicU64,
    /// The theoretical arrival time, in nanoseconds.
    paid: AtomicU64,
}

impl Bucket {
    /// Returns the rate in units per second, or `None` for no limit.
    #[must_use]
    pub fn rate(&self) -> Option<u64> {
        Some(self.rate.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    /// Changes the rate, or removes the limit if `None`. This forgives the debt from the previous
    /// rate.
    pub fn set(&self, rate: Option<u64>) {
        self.rate.store(rate.unwrap_or(0), Ordering::Relaxed);
        self.paid.store(0, Ordering::Relaxed);
    }

    /// Consumes `cost` units at `now` and returns the time when the command may start. Times are in
    /// nanoseconds.
    pub fn book(&self, cost: u64, now: u64, tolerance: u64) -> u64 {
        let Some(time) = self.time_of(cost) else {
            return now;
        };
        // Start at the current time at the earliest, so that an idle rate doesn't accumulate more
        // than the tolerance.
        let moved = |paid: u64| Some(paid.max(now).saturating_add(time));
        let order = Ordering::Relaxed;
        let before = self.paid.fetch_update(order, order, moved);
        let before = before.unwrap_or_else(|paid| paid);
        before.saturating_sub(tolerance).max(now)
    }

    /// Returns unused units.
    pub fn refund(&self, cost: u64) {
        if let Some(time) = self.time_of(cost) {
            let back = |paid: u64| Some(paid.saturating_sub(time));
            let _ = self
                .paid
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, back);
        }
    }

    /// Returns whether there is a debt at `now`.
    #[must_use]
    pub fn owes(&self, now: u64) -> bool {
        self.rate().is_some() && self.paid.load(Ordering::Relaxed) > now
    }

    /// Returns the time for `cost` units in nanoseconds, or 0 for no limit.
    #[must_use]
    pub fn span(&self, cost: u64) -> u64 {
        self.time_of(cost).unwrap_or(0)
    }

    /// Returns the time for `cost` units in nanoseconds, rounded up, or `None` for no limit.
    fn time_of(&self, cost: u64) -> Option<u64> {
        let rate = self.rate()?;
        // Round up, because the rate would be exceeded if each command used a fraction of a
        // nanosecond less than its cost.
        Some(match cost.checked_mul(SECOND) {
            Some(product) => product.div_ceil(rate),
            None => {
                let product = u128::from(cost) * u128::from(SECOND);
                u64::try_from(product.div_ceil(rate.into())).unwrap_or(u64::MAX)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(rate: u64) -> Bucket {
        let bucket = Bucket::default();
        bucket.set(Some(rate));
        bucket
    }

    /// Books single units from `now`, each as soon as the previous one may start, and returns the
    /// number of units started before `end`.
    fn taken(bucket: &Bucket, mut now: u64, end: u64, tolerance: u64) -> u64 {
        let mut n = 0;
        loop {
            now = bucket.book(1, now, tolerance);
            if now >= end {
                return n;
            }
            n += 1;
        }
    }

    #[test]
    fn rate_holds_after_burst() {
        let bucket = bucket(1000);
        // A burst for two seconds plus one unit, then one unit per millisecond.
        assert_eq!(taken(&bucket, 0, 1, 2 * SECOND), 2001);
        assert_eq!(taken(&bucket, 1, 5 * SECOND, 2 * SECOND), 4998);
    }

    #[test]
    fn rate_loses_no_capacity_to_late_polls() {
        let bucket = bucket(1000);
        let tolerance = SECOND / 10;
        let (mut now, mut taken) = (0, 0u64);
        // Poll every 7 ms, and start all commands that are due.
        let mut due = bucket.book(1, now, tolerance);
        while now < 10 * SECOND {
            while due <= now {
                taken += 1;
                due = bucket.book(1, now, tolerance);
            }
            now += 7_000_000;
        }
        assert!((10_080..=10_101).contains(&taken), "{taken}");
    }

    #[test]
    fn oversized_cost_passes_and_delays_next() {
        let bucket = bucket(1 << 20);
        assert_eq!(bucket.book(32 << 20, 0, SECOND / 10), 0);
        assert_eq!(bucket.book(1, 0, SECOND / 10), 32 * SECOND - SECOND / 10);
        assert!(bucket.owes(31 * SECOND) && !bucket.owes(33 * SECOND));
    }

    #[test]
    fn changed_rate_applies_immediately() {
        let bucket = bucket(1);
        assert_eq!(bucket.book(100, 0, 0), 0);
        assert_eq!(bucket.book(1, 0, 0), 100 * SECOND);
        bucket.set(Some(10));
        assert_eq!(bucket.book(1, 5, 0), 5);
        assert_eq!(bucket.book(1, 5, 0), SECOND / 10 + 5);
        bucket.set(None);
        assert_eq!(bucket.book(u64::MAX, 7, 0), 7);
        assert_eq!((bucket.rate(), bucket.owes(0)), (None, false));
    }

    #[test]
    fn refund_returns_unused_units() {
        let bucket = bucket(10);
        assert_eq!(bucket.book(1, SECOND, 0), SECOND);
        assert_eq!(bucket.book(5, SECOND, 0), SECOND + SECOND / 10);
        bucket.refund(5);
        assert_eq!(bucket.book(1, SECOND, 0), SECOND + SECOND / 10);
        for _ in 0..100 {
            bucket.refund(u64::MAX);
        }
        assert_eq!(bucket.book(1, SECOND, 0), SECOND);
    }

    #[test]
    fn times_saturate_on_overflow() {
        let bucket = bucket(1);
        assert_eq!(bucket.book(u64::MAX, 0, 0), 0);
        assert_eq!(bucket.book(u64::MAX, 0, 0), u64::MAX);
        assert_eq!(bucket.book(1, 0, SECOND), u64::MAX - SECOND);
        let rate = u64::MAX;
        bucket.set(Some(rate));
        assert_eq!(bucket.book(1, 0, 0), 0);
        // The rate is never exceeded, because less than a nanosecond is rounded up to one.
        assert_eq!(bucket.book(1, 0, 0), 1);
    }
}
