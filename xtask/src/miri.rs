//! `cargo xtask miri`: runs unit tests of memory, reactor and wire formats in an interpreter
//! that can detect undefined behavior (<https://github.com/rust-lang/miri>).

use serde::Deserialize;

use crate::cases::{self, select};
use crate::harnesses::run_counted;
use crate::{Failure, nightly, sh};

/// A package with filters for its tests, from `xtask/cases/miri.toml`.
#[derive(Deserialize)]
struct Subject {
    package: String,
    names: Vec<String>,
}

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Number of thread schedules and address layouts to use for each test.
    #[arg(long, default_value_t = 1)]
    seeds: u32,
    /// Number of random cases per property test.
    #[arg(long, default_value_t = 4)]
    cases: u32,
    /// Run only the crates whose name contains one of these words.
    only: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let subjects = cases::read::<Subject>(include_str!("../cases/miri.toml"));
    let is_match = |subject: &Subject, word: &str| subject.package.contains(word);
    let chosen = select(subjects, &options.only, "crate", is_match)?;
    nightly::ensure(&["miri", "rust-src"])?;
    // Miri needs to build its own standard library and may have to fetch dependencies for it. If we
    // are offline, they must already be available.
    sh::run(&mut nightly::cargo(["miri", "setup"]))?;
    for subject in chosen {
        println!("── {}", subject.package);
        let mut command = nightly::cargo(["miri", "test", "--lib", "-p", &subject.package, "--"]);
        command.args(&subject.names);
        // Property tests read previous failures from a file in the source directory.
        let mut flags = "-Zmiri-disable-isolation".to_owned();
        if options.seeds > 1 {
            flags += &format!(" -Zmiri-many-seeds=0..{}", options.seeds);
        }
        command.env("MIRIFLAGS", flags);
        command.env("PROPTEST_CASES", options.cases.to_string());
        if run_counted(&mut command)? == 0 {
            return Err(format!("no test function of {} ran", subject.package).into());
        }
    }
    Ok(())
}
