//! Compares two sets of runs and reports which differences are significant.
//!
//! Runs with the same name and options are rounds of a case. For each measured value that's
//! available on both sides, [`compare()`] returns the medians, the ratio of B to A and its 95 %
//! confidence interval, using the Mann-Whitney test ([`stats`]). A difference is significant if the
//! interval doesn't contain 1. This requires four rounds on each side, or three and five, or two
//! and eight. With three rounds on each side, even the most extreme result is too likely to occur
//! by chance. When comparing 20 values without any real difference, we expect one to be reported as
//! different.

pub mod stats;
mod table;

use serde::Serialize;

pub use table::write;

use super::fio::{CpuSummary, KindSummary, LatencySummary, RunSummary};
use super::summary::median;
use crate::job::is_ignored;
use crate::outcome::OpKind;

/// Options that describe where a job was run or its output format instead of the workload, in
/// addition to options that have no effect here ([`is_ignored`]).
const NOT_COMPARED: &[&str] = &[
    "name",
    "filename",
    "directory",
    "direct",
    "buffered",
    "uri",
    "stonewall",
    "wait_for_previous",
    "randrepeat",
    "allrandrepeat",
];

/// Synonyms of options.
const SYNONYMS: &[(&str, &str)] = &[
    ("blocksize", "bs"),
    ("blocksize_range", "bsrange"),
    ("readwrite", "rw"),
    ("rwmixwrite", "rwmixread"),
    ("io_limit", "io_size"),
];

/// Default values of options. Some of these are included in our output but not in fio's.
const DEFAULTS: &[(&str, &str)] = &[
    ("rw", "read"),
    ("rwmixread", "50"),
    ("bs", "4096"),
    ("iodepth", "1"),
    ("numjobs", "1"),
    ("randseed", "1"),
];

/// Percentiles to compare.
const PERCENTILES: [f64; 3] = [50.0, 99.0, 99.9];

/// Selects which runs are compared with each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatchBy {
    /// Runs with the same name and workload options.
    #[default]
    Options,
    /// Runs with the same name. This allows comparing e.g. block sizes.
    Name,
}

/// Result of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// B is significantly better.
    Better,
    /// B is significantly worse.
    Worse,
    /// The interval contains 1.
    NoDifference,
    /// There are too few rounds to get a significant result.
    TooFewRounds,
}

/// Unit of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Operations per second.
    PerSecond,
    /// Bytes per second.
    BytesPerSecond,
    /// Latency in nanoseconds.
    Latency,
    /// Processor time per operation in nanoseconds.
    CpuPerOp,
    /// Context switches per operation.
    SwitchesPerOp,
}

/// A measured value available on both sides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Metric {
    /// Name: `read iops`, `write p99`, `read response p99` for an open loop, `server cpu per op`.
    pub name: String,
    /// Unit.
    pub unit: Unit,
    /// Median over the rounds of A.
    pub a: f64,
    /// Median over the rounds of B.
    pub b: f64,
    /// Ratio of B to A: the median of the ratios for all pairs of rounds.
    pub ratio: f64,
    /// 95 % confidence interval of the ratio, if there are enough rounds.
    pub interval: Option<(f64, f64)>,
    /// Verdict.
    pub verdict: Verdict,
}

/// Operations or values that can't be compared because they are missing in some rounds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// Name: `reads`, `read p99.9`.
    pub what: String,
    /// Side with the incomplete rounds: `A` or `B`.
    pub side: char,
    /// Number of incomplete rounds.
    pub rounds: usize,
}

/// Comparison of the rounds of both sides.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Case {
    /// Name of the job.
    pub name: String,
    /// Options, sorted by name. If only names are compared, these are the options of the first
    /// round of A.
    pub options: Vec<(String, String)>,
    /// Disks of A and B and the RDMA devices used for the connection, if known.
    pub disks: [Option<String>; 2],
    /// Number of rounds of A and B.
    pub rounds: (usize, usize),
    /// Values available on both sides.
    #[serde(rename = "figures")]
    pub metrics: Vec<Metric>,
    /// Values missing in some rounds.
    pub missing: Vec<Missing>,
    /// Warnings from rounds of A and B, without duplicates.
    pub warnings: [Vec<String>; 2],
}

/// A case that is only available on one side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unmatched {
    /// Side: `A` or `B`.
    pub side: char,
    /// Name of the job.
    pub name: String,
    /// Options.
    pub options: Vec<(String, String)>,
}

