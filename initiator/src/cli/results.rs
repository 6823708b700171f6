//! Files for the results of `riser bench`.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::args::ResultsArgs;
use super::exit::CliError;

/// Files for results, opened before the run: what cannot be written is known before it takes its
/// time. What they hold is replaced at the end of a run that succeeds.
pub(super) struct ResultFiles {
    pub(super) report: Option<ResultFile>,
    pub(super) csv: Option<ResultFile>,
    pub(super) hdr_log: Option<ResultFile>,
}

impl ResultFiles {
    /// Opens those that are asked for.
    ///
    /// # Errors
    /// One cannot be written.
    pub(super) fn create(args: &ResultsArgs) -> Result<Self, CliError> {
        let create = |path: &Option<PathBuf>| path.as_deref().map(ResultFile::create).transpose();
        Ok(Self {
            report: create(&args.report)?,
            csv: create(&args.csv)?,
            hdr_log: create(&args.hdr_log)?,
        })
    }
}

/// A file for one result.
pub(super) struct ResultFile {
    file: File,
    path: PathBuf,
}

impl ResultFile {
    fn create(path: &Path) -> Result<Self, CliError> {
        let path = path.to_owned();
        let mut options = OpenOptions::new();
        match options.write(true).create(true).truncate(false).open(&path) {
            Ok(file) => Ok(Self { file, path }),
            Err(error) => Err(cannot_write(&path, error)),
        }
    }

    /// Replaces the content.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn save(
        self,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), CliError> {
        // A pipe or a terminal has no content to remove.
        let emptied = match self.file.metadata() {
            Ok(file) if file.is_file() => self.file.set_len(0),
            _ => Ok(()),
        };
        let mut out = BufWriter::new(self.file);
        let written = emptied
            .and_then(|()| write(&mut out))
            .and_then(|()| out.flush());
        written.map_err(|error| cannot_write(&self.path, error))
    }
}

fn cannot_write(path: &Path, error: io::Error) -> CliError {
    CliError::io(format!("cannot write {}", path.display()), error)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_keeps_its_content_until_there_is_a_result() {
        let path = std::env::temp_dir().join(format!("riser-results-{}", std::process::id()));
        fs::write(&path, "an earlier result").unwrap();
        drop(ResultFile::create(&path).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "an earlier result");
        let file = ResultFile::create(&path).unwrap();
        file.save(|out| out.write_all(b"new")).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        fs::remove_file(&path).unwrap();
        let null = ResultFile::create(Path::new("/dev/null")).unwrap();
        null.save(|out| out.write_all(b"new")).unwrap();
    }
}
