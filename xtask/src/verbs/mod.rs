//! `cargo xtask verbs`: RDMA programs of others on our `libibverbs.so.1`, `librdmacm.so.1` and
//! `libibumad.so.3`.
//!
//! Each program runs under `riser run`, unmodified from Debian, at a loopback address of its own. The
//! machine needs no RDMA device and no kernel module. Started by root, the programs run as an
//! unprivileged user ([`runner`]). Programs that know nothing of RDMA run with their sockets as
//! rsockets. A table has the commands and the output that is expected ([`cases`], [`consumers`]). Some
//! programs need more than an address of loopback ([`namespace`]). tgt, libiscsi and QEMU exchange data
//! over iSER, with `riserd` and `riser` and with each other ([`iser`]). Beside that, rdma-core's own
//! tests run ([`pyverbs`]), and libfabric's ([`fabtests`]), and so does our provider suite
//! ([`providers`]), and the exported symbols are compared ([`symbols`]). `--figures` measures instead
//! ([`figures`]). What fails, always or on a busy machine, is in one list, [`NOT_YET`].

mod cases;
mod consumers;
mod fabtests;
mod figures;
mod iser;
mod namespace;
mod providers;
mod pyverbs;
mod runner;
mod symbols;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cases::{Case, Place};
use pyverbs::{Test, Verdict};
pub(crate) use runner::{Ended, Rig};

use crate::daemon::{self, OPTIMIZED};
use crate::packages::{Need, ensure, need};
use crate::tally::{Counts, Kind, Tally, note, noted};
use crate::{Failure, root, sh};

/// Debian packages with the programs, and to build those that Debian has not.
pub(crate) const NEEDS: &[&[Need]] = &[PROGRAMS, consumers::NEEDS, fabtests::NEEDS];

const PROGRAMS: &[Need] = &[
    need("ibv_devinfo", "ibverbs-utils", "programs for verbs"),
    need("rping", "rdmacm-utils", "programs for connections"),
    need("ib_write_bw", "perftest", "perftest"),
    need("iperf3", "iperf3", "a program with sockets"),
    need("socat", "socat", "a program with sockets"),
    need("curl", "curl", "a program with sockets"),
    need("nc", "netcat-openbsd", "a program with sockets"),
    need("redis-server", "redis-server", "a program with epoll"),
    need("redis-benchmark", "redis-tools", "its client"),
    need("perfquery", "infiniband-diags", "programs for management"),
    need("ibacm", "ibacm", "its place is riser-sa's"),
    need("tgtd", "tgt", "tgt's iSER target"),
    need("tgtadm", "tgt", "tgt's iSER target"),
    need("iscsi-inq", "libiscsi-bin", "libiscsi's iSER client"),
    need("qemu-img", "qemu-utils", "QEMU's iSER driver"),
    pyverbs::NEED,
    symbols::NEED,
];

/// Cases and tests that fail, always or on a busy machine, by the beginning of their paths
/// (`--list`), with the reason. They are counted apart, and only `--not-yet` runs them.
const NOT_YET: &[(&str, &str)] = &[
    ("perftest/ib_send_bw -c UC -a", UNRELIABLE),
    ("perftest/ib_send_lat -c UC -a", UNRELIABLE),
    ("perftest/ib_write_lat -c UC -a", UNRELIABLE),
];

const UNRELIABLE: &str = "waits for messages that UC may lose, and a busy receiver's socket drops";

/// Group and name of the comparison of symbols.
const SYMBOLS: &str = "symbols/exports";

/// Group of rdma-core's own tests.
const PYVERBS: &str = "pyverbs";

/// Group of libfabric's own tests.
const FABTESTS: &str = "fabtests";

/// Options of `cargo xtask verbs`.
///
/// The output of each program is kept.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only the cases whose path contains one of these words. The tests of a suite of others have
    /// a path each; where a word names one, or some of a class, the others of its module do not run.
    words: Vec<String>,
    /// List the cases and exit.
    #[arg(long)]
    list: bool,
    /// Also run the cases that are known to fail.
    #[arg(long)]
    not_yet: bool,
    /// Cargo profile to build `riser` and the library with.
    #[arg(long, default_value = OPTIMIZED)]
    profile: String,
    /// A folder with `riser`, `riserd`, `libriser_drop_in.so` and `librspreload.so`, and perhaps the
    /// test `devices`, instead of building them.
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Measure latency and bandwidth in as many rounds, beside sockets, instead of running cases.
    #[arg(long, value_name = "ROUNDS", conflicts_with_all = ["words", "list", "not_yet"])]
    figures: Option<usize>,
    /// Folder for the logs.
    #[arg(long, default_value = ".build/verbs")]
    logs: PathBuf,
}

