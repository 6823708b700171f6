//! `riser bench compare`.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::args::{By, CompareArgs, Global};
use super::exit::{CliError, Exit};
use super::output;
use crate::bench::output::compare::{self, MatchBy};
use crate::bench::output::fio::{self, RunSummary};

/// Largest file that is read. Documents have some hundred kilobytes for a job.
const MAX_FILE: u64 = 1 << 30;

/// Compares two files.
///
/// # Errors
/// A file that cannot be read or is no JSON of fio, and a failure of standard output.
pub fn run(args: &CompareArgs, global: &Global) -> Result<(), CliError> {
    let (a, b) = (load(&args.a)?, load(&args.b)?);
    let by = match args.by {
        By::Options => MatchBy::Options,
        By::Name => MatchBy::Name,
    };
    let comparison = compare::compare(&a, &b, by);
    output::result(&comparison, global, |out| compare::write(out, &comparison))
}

fn load(path: &Path) -> Result<Vec<RunSummary>, CliError> {
    let shown = path.display();
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(MAX_FILE).read_to_string(&mut text))
        .map_err(|error| CliError::io(format!("cannot read {shown}"), error))?;
    fio::read(&text).map_err(|error| CliError::new(Exit::Usage, format!("{shown}: {error}")))
}
