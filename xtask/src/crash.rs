//! `cargo xtask crash`: the tests of `tests/tests/crash` for longer, in the programs' profile.

use crate::daemon::OPTIMIZED;
use crate::packages::{Need, ensure, need};
use crate::{Failure, sh};

/// Kills the daemon before a system call of its own.
const NEEDS: &[Need] = &[need(
    "strace",
    "strace",
    "killing riserd before each system call on its state",
)];

/// Options of `cargo xtask crash`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Kills under load, shared out to the combinations of protocols.
    #[arg(long, default_value_t = 500)]
    rounds: u64,
    /// Loads of which each point is one at which power is lost, shared out to the kinds of disks.
    #[arg(long, default_value_t = 102)]
    runs: u64,
    /// The seed of loads and of moments.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only the tests whose name contains this.
    name: Option<String>,
}

/// Combinations of protocols under which the daemon is killed (`tests/tests/crash/kills.rs`).
const COMBINATIONS: u64 = 4;

/// Kinds of disks that lose power (`tests/tests/crash/power.rs`).
const DISKS: u64 = 3;

/// Runs them one after another, so that each has the machine.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    ensure(NEEDS);
    let args = [
        "test",
        "--profile",
        OPTIMIZED,
        "--workspace",
        "--test",
        "crash",
    ];
    let mut command = sh::cargo(args);
    let numbers = [
        ("RISER_CRASH_ROUNDS", options.rounds.div_ceil(COMBINATIONS)),
        ("RISER_CRASH_SEED", options.seed),
        ("RISER_CRASH_STATE", u64::MAX >> 1),
        ("RISER_POWER_RUNS", options.runs.div_ceil(DISKS)),
        ("RISER_POWER_SEED", options.seed),
    ];
    command.envs(numbers.map(|(name, number)| (name, number.to_string())));
    command.arg("--").args(&options.name);
    command.args(["--test-threads=1", "--nocapture"]);
    sh::run(&mut command)
}
