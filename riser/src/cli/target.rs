//! `riser target`: runs verbs of `riserd`, which is a separate program.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::builder::{OsStringValueParser, PossibleValue, TypedValueParser};
use clap::{Arg, error::Error};

use super::exit::{CliError, Exit};

/// Name of the program.
const RISERD: &str = "riserd";

/// Common verbs. All verbs are listed in its help.
const VERBS: [(&str, &str); 13] = [
    ("ls", "Show objects as a tree, with configuration and state"),
    ("get", "Show the configured value of an object or a key"),
    (
        "info",
        "Show an object in full: values, unset keys and state",
    ),
    ("set", "Set keys of an object"),
    (
        "create",
        "Create an object: a backend, target, portal, logical unit or rule",
    ),
    ("delete", "Delete an object, or reset a key to its default"),
    ("sessions", "List the connections of sessions"),
    (
        "targets",
        "List the targets, with portals and logical units",
    ),
    ("status", "Show the status of the running daemon"),
    ("top", "Show live rates and latencies"),
    ("apply", "Apply a configuration file"),
    ("history", "List previous configurations"),
    ("rollback", "Restore a previous configuration"),
];

/// Accepts any word as a verb of `riserd`, and suggests common ones.
#[derive(Clone, Copy, Debug)]
pub(super) struct VerbParser;

impl TypedValueParser for VerbParser {
    type Value = OsString;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<OsString, Error> {
        OsStringValueParser::new().parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let verbs = VERBS.iter();
        Some(Box::new(
            verbs.map(|(name, help)| PossibleValue::new(*name).help(*help)),
        ))
    }
}

/// Executes `riserd` with these arguments.
pub(super) fn run(args: &[OsString]) -> Result<(), CliError> {
    let program = adjacent_program().unwrap_or_else(|| RISERD.into());
    let failed = Command::new(&program).args(args).exec();
    if failed.kind() == std::io::ErrorKind::NotFound {
        let error = CliError::new(
            Exit::NotFound,
            "cannot find riserd next to riser or in PATH",
        );
        return Err(error.help("install the target daemon, which is part of the same package"));
    }
    Err(CliError::io(
        format!("cannot run {}", program.display()),
        failed,
    ))
}

/// Returns the path of `riserd` if it's in the same directory as this program.
fn adjacent_program() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let path = own.with_file_name(RISERD);
    path.is_file().then_some(path)
}
