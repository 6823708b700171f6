//! The file of results, from which documents are rendered.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::curves::CURVES;
use super::{systems, workloads};
use crate::Failure;

/// Everything that was measured last, each part in a run of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Results {
    pub(super) comparison: Option<Comparison>,
    pub(super) scaling: Option<Scaling>,
}

/// Where and how a part was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Provenance {
    /// Command line.
    pub(super) command: String,
    /// Date in UTC, as `2026-11-26`.
    pub(super) date: String,
    /// Commit of the sources of our programs, with a plus sign if they were changed, or `unknown`.
    pub(super) commit: String,
    /// Processor, cores, memory and kernel.
    pub(super) machine: String,
    /// Share of the processors that was idle before the run, in percent.
    pub(super) idle_percent: f64,
    /// Programs with their versions.
    pub(super) programs: Vec<String>,
    /// Size of the file, in MiB.
    pub(super) size_mib: u64,
    /// Type of the file system that it is on.
    pub(super) file_system: String,
    /// Rounds of the run.
    pub(super) rounds: usize,
    /// Seconds of each measurement.
    pub(super) seconds: u32,
    /// Client of the NBD servers: fio or riser.
    pub(super) nbd_client: String,
}

/// Systems beside each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Comparison {
    pub(super) measured: Provenance,
    /// Systems that were not measured, with the reason.
    pub(super) skipped: Vec<String>,
    pub(super) samples: Vec<Sample>,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Sample {
    pub(super) round: usize,
    pub(super) system: String,
    pub(super) workload: String,
    /// Operations per second.
    pub(super) iops: f64,
    pub(super) bytes_per_second: f64,
    /// Median latency, if the client reports one.
    pub(super) p50_ns: Option<f64>,
    /// Processor time of the servers for each operation; none of the wire, whose client does more
    /// than one load.
    pub(super) server_ns: Option<f64>,
    /// Processor time of the client for each operation, likewise.
    pub(super) client_ns: Option<f64>,
}

/// Curves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Scaling {
    pub(super) measured: Provenance,
    pub(super) points: Vec<Point>,
}

/// One measurement of a curve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Point {
    pub(super) curve: String,
    pub(super) system: String,
    /// Place on the horizontal axis: a number of the curve's list.
    pub(super) x: f64,
    pub(super) round: usize,
    /// Figure of the vertical axis.
    pub(super) y: f64,
}

impl Results {
    /// Reads the file; without one there are no results.
    pub(super) fn load(path: &Path) -> Result<Self, Failure> {
        Self::load_with(path, |_| {})
    }

    /// The same with a change, which is made before the check: the part that a run replaces may be
    /// of curves or systems that have changed since.
    pub(super) fn load_with(path: &Path, change: impl FnOnce(&mut Self)) -> Result<Self, Failure> {
        let failed = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let mut results = Self::default();
        if path.exists() {
            let text = fs::read_to_string(path).map_err(|e| failed(&e))?;
            results = serde_json::from_str(&text).map_err(|e| failed(&e))?;
        }
        change(&mut results);
        results.check().map_err(|e| failed(&e))?;
        Ok(results)
    }

    /// Fails for names of systems, workloads and curves that there are not, and for places of no
    /// curve: no table would show them.
    fn check(&self) -> Result<(), String> {
        let samples = self.comparison.iter().flat_map(|part| &part.samples);
        let mut points = self.scaling.iter().flat_map(|part| &part.points);
        let names = samples.clone().map(|sample| &sample.system);
        for name in names.chain(points.clone().map(|point| &point.system)) {
            systems::named(name).ok_or_else(|| format!("there is no system {name}"))?;
        }
        for Sample { workload, .. } in samples {
            workloads::named(workload).ok_or_else(|| format!("there is no workload {workload}"))?;
        }
        points.try_for_each(Point::check)
    }

    /// Writes the file, a line for each measurement.
    pub(super) fn save(&self, path: &Path) -> Result<(), Failure> {
        let mut text = String::new();
        write_lines(&serde_json::to_value(self)?, 0, &mut text);
        text.push('\n');
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()).into())
    }
}

