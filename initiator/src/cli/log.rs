//! The log of this process.
//!
//! A line that cannot be written is lost. Nothing else may depend on the log: it may be on a full
//! file system, or behind a pipe without a reader.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::OFlags;
use tracing_subscriber::EnvFilter;

use super::args::Global;

/// Size at which a default log is rotated, in bytes. One older file is kept.
const ROTATE_SIZE: u64 = 1 << 20;

/// Starts logging to standard error, by default warnings. `rotated` is the path of standard error
/// if it is a file without an owner who limits its size.
pub(super) fn start(global: &Global, rotated: Option<&Path>) {
    let filter = chosen_filter(global);
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter.as_deref().unwrap_or("warn")))
        // The subscriber reports its own errors to standard error and panics if that fails too.
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

/// Filter that the command line selects, if any: `--log`, or the number of `-v` and `-q`.
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

/// Creates a log file, or truncates an existing one unless it must be new. It is opened for
/// appending, so that it can be truncated while it is in use.
///
/// # Errors
/// Errors of open(2).
pub(super) fn create(path: &Path, is_new: bool) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .create_new(is_new)
        .truncate(true)
        .custom_flags(OFlags::APPEND.bits().cast_signed())
        .open(path)
}

/// Removes a rotated log.
pub(super) fn remove(path: &Path) {
    let _ = fs::remove_file(path);
    let _ = fs::remove_file(older(path));
}

/// Path of the older file of a log.
fn older(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// A log file that is copied and truncated when it is full: standard error stays the same file.
struct RotatedLog {
    path: PathBuf,
    file: File,
    size: u64,
    limit: u64,
}

impl RotatedLog {
    /// The log that is standard error of this process.
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
            // Without space for the copy, the older lines are lost.
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
        // Where it cannot be copied, it is truncated all the same.
        log.path = dir.join("gone/1.log");
        log.write_all(line(1000).as_bytes()).unwrap();
        assert_eq!(text(&path), line(1000));
        remove(&path);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
        fs::remove_dir(&dir).unwrap();
    }
}
