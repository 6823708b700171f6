//! Output of comparisons as a table.

use std::io::{self, Write};

use super::{Case, Comparison, Metric, Missing, Unit, Unmatched, Verdict, stats};
use crate::output::show;

/// Writes a table for each case, followed by the cases that are only available on one side.
///
/// # Errors
/// Returns errors from `out`.
pub fn write(out: &mut dyn Write, comparison: &Comparison) -> io::Result<()> {
    for case in &comparison.cases {
        write_case(out, case)?;
        writeln!(out)?;
    }
    for Unmatched {
        side,
        name,
        options,
    } in &comparison.unmatched
    {
        let (name, options) = (show::printable(name), show::options(options));
        writeln!(out, "only in {side}: {name} ({options})")?;
    }
    if comparison.cases.is_empty() {
        return writeln!(
            out,
            "no case is in both files; use --by name if options differ"
        );
    }
    writeln!(
        out,
        "Ratios are of B to A. If the interval at {:.0} % contains 1, there is no difference \
         beyond noise; one result in {:.0} differs by chance.",
        100.0 * comparison.confidence,
        1.0 / (1.0 - comparison.confidence)
    )
}

fn write_case(out: &mut dyn Write, case: &Case) -> io::Result<()> {
    let (name, options) = (show::printable(&case.name), show::options(&case.options));
    let (a, b) = case.rounds;
    writeln!(out, "{name} ({options}), rounds: {a} of A, {b} of B")?;
    for (side, disk) in ['A', 'B'].into_iter().zip(&case.disks) {
        if let Some(disk) = disk {
            writeln!(out, "  {side}: {}", show::printable(disk))?;
        }
    }
    for (side, warnings) in ['A', 'B'].into_iter().zip(&case.warnings) {
        for warning in warnings {
            writeln!(out, "  {side}: {}", show::printable(warning))?;
        }
    }
    if stats::cut(a, b).is_none() {
        writeln!(
            out,
            "  too few rounds: {:.0} % requires 4 and 4, 3 and 5, or 2 and 8",
            100.0 * stats::CONFIDENCE
        )?;
    }
    writeln!(
        out,
        "  {:<22}{:>12}{:>12}{:>9}  {:<16}  verdict",
        "figure", "A", "B", "ratio", "interval"
    )?;
    for metric in &case.metrics {
        let interval = match metric.interval {
            Some((low, high)) => format!("{low:.3} to {high:.3}"),
            None => "-".into(),
        };
        writeln!(
            out,
            "  {:<22}{:>12}{:>12}{:>9.3}  {interval:<16}  {}",
            metric.name,
            value(metric.a, metric.unit),
            value(metric.b, metric.unit),
            metric.ratio,
            words(metric)
        )?;
    }
    for Missing { what, side, rounds } in &case.missing {
        let rounds = match rounds {
            1 => format!("a round of {side} has"),
            n => format!("{n} rounds of {side} have"),
        };
        writeln!(out, "  not compared: {rounds} no {what}")?;
    }
    Ok(())
}

fn value(value: f64, unit: Unit) -> String {
    match unit {
        Unit::PerSecond | Unit::SwitchesPerOp => show::count(value),
        Unit::BytesPerSecond => show::rate(value),
        Unit::Latency | Unit::CpuPerOp => show::time(value),
    }
}

fn words(metric: &Metric) -> &'static str {
    let cost = matches!(metric.unit, Unit::CpuPerOp | Unit::SwitchesPerOp);
    match (metric.verdict, cost) {
        (Verdict::Better, false) => "faster",
        (Verdict::Worse, false) => "slower",
        (Verdict::Better, true) => "less",
        (Verdict::Worse, true) => "more",
        (Verdict::NoDifference, _) => "no difference beyond noise",
        (Verdict::TooFewRounds, _) => "too few rounds",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metric(name: &str, unit: Unit, interval: Option<(f64, f64)>, verdict: Verdict) -> Metric {
        Metric {
            name: name.into(),
            unit,
            a: 1000.0,
            b: 1100.0,
            ratio: 1.1,
            interval,
            verdict,
        }
    }

    #[test]
    fn table_describes_verdicts() {
        let comparison = Comparison {
            confidence: 0.95,
            cases: vec![Case {
                name: "job\x1b[2J".into(),
                options: vec![("bs".into(), "4096".into())],
                disks: [Some("srp://h/0 over roce-h".into()), None],
                rounds: (4, 5),
                metrics: vec![
                    metric(
                        "read iops",
                        Unit::PerSecond,
                        Some((1.05, 1.15)),
                        Verdict::Better,
                    ),
                    metric(
                        "server cpu per op",
                        Unit::CpuPerOp,
                        Some((1.05, 1.15)),
                        Verdict::Worse,
                    ),
                    metric(
                        "read p99",
                        Unit::Latency,
                        Some((0.9, 1.3)),
                        Verdict::NoDifference,
                    ),
                ],
                missing: vec![
                    Missing {
                        what: "trims".into(),
                        side: 'A',
                        rounds: 1,
                    },
                    Missing {
                        what: "flushes".into(),
                        side: 'B',
                        rounds: 2,
                    },
                ],
                warnings: [Vec::new(), vec!["warning: no\x1b flushes".into()]],
            }],
            unmatched: vec![Unmatched {
                side: 'B',
                name: "other".into(),
                options: Vec::new(),
            }],
        };
        let mut out = Vec::new();
        write(&mut out, &comparison).unwrap();
        let text = String::from_utf8(out).unwrap();
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<_> = text.lines().map(words).collect();
        assert_eq!(lines[0], "job\u{fffd}[2J (bs=4096), rounds: 4 of A, 5 of B");
        assert_eq!(lines[1], "A: srp://h/0 over roce-h");
        assert_eq!(lines[2], "B: warning: no\u{fffd} flushes");
        assert_eq!(
            lines[4],
            "read iops 1.00k 1.10k 1.100 1.050 to 1.150 faster"
        );
        assert_eq!(
            lines[5],
            "server cpu per op 1.00 us 1.10 us 1.100 1.050 to 1.150 more"
        );
        assert!(lines[6].ends_with("0.900 to 1.300 no difference beyond noise"));
        assert_eq!(lines[7], "not compared: a round of A has no trims");
        assert_eq!(lines[8], "not compared: 2 rounds of B have no flushes");
        assert!(lines.contains(&"only in B: other ()".to_owned()));
    }

    #[test]
    fn few_rounds_are_explained() {
        let comparison = Comparison {
            confidence: 0.95,
            cases: vec![Case {
                name: "job".into(),
                options: Vec::new(),
                disks: [None, None],
                rounds: (3, 3),
                metrics: vec![metric(
                    "read iops",
                    Unit::PerSecond,
                    None,
                    Verdict::TooFewRounds,
                )],
                missing: Vec::new(),
                warnings: [Vec::new(), Vec::new()],
            }],
            unmatched: Vec::new(),
        };
        let mut out = Vec::new();
        write(&mut out, &comparison).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(
            text.contains("too few rounds: 95 % requires 4 and 4, 3 and 5, or 2 and 8"),
            "{text}"
        );
        assert!(text.contains("  -  "), "{text}");
    }
}
