//! Performance targets relative to other systems, and checks if we meet them.

use std::sync::LazyLock;

use serde::Deserialize;

use super::results::{Comparison, Sample};
use super::stats::{Interval, Summary, ratios};
use super::systems::WIRE;
use super::tables::{self, Text, text};
use super::workloads::READ_SEQ;

/// Minimum number of rounds required to check targets: with fewer rounds, we can't see the noise.
pub(super) const MIN_ROUNDS: usize = 3;

/// Value of a sample to compare.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Measure {
    Iops,
    Bandwidth,
    /// Median latency; smaller is better.
    Latency,
    /// CPU time of both sides per operation; smaller is better.
    Cpu,
}

impl Measure {
    pub(super) fn of(self, sample: &Sample) -> Option<f64> {
        match self {
            Self::Iops => Some(sample.iops),
            Self::Bandwidth => Some(sample.bytes_per_second),
            Self::Latency => sample.p50_ns,
            Self::Cpu => Some(sample.server_ns? + sample.client_ns?),
        }
    }

    pub(super) fn is_better_smaller(self) -> bool {
        matches!(self, Self::Latency | Self::Cpu)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Iops => "IOPS",
            Self::Bandwidth => "bandwidth",
            Self::Latency => "median latency",
            Self::Cpu => "processor time",
        }
    }
}

/// Value that we would like to reach.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Aim {
    /// Ratio to the system used for comparison.
    Ratio(f64),
    /// Fraction of the bandwidth of the wire, as measured by `riser bench wire`.
    OfWire(f64),
}

/// Ratio that must be reached by one of our systems.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Target {
    #[serde(deserialize_with = "text")]
    pub(super) system: Text,
    #[serde(deserialize_with = "text")]
    pub(super) workload: Text,
    pub(super) measure: Measure,
    /// System used for comparison.
    #[serde(deserialize_with = "text")]
    pub(super) baseline: Text,
    /// Minimum ratio, or maximum ratio if smaller is better.
    pub(super) at_least: f64,
    pub(super) aim: Aim,
}

/// All targets.
pub(super) static TARGETS: LazyLock<Vec<Target>> = LazyLock::new(|| tables::read("targets"));

/// Result for a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The median reaches the aim.
    Aimed,
    /// The median reaches the minimum.
    Met,
    /// The median is below the minimum, but the interval includes it, so this may be noise.
    WithinNoise,
    /// The whole interval is below the minimum.
    Missed,
}

/// A target with its measured values.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedTarget {
    pub(super) target: Target,
    /// Ratios of all rounds.
    pub(super) ratio: Summary,
    pub(super) interval: Interval,
    /// Fraction of the wire bandwidth, if this is used as an aim and was measured.
    pub(super) of_wire: Option<f64>,
    pub(super) verdict: Verdict,
}

impl CheckedTarget {
    /// Returns our lead as a ratio; values above one are better for all measures.
    pub(super) fn lead(&self) -> f64 {
        if self.target.measure.is_better_smaller() {
            1.0 / self.ratio.median
        } else {
            self.ratio.median
        }
    }
}

/// Checks all measured targets, in order.
pub(super) fn check_targets(comparison: &Comparison) -> Vec<CheckedTarget> {
    let targets = TARGETS.iter().copied();
    targets
        .filter_map(|target| check_target(target, comparison))
        .collect()
}

