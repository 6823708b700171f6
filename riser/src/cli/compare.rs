//! `riser bench compare`.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use riser_bench::output::compare::{self, MatchBy};
use riser_bench::output::fio::{self, RunSummary};

use super::args::{By, CompareArgs, Global};
use super::exit::{CliError, Exit};
use super::output;

/// Maximum file size in bytes. Documents contain several hundred kilobytes per job.
const MAX_FILE: u64 = 256 << 20;

/// Compares two files.
///
/// # Errors
/// Fails if a file can't be read or is not fio JSON output, or if standard output fails.
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
    let len = File::open(path)
        .and_then(|file| file.take(MAX_FILE + 1).read_to_string(&mut text))
        .map_err(|error| CliError::io(format!("cannot read {shown}"), error))?;
    if len as u64 > MAX_FILE {
        let mib = MAX_FILE >> 20;
        let what = format!("{shown} exceeds the limit of {mib} MiB");
        return Err(CliError::new(Exit::Usage, what));
    }
    fio::read(&text).map_err(|error| CliError::new(Exit::Usage, format!("{shown}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a file from the source directory of this crate.
    fn source(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
    }

    #[test]
    fn fio_output_is_loaded() {
        let golden = source("../bench/src/output/golden/fio-3.33.json");
        assert_eq!(load(&golden).unwrap().len(), 2);
    }

    #[test]
    fn errors_include_file_name() {
        let missing = load(Path::new("/nonexistent/a.json")).unwrap_err();
        assert_eq!(missing.exit, Exit::NotFound);
        assert_eq!(missing.what, "cannot read /nonexistent/a.json");
        let other = load(&source("Cargo.toml")).unwrap_err();
        assert_eq!(other.exit, Exit::Usage);
        assert!(
            other.what.contains("Cargo.toml: not fio JSON output"),
            "{}",
            other.what
        );
    }
}
