//! `cargo xtask bench`: benchmarks our target and its competitors using the same file, in a single
//! run.
//!
//! - [`workloads`], [`systems`]: table columns and rows; [`select`] is used to run a subset of
//!   these.
//! - [`rig`]: contains the file and runs a single measurement with a server ([`servers`]) and a
//!   client ([`clients`]), then parses the output ([`reading`]) and the CPU time of both ([`cpu`]).
//! - [`compare`](mod@compare): runs the rounds; [`stats`] and [`targets`] evaluate them.
//! - [`curves`], [`scaling`]: measure values by depth, sessions, units, block size, loss and load;
//!   [`cliffs`] checks the steps.
//! - [`protection`]: measures the cost of protection information.
//! - [`results`]: the results file, including the [`machine`]; [`render`] and [`pictures`] create
//!   documents from it.
//!
//! If the user selects a subset or disables the check, this is a trial: the document is then
//! printed instead of written to `docs`.

mod clients;
mod cliffs;
mod compare;
mod cpu;
mod curves;
mod machine;
mod pictures;
mod protection;
mod reading;
mod render;
mod results;
mod rig;
mod scaling;
mod select;
mod servers;
mod stats;
mod systems;
mod tables;
mod targets;
mod workloads;

use std::path::PathBuf;

pub(crate) use reading::summary;
use results::Results;
use rig::{Rig, Setup};
use targets::{MIN_ROUNDS, TARGETS, Verdict, check_targets};

use crate::{Failure, root};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Number of rounds to run every workload on every system; the median is used.
    #[arg(long, default_value_t = 5, value_parser = rounds)]
    rounds: usize,
    /// Run only systems and workloads, or curves, whose name contains WORD; may be repeated. The
    /// results are only printed.
    #[arg(long, value_name = "WORD")]
    only: Vec<String>,
    /// Do not compare with targets. The results are only printed.
    #[arg(long)]
    no_judge: bool,
    /// Measure curves by depth, sessions, units, block size, loss and load instead of the tables;
    /// fails if the cost of a step exceeds the limit.
    #[arg(long)]
    scaling: bool,
    /// Measure the cost of T10 protection information instead of the tables; the results are only
    /// printed.
    #[arg(long, conflicts_with_all = ["scaling", "no_judge"])]
    protection: bool,
    /// Do not measure; generate the documents from docs/performance/results.json again.
    #[arg(long, conflicts_with_all = ["scaling", "protection", "only", "no_judge"])]
    render: bool,
    #[command(flatten)]
    setup: Setup,
}

fn rounds(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(rounds) if (1..=1000).contains(&rounds) => Ok(rounds),
        _ => Err("invalid number: expected 1 to 1000".to_owned()),
    }
}

impl Options {
    fn is_trial(&self) -> bool {
        self.no_judge || !self.only.is_empty()
    }
}

/// Runs the measurements or renders documents. Returns an error if a target was missed.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if options.render {
        let results = Results::load(&results_path())?;
        if results == Results::default() {
            return Err(format!("found no results in {}", results_path().display()).into());
        }
        return publish(&results);
    }
    if options.protection {
        return protection::measure(&options.setup, &options.only, options.rounds);
    }
    if options.scaling {
        scale(options)
    } else {
        compare(options)
    }
}

/// Path of the results file in the repository, updated by the last full run.
fn results_path() -> PathBuf {
    root()
        .join("docs")
        .join(render::DIRECTORY)
        .join("results.json")
}

fn publish(results: &Results) -> Result<(), Failure> {
    render::write(results, &root().join("docs"))?;
    render::write_readme(results, &root().join("README.md"))
}

/// Saves the new results to the repository or, for a trial, prints them.
fn finish(options: &Options, put: impl FnOnce(&mut Results)) -> Result<(), Failure> {
    if options.is_trial() {
        let mut results = Results::default();
        put(&mut results);
        println!("\n{}", render::document(&results));
        return Ok(());
    }
    let mut results = Results::load(&results_path())?;
    put(&mut results);
    results.save(&results_path())?;
    publish(&results)?;
    println!("written: docs/performance.md");
    Ok(())
}

