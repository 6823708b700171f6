//! `cargo xtask sim`: runs the simulator (`tests/sim`) with the `release` profile.

mod copy;
mod detector;
mod mutants;
mod planted;

use std::path::PathBuf;
use std::process::Command;

use crate::daemon::RELEASE;
use crate::harnesses::{SIMULATOR, building_release};
use crate::{Failure, root, sh};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Number of seeds: by default 1000, or 20,000 for a planted defect and 2000 for a mutant.
    #[arg(long)]
    seeds: Option<u64>,
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    from: u64,
    /// Inject only these kinds of faults, separated by commas; an invalid name prints the list.
    #[arg(long)]
    faults: Option<String>,
    /// Run the plan in this file instead, and print its events.
    #[arg(long, conflicts_with_all = ["seeds", "from", "faults"])]
    plan: Option<PathBuf>,
    /// Number of events to print if a plan fails.
    #[arg(long, default_value_t = 40)]
    events: usize,
    /// Add known defects to the code and check that each is found by the simulator, or by the tests
    /// listed in its patch; only use patches whose name contains one of these words, or all.
    #[arg(
        long,
        num_args = 0..,
        value_name = "WORD",
        conflicts_with_all = ["mutants", "from", "faults", "plan", "coverage"]
    )]
    planted: Option<Vec<String>>,
    /// Modify the state machines and check which changes are detected by the simulator; only use
    /// state machines whose name contains one of these words, or all.
    #[arg(
        long,
        num_args = 0..,
        value_name = "MACHINE",
        conflicts_with_all = ["from", "faults", "plan", "coverage"]
    )]
    mutants: Option<Vec<String>>,
    /// Fail if a transition is not covered and not listed in `tests/sim/unreached.txt`, or if a
    /// kind of fault was never injected.
    #[arg(long)]
    coverage: bool,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if let Some(words) = &options.planted {
        return planted::run(words, options.seeds.unwrap_or(20_000));
    }
    if let Some(words) = &options.mutants {
        return mutants::run(words, options.seeds.unwrap_or(2000));
    }
    sh::run(&mut building())?;
    let mut command = program();
    command.args(["--events", &options.events.to_string()]);
    match &options.plan {
        Some(file) => command.arg("--plan").arg(std::path::absolute(file)?),
        None => {
            let (seeds, from) = (options.seeds.unwrap_or(1000), options.from);
            command.args(["--seeds", &seeds.to_string(), "--from", &from.to_string()])
        }
    };
    if let Some(faults) = &options.faults {
        command.args(["--faults", faults]);
    }
    if options.coverage {
        command.arg("--coverage");
    }
    sh::run(&mut command)
}

/// Runs the simulator for `cargo xtask test`. On success, we only need the last line of its
/// output.
pub(crate) fn thousand() -> Result<(), Failure> {
    sh::run(&mut building())?;
    // We need to check that all kinds of faults still occur, because the seeds would pass without
    // them.
    let args = ["--seeds", "1000", "--kinds"];
    let text = sh::output(program().args(args))?;
    println!("{}", text.lines().last().unwrap_or_default());
    Ok(())
}

/// Returns a Cargo command to build the simulator along with its tests, because recording
/// transitions is a feature that is not enabled in other programs.
fn building() -> Command {
    building_release(&SIMULATOR)
}

pub(crate) fn program() -> Command {
    let directory = root().join(".build").join(RELEASE);
    let mut command = Command::new(directory.join("riser-sim"));
    command.current_dir(root());
    command
}
