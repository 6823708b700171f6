//! Values calculated from an outcome for multiple output formats.

use hdrhistogram::Histogram;

use crate::outcome::{Interval, Measured, OpKind, Outcome, Usage};

/// Minimum length of an interval, relative to the longest one, to be used as a sample of the rate.
/// Otherwise the last few milliseconds of a run could become the minimum or maximum.
const SAMPLE: f64 = 0.5;

/// Returns the kinds of operations used by the run, in fio's order.
pub(super) fn active(outcome: &Outcome) -> impl Iterator<Item = OpKind> {
    OpKind::ALL
        .into_iter()
        .filter(|kind| outcome.of(*kind).ios() > 0)
}

/// Returns the number of operations of all kinds.
pub(super) fn total_ios(outcome: &Outcome) -> u64 {
    outcome.measured.iter().map(Measured::ios).sum()
}

/// Returns the latencies seen by an application. These are measured from the planned arrival if
/// arrivals are planned.
pub(super) fn latencies(measured: &Measured) -> &Histogram<u64> {
    measured.response.as_ref().unwrap_or(&measured.service)
}

/// Returns the latencies of all reads, writes and trims, or `None` if there were none. Flushes are
/// not included because they have much higher latencies.
pub(super) fn data_latencies(measured: &[Measured; 4]) -> Option<Histogram<u64>> {
    let kinds = [OpKind::Read, OpKind::Write, OpKind::Trim];
    let parts = kinds
        .iter()
        .map(|kind| latencies(&measured[*kind as usize]));
    sum(parts.filter(|part| !part.is_empty()))
}

/// Merges histograms. Returns `None` if there are none.
pub(super) fn sum<'a>(
    mut parts: impl Iterator<Item = &'a Histogram<u64>>,
) -> Option<Histogram<u64>> {
    let mut all = parts.next()?.clone();
    all.auto(true);
    for part in parts {
        add(&mut all, part);
    }
    Some(all)
}

/// Adds the values of a histogram to a histogram with automatic resizing.
fn add(sum: &mut Histogram<u64>, part: &Histogram<u64>) {
    sum.add(part)
        .expect("a histogram that resizes itself takes every value");
}

/// Returns the number of reads, writes and trims in an interval.
pub(super) fn data_ios(measured: &[Measured; 4]) -> u64 {
    let flushes = measured[OpKind::Flush as usize].ios();
    measured.iter().map(Measured::ios).sum::<u64>() - flushes
}

/// Returns the processor time per operation in nanoseconds, or 0 if there were no operations.
pub(super) fn cpu_per_op(usage: &Usage, ios: u64) -> f64 {
    per_op((usage.user + usage.system).as_nanos() as f64, ios)
}

/// Returns the number of context switches per operation, or 0 if there were no operations.
pub(super) fn switches_per_op(usage: &Usage, ios: u64) -> f64 {
    per_op((usage.voluntary + usage.involuntary) as f64, ios)
}

fn per_op(value: f64, ios: u64) -> f64 {
    match ios {
        0 => 0.0,
        ios => value / ios as f64,
    }
}

/// Returns operations and bytes per second for each interval that is long enough.
pub(super) fn samples(outcome: &Outcome, kind: OpKind) -> Vec<(f64, f64)> {
    let longest = outcome.intervals.iter().map(|i| i.length).max();
    let shortest = longest.unwrap_or_default().mul_f64(SAMPLE);
    let long = outcome.intervals.iter().filter(|i| i.length >= shortest);
    long.map(|interval| {
        let measured = &interval.measured[kind as usize];
        (
            per_second(measured.ios(), interval),
            per_second(measured.bytes, interval),
        )
    })
    .collect()
}

/// Converts a number for an interval to a rate.
pub(super) fn per_second(number: u64, interval: &Interval) -> f64 {
    number as f64 / interval.length.as_secs_f64().max(1e-9)
}

/// Reduces the number of intervals to `limit`. Adjacent intervals are merged, so their percentiles
/// include all operations.
pub(super) fn thinned(intervals: &[Interval], limit: usize) -> Vec<Interval> {
    let together = intervals.len().div_ceil(limit.max(1)).max(1);
    intervals.chunks(together).map(merged).collect()
}

fn merged(chunk: &[Interval]) -> Interval {
    let mut all = chunk[0].clone();
    for part in &chunk[1..] {
        all.length += part.length;
        for (sum, measured) in all.measured.iter_mut().zip(&part.measured) {
            sum.bytes += measured.bytes;
            accumulate(&mut sum.service, &measured.service);
            if let (Some(sum), Some(part)) = (&mut sum.response, &measured.response) {
                accumulate(sum, part);
            }
        }
    }
    all
}

/// Adds a histogram to a sum. An empty sum is replaced because it may have fewer digits.
fn accumulate(sum: &mut Histogram<u64>, part: &Histogram<u64>) {
    if sum.is_empty() {
        sum.clone_from(part);
    } else {
        sum.auto(true);
        add(sum, part);
    }
}

/// Returns the median, or 0 if there are no values. This is the mean of the middle two if there is
/// an even number of values.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::sample;

    #[test]
    fn thinning_adds_neighbours_up() {
        let outcome = sample::mixed("a", 1);
        let before = &outcome.intervals;
        let after = thinned(before, 4);
        assert!(before.len() > 4 && after.len() <= 4);
        let ios = |i: &[Interval]| i.iter().map(|i| data_ios(&i.measured)).sum::<u64>();
        assert_eq!(ios(&after), ios(before));
        let length = |i: &[Interval]| i.iter().map(|i| i.length).sum::<std::time::Duration>();
        assert_eq!(length(&after), length(before));
        assert_eq!(after[1].at, after[0].at + after[0].length);
    }

    #[test]
    fn thinning_keeps_latency_precision() {
        let mut outcome = sample::open_loop("a", 1);
        let idle = &mut outcome.intervals[0].measured[0];
        idle.service = Histogram::new(1).unwrap();
        idle.response = Some(Histogram::new(1).unwrap());
        let [first, second] = &outcome.intervals[..2] else {
            unreachable!("there are eleven");
        };
        let thinned = thinned(&[first.clone(), second.clone()], 1);
        let (all, part) = (&thinned[0].measured[0], &second.measured[0]);
        for percent in [50.0, 90.0, 99.0] {
            let at = |h: &Histogram<u64>| h.value_at_percentile(percent);
            assert_eq!(at(&all.service), at(&part.service));
            assert_eq!(at(latencies(all)), at(latencies(part)));
        }
    }

    #[test]
    fn short_last_interval_is_not_sampled() {
        let outcome = sample::mixed("a", 1);
        let samples = samples(&outcome, OpKind::Read);
        assert_eq!(samples.len(), outcome.intervals.len() - 1);
    }

    #[test]
    fn data_latencies_exclude_flushes() {
        let outcome = sample::mixed("a", 1);
        let all = data_latencies(&outcome.measured).unwrap();
        assert_eq!(all.len(), data_ios(&outcome.measured));
        assert!(all.len() < total_ios(&outcome));
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }
}