impl Options {
    /// Options of the test command.
    pub(crate) fn for_test() -> Self {
        Self {
            words: Vec::new(),
            list: false,
            not_yet: false,
            figures: None,
            profile: OPTIMIZED.to_owned(),
            programs: None,
            logs: ".build/verbs".into(),
        }
    }

    fn is_chosen(&self, path: &str) -> bool {
        self.words.is_empty() || self.words.iter().any(|word| path.contains(word.as_str()))
    }

    /// Words that name tests within a process's path: they go on where it ends. Its group may be left
    /// out.
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

/// One result.
struct Row {
    path: String,
    kind: Kind,
    outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    /// Not at the first attempt, for this reason.
    PassedAgain(String),
    Failed(String),
    Skipped(String),
    NotYet(&'static str),
}

/// Runs the cases and prints their table.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if options.list {
        for path in all_paths() {
            println!("{path}{}", not_yet(&path).map_or("", |_| "  (not yet)"));
        }
        return Ok(());
    }
    if let Some(rounds) = options.figures {
        ensure(PROGRAMS);
        let scratch = sh::Scratch::new("verbs")?;
        let logs = root().join(&options.logs);
        let rig = Rig::new(&programs(options)?, &scratch, &logs)?;
        return figures::run(&rig, rounds);
    }
    let (tally, failure) = run_all(options)?;
    // Skips and failures are printed, and nothing counts them here.
    let _ = noted();
    match failure {
        Some(_) => Err(format!("{} failed", tally.total().failed).into()),
        None => Ok(()),
    }
}

/// Runs the cases; their counts, and what went wrong if something did.
pub(crate) fn run_all(options: &Options) -> Result<(Tally, Option<String>), Failure> {
    ensure(NEEDS.iter().copied().flatten());
    let programs = programs(options)?;
    let scratch = sh::Scratch::new("verbs")?;
    let logs = root().join(&options.logs);
    let rig = Rig::new(&programs, &scratch, &logs)?;
    let mut rows = Vec::new();
    if options.is_chosen(SYMBOLS) {
        rows.push(of_symbols(&programs));
    }
    for (number, case) in all_cases().iter().enumerate() {
        if options.is_chosen(&case.path()) {
            rows.push(of_case(options, &rig, number, case));
        }
    }
    rows.extend(of_providers(options, &rig)?);
    for case in iser::CASES {
        if options.is_chosen(&case.path()) {
            rows.push(of_iser(options, &rig, &programs, case));
        }
    }
    rows.extend(of_pyverbs(options, &rig, &scratch));
    rows.extend(of_fabtests(options, &rig, &scratch));
    if rows.is_empty() {
        return Err("no case has one of these words in its path".into());
    }
    let (tally, failure) = count(&rows);
    print_skips(&rows);
    println!("\n{}; logs in {}", summary(&rows), options.logs.display());
    Ok((tally, failure))
}

/// The folder with the programs, which are built unless it is named.
fn programs(options: &Options) -> Result<PathBuf, Failure> {
    match &options.programs {
        Some(folder) => Ok(std::fs::canonicalize(folder)?),
        None => {
            println!("building riser, riserd and the libraries");
            daemon::build_in(&options.profile)
        }
    }
}

/// All cases of two programs, in the order of their run.
fn all_cases() -> Vec<Case> {
    let mut cases = cases::all();
    cases.extend(consumers::all());
    cases
}

fn all_paths() -> Vec<String> {
    let cases = all_cases();
    let paths = cases.iter().map(Case::path);
    let paths = paths.chain(iser::CASES.iter().map(iser::Case::path));
    let first = std::iter::once(SYMBOLS.to_owned());
    first
        .chain(paths)
        .chain(providers::paths())
        .chain([
            format!("{PYVERBS}/MODULE.CLASS.TEST"),
            format!("{FABTESTS}/PROVIDER/TEST"),
        ])
        .collect()
}

/// The reason why something does not work yet, if it is on the list.
fn not_yet(path: &str) -> Option<&'static str> {
    let is_it = |(beginning, _): &&(&str, _)| path.starts_with(*beginning);
    NOT_YET.iter().find(is_it).map(|(_, why)| *why)
}

fn of_symbols(programs: &Path) -> Row {
    let began = Instant::now();
    let library = programs.join("libriser_drop_in.so");
    let outcome = if sh::which(symbols::NEED.program).is_none() {
        Outcome::Skipped(format!("{} is missing", symbols::NEED.program))
    } else {
        match symbols::compare(&library) {
            Ok(said) => {
                println!("symbols that are there: {said}");
                Outcome::Passed
            }
            Err(why) => Outcome::Failed(why.to_string()),
        }
    };
    show(SYMBOLS.to_owned(), Kind::Check, outcome, began.elapsed())
}

