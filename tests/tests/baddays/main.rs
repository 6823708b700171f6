//! Days on which something is wrong, with the programs as an operator runs them: what still works goes on,
//! and what is wrong is named.

#![allow(missing_docs, reason = "tests")]

mod initiator;
mod limits;
#[path = "../load/mod.rs"]
mod load;
mod luns;
mod portals;
mod space;
mod target;

use std::process::Command;
use std::time::{Duration, Instant};

/// How long anything may take on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until something is so; `what` names it.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// How a program ended: its exit status, what it printed, and what it complained of.
fn ended(command: &mut Command) -> (i32, String, String) {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().expect("it was not killed");
    (code, text(&output.stdout), text(&output.stderr))
}
