//! Builds the Rust test harnesses using Cargo, runs them and adds up the results.
//!
//! Most of our tests spend their time waiting for timeouts, peers or processes. To make use of that
//! time, [`run_all`] runs several harnesses in parallel. Because tests use fixed loopback
//! addresses and the same UDP port, harnesses that run at the same time must use separate network
//! namespaces.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::Instant;

use regex::Regex;
use riser_testkit::programs::ARE_BUILT;
use serde_json::Value;

use crate::cases::in_parallel;
use crate::daemon::{self, RELEASE};
use crate::tally::{Counts, noted, skip_log};
use crate::{Failure, sh, skip};

/// Prefix to start a program in a new network namespace with just a loopback interface.
const ISOLATED: [&str; 5] = [
    "unshare",
    "--net",
    "sh",
    "-c",
    "ip link set lo up && exec \"$0\" \"$@\"",
];

/// Returns the default number of harnesses to run in parallel. In a container, root may not be
/// able to create network namespaces.
pub(crate) fn default_lanes() -> u8 {
    let [program, args @ ..] = ISOLATED;
    let is_able = sh::is_root()
        && Command::new(program)
            .args(args)
            .arg("true")
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
    // More than the number of CPUs, because many tests wait for timeouts.
    if is_able { 4 } else { 1 }
}

/// Cargo arguments for tests that use the `release` profile. We always build the same packages
/// with the same features, because any change would cause a rebuild of all dependencies. This set
/// includes the simulator.
pub(crate) const RELEASE_TESTS: [&str; 5] = [
    "--profile",
    RELEASE,
    "--workspace",
    "--features",
    "riser-sim/coverage",
];

/// Integration tests of the simulator. In an unoptimized build these need minutes of CPU time,
/// except for the plans in `corpus`, which also run there.
pub(crate) const SIMULATOR: [&str; 8] = [
    "--test", "control", "--test", "failures", "--test", "seeds", "--test", "troubles",
];

/// Tests with many sessions, which need minutes of CPU time in an unoptimized build.
const LARGE: [&str; 2] = ["scale", "soak"];

/// First and last line of a harness.
static LINES: LazyLock<Regex> = LazyLock::new(|| {
    let lines = r"(?m)^running \d+ tests?$|^test result: \w+\. (?<passed>\d+) passed; (?<failed>\d+) failed";
    Regex::new(lines).expect("a valid expression")
});

/// Test results of one or more harnesses.
#[derive(Default)]
pub(crate) struct Results {
    pub(crate) counts: Counts,
    /// Names of failed test functions.
    pub(crate) failed: BTreeSet<String>,
    /// Error output, if any.
    pub(crate) failure: Option<String>,
}

impl Results {
    fn of(output: Result<String, Failure>) -> Self {
        let (text, ok) = match output {
            Ok(text) => (text, true),
            Err(e) => (e.to_string(), false),
        };
        let mut counts = Counts::default();
        // The output may contain several harnesses, as with `cargo test`, so we check that every
        // harness we saw start has also printed a result.
        let (mut begun, mut ended) = (0, 0);
        for found in LINES.captures_iter(&text) {
            let number = |name| {
                found
                    .name(name)
                    .and_then(|n| n.as_str().parse::<u64>().ok())
            };
            match (number("passed"), number("failed")) {
                (Some(passed), Some(failed)) => {
                    ended += 1;
                    counts.passed += passed;
                    counts.failed += failed;
                }
                _ => begun += 1,
            }
        }
        // Always show measured values, because the output of a successful test is not printed.
        // The summary of a harness (`test result: `) is not one of them.
        let results = text.lines().filter_map(|line| {
            let at = line.find("result: ")?;
            (!line[..at].ends_with("test ")).then_some(&line[at..])
        });
        results.for_each(|result| println!("{result}"));
        let failed = failed_functions(&text);
        // If a test exits its process, for example by calling `exit(0)`, the functions after it
        // will not run.
        let failure = match (ok, ended > 0 && ended >= begun) {
            (true, true) => None,
            (true, false) => Some(format!("a harness exited without a result\n{text}")),
            (false, _) => Some(text),
        };
        Self {
            counts,
            failed,
            failure,
        }
    }

