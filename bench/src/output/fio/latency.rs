//! Latency distributions in fio's format.
//!
//! fio uses 64 bins for each power of two and 29 powers of two. Times below 128 ns each have their
//! own bin (see `stat.h` in fio). A bin is identified by its midpoint. Our histograms use 1024 bins
//! for each power of two. As these are subdivisions of fio's bins, the conversion is exact.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::outcome::PERCENTILES;

/// Number of bits that identify a bin within a power of two.
const BIN_BITS: u32 = 6;

/// Start of the last bin, which also contains all larger values. This is bin 63 for the range
/// starting at 2^33 ns.
const LAST_BIN: u64 = (64 + 63) << 27;

/// `slat_ns`, `clat_ns` or `lat_ns`.
#[derive(Default, Serialize)]
pub(super) struct Latency {
    min: u64,
    max: u64,
    mean: f64,
    stddev: f64,
    #[serde(rename = "N")]
    n: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    percentile: Option<Map<String, Value>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bins: Option<BTreeMap<u64, u64>>,
}

impl Latency {
    /// Returns the mean, standard deviation and extremes.
    pub(super) fn summary(values: &Histogram<u64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        Self {
            min: values.min(),
            max: values.max(),
            mean: values.mean(),
            stddev: values.stdev(),
            n: values.len(),
            percentile: None,
            bins: None,
        }
    }

    /// Also includes percentiles, and bins for the `json+` format. As in fio, these are omitted if
    /// there are no samples.
    pub(super) fn distribution(values: &Histogram<u64>, with_bins: bool) -> Self {
        let mut latency = Self::summary(values);
        if values.is_empty() {
            return latency;
        }
        let at = |percent: f64| {
            let value = values.value_at_percentile(percent);
            (format!("{percent:.6}"), Value::from(value))
        };
        latency.percentile = Some(PERCENTILES.into_iter().map(at).collect());
        latency.bins = with_bins.then(|| bins(values));
        latency
    }
}

fn bins(values: &Histogram<u64>) -> BTreeMap<u64, u64> {
    let mut bins = BTreeMap::new();
    for bin in values.iter_recorded() {
        *bins.entry(midpoint(bin.value_iterated_to())).or_default() += bin.count_at_value();
    }
    bins
}

/// Returns the midpoint of the bin used by fio for a time in nanoseconds.
fn midpoint(nanos: u64) -> u64 {
    let nanos = nanos.min(LAST_BIN);
    match nanos.checked_ilog2() {
        Some(log) if log > BIN_BITS => {
            let width = 1 << (log - BIN_BITS);
            (nanos & !(width - 1)) + width / 2
        }
        _ => nanos,
    }
}

/// Percentage of operations for each range of latencies: `latency_ns`, `latency_us` and
/// `latency_ms`.
///
/// The key is the upper bound (exclusive), and the previous key is the lower bound. Latencies of at
/// least a microsecond are only included in `latency_us`, and those of at least a millisecond only
/// in `latency_ms`.
pub(super) struct Shares {
    pub(super) ns: Map<String, Value>,
    pub(super) us: Map<String, Value>,
    pub(super) ms: Map<String, Value>,
}

/// Keys of each table. There are two additional keys for milliseconds.
const BOUNDS: [u64; 10] = [2, 4, 10, 20, 50, 100, 250, 500, 750, 1000];

impl Shares {
    pub(super) fn of<'a>(histograms: impl Iterator<Item = &'a Histogram<u64>>) -> Self {
        let mut counts = [[0_u64; BOUNDS.len() + 2]; 3];
        let mut total = 0;
        for histogram in histograms {
            total += histogram.len();
            for bin in histogram.iter_recorded() {
                let (table, row) = Self::place(bin.value_iterated_to());
                counts[table][row] += bin.count_at_value();
            }
        }
        let share = |count: u64| match total {
            0 => 0.0,
            total => 100.0 * count as f64 / total as f64,
        };
        let table = |counts: &[u64]| {
            let keys = BOUNDS.iter().map(u64::to_string);
            let keys = keys.chain(["2000".into(), ">=2000".into()]);
            keys.zip(counts)
                .map(|(key, count)| (key, Value::from(share(*count))))
                .collect()
        };
        Self {
            ns: table(&counts[0][..BOUNDS.len()]),
            us: table(&counts[1][..BOUNDS.len()]),
            ms: table(&counts[2]),
        }
    }

    /// Returns the table and row for a latency.
    fn place(nanos: u64) -> (usize, usize) {
        let (table, value) = match nanos {
            0..1_000 => (0, nanos),
            1_000..1_000_000 => (1, nanos / 1_000),
            _ => (2, nanos / 1_000_000),
        };
        let bounds = BOUNDS.iter().chain(&[2000]);
        (table, bounds.take_while(|bound| **bound <= value).count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_match_fio_midpoints() {
        // From the output of fio 3.33, except for the last two, which are the bounds of the last
        // bin.
        for (nanos, expected) in [
            (0, 0),
            (127, 127),
            (128, 129),
            (207, 207),
            (223, 223),
            (262, 262),
            (940, 940),
            (947, 948),
            (19_376, 19_328),
            (50_824, 50_944),
            (LAST_BIN, 17_112_760_320),
            (u64::MAX, 17_112_760_320),
        ] {
            assert_eq!(midpoint(nanos), expected, "{nanos}");
        }
    }

    #[test]
    fn bin_conversion_is_exact() {
        let mut histogram = Histogram::<u64>::new(3).unwrap();
        let mut expected = BTreeMap::new();
        let mut nanos = 1_u64;
        while nanos < 40_000_000_000 {
            histogram.record(nanos).unwrap();
            *expected.entry(midpoint(nanos)).or_insert(0) += 1;
            nanos += nanos / 37 + 1;
        }
        assert_eq!(bins(&histogram), expected);
    }

    #[test]
    fn shares_are_counted_below_their_keys() {
        let mut histogram = Histogram::<u64>::new(3).unwrap();
        for nanos in [1, 999, 1_000, 1_999, 3_000, 9_000_000, 2_500_000_000] {
            histogram.record(nanos).unwrap();
        }
        histogram.record(2_500_000_000).unwrap();
        let shares = Shares::of([&histogram].into_iter());
        let found = |table: &Map<String, Value>| -> Vec<(String, f64)> {
            let shares = table.iter().map(|(k, v)| (k.clone(), v.as_f64().unwrap()));
            shares.filter(|(_, share)| *share > 0.0).collect()
        };
        let one = 12.5;
        assert_eq!(found(&shares.ns), [("2".into(), one), ("1000".into(), one)]);
        assert_eq!(
            found(&shares.us),
            [("2".into(), 2.0 * one), ("4".into(), one)]
        );
        assert_eq!(
            found(&shares.ms),
            [("10".into(), one), (">=2000".into(), 2.0 * one)]
        );
        assert_eq!(
            (shares.ns.len(), shares.us.len(), shares.ms.len()),
            (10, 10, 12)
        );
    }

    #[test]
    fn empty_latencies_omit_percentiles() {
        let empty = Histogram::<u64>::new(3).unwrap();
        let json = serde_json::to_value(Latency::distribution(&empty, true)).unwrap();
        let expected = serde_json::json!({"min": 0, "max": 0, "mean": 0.0, "stddev": 0.0, "N": 0});
        assert_eq!(json, expected);
    }
}
