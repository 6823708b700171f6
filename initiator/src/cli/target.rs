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
    ("ls", "Show the target daemon's objects as a tree"),
    ("get", "Show what an object or a key is set to"),
    ("info", "Show an object in full"),
    ("set", "Set keys of an object"),
    (
        "create",
        "Make a backend, a target, a portal, a logical unit, a rule",
    ),
    ("delete", "Take an object away"),
    ("sessions", "Show who is logged in"),
    ("targets", "Show what is served"),
    ("status", "Show how the daemon is"),
    ("top", "Show what the daemon does, again and again"),
    (
        "apply",
        "Let the daemon serve what a configuration file describes",
    ),
    ("history", "List the configurations that the daemon has had"),
    (
        "rollback",
        "Let the daemon serve again what it served before",
    ),
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
    let program = beside().unwrap_or_else(|| RISERD.into());
    let failed = Command::new(&program).args(args).exec();
    if failed.kind() == std::io::ErrorKind::NotFound {
        let error = CliError::new(Exit::NotFound, "there is no riserd beside riser or in PATH");
        return Err(error.help("it is the target daemon, a program of the same package"));
    }
    Err(CliError::io(
        format!("cannot run {}", program.display()),
        failed,
    ))
}

/// Returns the path of `riserd` if it's in the same directory as this program.
fn beside() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let path = own.with_file_name(RISERD);
    path.is_file().then_some(path)
}
