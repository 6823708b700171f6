//! A metric with its help text and series.

use prometheus::proto::{
    Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType, Summary,
};

use crate::stats::{Times, bound};

/// Upper bounds of exported buckets, as indices for [`bound`]: from 16 µs to 4.3 s in steps of a
/// factor of four. We only export some of the bounds, because each of them is a series for each
/// unit and command type.
const BOUNDS: std::ops::RangeInclusive<usize> = 4..=22;

/// Step between two exported bounds: each bucket is twice as wide as the previous one.
const STEP: usize = 2;

/// Labels with their values.
pub(super) type Labels<'a> = &'a [(&'a str, &'a str)];

/// A metric while it is being filled.
pub(super) struct Family {
    kind: MetricType,
    family: MetricFamily,
}

impl Family {
    /// Creates a family without series.
    pub(super) fn new(kind: MetricType, name: &str, help: &str) -> Self {
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(kind);
        Self { kind, family }
    }

    /// Creates a family of counters.
    pub(super) fn counter(name: &str, help: &str) -> Self {
        Self::new(MetricType::COUNTER, name, help)
    }

    /// Creates a family of gauges.
    pub(super) fn gauge(name: &str, help: &str) -> Self {
        Self::new(MetricType::GAUGE, name, help)
    }

    /// Creates a family of duration histograms.
    pub(super) fn histogram(name: &str, help: &str) -> Self {
        Self::new(MetricType::HISTOGRAM, name, help)
    }

    fn push(&mut self, labels: Labels<'_>, mut metric: Metric) {
        let pair = |(name, value): &(&str, &str)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).to_owned());
            pair.set_value((*value).to_owned());
            pair
        };
        metric.set_label(labels.iter().map(pair).collect());
        self.family.mut_metric().push(metric);
    }

    /// Adds a series to a counter or gauge.
    pub(super) fn add(&mut self, labels: Labels<'_>, value: f64) {
        let mut metric = Metric::default();
        if self.kind == MetricType::COUNTER {
            let mut counter = Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        }
        self.push(labels, metric);
    }

    /// Creates a family of duration sums and counts.
    pub(super) fn summary(name: &str, help: &str) -> Self {
        Self::new(MetricType::SUMMARY, name, help)
    }

    /// Adds a histogram.
    pub(super) fn times(&mut self, labels: Labels<'_>, times: &Times) {
        let bucket = |place: usize| {
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(seconds(bound(place)?));
            bucket.set_cumulative_count(times.buckets[..=place].iter().sum());
            Some(bucket)
        };
        let mut histogram = Histogram::default();
        // The encoder adds the last bucket, which contains the total count.
        histogram.set_bucket(BOUNDS.step_by(STEP).filter_map(bucket).collect());
        histogram.set_sample_count(times.count());
        histogram.set_sample_sum(seconds(times.nanos));
        let mut metric = Metric::default();
        metric.set_histogram(histogram);
        self.push(labels, metric);
    }

    /// Adds a summary without quantiles.
    pub(super) fn sum(&mut self, labels: Labels<'_>, count: u64, nanos: u64) {
        let mut summary = Summary::default();
        summary.set_sample_count(count);
        summary.set_sample_sum(seconds(nanos));
        let mut metric = Metric::default();
        metric.set_summary(summary);
        self.push(labels, metric);
    }

    /// Returns the family for the encoder, or `None` if it does not have any series.
    pub(super) fn finish(self) -> Option<MetricFamily> {
        let has_series = !self.family.get_metric().is_empty();
        has_series.then_some(self.family)
    }
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}
