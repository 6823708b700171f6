//! Renders documents and charts from the results file.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use super::cliffs;
use super::curves::{CURVES, Curve};
use super::pictures;
use super::results::{Comparison, Provenance, Results, Sample, Scaling};
use super::stats::{Interval, Summary};
use super::systems::{SYSTEMS, named};
use super::targets::{Aim, CheckedTarget, Verdict, check_targets};
use super::workloads::{self, WORKLOADS, Workload};
use crate::{Failure, marks};

/// Directory for charts and results, relative to the document's directory.
pub(super) const DIRECTORY: &str = "performance";

const DOCUMENT: &str = "performance.md";

/// Markers in README.md, with the short summary between them.
const MARKS: [&str; 2] = [
    "<!-- cargo xtask bench: begin -->",
    "<!-- cargo xtask bench: end -->",
];

/// Number of ratios to show in the summary from both the best and the worst.
const ENDS: usize = 3;

const HOW: &str = include_str!("../../cases/method.md");

pub(super) fn write(results: &Results, directory: &Path) -> Result<(), Failure> {
    let pictures = directory.join(DIRECTORY);
    fs::create_dir_all(&pictures)?;
    for curve in CURVES.iter() {
        let picture = match &results.scaling {
            Some(scaling) => pictures::draw(curve, scaling)?,
            None => None,
        };
        let path = pictures.join(format!("{}.svg", curve.id));
        match picture {
            Some(svg) => fs::write(path, svg)?,
            // Remove a chart from an earlier run if the results don't contain it.
            None => fs::remove_file(path).or_else(|e| match e.kind() {
                std::io::ErrorKind::NotFound => Ok(()),
                _ => Err(e),
            })?,
        }
    }
    fs::write(directory.join(DOCUMENT), document(results))?;
    Ok(())
}

/// Updates the summary in README.md.
pub(super) fn write_readme(results: &Results, readme: &Path) -> Result<(), Failure> {
    let Some(comparison) = &results.comparison else {
        return Ok(());
    };
    let text = fs::read_to_string(readme)?;
    let text = marks::replaced(&text, &MARKS, &summary(comparison))
        .map_err(|e| format!("{}: {e}", readme.display()))?;
    fs::write(readme, text)?;
    Ok(())
}

pub(super) fn document(results: &Results) -> String {
    let mut out = String::from(
        "# Performance\n\n<!-- Written by `cargo xtask bench` from performance/results.json; \
         `cargo xtask bench --render` writes it again. -->\n",
    );
    if let Some(comparison) = &results.comparison {
        let _ = write!(out, "\n{}", targets(&check_targets(comparison)));
        let _ = write!(out, "\n## Results\n\n{}", results_section(comparison));
    }
    if let Some(scaling) = &results.scaling {
        let _ = write!(out, "\n## Scaling\n\n{}", curves(scaling));
    }
    let _ = write!(out, "\n## How it is measured\n\n{HOW}");
    if let Some(comparison) = &results.comparison {
        let _ = write!(out, "\nTables: {}", measured(&comparison.measured));
        if !comparison.skipped.is_empty() {
            let _ = writeln!(out, "Not measured: {}.", comparison.skipped.join("; "));
        }
    }
    if let Some(scaling) = &results.scaling {
        let _ = write!(out, "\nCurves: {}", measured(&scaling.measured));
    }
    out
}

pub(super) fn targets(checked: &[CheckedTarget]) -> String {
    let mut out = String::from(
        "## Targets\n\n| | compared with | ratio | 95 % | required | aim | |\n| --- | --- | --- | --- | --- | --- | --- |\n",
    );
    // Use the order of the list instead of sorting by result, so that documents can be compared.
    for one in checked {
        let target = &one.target;
        let Interval { low, high } = one.interval;
        let bound = if target.measure.is_better_smaller() {
            "at most"
        } else {
            "at least"
        };
        let aim = match (target.aim, one.of_wire) {
            (Aim::Ratio(aim), _) => aim.to_string(),
            (Aim::OfWire(aim), Some(share)) => format!("{aim} of the wire; is {share:.2}"),
            (Aim::OfWire(aim), None) => format!("{aim} of the wire"),
        };
        let verdict = match one.verdict {
            Verdict::Aimed => "aim reached",
            Verdict::Met => "met",
            Verdict::WithinNoise => "short, within noise",
            Verdict::Missed => "**missed**",
        };
        let _ = writeln!(
            out,
            "| {} | {} | {} | {low:.2} to {high:.2} | {bound} {} | {aim} | {verdict} |",
            subject(one),
            label(target.baseline),
            ratio(one),
            target.at_least
        );
    }
    out
}

