//! Runs the rdma-core Python tests that are not specific to a vendor, using Debian's version.
//!
//! The tests are installed as documentation in the package with the Python module. We unpack the
//! package again, because small systems are often configured to not install documentation.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use super::runner::{Ended, Rig};
use crate::cases::{Test, Verdict};
use crate::{Failure, packages, sh};

/// Package with the Python module that the tests use, and its name in `packages.toml`.
pub(super) const PACKAGE: &str = "python3-pyverbs";
pub(super) const NEED: &str = "verbs-pyverbs";

/// Debian's Python, because the module is built for this version.
const PYTHON: &str = "/usr/bin/python3";

/// Directory of the tests in the package.
const FOLDER: &str = "usr/share/doc/rdma-core/tests";

/// Prefixes of modules that test vendor-specific devices or GPU memory.
const VENDORS: [&str; 3] = ["test_mlx5", "test_efa", "test_cuda"];

/// Address of the device used for tests.
const ADDRESS: &str = "127.0.17.1";

/// Script that runs the tests. They search for the device address in the kernel's directory for its
/// network interface, but a software device has no such directory and these tests would be skipped.
const DRIVER: &str = "\
import os, runpy, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [here, os.path.dirname(here)]
import tests.base
def address(self, dev, port, idx):
    self.args.append([dev, port, idx, os.environ['ADDRESS'], None])
tests.base.RDMATestCase._get_ip_mac = address
runpy.run_path(os.path.join(here, 'run_tests.py'), run_name='__main__')
";

/// Timeout for a module.
const PATIENCE: Duration = Duration::from_secs(240);

/// Unpacks the tests to a directory that test processes can read, and returns the module names.
pub(super) fn unpack(scratch: &sh::Scratch) -> Result<Vec<String>, Failure> {
    let package = scratch.join("pyverbs");
    packages::unpack(PACKAGE, &package)?;
    let folder = scratch.join("tests");
    fs::create_dir_all(&folder)?;
    let files = fs::read_dir(package.join(FOLDER));
    let files = files.map_err(|e| format!("the package {PACKAGE} has no {FOLDER}: {e}"))?;
    let mut modules = Vec::new();
    for file in files {
        let path = file?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let plain = name.trim_end_matches(".gz");
        if VENDORS.iter().any(|vendor| plain.starts_with(vendor)) {
            continue;
        }
        let text = match name.ends_with(".gz") {
            true => sh::output(&mut sh::cmd("gzip", [Path::new("-dc"), &path]))?,
            false => fs::read_to_string(&path)?,
        };
        fs::write(folder.join(plain), text)?;
        if plain.starts_with("test_") {
            modules.push(plain.trim_end_matches(".py").to_owned());
        }
    }
    fs::write(folder.join("driver.py"), DRIVER)?;
    modules.sort();
    match modules.is_empty() {
        true => Err(format!("{FOLDER} of the package {PACKAGE} has no tests").into()),
        false => Ok(modules),
    }
}

/// Runs the tests of a module in a separate process. If `tests` is not empty, only runs tests that
/// start with one of these names.
pub(super) fn run(
    rig: &Rig,
    scratch: &sh::Scratch,
    module: &str,
    tests: &[&str],
) -> Result<Vec<Test>, Failure> {
    let runner = scratch.join("tests/driver.py");
    let runner = runner.display().to_string();
    let mut words = vec![
        PYTHON, "-B", &runner, "--dev", "riser0", "--port", "1", "--gid", "0", "-v",
    ];
    for test in tests {
        words.extend(["-k", test.trim_start_matches("pyverbs/")]);
    }
    words.push(module);
    let mut command = rig.command(ADDRESS, &[], &words);
    command.env("ADDRESS", ADDRESS);
    let mut process = rig.start(command, &format!("pyverbs/{module}"))?;
    let ended = process.finish(Instant::now() + PATIENCE);
    let mut tests = parse(&ended.said);
    let is_whole = ended.said.lines().any(|line| line.starts_with("Ran "));
    if tests.is_empty() && !is_whole {
        return Err(format!("{}\n{}", how(&ended), last_line(&ended.said)).into());
    }
    // The process may also be killed between two tests, or crash when it exits.
    let is_crash = ended.status.is_none_or(|status| status.signal().is_some());
    let is_unfinished = |test: &Test| test.verdict == Verdict::unfinished();
    if (is_crash || !is_whole) && !tests.iter().any(is_unfinished) {
        tests.push(Test {
            name: format!("{module}.exit"),
            verdict: Verdict::unfinished(),
        });
    }
    Ok(tests)
}

fn how(ended: &Ended) -> String {
    match ended.status {
        None => "it timed out".to_owned(),
        Some(status) => format!("no test ran, {status}"),
    }
}

