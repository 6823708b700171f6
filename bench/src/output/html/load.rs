//! Charts that compare multiple runs: latency by load, rounds and CPU usage.

use std::fmt::Write;
use std::time::Duration;

use super::bars::{Bar, Bars};
use super::cases::{cases, labels};
use super::chart::{Axis, COLOURS, Chart, Series};
use super::escape::escape;
use super::scale::Range;
use crate::outcome::{Outcome, Usage};
use crate::output::show;
use crate::output::summary::{
    cpu_per_op, data_ios, data_latencies, median, switches_per_op, total_ios,
};

/// Options that change the load in a sweep.
const LOAD: &[&str] = &[
    "iodepth",
    "numjobs",
    "rate",
    "rate_iops",
    "thinktime",
    "jobs",
    "depth",
    "sessions",
];

/// Maximum number of sweeps in a chart. There are two lines for each sweep.
const SWEEPS: usize = 6;

/// Maximum number of bars in a chart.
const BARS: usize = 40;

/// Outcomes with their numbers.
type Numbered<'a> = Vec<(usize, &'a Outcome)>;

/// Returns reads, writes and trims per second.
fn iops(outcome: &Outcome) -> f64 {
    data_ios(&outcome.measured) as f64 / outcome.runtime.as_secs_f64().max(1e-9)
}

fn loads(outcome: &Outcome) -> impl Iterator<Item = &(String, String)> {
    let load = |(key, _): &&(String, String)| LOAD.contains(&key.as_str());
    outcome.options.iter().filter(load)
}

