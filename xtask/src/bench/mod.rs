//! `cargo xtask bench`: our target beside its peers on the same file, in one run; and
//! `cargo xtask path-cost`.
//!
//! - [`workloads`], [`systems`]: columns and rows of the tables; [`select`] takes some of them.
//! - [`rig`]: the file, and one measurement: a server ([`servers`]), a client ([`clients`]),
//!   its output ([`reading`]) and the cost of both ([`cpu`]).
//! - [`compare`](mod@compare): the rounds; [`stats`] and [`targets`] judge them.
//! - [`curves`], [`scaling`]: figures by depth, sessions, units, block size, loss and load;
//!   [`cliffs`] judges their steps.
//! - [`results`]: the file that keeps it all, with the [`machine`]; [`render`] and [`pictures`]
//!   make documents of it.
//!
//! A run with a selection or without judgement is a try-out: its results and documents go to
//! `.build/bench`, and not to `docs`.

mod clients;
mod cliffs;
mod compare;
mod cpu;
mod curves;
mod machine;
pub(crate) mod path_cost;
mod pictures;
mod reading;
mod render;
mod results;
mod rig;
mod scaling;
mod select;
mod servers;
pub(crate) mod stats;
mod systems;
mod targets;
mod workloads;

use std::path::PathBuf;

pub(crate) use reading::summary;
use results::{Comparison, Results};
use rig::{Rig, Setup};
use targets::{MIN_ROUNDS, Verdict, judge};

use crate::{Failure, root};

/// Options of `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Rounds, in each of which every system runs every workload; medians are shown.
    #[arg(long, default_value_t = 5, value_parser = rounds)]
    rounds: usize,
    /// Only systems and workloads, or curves, whose names contain WORD; may be repeated. A try-out.
    #[arg(long, value_name = "WORD")]
    only: Vec<String>,
    /// Do not compare with the targets. A try-out, whose results go to .build/bench.
    #[arg(long)]
    no_judge: bool,
    /// Measure curves by depth, sessions, units, block size, loss and load, and not the tables;
    /// fails where a step of a curve costs more than it may.
    #[arg(long)]
    scaling: bool,
    /// Measure nothing: write the documents again from docs/performance/results.json.
    #[arg(long, conflicts_with_all = ["scaling", "only", "no_judge"])]
    render: bool,
    #[command(flatten)]
    setup: Setup,
}

fn rounds(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(rounds) if (1..=1000).contains(&rounds) => Ok(rounds),
        _ => Err("a number from 1 to 1000 is needed".to_owned()),
    }
}

impl Options {
    fn is_try_out(&self) -> bool {
        self.no_judge || !self.only.is_empty()
    }
}

/// Measures or renders; fails where a target is missed.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if options.render {
        let results = Results::load(&kept())?;
        if results == Results::default() {
            return Err(format!("there are no results in {}", kept().display()).into());
        }
        return publish(&results);
    }
    if options.scaling {
        scale(options)
    } else {
        compare(options)
    }
}

/// Results of the last whole run, which the repository has.
fn kept() -> PathBuf {
    root()
        .join("docs")
        .join(render::FOLDER)
        .join("results.json")
}

/// Folder of what a run in progress or a try-out leaves.
fn draft() -> PathBuf {
    root().join(".build/bench")
}

fn save_draft(results: &Results) -> Result<(), Failure> {
    results.save(&draft().join(render::FOLDER).join("results.json"))
}

/// Writes the documents of the repository.
fn publish(results: &Results) -> Result<(), Failure> {
    render::write(results, &root().join("docs"))?;
    render::write_readme(results, &root().join("README.md"))
}

/// Fails where the part of the results that a run does not replace is wrong: before it takes its
/// time, since the documents are written from both parts.
fn check_kept(options: &Options, replace: impl FnOnce(&mut Results)) -> Result<(), Failure> {
    if options.is_try_out() {
        return Ok(());
    }
    let help = "this run keeps what it does not measure: measure that first, or delete it there";
    Results::load_with(&kept(), replace)
        .map(drop)
        .map_err(|error| format!("{error}; {help}").into())
}

/// Takes over what was measured: into the repository, or of a try-out, into a folder beside it.
fn finish(options: &Options, put: impl FnOnce(&mut Results)) -> Result<(), Failure> {
    if options.is_try_out() {
        let mut results = Results::default();
        put(&mut results);
        save_draft(&results)?;
        render::write(&results, &draft())?;
        println!("a try-out: {}/performance.md", draft().display());
        return Ok(());
    }
    let results = Results::load_with(&kept(), put)?;
    results.save(&kept())?;
    publish(&results)?;
    println!("written: docs/performance.md");
    Ok(())
}

/// Fails where rounds are to be judged and too few.
fn check_rounds(options: &Options) -> Result<(), Failure> {
    if !options.no_judge && options.rounds < MIN_ROUNDS {
        let why = "rounds do not show noise, which judging takes: more rounds, or --no-judge";
        return Err(format!("{} {why}", options.rounds).into());
    }
    Ok(())
}

