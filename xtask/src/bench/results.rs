//! Results file used to render the documents.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::curves::CURVES;
use super::{systems, workloads};
use crate::Failure;

/// Latest results. Each part is from a separate measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Results {
    pub(super) comparison: Option<Comparison>,
    pub(super) scaling: Option<Scaling>,
}

/// Describes where and how a part was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Provenance {
    pub(super) command: String,
    /// Date in UTC, for example `2026-11-26`.
    pub(super) date: String,
    /// Source commit of our programs, with a plus sign if there are local changes, or `unknown`.
    pub(super) commit: String,
    /// CPU, number of cores, memory and kernel version.
    pub(super) machine: String,
    /// CPU idle time before this measurement, in percent.
    pub(super) idle_percent: f64,
    /// Programs and their versions.
    pub(super) programs: Vec<String>,
    /// File size in MiB.
    pub(super) size_mib: u64,
    /// Type of the file system used for the file.
    pub(super) file_system: String,
    pub(super) rounds: usize,
    /// Duration of each measurement, in seconds.
    pub(super) seconds: u32,
}

/// Comparison of systems.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Comparison {
    pub(super) measured: Provenance,
    /// Systems that were not measured, and the reason.
    pub(super) skipped: Vec<String>,
    pub(super) samples: Vec<Sample>,
}

/// A single measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Sample {
    pub(super) round: usize,
    pub(super) system: String,
    pub(super) workload: String,
    pub(super) iops: f64,
    pub(super) bytes_per_second: f64,
    /// Median latency, if reported by the client.
    pub(super) p50_ns: Option<f64>,
    /// CPU time of the servers per operation. Not available for the wire, because its client runs
    /// more than one load.
    pub(super) server_ns: Option<f64>,
    /// CPU time of the client per operation, if available.
    pub(super) client_ns: Option<f64>,
}

/// Results of all curves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Scaling {
    pub(super) measured: Provenance,
    pub(super) points: Vec<Point>,
}

/// A single measurement of a curve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Point {
    pub(super) curve: String,
    pub(super) system: String,
    /// Value on the horizontal axis, which must be in the curve's list.
    pub(super) x: f64,
    pub(super) round: usize,
    /// Value on the vertical axis.
    pub(super) y: f64,
}

impl Results {
    /// Reads the file. If it doesn't exist, the results are empty. Values of systems, workloads and
    /// points that were removed from the tables are dropped, because nothing would show them.
    pub(super) fn load(path: &Path) -> Result<Self, Failure> {
        let failed = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        if !path.exists() {
            return Ok(Self::default());
        }
        let text = fs::read_to_string(path).map_err(|e| failed(&e))?;
        let mut results: Self = serde_json::from_str(&text).map_err(|e| failed(&e))?;
        if let Some(part) = &mut results.comparison {
            part.samples.retain(|sample| {
                let system = systems::named(&sample.system);
                system.is_some() && workloads::named(&sample.workload).is_some()
            });
        }
        if let Some(part) = &mut results.scaling {
            part.points.retain(Point::is_on_curve);
        }
        Ok(results)
    }

    pub(super) fn save(&self, path: &Path) -> Result<(), Failure> {
        let mut text = String::new();
        write_lines(&serde_json::to_value(self)?, 0, &mut text);
        text.push('\n');
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()).into())
    }
}

impl Point {
    fn is_on_curve(&self) -> bool {
        CURVES.iter().any(|curve| {
            curve.id == self.curve.as_str()
                && curve.systems.contains(&self.system.as_str())
                && curve.xs.contains(&self.x)
        })
    }
}

impl Comparison {
    pub(super) fn values(
        &self,
        system: &str,
        workload: &str,
        value: impl Fn(&Sample) -> Option<f64>,
    ) -> Vec<(usize, f64)> {
        self.samples
            .iter()
            .filter(|sample| sample.system == system && sample.workload == workload)
            .filter_map(|sample| Some((sample.round, value(sample)?)))
            .collect()
    }
}

impl Scaling {
    pub(super) fn values(&self, curve: &str, system: &str, x: f64) -> Vec<(usize, f64)> {
        let is_here =
            |point: &&Point| point.curve == curve && point.system == system && point.x == x;
        let points = self.points.iter().filter(is_here);
        points.map(|point| (point.round, point.y)).collect()
    }
}