pub(super) fn subject(checked: &CheckedTarget) -> String {
    let target = &checked.target;
    let workload = workloads::named(target.workload).map_or(target.workload, |w| w.name);
    let (system, measure) = (label(target.system), target.measure.name());
    format!("{system}: {workload}: {measure}")
}

pub(super) fn ratio(checked: &CheckedTarget) -> String {
    let Summary { median, min, max } = checked.ratio;
    format!("{median:.2} ({min:.2} to {max:.2})")
}

fn label(id: &str) -> &str {
    named(id).map_or(id, |system| system.label)
}

fn results_section(comparison: &Comparison) -> String {
    let mut out = String::new();
    let throughput = |workload: &Workload, sample: &Sample| {
        Some(if workload.is_sequential() {
            sample.bytes_per_second / 1e6
        } else {
            sample.iops / 1e3
        })
    };
    let latency = |_: &Workload, sample: &Sample| sample.p50_ns.map(|ns| ns / 1e3);
    let cpu = |_: &Workload, sample: &Sample| Some((sample.server_ns? + sample.client_ns?) / 1e3);
    let throughput = table(comparison, throughput);
    let (latency, cpu) = (table(comparison, latency), table(comparison, cpu));
    for (about, rows) in [
        (
            "Thousands of operations per second; MB/s of the sequential workloads",
            throughput,
        ),
        ("Median latency, in microseconds", latency),
        (
            "Processor time of both sides for each operation, in microseconds",
            cpu,
        ),
    ] {
        let columns = || WORKLOADS.iter().map(|workload| workload.name);
        let names = columns().collect::<Vec<_>>().join(" | ");
        let line = " --- |".repeat(columns().count());
        // If no client reports a latency, skip this table.
        if !rows.is_empty() {
            let gap = if out.is_empty() { "" } else { "\n" };
            let _ = write!(out, "{gap}{about}:\n\n| | {names} |\n| --- |{line}\n{rows}");
        }
    }
    out
}

fn table(comparison: &Comparison, value: impl Fn(&Workload, &Sample) -> Option<f64>) -> String {
    let mut out = String::new();
    for system in SYSTEMS.iter() {
        let cell = |workload: &Workload| {
            let values = comparison.values(system.id, workload.id, |s| value(workload, s));
            let values: Vec<_> = values.into_iter().map(|(_, value)| value).collect();
            Summary::of(&values).map(|summary| format_summary(&summary))
        };
        let cells: Vec<_> = WORKLOADS.iter().map(cell).collect();
        if cells.iter().any(Option::is_some) {
            let cells = cells.into_iter().map(Option::unwrap_or_default);
            let _ = writeln!(
                out,
                "| {} | {} |",
                system.name,
                cells.collect::<Vec<_>>().join(" | ")
            );
        }
    }
    out
}

fn format_summary(summary: &Summary) -> String {
    let digits = match summary.median {
        m if m >= 100.0 => 0,
        m if m >= 10.0 => 1,
        _ => 2,
    };
    let Summary { median, min, max } = summary;
    format!("{median:.digits$} ({min:.digits$} to {max:.digits$})")
}

/// Renders every measured curve as a chart with a description and a table, and lists the steps that
/// violate its rule.
fn curves(scaling: &Scaling) -> String {
    let steps = cliffs::steps(scaling);
    let mut out = String::new();
    for curve in CURVES.iter() {
        let is_measured = scaling.points.iter().any(|point| point.curve == curve.id);
        if !is_measured {
            continue;
        }
        let gap = if out.is_empty() { "" } else { "\n" };
        let (title, id) = (curve.title, curve.id);
        let _ = writeln!(
            out,
            "{gap}{}\n\n![{title}]({DIRECTORY}/{id}.svg)",
            curve.about
        );
        let _ = write!(out, "\n{}", curve_table(curve, scaling));
        let _ = writeln!(out, "\n{}", curve.rule.about());
        let broken = steps.iter().filter(|s| s.is_of(curve) && s.is_cliff());
        for (at, step) in broken.enumerate() {
            let gap = if at == 0 { "\n" } else { "" };
            let _ = writeln!(out, "{gap}- **{}**", step.describe());
        }
    }
    out
}

