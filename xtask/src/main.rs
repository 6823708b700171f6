//! Project commands.
//!
//! If a command requires missing Debian packages, we install them if allowed to ([`packages`]). If
//! not, we print the missing packages and skip any work that depends on them.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "this program talks to a person"
)]

mod baddays;
mod bench;
mod cases;
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
mod items;
mod linear;
mod marks;
mod miri;
mod neighbours;
mod nightly;
mod package;
mod packages;
mod process;
mod sh;
mod sim;
mod soak;
mod steps;
mod tally;
mod test;
mod tgt;
mod tidy;
mod tsan;
mod verbs;

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
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
    /// Serve a file over SRP using the software RoCEv2 NIC, create a file system, check that it
    /// survives a detach, a new attach and a lossy link, and measure performance.
    Demo(demo::Options),
    /// Run formatting, lints, quick tests and tidiness checks before a commit; this takes minutes.
    Check(Selection),
    /// Run all tests that use a single build of the workspace; --full runs the longer suites.
    Test(test::Options),
    /// Check for import cycles and for words to avoid in user-visible text; measure with --report.
    Tidy(tidy::Options),
    /// Run failure scenarios for disks, addresses, targets and operators.
    Baddays,
    /// Kill the daemon under load and at every step of a state update, and cut power to its disk.
    Crash(crash::Options),
    /// Run simulator seeds: all shipped code runs in a single thread with many failures. If a seed
    /// fails, its plan is minimized and saved.
    Sim(sim::Options),
    /// Have initiators of all protocols write the same blocks over unreliable networks, and check
    /// that the data they read is linearizable.
    Linear(linear::Options),
    /// Connect and disconnect sessions while many sessions are active, and check riserd for leaks.
    Soak(soak::Options),
    /// Send almost valid messages of every protocol to a busy daemon, and measure the impact on its
    /// other work.
    Hostile(hostile::Options),
    /// Run the fuzz targets with libFuzzer using coverage, and save new inputs.
    Fuzz(fuzz::Options),
    /// Run the cases that use a stock Linux kernel as the peer, in QEMU.
    Interop(interop::Options),
    /// Run the libiscsi conformance suite against our iSCSI target and, for comparison, tgt.
    Conformance(conformance::Options),
    /// Check that each item of the interfaces has an implementation, a test and a judge, or a
    /// reason for its absence; count them by class.
    Items(items::Options),
    /// Run rdma-core programs and tests, and perftest, with our libibverbs and librdmacm.
    Verbs(verbs::Options),
    /// Build the Debian package, then install, upgrade, remove and purge it in a new Debian root.
    Package(package::Options),
    /// Build the deploy/container image and start its programs.
    Container,
    /// Benchmark our target against nbdkit, qemu-nbd and tgt using the same file, and check
    /// performance targets; updates docs/performance.md.
    Bench(bench::Options),
    /// Measure the latency of a quiet initiator alone, with a noisy initiator, and with a limited
    /// one.
    Neighbours(neighbours::Options),
    /// Count riserd's instructions for 4 KiB reads and writes, for each protocol, and fail if there
    /// is an increase.
    Instructions(instructions::Options),
    /// Run tests of shared state using many thread interleavings.
    Interleavings(interleavings::Options),
    /// Run unit tests of memory, reactor and wire formats in Miri.
    Miri(miri::Options),
    /// Run tests of threads and software NICs with ThreadSanitizer.
    Tsan(tsan::Options),
}

/// Error returned by our commands, as text for the user.
type Failure = Box<dyn std::error::Error>;

fn parse_options<T: clap::Args>(args: &[&str]) -> T {
    let command = T::augment_args(clap::Command::new("xtask").no_binary_name(true));
    let matches = command.get_matches_from(args);
    T::from_arg_matches(&matches).unwrap_or_else(|e| e.exit())
}

/// Root directory of the workspace.
fn root() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().map(PathBuf::from).unwrap_or(manifest)
}

/// Commands that the help lists first.
const EVERYDAY: [&str; 4] = ["demo", "check", "test", "bench"];

/// Returns the command line parser. Its help lists the everyday commands first, and the remaining
/// commands in a second group.
fn command_line() -> clap::Command {
    let mut cli = Cli::command();
    let mut special = String::from("Special commands:\n");
    for command in cli.get_subcommands_mut() {
        if EVERYDAY.contains(&command.get_name()) {
            continue;
        }
        let about = command.get_about().map(ToString::to_string);
        let about = about.unwrap_or_default();
        let name = command.get_name();
        let _ = writeln!(special, "  {name:<13} {}", first_sentence(&about));
        *command = command.clone().hide(true);
    }
    cli.subcommand_help_heading("Everyday commands")
        .after_help(special.trim_end().to_owned())
}

fn first_sentence(about: &str) -> &str {
    about.split(&[';', '.'][..]).next().unwrap_or(about)
}

fn main() -> ExitCode {
    let matches = command_line().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.exit());
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
        Command::Items(options) => items::run(&options),
        Command::Verbs(options) => verbs::run(&options),
        Command::Package(options) => package::run(&options),
        Command::Container => container::run(),
        Command::Bench(options) => bench::run(&options),
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
    fn help_lists_everyday_commands_first() {
        let help = command_line().render_help().to_string();
        let (first, second) = help.split_once("Special commands:").unwrap();
        for command in Cli::command().get_subcommands() {
            let line = format!("\n  {} ", command.get_name());
            let part = match EVERYDAY.contains(&command.get_name()) {
                true => first,
                false => second,
            };
            assert!(part.contains(&line), "{}", command.get_name());
        }
    }

    #[test]
    fn documents_call_it_as_it_is() {
        let commands = riser_docs::commands_of(&["cargo", "xtask"]);
        assert!(commands.len() > 20, "only {} were found", commands.len());
        for command in commands {
            // `WORD…` is a placeholder for words provided by the reader.
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
