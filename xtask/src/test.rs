//! `cargo xtask test`: runs checks and tests, and counts the results.
//!
//! Without options, it runs all tests that use a single build of the workspace, except the longest.
//! The longer suites, which use other builds, large sizes or foreign peers, run with `--full`.

use std::time::{Duration, Instant};

use crate::daemon::RELEASE;
use crate::harnesses::{self, Results, SIMULATOR, cargo_test, run_release};
use crate::steps::{
    self, CLIPPY, DEPENDENCIES, DOC, FMT, Run, Selection, Step, Suite, TIDY, check, step,
};
use crate::tally::{Counts, Kind, Outcome, Tally, note, noted};
use crate::{
    Failure, conformance, container, demo, instructions, interleavings, interop, package,
    parse_options, sh, sim, verbs,
};

/// Benchmarks of parsers, a connection and the planner. There is a separate step to count
/// instructions.
const BENCHMARKS: [&str; 2] = ["parsers", "data_path"];

#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    selection: Selection,
    /// Run the longer suites instead: lints, documentation, simulator seeds, many sessions, failing
    /// system calls, instruction counts, conformance, RDMA programs and interop.
    #[arg(long)]
    full: bool,
    /// Run all suites, and also all interop cases, the package, the soak test and the container.
    #[arg(long, conflicts_with = "full")]
    all: bool,
    /// Number of test harnesses to run in parallel. More than one requires the right to create
    /// network namespaces, as root usually has [default: 4 with this right, 1 otherwise].
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..))]
    lanes: Option<u8>,
    /// Start no step after this number of minutes. The remaining steps are skipped and listed.
    #[arg(long)]
    minutes: Option<u32>,
}

impl Options {
    fn suite(&self) -> Suite {
        match (self.full, self.all) {
            (_, true) => Suite::All,
            (true, false) => Suite::Full,
            (false, false) => Suite::Everyday,
        }
    }
}

const fn full(name: &'static str, run: fn(&Run) -> Outcome) -> Step {
    step(name, run).suite(Suite::Full)
}

const fn extra(name: &'static str, run: fn(&Run) -> Outcome) -> Step {
    step(name, run).suite(Suite::All)
}

const STEPS: &[Step] = &[
    FMT,
    TIDY,
    DEPENDENCIES,
    step("tests", |run| functions(harnesses::run_all(run.lanes))).needing("test"),
    CLIPPY.suite(Suite::Full),
    DOC.suite(Suite::Full),
    full("book", |_| book().into()).requiring_crate("mdbook"),
    full("benchmarks, once each", |_| benchmarks()),
    full("deny", |_| deny()).requiring_crate("cargo-deny"),
    full("interleavings of threads", |_| {
        // With this number of runs, it only takes seconds.
        interleavings::run(&parse_options(&["--runs=500"])).into()
    }),
    full("simulation of a million messages", |_| {
        again("rc_sim", ("RISER_SIM_MESSAGES", "1000000"), &[])
    }),
    full("tests of the simulator", |_| {
        functions(run_release(&SIMULATOR, &[]))
    }),
    full("a thousand seeds of the simulator", |_| {
        sim::thousand().into()
    }),
    full("sessions and connection cycles", |_| {
        // This test measures state that is shared by the whole process.
        let args = ["--test-threads=1", "--nocapture"];
        again("scale", ("RISER_CONNECT_CYCLES", "10000"), &args)
    }),
    full("sessions that connect and disconnect", |_| {
        again("soak", ("RISER_SOAK_CONNECTS", "600"), &["--nocapture"])
    }),
    full("failing system calls", |_| {
        let args = ["errors::", "--nocapture"];
        again("crash", ("RISER_CRASH_ERRORS", "30"), &args)
    }),
    full("configuration changes during I/O", |_| {
        again(
            "changes_during_io",
            ("RISER_CHANGES", "1000"),
            &["--nocapture"],
        )
    }),
    // These functions are ignored in `tests`, so we need to count them here.
    full("a hostile host on the network", |_| {
        let args = "--workspace --test adversary -- --ignored --nocapture";
        let args: Vec<_> = args.split(' ').collect();
        functions(cargo_test(&args, &[("RISER_ADVERSARY_SECONDS", "12")]))
    }),
    full("demo", |_| demo::run(&parse_options(&[])).into()).requiring("demo"),
    // Uses the programs built by the demo.
    full("instructions of reads and writes", |_| {
        instructions::compare_all().into()
    })
    .requiring("instructions"),
    full("iSCSI conformance", |_| {
        conformance::run_all(&parse_options(&["--no-peer"])).into()
    })
    .needing(conformance::NEEDS),
    full("RDMA programs on our libraries", |_| {
        verbs::run_all(&parse_options(&[])).into()
    })
    .needing(verbs::NEEDS),
    full("interop with the kernel", |run| {
        let cases: &[_] = if run.suite == Suite::All {
            &[]
        } else {
            &["--short"]
        };
        interop::run_cases(&parse_options(cases)).into()
    })
    .needing("interop interop-here"),
    extra("package", |_| package_step())
        .requiring("package")
        .requiring_crate(package::SUBCOMMAND),
    extra("many more sessions", |_| {
        again("soak", ("RISER_SOAK_CONNECTS", "20000"), &["--nocapture"])
    }),
    extra("sequences of RDMA calls", |_| {
        again(
            "sequences",
            ("RISER_SEQUENCES", "500"),
            &["--test-threads=1"],
        )
    }),
    extra("container", |_| container::build_and_try().into()),
    extra("instructions of counting", |_| {
        instructions::counting().into()
    })
    .requiring("instructions"),
];

