//! `cargo xtask check`: formatting, lints, quick tests and tidiness, in a few minutes.
//!
//! The tests are those of the profile `check` of nextest (`.config/nextest.toml`): they need no peer, no
//! root and no network namespace.

use crate::packages::have_subcommand;
use crate::steps::{self, Outcome, STATIC, Selection, Step, check, step};
use crate::{Failure, sh};

const STEPS: &[Step] = &[step("quick tests", |_| quick_tests())];

/// Runs the steps; fails if one did.
pub(crate) fn run(selection: &Selection) -> Result<(), Failure> {
    steps::run(STATIC.iter().chain(STEPS), selection, false)
}

fn quick_tests() -> Outcome {
    if let Err(e) = have_subcommand("nextest") {
        return Outcome::skipped(e.to_string());
    }
    let args = "nextest run --workspace --profile check --cargo-quiet";
    check(sh::cargo(args.split(' ')))
}
