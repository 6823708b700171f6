//! Results for terminals. If there are many outcomes, these are shown in a table, otherwise in a
//! separate block each.

use std::io::{self, Write};
use std::time::Duration;

use hdrhistogram::Histogram;

use super::show;
use super::summary::{active, cpu_per_op, latencies, switches_per_op, total_ios};
use crate::outcome::{OpKind, Outcome, Usage};

/// Maximum number of outcomes for separate blocks.
const BLOCKS: usize = 3;

/// Writes all outcomes.
///
/// # Errors
/// Returns errors from `out`.
pub fn write(out: &mut dyn Write, outcomes: &[Outcome]) -> io::Result<()> {
    if outcomes.len() > BLOCKS {
        return table(out, outcomes);
    }
    for (i, outcome) in outcomes.iter().enumerate() {
        if i > 0 {
            writeln!(out)?;
        }
        block(out, outcome)?;
    }
    Ok(())
}

fn block(out: &mut dyn Write, outcome: &Outcome) -> io::Result<()> {
    writeln!(
        out,
        "{}: {}, {}: {}",
        show::printable(&outcome.name),
        show::printable(&outcome.disk()),
        seconds(outcome.runtime),
        show::options(&outcome.options)
    )?;
    for kind in active(outcome) {
        kind_lines(out, outcome, kind)?;
    }
    let ios = total_ios(outcome);
    if ios == 0 {
        writeln!(out, "  no operation completed")?;
    }
    writeln!(out, "  client  {}", costs(&outcome.client, ios))?;
    if let Some(server) = &outcome.server {
        writeln!(out, "  server  {}", costs(server, ios))?;
    }
    for note in notes(outcome) {
        writeln!(out, "  {note}")?;
    }
    Ok(())
}

fn kind_lines(out: &mut dyn Write, outcome: &Outcome, kind: OpKind) -> io::Result<()> {
    writeln!(
        out,
        "  {:<5}  {} IOPS{}",
        kind.name(),
        show::count(outcome.iops(kind)),
        match kind {
            OpKind::Flush => String::new(),
            _ => format!(", {}", bandwidth(outcome, kind)),
        }
    )?;
    let measured = outcome.of(kind);
    match &measured.response {
        Some(response) => {
            writeln!(out, "         response  {}", distribution(response))?;
            writeln!(
                out,
                "         service   {}",
                distribution(&measured.service)
            )
        }
        None => writeln!(out, "         {}", distribution(&measured.service)),
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

fn distribution(latencies: &Histogram<u64>) -> String {
    let mut line = format!(
        "min {}, mean {}",
        show::time(latencies.min() as f64),
        show::time(latencies.mean())
    );
    for percent in [50.0, 90.0, 99.0, 99.9, 99.99] {
        let nanos = latencies.value_at_percentile(percent) as f64;
        line += &format!(", {} {}", show::percentile(percent), show::time(nanos));
    }
    line + &format!(", max {}", show::time(latencies.max() as f64))
}

fn costs(usage: &Usage, ios: u64) -> String {
    format!(
        "{} of CPU and {} context switches per operation",
        show::time(cpu_per_op(usage, ios)),
        show::count(switches_per_op(usage, ios))
    )
}

/// Returns notes that are required to interpret the results of an outcome.
pub(super) fn notes(outcome: &Outcome) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(verified) = &outcome.verified {
        notes.push(format!("verified: {} blocks, no mismatch", verified.blocks));
        if verified.torn > 0 {
            notes.push(format!(
                "{} blocks of interrupted writes contain old and new data, as permitted for disks",
                verified.torn
            ));
        }
    }
    if outcome.unstable {
        notes.push(
            "warning: the disk lacks flushes or fua: fsync, end_fsync or fua had no effect".into(),
        );
    }
    if outcome.not_started > 0 {
        notes.push(format!(
            "warning: about {} operations were due but not started at the end: the rate was not \
             reached",
            outcome.not_started
        ));
    }
    if let Some(share) = hole_share(outcome) {
        notes.push(format!(
            "warning: {share} of the region is not allocated; reads of it do not access the disk"
        ));
    }
    notes
}

/// Returns the unallocated percentage of the region if there were any reads.
fn hole_share(outcome: &Outcome) -> Option<String> {
    let holes = outcome
        .holes
        .filter(|holes| holes.bytes > 0 && holes.of > 0)?;
    (outcome.of(OpKind::Read).ios() > 0)
        .then(|| show::percent(holes.bytes as f64 / holes.of as f64))
}

/// Returns the names of options with more than one value, in the order of their first occurrence.
fn varying(outcomes: &[Outcome]) -> Vec<&str> {
    let mut keys: Vec<&str> = Vec::new();
    for (key, _) in outcomes.iter().flat_map(|outcome| &outcome.options) {
        if !keys.contains(&key.as_str()) {
            keys.push(key);
        }
    }
    keys.retain(|key| {
        let mut values = outcomes.iter().map(|outcome| option(outcome, key));
        let first = values.next();
        values.any(|value| Some(value) != first)
    });
    keys
}

/// Returns the value of an option, or an empty string if it isn't set.
fn option<'a>(outcome: &'a Outcome, key: &str) -> &'a str {
    let found = outcome.options.iter().find(|(known, _)| known == key);
    found.map_or("", |(_, value)| value)
}