fn of_case(options: &Options, rig: &Rig, number: usize, case: &Case) -> Row {
    if case.place == Place::Network
        && let Err(why) = rig.network()
    {
        let outcome = Outcome::Skipped(why);
        return show(case.path(), Kind::Program, outcome, Duration::ZERO);
    }
    let programs = case.programs().chain(case.source.map(|_| "mpicc"));
    let programs = programs.filter(|program| !program.starts_with('{'));
    let once = || rig.run(number, case);
    of_programs(options, case.path(), programs, case.may_lose, once)
}

fn of_iser(options: &Options, rig: &Rig, programs: &Path, case: &iser::Case) -> Row {
    if case.needs.contains(&"qemu-img") && !iser::has_qemu_driver() {
        let why = "QEMU's iSER driver is missing".to_owned();
        return show(
            case.path(),
            Kind::Program,
            Outcome::Skipped(why),
            Duration::ZERO,
        );
    }
    let needs = case.needs.iter().copied();
    of_programs(options, case.path(), needs, false, || {
        case.run(rig, programs)
    })
}

/// Runs a case if its programs are there, once more if it fails where messages may be lost.
fn of_programs<'a>(
    options: &Options,
    path: String,
    mut programs: impl Iterator<Item = &'a str>,
    may_lose: bool,
    run: impl Fn() -> Result<Duration, Failure>,
) -> Row {
    let row = |outcome, took| show(path.clone(), Kind::Program, outcome, took);
    if let Some(why) = not_yet(&path).filter(|_| !options.not_yet) {
        return row(Outcome::NotYet(why), Duration::ZERO);
    }
    if let Some(program) = programs.find(|program| sh::which(program).is_none()) {
        return row(
            Outcome::Skipped(format!("{program} is missing")),
            Duration::ZERO,
        );
    }
    let failed = |why: Failure| row(Outcome::Failed(why.to_string()), Duration::ZERO);
    match run() {
        Ok(took) => row(Outcome::Passed, took),
        Err(first) if may_lose => match run() {
            Ok(took) => row(Outcome::PassedAgain(first_line(&first)), took),
            Err(why) => failed(why),
        },
        Err(why) => failed(why),
    }
}

/// Our provider suite, a process for each pair of providers.
///
/// # Errors
/// The suite cannot be built.
fn of_providers(options: &Options, rig: &Rig) -> Result<Vec<Row>, Failure> {
    let paths = providers::paths();
    let is_chosen = |(_, path): &(usize, &String)| options.is_chosen(path);
    let chosen: Vec<_> = paths.iter().enumerate().filter(is_chosen).collect();
    if chosen.is_empty() {
        return Ok(Vec::new());
    }
    let program = providers::program(options.programs.as_deref())?;
    let mut rows = Vec::new();
    for (index, path) in chosen {
        let began = Instant::now();
        let ran = providers::run(rig, &program, index);
        rows.extend(process_rows(options, path, path, ran, began.elapsed()));
    }
    Ok(rows)
}

/// rdma-core's own tests, a process for each module: one that ends in a module does not take the
/// others along.
fn of_pyverbs(options: &Options, rig: &Rig, scratch: &sh::Scratch) -> Vec<Row> {
    let is_named = |word: &String| word.starts_with(PYVERBS) || word.starts_with("test_");
    if !options.words.is_empty() && !options.words.iter().any(is_named) {
        return Vec::new();
    }
    let all = |outcome| {
        vec![show(
            PYVERBS.to_owned(),
            Kind::SuiteTest,
            outcome,
            Duration::ZERO,
        )]
    };
    if sh::which(pyverbs::NEED.program).is_none() {
        let why = format!("{} is missing", pyverbs::NEED.package);
        return all(Outcome::Skipped(why));
    }
    let modules = match pyverbs::unpack(scratch) {
        Ok(modules) => modules,
        Err(why) => return all(Outcome::Skipped(first_line(&why))),
    };
    let mut rows = Vec::new();
    for module in modules {
        let path = format!("{PYVERBS}/{module}");
        let mut tests = options.within(&path);
        if options.is_chosen(&path) {
            tests.clear();
        } else if tests.is_empty() {
            continue;
        }
        if let Some(why) = not_yet(&path).filter(|_| !options.not_yet) {
            let outcome = Outcome::NotYet(why);
            rows.push(show(path, Kind::SuiteTest, outcome, Duration::ZERO));
            continue;
        }
        let began = Instant::now();
        let ran = pyverbs::run(rig, scratch, &module, &tests);
        rows.extend(process_rows(options, PYVERBS, &path, ran, began.elapsed()));
    }
    rows
}

