//! Finds steps in a curve where the cost exceeds the limit.

use super::curves::{CURVES, Curve, Rule};
use super::results::Scaling;
use super::stats::{Interval, Summary, ratios};
use super::systems::{ISCSI, ISER, SRP, named};

/// Systems to check. All other systems are used for comparison.
const OURS: [&str; 3] = [SRP, ISER, ISCSI];

/// A step of one system between two adjacent points of a curve.
#[derive(Debug)]
pub(super) struct Step {
    curve: &'static Curve,
    system: &'static str,
    from: f64,
    to: f64,
    /// Ratio of the values after and before this step, using values from the same round.
    ratio: Summary,
    interval: Interval,
}

impl Step {
    pub(super) fn is_cliff(&self) -> bool {
        self.curve.rule.is_broken(self.interval)
    }

    pub(super) fn is_of(&self, curve: &Curve) -> bool {
        self.curve.id == curve.id
    }

    pub(super) fn describe(&self) -> String {
        let label = named(self.system).map_or(self.system, |system| system.label);
        let (from, to) = (self.curve.label(self.from), self.curve.label(self.to));
        let Summary { median, min, max } = self.ratio;
        let bound = match self.curve.rule {
            Rule::Keeps(share) => format!("at least {share}"),
            Rule::Grows(multiple) => format!("at most {multiple}"),
        };
        format!(
            "{}: {label}: {from} to {to}: {median:.2} ({min:.2} to {max:.2}), required {bound}",
            self.curve.id
        )
    }
}

pub(super) fn steps(scaling: &Scaling) -> Vec<Step> {
    let curves = CURVES.iter().flat_map(|curve| {
        let systems = curve.systems.iter().filter(|id| OURS.contains(id));
        systems.map(move |id| (curve, *id))
    });
    let steps = curves.flat_map(|(curve, system)| {
        let pairs = curve.xs.windows(2);
        pairs.filter_map(move |pair| step(scaling, curve, system, (pair[0], pair[1])))
    });
    steps.collect()
}

fn step(
    scaling: &Scaling,
    curve: &'static Curve,
    system: &'static str,
    (from, to): (f64, f64),
) -> Option<Step> {
    let values = |x| scaling.values(curve.id, system, x);
    let mut ratios = ratios(&values(to), &values(from));
    // A round with zero throughput before the step can't be used for comparison.
    ratios.retain(|ratio| ratio.is_finite());
    Some(Step {
        curve,
        system,
        from,
        to,
        ratio: Summary::of(&ratios)?,
        interval: Interval::of(&ratios)?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::results::Point;
    use super::super::results::tests::provenance;
    use super::super::systems::NBDKIT;
    use super::*;

    fn scaling(curve: &str, system: &str, places: &[(f64, &[f64])]) -> Scaling {
        let points = places.iter().flat_map(|(x, rounds)| {
            rounds.iter().enumerate().map(|(round, y)| Point {
                curve: curve.to_owned(),
                system: system.to_owned(),
                x: *x,
                round,
                y: *y,
            })
        });
        Scaling {
            measured: provenance(),
            points: points.collect(),
        }
    }

    fn cliffs(curve: &str, system: &str, places: &[(f64, &[f64])]) -> Vec<String> {
        let steps = steps(&scaling(curve, system, places));
        let cliffs = steps.iter().filter(|step| step.is_cliff());
        cliffs.map(Step::describe).collect()
    }

    #[test]
    fn throughput_loss_in_all_rounds_is_cliff() {
        let places: &[(f64, &[f64])] = &[
            (32.0, &[100.0, 110.0, 90.0]),
            (64.0, &[100.0, 100.0, 100.0]),
            (128.0, &[50.0, 60.0, 55.0]),
            // This step rises again, but this must not make up for the previous one.
            (256.0, &[120.0, 120.0, 120.0]),
        ];
        let found = cliffs("depth", SRP, places);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            found[0],
            "depth: SRP: 64 to 128: 0.55 (0.50 to 0.60), required at least 0.9"
        );
        assert!(cliffs("depth", NBDKIT, places).is_empty(), "a peer");
    }

    #[test]
    fn loss_within_noise_is_not_cliff() {
        let noisy: &[(f64, &[f64])] = &[(1.0, &[100.0, 100.0]), (2.0, &[50.0, 95.0])];
        assert!(cliffs("depth", SRP, noisy).is_empty());
        // Under packet loss, we expect throughput to fall.
        let falling: &[(f64, &[f64])] = &[(1.0, &[100.0, 100.0]), (2.0, &[50.0, 55.0])];
        assert_eq!(cliffs("depth", SRP, falling).len(), 1);
        assert!(cliffs("loss", SRP, falling).is_empty());
        let gone: &[(f64, &[f64])] = &[(1.0, &[100.0, 100.0]), (2.0, &[0.0, 0.0])];
        assert_eq!(cliffs("loss", SRP, gone).len(), 1);
    }

    #[test]
    fn excessive_growth_is_cliff() {
        let tail = |behind: f64| cliffs("tail", SRP, &[(50.0, &[4.0]), (70.0, &[behind])]);
        assert!(tail(11.0).is_empty());
        assert_eq!(tail(13.0).len(), 1);
        assert!(tail(1.0).is_empty(), "better");
    }

    #[test]
    fn steps_need_both_measured_points() {
        let places: &[(f64, &[f64])] = &[(1.0, &[100.0]), (4.0, &[1.0])];
        assert!(steps(&scaling("depth", SRP, places)).is_empty());
        assert!(steps(&scaling("depth", SRP, &[])).is_empty());
    }
}
