//! JSON in the format of fio 3.33, which can be used by other programs for plots and comparisons.
//!
//! - [`write()`]: `--output-format=json`, or `json+` to include the `bins` of each distribution.
//! - [`read()`]: summaries of documents from Riser or fio.
//!
//! Each outcome is a job and a separate group, even if it ran concurrently with other jobs, because
//! other programs add up the jobs in a group. It contains the total for all its clones. Values have
//! the same meaning and units as in fio: `bw` is in KiB per second, `runtime` is in milliseconds,
//! and CPU usage is in percent of one processor. There are some differences:
//!
//! - `clat_ns` is the time between start and completion of an operation. `lat_ns` is measured from
//!   the planned arrival. In a closed loop, this is the same as the start, and only `clat_ns` has
//!   percentiles, which is also fio's default.
//! - `percentile` contains the values from a histogram with three digits. fio uses the midpoints of
//!   its bins, which have two digits. `bins` contains fio's bins.
//! - `bw_min` to `iops_stddev` are calculated using the intervals of the run. fio uses `bwavgtime`.
//! - `usr_cpu`, `sys_cpu` and `ctx` are for the whole process, including the threads of the
//!   transport and all clones of a job. fio shows the mean over its processes. With `numjobs=4`,
//!   this is a quarter of their sum.
//! - `slat_ns` doesn't have samples, as we don't measure submission separately.
//!
//! Values that we don't measure are omitted: `eta` and `elapsed` of a completed run, `majf` and
//! `minf`, the depths `iodepth_level`, `iodepth_submit` and `iodepth_complete`, and
//! `latency_depth`, `latency_target`, `latency_percentile` and `latency_window`, which fio uses
//! when searching for a depth. There are no `global options` because each job includes all its
//! options.
//!
//! Additional values are in objects named `riser`. The one at the top level describes the machine.
//! For each job, it contains the address, the RDMA device, the type of protection information, CPU
//! time and context switches on both sides, holes, the number of verified and torn blocks, whether flushes were requested but are not
//! supported by the disk (`unstable`), the number of planned operations that were not started, the
//! mean number of operations in flight, notes shown on a terminal, and results over time.

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
    use crate::output::sample;

    const GOLDEN: &str = include_str!("../golden/fio-3.33.json");

    /// Keys from fio that are omitted in our documents, either at the top level or in a job.
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

    /// Collects the paths of all keys, except for options. `N` is used for the key of a bin.
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

    /// Returns a document with the same jobs as the golden document.
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
    fn keys_match_fio() {
        let (mut fio, mut own) = (BTreeSet::new(), BTreeSet::new());
        keys(&serde_json::from_str(GOLDEN).unwrap(), "", &mut fio);
        keys(&ours(), "", &mut own);
        assert_eq!(without(&own, &["riser"]), without(&fio, &LEFT_OUT));
        // Check that the list above and the documentation are correct: we must not use any of these
        // keys.
        let named = |path: &&String| LEFT_OUT.contains(&path.rsplit('/').next().unwrap());
        assert_eq!(own.iter().find(named), None);
    }

    #[test]
    fn types_match_fio() {
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
