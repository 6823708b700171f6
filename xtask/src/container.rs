//! `cargo xtask container`: builds the image of `deploy/container` and starts its programs
//! (`tests/container/run.sh`).

use std::process::Stdio;

use crate::packages::{ensure, needs};
use crate::tally::Outcome;
use crate::{Failure, root, sh};

/// Exit status of the script if this machine cannot run containers.
const SKIPPED: i32 = 77;

/// Returns an error if the image can't be tested here.
pub(crate) fn run() -> Result<(), Failure> {
    build_and_try()?.into_result()
}

/// Builds and tests the image, if this machine supports it.
pub(crate) fn build_and_try() -> Result<Outcome, Failure> {
    if ["podman", "docker"]
        .iter()
        .all(|engine| sh::which(engine).is_none())
    {
        ensure(needs("container"));
    }
    let mut script = sh::cmd("bash", [root().join("tests/container/run.sh")]);
    let output = script
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{}", said.trim_end());
    match output.status.code() {
        Some(0) => Ok(Ok(()).into()),
        Some(SKIPPED) => Ok(Outcome::skipped(said.trim())),
        _ => Err(format!("the test of the container failed: {}", output.status).into()),
    }
}
