//! `cargo xtask test`: runs all checks and tests, and counts the results.

use std::thread;

use crate::daemon::{self, OPTIMIZED};
use crate::harnesses::{self, Results, SIMULATOR, building_optimized, cargo_test, optimized_test};
use crate::packages::{Need, need};
use crate::steps::{
    self, CLIPPY, DEPENDENCIES, DOC, FMT, Outcome, Run, Selection, Step, TIDY, check, clippy, doc,
    step,
};
use crate::tally::{Counts, Kind, Tally, note, noted};
use crate::{
    Failure, conformance, container, demo, instructions, interleavings, interop, package, sh, sim,
    verbs,
};

/// Programs used by the tests, in addition to the Rust toolchain.
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
    need(
        "strace",
        "strace",
        "killing riserd before each system call on its state",
    ),
    need("tgtd", "tgt", "the iSCSI initiator against another target"),
    need("fusermount3", "fuse3", "FUSE exports without root"),
    need("mkfs.ext4", "e2fsprogs", "file systems on attached LUNs"),
    need("losetup", "mount", "loop devices over FUSE exports"),
    need("ip", "iproute2", "network namespaces"),
    need("wg", "wireguard-tools", "a target behind WireGuard"),
    // Used if the kernel doesn't support WireGuard.
    need("wireguard-go", "wireguard-go", "a target behind WireGuard"),
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
    // We check for a file here because this package has no program.
    need(
        "/usr/lib/python3/dist-packages/rtslib_fb/__init__.py",
        "python3-rtslib-fb",
        "rtslib on LIO's tree",
    ),
];

/// Benchmarks of parsers, a connection and the planner. There is a separate step to count
/// instructions.
const BENCHMARKS: [&str; 2] = ["parsers", "data_path"];

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    selection: Selection,
    /// Run everything that can fail, including all interop cases, the package, the soak test, the
    /// container and instruction counts.
    #[arg(long)]
    all: bool,
    /// Number of test harnesses to run in parallel. More than one requires root, because each needs
    /// its own network namespace.
    #[arg(long, default_value_t = 1)]
    lanes: usize,
}

/// A test to run again with a larger size.
struct Long {
    test: &'static str,
    /// Variable that sets the size, and the value to use.
    size: (&'static str, &'static str),
    /// Arguments passed to the harness.
    args: &'static [&'static str],
}

const MILLION: Long = Long {
    test: "rc_sim",
    size: ("RISER_SIM_MESSAGES", "1000000"),
    args: &[],
};

const CYCLES: Long = Long {
    test: "scale",
    size: ("RISER_CONNECT_CYCLES", "10000"),
    // This test measures state that is shared by the whole process.
    args: &["--test-threads=1", "--nocapture"],
};

const SOAK: Long = Long {
    test: "soak",
    size: ("RISER_SOAK_CONNECTS", "20000"),
    args: &["--nocapture"],
};

const CHANGES: Long = Long {
    test: "changes_during_io",
    size: ("RISER_CHANGES", "1000"),
    args: &["--nocapture"],
};

const SEQUENCES: Long = Long {
    test: "sequences",
    size: ("RISER_SEQUENCES", "500"),
    args: &["--test-threads=1"],
};

/// Lints and documentation run after the tests. Because the tests leave the cores idle for a long
/// time, the results should already be available by then ([`work_ahead`]). `cargo xtask check` runs
/// the lints first.
const STEPS: &[Step] = &[
    FMT,
    TIDY,
    DEPENDENCIES,
    step("tests", all_functions).needing(&[NEEDS]),
    CLIPPY,
    DOC,
    step("book", |_| Outcome::of(book())).requiring_crate("mdbook"),
    step("benchmarks, once each", |_| benchmarks()),
    step("deny", |_| deny()).requiring_crate("cargo-deny"),
    step("interleavings of threads", |_| {
        Outcome::of(interleavings::run(&interleavings::Options::for_test()))
    }),
    step("simulation of a million messages", |_| again(&MILLION)),
    step("tests of the simulator", |_| {
        functions(optimized_test(&SIMULATOR, &[]))
    }),
    step("a thousand seeds of the simulator", |_| {
        Outcome::of(sim::thousand())
    }),
    step("sessions and connection cycles", |_| again(&CYCLES)),
    step("configuration changes during I/O", |_| again(&CHANGES)),
    // These functions are ignored in `tests`, so we need to count them here.
    step("a stranger on the network", |_| {
        let args = "--workspace --test adversary -- --ignored --nocapture";
        let args: Vec<_> = args.split(' ').collect();
        functions(cargo_test(&args, &[("RISER_ADVERSARY_SECONDS", "12")]))
    }),
    step("demo", |_| {
        Outcome::of(demo::run(&demo::Options::for_test()))
    })
    .requiring(demo::NEEDS),
    // Uses the programs built by the demo.
    step("instructions of reads and writes", |_| instructions_step())
        .requiring(instructions::NEEDS),
    step("iSCSI conformance", |_| conformance_step()).needing(conformance::NEEDS),
    step("RDMA programs on our libraries", |_| {
        match verbs::run_all(&verbs::Options::for_test()) {
            Ok((tally, failure)) => Outcome::Ran(tally, failure),
            Err(e) => Outcome::of(Err(e)),
        }
    })
    .needing(verbs::NEEDS),
    step("interop with the kernel", interop_step).needing(&[interop::NEEDS, interop::NEEDS_HERE]),
    step("package", |_| package_step())
        .requiring(package::NEEDS)
        .requiring_crate(package::SUBCOMMAND)
        .extra(),
    step("sessions that come and go", |_| again(&SOAK)).extra(),
    step("sequences of RDMA calls", |_| again(&SEQUENCES)).extra(),
    step("container", |_| container_step()).extra(),
    step("instructions of counting", |_| {
        Outcome::of(instructions::counting())
    })
    .requiring(instructions::NEEDS)
    .extra(),
];

