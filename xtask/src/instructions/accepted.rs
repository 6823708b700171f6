//! Compares instruction counts with the accepted counts to find an increase.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::dump::Dump;
use crate::{Failure, root};

/// Maximum increase in percent. If there was a larger difference between the accepted measurements,
/// we use this difference instead.
const LIMIT: f64 = 3.0;

/// Minimum increase of a group or of polling, in percent of the whole path, to be treated as a
/// failure. A small group may have a good reason to double its size. Also, if the machine is busy,
/// an operation can have up to 10 % more rounds, and most of their cost is in a single group.
const GROUP_LIMIT: f64 = 2.0;

/// Maximum increase of a round of the worker loop in percent, if the polling cost of an operation
/// also increases. It depends on timing how much of a round is spent on work and how much is spent
/// on checking for work.
const ROUND_LIMIT: f64 = 20.0;

/// Minimum size of a function or group to be saved to the file, in percent of the path.
const FLOOR: f64 = 0.3;

/// Number of functions to list if a path has increased.
const NAMED: usize = 8;

/// Number of instructions per operation for a path. Polling is counted separately.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Cost {
    pub(super) total: f64,
    /// Maximum difference between the measurements on which this is based, in percent.
    pub(super) spread: f64,
    /// Instructions in functions that are called in every round of the worker loop. If this has
    /// increased, we compare the cost per round.
    pub(super) polling: f64,
    /// Number of rounds per operation, which depends on timing.
    pub(super) rounds: f64,
    /// Instructions by source directory or by library.
    pub(super) groups: BTreeMap<String, f64>,
    /// Instructions of the functions that are large enough to be listed.
    pub(super) functions: BTreeMap<String, f64>,
}

impl Cost {
    /// Returns the measurement with the minimum total. For each group and function, we use the
    /// minimum of all measurements: on a busy machine, the cost of a measurement can increase in
    /// different places, but a code change will increase the cost of all measurements.
    ///
    /// # Panics
    /// Panics if there are no measurements.
    pub(super) fn least(mut runs: Vec<Dump>) -> Self {
        runs.sort_by(|a, b| a.total().total_cmp(&b.total()));
        let run = &runs[0];
        let spread = 100.0 * (runs[runs.len() - 1].total() - run.total()) / run.total();
        let floor = FLOOR / 100.0 * run.total();
        let worth = |costs: fn(&Dump) -> &BTreeMap<String, f64>| {
            let least = costs(run).keys().map(|name| {
                // If a measurement doesn't contain this function, no instructions were counted for
                // it.
                let each = runs.iter().map(|run| costs(run).get(name).copied());
                let each = each.map(Option::unwrap_or_default);
                (name.clone(), tenths(each.fold(f64::INFINITY, f64::min)))
            });
            least.filter(|(_, cost)| *cost >= floor).collect()
        };
        Self {
            total: tenths(run.total()),
            spread: tenths(spread),
            polling: tenths(run.polling),
            // This can be less than one per operation if there are many operations at the same
            // time.
            rounds: (run.rounds * 1000.0).round() / 1000.0,
            groups: worth(|run| &run.groups),
            functions: worth(|run| &run.functions),
        }
    }

    fn round(&self) -> f64 {
        self.polling / self.rounds
    }
}

fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

/// Contents of the file with the accepted counts.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Accepted {
    /// Versions that affect the counts, in addition to the code.
    pub(super) made_with: BTreeMap<String, String>,
    /// Cost of each path by name.
    pub(super) paths: BTreeMap<String, Cost>,
}

impl Accepted {
    fn file() -> PathBuf {
        root().join("xtask/instructions.json")
    }

    /// Reads the file.
    ///
    /// # Errors
    /// Returns an error if the file can't be read or is not valid.
    pub(super) fn load() -> Result<Self, Failure> {
        let file = Self::file();
        let named = |why: &dyn std::fmt::Display| format!("{}: {why}", file.display());
        let text = fs::read_to_string(&file).map_err(|e| named(&e))?;
        Ok(serde_json::from_str(&text).map_err(|e| named(&e))?)
    }