/// Writes a value using a separate line for each element, but writes an object of simple values as
/// one line. This way, a diff between two versions shows measurements.
fn write_lines(value: &Value, indent: usize, out: &mut String) {
    let is_plain = |value: &Value| !value.is_array() && !value.is_object();
    let pad = |out: &mut String, indent| {
        out.push('\n');
        out.extend(std::iter::repeat_n("  ", indent));
    };
    // An empty array has no lines, so it's written at the end with the simple values.
    match value {
        Value::Object(fields) if !fields.values().all(is_plain) => {
            for (at, (name, field)) in fields.iter().enumerate() {
                out.push(if at == 0 { '{' } else { ',' });
                pad(out, indent + 1);
                let _ = write!(out, "{}: ", Value::from(name.as_str()));
                write_lines(field, indent + 1, out);
            }
            pad(out, indent);
            out.push('}');
        }
        Value::Array(elements) if !elements.is_empty() => {
            for (at, element) in elements.iter().enumerate() {
                out.push(if at == 0 { '[' } else { ',' });
                pad(out, indent + 1);
                write_lines(element, indent + 1, out);
            }
            pad(out, indent);
            out.push(']');
        }
        plain => {
            let _ = write!(out, "{plain}");
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::sh;

    pub(in crate::bench) fn provenance() -> Provenance {
        Provenance {
            command: "cargo xtask bench --rounds 2".into(),
            date: "2026-11-26".into(),
            commit: "0123abc".into(),
            machine: "a processor, 2 cores".into(),
            idle_percent: 99.0,
            programs: vec!["fio-3.33".into()],
            size_mib: 1024,
            file_system: "tmpfs".into(),
            rounds: 2,
            seconds: 5,
        }
    }

    pub(in crate::bench) fn sample(
        round: usize,
        (system, workload): (&str, &str),
        iops: f64,
    ) -> Sample {
        Sample {
            round,
            system: system.into(),
            workload: workload.into(),
            iops,
            bytes_per_second: iops * 4096.0,
            p50_ns: Some(1e9 / iops),
            server_ns: Some(2e8 / iops),
            client_ns: Some(1e8 / iops),
        }
    }

    #[test]
    fn results_file_round_trips() {
        let scratch = sh::Scratch::new("results-test").unwrap();
        let path = scratch.join("new/results.json");
        assert_eq!(Results::load(&path).unwrap(), Results::default());
        let samples = vec![
            sample(1, ("srp", workloads::READ_32), 1000.0),
            sample(2, ("srp", workloads::READ_32), 3.5),
        ];
        let point = Point {
            curve: "depth".into(),
            system: "nbdkit".into(),
            x: 4.0,
            round: 1,
            y: 7.25,
        };
        let results = Results {
            comparison: Some(Comparison {
                measured: provenance(),
                skipped: vec!["a \"peer\"".into()],
                samples,
            }),
            scaling: Some(Scaling {
                measured: provenance(),
                points: vec![point],
            }),
        };
        results.save(&path).unwrap();
        assert_eq!(Results::load(&path).unwrap(), results);
        let text = fs::read_to_string(&path).unwrap();
        let lines = text.lines().filter(|line| line.contains("\"p50_ns\""));
        assert_eq!(lines.count(), 2, "{text}");
    }

    #[test]
    fn removed_names_are_dropped() {
        let scratch = sh::Scratch::new("results-names").unwrap();
        let path = scratch.join("results.json");
        let samples = [
            ("nope", workloads::READ_1),
            ("srp", "nope"),
            ("srp", workloads::READ_1),
        ];
        let points = [
            ("nope", "srp", 4.0),
            ("depth", "srp", 3.0),
            ("depth", "tgt", 4.0),
        ];
        let point = |(curve, system, x): (&str, &str, f64)| Point {
            curve: curve.into(),
            system: system.into(),
            x,
            round: 1,
            y: 1.0,
        };
        let results = Results {
            comparison: Some(Comparison {
                measured: provenance(),
                skipped: Vec::new(),
                samples: samples.map(|names| sample(1, names, 1.0)).into(),
            }),
            scaling: Some(Scaling {
                measured: provenance(),
                points: points.map(point).into(),
            }),
        };
        results.save(&path).unwrap();
        let kept = Results::load(&path).unwrap();
        assert_eq!(kept.comparison.unwrap().samples.len(), 1);
        assert!(kept.scaling.unwrap().points.is_empty());
        fs::write(&path, "{\"comparison\": 1}").unwrap();
        let error = Results::load(&path).unwrap_err().to_string();
        assert!(
            error.contains("results.json") && error.contains("line 1"),
            "{error}"
        );
    }
}
