//! One rate: the generic cell rate algorithm (ITU-T I.371), which keeps a single time.
//!
//! That is the theoretical arrival time: when everything that has been taken is paid for. Each
//! command moves it on by what the command costs at the rate. A command may go when the time before
//! its own cost is at most the tolerance ahead of now, so what was not used for as long as the
//! tolerance is there at once.

use riser_sync::atomic::{AtomicU64, Ordering};

/// Nanoseconds of a second.
const SECOND: u64 = 1_000_000_000;

/// A rate that several threads share.
#[derive(Debug, Default)]
pub struct Bucket {
    /// Units a second; zero is no limit.
    rate: AtomicU64,
    /// The theoretical arrival time, in nanoseconds.
    paid: AtomicU64,
}

impl Bucket {
    /// The rate in units a second, if it is limited.
    #[must_use]
    pub fn rate(&self) -> Option<u64> {
        Some(self.rate.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    /// Has another rate from now on, or none. What is owed by the old one is forgiven.
    pub fn set(&self, rate: Option<u64>) {
        self.rate.store(rate.unwrap_or(0), Ordering::Relaxed);
        self.paid.store(0, Ordering::Relaxed);
    }

    /// Takes `cost` units at `now`: when what takes them may go. Times are in nanoseconds.
    pub fn book(&self, cost: u64, now: u64, tolerance: u64) -> u64 {
        let Some(time) = self.time_of(cost) else {
            return now;
        };
        // From now at the earliest: a rate that was not used does not save up more than the
        // tolerance.
        let moved = |paid: u64| Some(paid.max(now).saturating_add(time));
        let order = Ordering::Relaxed;
        let before = self.paid.fetch_update(order, order, moved);
        let before = before.unwrap_or_else(|paid| paid);
        before.saturating_sub(tolerance).max(now)
    }

    /// Gives units back that were not used.
    pub fn refund(&self, cost: u64) {
        if let Some(time) = self.time_of(cost) {
            let back = |paid: u64| Some(paid.saturating_sub(time));
            let _ = self
                .paid
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, back);
        }
    }

    /// Returns whether something is not paid for at `now`.
    #[must_use]
    pub fn owes(&self, now: u64) -> bool {
        self.rate().is_some() && self.paid.load(Ordering::Relaxed) > now
    }

    /// Nanoseconds that `cost` takes at the rate; none without a limit.
    #[must_use]
    pub fn span(&self, cost: u64) -> u64 {
        self.time_of(cost).unwrap_or(0)
    }

    /// Nanoseconds that `cost` takes at the rate, never too few; `None` without a limit.
    fn time_of(&self, cost: u64) -> Option<u64> {
        let rate = self.rate()?;
        // Rounded up: with each command a part of a nanosecond too few would add up to more than
        // the rate.
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

    /// Takes one unit whenever that may go, from `now` on; how many go before `end`.
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
    fn a_rate_is_kept_after_what_was_saved_up() {
        let bucket = bucket(1000);
        // Two seconds' worth at once and one, then one a millisecond.
        assert_eq!(taken(&bucket, 0, 1, 2 * SECOND), 2001);
        assert_eq!(taken(&bucket, 1, 5 * SECOND, 2 * SECOND), 4998);
    }

    #[test]
    fn a_rate_loses_nothing_where_its_user_comes_late() {
        let bucket = bucket(1000);
        let tolerance = SECOND / 10;
        let (mut now, mut taken) = (0, 0u64);
        // Looks every 7 ms, and takes what may go by then.
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
    fn what_costs_more_than_there_is_passes_and_the_next_waits_for_it() {
        let bucket = bucket(1 << 20);
        assert_eq!(bucket.book(32 << 20, 0, SECOND / 10), 0);
        assert_eq!(bucket.book(1, 0, SECOND / 10), 32 * SECOND - SECOND / 10);
        assert!(bucket.owes(31 * SECOND) && !bucket.owes(33 * SECOND));
    }

    #[test]
    fn another_rate_counts_at_once_and_none_lets_everything_pass() {
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
    fn what_is_not_used_goes_back() {
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
    fn times_stop_at_their_end_and_do_not_wrap() {
        let bucket = bucket(1);
        assert_eq!(bucket.book(u64::MAX, 0, 0), 0);
        assert_eq!(bucket.book(u64::MAX, 0, 0), u64::MAX);
        assert_eq!(bucket.book(1, 0, SECOND), u64::MAX - SECOND);
        let rate = u64::MAX;
        bucket.set(Some(rate));
        assert_eq!(bucket.book(1, 0, 0), 0);
        // Never more than the limit: less than a nanosecond counts as one.
        assert_eq!(bucket.book(1, 0, 0), 1);
    }
}