/// Renders the medians and ranges of a curve. Uses a row for each point, because there are more
/// points than systems.
fn curve_table(curve: &Curve, scaling: &Scaling) -> String {
    let (unit, scale) = &curve.unit;
    let systems = || curve.systems.iter();
    let names = systems().map(|id| label(id)).collect::<Vec<_>>();
    let line = " --- |".repeat(names.len());
    let mut out = format!(
        "Median of the rounds, in {unit}:\n\n| {} | {} |\n| --- |{line}\n",
        curve.axis,
        names.join(" | ")
    );
    for &x in &curve.xs {
        let cell = |id: &&str| {
            let values = scaling.values(curve.id, id, x);
            let values: Vec<_> = values.into_iter().map(|(_, y)| y / scale).collect();
            Summary::of(&values).map(|summary| format_summary(&summary))
        };
        let cells: Vec<_> = systems().map(cell).collect();
        if cells.iter().any(Option::is_some) {
            let cells: Vec<_> = cells.into_iter().map(Option::unwrap_or_default).collect();
            let _ = writeln!(out, "| {} | {} |", curve.label(x), cells.join(" | "));
        }
    }
    out
}

fn measured(run: &Provenance) -> String {
    format!(
        "{} rounds of {} s each by `{}`, on {}, at commit {}, on a {}, {:.0} % idle before; the file of \
         {} MiB is in a {}. Programs: {}.\n",
        run.rounds,
        run.seconds,
        run.command,
        run.date,
        run.commit,
        run.machine,
        run.idle_percent,
        run.size_mib,
        run.file_system,
        run.programs.join("; ")
    )
}

/// Renders the best and worst ratios for README.md.
fn summary(comparison: &Comparison) -> String {
    let mut checked = check_targets(comparison);
    // Sort by lead instead of ratio: for latency and CPU time, a small ratio is better.
    checked.sort_by(|a, b| b.lead().total_cmp(&a.lead()));
    let worst = checked
        .len()
        .saturating_sub(ENDS)
        .max(ENDS.min(checked.len()));
    let mut out = String::from("| | compared with | ratio |\n| --- | --- | --- |\n");
    let ends = checked.iter().take(ENDS).chain(&checked[worst..]);
    for one in ends {
        let better = if one.target.measure.is_better_smaller() {
            ", smaller is better"
        } else {
            ""
        };
        let baseline = label(one.target.baseline);
        let _ = writeln!(
            out,
            "| {}{better} | {baseline} | {} |",
            subject(one),
            ratio(one)
        );
    }
    let run = &comparison.measured;
    let _ = write!(
        out,
        "\nThe three best and the three worst ratios of {} rounds of `{}`, each with the smallest and the \
         largest of a round, on a {}, which client and server share. [Performance](docs/performance.md) \
         lists all results and targets, and describes the method.",
        run.rounds, run.command, run.machine
    );
    out
}

#[cfg(test)]
mod tests {
    use super::super::results::Point;
    use super::super::results::tests::{provenance, sample};
    use super::super::systems::{ATTACH_NBD, ISER, NBDKIT, SRP};
    use super::super::workloads::{READ_1, READ_32};
    use super::*;
    use crate::sh;

    fn comparison() -> Comparison {
        Comparison {
            measured: provenance(),
            skipped: vec!["wire: no such command".into()],
            samples: vec![
                sample(1, (NBDKIT, READ_32), 100_000.0),
                sample(2, (NBDKIT, READ_32), 200_000.0),
                sample(1, (SRP, READ_32), 130_000.0),
                sample(2, (SRP, READ_32), 280_000.0),
                sample(1, (ATTACH_NBD, READ_32), 50_000.0),
            ],
        }
    }

