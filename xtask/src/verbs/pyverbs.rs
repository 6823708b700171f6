//! Runs the rdma-core Python tests that are not specific to a vendor, using Debian's version.
//!
//! The tests are installed as documentation in the package with the Python module. We unpack the
//! package again, because small systems are often configured to not install documentation. Our own
//! script (`pyverbs.py`) runs them and prints the results.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use super::runner::{Rig, failure};
use crate::cases::{Test, Verdict};
use crate::{Failure, packages, sh};

/// Package with the Python module that the tests use, and its name in `packages.toml`.
pub(super) const PACKAGE: &str = "python3-pyverbs";
pub(super) const NEED: &str = "verbs-pyverbs";

/// Debian's Python, because the module is built for this version.
const PYTHON: &str = "/usr/bin/python3";

/// Directory of the tests in the package.
const DIRECTORY: &str = "usr/share/doc/rdma-core/tests";

/// Prefixes of modules that test vendor-specific devices or GPU memory.
const VENDORS: [&str; 3] = ["test_mlx5", "test_efa", "test_cuda"];

/// Address of the device used for tests.
const ADDRESS: &str = "127.0.17.1";

/// Timeout for a module.
const PATIENCE: Duration = Duration::from_secs(240);

/// Unpacks the tests to a directory that test processes can read, and returns the module names.
pub(super) fn unpack(scratch: &sh::Scratch) -> Result<Vec<String>, Failure> {
    let package = scratch.join("pyverbs");
    packages::unpack(PACKAGE, &package)?;
    let directory = scratch.join("tests");
    fs::create_dir_all(&directory)?;
    let files = fs::read_dir(package.join(DIRECTORY));
    let files = files.map_err(|e| format!("the package {PACKAGE} has no {DIRECTORY}: {e}"))?;
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
        fs::write(directory.join(plain), text)?;
        if plain.starts_with("test_") {
            modules.push(plain.trim_end_matches(".py").to_owned());
        }
    }
    fs::write(directory.join("driver.py"), include_str!("pyverbs.py"))?;
    modules.sort();
    match modules.is_empty() {
        true => Err(format!("{DIRECTORY} of the package {PACKAGE} has no tests").into()),
        false => Ok(modules),
    }
}

/// Runs the tests of a module in a separate process. If `tests` is not empty, only runs tests
/// that start with one of these names.
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
    let exited = process.finish(Instant::now() + PATIENCE);
    let mut tests = parse(&exited.output);
    let is_whole = exited.output.lines().any(|line| line.starts_with("Ran "));
    if tests.is_empty() && !is_whole {
        let what = match exited.status {
            None => "it timed out".to_owned(),
            Some(status) => format!("no test ran, {status}"),
        };
        return Err(failure(module, &what, &exited));
    }
    // The process may also be killed between two tests, or crash when it exits.
    let is_crash = exited.status.is_none_or(|status| status.signal().is_some());
    let is_unfinished = |test: &Test| test.verdict == Verdict::unfinished();
    if (is_crash || !is_whole) && !tests.iter().any(is_unfinished) {
        tests.push(Test {
            name: format!("{module}.exit"),
            verdict: Verdict::unfinished(),
        });
    }
    Ok(tests)
}

/// Parses the results, which are in lines `test: HOW NAME: REASON`. There may be other output in
/// between.
fn parse(said: &str) -> Vec<Test> {
    let mut tests: Vec<Test> = Vec::new();
    for line in said.lines() {
        let line = line.strip_prefix("test: ");
        let Some((how, rest)) = line.and_then(|line| line.split_once(' ')) else {
            continue;
        };
        let (name, why) = rest.split_once(": ").unwrap_or((rest, ""));
        let verdict = match how {
            "started" => Verdict::unfinished(),
            "ok" => Verdict::Passed,
            "skipped" => Verdict::Skipped(why.to_owned()),
            _ => Verdict::Failed(why.to_owned()),
        };
        match tests.last_mut().filter(|test| test.name == name) {
            Some(test) => test.verdict = verdict,
            None => tests.push(Test {
                name: name.to_owned(),
                verdict,
            }),
        }
    }
    tests
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "
test: started test_pd.PDTest.test_alloc_pd: \n\
a warning
test: ok test_pd.PDTest.test_alloc_pd: \n\
test: started test_device.DMTest.test_dm: \n\
test: skipped test_device.DMTest.test_dm: Unsupported memory size
test: started test_odp.OdpTest.test_odp: \n\
test: FAILED test_odp.OdpTest.test_odp: Failed to register. Errno: 95
test: FAILED test_x.XTest.setUpClass: KeyError: 'a'
test: started test_odp.OdpTest.test_last: \n";

    #[test]
    fn results_are_read() {
        let failed = |why: &str| Verdict::Failed(why.to_owned());
        let skipped = Verdict::Skipped("Unsupported memory size".to_owned());
        let expected = [
            ("test_pd.PDTest.test_alloc_pd", Verdict::Passed),
            ("test_device.DMTest.test_dm", skipped),
            (
                "test_odp.OdpTest.test_odp",
                failed("Failed to register. Errno: 95"),
            ),
            ("test_x.XTest.setUpClass", failed("KeyError: 'a'")),
            ("test_odp.OdpTest.test_last", Verdict::unfinished()),
        ];
        let expected = expected.map(|(name, verdict)| Test {
            name: name.to_owned(),
            verdict,
        });
        assert_eq!(parse(SAID), expected);
    }
}