/// Parses the output of unittest when run with `-v`, including the tracebacks at the end.
///
/// For each test, the output is `name (module.Class.name)`, an optional line with the description,
/// `... ` and the result. There may be other output in between.
fn parse(said: &str) -> Vec<Test> {
    let mut tests: Vec<Test> = Vec::new();
    let mut is_open = false;
    let end = said.find("\n======").unwrap_or(said.len());
    let traces = traces(&said[end..]);
    for line in said[..end].lines() {
        let mut rest = line;
        if let Some(name) = begun(line) {
            tests.push(Test {
                name,
                verdict: Verdict::unfinished(),
            });
            is_open = true;
            rest = line.split_once(" ... ").map_or("", |(_, rest)| rest);
        } else if is_open && let Some((_, result)) = line.rsplit_once(" ... ") {
            rest = result;
        }
        let Some(test) = tests.last_mut().filter(|_| is_open) else {
            continue;
        };
        let verdict = match rest.trim() {
            "ok" => Verdict::Passed,
            "FAIL" | "ERROR" => {
                let why = traces.get(&test.name).cloned();
                Verdict::Failed(why.unwrap_or_default())
            }
            rest if rest.starts_with("skipped") => {
                let why = rest.trim_start_matches("skipped").trim();
                Verdict::Skipped(why.trim_matches(['\'', '"']).to_owned())
            }
            _ => continue,
        };
        test.verdict = verdict;
        is_open = false;
    }
    // If the setup of a class or module fails, there is a traceback but no line for the test.
    for (name, why) in traces {
        if !tests.iter().any(|test| test.name == name) {
            tests.push(Test {
                name,
                verdict: Verdict::Failed(why),
            });
        }
    }
    tests
}

/// Returns the name of the test if this line is the start of a test.
fn begun(line: &str) -> Option<String> {
    let (function, rest) = line.split_once(" (")?;
    let (class, _) = rest.split_once(')')?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || "_.".contains(c);
    if !function.starts_with("test")
        || !function.chars().all(is_name)
        || !class.chars().all(is_name)
    {
        return None;
    }
    Some(full_name(function, class))
}

/// Converts `tests.module.Class` to `module.Class.function`. Newer Python versions already include
/// the function.
fn full_name(function: &str, class: &str) -> String {
    let class = class.trim_start_matches("tests.");
    match class.ends_with(&format!(".{function}")) {
        true => class.to_owned(),
        false => format!("{class}.{function}"),
    }
}

/// Returns the last line of each traceback by test name.
fn traces(text: &str) -> BTreeMap<String, String> {
    let mut traces = BTreeMap::new();
    for part in text.split("\n======").skip(1) {
        let mut lines = part.lines().skip(1);
        let head = lines.next().unwrap_or_default();
        let head = head
            .strip_prefix("ERROR: ")
            .or_else(|| head.strip_prefix("FAIL: "));
        let Some((function, rest)) = head.and_then(|head| head.split_once(" (")) else {
            continue;
        };
        let class = rest.split(')').next().unwrap_or_default();
        let end = lines.take_while(|line| !line.starts_with("Ran "));
        let end = end.filter(|line| !line.trim().is_empty() && !line.starts_with("---"));
        let why = end.last().unwrap_or_default().trim().to_owned();
        traces.insert(full_name(function, class), why);
    }
    traces
}

fn last_line(said: &str) -> String {
    let mut lines = said.lines().rev();
    let line = lines.find(|line| !line.trim().is_empty());
    line.unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\
test_alloc_pd (tests.test_pd.PDTest.test_alloc_pd)
Test ibv_alloc_pd() ... ok
test_create_pd_none_ctx (tests.test_pd.PDTest.test_create_pd_none_ctx) ... a warning
ok
test_dm (tests.test_device.DMTest) ... skipped 'Unsupported memory size'
test_odp (tests.test_odp.OdpTest.test_odp) ... ERROR
test_more (tests.test_odp.OdpTest.test_more) ... FAIL
test_last (tests.test_odp.OdpTest.test_last)
It ends here ... 
======================================================================
ERROR: test_odp (tests.test_odp.OdpTest.test_odp)
----------------------------------------------------------------------
Traceback (most recent call last):
  File \"a.py\", line 1, in b
pyverbs.pyverbs_error.PyverbsRDMAError: Failed to register. Errno: 95, Operation not supported

======================================================================
FAIL: test_more (tests.test_odp.OdpTest.test_more)
----------------------------------------------------------------------
Traceback (most recent call last):
AssertionError: 1 != 2

======================================================================
ERROR: setUpClass (tests.test_x.XTest)
----------------------------------------------------------------------
Traceback (most recent call last):
KeyError: 'a'

----------------------------------------------------------------------
Ran 5 tests in 0.1s

FAILED (errors=2)
";

    #[test]
    fn results_are_read() {
        let test = |name: &str, verdict| Test {
            name: name.to_owned(),
            verdict,
        };
        let failed = |why: &str| Verdict::Failed(why.to_owned());
        let unsupported = "pyverbs.pyverbs_error.PyverbsRDMAError: Failed to register. Errno: 95, \
                           Operation not supported";
        assert_eq!(
            parse(SAID),
            [
                test("test_pd.PDTest.test_alloc_pd", Verdict::Passed),
                test("test_pd.PDTest.test_create_pd_none_ctx", Verdict::Passed),
                test(
                    "test_device.DMTest.test_dm",
                    Verdict::Skipped("Unsupported memory size".to_owned())
                ),
                test("test_odp.OdpTest.test_odp", failed(unsupported)),
                test(
                    "test_odp.OdpTest.test_more",
                    failed("AssertionError: 1 != 2")
                ),
                test("test_odp.OdpTest.test_last", Verdict::unfinished()),
                test("test_x.XTest.setUpClass", failed("KeyError: 'a'")),
            ]
        );
    }
}