/// libfabric's own tests, by its script, which runs all of a provider.
fn of_fabtests(options: &Options, rig: &Rig, scratch: &sh::Scratch) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut folder = None;
    for (number, (provider, _)) in fabtests::PROVIDERS.iter().enumerate() {
        let path = format!("{FABTESTS}/{provider}");
        let within = options.within(&path);
        let is_whole = options.is_chosen(&path);
        if !is_whole && within.is_empty() {
            continue;
        }
        let began = Instant::now();
        let unpack = || fabtests::unpack(scratch).map_err(|why| first_line(&why));
        let there = rig.network().map(drop);
        let folder = match there.and_then(|()| folder.get_or_insert_with(unpack).clone()) {
            Ok(folder) => folder,
            Err(why) => {
                let outcome = Outcome::Skipped(why);
                rows.push(show(path, Kind::SuiteTest, outcome, began.elapsed()));
                continue;
            }
        };
        // The script has no way to run one of them alone.
        let is_chosen = |test: &Test| {
            let name = format!("{path}/{}", test.name);
            is_whole || within.iter().any(|word| name.contains(word))
        };
        let ran = fabtests::run(rig, &folder, number);
        let ran = ran.map(|all| all.into_iter().filter(is_chosen).collect());
        rows.extend(process_rows(options, &path, &path, ran, began.elapsed()));
    }
    rows
}

/// The first line of a reason, for a table.
fn first_line(why: &Failure) -> String {
    let why = why.to_string();
    why.lines().next().unwrap_or_default().to_owned()
}

/// Rows of what came of a process that runs tests of a group: one alone where it could not run.
fn process_rows(
    options: &Options,
    group: &str,
    path: &str,
    ran: Result<Vec<Test>, Failure>,
    took: Duration,
) -> Vec<Row> {
    match ran {
        Ok(tests) => suite_rows(options, group, path, tests, took),
        Err(why) => {
            let outcome = Outcome::Failed(why.to_string());
            vec![show(path.to_owned(), Kind::SuiteTest, outcome, took)]
        }
    }
}

/// Rows of the tests of a process, in a group. For the process one line is printed, and one for each
/// failure.
fn suite_rows(
    options: &Options,
    group: &str,
    path: &str,
    tests: Vec<Test>,
    took: Duration,
) -> Vec<Row> {
    let row = |test: Test| {
        let path = format!("{group}/{}", test.name);
        let outcome = match test.verdict {
            Verdict::Passed => Outcome::Passed,
            Verdict::Skipped(why) => Outcome::Skipped(why),
            Verdict::Failed(why) => Outcome::Failed(why),
            Verdict::Unfinished => Outcome::Failed("its process ended, or its time was up".into()),
        };
        let outcome = match (not_yet(&path).filter(|_| !options.not_yet), outcome) {
            (Some(why), Outcome::Failed(_)) => Outcome::NotYet(why),
            // So the list becomes shorter when something is done.
            (Some(_), Outcome::Passed) => Outcome::Failed("it passes: take it off the list".into()),
            (_, outcome) => outcome,
        };
        Row {
            path,
            kind: Kind::SuiteTest,
            outcome,
        }
    };
    let rows: Vec<_> = tests.into_iter().map(row).collect();
    println!(
        "{path:<58} {:>6.1} s  {}",
        took.as_secs_f64(),
        summary(&rows)
    );
    for row in &rows {
        if let Outcome::Failed(why) = &row.outcome {
            println!("  FAILED   {}: {why}", row.path);
        }
    }
    rows
}

/// Prints a result and answers its row.
fn show(path: String, kind: Kind, outcome: Outcome, took: Duration) -> Row {
    let said = match &outcome {
        Outcome::Passed => format!("{:>6.1} s  ok", took.as_secs_f64()),
        Outcome::PassedAgain(why) => {
            format!(
                "{:>6.1} s  ok at the second attempt: {why}",
                took.as_secs_f64()
            )
        }
        Outcome::Failed(why) => format!("{:>8}  FAILED: {why}", ""),
        Outcome::Skipped(why) => format!("{:>8}  skipped: {why}", ""),
        Outcome::NotYet(why) => format!("{:>8}  not yet: {why}", ""),
    };
    println!("{path:<58} {said}");
    Row {
        path,
        kind,
        outcome,
    }
}