    fn show(&self) -> String {
        let Counts { passed, failed, .. } = self.counts;
        let mut text = format!("{passed} passed, {failed} failed");
        for name in &self.failed {
            text += &format!("\n    {name}");
        }
        if self.failure.is_some() && self.failed.is_empty() {
            text += "\n    the process failed";
        }
        text
    }

    fn add(&mut self, other: Self) {
        self.counts += other.counts;
        self.failed.extend(other.failed);
        if let Some(failure) = other.failure {
            let all = self.failure.get_or_insert_default();
            all.push_str(&failure);
            all.push('\n');
        }
    }
}

pub(crate) fn cargo_test(args: &[&str], env: &[(&str, &str)]) -> Results {
    let mut command = testing(args);
    Results::of(sh::output(command.envs(env.iter().copied())))
}

pub(crate) fn testing(args: &[&str]) -> Command {
    let mut command = sh::cargo(["test", "--no-fail-fast"]);
    command.args(args).env(skip::LOG, skip_log());
    command
}

/// Builds the programs, and returns a command for tests with the `release` profile. The arguments
/// select the tests. We have to build the programs first, because Cargo doesn't build programs of
/// other packages for a test, so any existing programs may be out of date.
pub(crate) fn release_test(args: &[&str]) -> Result<Command, Failure> {
    daemon::build()?;
    let mut command = testing(&[&RELEASE_TESTS, args].concat());
    command.env(ARE_BUILT, "1");
    Ok(command)
}

pub(crate) fn run_release(args: &[&str], env: &[(&str, &str)]) -> Results {
    let command = release_test(args);
    Results::of(command.and_then(|mut command| sh::output(command.envs(env.iter().copied()))))
}

/// Runs tests and prints their output. Returns the number of test functions that passed,
/// because Cargo reports success even if no name matches.
pub(crate) fn run_counted(command: &mut Command) -> Result<u64, Failure> {
    let text = sh::output(command)?;
    print!("{text}");
    let results = Results::of(Ok(text));
    match results.failure {
        Some(failure) => Err(failure.into()),
        None => Ok(results.counts.passed),
    }
}

/// Runs a test with the `release` profile, using the given variables to increase its size. The
/// test functions run sequentially, so that each can use the whole machine.
pub(crate) fn run_long(
    test: &str,
    numbers: &[(&str, u64)],
    name: Option<&str>,
) -> Result<(), Failure> {
    if let Some(name) = name {
        let mut list = release_test(&["--test", test, "--", name, "--list"])?;
        if !sh::output(&mut list)?
            .lines()
            .any(|line| line.ends_with(": test"))
        {
            return Err(format!("unknown test: no function in {test} contains {name}").into());
        }
    }
    let mut command = release_test(&["--test", test, "--"])?;
    command.envs(numbers.iter().map(|(name, n)| (name, n.to_string())));
    command.args(name);
    command.args(["--test-threads=1", "--nocapture"]);
    run_whole(&mut command)
}

/// Runs a test and returns an error if any of its parts were skipped. The test harness would
/// report this as success.
pub(crate) fn run_whole(command: &mut Command) -> Result<(), Failure> {
    // Discard skips that were left by an earlier process with the same ID.
    let _ = noted();
    let result = sh::run(command);
    let skips = noted();
    result?;
    if skips.is_empty() {
        return Ok(());
    }
    let lines = skips
        .iter()
        .map(|skip| format!("\n{}: {}", skip.name, skip.why));
    Err(format!("skipped parts:{}", lines.collect::<String>()).into())
}

