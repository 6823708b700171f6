//! The line that shows the last interval while a run goes on.

use super::figures::{data_ios, data_latencies, per_second, total_bytes};
use super::show;
use crate::bench::outcome::{Interval, OpKind};

/// Throughput and percentiles of an interval, on one line. Flushes are counted apart.
#[must_use]
pub fn line(interval: &Interval) -> String {
    let mut line = format!(
        "{:>6} IOPS  {:>11}",
        show::count(per_second(data_ios(&interval.measured), interval)),
        show::rate(per_second(total_bytes(&interval.measured), interval)),
    );
    if let Some(latencies) = data_latencies(&interval.measured) {
        for percent in [50.0, 99.0] {
            let nanos = latencies.value_at_percentile(percent);
            let shown = show::time(nanos as f64);
            line += &format!("  {} {shown:>7}", show::percentile(percent));
        }
    }
    let flushes = interval.measured[OpKind::Flush as usize].ios();
    if flushes > 0 {
        let rate = show::count(per_second(flushes, interval));
        line += &format!("  {rate} flushes/s");
    }
    line
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bench::output::sample;

    #[test]
    fn the_line_has_the_figures_of_the_interval() {
        let mut interval = sample::mixed("a", 1).intervals[3].clone();
        for measured in &mut interval.measured {
            measured.bytes = 0;
            measured.service.reset();
        }
        let reads = &mut interval.measured[OpKind::Read as usize];
        reads.bytes = 3 << 20;
        reads.service.record_n(50_000, 98).unwrap();
        reads.service.record_n(200_000, 2).unwrap();
        interval.length = Duration::from_millis(500);
        let shown = line(&interval);
        let words: Vec<_> = shown.split_whitespace().collect();
        assert_eq!(
            words.join(" "),
            "200 IOPS 6.00 MiB/s p50 50.0 us p99 200 us"
        );
        let flushes = &mut interval.measured[OpKind::Flush as usize];
        flushes.service.record(1_000_000).unwrap();
        assert!(
            line(&interval).ends_with("  2.00 flushes/s")
                || line(&interval).ends_with("  2 flushes/s")
        );
    }

    #[test]
    fn an_interval_without_operations_has_no_percentiles() {
        let mut interval = sample::open_loop("a", 1).intervals[0].clone();
        for measured in &mut interval.measured {
            measured.bytes = 0;
            measured.service.reset();
            measured.response = None;
        }
        let shown = line(&interval);
        assert!(
            shown.contains("0 IOPS") && !shown.contains("p50"),
            "{shown}"
        );
    }
}
