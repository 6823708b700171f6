//! Results over time as comma-separated values. These are quoted according to RFC 4180, but lines
//! are terminated by LF instead of CRLF.
//!
//! There is one row for each interval and kind of operation, excluding kinds that are not used by
//! the run. Latencies are in nanoseconds, and are measured from the planned arrival if the run has
//! planned arrivals. They are empty for intervals without operations. `t_ms` is the start of the
//! interval relative to the start of the measurement, in milliseconds. `disk` is the address and
//! the RDMA device used for the connection.

use std::io::{self, Write};

use super::summary::{active, latencies, per_second};
use crate::outcome::{Interval, OpKind, Outcome};

/// Names of the columns.
const HEADER: &str = "job,run,t_ms,kind,iops,bytes_per_second,mean_ns,p50_ns,p90_ns,p99_ns,p99_9_ns,max_ns,\
                      disk";

/// Percentiles included as columns.
const PERCENTILES: [f64; 4] = [50.0, 90.0, 99.0, 99.9];

/// Writes the intervals of all outcomes. Since names may not be unique, `run` is the index of the
/// outcome.
///
/// # Errors
/// Returns errors from `out`.
pub fn write(out: &mut dyn Write, outcomes: &[Outcome]) -> io::Result<()> {
    writeln!(out, "{HEADER}")?;
    for (run, outcome) in outcomes.iter().enumerate() {
        let (job, disk) = (field(&outcome.name), field(&outcome.disk()));
        for interval in &outcome.intervals {
            for kind in active(outcome) {
                write!(out, "{job},{run},")?;
                row(out, interval, kind)?;
                writeln!(out, ",{disk}")?;
            }
        }
    }
    Ok(())
}

fn row(out: &mut dyn Write, interval: &Interval, kind: OpKind) -> io::Result<()> {
    let measured = &interval.measured[kind as usize];
    write!(
        out,
        "{:.3},{},{:.1},{:.0}",
        1000.0 * interval.at.as_secs_f64(),
        kind.name(),
        per_second(measured.ios(), interval),
        per_second(measured.bytes, interval),
    )?;
    let latencies = latencies(measured);
    if latencies.is_empty() {
        return write!(out, ",,,,,,");
    }
    write!(out, ",{:.0}", latencies.mean())?;
    for percent in PERCENTILES {
        write!(out, ",{}", latencies.value_at_percentile(percent))?;
    }
    write!(out, ",{}", latencies.max())
}

/// Formats text as a field, which is quoted if it contains separators. If a spreadsheet could
/// interpret it as a formula, it's prefixed with an apostrophe.
fn field(text: &str) -> String {
    let formula = text.starts_with(['=', '+', '-', '@', '\t', '\r']);
    let text = if formula {
        format!("'{text}")
    } else {
        text.to_owned()
    };
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::sample;

    fn rows(outcomes: &[Outcome]) -> Vec<Vec<String>> {
        let mut out = Vec::new();
        write(&mut out, outcomes).unwrap();
        let text = String::from_utf8(out).unwrap();
        let split = |line: &str| line.split(',').map(str::to_owned).collect();
        text.lines().map(split).collect()
    }

    #[test]
    fn intervals_have_rows_per_kind() {
        let outcome = sample::mixed("a", 1);
        let rows = rows(&[outcome.clone(), sample::open_loop("b", 2)]);
        assert!(rows.iter().all(|row| row.len() == 13), "{rows:?}");
        // The first outcome has reads, writes and flushes, and the second outcome only reads.
        assert_eq!(rows.len(), 1 + 11 * 3 + 11);
        let row = &rows[1 + 3];
        assert_eq!(row[..4], ["a", "0", "100.000", "read"]);
        let reads = &outcome.intervals[1].measured[0];
        let iops: f64 = row[4].parse().unwrap();
        assert!((iops - 10.0 * reads.ios() as f64).abs() < 1e-6);
        assert_eq!(row[9], reads.service.value_at_percentile(99.0).to_string());
        assert_eq!(row[11], reads.service.max().to_string());
        assert_eq!(row[12], outcome.disk());
    }

    #[test]
    fn disk_column_includes_shared_memory_device() {
        let shared = Outcome {
            address: "srp://127.0.0.1/0".into(),
            device: Some("shm-127.0.0.1".into()),
            ..sample::mixed("a", 1)
        };
        let protected = Outcome {
            protection: Some(1),
            ..shared.clone()
        };
        let rows = rows(&[shared, protected]);
        assert_eq!(rows[0][12], "disk");
        let disks: Vec<_> = rows[1..].iter().map(|row| row[12].as_str()).collect();
        let shared = "srp://127.0.0.1/0 over shm-127.0.0.1";
        assert!(disks.contains(&shared));
        let protected = format!("{shared} with protection type 1");
        assert!(disks.contains(&protected.as_str()));
    }

    #[test]
    fn open_loops_have_response_times() {
        let outcome = sample::open_loop("a", 1);
        let rows = rows(std::slice::from_ref(&outcome));
        let response = outcome.intervals[0].measured[0].response.as_ref().unwrap();
        assert_eq!(rows[1][7], response.value_at_percentile(50.0).to_string());
    }

    #[test]
    fn idle_interval_has_empty_latencies() {
        let mut outcome = sample::open_loop("a", 1);
        let idle = &mut outcome.intervals[2].measured[0];
        idle.bytes = 0;
        idle.service.reset();
        idle.response = None;
        let rows = rows(&[outcome]);
        assert_eq!(rows[3][4..12], ["0.0", "0", "", "", "", "", "", ""]);
    }

    #[test]
    fn names_cannot_inject_fields_or_formulas() {
        assert_eq!(field("a,\"b\"\n"), "\"a,\"\"b\"\"\n\"");
        assert_eq!(field("=1+1"), "'=1+1");
        assert_eq!(field("plain"), "plain");
    }
}