    /// Writes the file.
    ///
    /// # Errors
    /// Returns an error if the file can't be written.
    pub(super) fn save(&self) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(self)?;
        Ok(fs::write(Self::file(), text + "\n")?)
    }

    /// Prepares to update the counts of some or all paths using these versions. Counts for other
    /// versions are removed.
    ///
    /// # Errors
    /// Returns an error if we would only update some paths and the remaining counts are for other
    /// versions.
    pub(super) fn renew(
        &mut self,
        made_with: BTreeMap<String, String>,
        are_all: bool,
    ) -> Result<(), Failure> {
        let others = self.other_versions(&made_with);
        if !others.is_empty() {
            if !are_all {
                let why = "all paths must be counted again: omit the words";
                return Err(format!("{}; {why}", others.join("; ")).into());
            }
            self.paths.clear();
        }
        self.made_with = made_with;
        Ok(())
    }

    pub(super) fn other_versions(&self, here: &BTreeMap<String, String>) -> Vec<String> {
        let none = "none".to_owned();
        let of = |versions: &BTreeMap<String, String>, name| {
            let version: Option<&String> = versions.get(name);
            version.unwrap_or(&none).clone()
        };
        let differ = here
            .keys()
            .chain(self.made_with.keys().filter(|n| !here.contains_key(*n)));
        let differ = differ.filter(|name| self.made_with.get(*name) != here.get(*name));
        let said = differ.map(|name| {
            let (theirs, ours) = (of(&self.made_with, name), of(here, name));
            format!("{name}: the accepted counts require {theirs}, found {ours}")
        });
        said.collect()
    }
}

/// Checks if the cost exceeds the limits and returns a message that includes the path, round or
/// groups, and the functions that have increased. Returns `None` if there is no increase.
pub(super) fn growth(path: &str, before: &Cost, after: &Cost) -> Option<String> {
    let mut grown = Vec::new();
    // We must ignore differences that were also found between the accepted measurements.
    let limit = LIMIT.max(before.spread);
    if has_grown(before.total, after.total, limit) {
        grown.push(line(path, Some(before.total), after.total));
    }
    let least = GROUP_LIMIT / 100.0 * before.total;
    // If there are more operations per round but fewer rounds, a round will take longer, but this
    // is an improvement. With a deep queue, the number of operations per round depends on timing,
    // and polling is only a small part of the cost of an operation.
    if has_grown(before.round(), after.round(), ROUND_LIMIT)
        && has_grown(before.polling, after.polling, LIMIT)
        && after.polling - before.polling > least
    {
        let round = format!("{path}, polling in a round");
        grown.push(line(&round, Some(before.round()), after.round()));
    }
    for (group, cost) in &after.groups {
        let old = before.groups.get(group).copied();
        let accepted = old.unwrap_or(floor(before));
        if has_grown(accepted, *cost, limit) && cost - accepted > least {
            grown.push(line(&format!("{path}, {group}"), old, *cost));
        }
    }
    if grown.is_empty() {
        return None;
    }
    let functions = grown_functions(before, after);
    grown.extend(functions.map(|(name, old, new)| format!("    {}", line(name, old, new))));
    Some(grown.join("\n"))
}

fn floor(before: &Cost) -> f64 {
    FLOOR / 100.0 * before.total
}

/// Returns whether the increase exceeds the limit in percent. NaN is treated as an increase.
fn has_grown(before: f64, after: f64, limit: f64) -> bool {
    let is_within = after <= before * (1.0 + limit / 100.0);
    !is_within
}

/// Returns the functions with the largest increase, including the previous and current cost. If a
/// function was too small to be in the file, there is no previous cost.
fn grown_functions<'a>(
    before: &Cost,
    after: &'a Cost,
) -> impl Iterator<Item = (&'a str, Option<f64>, f64)> {
    let floor = floor(before);
    let growth = |(name, new): (&'a String, &f64)| {
        let old = before.functions.get(name).copied();
        // The function was below the minimum size, so at least the rest of the cost is new.
        let growth = new - old.unwrap_or(floor);
        (growth > 0.0).then_some((growth, (name.as_str(), old, *new)))
    };
    let mut all: Vec<_> = after.functions.iter().filter_map(growth).collect();
    all.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    all.into_iter().map(|(_, named)| named).take(NAMED)
}

