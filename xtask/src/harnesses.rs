//! Harnesses of Rust's tests: built by Cargo, run, and their results added up.
//!
//! Most of our tests wait, for time-outs, peers and processes. While they do, others may run, or
//! Cargo may work ahead, for which [`run_all`] runs the harnesses itself. Tests use fixed addresses
//! of the loopback interface and one UDP port, so those that run at once have a network namespace
//! each.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use riser_testkit::programs::ARE_BUILT;
use serde_json::Value;

use crate::daemon::OPTIMIZED;
use crate::tally::{Counts, skip_log};
use crate::{Failure, sh, skip};

/// Starts a program in a network namespace with nothing but a loopback interface.
const ISOLATED: [&str; 5] = [
    "unshare",
    "--net",
    "sh",
    "-c",
    "ip link set lo up && exec \"$0\" \"$@\"",
];

/// Asks Cargo for tests in the programs' profile: always of these packages with these features, as
/// others would have everything that they depend on built once more. The simulator is among them.
pub(crate) const OPTIMIZED_TESTS: [&str; 5] = [
    "--profile",
    OPTIMIZED,
    "--workspace",
    "--features",
    "riser-sim/coverage",
];

/// The integration tests of the simulator. They compute for minutes where the code is not optimized;
/// plans that found something (`corpus`) run there all the same.
pub(crate) const SIMULATOR: [&str; 8] = [
    "--test", "control", "--test", "failures", "--test", "seeds", "--test", "troubles",
];

/// The results of harnesses.
#[derive(Default)]
pub(crate) struct Results {
    pub(crate) counts: Counts,
    /// The names of the functions that failed.
    pub(crate) failed: BTreeSet<String>,
    /// The output of what went wrong.
    pub(crate) failure: Option<String>,
}

impl Results {
    /// Reads the output of one harness or of several.
    fn of(output: Result<String, Failure>) -> Self {
        let (text, ok) = match output {
            Ok(text) => (text, true),
            Err(e) => (e.to_string(), false),
        };
        let mut counts = Counts::default();
        // The output may be that of several harnesses, as of `cargo test`: each that has begun
        // must have given its result.
        let (mut begun, mut ended) = (0, 0);
        for line in text.lines() {
            begun += usize::from(is_beginning(line));
            let Some(line) = line.strip_prefix("test result: ") else {
                continue;
            };
            ended += 1;
            counts.passed += number_before(line, " passed");
            counts.failed += number_before(line, " failed");
        }
        // Figures are shown also of what succeeds, whose output is not printed otherwise.
        let figures = text.lines().filter_map(|l| Some(&l[l.find("figure: ")?..]));
        figures.for_each(|figure| println!("{figure}"));
        let failed = failed_functions(&text);
        // A test that ends its process, as by `exit(0)`, takes the functions after it along.
        let failure = match (ok, ended > 0 && ended >= begun) {
            (true, true) => None,
            (true, false) => Some(format!("a harness ended without its result\n{text}")),
            (false, _) => Some(text),
        };
        Self {
            counts,
            failed,
            failure,
        }
    }

