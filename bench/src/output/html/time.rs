//! Charts for individual runs: throughput and latency over time, and latency distributions.

use std::fmt::Write;

use hdrhistogram::Histogram;

use super::cases::cases;
use super::chart::{Axis, COLOURS, Chart, Series};
use super::escape::escape;
use super::scale::Range;
use super::tables::have_several_disks;
use crate::outcome::{Interval, OpKind, Outcome};
use crate::output::show;
use crate::output::summary::{active, latencies, per_second, sum, thinned};

/// Maximum number of runs with charts over time.
const RUNS: usize = 16;

/// Maximum number of points in a line over time.
const POINTS: usize = 300;

/// Maximum number of lines in a distribution chart.
const LINES: usize = 12;

/// Number of points in a distribution for each additional nine of the percentile.
const PER_NINE: u32 = 20;

/// Percentiles over time, in the order of their colors.
const PERCENTILES: [f64; 4] = [50.0, 99.0, 99.9, 100.0];

/// Adds throughput and latency over time for each run.
pub(super) fn over_time(page: &mut String, outcomes: &[Outcome]) {
    let with_intervals = |outcome: &&Outcome| outcome.intervals.len() > 1;
    let all = outcomes.iter().filter(with_intervals).count();
    if all == 0 {
        return;
    }
    page.push_str("<h2>Over time</h2>\n");
    if all > RUNS {
        let _ = writeln!(
            page,
            "<p class=\"soft\">These are the first {RUNS} of {all} runs; the CSV file has all.</p>"
        );
    }
    let numbered = outcomes.iter().enumerate();
    let drawn = numbered.filter(|(_, outcome)| with_intervals(outcome));
    for (i, outcome) in drawn.take(RUNS) {
        let _ = write!(
            page,
            "<h3>Run {}: {} <span class=\"soft\">{}{}</span></h3>\n<div class=\"charts\">\n",
            i + 1,
            escape(&show::printable(&outcome.name)),
            escape(&show::options(&outcome.options)),
            disk(outcome, outcomes)
        );
        let intervals = thinned(&outcome.intervals, POINTS);
        throughput(page, outcome, &intervals);
        for kind in active(outcome) {
            percentiles(page, outcome, kind, &intervals);
        }
        page.push_str("</div>\n");
    }
}

/// Returns the disk of a run, which is shown after the options if there are multiple disks.
fn disk(outcome: &Outcome, outcomes: &[Outcome]) -> String {
    match have_several_disks(outcomes) {
        true => format!(" at {}", escape(&show::printable(&outcome.disk()))),
        false => String::new(),
    }
}

/// Returns the middle of an interval, in seconds since the start of the measurement.
fn middle(interval: &Interval) -> f64 {
    (interval.at + interval.length / 2).as_secs_f64()
}

fn seconds(outcome: &Outcome) -> Axis {
    let range = Range::exact(0.0, outcome.runtime.as_secs_f64());
    Axis::new("time in seconds", range, |value| format!("{value:.4}"))
}

fn throughput(page: &mut String, outcome: &Outcome, intervals: &[Interval]) {
    let series: Vec<_> = active(outcome)
        .map(|kind| {
            let rate = |interval: &Interval| {
                let ios = interval.measured[kind as usize].ios();
                (middle(interval), per_second(ios, interval), String::new())
            };
            Series {
                label: kind.name().into(),
                colour: kind as usize,
                dashed: false,
                points: intervals.iter().map(rate).collect(),
                gaps: Vec::new(),
            }
        })
        .collect();
    if series.is_empty() {
        return;
    }
    let values = series.iter().flat_map(|s| s.points.iter().map(|p| p.1));
    Chart {
        title: "Throughput".into(),
        x: seconds(outcome),
        y: Axis::new("IOPS", Range::from_zero(values), show::count),
        series,
        marks: false,
    }
    .write(page);
}

fn percentiles(page: &mut String, outcome: &Outcome, kind: OpKind, intervals: &[Interval]) {
    let measured = intervals.iter().enumerate().filter(|(_, interval)| {
        let latencies = latencies(&interval.measured[kind as usize]);
        !latencies.is_empty()
    });
    let measured: Vec<_> = measured.collect();
    // There is no latency without operations, so don't draw a line across this time.
    let pairs = measured.windows(2).enumerate();
    let gaps = pairs.filter(|(_, pair)| pair[1].0 > pair[0].0 + 1);
    let gaps: Vec<_> = gaps.map(|(i, _)| i + 1).collect();
    let series: Vec<_> = PERCENTILES
        .iter()
        .enumerate()
        .map(|(colour, percent)| {
            let value = |interval: &Interval| {
                let latencies = latencies(&interval.measured[kind as usize]);
                let nanos = latencies.value_at_percentile(*percent);
                (middle(interval), nanos as f64, String::new())
            };
            Series {
                label: match percent {
                    100.0 => "max".into(),
                    percent => show::percentile(*percent),
                },
                colour,
                dashed: false,
                points: measured.iter().map(|(_, i)| value(i)).collect(),
                gaps: gaps.clone(),
            }
        })
        .collect();
    let values = series.iter().flat_map(|s| s.points.iter().map(|p| p.1));
    Chart {
        title: format!("Latency of each {}", kind.name()),
        x: seconds(outcome),
        y: Axis::new("latency (log)", Range::ratios(values), show::time),
        series,
        marks: false,
    }
    .write(page);
}

