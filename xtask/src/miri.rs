//! `cargo xtask miri`: runs unit tests of memory, reactor and wire formats in an interpreter that
//! can detect undefined behavior (<https://github.com/rust-lang/miri>).

use crate::cases::select;
use crate::harnesses::run_counted;
use crate::{Failure, nightly, sh};

/// A crate with the test names to run and to skip.
struct Subject {
    package: &'static str,
    /// Name filters. If empty, all tests will run.
    names: &'static [&'static str],
    /// Tests to skip, because they use features not supported by Miri or would take too long.
    skipped: &'static [&'static str],
}

/// Code that shares memory with devices or other threads, and code that parses data received from a
/// peer.
const SUBJECTS: &[Subject] = &[
    Subject {
        package: "riser-memory",
        names: &[],
        skipped: &[],
    },
    Subject {
        package: "riser-reactor",
        names: &["slot::", "mailbox::"],
        skipped: &[],
    },
    Subject {
        package: "riser-transport",
        // We skip `mr` and `nic`: all of their tests fill tables with random numbers, and this
        // would take minutes.
        names: &["wire::", "table::"],
        skipped: &[],
    },
    Subject {
        package: "riser-scsi",
        names: &[
            "access::",
            "data::",
            "srp::",
            "iser::",
            "iscsi::frame",
            "iscsi::tests::wire",
        ],
        skipped: &[],
    },
];

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
    let chosen = select(SUBJECTS, &options.only, "crate", |subject, word| {
        subject.package.contains(word)
    })?;
    nightly::ensure(&["miri", "rust-src"])?;
    // Miri needs to build its own standard library and may have to fetch dependencies for it. If we
    // are offline, they must already be available.
    sh::run(&mut nightly::cargo(["miri", "setup"]))?;
    for subject in chosen {
        println!("── {}", subject.package);
        let mut command = nightly::cargo(["miri", "test", "--lib", "-p", subject.package, "--"]);
        command.args(subject.names);
        command.args(subject.skipped.iter().flat_map(|name| ["--skip", name]));
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