/// Returns a Cargo command to build tests with the `release` profile, including any programs in
/// their packages.
pub(crate) fn building_release(args: &[&str]) -> Command {
    let args = RELEASE_TESTS.iter().chain(args);
    sh::cargo(["test", "--quiet", "--no-run"].iter().chain(args))
}

/// Runs all harnesses in the workspace except [`SIMULATOR`] and [`LARGE`], using the given number
/// of `lanes` in parallel, and then the documentation tests.
pub(crate) fn run_all(lanes: usize) -> Results {
    let harnesses = match built() {
        Ok(harnesses) if harnesses.is_empty() => {
            return Results::of(Err("Cargo reports no harness".into()));
        }
        Ok(harnesses) => harnesses,
        Err(e) => return Results::of(Err(e)),
    };
    let harnesses = harnesses.into_iter();
    let harnesses = harnesses.filter(|harness| !harness.is_of_simulator() && !harness.is_large());
    // With a single lane we don't need a namespace (and therefore root), because the addresses are
    // not shared.
    let is_isolated = lanes > 1;
    let run = |_, harness: Harness| {
        let began = Instant::now();
        let result = harness.run(is_isolated);
        let seconds = began.elapsed().as_secs_f64();
        println!(
            "  {:<32} {seconds:8.1} s  {}",
            harness.name(),
            result.show()
        );
        result
    };
    let mut results = Results::default();
    for result in in_parallel(lanes, harnesses, run) {
        results.add(result);
    }
    // Documentation tests have no harness that we could run directly.
    results.add(cargo_test(&["--workspace", "--doc"], &[]));
    results
}

/// Test harness and package directory.
struct Harness {
    program: PathBuf,
    directory: PathBuf,
    /// Set if the harness was built from its own source file instead of a library or program.
    is_integration: bool,
}

impl Harness {
    /// Parses a Cargo message. Returns `None` for unrelated messages.
    fn of(message: &Value) -> Option<Self> {
        let is_test = message["profile"]["test"] == true;
        // Cargo also reports any programs that were built along with the tests. To be a harness,
        // the target must be built with `cfg(test)`.
        let program = message["executable"].as_str().filter(|_| is_test)?;
        let manifest = PathBuf::from(message["manifest_path"].as_str()?);
        Some(Self {
            program: program.into(),
            directory: manifest.parent()?.to_owned(),
            is_integration: message["target"]["kind"][0] == "test",
        })
    }

    /// Name of the test target, which is the program name without Cargo's hash.
    fn name(&self) -> &str {
        let stem = self.program.file_stem().and_then(|stem| stem.to_str());
        stem.map_or("", |stem| {
            stem.rsplit_once('-').map_or(stem, |(name, _)| name)
        })
    }

    /// Returns whether this harness should run with the `release` profile ([`SIMULATOR`]).
    fn is_of_simulator(&self) -> bool {
        let is_its = self.is_integration && self.directory.ends_with("tests/sim");
        is_its && SIMULATOR.contains(&self.name())
    }

    /// Returns whether this harness should only run with the `release` profile ([`LARGE`]).
    fn is_large(&self) -> bool {
        self.is_integration && self.directory.ends_with("tests") && LARGE.contains(&self.name())
    }

    /// Runs the harness the same way as Cargo: in the package directory, which is also set in
    /// the environment. The harness uses the programs that were built with it.
    fn run(&self, is_isolated: bool) -> Results {
        let mut command = if is_isolated {
            let [program, args @ ..] = ISOLATED;
            let mut command = Command::new(program);
            command.args(args).arg(&self.program);
            command
        } else {
            Command::new(&self.program)
        };
        command
            .current_dir(&self.directory)
            .env("CARGO_MANIFEST_DIR", &self.directory)
            .env(skip::LOG, skip_log())
            .env(ARE_BUILT, "1")
            .stdin(Stdio::null());
        Results::of(sh::output(&mut command))
    }
}