/// Result of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Minimum probability that an interval contains the true ratio.
    pub confidence: f64,
    /// Cases available on both sides, in the order of A.
    pub cases: Vec<Case>,
    /// Cases only available on one side.
    pub unmatched: Vec<Unmatched>,
}

/// Rounds of a case on one side.
struct Group<'a> {
    name: &'a str,
    options: Vec<(String, String)>,
    disk: Option<&'a str>,
    rounds: Vec<&'a RunSummary>,
}

impl<'a> Group<'a> {
    /// Returns the same case on the other side. The disk is only relevant if there are multiple
    /// disks on one side.
    fn partner<'g>(&self, own: &[Self], others: &'g [Group<'a>], by: MatchBy) -> Option<&'g Self> {
        let count = |groups: &[Group<'_>]| groups.iter().filter(|g| g.is_case_of(self, by)).count();
        let is_only = count(own) == 1 && count(others) == 1;
        let is_it =
            |other: &&Group<'_>| other.is_case_of(self, by) && (is_only || other.disk == self.disk);
        others.iter().find(is_it)
    }

    fn warnings(&self) -> Vec<String> {
        let notes = self.rounds.iter().flat_map(|run| &run.notes);
        let warnings = notes.filter(|note| note.starts_with("warning: "));
        let mut warnings: Vec<_> = warnings.cloned().collect();
        warnings.sort();
        warnings.dedup();
        warnings
    }

    fn is_case_of(&self, other: &Group<'_>, by: MatchBy) -> bool {
        self.name == other.name && (by == MatchBy::Name || self.options == other.options)
    }
}

/// Compares runs from two sides.
#[must_use]
pub fn compare(a: &[RunSummary], b: &[RunSummary], by: MatchBy) -> Comparison {
    let (a, b) = (groups(a, by), groups(b, by));
    let mut cases = Vec::new();
    let mut unmatched = Vec::new();
    for group in &a {
        match group.partner(&a, &b, by) {
            Some(other) => cases.push(case(group, other)),
            None => unmatched.push(alone('A', group)),
        }
    }
    let rest = b.iter().filter(|group| group.partner(&b, &a, by).is_none());
    unmatched.extend(rest.map(|group| alone('B', group)));
    Comparison {
        confidence: stats::CONFIDENCE,
        cases,
        unmatched,
    }
}

fn alone(side: char, group: &Group<'_>) -> Unmatched {
    Unmatched {
        side,
        name: group.name.to_owned(),
        options: group.options.clone(),
    }
}

fn groups(runs: &[RunSummary], by: MatchBy) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for run in runs {
        let group = Group {
            name: &run.name,
            options: workload(&run.options),
            disk: run.disk.as_deref(),
            rounds: vec![run],
        };
        let is_round =
            |known: &&mut Group<'_>| known.is_case_of(&group, by) && known.disk == group.disk;
        match groups.iter_mut().find(is_round) {
            Some(known) => known.rounds.push(run),
            None => groups.push(group),
        }
    }
    groups
}

/// Returns the sorted options that describe the workload and differ from their defaults. Names and
/// values are normalized, as there can be multiple forms: `4k` and `4096`, `randread` and
/// `RandRead`.
fn workload(options: &[(String, String)]) -> Vec<(String, String)> {
    // If the seed was generated for the run, it's different in each round.
    let is_off = |value: &str| matches!(value, "0" | "false");
    let repeats = |(key, value): &(String, String)| key != "randrepeat" || !is_off(value);
    let has_seed = options.iter().all(repeats);
    let is_kept = |key: &str| {
        let is_drawn = key == "randseed" && !has_seed;
        !is_drawn && !NOT_COMPARED.contains(&key) && !is_ignored(key)
    };
    let mut kept: Vec<_> = options
        .iter()
        .filter(|(key, _)| is_kept(key))
        .map(|(key, value)| normal(key, value))
        .filter(|(key, value)| !DEFAULTS.contains(&(key.as_str(), value.as_str())))
        .collect();
    kept.sort();
    kept
}

/// Normalizes the name and value of an option.
fn normal(key: &str, value: &str) -> (String, String) {
    let synonym = SYNONYMS.iter().find(|(other, _)| *other == key);
    let name = synonym.map_or(key, |(_, name)| *name);
    let value = value.trim().to_ascii_lowercase();
    let value = match key {
        // fio uses an empty string if an option was specified without a value.
        _ if value.is_empty() => "1".into(),
        "rwmixwrite" => match value.parse::<u8>() {
            Ok(percent @ 0..=100) => (100 - percent).to_string(),
            _ => value,
        },
        // Only remove the unit of a duration, because `m` would be minutes and not mebibytes.
        "runtime" | "ramp_time" | "startdelay" => value.trim_end_matches('s').to_owned(),
        _ => riser_units::parse_size(&value).map_or(value, |bytes| bytes.to_string()),
    };
    (name.to_owned(), value)
}

fn case(a: &Group<'_>, b: &Group<'_>) -> Case {
    let mut sides = Sides {
        a,
        b,
        metrics: Vec::new(),
        missing: Vec::new(),
    };
    for kind in OpKind::ALL {
        sides.add_kind(kind);
    }
    sides.add_process("client", |run| run.client);
    sides.add_process("server", |run| run.server);
    let Sides {
        metrics, missing, ..
    } = sides;
    Case {
        name: a.name.to_owned(),
        options: a.options.clone(),
        disks: [a, b].map(|side| side.disk.map(str::to_owned)),
        rounds: (a.rounds.len(), b.rounds.len()),
        metrics,
        missing,
        warnings: [a, b].map(Group::warnings),
    }
}

/// Comparison of a case that is available on both sides.
struct Sides<'g, 'a> {
    a: &'g Group<'a>,
    b: &'g Group<'a>,
    metrics: Vec<Metric>,
    missing: Vec<Missing>,
}

impl Sides<'_, '_> {
    /// Adds the values for one kind of operation.
    fn add_kind(&mut self, kind: OpKind) {
        let count = |run: &RunSummary| find(run, kind).map(|found| found.ios as f64);
        if !self.has_all(plural(kind), count) {
            return;
        }
        let name = kind.name();
        let rate = (format!("{name} iops"), Unit::PerSecond);
        self.add(rate, |run| Some(find(run, kind)?.iops));
        let bandwidth = (format!("{name} bandwidth"), Unit::BytesPerSecond);
        self.add(bandwidth, |run| Some(find(run, kind)?.bytes_per_second));
        // For open loops, the response time is more relevant. If it's missing on one side, compare
        // the service times instead, which are always available.
        let mut rounds = self.a.rounds.iter().chain(&self.b.rounds);
        let responses = rounds.all(|run| find(run, kind).is_some_and(|k| k.response.is_some()));
        let latency = move |run: &RunSummary, of: &dyn Fn(&LatencySummary) -> Option<f64>| {
            let measured = find(run, kind)?;
            match (&measured.response, responses) {
                (Some(response), true) => of(response),
                _ => of(&measured.service),
            }
        };
        let times = match responses {
            true => format!("{name} response"),
            false => name.to_owned(),
        };
        self.add((format!("{times} mean"), Unit::Latency), |run| {
            latency(run, &|values| Some(values.mean))
        });
        for percent in PERCENTILES {
            self.add((format!("{times} p{percent}"), Unit::Latency), |run| {
                latency(run, &|values| values.at(percent))
            });
        }
    }

