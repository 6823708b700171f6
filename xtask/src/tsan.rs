//! `cargo xtask tsan`: tests in which threads, software NICs and workers share memory, under
//! ThreadSanitizer, with a standard library that it sees, too.

use crate::{Failure, nightly, root, sh};

/// Reports that are not of races, each with its reason.
const SUPPRESSIONS: &str = "xtask/tsan.txt";

/// Packages, and their tests that run.
const SUBJECTS: &[(&str, &str)] = &[
    ("riser-transport", "provider"),
    ("riser-target", "in_memory"),
];

/// Functions whose result depends on how fast packets come, and all is slow here.
const SKIPPED: &[&str] = &["narrow_the_requesters_window"];

/// Options of `cargo xtask tsan`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only the test functions whose name contains this.
    #[arg(long)]
    name: Option<String>,
    /// Run only the tests (`provider`, `in_memory`) whose name contains one of these words.
    only: Vec<String>,
}

/// Builds and runs them; fails for a race.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    nightly::ensure(&["rust-src"])?;
    // With a platform named, flags are for it alone: macros and build scripts run without.
    let host = nightly::host()?;
    for (package, test) in SUBJECTS {
        let mut words = options.only.iter();
        if !options.only.is_empty() && !words.any(|word| test.contains(word.as_str())) {
            continue;
        }
        println!("── {package}, {test}");
        let args = ["test", "-Zbuild-std", "--target", &host];
        let mut command = nightly::cargo(args);
        // Each byte that is copied is a call of the checker's; at least the rest is to be fast.
        for package in ["riser-memory", "riser-transport"] {
            let config = format!("profile.dev.package.{package}.opt-level=2");
            command.args(["--config", &config]);
        }
        command.args(["-p", package, "--test", test]);
        // Copies of shared memory are assembly otherwise, which it does not see.
        command.args(["--features", "riser-memory/loops", "--"]);
        command.args(options.name.as_deref());
        command.args(SKIPPED.iter().flat_map(|name| ["--skip", name]));
        command.env("RUSTFLAGS", "-Zsanitizer=thread");
        // Apart, since all other builds would wait for this one.
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
