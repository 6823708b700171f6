//! Runs the provider suite of the transport (`transport/tests/suite`) with our libraries. The
//! `rdma_core` provider loads libibverbs and librdmacm, and here these are our own libraries.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::runner::{Rig, address, failure};
use crate::cases::{Test, Verdict};
use crate::{Failure, sh};

/// Group of these tests.
pub(super) const GROUP: &str = "providers";

/// Provider of the device that connects, and of the device that listens.
const PAIRS: [[&str; 2]; 3] = [
    ["rdma_core", "rdma_core"],
    ["rdma_core", "roce"],
    ["roce", "rdma_core"],
];

/// Test that runs the suite with the given devices.
const TEST: &str = "devices";

/// Timeout for a pair.
const PATIENCE: Duration = Duration::from_secs(300);

pub(super) fn paths() -> Vec<String> {
    let path = |[a, b]: [&str; 2]| format!("{GROUP}/{a} to {b}");
    PAIRS.map(path).into()
}

/// Returns the test program: either from the directory, if it exists there, or from a new build.
///
/// # Errors
/// Returns an error if the build fails.
pub(super) fn program(directory: Option<&Path>) -> Result<PathBuf, Failure> {
    let given = directory.map(|directory| directory.join(TEST));
    match given.filter(|program| program.is_file()) {
        Some(program) => Ok(fs::canonicalize(program)?),
        // Build with the whole workspace, so that we can use everything already built for other
        // tests.
        None => sh::built(&["test", "-q", "--workspace", "--test", TEST], TEST),
    }
}

fn addresses(device: usize) -> String {
    let others = PAIRS[0].len();
    format!("{},{}", address(device), address(device + others))
}

/// Runs the suite with the pair at `index` in [`paths`]. Returns all tests, and the error of
/// each failed test.
///
/// # Errors
/// Returns an error if the program did not run all tests.
pub(super) fn run(rig: &Rig, program: &Path, index: usize) -> Result<Vec<Test>, Failure> {
    let pair = PAIRS[index];
    let devices: Vec<_> = (0..).zip(pair).collect();
    let spec = devices.iter();
    let spec = spec.map(|(n, kind)| format!("{kind}:{}", addresses(*n)));
    let spec = spec.collect::<Vec<_>>().join(" ");
    let program = rig.adopt(program)?;
    // The library provides the devices for one provider, and the test opens the devices for the
    // other provider.
    let mut run = sh::cmd(rig.riser(), ["run"]);
    for (n, _) in devices.iter().filter(|(_, kind)| *kind == "rdma_core") {
        run.arg("--device")
            .arg(format!("riser{n}={}", addresses(*n)));
    }
    run.arg("--").arg(program);
    let mut command = rig.without_rights(&run, None);
    command.env("RISER_SUITE", &spec);
    let mut process = rig.start(command, &paths()[index])?;
    let exited = process.finish(Instant::now() + PATIENCE);
    let (tests, is_whole) = parse(&exited.output);
    let has_failed = tests.iter().any(|test| test.verdict != Verdict::Passed);
    match exited.status {
        // The program exits with an error if a test has failed.
        Some(status)
            if is_whole && (status.success() || has_failed && status.signal().is_none()) =>
        {
            Ok(tests)
        }
        None => Err(failure("the suite", "it timed out", &exited)),
        Some(status) => Err(failure("the suite", &status.to_string(), &exited)),
    }
}

/// Parses the test results and checks if the run was completed. If a test fails, its panic message
/// is printed before the result.
fn parse(said: &str) -> (Vec<Test>, bool) {
    let mut tests = Vec::new();
    let mut add = |rest: &str, verdict| {
        let name = rest.split(" (").next().unwrap_or(rest).trim().to_owned();
        tests.push(Test { name, verdict });
    };
    let mut why = String::new();
    let mut is_whole = false;
    let mut lines = said.lines();
    while let Some(line) = lines.next() {
        if let Some(rest) = line.strip_prefix("ok ") {
            add(rest, Verdict::Passed);
        } else if let Some(rest) = line.strip_prefix("FAILED ") {
            add(rest, Verdict::Failed(std::mem::take(&mut why)));
        } else if let Some((_, place)) = line.split_once("panicked at ") {
            let reason = lines.next().unwrap_or_default();
            why = format!("{place} {reason}");
        } else {
            is_whole |= line.contains(" passed, ") && line.ends_with(" failed");
        }
    }
    (tests, is_whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read_with_their_reasons() {
        let said = "ok     objects::datagrams (0.1 s)\n\
                    thread 'main' (7) panicked at suite/ops.rs:7:5:\nassertion failed: x\n\
                    FAILED ops::atomics (2.0 s)\nok     ops::long_messages (1.0 s)\n";
        let (tests, is_whole) = parse(said);
        assert!(!is_whole);
        let failed = "suite/ops.rs:7:5: assertion failed: x".to_owned();
        let expected = [
            ("objects::datagrams", Verdict::Passed),
            ("ops::atomics", Verdict::Failed(failed)),
            ("ops::long_messages", Verdict::Passed),
        ];
        let expected = expected.map(|(name, verdict)| Test {
            name: name.to_owned(),
            verdict,
        });
        assert_eq!(tests, expected);
        let whole = format!("{said}rdma_core:127.0.17.1 roce:127.0.17.2: 2 passed, 1 failed\n");
        assert!(parse(&whole).1);
    }
}
