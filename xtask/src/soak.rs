//! `cargo xtask soak`: a longer run of `tests/tests/soak`, using the `release` profile.

use crate::harnesses::run_long;
use crate::{Failure, sh};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Number of sessions to connect and disconnect.
    #[arg(long, default_value_t = 1_000_000)]
    connects: u64,
    /// Number of sessions that stay connected during the test.
    #[arg(long, default_value_t = 1_000)]
    sessions: u64,
    /// Seed that selects how sessions connect and disconnect.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs this test as root, because the sessions should disappear without closing their sockets
/// (`TCP_REPAIR`).
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if !sh::is_root() {
        return Err("dropping a TCP connection without closing it requires root".into());
    }
    let numbers = [
        ("RISER_SOAK_CONNECTS", options.connects),
        ("RISER_SOAK_SESSIONS", options.sessions),
        ("RISER_SOAK_SEED", options.seed),
    ];
    run_long("soak", &numbers, None)
}