impl Point {
    fn check(&self) -> Result<(), String> {
        let Self { curve, system, .. } = self;
        let known = CURVES.iter().find(|known| known.id == curve.as_str());
        let known = known.ok_or_else(|| format!("there is no curve {curve}"))?;
        if !known.systems.contains(&system.as_str()) {
            return Err(format!("curve {curve} has no system {system}"));
        }
        if !known.xs.contains(&self.x) {
            return Err(format!("curve {curve} has no place {}", self.x));
        }
        Ok(())
    }
}

impl Comparison {
    /// A figure of each round of a system and workload.
    pub(super) fn figures(
        &self,
        system: &str,
        workload: &str,
        figure: impl Fn(&Sample) -> Option<f64>,
    ) -> Vec<(usize, f64)> {
        self.samples
            .iter()
            .filter(|sample| sample.system == system && sample.workload == workload)
            .filter_map(|sample| Some((sample.round, figure(sample)?)))
            .collect()
    }
}

impl Scaling {
    /// A figure of each round at a place of a curve.
    pub(super) fn figures(&self, curve: &str, system: &str, x: f64) -> Vec<(usize, f64)> {
        let is_here =
            |point: &&Point| point.curve == curve && point.system == system && point.x == x;
        let points = self.points.iter().filter(is_here);
        points.map(|point| (point.round, point.y)).collect()
    }
}

/// Writes a value with a line for each element, but objects of plain values on one line: so that a
/// difference between two versions of the file shows measurements.
fn write_lines(value: &Value, indent: usize, out: &mut String) {
    let is_plain = |value: &Value| !value.is_array() && !value.is_object();
    let pad = |out: &mut String, indent| {
        out.push('\n');
        out.extend(std::iter::repeat_n("  ", indent));
    };
    // An empty array has no lines and comes last, with what is plain.
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
            nbd_client: "fio".into(),
        }
    }

    /// A sample whose figures follow from its operations per second.
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
    fn results_come_back_from_their_file_with_a_line_for_each_sample() {
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
    fn a_file_with_an_unknown_name_is_refused() {
        let scratch = sh::Scratch::new("results-names").unwrap();
        let path = scratch.join("results.json");
        for (names, why) in [
            (("nope", workloads::READ_1), "system nope"),
            (("srp", "nope"), "workload nope"),
        ] {
            let results = Results {
                comparison: Some(Comparison {
                    measured: provenance(),
                    skipped: Vec::new(),
                    samples: vec![sample(1, names, 1.0)],
                }),
                scaling: None,
            };
            results.save(&path).unwrap();
            let error = Results::load(&path).unwrap_err().to_string();
            assert!(
                error.contains(why) && error.contains("results.json"),
                "{error}"
            );
        }
        for (curve, system, x, why) in [
            ("nope", "srp", 4.0, "curve nope"),
            ("depth", "srp", 3.0, "curve depth has no place 3"),
            ("depth", "tgt", 4.0, "curve depth has no system tgt"),
        ] {
            let point = Point {
                curve: curve.into(),
                system: system.into(),
                x,
                round: 1,
                y: 1.0,
            };
            let results = Results {
                comparison: None,
                scaling: Some(Scaling {
                    measured: provenance(),
                    points: vec![point],
                }),
            };
            results.save(&path).unwrap();
            let error = Results::load(&path).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
            // A run that measures the curves replaces these; one of the tables keeps them.
            let replaced = Results::load_with(&path, |results| results.scaling = None);
            assert_eq!(replaced.unwrap(), Results::default());
            let kept = Results::load_with(&path, |results| results.comparison = None);
            assert!(kept.is_err());
        }
        fs::write(&path, "{\"comparison\": 1}").unwrap();
        let error = Results::load(&path).unwrap_err().to_string();
        assert!(
            error.contains("results.json") && error.contains("line 1"),
            "{error}"
        );
    }
}
