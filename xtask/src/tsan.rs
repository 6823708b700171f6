//! `cargo xtask tsan`: uses ThreadSanitizer to run tests in which memory is shared between
//! threads, software NICs or workers. The standard library is instrumented as well.

use crate::cases::select;
use crate::harnesses::run_counted;
use crate::{Failure, nightly, root};

/// Suppressions for false positives. Every entry has a comment with the reason.
const SUPPRESSIONS: &str = "xtask/tsan.txt";

/// Packages, with the tests to run.
const SUBJECTS: &[(&str, &str)] = &[
    ("riser-transport", "provider"),
    ("riser-target", "in_memory"),
];

/// Functions to skip because they depend on how fast packets are received, but everything is slow
/// here.
const SKIPPED: &[&str] = &["narrows_requester_window"];

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only the test functions whose name contains this.
    #[arg(long)]
    name: Option<String>,
    /// Run only the tests (`provider`, `in_memory`) whose name contains one of these words.
    only: Vec<String>,
}

/// Builds and runs the tests; returns an error if there is a data race.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let subjects = select(SUBJECTS, &options.only, "test", |(_, test), word| {
        test.contains(word)
    })?;
    nightly::ensure(&["rust-src"])?;
    // If we specify a target, Cargo will use the flags only for this target, but not for macros and
    // build scripts.
    let host = nightly::host()?;
    let mut passed = 0;
    for (package, test) in subjects {
        println!("── {package}, {test}");
        let args = ["test", "-Zbuild-std", "--target", &host];
        let mut command = nightly::cargo(args);
        // The checker is called for every byte copied, so we should at least optimize the rest.
        for package in ["riser-memory", "riser-transport"] {
            let config = format!("profile.dev.package.{package}.opt-level=2");
            command.args(["--config", &config]);
        }
        command.args(["-p", package, "--test", test]);
        // By default, shared memory is copied using assembly, which the checker can't instrument.
        command.args(["--features", "riser-memory/loops", "--"]);
        command.args(options.name.as_deref());
        command.args(SKIPPED.iter().flat_map(|name| ["--skip", name]));
        command.env("RUSTFLAGS", "-Zsanitizer=thread");
        // Use a separate target directory, so that other builds don't have to wait for this build.
        command.env("CARGO_TARGET_DIR", root().join(".build/tsan"));
        let suppressions = root().join(SUPPRESSIONS);
        command.env(
            "TSAN_OPTIONS",
            format!("suppressions={} history_size=7", suppressions.display()),
        );
        passed += run_counted(&mut command)?;
    }
    match (passed, &options.name) {
        (0, Some(name)) => Err(format!("unknown test: no name contains {name}").into()),
        (0, None) => Err("no test function ran".into()),
        _ => Ok(()),
    }
}