fn check_target(target: Target, comparison: &Comparison) -> Option<CheckedTarget> {
    let values =
        |system| comparison.values(system, target.workload, |sample| target.measure.of(sample));
    let ours = values(target.system);
    let all = ratios(&ours, &values(target.baseline));
    let ratio = Summary::of(&all)?;
    let interval = Interval::of(&all)?;
    let of_wire = match target.aim {
        Aim::Ratio(_) => None,
        // The wire has the same bandwidth in both directions, but we only measure the direction
        // used for reads.
        Aim::OfWire(_) => {
            let wire = comparison.values(WIRE, READ_SEQ, |sample| target.measure.of(sample));
            Summary::of(&ratios(&ours, &wire)).map(|share| share.median)
        }
    };
    let is_smaller = target.measure.is_better_smaller();
    let reaches = |value: f64, bound: f64| {
        if is_smaller {
            value <= bound
        } else {
            value >= bound
        }
    };
    let is_aimed = match target.aim {
        Aim::Ratio(aim) => reaches(ratio.median, aim),
        Aim::OfWire(aim) => of_wire.is_some_and(|share| share >= aim),
    };
    let best = if is_smaller {
        interval.low
    } else {
        interval.high
    };
    // Use a comparison that is false for NaN, so that it's a miss.
    let verdict = match reaches(ratio.median, target.at_least) {
        true if is_aimed => Verdict::Aimed,
        true => Verdict::Met,
        false if reaches(best, target.at_least) => Verdict::WithinNoise,
        false => Verdict::Missed,
    };
    Some(CheckedTarget {
        target,
        ratio,
        interval,
        of_wire,
        verdict,
    })
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::{provenance, sample};
    use super::super::systems::{NBDKIT, SRP};
    use super::super::workloads::{READ_32, WRITE_SEQ};
    use super::super::{systems, workloads};
    use super::*;

    /// Checks a target using the given ratio for each round, where the other system always has a
    /// value of 100.
    fn verdict(target: Target, ratios: &[f64]) -> Verdict {
        let mut samples = Vec::new();
        for (ratio, round) in ratios.iter().zip(1..) {
            // In this sample, latency and CPU time are the inverse of the number of operations.
            let iops = if target.measure.is_better_smaller() {
                100.0 / ratio
            } else {
                100.0 * ratio
            };
            samples.push(sample(round, (target.baseline, target.workload), 100.0));
            samples.push(sample(round, (target.system, target.workload), iops));
        }
        let comparison = Comparison {
            measured: provenance(),
            skipped: Vec::new(),
            samples,
        };
        check_target(target, &comparison).unwrap().verdict
    }

    fn target(measure: Measure, at_least: f64, aim: f64) -> Target {
        Target {
            system: SRP,
            workload: READ_32,
            measure,
            baseline: NBDKIT,
            at_least,
            aim: Aim::Ratio(aim),
        }
    }

    #[test]
    fn miss_requires_more_than_noise() {
        let iops = target(Measure::Iops, 1.5, 2.0);
        for (ratios, expected) in [
            ([2.1, 2.2, 1.0], Verdict::Aimed),
            ([1.6, 1.7, 1.0], Verdict::Met),
            ([1.4, 1.45, 1.6], Verdict::WithinNoise),
            ([1.4, 1.45, 1.49], Verdict::Missed),
            ([f64::NAN, f64::NAN, f64::NAN], Verdict::Missed),
        ] {
            assert_eq!(verdict(iops, &ratios), expected, "{ratios:?}");
        }
    }

    #[test]
    fn smaller_latency_and_cpu_is_better() {
        for measure in [Measure::Latency, Measure::Cpu] {
            let target = target(measure, 0.4, 0.3);
            for (ratios, expected) in [
                ([0.2, 0.25, 0.9], Verdict::Aimed),
                ([0.35, 0.38, 0.9], Verdict::Met),
                ([0.5, 0.45, 0.35], Verdict::WithinNoise),
                ([0.5, 0.45, 0.41], Verdict::Missed),
            ] {
                assert_eq!(verdict(target, &ratios), expected, "{measure:?} {ratios:?}");
            }
        }
    }

    #[test]
    fn bandwidth_aim_is_wire_share() {
        let target = Target {
            workload: READ_SEQ,
            aim: Aim::OfWire(0.8),
            ..target(Measure::Bandwidth, 1.1, 0.0)
        };
        let of = |system, iops| sample(1, (system, READ_SEQ), iops);
        let checked = |samples| {
            let comparison = Comparison {
                measured: provenance(),
                skipped: Vec::new(),
                samples,
            };
            check_target(target, &comparison).unwrap()
        };
        let without = checked(vec![of(SRP, 120.0), of(NBDKIT, 100.0)]);
        assert_eq!((without.verdict, without.of_wire), (Verdict::Met, None));
        let with = checked(vec![of(SRP, 120.0), of(NBDKIT, 100.0), of(WIRE, 150.0)]);
        assert_eq!((with.verdict, with.of_wire), (Verdict::Aimed, Some(0.8)));
        let writes = |system, iops| sample(1, (system, WRITE_SEQ), iops);
        let comparison = Comparison {
            measured: provenance(),
            skipped: Vec::new(),
            samples: vec![writes(SRP, 120.0), writes(NBDKIT, 100.0), of(WIRE, 150.0)],
        };
        let target = Target {
            workload: WRITE_SEQ,
            ..target
        };
        assert_eq!(
            check_target(target, &comparison).unwrap().of_wire,
            Some(0.8)
        );
    }

    #[test]
    fn unmeasured_target_is_not_checked() {
        let comparison = Comparison {
            measured: provenance(),
            skipped: Vec::new(),
            samples: vec![
                sample(1, (SRP, READ_32), 1.0),
                sample(2, (NBDKIT, READ_32), 1.0),
            ],
        };
        assert!(check_targets(&comparison).is_empty());
    }

    #[test]
    fn targets_use_systems_supporting_workload() {
        for Target {
            system,
            workload,
            baseline,
            ..
        } in TARGETS.iter().copied()
        {
            let load = &workloads::named(workload).unwrap().load;
            for name in [system, baseline] {
                let system = systems::named(name).unwrap();
                assert!(system.runs(load), "{name} does not run {workload}");
            }
        }
    }

    #[test]
    fn lead_above_one_is_always_better() {
        let checked = |measure, ratio| {
            let ratio = Summary {
                median: ratio,
                min: ratio,
                max: ratio,
            };
            CheckedTarget {
                target: target(measure, 1.0, 1.0),
                ratio,
                interval: Interval {
                    low: 1.0,
                    high: 1.0,
                },
                of_wire: None,
                verdict: Verdict::Met,
            }
        };
        assert_eq!(checked(Measure::Iops, 2.0).lead(), 2.0);
        assert_eq!(checked(Measure::Latency, 0.5).lead(), 2.0);
    }
}
