//! The project's own commands.
//!
//! - `cargo xtask demo`: the main job, end to end, on this machine ([`demo`]).
//! - `cargo xtask check`: what is to hold before a commit ([`check`]).
//! - `cargo xtask test`: everything that must hold ([`mod@test`]).
//! - `cargo xtask tidy`: import circles, words, and measures of the sources ([`tidy`]).
//! - `cargo xtask baddays`: what goes on when something is wrong ([`baddays`]).
//! - `cargo xtask crash`: what is left when the daemon or its machine dies ([`crash`]).
//! - `cargo xtask sim`: seeds of the simulator ([`sim`]).
//! - `cargo xtask linear`: all initiators on networks that fail, and one order of what they did
//!   ([`linear`]).
//! - `cargo xtask soak`: sessions that come and go, and what they leave behind ([`soak`]).
//! - `cargo xtask hostile`: messages that are almost right, to a daemon at work ([`hostile`]).
//! - `cargo xtask fuzz`: the fuzz targets, by what their inputs reach ([`fuzz`]).
//! - `cargo xtask interop`: the kernel as our peer ([`interop`]).
//! - `cargo xtask conformance`: libiscsi's suite against our iSCSI target, beside `tgt`
//!   ([`conformance`]).
//! - `cargo xtask verbs`: rdma-core's programs and perftest on our libibverbs and librdmacm
//!   ([`verbs`]).
//! - `cargo xtask package`: the Debian package, and a system that gets it ([`package`]).
//! - `cargo xtask container`: the container's image ([`container`]).
//! - `cargo xtask bench`: our target beside its peers, in one run ([`mod@bench`]).
//! - `cargo xtask path-cost`: packets, system calls, copies and context switches of an operation
//!   ([`bench::path_cost`]).
//! - `cargo xtask neighbours`: what a noisy initiator does to a quiet one, with limits and without
//!   ([`neighbours`]).
//! - `cargo xtask instructions`: what reads and writes cost, beside what was accepted
//!   ([`instructions`]).
//! - `cargo xtask interleavings`: state that threads share, in many orders ([`interleavings`]).
//! - `cargo xtask miri`: undefined behaviour in unit tests ([`miri`]).
//! - `cargo xtask tsan`: races of threads and software NICs ([`tsan`]).
//!
//! Debian packages that a command needs are installed if that is allowed ([`packages`]); otherwise
//! it prints which are missing and what is skipped for it.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "this program talks to a person"
)]

