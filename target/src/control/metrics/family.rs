//! A metric, its help and its series.

use prometheus::proto::{
    Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType,
};

use crate::stats::{BUCKETS, Times, bound};

/// Labels with their values.
pub(super) type Labels<'a> = &'a [(&'a str, &'a str)];

/// A metric as it is filled.
pub(super) struct Family {
    kind: MetricType,
    family: MetricFamily,
}

impl Family {
    /// Family without series.
    pub(super) fn new(kind: MetricType, name: &str, help: &str) -> Self {
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(kind);
        Self { kind, family }
    }

    /// A number that only grows.
    pub(super) fn counter(name: &str, help: &str) -> Self {
        Self::new(MetricType::COUNTER, name, help)
    }

    /// Family of values that rise and fall.
    pub(super) fn gauge(name: &str, help: &str) -> Self {
        Self::new(MetricType::GAUGE, name, help)
    }

    /// Family of histograms of durations.
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

    /// A series of a counter or gauge.
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

    /// A series of a histogram.
    pub(super) fn times(&mut self, labels: Labels<'_>, times: &Times) {
        let mut histogram = Histogram::default();
        let mut count = 0;
        let mut buckets = Vec::with_capacity(BUCKETS);
        for (place, n) in times.buckets.iter().enumerate() {
            count += n;
            // The one without a bound is the count, which the encoder adds.
            if let Some(nanos) = bound(place) {
                let mut bucket = Bucket::default();
                bucket.set_upper_bound(seconds(nanos));
                bucket.set_cumulative_count(count);
                buckets.push(bucket);
            }
        }
        histogram.set_bucket(buckets);
        histogram.set_sample_count(count);
        histogram.set_sample_sum(seconds(times.nanos));
        let mut metric = Metric::default();
        metric.set_histogram(histogram);
        self.push(labels, metric);
    }

    /// For the encoder; nothing of a family without series.
    pub(super) fn finish(self) -> Option<MetricFamily> {
        let has_series = !self.family.get_metric().is_empty();
        has_series.then_some(self.family)
    }
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}
