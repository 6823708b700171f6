//! `cargo xtask test`: everything that must hold, and a count of it.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use crate::packages::{Need, ensure, need};
use crate::tally::{Counts, Kind, Skip, Tally, note, noted, skip_log};
use crate::{Failure, conformance, container, demo, instructions, interop, package, sh};

/// What the tests use beyond Rust.
pub(crate) const NEEDS: &[Need] = &[
    need(
        "tshark",
        "tshark",
        "checking captures with Wireshark's dissectors",
    ),
    need(
        "qemu-img",
        "qemu-utils",
        "qemu-img and qemu-io as judges of the NBD export",
    ),
    need(
        "nbdcopy",
        "libnbd-bin",
        "nbdcopy and nbdinfo as judges of the NBD export",
    ),
    need("fio", "fio", "fio with its nbd engine"),
    need("tgtd", "tgt", "the iSCSI initiator against another target"),
    need("fusermount3", "fuse3", "FUSE exports without root"),
    need("mkfs.ext4", "e2fsprogs", "file systems on attached LUNs"),
    need("losetup", "mount", "loop devices over FUSE exports"),
    need("ip", "iproute2", "network namespaces"),
    need(
        "promtool",
        "prometheus",
        "metrics and alert rules before Prometheus",
    ),
    need(
        "prometheus",
        "prometheus",
        "the dashboard before Prometheus",
    ),
    need("chromium", "chromium", "the status page in a browser"),
    need("targetcli", "targetcli-fb", "targetcli on LIO's tree"),
    need("dbus-run-session", "dbus-daemon", "targetcli on LIO's tree"),
    // A file of it, as it has no program.
    need(
        "/usr/lib/python3/dist-packages/rtslib_fb/__init__.py",
        "python3-rtslib-fb",
        "rtslib on LIO's tree",
    ),
];

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only the steps whose name contains one of these words.
    only: Vec<String>,
    /// Everything that can fail: all interop cases, the package, the container, the cost in instructions.
    #[arg(long)]
    all: bool,
    /// List the steps.
    #[arg(long)]
    list: bool,
}

/// How a step ended.
enum Outcome {
    /// It was tried: its counts, and what went wrong if something did.
    Ran(Tally, Option<String>),
    /// It could not be tried: what is in it, if that is more than one check, and why.
    Skipped(Vec<(Kind, String)>, String),
}

impl Outcome {
    /// Something that succeeds or fails as a whole.
    fn check(result: Result<(), String>) -> Self {
        Self::Ran(Tally::check(result.is_ok()), result.err())
    }

    /// A check that could not be tried.
    fn skipped(why: String) -> Self {
        Self::Skipped(Vec::new(), why)
    }
}

struct Step {
    name: &'static str,
    /// Whether it is run with `--all` only.
    is_extra: bool,
    run: fn(&Options) -> Outcome,
}

/// A step of every run.
const fn step(name: &'static str, run: fn(&Options) -> Outcome) -> Step {
    Step {
        name,
        is_extra: false,
        run,
    }
}

/// A step of `--all`.
const fn extra(name: &'static str, run: fn(&Options) -> Outcome) -> Step {
    Step {
        name,
        is_extra: true,
        run,
    }
}

const STEPS: &[Step] = &[
    step("fmt", |_| check(sh::cargo(["fmt", "--all", "--check"]))),
    step("clippy", |_| {
        let args = "clippy -q --workspace --all-targets -- -D warnings";
        check(sh::cargo(args.split(' ')))
    }),
    step("tests", |_| functions(&["--workspace"], &[])),
    step("doc", |_| doc()),
    step("deny", |_| deny()),
    step("simulation of a million messages", |_| {
        again(
            "--release --workspace --test rc_sim",
            ("RISER_SIM_MESSAGES", "1000000"),
        )
    }),
    step("sessions and connection cycles", |_| {
        again(
            "--release --workspace --test scale -- --test-threads=1 --nocapture",
            ("RISER_CONNECT_CYCLES", "10000"),
        )
    }),
    step("configuration changes during I/O", |_| {
        again(
            "--release --workspace --test apply -- --nocapture",
            ("RISER_CHANGES", "1000"),
        )
    }),
    // Its functions are ignored by `tests`, so they are counted here.
    step("a stranger on the network", |_| {
        let args = "--workspace --test adversary -- --ignored --nocapture";
        let args: Vec<_> = args.split(' ').collect();
        functions(&args, &[("RISER_ADVERSARY_SECONDS", "12")])
    }),
    step("demo", |_| {
        let result = demo::run(&demo::Options::for_test());
        Outcome::check(result.map_err(|e| e.to_string()))
    }),
    step("iSCSI conformance", |_| conformance_step()),
    step("interop with the kernel", interop_step),
    extra("package", |_| package_step()),
    extra("container", |_| container_step()),
    extra("instructions", |_| instructions_step()),
];