    /// Adds the CPU usage of a process.
    fn add_process(&mut self, side: &str, of: impl Fn(&RunSummary) -> Option<CpuSummary>) {
        self.add((format!("{side} cpu per op"), Unit::CpuPerOp), |run| {
            Some(of(run)?.cpu_ns_per_op)
        });
        let switches = (format!("{side} switches per op"), Unit::SwitchesPerOp);
        self.add(switches, |run| Some(of(run)?.switches_per_op));
    }

    /// Adds a value, unless it's missing in any round, or zero so that there is no ratio.
    fn add(&mut self, (name, unit): (String, Unit), of: impl Fn(&RunSummary) -> Option<f64>) {
        if !self.has_all(&name, &of) {
            return;
        }
        let values = |group: &Group<'_>| -> Vec<f64> {
            group.rounds.iter().filter_map(|run| of(run)).collect()
        };
        let (a, b) = (values(self.a), values(self.b));
        if let Some(found) = stats::ratio(&a, &b) {
            self.metrics.push(Metric {
                name,
                unit,
                a: median(&a),
                b: median(&b),
                ratio: found.estimate,
                interval: found.interval,
                verdict: verdict(found.interval, unit),
            });
        }
    }

    /// Returns whether all rounds have a non-zero value. If only some of them do, records the
    /// number of incomplete rounds.
    fn has_all(&mut self, what: &str, of: impl Fn(&RunSummary) -> Option<f64>) -> bool {
        let lacks =
            |run: &&&RunSummary| of(run).is_none_or(|value| !value.is_finite() || value <= 0.0);
        let without = |group: &Group<'_>| group.rounds.iter().filter(lacks).count();
        let sides = [
            ('A', self.a, without(self.a)),
            ('B', self.b, without(self.b)),
        ];
        let some = sides.iter().any(|(_, group, n)| *n < group.rounds.len());
        for (side, _, rounds) in sides.iter().filter(|(_, _, n)| some && *n > 0) {
            self.missing.push(Missing {
                what: what.to_owned(),
                side: *side,
                rounds: *rounds,
            });
        }
        sides.iter().all(|(_, _, n)| *n == 0)
    }
}