fn compare(options: &Options) -> Result<(), Failure> {
    check_rounds(options)?;
    let selection = select::of(&options.only)?;
    check_kept(options, |results| results.comparison = None)?;
    let rig = Rig::prepare(&options.setup, &selection.systems)?;
    // Kept after each round, since a run takes long and may be interrupted.
    let keep = |comparison: &Comparison| {
        save_draft(&Results {
            comparison: Some(comparison.clone()),
            scaling: None,
        })
    };
    let comparison = compare::measure(&rig, &selection, options.rounds, keep)?;
    drop(rig);
    let judged = judge(&comparison);
    println!("\n{}", render::targets(&judged));
    let shortfalls = shortfalls(&judged, &selection);
    // Written before the judgement: what was missed is to be seen there.
    finish(options, |results| results.comparison = Some(comparison))?;
    if options.no_judge || shortfalls.is_empty() {
        return Ok(());
    }
    Err(format!("targets are missed:\n  {}", shortfalls.join("\n  ")).into())
}

/// Targets that are missed by more than noise, and those that were selected and not measured.
fn shortfalls(judged: &[targets::Judged], selection: &compare::Selection) -> Vec<String> {
    let missed = judged.iter().filter(|one| one.verdict == Verdict::Missed);
    let missed = missed.map(|one| {
        let (subject, ratio) = (render::subject(one), render::ratio(one));
        let (beside, bound) = (one.target.beside, one.target.at_least);
        format!("{subject}: {ratio} beside {beside}, not {bound}")
    });
    let is_judged = |target: &targets::Target| {
        let same = |one: &targets::Judged| {
            let other = &one.target;
            (other.system, other.workload, other.measure)
                == (target.system, target.workload, target.measure)
        };
        judged.iter().any(same)
    };
    let is_selected = |target: &targets::Target| {
        let mut systems = selection.systems.iter();
        let mut workloads = selection.workloads.iter();
        systems.any(|system| system.id == target.system)
            && workloads.any(|workload| workload.id == target.workload)
    };
    let all = targets::targets().into_iter();
    let absent = all
        .filter(|target| is_selected(target) && !is_judged(target))
        .map(|target| {
            let (system, workload) = (target.system, target.workload);
            format!(
                "{system}, {workload}: {} was not measured",
                target.measure.name()
            )
        });
    missed.chain(absent).collect()
}

fn scale(options: &Options) -> Result<(), Failure> {
    check_rounds(options)?;
    check_kept(options, |results| results.scaling = None)?;
    let rig = Rig::prepare(&options.setup, &scaling::all_systems())?;
    let keep = |scaling: &results::Scaling| {
        save_draft(&Results {
            comparison: None,
            scaling: Some(scaling.clone()),
        })
    };
    let scaling = scaling::measure(&rig, &options.only, options.rounds, keep)?;
    drop(rig);
    let steps = cliffs::steps(&scaling);
    let broken = steps.iter().filter(|step| step.is_cliff());
    let broken: Vec<_> = broken.map(cliffs::Step::describe).collect();
    finish(options, |results| results.scaling = Some(scaling))?;
    if options.no_judge || broken.is_empty() {
        return Ok(());
    }
    Err(format!("curves have cliffs:\n  {}", broken.join("\n  ")).into())
}

#[cfg(test)]
mod tests {
    use super::results::tests::{provenance, sample};
    use super::systems::{NBDKIT, SRP};
    use super::workloads::READ_32;
    use super::*;

    #[test]
    fn shortfalls_are_targets_that_are_missed_or_were_not_measured() {
        let of = |samples| {
            judge(&Comparison {
                measured: provenance(),
                skipped: Vec::new(),
                samples,
            })
        };
        let judged = |iops| {
            of(vec![
                sample(1, (NBDKIT, READ_32), 100.0),
                sample(1, (SRP, READ_32), iops),
            ])
        };
        let selection = select::of(&[SRP, READ_32].map(str::to_owned)).unwrap();
        assert!(shortfalls(&judged(200.0), &selection).is_empty());
        let slow = shortfalls(&judged(140.0), &selection);
        assert_eq!(slow.len(), 2, "{slow:?}");
        assert!(
            slow[0].starts_with("SRP: 4 KiB random read, depth 32: IOPS: 1.40"),
            "{slow:?}"
        );
        let whole = shortfalls(&judged(200.0), &select::of(&[]).unwrap());
        assert_eq!(whole.len(), targets::targets().len() - 2, "{whole:?}");
        // Its peer is missing.
        let alone = of(vec![sample(1, (SRP, READ_32), 200.0)]);
        let absent = shortfalls(&alone, &selection);
        let expected = [
            "srp, randread-4k-32: IOPS was not measured",
            "srp, randread-4k-32: processor time was not measured",
        ];
        assert_eq!(absent, expected);
    }

    #[test]
    fn rounds_are_a_number_within_bounds() {
        assert_eq!(rounds("3"), Ok(3));
        for text in ["0", "1001", "three", "-1"] {
            assert!(rounds(text).is_err(), "{text}");
        }
    }
}
