//! Failure scenarios using the programs the way an operator does: all healthy parts must continue
//! to work, and errors must be reported.

#![allow(missing_docs, reason = "tests")]

mod frozen;
mod initiator;
mod limits;
mod luns;
mod mounts;
mod portals;
mod space;
mod target;

use std::process::Command;
use std::time::Duration;

/// Timeout for any operation, which should be enough for a slow machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until a condition is true; `what` is its description.
#[track_caller]
fn eventually(what: &str, holds: impl FnMut() -> bool) {
    riser_testkit::eventually(what, PATIENCE, holds);
}

/// Runs a program and returns its exit status, output and error output.
fn ended(command: &mut Command) -> (i32, String, String) {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().expect("it was not killed");
    (code, text(&output.stdout), text(&output.stderr))
}
