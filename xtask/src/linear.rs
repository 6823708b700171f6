//! `cargo xtask linear`: the test of `tests/tests/linear` for longer, in the programs' profile.

use crate::packages::{Need, ensure, need};
use crate::{Failure, crash, sh};

const NEEDS: &[Need] = &[need("ip", "iproute2", "network namespaces")];

/// Options of `cargo xtask linear`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Operations of all initiators together.
    #[arg(long, default_value_t = 1_000_000)]
    operations: u64,
    /// The seed of loads and of troubles.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs it, as root, who may make networks.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    ensure(NEEDS);
    if !sh::is_root() {
        return Err("only root may make network namespaces".into());
    }
    let numbers = [
        ("RISER_LINEAR_OPERATIONS", options.operations),
        ("RISER_LINEAR_SEED", options.seed),
    ];
    crash::long("linear", &numbers, None)
}