/// Runs the steps; fails if one did.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let is_wanted = |step: &&Step| {
        let named = options.only.iter().any(|word| step.name.contains(word));
        // A step that is named runs in any case.
        named || (options.only.is_empty() && (options.all || !step.is_extra))
    };
    if options.list {
        for step in STEPS {
            let note = if step.is_extra { "  (--all)" } else { "" };
            println!("{}{note}", step.name);
        }
        return Ok(());
    }
    let needs: Vec<_> = NEEDS.iter().collect();
    ensure(&needs);
    let _ = fs::remove_file(skip_log());
    let (mut tally, mut rows) = (Tally::default(), Vec::new());
    for step in STEPS.iter().filter(is_wanted) {
        println!("── {}", step.name);
        let started = Instant::now();
        let outcome = (step.run)(options);
        let took = started.elapsed();
        let (how, mut counts) = match outcome {
            Outcome::Ran(counts, None) => ("ok", counts),
            Outcome::Ran(mut counts, Some(why)) => {
                println!("{why}");
                // Something that is no test of its own went wrong, as a build.
                if counts.total().failed == 0 {
                    counts.merge(Tally::check(false));
                }
                ("FAILED", counts)
            }
            Outcome::Skipped(things, why) => {
                println!("{why}");
                ("skipped", without(step.name, things, &why))
            }
        };
        counts.take_skips(noted(), &BTreeSet::new());
        let row = row(step.name, how, took, &counts.in_a_row());
        println!("{row}");
        rows.push(row);
        tally.merge(counts);
    }
    println!("\n{}\n", rows.join("\n"));
    for line in tally.reasons() {
        println!("{line}");
    }
    println!("\n{tally}");
    match tally.total().failed {
        0 => Ok(()),
        failed => Err(format!("{failed} failed").into()),
    }
}

/// A step that could not be tried: everything that is in it was skipped.
fn without(step: &str, mut things: Vec<(Kind, String)>, why: &str) -> Tally {
    if things.is_empty() {
        things.push((Kind::Check, step.to_owned()));
    }
    let skip = |(kind, name)| Skip {
        kind,
        name,
        why: why.to_owned(),
    };
    let mut tally = Tally::default();
    tally.take_skips(things.into_iter().map(skip).collect(), &BTreeSet::new());
    tally
}

fn row(name: &str, how: &str, took: Duration, more: &str) -> String {
    format!("{how:<8} {name:<36} {:>7.1} s  {more}", took.as_secs_f64())
}

fn check(mut command: std::process::Command) -> Outcome {
    Outcome::check(match sh::output(&mut command) {
        Ok(_) => Ok(()),
        Err(e) => Err(e.to_string()),
    })
}

/// What harnesses of Rust's tests said.
struct Harnesses {
    counts: Counts,
    /// The names of the functions that failed.
    failed: BTreeSet<String>,
    /// The whole of it, if anything went wrong.
    failure: Option<String>,
}

