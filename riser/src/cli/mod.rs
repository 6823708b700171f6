//! Command line of `riser`.
//!
//! - [`args`]: verbs and options.
//! - [`exit`]: errors and exit statuses.
//! - [`disk`]: disks at any address.
//! - [`state`]: attachments on this host.
//! - A separate module for each verb.
//!
//! Results are written to standard output, either as text or as a single JSON document. Standard
//! error is used for everything else.

mod address;
pub mod args;
mod attach;
mod attachment;
mod bench;
mod blockdev;
pub mod compare;
mod copy;
mod detach;
mod devices;
mod discover;
pub mod disk;
mod docs;
mod examples;
mod executable;
pub mod exit;
mod file;
mod guard;
mod identity;
mod inquiry;
mod list;
mod lock;
mod log;
mod loops;
mod mount;
mod others;
mod output;
mod port;
mod process;
mod registration;
mod results;
mod rping;
mod run;
pub mod run_args;
mod serve;
mod shared;
pub mod state;
mod state_file;
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

use args::{Args, Global, Verb};
use exit::{CliError, Exit};

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) if error.use_stderr() => {
            match output::wants_json(std::env::args_os()) {
                true => output::json_error(&CliError::usage(&error)),
                // If printing fails, we can't report this anywhere else.
                false => drop(error.print()),
            }
            return Exit::Usage.into();
        }
        // Help and version are not errors.
        Err(text) => {
            let _ = text.print();
            return ExitCode::SUCCESS;
        }
    };
    log::start(&args.global, args.verb.default_log());
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
