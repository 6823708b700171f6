//! JSON in the layout of fio 3.33, which other programs plot and compare.
//!
//! - [`write()`]: `--output-format=json`, or `json+` with the `bins` of each distribution.
//! - [`read()`]: summaries of such documents, ours and fio's.
//!
//! Each outcome is a job and a group of its own, even if it was measured beside others: it has the
//! figures of all its clones together, and readers add up the jobs of a group. The figures have
//! fio's meaning and units: `bw` is KiB per second, `runtime` is milliseconds, percentages of
//! processor time are of one processor. Where the meanings differ:
//!
//! - `clat_ns` is the time from the start of an operation to its completion. `lat_ns` begins when
//!   the operation was due; in a closed loop that is its start, so both are the same and only
//!   `clat_ns` has percentiles, as by default in fio.
//! - `percentile` has the values of a histogram with three digits, not the midpoints of fio's bins,
//!   which have two. `bins` has fio's bins.
//! - `bw_min` to `iops_stddev` are of the intervals of the run. In fio they are of `bwavgtime`.
//! - `usr_cpu`, `sys_cpu` and `ctx` are of the whole process, the transport's threads included, and
//!   all clones of a job are in it. fio shows the mean of its processes, with `numjobs=4` a quarter
//!   of their sum.
//! - `slat_ns` has no samples: submission is not timed apart.
//!
//! Left out is what is not measured: `eta` and `elapsed` of a run that is over, `majf` and `minf`,
//! the depths `iodepth_level`, `iodepth_submit` and `iodepth_complete`, and `latency_depth`,
//! `latency_target`, `latency_percentile` and `latency_window` of fio's search for a depth. There
//! are no `global options`, because each job has all of its own.
//!
//! What fio has no place for is in objects named `riser`: at the top the machine, and in each job
//! the address, the RDMA device, both sides' processor time and context switches, holes, verified
//! and torn blocks, whether the disk takes no flushes though they were wanted (`unstable`), planned
//! operations that were not started, the mean number of operations in flight, the notes that a
//! terminal shows, and the figures over time.

mod document;
mod latency;
mod read;

pub use document::write;
pub use read::{CpuSummary, KindSummary, LatencySummary, ReadError, RunSummary, read};

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;
    use crate::bench::output::sample;

    const GOLDEN: &str = include_str!("../golden/fio-3.33.json");

    /// Keys of fio that ours leaves out, below a job or at the top.
    const LEFT_OUT: [&str; 12] = [
        "eta",
        "elapsed",
        "global options",
        "majf",
        "minf",
        "iodepth_level",
        "iodepth_submit",
        "iodepth_complete",
        "latency_depth",
        "latency_target",
        "latency_percentile",
        "latency_window",
    ];

    /// Paths of all keys, but for those of options. `N` stands for the key of any bin.
    fn keys(value: &Value, path: &str, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(object) if !path.ends_with(" options") => {
                for (key, value) in object {
                    let bin = path.ends_with("/bins");
                    let path = format!("{path}/{}", if bin { "N" } else { key });
                    keys(value, &path, found);
                    found.insert(path);
                }
            }
            Value::Array(values) => values.iter().for_each(|v| keys(v, path, found)),
            _ => {}
        }
    }

    fn without(all: &BTreeSet<String>, left_out: &[&str]) -> BTreeSet<String> {
        let part = |path: &str| path.split('/').any(|key| left_out.contains(&key));
        all.iter().filter(|path| !part(path)).cloned().collect()
    }

    /// The jobs of the golden document.
    fn ours() -> Value {
        let mut trims = sample::sweep("4k", &[1]).remove(0);
        trims.measured.swap(0, 2);
        for interval in &mut trims.intervals {
            interval.measured.swap(0, 2);
        }
        let mut out = Vec::new();
        let outcomes = [sample::mixed("mixed", 1), trims];
        write(&mut out, &outcomes, &sample::machine(), true).unwrap();
        serde_json::from_slice(&out).unwrap()
    }

    #[test]
    fn the_keys_are_those_of_fio() {
        let (mut fio, mut own) = (BTreeSet::new(), BTreeSet::new());
        keys(&serde_json::from_str(GOLDEN).unwrap(), "", &mut fio);
        keys(&ours(), "", &mut own);
        assert_eq!(without(&own, &["riser"]), without(&fio, &LEFT_OUT));
        // The list above and the documentation are right: ours has none of these.
        let named = |path: &&String| LEFT_OUT.contains(&path.rsplit('/').next().unwrap());
        assert_eq!(own.iter().find(named), None);
    }

    #[test]
    fn the_types_are_those_of_fio() {
        fn compare(fio: &Value, own: &Value, path: &str) {
            let kind = |value: &Value| match value {
                Value::Object(_) => "object",
                Value::Array(_) => "array",
                Value::String(_) => "string",
                Value::Number(n) if n.is_f64() => "fraction",
                Value::Number(_) => "whole number",
                _ => "other",
            };
            assert_eq!(kind(fio), kind(own), "{path}");
            if let (Value::Object(fio), Value::Object(own)) = (fio, own) {
                for (key, value) in fio {
                    if let Some(own) = own.get(key) {
                        compare(value, own, &format!("{path}/{key}"));
                    }
                }
            }
        }
        let fio: Value = serde_json::from_str(GOLDEN).unwrap();
        let own = ours();
        compare(&fio, &own, "");
        for job in 0..2 {
            compare(&fio["jobs"][job], &own["jobs"][job], "jobs");
        }
    }

    #[test]
    fn json_without_plus_has_no_bins() {
        let mut out = Vec::new();
        let outcomes = [sample::mixed("mixed", 1)];
        write(&mut out, &outcomes, &sample::machine(), false).unwrap();
        assert!(!String::from_utf8(out).unwrap().contains("\"bins\""));
    }
}
