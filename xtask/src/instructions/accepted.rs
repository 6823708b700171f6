//! The counts that were accepted, and what has grown since.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::dump::Dump;
use crate::{Failure, root};

/// Growth beyond which the code is refused, in percent, unless the accepted runs themselves differ
/// by more.
const LIMIT: f64 = 3.0;

/// Part of a path by which a group must grow as well, in percent of the path: small groups may
/// double for a reason that is worth it, and on a busy machine an operation has up to a tenth more
/// rounds, most of whose cost is in one group.
const GROUP_LIMIT: f64 = 2.0;

/// Growth of a round of the worker's loop beyond which the code is refused, in percent, if the
/// polling of an operation grows as well. How much of a round is work, and how much only looks for
/// work, is a matter of time.
const ROUND_LIMIT: f64 = 20.0;

/// Smallest part of a path of a function or group that is kept in the file, in percent of the path.
const FLOOR: f64 = 0.3;

/// Functions that are named where a path has grown.
const NAMED: usize = 8;

/// Instructions of an operation on one path, polling apart.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Cost {
    pub(super) total: f64,
    /// Largest difference between the runs that it is taken from, in percent of it.
    pub(super) spread: f64,
    /// Of the functions that are called in each round of the worker's loop. Compared is their cost
    /// in one round, where this grows too.
    pub(super) polling: f64,
    /// Rounds for each operation, which are a matter of time.
    pub(super) rounds: f64,
    /// By folder of our sources, or by library.
    pub(super) groups: BTreeMap<String, f64>,
    /// Of the functions that have a share worth naming.
    pub(super) functions: BTreeMap<String, f64>,
}

impl Cost {
    /// The run with the least total, and of each group and function the least of all runs: a busy
    /// machine makes some runs dearer, each in other places, and code makes all of them so.
    ///
    /// # Panics
    /// Without a run.
    pub(super) fn least(mut runs: Vec<Dump>) -> Self {
        runs.sort_by(|a, b| a.total().total_cmp(&b.total()));
        let run = &runs[0];
        let spread = 100.0 * (runs[runs.len() - 1].total() - run.total()) / run.total();
        let floor = FLOOR / 100.0 * run.total();
        let worth = |costs: fn(&Dump) -> &BTreeMap<String, f64>| {
            let least = costs(run).keys().map(|name| {
                // A run without the function took no instruction in it.
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
            // Fewer than one for each operation, where these are many at once.
            rounds: (run.rounds * 1000.0).round() / 1000.0,
            groups: worth(|run| &run.groups),
            functions: worth(|run| &run.functions),
        }
    }

    /// Instructions of the polling functions in one round.
    fn round(&self) -> f64 {
        self.polling / self.rounds
    }
}

fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

/// The file with the accepted counts.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Accepted {
    /// Versions on which the counts depend beside the code.
    pub(super) made_with: BTreeMap<String, String>,
    /// Costs by the name of their path.
    pub(super) paths: BTreeMap<String, Cost>,
}

impl Accepted {
    fn file() -> PathBuf {
        root().join("xtask/instructions.json")
    }

    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read, or says something else.
    pub(super) fn load() -> Result<Self, Failure> {
        let file = Self::file();
        let named = |why: &dyn std::fmt::Display| format!("{}: {why}", file.display());
        let text = fs::read_to_string(&file).map_err(|e| named(&e))?;
        Ok(serde_json::from_str(&text).map_err(|e| named(&e))?)
    }

    /// Writes the file.
    ///
    /// # Errors
    /// That of the file system.
    pub(super) fn save(&self) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(self)?;
        Ok(fs::write(Self::file(), text + "\n")?)
    }

    /// Makes ready for counts that are made with these versions, of all paths or of some. Counts of
    /// other versions are dropped.
    ///
    /// # Errors
    /// Only some paths are counted, and the others have counts of other versions.
    pub(super) fn renew(
        &mut self,
        made_with: BTreeMap<String, String>,
        are_all: bool,
    ) -> Result<(), Failure> {
        let others = self.other_versions(&made_with);
        if !others.is_empty() {
            if !are_all {
                let why = "all paths must be counted again, so give no words";
                return Err(format!("{}; {why}", others.join("; ")).into());
            }
            self.paths.clear();
        }
        self.made_with = made_with;
        Ok(())
    }

    /// Versions that differ from those at hand, each as a sentence.
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
            format!("{name}: the counts were accepted with {theirs}, here is {ours}")
        });
        said.collect()
    }
}

