//! `cargo xtask verbs`: runs external RDMA programs with our `libibverbs.so.1`,
//! `librdmacm.so.1` and `libibumad.so.3`.
//!
//! We use unmodified Debian programs and run each with `riser run` and a separate loopback address.
//! This doesn't require an RDMA device or kernel modules. If we are root, the programs are run
//! as an unprivileged user ([`runner`]). The commands and the expected output are in a table
//! ([`cases`]). Some programs need more than a loopback address ([`namespace`]). We transfer data
//! over iSER between tgt, libiscsi, QEMU, `riserd` and `riser` ([`iser`]). We also run the test
//! suites of rdma-core ([`pyverbs`]) and libfabric ([`fabtests`]) and our provider suite
//! ([`providers`]), and compare the exported symbols ([`symbols`]). Known failures, including tests
//! that only fail on a busy machine, are in a single list, [`NOT_YET`].

mod cases;
mod fabtests;
mod iser;
mod namespace;
mod providers;
mod pyverbs;
mod runner;
mod symbols;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cases::Case;
pub(crate) use iser::has_qemu_driver;
pub(crate) use runner::Rig;

use crate::cases::{Row, Test, Verdict, attempt, count, print_skips, shorten, summary};
use crate::daemon::{self, RELEASE};
use crate::packages::{self, ensure, missing, needs};
use crate::tally::{Kind, Outcome, noted};
use crate::{Failure, root, sh};

/// Programs, and packages required to build programs not included in Debian, by their names in
/// `packages.toml`.
pub(crate) const NEEDS: &str = "verbs verbs-pyverbs verbs-symbols verbs-consumers verbs-fabtests";

/// Cases and tests that are known to fail, either always or on a busy machine. Each entry has a
/// prefix of the path (`--list`) and the reason. They are counted separately, and are only run if
/// `--not-yet` is set.
const NOT_YET: &[(&str, &str)] = &[
    ("perftest/ib_send_bw -c UC -a", UNRELIABLE),
    ("perftest/ib_send_lat -c UC -a", UNRELIABLE),
    ("perftest/ib_write_lat -c UC -a", UNRELIABLE),
];

const UNRELIABLE: &str = "waits for messages that UC may lose, and a busy receiver's socket drops";

/// Group and name used for the symbol comparison.
const SYMBOLS: &str = "symbols/exports";

/// Group of the rdma-core tests.
const PYVERBS: &str = "pyverbs";

/// Group of the libfabric tests.
const FABTESTS: &str = "fabtests";

/// Options of `cargo xtask verbs`.
///
/// The output of each program is saved.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only the cases whose path contains one of these words. Tests in an external suite have
    /// their own paths; if a word selects a test or a class, other tests in the same module are not
    /// run.
    words: Vec<String>,
    /// List the cases and exit.
    #[arg(long)]
    list: bool,
    /// Also run the cases that are known to fail.
    #[arg(long)]
    not_yet: bool,
    /// Cargo profile used to build `riser` and the library.
    #[arg(long, default_value = RELEASE)]
    profile: String,
    /// Use `riser`, `riserd`, `libriser_drop_in.so` and, if available, the test `devices` from this
    /// directory instead of building them.
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Directory for logs.
    #[arg(long, default_value = ".build/verbs")]
    logs: PathBuf,
}

