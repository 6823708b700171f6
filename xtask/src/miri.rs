//! `cargo xtask miri`: unit tests of memory, of the reactor and of wire formats, in an interpreter
//! that notices undefined behaviour (<https://github.com/rust-lang/miri>).

use crate::{Failure, nightly, sh};

/// A crate, the names of its tests that are run, and those that are not.
struct Subject {
    package: &'static str,
    /// Parts of names; none for all tests.
    names: &'static [&'static str],
    /// Tests that use what Miri does not know, or that compute for very long.
    skipped: &'static [&'static str],
}

/// What shares memory with devices or threads, and what reads a peer's bytes.
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
        // Not `mr` and `roce`, whose every test fills tables of random numbers for minutes.
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

/// Options of `cargo xtask miri`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Orders of threads and addresses that each test is run in.
    #[arg(long, default_value_t = 1)]
    seeds: u32,
    /// Random cases of each property.
    #[arg(long, default_value_t = 4)]
    cases: u32,
    /// Run only the crates whose name contains one of these words.
    only: Vec<String>,
}

/// Runs them, crate by crate.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    nightly::ensure(&["miri", "rust-src"])?;
    // The interpreter needs a standard library of its own, whose dependencies may have to be
    // fetched; offline, they have to be there.
    sh::run(&mut nightly::cargo(["miri", "setup"]))?;
    let is_chosen = |subject: &&Subject| {
        let mut words = options.only.iter();
        options.only.is_empty() || words.any(|word| subject.package.contains(word.as_str()))
    };
    let chosen: Vec<_> = SUBJECTS.iter().filter(is_chosen).collect();
    if chosen.is_empty() {
        return Err("no crate has such a name".into());
    }
    for subject in chosen {
        println!("── {}", subject.package);
        let mut command = nightly::cargo(["miri", "test", "--lib", "-p", subject.package, "--"]);
        command.args(subject.names);
        command.args(subject.skipped.iter().flat_map(|name| ["--skip", name]));
        // Properties look for failures that were kept in a file beside the sources.
        let mut flags = "-Zmiri-disable-isolation".to_owned();
        if options.seeds > 1 {
            flags += &format!(" -Zmiri-many-seeds=0..{}", options.seeds);
        }
        command.env("MIRIFLAGS", flags);
        command.env("PROPTEST_CASES", options.cases.to_string());
        sh::run(&mut command)?;
    }
    Ok(())
}