/// Returns what has grown beyond the limits, for a person: the path, a round of the worker's loop or
/// groups, with functions that have grown. `None` where nothing has.
pub(super) fn growth(path: &str, before: &Cost, after: &Cost) -> Option<String> {
    let mut grown = Vec::new();
    // What the accepted runs differ by among themselves is no growth.
    let limit = LIMIT.max(before.spread);
    if has_grown(before.total, after.total, limit) {
        grown.push(line(path, Some(before.total), after.total));
    }
    // More operations in each of fewer rounds make a round longer, which is a gain.
    if has_grown(before.round(), after.round(), ROUND_LIMIT)
        && has_grown(before.polling, after.polling, LIMIT)
    {
        let round = format!("{path}, polling in a round");
        grown.push(line(&round, Some(before.round()), after.round()));
    }
    let least = GROUP_LIMIT / 100.0 * before.total;
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

/// Most that something may have cost which is not in the file.
fn floor(before: &Cost) -> f64 {
    FLOOR / 100.0 * before.total
}

/// Returns whether there is more than a limit in percent allows. What is no number has grown.
fn has_grown(before: f64, after: f64, limit: f64) -> bool {
    let is_within = after <= before * (1.0 + limit / 100.0);
    !is_within
}

/// The functions that have grown most, with their costs before and after. What was not worth
/// naming before has no cost from then.
fn grown_functions<'a>(
    before: &Cost,
    after: &'a Cost,
) -> impl Iterator<Item = (&'a str, Option<f64>, f64)> {
    let floor = floor(before);
    let growth = |(name, new): (&'a String, &f64)| {
        let old = before.functions.get(name).copied();
        // It was below the floor, so at least the rest is growth.
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
        None => format!("{what}: not named before, {after:.0} after"),
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
    fn a_path_that_grows_is_refused_with_the_functions_that_grew() {
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
            "    rc::new: not named before, 100 after",
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
    fn a_round_that_grows_is_refused() {
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
    fn fewer_rounds_that_do_more_each_are_no_growth() {
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
    fn a_group_that_was_too_small_to_be_kept_has_not_grown_from_nothing() {
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
    fn a_gain_elsewhere_does_not_hide_a_group_that_grows() {
        let shifted = cost(&[("rc", 5300.0), ("scsi", 4600.0), ("pool", 100.0)], &[]);
        let why = growth("p", &accepted(), &shifted).unwrap();
        assert_eq!(why, "p, rc: 5000 before, 5300 after (+6.0 %)");
        let new = cost(&[("rc", 4000.0), ("scsi", 4900.0), ("audit", 1100.0)], &[]);
        let why = growth("p", &accepted(), &new).unwrap();
        assert_eq!(why, "p, audit: not named before, 1100 after");
    }

    #[test]
    fn the_limit_is_three_percent() {
        let has_grown = |before, after| has_grown(before, after, LIMIT);
        assert!(!has_grown(100.0, 103.0) && has_grown(100.0, 103.1));
        assert!(has_grown(100.0, f64::NAN) && has_grown(f64::NAN, 100.0));
    }

    #[test]
    fn the_least_of_the_runs_counts() {
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
    fn what_makes_each_run_dearer_is_seen_although_runs_differ() {
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
        // They cannot show less than what they differ by.
        let far = [9700.0, 9950.0, 10_100.0, 10_185.0];
        assert_eq!(growth("p", &least(far, 1.0), &least(far, 1.04)), None);
        assert!(growth("p", &least(far, 1.0), &least(far, 1.06)).is_some());
    }

    #[test]
    fn a_group_has_its_least_of_all_runs() {
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
    fn the_file_keeps_what_was_accepted() {
        let file = Accepted {
            made_with: BTreeMap::from([("rustc".to_owned(), "1".to_owned())]),
            paths: BTreeMap::from([("srp read 1".to_owned(), accepted())]),
        };
        let text = serde_json::to_string(&file).unwrap();
        let read: Accepted = serde_json::from_str(&text).unwrap();
        assert_eq!(read.paths["srp read 1"], accepted());
        assert!(read.other_versions(&file.made_with).is_empty());
        let newer = BTreeMap::from([("rustc".to_owned(), "2".to_owned())]);
        let why = "rustc: the counts were accepted with 1, here is 2";
        assert_eq!(read.other_versions(&newer), [why]);
        let none = "rustc: the counts were accepted with 1, here is none";
        assert_eq!(read.other_versions(&BTreeMap::new()), [none]);
    }

    #[test]
    fn counts_of_other_versions_go_only_if_all_are_counted_again() {
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
    fn the_accepted_counts_are_those_of_every_path() {
        let accepted = Accepted::load().unwrap();
        // No counts were accepted, which the comparison reports.
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