mod baddays;
mod bench;
mod check;
mod conformance;
mod container;
mod crash;
mod daemon;
mod demo;
mod fuzz;
mod harnesses;
mod hostile;
mod instructions;
mod interleavings;
mod interop;
mod linear;
mod miri;
mod neighbours;
mod nightly;
mod package;
mod packages;
mod sh;
mod sim;
mod soak;
mod steps;
mod tally;
mod test;
mod tgt;
mod tidy;
mod tree;
mod tsan;
mod verbs;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use riser_testkit::skip;
use steps::Selection;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Riser's own commands",
    disable_help_subcommand = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    packages: packages::Options,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a file over SRP on the software RoCEv2 NIC, put a file system on it, check that it
    /// survives detach, reattach and a lossy link, and measure it.
    Demo(demo::Options),
    /// Run what is to hold before a commit, in minutes: formatting, lints, quick tests, tidiness.
    Check(Selection),
    /// Run checks and tests, with --all every one that there is; count what passed, failed and was
    /// skipped.
    Test(test::Options),
    /// Fail for import circles and for words to replace in what users see; measure with --report.
    Tidy(tidy::Options),
    /// Run the cases in which a disk, an address, a target or an operator fails.
    Baddays,
    /// Kill the daemon under load and at each step of its state, and cut its disk's power.
    Crash(crash::Options),
    /// Run seeds of the simulator, in which everything that ships runs in one thread and much goes
    /// wrong; make the plan of a seed that fails smaller, and keep it.
    Sim(sim::Options),
    /// Let initiators of all protocols write the same blocks over networks that fail, and check
    /// that one order explains what they read.
    Linear(linear::Options),
    /// Let sessions come and go beside many that stay, and check that they leave nothing in riserd.
    Soak(soak::Options),
    /// Send messages that are almost right, of every protocol, to a daemon at work, and measure
    /// what they do to that.
    Hostile(hostile::Options),
    /// Explore the fuzz targets with libFuzzer, which sees what each input reaches, and keep what
    /// is new.
    Fuzz(fuzz::Options),
    /// Run the cases in which a stock Linux kernel is the peer, in QEMU.
    Interop(interop::Options),
    /// Run libiscsi's conformance suite against our iSCSI target, and beside it against tgt.
    Conformance(conformance::Options),
    /// Run rdma-core's programs and tests, and perftest, on our libibverbs and librdmacm.
    Verbs(verbs::Options),
    /// Build the Debian package, and install, upgrade, remove and purge it in a Debian root of its
    /// own.
    Package(package::Options),
    /// Build the image of deploy/container and start its programs.
    Container,
    /// Measure our target beside nbdkit, qemu-nbd and tgt on the same file, and compare with
    /// targets; write docs/performance.md.
    Bench(bench::Options),
    /// Count packet buffers, system calls, copies and context switches of an operation, of our
    /// target and of its peers; needs root and perf.
    PathCost(bench::path_cost::Options),
    /// Measure a quiet initiator's latency alone, beside a noisy one, and beside a limited one.
    Neighbours(neighbours::Options),
    /// Count the instructions of 4 KiB reads and writes of each protocol in riserd, and fail where
    /// they have grown.
    Instructions(instructions::Options),
    /// Run tests of state that threads share in many interleavings of these.
    Interleavings(interleavings::Options),
    /// Run unit tests of memory, of the reactor and of wire formats in Miri.
    Miri(miri::Options),
    /// Run tests of threads and software NICs under ThreadSanitizer.
    Tsan(tsan::Options),
}

/// The reason why a command of ours stopped, for a person.
type Failure = Box<dyn std::error::Error>;

/// The workspace's root folder.
fn root() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().map(PathBuf::from).unwrap_or(manifest)
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.packages.decide();
    let result = match cli.command {
        Command::Demo(options) => demo::run(&options),
        Command::Check(selection) => check::run(&selection),
        Command::Test(options) => test::run(&options),
        Command::Tidy(options) => tidy::run(&options),
        Command::Baddays => baddays::run(),
        Command::Crash(options) => crash::run(&options),
        Command::Sim(options) => sim::run(&options),
        Command::Linear(options) => linear::run(&options),
        Command::Soak(options) => soak::run(&options),
        Command::Hostile(options) => hostile::run(&options),
        Command::Fuzz(options) => fuzz::run(&options),
        Command::Interop(options) => interop::run(&options),
        Command::Conformance(options) => conformance::run(&options),
        Command::Verbs(options) => verbs::run(&options),
        Command::Package(options) => package::run(&options),
        Command::Container => container::run(),
        Command::Bench(options) => bench::run(&options),
        Command::PathCost(options) => bench::path_cost::run(&options),
        Command::Neighbours(options) => neighbours::run(&options),
        Command::Instructions(options) => instructions::run(&options),
        Command::Interleavings(options) => interleavings::run(&options),
        Command::Miri(options) => miri::run(&options),
        Command::Tsan(options) => tsan::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_call_it_as_it_is() {
        let commands = riser_docs::commands_of(&["cargo", "xtask"]);
        assert!(commands.len() > 20, "only {} were found", commands.len());
        for command in commands {
            // `WORD…` stands for words of the reader's own.
            let words = command.words[1..]
                .iter()
                .map(|word| word.trim_end_matches('…'));
            if words.len() > 1 {
                let parsed = Cli::try_parse_from(words);
                let why = parsed.err().map(|e| e.to_string());
                assert_eq!(why, None, "{}: {:?}", command.place, command.words);
            }
        }
    }
}
