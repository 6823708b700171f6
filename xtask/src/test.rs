//! `cargo xtask test`: everything that must hold, and a count of it.

use std::collections::BTreeSet;

use crate::packages::{Need, have_subcommand, need};
use crate::steps::{self, Outcome, STATIC, Selection, Step, check, step};
use crate::tally::{Counts, Kind, Tally, note, noted, skip_log};
use crate::{Failure, conformance, container, demo, instructions, interop, package, sh};

/// What the tests use beyond Rust.
const NEEDS: &[Need] = &[
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
    #[command(flatten)]
    selection: Selection,
    /// Everything that can fail: all interop cases, the package, the container, the cost in instructions.
    #[arg(long)]
    all: bool,
}

const STEPS: &[Step] = &[
    step("tests", |_| functions(&["--workspace"], &[])).needing(&[NEEDS]),
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
        Outcome::of(demo::run(&demo::Options::for_test()))
    })
    .needing(&[demo::NEEDS]),
    step("iSCSI conformance", |_| conformance_step()).needing(conformance::NEEDS),
    step("interop with the kernel", interop_step).needing(&[interop::NEEDS]),
    step("package", |_| package_step())
        .needing(&[package::NEEDS])
        .extra(),
    step("container", |_| container_step()).extra(),
    step("instructions", |_| instructions_step())
        .needing(&[instructions::NEEDS])
        .extra(),
];

/// Runs the steps; fails if one did.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    steps::run(STATIC.iter().chain(STEPS), &options.selection, options.all)
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
        (None, None) if run.counts.passed == 0 => Outcome::of(Err("no function ran".into())),
        (failure, _) => Outcome::of(failure.map_or(Ok(()), |why| Err(why.into()))),
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
    if let Err(e) = have_subcommand("deny") {
        return Outcome::skipped(format!("cargo-deny cannot be installed: {e}"));
    }
    let deny = |what: &[&str]| {
        let mut command = sh::cargo(["deny", "-L", "error", "check"]);
        sh::output(command.args(what))
    };
    if let Err(why) = deny(&["bans", "licenses", "sources"]) {
        return Outcome::of(Err(why));
    }
    if sh::output(&mut sh::cargo(["deny", "-L", "error", "fetch", "db"])).is_err() {
        let why = "the advisory database cannot be fetched";
        note(Kind::Check, "deny advisories", why);
        return Outcome::of(Ok(()));
    }
    let mut both = Tally::check(true);
    let advisories = deny(&["advisories"]);
    both.merge(Tally::check(advisories.is_ok()));
    Outcome::Ran(both, advisories.err().map(|e| e.to_string()))
}

/// libiscsi's whole suite, against us alone.
fn conformance_step() -> Outcome {
    match conformance::run_all(&conformance::Options::for_test()) {
        Ok(conformance::Ended::Ran(tally, failure)) => Outcome::Ran(tally, failure),
        Ok(conformance::Ended::Unavailable(why)) => Outcome::Skipped(conformance::parts(), why),
        Err(e) => Outcome::of(Err(e)),
    }
}

/// The short cases, or all of them, wherever the rig can be had.
fn interop_step(all: bool) -> Outcome {
    match interop::run_cases(&interop::Options::for_test(all)) {
        Ok(interop::Ended::Ran(counts, failure)) => {
            Outcome::Ran(Tally::of(Kind::Case, counts), failure)
        }
        Ok(interop::Ended::Unavailable(cases, why)) => {
            let case = |name| (Kind::Case, name);
            Outcome::Skipped(cases.into_iter().map(case).collect(), why)
        }
        Err(e) => Outcome::of(Err(e)),
    }
}

fn package_step() -> Outcome {
    match package::build_and_install() {
        Ok(package::Ended::Installed) => Outcome::of(Ok(())),
        Ok(package::Ended::OnlyBuilt(why)) => {
            note(Kind::Check, "installation of the package", &why);
            Outcome::of(Ok(()))
        }
        Err(e) => Outcome::of(Err(e)),
    }
}

fn container_step() -> Outcome {
    match container::build_and_try() {
        Ok(container::Ended::Tried(_)) => Outcome::of(Ok(())),
        Ok(container::Ended::Unavailable(why)) => Outcome::skipped(why),
        Err(e) => Outcome::of(Err(e)),
    }
}

fn instructions_step() -> Outcome {
    if !instructions::is_possible() {
        return Outcome::skipped("valgrind is missing".to_owned());
    }
    Outcome::of(instructions::run())
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
    fn functions_that_failed_are_named() {
        let text = "failures:\n\n---- a::b stdout ----\n    some words\nmore\n\nfailures:\n    \
                    a::b\n    c\n\ntest result: FAILED. 1 passed; 2 failed;\n    d\n";
        let failed: Vec<_> = failed_functions(text).into_iter().collect();
        assert_eq!(failed, ["a::b", "c"]);
    }
}
