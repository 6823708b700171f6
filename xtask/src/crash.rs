//! `cargo xtask crash`: the tests of `tests/tests/crash` for longer, in the programs' profile.

use std::process::Command;

use riser_testkit::programs::ARE_BUILT;

use crate::daemon::{self, OPTIMIZED};
use crate::packages::{Need, ensure, need};
use crate::tally::{noted, skip_log};
use crate::{Failure, interop, sh, skip};

/// Kills the daemon before a system call of its own.
const NEEDS: &[Need] = &[need(
    "strace",
    "strace",
    "killing riserd before each system call on its state",
)];

/// Options of `cargo xtask crash`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Times that SIGKILL ends riserd under load, shared out to the combinations of protocols.
    #[arg(long, default_value_t = 500)]
    rounds: u64,
    /// Times that it ends it under load of a kernel's initiators, in a guest; none by 0.
    #[arg(long, default_value_t = 24)]
    kernel_rounds: u32,
    /// Loads of which each point is one at which power is lost, shared out to the kinds of disks.
    #[arg(long, default_value_t = 102)]
    runs: u64,
    /// System calls that fail for each of three protocols, one in each run; all that there are by
    /// default.
    #[arg(long, default_value_t = u64::MAX >> 1)]
    errors: u64,
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

/// Images of each load that a daemon is started on, and for how many loads of each kind there is one
/// of each point at which power is lost.
const IMAGES: u64 = 10;
const WHOLE: u64 = 2;

/// Runs them one after another, so that each has the machine.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    ensure(NEEDS);
    let numbers = [
        ("RISER_CRASH_ROUNDS", options.rounds.div_ceil(COMBINATIONS)),
        ("RISER_CRASH_SEED", options.seed),
        ("RISER_CRASH_STATE", u64::MAX >> 1),
        ("RISER_CRASH_CUTS", u64::MAX >> 1),
        ("RISER_CRASH_ERRORS", options.errors),
        ("RISER_POWER_RUNS", options.runs.div_ceil(DISKS)),
        ("RISER_POWER_SEED", options.seed),
        ("RISER_POWER_IMAGES", IMAGES),
        ("RISER_POWER_WHOLE", WHOLE),
    ];
    long("crash", &numbers, options.name.as_deref())?;
    match options.name {
        None if options.kernel_rounds > 0 => {
            interop::run(&interop::Options::for_kills(options.kernel_rounds))
        }
        _ => Ok(()),
    }
}

/// Runs a test in the programs' profile, its functions one after another, with variables that make
/// it long.
pub(crate) fn long(test: &str, numbers: &[(&str, u64)], name: Option<&str>) -> Result<(), Failure> {
    let mut command = optimized_test(test)?;
    command.envs(numbers.iter().map(|(name, n)| (name, n.to_string())));
    command.args(name);
    command.args(["--test-threads=1", "--nocapture"]);
    run_whole(&mut command)
}

/// Runs a test, and fails if a part of it was skipped, which the test itself takes for a success.
pub(crate) fn run_whole(command: &mut Command) -> Result<(), Failure> {
    // What is left of an earlier process with this id.
    let _ = noted();
    let result = sh::run(command.env(skip::LOG, skip_log()));
    let skips = noted();
    result?;
    if skips.is_empty() {
        return Ok(());
    }
    let lines = skips
        .iter()
        .map(|skip| format!("\n{}: {}", skip.name, skip.why));
    Err(format!("not all was tried:{}", lines.collect::<String>()).into())
}

/// Cargo with a test in the programs' profile, up to what the test itself takes. Cargo builds no
/// programs of other packages for a test, and those that are there may be old ones.
pub(crate) fn optimized_test(test: &str) -> Result<Command, Failure> {
    daemon::build()?;
    let args = ["test", "--profile", OPTIMIZED, "--workspace", "--test"];
    let mut command = sh::cargo(args);
    command.env(ARE_BUILT, "1").args([test, "--"]);
    Ok(command)
}