/// Runs `cargo test` and adds up what its harnesses say.
fn cargo_test(args: &[&str], env: &[(&str, &str)]) -> Harnesses {
    let mut command = sh::cargo(["test", "--no-fail-fast"]);
    command
        .args(args)
        .env(crate::skip::LOG, skip_log())
        .envs(env.iter().copied());
    let (text, ok) = match sh::output(&mut command) {
        Ok(text) => (text, true),
        Err(e) => (e.to_string(), false),
    };
    let mut counts = Counts::default();
    for line in text.lines().filter_map(|l| l.strip_prefix("test result: ")) {
        counts.passed += number_before(line, " passed");
        counts.failed += number_before(line, " failed");
    }
    for at in text
        .lines()
        .filter_map(|l| l.find("figure: ").map(|i| &l[i..]))
    {
        println!("{at}");
    }
    Harnesses {
        counts,
        failed: failed_functions(&text),
        failure: (!ok).then_some(text),
    }
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

/// Runs test functions that no other step runs.
fn functions(args: &[&str], env: &[(&str, &str)]) -> Outcome {
    let run = cargo_test(args, env);
    let mut tally = Tally::of(Kind::Function, run.counts);
    tally.take_skips(noted(), &run.failed);
    Outcome::Ran(tally, run.failure)
}

/// Runs test functions once more, for longer: one check, whatever their number. It is skipped if one of
/// them is.
fn again(args: &str, env: (&str, &str)) -> Outcome {
    let args: Vec<_> = args.split(' ').collect();
    let run = cargo_test(&args, &[env]);
    match (run.failure, noted().first()) {
        (None, Some(skip)) => Outcome::skipped(format!("{}: {}", skip.name, skip.why)),
        (None, None) if run.counts.passed == 0 => Outcome::check(Err("no function ran".to_owned())),
        (failure, _) => Outcome::check(failure.map_or(Ok(()), Err)),
    }
}

fn number_before(line: &str, word: &str) -> u64 {
    line.split(word)
        .next()
        .and_then(|before| before.rsplit(|c: char| !c.is_ascii_digit()).next())
        .and_then(|digits| digits.parse().ok())
        .unwrap_or(0)
}

fn doc() -> Outcome {
    let mut command = sh::cargo(["doc", "-q", "--workspace", "--no-deps"]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    check(command)
}

/// Licences, bans and sources always; advisories where their database can be fetched.
fn deny() -> Outcome {
    if let Err(e) = sh::have_subcommand("deny") {
        return Outcome::skipped(format!("cargo-deny cannot be installed: {e}"));
    }
    let deny = |what: &[&str]| {
        let mut command = sh::cargo(["deny", "-L", "error", "check"]);
        sh::output(command.args(what)).map_err(|e| e.to_string())
    };
    if let Err(why) = deny(&["bans", "licenses", "sources"]) {
        return Outcome::check(Err(why));
    }
    if sh::output(&mut sh::cargo(["deny", "-L", "error", "fetch", "db"])).is_err() {
        let why = "the advisory database cannot be fetched";
        note(Kind::Check, "deny advisories", why);
        return Outcome::check(Ok(()));
    }
    let mut both = Tally::check(true);
    let advisories = deny(&["advisories"]);
    both.merge(Tally::check(advisories.is_ok()));
    Outcome::Ran(both, advisories.err())
}

/// libiscsi's whole suite, against us alone.
fn conformance_step() -> Outcome {
    match conformance::run_all(&conformance::Options::for_test()) {
        Ok(conformance::Ended::Ran(tally, failure)) => Outcome::Ran(tally, failure),
        Ok(conformance::Ended::Unavailable(why)) => Outcome::Skipped(conformance::parts(), why),
        Err(e) => Outcome::check(Err(e.to_string())),
    }
}

/// The short cases, or all of them, wherever the rig can be had.
fn interop_step(options: &Options) -> Outcome {
    match interop::run_cases(&interop::Options::for_test(options.all)) {
        Ok(interop::Ended::Ran(counts, failure)) => {
            Outcome::Ran(Tally::of(Kind::Case, counts), failure)
        }
        Ok(interop::Ended::Unavailable(cases, why)) => {
            let case = |name| (Kind::Case, name);
            Outcome::Skipped(cases.into_iter().map(case).collect(), why)
        }
        Err(e) => Outcome::check(Err(e.to_string())),
    }
}

fn package_step() -> Outcome {
    match package::build_and_install() {
        Ok(package::Ended::Installed) => Outcome::check(Ok(())),
        Ok(package::Ended::OnlyBuilt(why)) => {
            note(Kind::Check, "installation of the package", &why);
            Outcome::check(Ok(()))
        }
        Err(e) => Outcome::check(Err(e.to_string())),
    }
}

fn container_step() -> Outcome {
    match container::build_and_try() {
        Ok(container::Ended::Tried(_)) => Outcome::check(Ok(())),
        Ok(container::Ended::Unavailable(why)) => Outcome::skipped(why),
        Err(e) => Outcome::check(Err(e.to_string())),
    }
}

fn instructions_step() -> Outcome {
    if !instructions::is_possible() {
        return Outcome::skipped("valgrind is missing".to_owned());
    }
    Outcome::check(instructions::run().map_err(|e| e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn harness_lines_are_counted() {
        let line = "ok. 12 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(number_before(line, " passed"), 12);
        assert_eq!(number_before(line, " failed"), 3);
    }

    #[test]
    fn all_that_is_in_a_step_is_skipped_with_it() {
        let cases = interop::names(&interop::Options::for_test(true)).unwrap();
        assert!(cases.len() > 50, "{}", cases.len());
        let number = cases.len() as u64;
        let cases = cases.into_iter().map(|name| (Kind::Case, name)).collect();
        let tally = without("interop", cases, "no kernel");
        assert_eq!(tally.skipped(Kind::Case), number);
        assert_eq!(tally.skipped(Kind::Check), 0);
        let tally = without("conformance", conformance::parts(), "no client");
        assert_eq!(tally.skipped(Kind::SuiteTest), 1, "nobody knows how many");
        assert_eq!(tally.skipped(Kind::Check), 12);
        let tally = without("container", Vec::new(), "no image");
        assert_eq!(tally.skipped(Kind::Check), 1);
        assert_eq!(tally.reasons(), ["skipped  checks: container (no image)"]);
    }

    #[test]
    fn functions_that_failed_are_named() {
        let text = "failures:\n\n---- a::b stdout ----\n    some words\nmore\n\nfailures:\n    \
                    a::b\n    c\n\ntest result: FAILED. 1 passed; 2 failed;\n    d\n";
        let failed: Vec<_> = failed_functions(text).into_iter().collect();
        assert_eq!(failed, ["a::b", "c"]);
    }
}
