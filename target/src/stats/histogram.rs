//! Counters with a single writer, and duration histograms.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of histogram buckets. The first bucket contains durations up to [`bound`]`(0)`, and the
/// last bucket contains all durations that exceed the bound of the previous one.
pub const BUCKETS: usize = 26;

/// Exponent of the first bound: 1.024 µs.
const FIRST: u32 = 10;

/// Returns the upper bound of a bucket in nanoseconds, or `None` for the last bucket, which is
/// unbounded.
#[must_use]
pub fn bound(bucket: usize) -> Option<u64> {
    (bucket < BUCKETS - 1).then(|| 1 << (FIRST + bucket as u32))
}

fn bucket_of(nanos: u64) -> usize {
    let above = nanos.saturating_sub(1) >> FIRST;
    ((u64::BITS - above.leading_zeros()) as usize).min(BUCKETS - 1)
}

/// A counter updated by a single thread and read by any thread.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Increases the counter. Must only be called by its single writer.
    pub fn add(&self, n: u64) {
        let sum = self.0.load(Ordering::Relaxed).wrapping_add(n);
        self.0.store(sum, Ordering::Relaxed);
    }

    /// Returns the current count.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Duration histogram with power-of-two buckets.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [Counter; BUCKETS],
    /// Sum of all durations in nanoseconds.
    sum: Counter,
}

impl Histogram {
    /// Records a duration of `nanos` nanoseconds.
    pub fn record(&self, nanos: u64) {
        self.buckets[bucket_of(nanos)].add(1);
        self.sum.add(nanos);
    }

    /// Adds this histogram to `times`.
    pub fn add_to(&self, times: &mut Times) {
        for (sum, bucket) in times.buckets.iter_mut().zip(&self.buckets) {
            *sum += bucket.get();
        }
        times.nanos += self.sum.get();
    }
}

/// Snapshot of a histogram, or the sum of several histograms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Number of durations in each bucket.
    pub buckets: [u64; BUCKETS],
    /// Sum of all durations in nanoseconds.
    pub nanos: u64,
}

impl Times {
    /// Returns the number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_bounds_are_inclusive() {
        for nanos in [0, 1, 1023, 1024, 1025, 2048, 2049, 1_000_000, 1 << 34] {
            let bucket = bucket_of(nanos);
            assert!(nanos <= bound(bucket).unwrap(), "{nanos}");
            assert!(bucket == 0 || nanos > bound(bucket - 1).unwrap(), "{nanos}");
        }
        assert_eq!(bucket_of((1 << 34) + 1), BUCKETS - 1);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(bound(BUCKETS - 1), None);
    }

    #[test]
    fn histograms_add_up() {
        let (a, b) = (Histogram::default(), Histogram::default());
        a.record(500);
        a.record(5000);
        b.record(600);
        let mut times = Times::default();
        a.add_to(&mut times);
        b.add_to(&mut times);
        assert_eq!((times.buckets[0], times.buckets[3]), (2, 1));
        assert_eq!((times.count(), times.nanos), (3, 6100));
    }
}
