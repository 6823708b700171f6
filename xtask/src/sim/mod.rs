//! `cargo xtask sim`: the simulator (`tests/sim`), in the programs' profile.

mod copy;
mod judge;
mod mutants;
mod planted;
mod switches;

use std::path::PathBuf;
use std::process::Command;

use crate::daemon::OPTIMIZED;
use crate::harnesses::{SIMULATOR, building_optimized};
use crate::{Failure, root, sh};

/// Options of `cargo xtask sim`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Number of seeds: 1000 by default, 20,000 for a planted defect, and 2000 for a mutant.
    #[arg(long)]
    seeds: Option<u64>,
    /// The first one.
    #[arg(long, default_value_t = 1)]
    from: u64,
    /// Only these kinds of trouble happen, separated by commas; a wrong name lists them.
    #[arg(long)]
    faults: Option<String>,
    /// Run the plan of this file instead, and print its events.
    #[arg(long, conflicts_with_all = ["seeds", "from", "faults"])]
    plan: Option<PathBuf>,
    /// Events that are printed of a plan that fails.
    #[arg(long, default_value_t = 40)]
    events: usize,
    /// Instead, put defects back that were found by reading, and see that the simulator finds each,
    /// or the tests that its patch names: those whose names contain one of these words, or all.
    #[arg(
        long,
        num_args = 0..,
        value_name = "WORD",
        conflicts_with_all = ["mutants", "from", "faults", "plan", "coverage"]
    )]
    planted: Option<Vec<String>>,
    /// Instead, change the state machines, and see which changes the simulator notices: machines whose
    /// names contain one of these words, or all.
    #[arg(
        long,
        num_args = 0..,
        value_name = "MACHINE",
        conflicts_with_all = ["from", "faults", "plan", "coverage"]
    )]
    mutants: Option<Vec<String>>,
    /// Fail if a transition is neither reached nor excused by `tests/sim/unreached.txt`, or a kind
    /// of trouble has begun in no seed.
    #[arg(long)]
    coverage: bool,
}

/// Builds the simulator and runs it.
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

/// The part of `cargo xtask test`, of whose output only the last line is of interest if it succeeds.
pub(crate) fn thousand() -> Result<(), Failure> {
    sh::run(&mut building())?;
    // A kind of trouble that no longer begins would go unnoticed: its seeds still pass.
    let args = ["--seeds", "1000", "--kinds"];
    let text = sh::output(program().args(args))?;
    println!("{}", text.lines().last().unwrap_or_default());
    Ok(())
}

/// Cargo, about to build the simulator, as a program beside its tests: their recorder of transitions is
/// a feature that other programs are built without.
fn building() -> Command {
    building_optimized(&SIMULATOR)
}

/// The simulator.
pub(crate) fn program() -> Command {
    let folder = root().join(".build").join(OPTIMIZED);
    let mut command = Command::new(folder.join("riser-sim"));
    command.current_dir(root());
    command
}