impl Options {
    /// Returns the reason not to run a case, if it's known to fail.
    fn not_yet(&self, path: &str) -> Option<&'static str> {
        not_yet(path).filter(|_| !self.not_yet)
    }

    fn is_chosen(&self, path: &str) -> bool {
        self.words.is_empty() || self.words.iter().any(|word| path.contains(word.as_str()))
    }

    fn is_any_chosen(&self, path: &str) -> bool {
        self.is_chosen(path) || !self.within(path).is_empty()
    }

    fn has_pyverbs(&self) -> bool {
        let is_named = |word: &String| word.starts_with(PYVERBS) || word.starts_with("test_");
        self.words.is_empty() || self.words.iter().any(is_named)
    }

    fn has_fabtests(&self) -> bool {
        fabtests::paths()
            .iter()
            .any(|path| self.is_any_chosen(path))
    }

    /// Returns the words that select tests in a process, because they continue after the end of its
    /// path. The group is optional.
    fn within<'a>(&'a self, path: &str) -> Vec<&'a str> {
        let tail = path.split_once('/').map_or(path, |(_, tail)| tail);
        let begins = |word: &&str, path: &str| {
            let rest = word.strip_prefix(path);
            rest.is_some_and(|rest| rest.starts_with(['.', '/']))
        };
        let words = self.words.iter().map(String::as_str);
        words
            .filter(|word| begins(word, path) || begins(word, tail))
            .collect()
    }
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if options.list {
        for path in all_paths() {
            println!("{path}{}", not_yet(&path).map_or("", |_| "  (not yet)"));
        }
        return Ok(());
    }
    if !sh::is_root()
        && let Some(again) = run_again(options)?
    {
        return again;
    }
    let outcome = run_all(options)?;
    // Skips and failures are printed, but we don't count them here.
    let _ = noted();
    match outcome {
        Outcome::Ran(tally, Some(_)) => Err(format!("{} failed", tally.total().failed).into()),
        outcome => outcome.into_result(),
    }
}

pub(crate) fn run_all(options: &Options) -> Result<Outcome, Failure> {
    ensure(needs(NEEDS));
    let programs = programs(options)?;
    let scratch = sh::Scratch::new("verbs")?;
    prefetch(options);
    let suite = suite(options)?;
    let isolate = || {
        let [root, programs, cache] = visible(&programs);
        namespace::isolate(&[root, programs, cache, scratch.path().to_owned()])
    };
    let run = || run_rows(options, &programs, &scratch, suite.as_deref());
    // Use a thread for this, so that the rest of the program keeps its namespaces.
    let ran = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            if sh::is_root()
                && let Err(why) = isolate()
            {
                println!("the cases share the machine's network and /tmp: {why}");
            }
            run().map_err(|why| why.to_string())
        });
        thread.join()
    });
    let rows = ran.map_err(|_| "the thread of the cases panicked")??;
    let is_unknown = |word: &&String| !rows.iter().any(|row| row.path.contains(word.as_str()));
    if let Some(word) = options.words.iter().find(is_unknown) {
        return Err(format!("unknown case: no path contains {word}").into());
    }
    print_skips(&rows);
    println!(
        "\n{}; logs in {}",
        summary(rows.iter().map(|row| &row.verdict)),
        options.logs.display()
    );
    Ok(count(&rows))
}

fn run_rows(
    options: &Options,
    programs: &Path,
    scratch: &sh::Scratch,
    suite: Option<&Path>,
) -> Result<Vec<Row>, Failure> {
    let logs = root().join(&options.logs);
    let rig = Rig::new(programs, scratch, &logs)?;
    let mut rows = Vec::new();
    if options.is_chosen(SYMBOLS) {
        rows.push(of_symbols(programs));
    }
    for (number, case) in cases::all().iter().enumerate() {
        if options.is_chosen(&case.path()) {
            rows.push(of_case(options, &rig, number, case));
        }
    }
    if let Some(suite) = suite {
        let (rig, parts) = (&rig, providers::paths().into_iter().enumerate());
        let parts = parts.map(|(index, path)| Part {
            group: path.clone(),
            path,
            run: Box::new(move |_| providers::run(rig, suite, index)),
        });
        rows.extend(of_suite(options, providers::GROUP, Ok(parts.collect())));
    }
    for case in iser::CASES {
        if options.is_chosen(&case.path()) {
            rows.push(of_iser(options, &rig, programs, case));
        }
    }
    if options.has_pyverbs() {
        rows.extend(of_suite(options, PYVERBS, pyverbs_parts(&rig, scratch)));
    }
    if options.has_fabtests() {
        rows.extend(of_suite(options, FABTESTS, fabtests_parts(&rig, scratch)));
    }
    Ok(rows)
}

fn visible(programs: &Path) -> [PathBuf; 3] {
    [root(), programs.to_owned(), packages::cache()]
}