fn line(what: &str, before: Option<f64>, after: f64) -> String {
    match before {
        Some(before) => {
            let percent = 100.0 * (after - before) / before;
            format!("{what}: {before:.0} before, {after:.0} after ({percent:+.1} %)")
        }
        None => format!("{what}: new, {after:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(entries: &[(&str, f64)]) -> BTreeMap<String, f64> {
        let owned = |(name, cost): &(&str, f64)| ((*name).to_owned(), *cost);
        entries.iter().map(owned).collect()
    }

    fn cost(groups: &[(&str, f64)], functions: &[(&str, f64)]) -> Cost {
        Cost {
            total: groups.iter().map(|(_, cost)| cost).sum(),
            spread: 0.5,
            polling: 2000.0,
            rounds: 3.0,
            groups: costs(groups),
            functions: costs(functions),
        }
    }

    fn accepted() -> Cost {
        cost(
            &[("rc", 5000.0), ("scsi", 4900.0), ("pool", 100.0)],
            &[
                ("rc::cut", 3000.0),
                ("rc::poll", 2000.0),
                ("scsi::start", 4900.0),
            ],
        )
    }

    #[test]
    fn growing_path_is_rejected_with_functions() {
        let grown = cost(
            &[("rc", 5450.0), ("scsi", 4880.0), ("pool", 100.0)],
            &[
                ("rc::cut", 3350.0),
                ("rc::poll", 2000.0),
                ("rc::new", 100.0),
                ("scsi::start", 4880.0),
            ],
        );
        let why = growth("srp read 1", &accepted(), &grown).unwrap();
        let lines: Vec<_> = why.lines().collect();
        let expected = [
            "srp read 1: 10000 before, 10430 after (+4.3 %)",
            "srp read 1, rc: 5000 before, 5450 after (+9.0 %)",
            "    rc::cut: 3000 before, 3350 after (+11.7 %)",
            "    rc::new: new, 100",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn noise_and_gains_are_no_growth() {
        let noise = cost(&[("rc", 5090.0), ("scsi", 4950.0), ("pool", 190.0)], &[]);
        assert_eq!(
            growth("p", &accepted(), &noise),
            None,
            "2.3 %, and a small group"
        );
        let gain = cost(&[("rc", 2000.0), ("scsi", 4900.0)], &[("rc::cut", 100.0)]);
        assert_eq!(growth("p", &accepted(), &gain), None);
        assert_eq!(growth("p", &accepted(), &accepted()), None);
        let polling = Cost {
            polling: 6000.0,
            rounds: 9.0,
            ..accepted()
        };
        assert_eq!(
            growth("p", &accepted(), &polling),
            None,
            "it is a matter of time"
        );
    }

    #[test]
    fn growing_round_is_rejected() {
        let busy = |polling| Cost {
            polling,
            ..accepted()
        };
        let why = growth("p", &accepted(), &busy(4000.0)).unwrap();
        let expected = "p, polling in a round: 667 before, 1333 after (+100.0 %)";
        assert_eq!(why, expected);
        assert_eq!(growth("p", &accepted(), &busy(2390.0)), None, "19.5 %");
    }

    #[test]
    fn fewer_larger_rounds_are_accepted() {
        let polling = |polling, rounds| Cost {
            polling,
            rounds,
            ..accepted()
        };
        let before = polling(402.1, 0.069);
        assert_eq!(growth("p", &before, &polling(368.5, 0.052)), None);
        assert!(growth("p", &before, &polling(620.0, 0.069)).is_some());
    }

    #[test]
    fn small_polling_cost_is_ignored() {
        let deep = |polling| Cost {
            polling,
            rounds: 0.03,
            ..accepted()
        };
        assert_eq!(growth("p", &deep(138.0), &deep(205.0)), None, "67 of 10000");
        assert!(growth("p", &deep(138.0), &deep(340.0)).is_some());
    }

    #[test]
    fn new_group_grows_from_floor() {
        let with = |audit| {
            let groups = [("rc", 5000.0), ("scsi", 4900.0), ("audit", audit)];
            Cost {
                total: 10_000.0,
                ..cost(&groups, &[])
            }
        };
        assert_eq!(growth("p", &accepted(), &with(225.0)), None, "from 30");
        assert!(growth("p", &accepted(), &with(235.0)).is_some());
    }

    #[test]
    fn gain_does_not_hide_growing_group() {
        let shifted = cost(&[("rc", 5300.0), ("scsi", 4600.0), ("pool", 100.0)], &[]);
        let why = growth("p", &accepted(), &shifted).unwrap();
        assert_eq!(why, "p, rc: 5000 before, 5300 after (+6.0 %)");
        let new = cost(&[("rc", 4000.0), ("scsi", 4900.0), ("audit", 1100.0)], &[]);
        let why = growth("p", &accepted(), &new).unwrap();
        assert_eq!(why, "p, audit: new, 1100");
    }

    #[test]
    fn limit_is_three_percent() {
        let has_grown = |before, after| has_grown(before, after, LIMIT);
        assert!(!has_grown(100.0, 103.0) && has_grown(100.0, 103.1));
        assert!(has_grown(100.0, f64::NAN) && has_grown(f64::NAN, 100.0));
    }

    #[test]
    fn cost_uses_minimum_of_runs() {
        let run = |total: f64| Dump {
            functions: costs(&[("big", total - 10.0), ("tiny", 0.2)]),
            groups: costs(&[("rc", total)]),
            polling: 50.04,
            rounds: 0.2504,
        };
        let cost = Cost::least(vec![run(1100.0), run(1000.0), run(1020.0)]);
        assert_eq!(
            (cost.total, cost.spread, cost.polling),
            (1000.0, 10.0, 50.0)
        );
        assert_eq!(cost.rounds, 0.25);
        assert_eq!(cost.functions, costs(&[("big", 990.0)]));
    }

    #[test]
    fn growth_is_detected_despite_spread() {
        let run = |total: f64| Dump {
            functions: costs(&[("big", total)]),
            groups: costs(&[("rc", total)]),
            polling: 50.0,
            rounds: 0.25,
        };
        let least = |totals: [f64; 4], part: f64| {
            Cost::least(totals.iter().map(|total| run(total * part)).collect())
        };
        let near = [9900.0, 9950.0, 10_050.0, 10_170.0];
        assert!(growth("p", &least(near, 1.0), &least(near, 1.04)).is_some());
        assert_eq!(growth("p", &least(near, 1.0), &least(near, 1.02)), None);
        // The limit can't be smaller than the difference between these measurements.
        let far = [9700.0, 9950.0, 10_100.0, 10_185.0];
        assert_eq!(growth("p", &least(far, 1.0), &least(far, 1.04)), None);
        assert!(growth("p", &least(far, 1.0), &least(far, 1.06)).is_some());
    }

    #[test]
    fn group_cost_uses_minimum_of_runs() {
        let run = |rc: f64, scsi: f64| Dump {
            functions: costs(&[]),
            groups: costs(&[("rc", rc), ("scsi", scsi)]),
            polling: 50.0,
            rounds: 0.25,
        };
        let cost = Cost::least(vec![run(500.0, 400.0), run(480.0, 450.0)]);
        assert_eq!(cost.total, 900.0);
        assert_eq!(cost.groups, costs(&[("rc", 480.0), ("scsi", 400.0)]));
    }

    #[test]
    fn accepted_counts_round_trip() {
        let file = Accepted {
            made_with: BTreeMap::from([("rustc".to_owned(), "1".to_owned())]),
            paths: BTreeMap::from([("srp read 1".to_owned(), accepted())]),
        };
        let text = serde_json::to_string(&file).unwrap();
        let read: Accepted = serde_json::from_str(&text).unwrap();
        assert_eq!(read.paths["srp read 1"], accepted());
        assert!(read.other_versions(&file.made_with).is_empty());
        let newer = BTreeMap::from([("rustc".to_owned(), "2".to_owned())]);
        let why = "rustc: the accepted counts require 1, found 2";
        assert_eq!(read.other_versions(&newer), [why]);
        let none = "rustc: the accepted counts require 1, found none";
        assert_eq!(read.other_versions(&BTreeMap::new()), [none]);
    }

    #[test]
    fn new_versions_require_counting_all_paths() {
        let versions = |rustc: &str| BTreeMap::from([("rustc".to_owned(), rustc.to_owned())]);
        let mut file = Accepted {
            made_with: versions("1"),
            paths: BTreeMap::from([("srp read 1".to_owned(), accepted())]),
        };
        file.renew(versions("1"), false).unwrap();
        let why = file.renew(versions("2"), false).unwrap_err().to_string();
        assert!(why.contains("rustc") && why.contains("all paths"), "{why}");
        assert_eq!((file.paths.len(), &file.made_with), (1, &versions("1")));
        file.renew(versions("2"), true).unwrap();
        assert_eq!((file.paths.len(), &file.made_with), (0, &versions("2")));
    }

    #[test]
    fn accepted_counts_cover_paths() {
        let accepted = Accepted::load().unwrap();
        // If there are no accepted counts, this is reported by the comparison.
        if accepted.paths.is_empty() {
            return;
        }
        let names: Vec<_> = super::super::paths::all()
            .map(|path| path.to_string())
            .collect();
        for name in &names {
            assert!(accepted.paths[name].total > 1000.0, "{name}");
        }
        assert_eq!(accepted.paths.len(), names.len());
    }
}
