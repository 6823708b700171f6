//! Days on which something is wrong, with the programs as an operator runs them: what still works
//! goes on, and what is wrong is named.

#![allow(missing_docs, reason = "tests")]

mod initiator;
mod limits;
mod luns;
mod portals;
mod space;
mod target;

use std::process::Command;
use std::time::Duration;

/// How long anything may take on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until something holds; `what` names it.
#[track_caller]
fn eventually(what: &str, holds: impl FnMut() -> bool) {
    riser_testkit::eventually(what, PATIENCE, holds);
}

/// How a program ended: its exit status, what it printed, and what it complained of.
fn ended(command: &mut Command) -> (i32, String, String) {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().expect("it was not killed");
    (code, text(&output.stdout), text(&output.stderr))
}