/// Counts of the rows, and the failures. What was skipped is noted.
fn count(rows: &[Row]) -> (Tally, Option<String>) {
    let mut tally = Tally::default();
    let mut failures = Vec::new();
    for row in rows {
        let mut counts = Counts::default();
        match &row.outcome {
            Outcome::Passed => counts.passed = 1,
            Outcome::PassedAgain(_) => (counts.passed, counts.second) = (1, 1),
            Outcome::Failed(why) => {
                counts.failed = 1;
                failures.push(format!("{}: {why}", row.path));
            }
            Outcome::Skipped(why) => note(row.kind, &row.path, why),
            Outcome::NotYet(why) => note(row.kind, &row.path, &format!("not yet: {why}")),
        }
        tally.add(row.kind, counts);
    }
    (tally, (!failures.is_empty()).then(|| failures.join("\n")))
}

fn summary(rows: &[Row]) -> String {
    let count = |is: fn(&Outcome) -> bool| rows.iter().filter(|row| is(&row.outcome)).count();
    format!(
        "{} passed, {} failed, {} skipped, {} not yet",
        count(|o| matches!(o, Outcome::Passed | Outcome::PassedAgain(_))),
        count(|o| matches!(o, Outcome::Failed(_))),
        count(|o| matches!(o, Outcome::Skipped(_))),
        count(|o| matches!(o, Outcome::NotYet(_)))
    )
}

/// A line for each reason of a skip.
fn print_skips(rows: &[Row]) {
    let mut reasons = BTreeMap::<&str, Vec<&str>>::new();
    for row in rows {
        if let Outcome::Skipped(why) = &row.outcome {
            reasons.entry(why).or_default().push(&row.path);
        }
    }
    for (why, paths) in reasons {
        println!("skipped, {why}: {}", paths.join(" "));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn paths_are_unique_and_the_list_names_things_that_exist() {
        let paths = all_paths();
        let unique: BTreeSet<_> = paths.iter().collect();
        assert_eq!(unique.len(), paths.len());
        for (beginning, _) in NOT_YET {
            // rdma-core's tests are known to its package only.
            let is_known = beginning.starts_with(PYVERBS)
                || paths.iter().any(|path| path.starts_with(beginning));
            assert!(is_known, "{beginning}");
        }
    }

    #[test]
    fn the_list_of_functions_names_cases_that_exist_and_says_which_fail() {
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
                assert!(paths.iter().any(|path| path == span), "no case {span}");
                let is_marked = after.is_some_and(|text| text.starts_with(" (not yet"));
                assert_eq!(is_marked, not_yet(span).is_some(), "{span}: {line}");
            }
        }
        assert_ne!(named, 0);
    }

    #[test]
    fn rows_are_counted() {
        let row = |outcome| Row {
            path: "a/b".to_owned(),
            kind: Kind::Program,
            outcome,
        };
        let rows = [
            row(Outcome::Passed),
            row(Outcome::Failed("why".to_owned())),
            row(Outcome::Passed),
        ];
        assert_eq!(summary(&rows), "2 passed, 1 failed, 0 skipped, 0 not yet");
        let (tally, failure) = count(&rows);
        assert_eq!(tally.counts(Kind::Program).passed, 2);
        assert_eq!(tally.counts(Kind::Program).failed, 1);
        assert_eq!(failure.as_deref(), Some("a/b: why"));
    }

    #[test]
    fn words_choose_cases() {
        let options = Options {
            words: vec!["rping".to_owned(), "info/".to_owned()],
            ..Options::for_test()
        };
        assert!(options.is_chosen("rdmacm/rping -q"));
        assert!(options.is_chosen("info/ibv_devices"));
        assert!(!options.is_chosen("pyverbs/test_qp"));
    }

    #[test]
    fn words_choose_tests_of_a_suite_by_the_paths_that_are_printed() {
        let words = [
            "test_qp.QPTest",
            "pyverbs/test_mr.MRTest.test_reg_mr",
            "fabtests/verbs;ofi_rxm/fi_msg",
            "test_cq_ex",
        ];
        let options = Options {
            words: words.map(str::to_owned).to_vec(),
            ..Options::for_test()
        };
        assert_eq!(options.within("pyverbs/test_qp"), words[..1]);
        assert_eq!(options.within("pyverbs/test_mr"), words[1..2]);
        assert_eq!(options.within("fabtests/verbs;ofi_rxm"), words[2..3]);
        // Others begin in the same way, or are chosen as a whole.
        for path in ["pyverbs/test_cq", "pyverbs/test_cq_ex", "fabtests/verbs"] {
            assert!(options.within(path).is_empty(), "{path}");
        }
    }
}
