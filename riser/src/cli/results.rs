//! Output files of `riser bench`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::args::ResultsArgs;
use super::exit::{CliError, Exit};
use super::guard::FileId;

/// Output files for results. They are opened before the run, in order to report errors early.
/// Existing contents are only replaced after a run has completed successfully.
pub(super) struct ResultFiles {
    pub(super) report: Option<ResultFile>,
    pub(super) csv: Option<ResultFile>,
    pub(super) hdr_log: Option<ResultFile>,
}

/// Descriptions of files that are used by the run and must not be replaced by results.
#[derive(Debug, Default)]
pub(super) struct FilesInUse(Vec<(String, FileId)>);

impl FilesInUse {
    /// Creates a list that only contains standard output.
    pub(super) fn new() -> Self {
        let mut used = Self::default();
        if let Ok(stdout) = io::stdout().as_fd().try_clone_to_owned()
            && let Ok(meta) = File::from(stdout).metadata()
        {
            used.0.push(("standard output".into(), FileId::of(&meta)));
        }
        used
    }

    /// Adds a file if it exists.
    pub(super) fn add(&mut self, what: impl Into<String>, path: &Path) {
        if let Ok(meta) = fs::metadata(path) {
            self.0.push((what.into(), FileId::of(&meta)));
        }
    }

    fn find(&self, id: FileId) -> Option<&str> {
        let mut used = self.0.iter();
        used.find_map(|(what, known)| (*known == id).then_some(what.as_str()))
    }
}

impl ResultFiles {
    /// Opens all requested output files. `used` adds the files used by the run. This is called
    /// after opening the output files, because a new state file could have the same path as one of
    /// these.
    ///
    /// # Errors
    /// Fails if a file can't be written, is a block device, or is used by the run or another
    /// result.
    pub(super) fn create(
        args: &ResultsArgs,
        used: impl FnOnce(&mut FilesInUse),
    ) -> Result<Self, CliError> {
        let create = |path: &Option<PathBuf>| path.as_deref().map(ResultFile::create).transpose();
        let files = Self {
            report: create(&args.report)?,
            csv: create(&args.csv)?,
            hdr_log: create(&args.hdr_log)?,
        };
        let mut in_use = FilesInUse::new();
        used(&mut in_use);
        let all = [
            ("--report", &files.report),
            ("--csv", &files.csv),
            ("--hdr-log", &files.hdr_log),
        ];
        for (option, file) in all {
            if let Some(file) = file {
                file.claim(option, &mut in_use)?;
            }
        }
        Ok(files)
    }
}

/// An output file for a result.
pub(super) struct ResultFile {
    file: File,
    path: PathBuf,
}

impl ResultFile {
    fn create(path: &Path) -> Result<Self, CliError> {
        let path = path.to_owned();
        // Don't open block devices, because the kernel sends an event when a writable device is
        // closed.
        if fs::metadata(&path).is_ok_and(|meta| meta.file_type().is_block_device()) {
            let what = format!("cannot write {}: it is a block device", path.display());
            return Err(CliError::new(Exit::Usage, what));
        }
        let mut options = OpenOptions::new();
        match options.write(true).create(true).truncate(false).open(&path) {
            Ok(file) => Ok(Self { file, path }),
            Err(error) => Err(cannot_write(&path, error)),
        }
    }

    /// Fails if the file is already in use, and adds it to this list. Terminals, pipes and
    /// `/dev/null` can be used multiple times.
    fn claim(&self, option: &str, in_use: &mut FilesInUse) -> Result<(), CliError> {
        let meta = self.file.metadata();
        let meta = meta.map_err(|error| cannot_write(&self.path, error))?;
        if !meta.is_file() {
            return Ok(());
        }
        let id = FileId::of(&meta);
        if let Some(what) = in_use.find(id) {
            let path = self.path.display();
            let what = format!("{option} {path} would replace {what}");
            return Err(CliError::new(Exit::Usage, what));
        }
        in_use.0.push((format!("the file of {option}"), id));
        Ok(())
    }

    /// Replaces the contents of the file.
    ///
    /// # Errors
    /// Fails if the file can't be written.
    pub(super) fn save(
        self,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), CliError> {
        // Pipes and terminals can't be truncated.
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
    fn file_is_unchanged_until_saved() {
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

    #[test]
    fn result_cannot_replace_used_file() {
        let dir = std::env::temp_dir().join(format!("riser-in-use-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let at = |name: &str| dir.join(name);
        fs::write(at("disk"), "data").unwrap();
        fs::hard_link(at("disk"), at("same")).unwrap();
        let create = |csv: &str, log: &str, state: &str| {
            let args = ResultsArgs {
                csv: Some(at(csv)),
                hdr_log: Some(at(log)),
                ..ResultsArgs::default()
            };
            let used = |used: &mut FilesInUse| {
                used.add("the disk", &at("disk"));
                used.add("the state file", &at(state));
            };
            ResultFiles::create(&args, used).map(|_| ())
        };
        assert!(create("new.csv", "new.log", "state").is_ok());
        for (csv, log, state, what) in [
            ("same", "new.log", "state", "--csv"),
            ("same", "new.log", "state", "the disk"),
            ("new.csv", "new.csv", "state", "the file of --csv"),
            // Both files don't exist yet.
            ("fresh", "new.log", "fresh", "the state file"),
        ] {
            let error = create(csv, log, state).unwrap_err();
            assert_eq!(error.exit, Exit::Usage);
            assert!(error.what.contains(what), "{error}");
        }
        assert_eq!(fs::read(at("disk")).unwrap(), b"data");
        let null = ResultsArgs {
            csv: Some("/dev/null".into()),
            report: Some("/dev/null".into()),
            ..ResultsArgs::default()
        };
        assert!(ResultFiles::create(&null, |_| {}).is_ok());
        fs::remove_dir_all(dir).unwrap();
    }
}