/// Adds a distribution for each kind of operation, with all cases in one chart.
pub(super) fn distributions(page: &mut String, outcomes: &[Outcome]) {
    if outcomes
        .iter()
        .all(|outcome| active(outcome).next().is_none())
    {
        return;
    }
    page.push_str(
        "<h2>Distribution of latencies</h2>\n<p class=\"soft\">Each line shows the latency that a \
         share of the operations did not exceed, in all rounds of a case. To the right, each mark is ten times as rare.</p>\n",
    );
    for kind in OpKind::ALL {
        distribution(page, outcomes, kind);
    }
}

fn distribution(page: &mut String, outcomes: &[Outcome], kind: OpKind) {
    let used: Vec<_> = cases(outcomes)
        .into_iter()
        .filter_map(|(label, runs)| Some((label, all_rounds(&runs, kind)?)))
        .collect();
    let lines = used.iter().take(LINES).enumerate();
    let series: Vec<_> = lines
        .map(|(line, (label, latencies))| Series {
            label: label.clone(),
            colour: line % COLOURS,
            dashed: line >= COLOURS,
            points: curve(latencies),
            gaps: Vec::new(),
        })
        .collect();
    if series.is_empty() {
        return;
    }
    let points = || series.iter().flat_map(|s| s.points.iter());
    let rarest = points().map(|p| p.0).fold(1.0, f64::max).ceil();
    let more = match used.len().saturating_sub(LINES) {
        0 => String::new(),
        _ => format!(", the first {LINES} of {} cases", used.len()),
    };
    Chart {
        title: format!("Latency of a {}{more}", kind.name()),
        x: Axis {
            label: "share of operations (log)",
            range: Range::exact(0.0, rarest),
            ticks: (0..=rarest as u32)
                .map(|n| (f64::from(n), nines(n)))
                .collect(),
        },
        y: Axis::new(
            "latency (log)",
            Range::ratios(points().map(|p| p.1)),
            show::time,
        ),
        series,
        marks: false,
    }
    .write(page);
}

/// Returns the latencies of one kind of operation in all rounds of a case, or `None` if there are
/// none.
fn all_rounds(runs: &[&Outcome], kind: OpKind) -> Option<Histogram<u64>> {
    let rounds = runs.iter().map(|run| latencies(run.of(kind)));
    sum(rounds.filter(|round| !round.is_empty()))
}

/// Formats the percentile that is exceeded by one in `10^n` operations: 0 %, 90 %, 99 %, 99.9 %.
fn nines(n: u32) -> String {
    match n {
        0 => "0 %".into(),
        1 => "90 %".into(),
        2 => "99 %".into(),
        n => format!("99.{} %", "9".repeat(n as usize - 2)),
    }
}

/// Returns the curve of latencies, where the x-axis is the logarithm of their rarity, up to the
/// maximum latency.
fn curve(latencies: &Histogram<u64>) -> Vec<(f64, f64, String)> {
    let rarest = (latencies.len().max(1) as f64).log10();
    let steps = (rarest * f64::from(PER_NINE)).ceil() as u32;
    (0..=steps)
        .map(|step| {
            let nines = (f64::from(step) / f64::from(PER_NINE)).min(rarest);
            let quantile = 1.0 - 10_f64.powf(-nines);
            let nanos = match step == steps {
                true => latencies.max(),
                false => latencies.value_at_quantile(quantile),
            };
            (nines, nanos as f64, String::new())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::sample;

    #[test]
    fn curve_ends_at_maximum_latency() {
        let mut latencies = Histogram::<u64>::new(3).unwrap();
        for nanos in 1..=1000 {
            latencies.record(nanos).unwrap();
        }
        let curve = curve(&latencies);
        assert_eq!(curve[0].1, 1.0);
        let at = |nines: f64| curve.iter().find(|p| (p.0 - nines).abs() < 1e-9).unwrap().1;
        assert_eq!((at(1.0), at(2.0)), (900.0, 990.0));
        let last = curve.last().unwrap();
        assert!((last.0 - 3.0).abs() < 1e-9 && last.1 == 1000.0, "{last:?}");
    }

    #[test]
    fn lines_skip_idle_intervals() {
        let mut outcome = sample::mixed("a", 1);
        let lines = |outcome: &Outcome| {
            let mut page = String::new();
            percentiles(&mut page, outcome, OpKind::Read, &outcome.intervals);
            let lines = page.split("points=\"").skip(1);
            let lines = lines.map(|line| line.split_once('"').unwrap().0);
            let points = lines.map(|line| line.split_whitespace().count());
            points.collect::<Vec<_>>()
        };
        assert_eq!(lines(&outcome), [11; 4]);
        for stalled in [3, 4, 6] {
            let reads = &mut outcome.intervals[stalled].measured[OpKind::Read as usize];
            reads.service.reset();
        }
        // An isolated point is drawn as a separate line.
        assert_eq!(lines(&outcome), [3, 2, 4].repeat(PERCENTILES.len()));
    }

    #[test]
    fn percentile_labels_use_nines() {
        let shown: Vec<_> = (0..5).map(nines).collect();
        assert_eq!(shown, ["0 %", "90 %", "99 %", "99.9 %", "99.99 %"]);
    }
}