/// Runs the steps and returns an error if any step failed.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let run = Run {
        all: options.all,
        is_whole: options.selection.is_whole(),
        lanes: options.lanes,
    };
    steps::run(STEPS, &options.selection, &run)
}

/// Runs all test functions. If no steps were selected, we use the idle time to run Cargo for other
/// steps.
fn all_functions(run: &Run) -> Outcome {
    thread::scope(|scope| {
        let once_built = || {
            if run.is_whole {
                scope.spawn(work_ahead);
            }
        };
        functions(harnesses::run_all(run.lanes, once_built))
    })
}

/// Runs Cargo for later steps with the lowest priority. These steps will then find the result up to
/// date, or they will report the error.
fn work_ahead() {
    let longer = [MILLION, CYCLES, CHANGES].map(|long| ["--test", long.test]);
    let tests = [longer.as_flattened(), &SIMULATOR].concat();
    let programs = daemon::building(OPTIMIZED);
    for command in [clippy(), doc(), building_optimized(&tests), programs] {
        let _ = sh::output(&mut sh::at_lowest_priority(&command));
    }
}

/// Counts test functions that are not part of another step. The step must have at least one
/// function; otherwise there is an error in its filter or test name.
fn functions(results: Results) -> Outcome {
    let mut tally = Tally::of(Kind::Function, results.counts);
    tally.take_skips(noted(), &results.failed);
    let Counts { passed, failed, .. } = results.counts;
    let none = (passed + failed == 0).then(|| "no function ran".to_owned());
    Outcome::Ran(tally, results.failure.or(none))
}

/// Runs test functions again with a larger size. All functions are counted as a single check, which
/// is skipped if any function is skipped.
fn again(long: &Long) -> Outcome {
    let args = [&["--test", long.test, "--"], long.args].concat();
    let run = optimized_test(&args, &[long.size]);
    match (run.failure, noted().first()) {
        (None, Some(skip)) => Outcome::skipped(format!("{}: {}", skip.name, skip.why)),
        (None, None) if run.counts.passed == 0 => Outcome::of(Err("no function ran".into())),
        (failure, _) => Outcome::of(failure.map_or(Ok(()), |why| Err(why.into()))),
    }
}

/// Runs all benchmarks once, without measuring. They use the test profile, so we only need to build
/// the benchmarks.
fn benchmarks() -> Outcome {
    let names = BENCHMARKS.iter().flat_map(|name| ["--bench", name]);
    let args = ["test", "-q", "--workspace"].into_iter().chain(names);
    check(sh::cargo(args))
}

/// Renders the book to a temporary directory. The tests only check individual pages, so we use this
/// step to check the summary and to find pages that mdBook can't render.
fn book() -> Result<(), Failure> {
    let scratch = sh::Scratch::new("book")?;
    let mut build = sh::installed("mdbook");
    sh::output(
        build
            .args(["build", "docs", "--dest-dir"])
            .arg(scratch.path()),
    )?;
    match scratch.join("introduction.html").is_file() {
        true => Ok(()),
        false => Err("mdbook has rendered no introduction".into()),
    }
}

/// Checks licenses, bans and sources. Advisories are checked if the database can be fetched.
fn deny() -> Outcome {
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

/// Compares the instruction count of reads and writes with the count that was accepted for this
/// type of machine.
fn instructions_step() -> Outcome {
    match instructions::compare_all() {
        Ok(instructions::Ended::Compared(result)) => Outcome::of(result),
        Ok(instructions::Ended::Unavailable(why)) => Outcome::skipped(why),
        Err(e) => Outcome::of(Err(e)),
    }
}

/// Runs the whole libiscsi suite against our target only.
fn conformance_step() -> Outcome {
    match conformance::run_all(&conformance::Options::for_test()) {
        Ok(conformance::Ended::Ran(tally, failure)) => Outcome::Ran(tally, failure),
        Ok(conformance::Ended::Unavailable(why)) => Outcome::Skipped(conformance::parts(), why),
        Err(e) => Outcome::of(Err(e)),
    }
}

/// Runs the short cases, or all cases, if the rig is available.
fn interop_step(run: &Run) -> Outcome {
    match interop::run_cases(&interop::Options::for_test(run.all)) {
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

/// Tests the package using the programs built for tests. A release build only adds link-time
/// optimization, but this would take minutes.
fn package_step() -> Outcome {
    if !sh::is_root() {
        return Outcome::skipped(package::WANTS_ROOT.to_owned());
    }
    Outcome::of(package::build_and_install(OPTIMIZED))
}

fn container_step() -> Outcome {
    match container::build_and_try() {
        Ok(container::Ended::Tried(_)) => Outcome::of(Ok(())),
        Ok(container::Ended::Unavailable(why)) => Outcome::skipped(why),
        Err(e) => Outcome::of(Err(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_without_functions_fails() {
        let of = |passed| {
            let results = Results {
                counts: Counts {
                    passed,
                    ..Counts::default()
                },
                ..Results::default()
            };
            match functions(results) {
                Outcome::Ran(_, failure) => failure,
                Outcome::Skipped(..) => panic!("skipped"),
            }
        };
        assert_eq!(of(0).as_deref(), Some("no function ran"));
        assert_eq!(of(1), None);
    }
}
