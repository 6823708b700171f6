//! `cargo xtask baddays`: runs the failure scenarios.
//!
//! The cases are tests (`tests/tests/baddays`) that use the programs the way an operator does. They
//! are also part of `cargo xtask test`.

use crate::harnesses::testing;
use crate::tally::noted;
use crate::{Failure, sh};

pub(crate) fn run() -> Result<(), Failure> {
    let args = "-p riser-tests --test baddays -- --test-threads=1";
    let args: Vec<_> = args.split(' ').collect();
    // Discard skips that were left by an earlier process with the same ID.
    let _ = noted();
    let result = sh::run(&mut testing(&args));
    for skip in noted() {
        println!("skipped  {}: {}", skip.name, skip.why);
    }
    result
}