/// Runs the steps and returns an error if any step failed.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let run = Run {
        suite: options.suite(),
        lanes: options
            .lanes
            .unwrap_or_else(harnesses::default_lanes)
            .into(),
        until: options
            .minutes
            .map(|minutes| Instant::now() + Duration::from_secs(u64::from(minutes) * 60)),
    };
    steps::run(STEPS, &options.selection, &run)
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

/// Runs the functions of a test optimized, with the size set by a variable. All functions are
/// counted as a single check, which is skipped if any function is skipped.
fn again(test: &str, size: (&str, &str), args: &[&str]) -> Outcome {
    let run = run_release(&[&["--test", test, "--"], args].concat(), &[size]);
    match (run.failure, noted().first()) {
        (None, Some(skip)) => Outcome::skipped(format!("{}: {}", skip.name, skip.why)),
        (None, None) if run.counts.passed == 0 => Outcome::failed("no function ran"),
        (failure, _) => failure.map_or_else(|| Ok(()).into(), Outcome::failed),
    }
}

/// Runs all benchmarks once, without measuring. They use the test profile, so we only need to
/// build the benchmarks.
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
        false => Err("mdbook did not render the introduction".into()),
    }
}

/// Checks licenses, bans and sources. Advisories are checked if the database can be fetched.
fn deny() -> Outcome {
    let deny = |what: &[&str]| {
        let mut command = sh::cargo(["deny", "-L", "error", "check"]);
        sh::output(command.args(what))
    };
    if let Err(why) = deny(&["bans", "licenses", "sources"]) {
        return Outcome::failed(why);
    }
    if sh::output(&mut sh::cargo(["deny", "-L", "error", "fetch", "db"])).is_err() {
        let why = "cannot fetch the advisory database";
        note(Kind::Check, "deny advisories", why);
        return Ok(()).into();
    }
    let mut both = Tally::check(true);
    let advisories = deny(&["advisories"]);
    both.merge(Tally::check(advisories.is_ok()));
    Outcome::Ran(both, advisories.err().map(|e| e.to_string()))
}

/// Tests the package using the programs built for tests. A release build only adds link-time
/// optimization, but this would take minutes.
fn package_step() -> Outcome {
    if !sh::is_root() {
        return Outcome::skipped(package::WANTS_ROOT);
    }
    package::build_and_install(RELEASE).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_known_needs() {
        for step in STEPS {
            // This panics for an unknown name.
            let _ = step.all_needs().count();
        }
    }

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
