//! Steps of a curve that cost more than they may.

use super::curves::{CURVES, Curve, Rule};
use super::results::Scaling;
use super::stats::{Interval, Summary, ratios};
use super::systems::{ISCSI, ISER, SRP, named};

/// Systems that are judged; the others are peers.
const OURS: [&str; 3] = [SRP, ISER, ISCSI];

/// A step from one place of a curve to the next, by one system.
#[derive(Debug)]
pub(super) struct Step {
    curve: &'static Curve,
    system: &'static str,
    from: f64,
    to: f64,
    /// Figures behind the step by those before it, of the same round.
    ratio: Summary,
    interval: Interval,
}

impl Step {
    /// Whether it costs more than it may, beyond noise.
    pub(super) fn is_cliff(&self) -> bool {
        self.curve.rule.is_broken(self.interval)
    }

    pub(super) fn is_of(&self, curve: &Curve) -> bool {
        self.curve.id == curve.id
    }

    /// Its name, and its figures beside the bound.
    pub(super) fn describe(&self) -> String {
        let label = named(self.system).map_or(self.system, |system| system.label);
        let (from, to) = (self.curve.label(self.from), self.curve.label(self.to));
        let Summary { median, min, max } = self.ratio;
        let bound = match self.curve.rule {
            Rule::Keeps(share) => format!("at least {share}"),
            Rule::Grows(multiple) => format!("at most {multiple}"),
        };
        format!(
            "{}: {label}: {from} to {to}: {median:.2} ({min:.2} to {max:.2}), not {bound}",
            self.curve.id
        )
    }
}

/// All steps that were measured, in the order of the curves.
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
    let figures = |x| scaling.figures(curve.id, system, x);
    let mut ratios = ratios(&figures(to), &figures(from));
    // A round without any throughput before the step says nothing about it.
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

    /// Rounds of a curve: for each place the figure of each round.
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
    fn a_step_that_loses_throughput_in_all_rounds_is_a_cliff_with_its_name() {
        let places: &[(f64, &[f64])] = &[
            (32.0, &[100.0, 110.0, 90.0]),
            (64.0, &[100.0, 100.0, 100.0]),
            (128.0, &[50.0, 60.0, 55.0]),
            // From there on it rises again, which does not make up for it.
            (256.0, &[120.0, 120.0, 120.0]),
        ];
        let found = cliffs("depth", SRP, places);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            found[0],
            "depth: SRP: 64 to 128: 0.55 (0.50 to 0.60), not at least 0.9"
        );
        assert!(cliffs("depth", NBDKIT, places).is_empty(), "a peer");
    }

    #[test]
    fn what_a_step_loses_within_noise_or_within_the_rule_is_no_cliff() {
        let noisy: &[(f64, &[f64])] = &[(1.0, &[100.0, 100.0]), (2.0, &[50.0, 95.0])];
        assert!(cliffs("depth", SRP, noisy).is_empty());
        // Under loss it is expected to fall.
        let falling: &[(f64, &[f64])] = &[(1.0, &[100.0, 100.0]), (2.0, &[50.0, 55.0])];
        assert_eq!(cliffs("depth", SRP, falling).len(), 1);
        assert!(cliffs("loss", SRP, falling).is_empty());
        let gone: &[(f64, &[f64])] = &[(1.0, &[100.0, 100.0]), (2.0, &[0.0, 0.0])];
        assert_eq!(cliffs("loss", SRP, gone).len(), 1);
    }

    #[test]
    fn where_less_is_better_a_step_may_not_grow_too_much() {
        let tail = |behind: f64| cliffs("tail", SRP, &[(50.0, &[4.0]), (70.0, &[behind])]);
        assert!(tail(11.0).is_empty());
        assert_eq!(tail(13.0).len(), 1);
        assert!(tail(1.0).is_empty(), "better");
    }

    #[test]
    fn steps_are_between_neighbours_that_were_both_measured() {
        let places: &[(f64, &[f64])] = &[(1.0, &[100.0]), (4.0, &[1.0])];
        assert!(steps(&scaling("depth", SRP, places)).is_empty());
        assert!(steps(&scaling("depth", SRP, &[])).is_empty());
    }
}