/// Fills the cache in advance, because cases have no network access.
fn prefetch(options: &Options) {
    // If a suite is missing, it will be skipped later and the reason will be printed.
    let Ok(scratch) = sh::Scratch::new("verbs-fetch") else {
        return;
    };
    if options.has_pyverbs() {
        let _ = pyverbs::unpack(&scratch);
    }
    if options.has_fabtests() {
        let _ = fabtests::build(&scratch);
    }
}

/// Builds the test program of the provider suite if any of its pairs is selected.
fn suite(options: &Options) -> Result<Option<PathBuf>, Failure> {
    let mut paths = providers::paths().into_iter();
    match paths.any(|path| options.is_chosen(&path)) {
        true => providers::program(options.programs.as_deref()).map(Some),
        false => Ok(None),
    }
}

/// If we are not root, runs this command again in user namespaces. Returns `None` if this is not
/// possible or already done.
fn run_again(options: &Options) -> Result<Option<Result<(), Failure>>, Failure> {
    let programs = programs(options)?;
    let Some(mut again) = namespace::again_isolated(&visible(&programs)) else {
        return Ok(None);
    };
    ensure(needs(NEEDS));
    prefetch(options);
    // Build the suite's test program here, because Cargo requires network access.
    suite(options)?;
    again.args(std::env::args_os().skip(1));
    if options.programs.is_none() {
        again.arg("--programs").arg(&programs);
    }
    let status = again.status()?;
    Ok(Some(match status.success() {
        true => Ok(()),
        false => Err(format!("cases in namespaces: {status}").into()),
    }))
}

/// Returns the directory of the programs. They are built unless a directory is given.
fn programs(options: &Options) -> Result<PathBuf, Failure> {
    match &options.programs {
        Some(directory) => Ok(std::fs::canonicalize(directory)?),
        None => {
            println!("building riser, riserd and the libraries");
            daemon::build_in(&options.profile)
        }
    }
}

/// Returns the paths of all cases, and a placeholder for each external suite.
pub(crate) fn all_paths() -> Vec<String> {
    let suites = [PYVERBS, FABTESTS]
        .into_iter()
        .zip(["MODULE.CLASS.TEST", "PROVIDER/TEST"]);
    std::iter::once(SYMBOLS.to_owned())
        .chain(cases::all().iter().map(Case::path))
        .chain(iser::CASES.iter().map(iser::Case::path))
        .chain(providers::paths())
        .chain(suites.map(|(suite, test)| format!("{suite}/{test}")))
        .collect()
}

/// Returns the reason why a case is known to fail, if it's on the list.
fn not_yet(path: &str) -> Option<&'static str> {
    let is_it = |(beginning, _): &&(&str, _)| path.starts_with(*beginning);
    NOT_YET.iter().find(is_it).map(|(_, why)| *why)
}

fn of_symbols(programs: &Path) -> Row {
    if let Some(need) = missing(needs("verbs-symbols")).first() {
        let why = format!("{} is missing", need.program);
        return Row::run(SYMBOLS, Kind::Check, |_| Verdict::Skipped(why));
    }
    Row::check(SYMBOLS, || {
        symbols::compare(&programs.join("libriser_drop_in.so"))
    })
}

fn of_case(options: &Options, rig: &Rig, number: usize, case: &Case) -> Row {
    let programs = case.programs().chain(case.source.as_ref().map(|_| "mpicc"));
    let programs = programs.filter(|program| !program.starts_with('{'));
    let lack = || case.network.then(|| rig.network().err()).flatten();
    let run = || rig.run(number, case);
    of_programs(options, &case.path(), programs, lack, || {
        attempt(case.may_lose(), run)
    })
}

fn of_iser(options: &Options, rig: &Rig, programs: &Path, case: &iser::Case) -> Row {
    let is_lacking = || case.needs.contains("qemu-img") && !has_qemu_driver();
    let lack = || is_lacking().then(|| "QEMU's iSER driver is missing".to_owned());
    let run = || case.run(rig, programs).into();
    of_programs(options, &case.path(), case.needs.split(' '), lack, run)
}

