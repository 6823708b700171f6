//! `cargo xtask crash`: a longer run of `tests/tests/crash`, using the `release` profile.

use std::process::Command;

use riser_testkit::programs::ARE_BUILT;

use crate::daemon::{self, RELEASE};
use crate::packages::{Need, ensure, need};
use crate::tally::{noted, skip_log};
use crate::{Failure, interop, sh, skip};

/// Used to kill the daemon before a given system call.
const NEEDS: &[Need] = &[need(
    "strace",
    "strace",
    "killing riserd before each system call on its state",
)];

/// Options of `cargo xtask crash`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Number of times to kill riserd with SIGKILL under load, split between the protocol
    /// combinations.
    #[arg(long, default_value_t = 500)]
    rounds: u64,
    /// Number of times to kill riserd under load from kernel initiators in a guest; 0 to disable.
    #[arg(long, default_value_t = 24)]
    kernel_rounds: u32,
    /// Number of loads to test with a power loss at every point, split between the kinds of disks.
    #[arg(long, default_value_t = 102)]
    runs: u64,
    /// Number of system calls to fail for each of three protocols, with a single failure per run;
    /// by default all system calls.
    #[arg(long, default_value_t = u64::MAX >> 1)]
    errors: u64,
    /// Seed for loads and kill times.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only the tests whose name contains this.
    name: Option<String>,
}

/// Number of protocol combinations used when we kill the daemon (`tests/tests/crash/kills.rs`).
const COMBINATIONS: u64 = 4;

/// Number of disk kinds that lose power (`tests/tests/crash/power.rs`).
const DISKS: u64 = 3;

/// Number of images per load to start a daemon on. `WHOLE` is the number of loads per kind for
/// which we create an image for every point of power loss.
const IMAGES: u64 = 10;
const WHOLE: u64 = 2;

/// Runs the tests sequentially, so that every test can use the whole machine.
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

/// Runs a test with the `release` profile, using the given variables to increase its size. The
/// test functions run sequentially.
pub(crate) fn long(test: &str, numbers: &[(&str, u64)], name: Option<&str>) -> Result<(), Failure> {
    let mut command = release_test(test)?;
    command.envs(numbers.iter().map(|(name, n)| (name, n.to_string())));
    command.args(name);
    command.args(["--test-threads=1", "--nocapture"]);
    run_whole(&mut command)
}

/// Runs a test and returns an error if any of its parts were skipped. The test harness would report
/// this as success.
pub(crate) fn run_whole(command: &mut Command) -> Result<(), Failure> {
    // Discard skips that were left by an earlier process with the same ID.
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
    Err(format!("system calls not tested:{}", lines.collect::<String>()).into())
}

/// Returns a Cargo command to run a test with the `release` profile; the caller can add arguments
/// for the test. We build all programs first because Cargo doesn't build programs from other
/// packages for a test, so any existing programs may be out of date.
pub(crate) fn release_test(test: &str) -> Result<Command, Failure> {
    daemon::build()?;
    let args = ["test", "--profile", RELEASE, "--workspace", "--test"];
    let mut command = sh::cargo(args);
    command.env(ARE_BUILT, "1").args([test, "--"]);
    Ok(command)
}
