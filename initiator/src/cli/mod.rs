//! The command line of `riser`.
//!
//! - [`args`]: every verb and option.
//! - [`exit`]: what can go wrong, and the exit status it has.
//! - [`disk`]: an address as a disk, wherever it is.
//! - [`state`]: the attachments of this host.
//! - One module for each verb.
//!
//! Results go to standard output, for people or as one JSON document; everything else goes to
//! standard error.

mod address;
pub mod args;
mod attach;
mod bench;
mod blockdev;
pub mod compare;
mod copy;
mod detach;
mod devices;
mod discover;
pub mod disk;
mod docs;
mod executable;
pub mod exit;
mod file;
mod guard;
mod identity;
mod inquiry;
mod list;
mod lock;
mod mount;
mod others;
mod output;
mod port;
mod process;
mod results;
mod rping;
mod run;
pub mod run_args;
mod serve;
mod shared;
pub mod state;
mod sweep;
mod target;
mod udev;
mod units;
mod vnic;
pub mod vnic_args;
mod wire;
pub mod wire_args;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use args::{Args, Global, Verb};
use exit::{CliError, Exit};

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // Help and version are no errors. If even printing fails, there is no other place to
            // report to.
            let _ = error.print();
            return match error.use_stderr() {
                true => Exit::Usage.into(),
                false => ExitCode::SUCCESS,
            };
        }
    };
    start_log(&args.global);
    let global = args.global;
    match run(args.verb, &global) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::error(&error, &global);
            error.exit.into()
        }
    }
}

fn run(verb: Verb, global: &Global) -> Result<(), CliError> {
    match verb {
        Verb::Discover(args) => discover::run(&args, global),
        Verb::Devices => devices::run(global),
        Verb::List => list::run(global),
        Verb::Attach(mut args) => {
            serve::take_secrets(&args.serve, &mut args.url)?;
            attach::run(&args, global)
        }
        Verb::Detach(args) => detach::run(&args, global),
        Verb::Mount(mut args) => {
            serve::take_secrets(&args.serve, &mut args.url)?;
            mount::run(&args, global)
        }
        Verb::Inquiry(args) => inquiry::run(&args, global),
        Verb::Read(args) => copy::read(&args, global),
        Verb::Write(args) => copy::write(&args, global),
        Verb::Bench(args) => bench::run(&args, global),
        Verb::Rping(args) => rping::run(&args, global),
        Verb::Vnic(args) => vnic::run(&args, global),
        Verb::Run(args) => run::run(&args, global),
        Verb::Completions { shell } => docs::completions(shell),
        Verb::Target { args } => target::run(&args),
        Verb::Udev { device } => udev::run(&device),
        Verb::Man { dir } => docs::man(dir.as_deref()),
    }
}

/// Filter of the log that the command line asks for, if it does: `--log`, or the number of `-v` and
/// `-q`.
fn chosen_log(global: &Global) -> Option<String> {
    let level = match (global.quiet, global.verbose) {
        (true, _) => Some("error"),
        (false, 0) => None,
        (false, 1) => Some("info"),
        (false, 2) => Some("debug"),
        (false, _) => Some("trace"),
    };
    let filter = global.log.as_deref();
    let filter = filter.filter(|filter| EnvFilter::try_new(filter).is_ok());
    filter.or(level).map(str::to_owned)
}

/// Logs to standard error, by default warnings.
fn start_log(global: &Global) {
    let filter = chosen_log(global);
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter.as_deref().unwrap_or("warn")))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
}