/// Runs a case if nothing is missing that it needs.
fn of_programs<'a>(
    options: &Options,
    path: &str,
    mut programs: impl Iterator<Item = &'a str>,
    lack: impl Fn() -> Option<String>,
    run: impl Fn() -> Verdict,
) -> Row {
    Row::run(path, Kind::Program, |_| {
        if let Some(why) = options.not_yet(path) {
            return Verdict::NotYet(why.to_owned());
        }
        if let Some(program) = programs.find(|program| sh::which(program).is_none()) {
            return Verdict::Skipped(format!("{program} is missing"));
        }
        lack().map_or_else(&run, Verdict::Skipped)
    })
}

/// A process that runs several tests of a suite.
struct Part<'a> {
    /// Group of the tests.
    group: String,
    path: String,
    /// Runs the tests whose names start with one of the words, if the suite supports this, or
    /// all tests.
    run: RunPart<'a>,
}

type RunPart<'a> = Box<dyn Fn(&[&str]) -> Result<Vec<Test>, Failure> + 'a>;

/// Returns a process for each module of the rdma-core tests, so that a crash only affects a single
/// module.
fn pyverbs_parts<'a>(rig: &'a Rig, scratch: &'a sh::Scratch) -> Result<Vec<Part<'a>>, String> {
    if let Some(need) = missing(needs(pyverbs::NEED)).first() {
        return Err(format!("{} is missing", need.package));
    }
    let modules = pyverbs::unpack(scratch).map_err(|why| shorten(&why.to_string()))?;
    let part = |module: String| Part {
        group: PYVERBS.to_owned(),
        path: format!("{PYVERBS}/{module}"),
        run: Box::new(move |tests| pyverbs::run(rig, scratch, &module, tests)),
    };
    Ok(modules.into_iter().map(part).collect())
}

/// Returns a process for each provider. The script of libfabric runs all tests of a provider.
fn fabtests_parts<'a>(rig: &'a Rig, scratch: &sh::Scratch) -> Result<Vec<Part<'a>>, String> {
    rig.network()?;
    let directory = fabtests::unpack(scratch).map_err(|why| shorten(&why.to_string()))?;
    let part = |(number, path): (usize, String)| {
        let directory = directory.clone();
        Part {
            group: path.clone(),
            path,
            run: Box::new(move |_| fabtests::run(rig, &directory, number)),
        }
    };
    Ok(fabtests::paths()
        .into_iter()
        .enumerate()
        .map(part)
        .collect())
}

fn of_suite(options: &Options, suite: &str, parts: Result<Vec<Part<'_>>, String>) -> Vec<Row> {
    let parts = match parts {
        Ok(parts) => parts,
        Err(why) => return vec![Row::run(suite, Kind::SuiteTest, |_| Verdict::Skipped(why))],
    };
    let mut rows = Vec::new();
    for Part { group, path, run } in parts {
        if !options.is_any_chosen(&path) {
            continue;
        }
        if let Some(why) = options.not_yet(&path) {
            let verdict = Verdict::NotYet(why.to_owned());
            rows.push(Row::run(&path, Kind::SuiteTest, |_| verdict));
            continue;
        }
        let words = match options.is_chosen(&path) {
            true => Vec::new(),
            false => options.within(&path),
        };
        let is_wanted = |test: &Test| {
            let name = format!("{group}/{}", test.name);
            words.is_empty() || words.iter().any(|word| name.contains(word))
        };
        let began = Instant::now();
        let ran = run(&words).map(|tests| tests.into_iter().filter(is_wanted).collect());
        rows.extend(process_rows(options, &group, &path, ran, began.elapsed()));
    }
    rows
}

