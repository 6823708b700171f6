//! Logging for this process.
//!
//! If a line can't be written, it's lost. This must not affect anything else, as the log may be on
//! a file system that is full, or a pipe without a reader.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::OFlags;
use tracing_subscriber::EnvFilter;

use super::args::Global;

/// Size in bytes at which a default log is rotated. A single older file is kept.
const ROTATE_SIZE: u64 = 1 << 20;

/// Starts logging to standard error, with warnings as the default level. If standard error is a
/// file that has to be rotated by us, `rotated` is its path.
pub(super) fn start(global: &Global, rotated: Option<&Path>) {
    let filter = chosen_filter(global);
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter.as_deref().unwrap_or("warn")))
        // By default, internal errors are also written to standard error, and this panics if it
        // fails.
        .log_internal_errors(false);
    let log = rotated.and_then(|path| RotatedLog::on_stderr(path).ok());
    match log {
        Some(log) => builder.with_ansi(false).with_writer(Mutex::new(log)).init(),
        None => builder
            .with_writer(io::stderr)
            .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
            .init(),
    }
}

/// Returns the filter selected by the command line: `--log`, or the number of `-v` and `-q`
/// options.
pub(super) fn chosen_filter(global: &Global) -> Option<String> {
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

/// Creates a log file, or truncates an existing file unless `is_new` is set. It's opened for
/// appending, so that it can be truncated while it is in use.
///
/// # Errors
/// Returns errors from open(2).
pub(super) fn create(path: &Path, is_new: bool) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .create_new(is_new)
        .truncate(true)
        .custom_flags(OFlags::APPEND.bits().cast_signed())
        .open(path)
}

/// Removes a log and its older file.
pub(super) fn remove(path: &Path) {
    let _ = fs::remove_file(path);
    let _ = fs::remove_file(older(path));
}

/// Returns the path of the older file of a log.
fn older(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// A log file that is copied and truncated when it's full. Standard error is always the same file.
struct RotatedLog {
    path: PathBuf,
    file: File,
    size: u64,
    limit: u64,
}

impl RotatedLog {
    /// Opens the log file that is already used as standard error of this process.
    fn on_stderr(path: &Path) -> io::Result<Self> {
        let file = File::from(rustix::io::dup(io::stderr())?);
        Ok(Self {
            path: path.to_owned(),
            size: file.metadata()?.len(),
            file,
            limit: ROTATE_SIZE,
        })
    }
}

impl Write for RotatedLog {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.size.saturating_add(line.len() as u64) > self.limit {
            // If there isn't enough space for the copy, older lines are lost.
            let _ = fs::copy(&self.path, older(&self.path));
            self.file.set_len(0)?;
            self.size = 0;
        }
        let written = self.file.write(line)?;
        self.size += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotated_log_keeps_two_bounded_files() {
        let dir = std::env::temp_dir().join(format!("riser-log-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let path = dir.join("1.log");
        let mut log = RotatedLog {
            file: create(&path, true).unwrap(),
            path: path.clone(),
            size: 0,
            limit: 100,
        };
        let exists = create(&path, true).unwrap_err();
        assert_eq!(exists.kind(), io::ErrorKind::AlreadyExists);
        let line = |n: u32| format!("line {n:04}\n");
        for n in 0..1000 {
            log.write_all(line(n).as_bytes()).unwrap();
        }
        let text = |path: &Path| fs::read_to_string(path).unwrap();
        assert_eq!(text(&path), (990..1000).map(line).collect::<String>());
        assert_eq!(
            text(&older(&path)),
            (980..990).map(line).collect::<String>()
        );
        // If the file can't be copied, it's still truncated.
        log.path = dir.join("gone/1.log");
        log.write_all(line(1000).as_bytes()).unwrap();
        assert_eq!(text(&path), line(1000));
        remove(&path);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
        fs::remove_dir(&dir).unwrap();
    }
}
