//! `cargo xtask soak`: the test of `tests/tests/soak` for longer, in the programs' profile.

use crate::{Failure, crash, sh};

/// Options of `cargo xtask soak`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Sessions that come and go.
    #[arg(long, default_value_t = 1_000_000)]
    connects: u64,
    /// Sessions that stay meanwhile.
    #[arg(long, default_value_t = 1_000)]
    sessions: u64,
    /// The seed that says how each comes and goes.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs it, as root: its guests vanish without closing their sockets (`TCP_REPAIR`).
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if !sh::is_root() {
        return Err("only root may drop a TCP connection without closing it".into());
    }
    let numbers = [
        ("RISER_SOAK_CONNECTS", options.connects),
        ("RISER_SOAK_SESSIONS", options.sessions),
        ("RISER_SOAK_SEED", options.seed),
    ];
    crash::long("soak", &numbers, None)
}