fn plural(kind: OpKind) -> &'static str {
    match kind {
        OpKind::Read => "reads",
        OpKind::Write => "writes",
        OpKind::Trim => "trims",
        OpKind::Flush => "flushes",
    }
}

fn find(run: &RunSummary, kind: OpKind) -> Option<&KindSummary> {
    run.kinds.iter().find(|measured| measured.kind == kind)
}

fn verdict(interval: Option<(f64, f64)>, unit: Unit) -> Verdict {
    let Some((low, high)) = interval else {
        return Verdict::TooFewRounds;
    };
    let more_is_better = matches!(unit, Unit::PerSecond | Unit::BytesPerSecond);
    match (low > 1.0, high < 1.0) {
        (false, false) => Verdict::NoDifference,
        (more, _) if more == more_is_better => Verdict::Better,
        _ => Verdict::Worse,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::Outcome;
    use crate::output::{fio, sample};

    fn summaries(outcomes: &[Outcome]) -> Vec<RunSummary> {
        let mut out = Vec::new();
        fio::write(&mut out, outcomes, &sample::machine(), false).unwrap();
        fio::read(&String::from_utf8(out).unwrap()).unwrap()
    }

    fn rounds(n: u64, from: u64) -> Vec<RunSummary> {
        let outcomes: Vec<_> = (0..n).map(|i| sample::mixed("a", from + i)).collect();
        summaries(&outcomes)
    }

    fn find<'a>(comparison: &'a Comparison, name: &str) -> &'a Metric {
        let mut measured = comparison.cases.iter().flat_map(|case| &case.metrics);
        measured
            .find(|metric| metric.name == name)
            .expect("it is compared")
    }

    #[test]
    fn equal_rounds_show_no_difference() {
        let comparison = compare(&rounds(5, 1), &rounds(5, 100), MatchBy::Options);
        assert_eq!(comparison.cases.len(), 1);
        assert_eq!(comparison.cases[0].rounds, (5, 5));
        let iops = find(&comparison, "read iops");
        assert_eq!(iops.verdict, Verdict::NoDifference, "{iops:?}");
        assert!((iops.ratio - 1.0).abs() < 0.1);
    }

    #[test]
    fn warnings_are_kept_for_both_sides() {
        let mut b = rounds(4, 100);
        b[1].notes.push("warning: no flushes".into());
        let comparison = compare(&rounds(4, 1), &b, MatchBy::Options);
        let [of_a, of_b] = &comparison.cases[0].warnings;
        // All rounds have the same warning about holes. The note about verification is not a
        // warning.
        assert!(of_a.len() == 1 && of_a[0].contains("12.5 %"), "{of_a:?}");
        assert_eq!(of_b[..], [of_a[0].clone(), "warning: no flushes".into()]);
    }

    #[test]
    fn disks_are_kept_apart() {
        let run = |address: &str, seed| {
            let outcome = sample::mixed("a", seed);
            Outcome {
                address: address.into(),
                ..outcome
            }
        };
        let (one, two) = ("srp://127.0.0.1/disk/0", "srp://127.0.0.1/disk/1");
        let both: Vec<_> = (0..4)
            .flat_map(|i| [run(one, i), run(two, 10 + i)])
            .collect();
        let both = summaries(&both);
        let comparison = compare(&both, &both, MatchBy::Options);
        let rounds: Vec<_> = comparison.cases.iter().map(|case| case.rounds).collect();
        assert_eq!(rounds, [(4, 4), (4, 4)]);
        for case in &comparison.cases {
            assert!(case.metrics.iter().all(|f| f.a == f.b), "{case:?}");
        }
        // We don't know which of the two disks the third disk corresponds to.
        let third = summaries(&[run("srp://127.0.0.1/disk/2", 1)]);
        let comparison = compare(&both, &third, MatchBy::Options);
        assert!(comparison.cases.is_empty());
        let sides: String = comparison.unmatched.iter().map(|u| u.side).collect();
        assert_eq!(sides, "AAB");
        // Results for shared memory and for a network are not rounds of the same case.
        let shared = Outcome {
            device: Some("shm-127.0.0.1".into()),
            ..run(one, 20)
        };
        let comparison = compare(&summaries(&[run(one, 0), shared]), &third, MatchBy::Options);
        assert!(comparison.cases.is_empty(), "rounds of two disks");
        // The same applies to results with protection information.
        let protected = Outcome {
            protection: Some(1),
            ..run(one, 20)
        };
        let rounds = summaries(&[run(one, 0), protected]);
        let comparison = compare(&rounds, &third, MatchBy::Options);
        assert!(comparison.cases.is_empty(), "with and without protection");
        // If there is only one disk on each side, we can always compare them.
        let comparison = compare(&rounds_at(one, &both), &third, MatchBy::Options);
        assert_eq!(comparison.cases[0].rounds, (4, 1));
        assert!(comparison.unmatched.is_empty());
        let disks = comparison.cases[0].disks.each_ref().map(Option::as_deref);
        assert_eq!(disks, [Some(one), Some("srp://127.0.0.1/disk/2")]);
    }

    fn rounds_at(address: &str, runs: &[RunSummary]) -> Vec<RunSummary> {
        let at = |run: &&RunSummary| run.disk.as_deref() == Some(address);
        runs.iter().filter(at).cloned().collect()
    }

    #[test]
    fn missing_kinds_are_reported() {
        let a = rounds(4, 1);
        let mut b = rounds(4, 100);
        b[2].kinds.retain(|kind| kind.kind != OpKind::Write);
        let comparison = compare(&a, &b, MatchBy::Options);
        let case = &comparison.cases[0];
        let missing = Missing {
            what: "writes".into(),
            side: 'B',
            rounds: 1,
        };
        assert_eq!(case.missing, [missing], "trims are in no round at all");
        assert!(!case.metrics.iter().any(|f| f.name.starts_with("write")));
        assert!(case.metrics.iter().any(|f| f.name == "read iops"));
    }

    #[test]
    fn missing_values_are_reported() {
        let a = rounds(4, 1);
        let mut b = rounds(4, 100);
        b[0].kinds[0]
            .service
            .percentiles
            .retain(|(at, _)| *at < 99.5);
        for run in &mut b[..2] {
            run.client.as_mut().unwrap().switches_per_op = 0.0;
        }
        let comparison = compare(&a, &b, MatchBy::Options);
        let case = &comparison.cases[0];
        let missing = case
            .missing
            .iter()
            .map(|m| (m.what.as_str(), m.side, m.rounds));
        assert_eq!(
            missing.collect::<Vec<_>>(),
            [("read p99.9", 'B', 1), ("client switches per op", 'B', 2)]
        );
        assert!(case.metrics.iter().any(|f| f.name == "write p99.9"));
        // If it's missing in all rounds, there is nothing to compare.
        let mut without = b.clone();
        without.iter_mut().for_each(|run| run.server = None);
        let comparison = compare(&without, &without, MatchBy::Options);
        let case = &comparison.cases[0];
        assert!(!case.missing.iter().any(|m| m.what.starts_with("server")));
    }

    #[test]
    fn verdict_depends_on_unit() {
        let a = rounds(4, 1);
        let mut b = rounds(4, 100);
        for run in &mut b {
            for kind in &mut run.kinds {
                kind.iops *= 2.0;
                kind.service.mean *= 2.0;
            }
            let server = run.server.as_mut().unwrap();
            server.cpu_ns_per_op /= 2.0;
        }
        let comparison = compare(&a, &b, MatchBy::Options);
        assert_eq!(find(&comparison, "write iops").verdict, Verdict::Better);
        assert_eq!(find(&comparison, "write mean").verdict, Verdict::Worse);
        let cpu = find(&comparison, "server cpu per op");
        assert_eq!(cpu.verdict, Verdict::Better);
        assert_eq!(find(&comparison, "sync mean").verdict, Verdict::Worse);
        // Flushes don't transfer bytes, so there is no bandwidth ratio.
        let names = comparison.cases[0].metrics.iter().map(|f| f.name.as_str());
        assert!(!names.into_iter().any(|name| name == "sync bandwidth"));
    }

    #[test]
    fn few_rounds_have_no_verdict() {
        for n in 1..=3 {
            let mut b = rounds(n, 100);
            b.iter_mut().for_each(|run| run.kinds[0].iops *= 10.0);
            let comparison = compare(&rounds(n, 1), &b, MatchBy::Options);
            let iops = find(&comparison, "read iops");
            assert_eq!(iops.verdict, Verdict::TooFewRounds);
            assert!(iops.ratio > 8.0 && iops.interval.is_none());
        }
    }

    #[test]
    fn options_separate_cases() {
        let a = summaries(&sample::sweep("4k", &[1, 2, 4]));
        let b = summaries(&sample::sweep("4k", &[2, 4, 8]));
        let comparison = compare(&a, &b, MatchBy::Options);
        let depths = comparison.cases.iter().map(|case| &case.options[0]);
        let depths: Vec<_> = depths.map(|(_, depth)| depth.as_str()).collect();
        assert_eq!(depths, ["2", "4"]);
        let sides: String = comparison.unmatched.iter().map(|u| u.side).collect();
        assert_eq!(sides, "AB");
        let by_name = compare(&a, &b, MatchBy::Name);
        assert_eq!(by_name.cases.len(), 1);
        assert_eq!(by_name.cases[0].rounds, (3, 3));
    }

    #[test]
    fn option_forms_are_normalized() {
        let pairs = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            let owned = pairs.iter().map(|(k, v)| ((*k).into(), (*v).into()));
            owned.collect()
        };
        let one = [
            ("rw", "RandRead"),
            ("bs", "4k"),
            ("runtime", "2s"),
            ("filename", "/a"),
        ];
        let other = [
            ("blocksize", "4096"),
            ("readwrite", "randread"),
            ("runtime", "2"),
        ];
        assert_eq!(workload(&pairs(&one)), workload(&pairs(&other)));
        assert_eq!(workload(&pairs(&one)).len(), 2, "4 KiB are the default");
        let minutes = workload(&pairs(&[("runtime", "2m")]));
        assert_eq!(minutes, pairs(&[("runtime", "2m")]));
        let fio = [
            ("time_based", ""),
            ("norandommap", "1"),
            ("invalidate", "1"),
            ("rwmixwrite", "30"),
            ("blocksize_range", "4k-8k"),
            ("io_limit", "1m"),
            ("randrepeat", "0"),
        ];
        let ours = [
            ("time_based", "1"),
            ("rwmixread", "70"),
            ("bsrange", "4k-8k"),
            ("io_size", "1m"),
            ("randrepeat", "0"),
            ("randseed", "815"),
        ];
        assert_eq!(workload(&pairs(&fio)), workload(&pairs(&ours)));
        assert_eq!(workload(&pairs(&fio)).len(), 4);
    }

    #[test]
    fn default_options_match_omitted_options() {
        let pairs = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            let owned = pairs.iter().map(|(k, v)| ((*k).into(), (*v).into()));
            owned.collect()
        };
        let ours = crate::Job::default().options();
        assert!(workload(&ours).is_empty(), "{ours:?}");
        let fio = pairs(&[("bs", "4k"), ("direct", "1"), ("ioengine", "libaio")]);
        assert!(workload(&fio).is_empty());
        let more = pairs(&[("numjobs", "2"), ("iodepth", "8")]);
        assert_eq!(
            workload(&more),
            pairs(&[("iodepth", "8"), ("numjobs", "2")])
        );
    }

    #[test]
    fn response_times_require_both_sides() {
        let a = summaries(&[sample::open_loop("a", 1)]);
        let mut b = a.clone();
        let both = compare(&a, &b, MatchBy::Options);
        let response = a[0].kinds[0].response.as_ref().unwrap().mean;
        assert_eq!(find(&both, "read response mean").a, response);
        b[0].kinds[0].response = None;
        let one = compare(&a, &b, MatchBy::Options);
        assert_eq!(find(&one, "read mean").a, a[0].kinds[0].service.mean);
    }
}
