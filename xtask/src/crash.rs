//! `cargo xtask crash`: a longer run of `tests/tests/crash`, using the `release` profile.

use crate::harnesses::run_long;
use crate::packages::{ensure, needs};
use crate::{Failure, interop, parse_options};

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
const DISKS: u64 = 4;

/// Number of images per load to start a daemon on. `WHOLE` is the number of loads per kind for
/// which we create an image for every point of power loss.
const IMAGES: u64 = 10;
const WHOLE: u64 = 2;

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    ensure(needs("crash"));
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
    run_long("crash", &numbers, options.name.as_deref())?;
    match options.name {
        None if options.kernel_rounds > 0 => {
            let rounds = options.kernel_rounds.to_string();
            interop::run(&parse_options(&["crash", "--rounds", &rounds]))
        }
        _ => Ok(()),
    }
}