/// Returns an error if there are not enough rounds to check the targets.
fn check_rounds(options: &Options) -> Result<(), Failure> {
    if !options.no_judge && options.rounds < MIN_ROUNDS {
        let why = "rounds are too few to estimate noise: use more rounds, or --no-judge";
        return Err(format!("{} {why}", options.rounds).into());
    }
    Ok(())
}

fn compare(options: &Options) -> Result<(), Failure> {
    check_rounds(options)?;
    let selection = select::of(&options.only)?;
    let rig = Rig::prepare(&options.setup, &selection.systems)?;
    let comparison = compare::measure(&rig, &selection, options.rounds)?;
    drop(rig);
    let checked = check_targets(&comparison);
    println!("\n{}", render::targets(&checked));
    let shortfalls = shortfalls(&checked, &selection);
    // Write the documents before we check the targets, because they should also show missed
    // targets.
    finish(options, |results| results.comparison = Some(comparison))?;
    if options.no_judge || shortfalls.is_empty() {
        return Ok(());
    }
    Err(format!("targets are missed:\n  {}", shortfalls.join("\n  ")).into())
}

fn shortfalls(checked: &[targets::CheckedTarget], selection: &compare::Selection) -> Vec<String> {
    let missed = checked.iter().filter(|one| one.verdict == Verdict::Missed);
    let missed = missed.map(|one| {
        let (subject, ratio) = (render::subject(one), render::ratio(one));
        let (baseline, bound) = (one.target.baseline, one.target.at_least);
        format!("{subject}: {ratio} relative to {baseline}, required {bound}")
    });
    let is_checked = |target: &targets::Target| {
        let same = |one: &targets::CheckedTarget| {
            let other = &one.target;
            (other.system, other.workload, other.measure)
                == (target.system, target.workload, target.measure)
        };
        checked.iter().any(same)
    };
    let is_selected = |target: &targets::Target| {
        let mut systems = selection.systems.iter();
        let mut workloads = selection.workloads.iter();
        systems.any(|system| system.id == target.system)
            && workloads.any(|workload| workload.id == target.workload)
    };
    let all = TARGETS.iter().copied();
    let absent = all
        .filter(|target| is_selected(target) && !is_checked(target))
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
    let rig = Rig::prepare(&options.setup, &scaling::all_systems())?;
    let scaling = scaling::measure(&rig, &options.only, options.rounds)?;
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
    use super::results::Comparison;
    use super::results::tests::{provenance, sample};
    use super::systems::{NBDKIT, SRP};
    use super::workloads::READ_32;
    use super::*;

    #[test]
    fn shortfalls_include_unmeasured_targets() {
        let of = |samples| {
            check_targets(&Comparison {
                measured: provenance(),
                skipped: Vec::new(),
                samples,
            })
        };
        let checked = |iops| {
            of(vec![
                sample(1, (NBDKIT, READ_32), 100.0),
                sample(1, (SRP, READ_32), iops),
            ])
        };
        let selection = select::of(&[SRP, READ_32].map(str::to_owned)).unwrap();
        assert!(shortfalls(&checked(200.0), &selection).is_empty());
        let slow = shortfalls(&checked(140.0), &selection);
        assert_eq!(slow.len(), 2, "{slow:?}");
        assert!(
            slow[0].starts_with("SRP: 4 KiB random read, depth 32: IOPS: 1.40"),
            "{slow:?}"
        );
        let whole = shortfalls(&checked(200.0), &select::of(&[]).unwrap());
        assert_eq!(whole.len(), TARGETS.len() - 2, "{whole:?}");
        // The competitor was not measured.
        let alone = of(vec![sample(1, (SRP, READ_32), 200.0)]);
        let absent = shortfalls(&alone, &selection);
        let expected = [
            "srp, randread-4k-32: IOPS was not measured",
            "srp, randread-4k-32: processor time was not measured",
        ];
        assert_eq!(absent, expected);
    }

    #[test]
    fn rounds_are_limited() {
        assert_eq!(rounds("3"), Ok(3));
        for text in ["0", "1001", "three", "-1"] {
            assert!(rounds(text).is_err(), "{text}");
        }
    }
}
