//! Counters with one writer, and durations in buckets.

use std::sync::atomic::{AtomicU64, Ordering};

/// Buckets of a histogram. The first takes up to [`bound`]`(0)`, the last whatever is longer than the
/// one before it takes.
pub const BUCKETS: usize = 26;

/// The exponent of the first bound: 1.024 µs.
const FIRST: u32 = 10;

/// The longest duration of a bucket, in nanoseconds; `None` of the last, which has no bound.
#[must_use]
pub fn bound(bucket: usize) -> Option<u64> {
    (bucket < BUCKETS - 1).then(|| 1 << (FIRST + bucket as u32))
}

/// The duration that a part of all, from 0 to 1, did not exceed, in the unit of `bounds`; `None` if there are
/// none. `bounds` are those of all buckets but the last. Durations count as spread evenly within a bucket, and
/// those beyond the last bound as equal to it, as Prometheus' `histogram_quantile` has it.
#[must_use]
pub fn quantile(buckets: &[u64], bounds: &[f64], part: f64) -> Option<f64> {
    let all: u64 = buckets.iter().sum();
    let wanted = all as f64 * part;
    let mut below = 0.0;
    for (bucket, n) in buckets.iter().enumerate().filter(|(_, n)| **n > 0) {
        let n = *n as f64;
        if below + n >= wanted {
            let Some(high) = bounds.get(bucket) else {
                break;
            };
            let low = bucket.checked_sub(1).map_or(0.0, |before| bounds[before]);
            return Some(low + (high - low) * (wanted - below) / n);
        }
        below += n;
    }
    bounds.last().copied().filter(|_| all > 0)
}

fn bucket_of(nanos: u64) -> usize {
    let above = nanos.saturating_sub(1) >> FIRST;
    ((u64::BITS - above.leading_zeros()) as usize).min(BUCKETS - 1)
}

/// A number that one thread counts and others read.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Counts. Only its one writer may.
    pub fn add(&self, n: u64) {
        let sum = self.0.load(Ordering::Relaxed).wrapping_add(n);
        self.0.store(sum, Ordering::Relaxed);
    }

    /// What was counted.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How long something took, each time.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [Counter; BUCKETS],
    /// Nanoseconds in all.
    sum: Counter,
}

impl Histogram {
    /// It took so many nanoseconds once more.
    pub fn record(&self, nanos: u64) {
        self.buckets[bucket_of(nanos)].add(1);
        self.sum.add(nanos);
    }

    /// Adds what is in it.
    pub fn add_to(&self, times: &mut Times) {
        for (sum, bucket) in times.buckets.iter_mut().zip(&self.buckets) {
            *sum += bucket.get();
        }
        times.nanos += self.sum.get();
    }
}

/// What a histogram holds, or several together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// How often, by bucket.
    pub buckets: [u64; BUCKETS],
    /// Nanoseconds in all.
    pub nanos: u64,
}

impl Times {
    /// How often.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_goes_to_the_first_bucket_whose_bound_it_does_not_pass() {
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
    fn a_quantile_lies_within_its_bucket_as_prometheus_has_it() {
        let bounds = [0.001, 0.002, 0.004];
        let of = |buckets: &[u64], part| quantile(buckets, &bounds, part);
        assert_eq!(of(&[0; 4], 0.5), None);
        for (buckets, part, expected) in [
            ([4, 0, 0, 0], 0.5, 0.0005),
            ([4, 0, 0, 0], 1.0, 0.001),
            ([2, 2, 0, 0], 0.75, 0.0015),
            ([2, 0, 2, 0], 0.5, 0.001),
            ([0, 0, 100, 0], 0.99, 0.00398),
            ([1, 0, 0, 99], 0.99, 0.004),
        ] {
            let found = of(&buckets, part).unwrap();
            assert!(
                (found - expected).abs() < 1e-9,
                "{buckets:?} {part}: {found}"
            );
        }
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
