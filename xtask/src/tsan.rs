//! `cargo xtask tsan`: uses ThreadSanitizer to run tests in which memory is shared between threads,
//! software NICs or workers. The standard library is instrumented as well.

use crate::{Failure, nightly, root, sh};

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
    nightly::ensure(&["rust-src"])?;
    // If we specify a target, Cargo will use the flags only for this target, but not for macros and
    // build scripts.
    let host = nightly::host()?;
    for (package, test) in SUBJECTS {
        let mut words = options.only.iter();
        if !options.only.is_empty() && !words.any(|word| test.contains(word.as_str())) {
            continue;
        }
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
        sh::run(&mut command)?;
    }
    Ok(())
}