fn built() -> Result<Vec<Harness>, Failure> {
    // Use quiet mode, because we are only interested in errors.
    let args = "test --quiet --workspace --no-run --message-format=json-render-diagnostics";
    let messages = sh::messages(&sh::output(&mut sh::cargo(args.split(' ')))?);
    Ok(messages.iter().filter_map(Harness::of).collect())
}

fn failed_functions(text: &str) -> BTreeSet<String> {
    let mut failed = BTreeSet::new();
    let mut in_list = false;
    for line in text.lines() {
        match line.strip_prefix("    ") {
            Some(name) if in_list && !name.contains(' ') => {
                failed.insert(name.to_owned());
            }
            _ => in_list = line == "failures:",
        }
    }
    failed
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn harness_lines_are_counted() {
        let line = "test result: ok. 12 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out";
        let counts = Results::of(Ok(line.to_owned())).counts;
        assert_eq!((counts.passed, counts.failed), (12, 3));
    }

    #[test]
    fn failed_functions_are_listed() {
        let text = "failures:\n\n---- a::b stdout ----\n    some words\nmore\n\nfailures:\n    \
                    a::b\n    c\n\ntest result: FAILED. 1 passed; 2 failed;\n    d\n";
        let failed: Vec<_> = failed_functions(text).into_iter().collect();
        assert_eq!(failed, ["a::b", "c"]);
    }

    #[test]
    fn results_of_several_harnesses_add_up() {
        let mut results = Results::of(Ok("test result: ok. 2 passed; 0 failed;\n".to_owned()));
        let text = "failures:\n    a\n\ntest result: FAILED. 1 passed; 1 failed;\n";
        results.add(Results::of(Err(text.into())));
        assert_eq!((results.counts.passed, results.counts.failed), (3, 1));
        assert_eq!(results.show(), "3 passed, 1 failed\n    a");
        assert!(results.failed.contains("a"));
        assert_eq!(results.failure.unwrap().trim(), text.trim());
    }

    #[test]
    fn harness_without_result_fails() {
        let began = "\nrunning 2 tests\ntest a ... ok\n";
        let results = Results::of(Ok(began.to_owned()));
        let failure = results.failure.unwrap();
        assert!(
            failure.starts_with("a harness exited without a result"),
            "{failure}"
        );
        assert!(failure.contains("test a ... ok"), "{failure}");
        let one_of_two = format!("{began}test result: ok. 2 passed; 0 failed;\n{began}");
        assert!(Results::of(Ok(one_of_two)).failure.is_some());
        let ended = format!("{began}test result: ok. 2 passed; 0 failed;\n");
        assert!(Results::of(Ok(ended)).failure.is_none());
    }

    #[test]
    fn harness_programs_are_found() {
        let message = |test: bool, program: Value| json!({ "profile": { "test": test }, "executable": program, "manifest_path": "/a/Cargo.toml" });
        let harness = Harness::of(&message(true, json!("/b/c-01ab"))).unwrap();
        assert_eq!(harness.directory, PathBuf::from("/a"));
        assert_eq!(harness.name(), "c");
        assert!(!harness.is_of_simulator());
        let of_simulator = |name: &str| {
            let mut message = message(true, json!(format!("/b/{name}-01ab")));
            message["manifest_path"] = json!("/a/tests/sim/Cargo.toml");
            message["target"] = json!({ "kind": ["test"] });
            Harness::of(&message).unwrap().is_of_simulator()
        };
        assert!(of_simulator("seeds") && !of_simulator("corpus"));
        let is_large = |name: &str| {
            let mut message = message(true, json!(format!("/b/{name}-01ab")));
            message["manifest_path"] = json!("/a/tests/Cargo.toml");
            message["target"] = json!({ "kind": ["test"] });
            Harness::of(&message).unwrap().is_large()
        };
        assert!(is_large("soak") && !is_large("crash"));
        assert!(Harness::of(&message(false, json!("/b/c-01ab"))).is_none());
        assert!(Harness::of(&message(true, Value::Null)).is_none());
    }
}