/// Groups runs by name, disk and options, except for options that change the load. Runs with at
/// least two different loads are a sweep. Rounds with the same load are adjacent.
fn sweeps(outcomes: &[Outcome]) -> Vec<(String, Numbered<'_>)> {
    let mut sweeps: Vec<(String, Numbered<'_>)> = Vec::new();
    for (i, outcome) in outcomes.iter().enumerate() {
        if data_ios(&outcome.measured) == 0 {
            continue;
        }
        let others = |(key, _): &&(String, String)| !LOAD.contains(&key.as_str());
        let kept: Vec<_> = outcome.options.iter().filter(others).cloned().collect();
        let name = format!("{} {}", outcome.name, show::options(&kept));
        let same = |(_, runs): &&mut (String, Numbered<'_>)| {
            let first = runs[0].1;
            let same = first.options.iter().filter(others).eq(&kept);
            same && first.name == outcome.name && first.disk() == outcome.disk()
        };
        match sweeps.iter_mut().find(same) {
            Some((_, runs)) => runs.push((i + 1, outcome)),
            None => sweeps.push((name, vec![(i + 1, outcome)])),
        }
    }
    sweeps.retain(|(_, runs)| {
        let first: Vec<_> = loads(runs[0].1).collect();
        runs.iter()
            .any(|(_, run)| loads(run).collect::<Vec<_>>() != first)
    });
    for (_, runs) in &mut sweeps {
        // Without sorting, the line would return to the first load for each round.
        let mut order: Vec<Vec<_>> = Vec::new();
        runs.sort_by_cached_key(|&(_, run)| {
            let load: Vec<_> = loads(run).collect();
            let known = order.iter().position(|other| *other == load);
            known.unwrap_or_else(|| {
                order.push(load);
                order.len() - 1
            })
        });
    }
    sweeps
}

/// Adds a chart of latency by throughput if there are sweeps.
pub(super) fn latency_against_load(page: &mut String, outcomes: &[Outcome]) {
    let sweeps = sweeps(outcomes);
    if sweeps.is_empty() {
        return;
    }
    page.push_str(
        "<h2>Latency against load</h2>\n<p class=\"soft\">Each point is a run; lines follow the \
         order of the sweep. Dashed lines are medians, others 99th percentiles.</p>\n",
    );
    if sweeps.len() > SWEEPS {
        let all = sweeps.len();
        let _ = writeln!(
            page,
            "<p class=\"soft\">The first {SWEEPS} of {all} sweeps.</p>"
        );
    }
    let names = labels(sweeps.iter().map(|(name, _)| name.as_str()));
    let mut series = Vec::new();
    for (colour, ((_, runs), name)) in sweeps.iter().zip(names).take(SWEEPS).enumerate() {
        for (percent, dashed) in [(99.0, false), (50.0, true)] {
            let points = runs.iter().filter_map(|(i, run)| point(*i, run, percent));
            series.push(Series {
                label: format!("{} {name}", show::percentile(percent)),
                colour: colour % COLOURS,
                dashed,
                points: points.collect(),
                gaps: Vec::new(),
            });
        }
    }
    let points = || series.iter().flat_map(|s| s.points.iter());
    let (x, y) = (
        Range::from_zero(points().map(|p| p.0)),
        Range::ratios(points().map(|p| p.1)),
    );
    Chart {
        title: "Latency by throughput".into(),
        x: Axis::new("IOPS", x, show::count),
        y: Axis::new("latency (log)", y, show::time),
        series,
        marks: true,
    }
    .write(page);
}

fn point(number: usize, run: &Outcome, percent: f64) -> Option<(f64, f64, String)> {
    let nanos = data_latencies(&run.measured)?.value_at_percentile(percent) as f64;
    let loads: Vec<_> = loads(run).cloned().collect();
    let about = format!(
        "run {number}, {}: {} IOPS, {} {}",
        show::options(&loads),
        show::count(iops(run)),
        show::percentile(percent),
        show::time(nanos)
    );
    Some((iops(run), nanos, about))
}

/// If there is more than one run, adds bars for throughput and latency, with a mark for each round.
pub(super) fn rounds(page: &mut String, outcomes: &[Outcome]) {
    let cases = cases(outcomes);
    if outcomes.len() < 2 || cases.is_empty() {
        return;
    }
    page.push_str(
        "<h2>Comparison</h2>\n<p class=\"soft\">A bar is the median of the rounds of a case; circles are \
         the rounds.</p>\n",
    );
    cut(page, cases.len());
    let p99 = |run: &Outcome| {
        let latencies = data_latencies(&run.measured);
        latencies.map_or(0.0, |all| all.value_at_percentile(99.0) as f64)
    };
    let bars = |title: &str, show: fn(f64) -> String, colour, of: &dyn Fn(&Outcome) -> f64| Bars {
        title: title.into(),
        show,
        bars: cases
            .iter()
            .take(BARS)
            .map(|(label, runs)| Bar {
                label: label.clone(),
                colour,
                rounds: runs.iter().map(|run| of(run)).collect(),
            })
            .collect(),
    };
    bars("IOPS", show::count, 0, &iops).write(page);
    bars("99th percentile of latency", show::time, 1, &p99).write(page);
}

fn cut(page: &mut String, all: usize) {
    if all > BARS {
        let _ = writeln!(
            page,
            "<p class=\"soft\">The first {BARS} of {all} cases.</p>"
        );
    }
}

/// Adds CPU time and context switches of both sides.
pub(super) fn costs(page: &mut String, outcomes: &[Outcome]) {
    let cases = cases(outcomes);
    if cases.is_empty() {
        return;
    }
    page.push_str("<h2>Costs</h2>\n");
    cut(page, cases.len());
    let sides: [(&str, Side); 2] = [
        ("client", |run| Some(&run.client)),
        ("server", |run| run.server.as_ref()),
    ];
    let mut bars = Vec::new();
    for (label, runs) in cases.iter().take(BARS) {
        for (colour, (side, usage)) in sides.iter().enumerate() {
            let per_op = |run: &&Outcome| Some(cpu_per_op(usage(run)?, total_ios(run)));
            let rounds: Vec<f64> = runs.iter().filter_map(per_op).collect();
            if !rounds.is_empty() {
                bars.push(Bar {
                    label: format!("{side}, {label}"),
                    colour: 2 + colour,
                    rounds,
                });
            }
        }
    }
    Bars {
        title: "CPU time per operation".into(),
        show: show::time,
        bars,
    }
    .write(page);
    table(page, &cases, &sides);
}

/// Returns the usage of one side during a run, if available.
type Side = fn(&Outcome) -> Option<&Usage>;

fn table(page: &mut String, cases: &[(String, Vec<&Outcome>)], sides: &[(&str, Side); 2]) {
    page.push_str(
        "<div class=\"scroll\"><table><caption>Medians of the rounds, per operation of any \
         kind.</caption>\n<thead><tr><th class=\"t\" scope=\"col\">Case</th>\
         <th class=\"t\" scope=\"col\">Side</th><th scope=\"col\">User</th>\
         <th scope=\"col\">Kernel</th><th scope=\"col\">Context switches</th></tr></thead>\n<tbody>\n",
    );
    for (label, runs) in cases.iter().take(BARS) {
        for (side, usage) in sides {
            let of = |value: &dyn Fn(&Usage, u64) -> f64| {
                let rounds = runs
                    .iter()
                    .filter_map(|run| Some(value(usage(run)?, total_ios(run))));
                let rounds: Vec<f64> = rounds.collect();
                median(&rounds)
            };
            if runs.iter().all(|run| usage(run).is_none()) {
                continue;
            }
            let per_op = |time: Duration, ios: u64| time.as_nanos() as f64 / ios as f64;
            let _ = writeln!(
                page,
                "<tr><th class=\"t\" scope=\"row\">{}</th><td class=\"t\">{side}</td><td>{}</td>\
                 <td>{}</td><td>{}</td></tr>",
                escape(label),
                show::time(of(&|usage, ios| per_op(usage.user, ios))),
                show::time(of(&|usage, ios| per_op(usage.system, ios))),
                show::count(of(&switches_per_op))
            );
        }
    }
    page.push_str("</tbody></table></div>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::sample;

    #[test]
    fn block_sizes_separate_sweeps() {
        let mut outcomes = sample::sweep("4k", &[1, 4, 16]);
        outcomes.extend(sample::sweep("64k", &[1, 4]));
        outcomes.push(sample::open_loop("alone", 1));
        let found = sweeps(&outcomes);
        let numbers: Vec<Vec<usize>> = found
            .iter()
            .map(|(_, runs)| runs.iter().map(|(i, _)| *i).collect())
            .collect();
        assert_eq!(numbers, [vec![1, 2, 3], vec![4, 5]]);
        let names = labels(found.iter().map(|(name, _)| name.as_str()));
        assert_eq!(names, ["bs=4k", "bs=64k"]);
    }

    #[test]
    fn hidden_options_separate_sweeps() {
        let with = |seed: &str, depth: &str| {
            let pair = |key: &str, value: String| (key.to_owned(), value);
            Outcome {
                options: vec![
                    pair("bssplit", "4k/1:".repeat(200)),
                    pair("randseed", seed.to_owned()),
                    pair("iodepth", depth.to_owned()),
                ],
                ..sample::mixed("a", 1)
            }
        };
        let outcomes = [
            with("1", "1"),
            with("2", "1"),
            with("1", "2"),
            with("2", "2"),
        ];
        let found = sweeps(&outcomes);
        let numbers: Vec<Vec<usize>> = found
            .iter()
            .map(|(_, runs)| runs.iter().map(|(i, _)| *i).collect())
            .collect();
        assert_eq!(numbers, [vec![1, 3], vec![2, 4]]);
    }

    #[test]
    fn sweep_groups_rounds_by_load() {
        let mut outcomes = sample::sweep("4k", &[1, 4, 16]);
        outcomes.extend(sample::sweep("4k", &[1, 4, 16]));
        let found = sweeps(&outcomes);
        let numbers: Vec<_> = found[0].1.iter().map(|(i, _)| *i).collect();
        assert_eq!(numbers, [1, 4, 2, 5, 3, 6]);
    }

    #[test]
    fn rounds_are_no_sweep() {
        let outcomes = [sample::mixed("a", 1), sample::mixed("a", 2)];
        assert!(sweeps(&outcomes).is_empty());
    }
}