/// Writes a row for each outcome and kind of operation, including options that differ.
fn table(out: &mut dyn Write, outcomes: &[Outcome]) -> io::Result<()> {
    let varying = varying(outcomes);
    let names = outcomes.iter().any(|o| o.name != outcomes[0].name);
    let disks = outcomes.iter().any(|o| o.disk() != outcomes[0].disk());
    let mut head: Vec<String> = Vec::new();
    head.extend(names.then(|| "job".into()));
    head.extend(disks.then(|| "disk".into()));
    head.extend(varying.iter().map(|key| show::printable(key)));
    head.push("kind".into());
    let texts = head.len();
    head.extend(COLUMNS.map(str::to_owned));
    let mut rows = vec![head];
    for outcome in outcomes {
        for kind in active(outcome) {
            let mut row = Vec::new();
            row.extend(names.then(|| show::printable(&outcome.name)));
            row.extend(disks.then(|| show::printable(&outcome.disk())));
            let options = varying.iter().map(|key| option(outcome, key));
            row.extend(options.map(show::printable));
            row.push(kind.name().into());
            row.extend(columns(outcome, kind));
            rows.push(row);
        }
    }
    aligned(out, &rows, texts)?;
    let notes = outcomes.iter().flat_map(|outcome| {
        let name = show::printable(&outcome.name);
        notes(outcome)
            .into_iter()
            .map(move |note| format!("{name}: {note}"))
    });
    let mut notes: Vec<_> = notes.collect();
    // Most rounds of a case have the same notes.
    notes.sort();
    notes.dedup();
    for note in notes {
        writeln!(out, "{note}")?;
    }
    Ok(())
}

/// Formats bytes per second. Flushes don't transfer any.
pub(super) fn bandwidth(outcome: &Outcome, kind: OpKind) -> String {
    match kind {
        OpKind::Flush => "-".into(),
        _ => show::rate(outcome.bytes_per_second(kind)),
    }
}

/// Column names for results.
const COLUMNS: [&str; 9] = [
    "IOPS",
    "bandwidth",
    "mean",
    "p50",
    "p99",
    "p99.9",
    "max",
    "client CPU/op",
    "server CPU/op",
];

fn columns(outcome: &Outcome, kind: OpKind) -> [String; 9] {
    let latencies = latencies(outcome.of(kind));
    let at = |percent| show::time(latencies.value_at_percentile(percent) as f64);
    let ios = total_ios(outcome);
    let server = outcome.server.as_ref();
    [
        show::count(outcome.iops(kind)),
        bandwidth(outcome, kind),
        show::time(latencies.mean()),
        at(50.0),
        at(99.0),
        at(99.9),
        show::time(latencies.max() as f64),
        show::time(cpu_per_op(&outcome.client, ios)),
        server.map_or("-".into(), |usage| show::time(cpu_per_op(usage, ios))),
    ]
}

/// Writes rows with aligned columns. The first `texts` columns are left-aligned, and all other
/// columns are right-aligned.
fn aligned(out: &mut dyn Write, rows: &[Vec<String>], texts: usize) -> io::Result<()> {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..rows[0].len()).map(width).collect();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            line += &match column < texts {
                true => format!("{gap}{cell:<width$}"),
                false => format!("{gap}{cell:>width$}"),
            };
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::sample;

    fn written(outcomes: &[Outcome]) -> String {
        let mut out = Vec::new();
        write(&mut out, outcomes).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn block_shows_all_values() {
        let mut outcome = sample::mixed("job\x07", 1);
        outcome.address = "srp://host/\u{202e}x".into();
        let text = written(std::slice::from_ref(&outcome));
        let first = "job\u{fffd}: srp://host/\u{fffd}x, 1.0 s: rw=randrw bs=4k iodepth=8";
        assert_eq!(text.lines().next(), Some(first));
        for kind in ["  read ", "  write ", "  sync "] {
            assert!(text.contains(kind), "{text}");
        }
        assert!(!text.contains("  trim "), "{text}");
        let iops = show::count(outcome.iops(OpKind::Read));
        assert!(text.contains(&format!("  read   {iops} IOPS, ")), "{text}");
        assert!(text.contains("verified: 1234 blocks"), "{text}");
        assert!(text.contains("warning: 12.5 % of the region"), "{text}");
        assert!(text.contains("\n  server  "), "{text}");
    }

    #[test]
    fn open_loops_show_both_times() {
        let text = written(&[sample::open_loop("a", 1)]);
        assert!(
            text.contains("response  min ") && text.contains("service   min "),
            "{text}"
        );
        assert!(!text.contains("server"), "{text}");
        assert!(!text.contains("not started"), "{text}");
        let text = written(&[Outcome {
            not_started: 31,
            ..sample::open_loop("a", 1)
        }]);
        let note = "about 31 operations were due but not started";
        assert!(text.contains(note), "{text}");
    }

    #[test]
    fn sweep_shows_row_per_outcome() {
        let text = written(&sample::sweep("4k", &[1, 2, 4, 8, 16]));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 6, "{text}");
        let words = |line: &str| {
            line.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            words(lines[0])[..4],
            ["iodepth", "kind", "IOPS", "bandwidth"]
        );
        assert_eq!(words(lines[5])[..2], ["16", "read"]);
        // The last column is right-aligned.
        let ends = lines.iter().map(|line| line.chars().count());
        assert_eq!(
            ends.collect::<std::collections::BTreeSet<_>>().len(),
            1,
            "{text}"
        );
    }

    #[test]
    fn holes_need_reads_for_warning() {
        let mut outcome = sample::mixed("a", 1);
        outcome.measured[OpKind::Read as usize].service.reset();
        assert_eq!(hole_share(&outcome), None);
    }
}
