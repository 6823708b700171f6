//! `cargo xtask interleavings`: tests shared state using a model checker that controls thread
//! scheduling (`riser_sync`).

use crate::harnesses::run_counted;
use crate::{Failure, sh};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Number of interleavings per test, for each of the two schedulers.
    #[arg(long, default_value_t = 20_000)]
    runs: u64,
    /// Scheduler seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only the tests whose name contains this.
    #[arg(default_value = "interleavings")]
    name: String,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let args = "test --lib --features riser-sync/shuttle -p riser-reactor -p riser-scsi -p riser-target --";
    let mut command = sh::cargo(args.split(' '));
    command.arg(&options.name);
    command.env("RISER_INTERLEAVINGS", options.runs.to_string());
    command.env("RISER_INTERLEAVINGS_SEED", options.seed.to_string());
    match run_counted(&mut command)? {
        0 => Err(format!("unknown test: no name contains {}", options.name).into()),
        _ => Ok(()),
    }
}
