//! `cargo xtask linear`: a longer run of `tests/tests/linear`, using the `release` profile.

use crate::harnesses::run_long;
use crate::packages::{ensure, needs};
use crate::{Failure, sh};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Total number of operations for all initiators.
    #[arg(long, default_value_t = 1_000_000)]
    operations: u64,
    /// Seed for loads and network failures.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs this test as root, because we need to create networks.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    ensure(needs("networks"));
    if !sh::is_root() {
        return Err("creating network namespaces requires root".into());
    }
    let numbers = [
        ("RISER_LINEAR_OPERATIONS", options.operations),
        ("RISER_LINEAR_SEED", options.seed),
    ];
    run_long("linear", &numbers, None)
}