    /// The counts, and the functions that failed.
    fn show(&self) -> String {
        let Counts { passed, failed, .. } = self.counts;
        let mut text = format!("{passed} passed, {failed} failed");
        for name in &self.failed {
            text += &format!("\n    {name}");
        }
        if self.failure.is_some() && self.failed.is_empty() {
            text += "\n    its process failed";
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

/// Runs `cargo test` with these arguments.
pub(crate) fn cargo_test(args: &[&str], env: &[(&str, &str)]) -> Results {
    let mut command = sh::cargo(["test", "--no-fail-fast"]);
    command
        .args(args)
        .env(skip::LOG, skip_log())
        .envs(env.iter().copied());
    Results::of(sh::output(&mut command))
}

/// Runs tests in the programs' profile, which these further arguments choose.
pub(crate) fn optimized_test(args: &[&str], env: &[(&str, &str)]) -> Results {
    cargo_test(&[&OPTIMIZED_TESTS, args].concat(), env)
}

/// Cargo, about to build tests in the programs' profile, and the programs of their packages.
pub(crate) fn building_optimized(args: &[&str]) -> Command {
    let args = OPTIMIZED_TESTS.iter().chain(args);
    sh::cargo(["test", "--quiet", "--no-run"].iter().chain(args))
}

/// Runs all harnesses of the workspace but those of [`SIMULATOR`], `lanes` at once, then the tests
/// in its documentation. `once_built` is called when Cargo has built them and holds no lock.
pub(crate) fn run_all(lanes: usize, once_built: impl FnOnce()) -> Results {
    let harnesses = match built() {
        Ok(harnesses) if harnesses.is_empty() => {
            return Results::of(Err("Cargo names no harness".into()));
        }
        Ok(harnesses) => harnesses,
        Err(e) => return Results::of(Err(e)),
    };
    let harnesses = harnesses.into_iter();
    let harnesses = harnesses.filter(|harness| !harness.is_of_simulator());
    // From here on Cargo holds no lock of its output folder, so what works ahead waits for no
    // build of the tests.
    once_built();
    // One lane needs no namespaces, and so no root: nothing else uses its addresses.
    let is_isolated = lanes > 1;
    let (queue, results) = (Mutex::new(harnesses), Mutex::new(Results::default()));
    thread::scope(|scope| {
        for _ in 0..lanes {
            scope.spawn(|| {
                // Each lane takes what is next when it is free. The harnesses differ too much in
                // their time to be shared out beforehand.
                let next = || queue.lock().expect("no lane panics").next();
                while let Some(harness) = next() {
                    let began = Instant::now();
                    let result = harness.run(is_isolated);
                    let seconds = began.elapsed().as_secs_f64();
                    println!(
                        "  {:<32} {seconds:8.1} s  {}",
                        harness.name(),
                        result.show()
                    );
                    results.lock().expect("no lane panics").add(result);
                }
            });
        }
    });
    let mut results = results.into_inner().expect("no lane panics");
    // These have no harness that could be run by itself.
    results.add(cargo_test(&["--workspace", "--doc"], &[]));
    results
}

/// A harness, and the folder of its package.
struct Harness {
    program: PathBuf,
    folder: PathBuf,
    /// Its own source, and not that of a library or a program, makes it one.
    is_integration: bool,
}

impl Harness {
    /// Reads a message of Cargo; none if it is about something else.
    fn of(message: &Value) -> Option<Self> {
        let is_test = message["profile"]["test"] == true;
        // Cargo also names the programs that it has built beside the tests. Only what was built
        // with `cfg(test)` is a harness.
        let program = message["executable"].as_str().filter(|_| is_test)?;
        let manifest = PathBuf::from(message["manifest_path"].as_str()?);
        Some(Self {
            program: program.into(),
            folder: manifest.parent()?.to_owned(),
            is_integration: message["target"]["kind"][0] == "test",
        })
    }

    /// The name of the test target: that of the program without Cargo's hash.
    fn name(&self) -> &str {
        let stem = self.program.file_stem().and_then(|stem| stem.to_str());
        stem.map_or("", |stem| {
            stem.rsplit_once('-').map_or(stem, |(name, _)| name)
        })
    }

    /// Whether it runs in the programs' profile ([`SIMULATOR`]).
    fn is_of_simulator(&self) -> bool {
        let is_its = self.is_integration && self.folder.ends_with("tests/sim");
        is_its && SIMULATOR.contains(&self.name())
    }

    /// Runs it as Cargo does: in the folder of its package, which it may also find in its
    /// environment. The programs are those that Cargo has built with the harnesses.
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
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .env(skip::LOG, skip_log())
            .env(ARE_BUILT, "1")
            .stdin(Stdio::null());
        Results::of(sh::output(&mut command))
    }
}

fn built() -> Result<Vec<Harness>, Failure> {
    // Quiet: what matters in its output is an error.
    let args = "test --quiet --workspace --no-run --message-format=json-render-diagnostics";
    let text = sh::output(&mut sh::cargo(args.split(' ')))?;
    let messages = text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    Ok(messages
        .filter_map(|message| Harness::of(&message))
        .collect())
}

/// The names that harnesses list below `failures:`.
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

/// Recognizes the line that a harness begins with.
fn is_beginning(line: &str) -> bool {
    let number = line.strip_prefix("running ").map(|rest| rest.split(' '));
    let words = number.map(Iterator::collect::<Vec<_>>).unwrap_or_default();
    matches!(words[..], [n, "test" | "tests"] if n.parse::<u32>().is_ok())
}

fn number_before(line: &str, word: &str) -> u64 {
    line.split(word)
        .next()
        .and_then(|before| before.rsplit(|c: char| !c.is_ascii_digit()).next())
        .and_then(|digits| digits.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn harness_lines_are_counted() {
        let line = "ok. 12 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(number_before(line, " passed"), 12);
        assert_eq!(number_before(line, " failed"), 3);
    }

    #[test]
    fn functions_that_failed_are_named() {
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
    fn a_harness_without_its_result_has_failed() {
        let began = "\nrunning 2 tests\ntest a ... ok\n";
        let results = Results::of(Ok(began.to_owned()));
        let failure = results.failure.unwrap();
        assert!(
            failure.starts_with("a harness ended without its result"),
            "{failure}"
        );
        assert!(failure.contains("test a ... ok"), "{failure}");
        let one_of_two = format!("{began}test result: ok. 2 passed; 0 failed;\n{began}");
        assert!(Results::of(Ok(one_of_two)).failure.is_some());
        let ended = format!("{began}test result: ok. 2 passed; 0 failed;\n");
        assert!(Results::of(Ok(ended)).failure.is_none());
    }

    #[test]
    fn programs_with_a_harness_are_found() {
        let message = |test: bool, program: Value| json!({ "profile": { "test": test }, "executable": program, "manifest_path": "/a/Cargo.toml" });
        let harness = Harness::of(&message(true, json!("/b/c-01ab"))).unwrap();
        assert_eq!(harness.folder, PathBuf::from("/a"));
        assert_eq!(harness.name(), "c");
        assert!(!harness.is_of_simulator());
        let of_simulator = |name: &str| {
            let mut message = message(true, json!(format!("/b/{name}-01ab")));
            message["manifest_path"] = json!("/a/tests/sim/Cargo.toml");
            message["target"] = json!({ "kind": ["test"] });
            Harness::of(&message).unwrap().is_of_simulator()
        };
        assert!(of_simulator("seeds") && !of_simulator("corpus"));
        assert!(Harness::of(&message(false, json!("/b/c-01ab"))).is_none());
        assert!(Harness::of(&message(true, Value::Null)).is_none());
    }
}