    #[test]
    fn document_contains_ratios_and_provenance() {
        let results = Results {
            comparison: Some(comparison()),
            scaling: None,
        };
        let text = document(&results);
        for part in [
            // The median of 1.3 and 1.4 is below 1.5 in all rounds.
            "| SRP: 4 KiB random read, depth 32: IOPS | nbdkit | 1.35 (1.30 to 1.40) | 1.30 to 1.40 | at least 1.5 | 2 | **missed** |",
            "| SRP: 4 KiB random read, depth 32: processor time | nbdkit | 0.74 (0.71 to 0.77) | 0.71 to 0.77 | at most 0.6 |",
            "| `nbdkit` file plugin, Unix socket, `fio` nbd engine |  |  | 150 (100 to 200) |  |  |  |",
            "by `cargo xtask bench --rounds 2`, on 2026-11-26, at commit 0123abc",
            "99 % idle",
            "Not measured: wire: no such command.",
        ] {
            assert!(text.contains(part), "{part}\nis not in\n{text}");
        }
        assert!(!text.contains("qemu-nbd`"), "it was not measured");
        // If a client doesn't report a latency, there should not be a heading without a table.
        let mut results = results;
        let samples = results
            .comparison
            .iter_mut()
            .flat_map(|part| &mut part.samples);
        samples.for_each(|sample| sample.p50_ns = None);
        assert!(
            text.contains("Median latency, in")
                && !document(&results).contains("Median latency, in")
        );
        assert!(!text.contains("## Scaling"), "{text}");
    }

    #[test]
    fn pictures_come_and_go_with_their_results() {
        let scratch = sh::Scratch::new("render-test").unwrap();
        let point = Point {
            curve: "loss".into(),
            system: ISER.into(),
            x: 0.5,
            round: 1,
            y: 1000.0,
        };
        let mut results = Results {
            comparison: None,
            scaling: Some(Scaling {
                measured: provenance(),
                points: vec![point],
            }),
        };
        write(&results, scratch.path()).unwrap();
        let picture = scratch.join("performance/loss.svg");
        let text = fs::read_to_string(scratch.join("performance.md")).unwrap();
        assert!(
            text.contains("](performance/loss.svg)") && !text.contains("depth.svg"),
            "{text}"
        );
        // The table contains only measured values and should use the same order as the curve's
        // systems.
        assert!(
            text.contains(
                "| SRP | iSER |\n| --- | --- | --- |\n| 0.5 |  | 1.00 (1.00 to 1.00) |\n"
            ),
            "{text}"
        );
        assert!(
            text.contains("keeps at least 30 %") && !text.contains("- **"),
            "{text}"
        );
        assert!(picture.exists() && !scratch.join("performance/depth.svg").exists());
        results.scaling = None;
        write(&results, scratch.path()).unwrap();
        assert!(!picture.exists());
    }

    #[test]
    fn rule_violation_is_listed_below_table() {
        let point = |x, y| Point {
            curve: "depth".into(),
            system: SRP.into(),
            x,
            round: 1,
            y,
        };
        let scaling = Scaling {
            measured: provenance(),
            points: vec![point(64.0, 200_000.0), point(128.0, 100_000.0)],
        };
        let text = curves(&scaling);
        assert!(
            text.contains("| 128 |  | 100 (100 to 100) |  |  |"),
            "{text}"
        );
        assert!(
            text.ends_with(
                "\n- **depth: SRP: 64 to 128: 0.50 (0.50 to 0.50), required at least 0.9**\n"
            ),
            "{text}"
        );
    }

    #[test]
    fn summary_lists_best_and_worst_once() {
        let mut all = comparison();
        let text = summary(&all);
        // There are fewer ratios than three from each side.
        let rows = |text: &str| {
            text.lines()
                .filter(|line| line.contains("nbdkit |"))
                .count()
        };
        assert_eq!(rows(&text), 3, "{text}");
        let first = text.lines().nth(2).unwrap();
        assert!(
            first.contains("processor time, smaller is better") || first.contains("IOPS"),
            "{text}"
        );
        all.samples.extend([
            sample(1, (NBDKIT, READ_1), 100.0),
            sample(1, (SRP, READ_1), 400.0),
            sample(1, (ISER, READ_1), 50.0),
            sample(1, (ISER, READ_32), 100_000.0),
        ]);
        let text = summary(&all);
        assert_eq!(rows(&text), 6, "{text}");
        let lines: Vec<_> = text.lines().collect();
        assert!(
            lines[2].starts_with("| SRP: 4 KiB random read, depth 1: median latency"),
            "{text}"
        );
        // The worst case is a ratio of 0.5, in either direction.
        assert!(
            lines[6..8]
                .iter()
                .any(|line| line.starts_with("| iSER: 4 KiB random read, depth 1")),
            "{text}"
        );
    }

    #[test]
    fn readme_contains_marks() {
        let text = fs::read_to_string(crate::root().join("README.md")).unwrap();
        assert!(marks::replaced(&text, &MARKS, "new").is_ok());
    }
}