/// Returns the results of a process that runs several tests. Prints a line for the process and
/// for each failure. If the process could not run, this is a single result.
fn process_rows(
    options: &Options,
    group: &str,
    path: &str,
    ran: Result<Vec<Test>, Failure>,
    took: Duration,
) -> Vec<Row> {
    let tests = match ran {
        Ok(tests) => tests,
        Err(why) => return vec![Row::run(path, Kind::SuiteTest, |_| Err(why).into())],
    };
    let row = |test: Test| {
        let path = format!("{group}/{}", test.name);
        let verdict = match (options.not_yet(&path), test.verdict) {
            (Some(why), Verdict::Failed(_)) => Verdict::NotYet(why.to_owned()),
            // This must fail, so that the entry is removed from the list when the problem has been
            // fixed.
            (Some(_), Verdict::Passed) => {
                Verdict::Failed("it passes: remove it from the list".to_owned())
            }
            (_, verdict) => verdict,
        };
        Row::new(&path, Kind::SuiteTest, verdict)
    };
    let rows: Vec<_> = tests.into_iter().map(row).collect();
    println!(
        "{path:<58} {:>6.1} s  {}",
        took.as_secs_f64(),
        summary(rows.iter().map(|row| &row.verdict))
    );
    for row in &rows {
        if let Verdict::Failed(why) = &row.verdict {
            println!("  FAILED   {}: {why}", row.path);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::parse_options;

    #[test]
    fn paths_are_unique_and_list_is_valid() {
        let paths = all_paths();
        let unique: BTreeSet<_> = paths.iter().collect();
        assert_eq!(unique.len(), paths.len());
        for (beginning, _) in NOT_YET {
            // We don't have a list of the rdma-core tests, because they are in the package.
            let is_known = beginning.starts_with(PYVERBS)
                || paths.iter().any(|path| path.starts_with(beginning));
            assert!(is_known, "{beginning}");
        }
    }

    #[test]
    fn function_list_matches_cases() {
        let paths = all_paths();
        let groups: BTreeSet<_> = paths.iter().filter_map(|p| p.split_once('/')).collect();
        let groups: BTreeSet<_> = groups.into_iter().map(|(group, _)| group).collect();
        let text = std::fs::read_to_string(root().join("docs/verbs.md")).unwrap();
        let mut named = 0;
        for line in text.lines() {
            let mut parts = line.split('`').skip(1);
            while let (Some(span), after) = (parts.next(), parts.next()) {
                let group = span.split_once('/').map(|(group, _)| group);
                if !group.is_some_and(|group| groups.contains(group)) {
                    continue;
                }
                named += 1;
                // The tests of rdma-core are not listed here.
                let is_foreign = span.starts_with("pyverbs/test_");
                let is_case = is_foreign || paths.iter().any(|path| path == span);
                assert!(is_case, "no case {span}");
                let is_marked = after.is_some_and(|text| text.starts_with(" (not yet"));
                assert_eq!(is_marked, not_yet(span).is_some(), "{span}: {line}");
            }
        }
        assert_ne!(named, 0);
    }

    #[test]
    fn words_choose_cases() {
        let options = Options {
            words: vec!["rping".to_owned(), "info/".to_owned()],
            ..parse_options(&[])
        };
        assert!(options.is_chosen("rdmacm/rping -q"));
        assert!(options.is_chosen("info/ibv_devices"));
        assert!(!options.is_chosen("pyverbs/test_qp"));
    }

    #[test]
    fn suite_tests_are_selected_by_path() {
        let words = [
            "test_qp.QPTest",
            "pyverbs/test_mr.MRTest.test_reg_mr",
            "fabtests/verbs;ofi_rxm/fi_msg",
            "test_cq_ex",
        ];
        let options = Options {
            words: words.map(str::to_owned).to_vec(),
            ..parse_options(&[])
        };
        assert_eq!(options.within("pyverbs/test_qp"), words[..1]);
        assert_eq!(options.within("pyverbs/test_mr"), words[1..2]);
        assert_eq!(options.within("fabtests/verbs;ofi_rxm"), words[2..3]);
        // These paths have a common prefix, or are selected as a whole.
        for path in ["pyverbs/test_cq", "pyverbs/test_cq_ex", "fabtests/verbs"] {
            assert!(options.within(path).is_empty(), "{path}");
        }
    }
}
