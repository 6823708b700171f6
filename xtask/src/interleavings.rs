//! `cargo xtask interleavings`: tests of state that threads share, under a checker that decides
//! which thread goes on (`riser_sync`).

use crate::{Failure, sh};

/// Options of `cargo xtask interleavings`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Interleavings of each test, by each of two schedulers.
    #[arg(long, default_value_t = 20_000)]
    runs: u64,
    /// The seed of the schedulers.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only the tests whose name contains this.
    #[arg(default_value = "interleavings")]
    name: String,
}

impl Options {
    /// As many as take seconds.
    pub(crate) fn for_test() -> Self {
        Self {
            runs: 500,
            seed: 1,
            name: "interleavings".to_owned(),
        }
    }
}

/// Runs them all, by the names that they have in common.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let args = "test --lib --features riser-sync/shuttle -p riser-reactor -p riser-scsi -p riser-target --";
    let mut command = sh::cargo(args.split(' '));
    command.arg(&options.name);
    command.env("RISER_INTERLEAVINGS", options.runs.to_string());
    command.env("RISER_INTERLEAVINGS_SEED", options.seed.to_string());
    let text = sh::output(&mut command)?;
    print!("{text}");
    // A name that no test has any more would pass.
    let passed = text.lines().filter_map(|line| {
        let (_, counts) = line.split_once("test result: ok. ")?;
        counts.split_once(" passed")?.0.parse::<u64>().ok()
    });
    match passed.sum::<u64>() {
        0 => Err(format!("no test has {} in its name", options.name).into()),
        _ => Ok(()),
    }
}
