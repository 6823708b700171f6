//! Locks between processes on this host. Waiting for a lock is logged, and has a timeout.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{major, minor};

/// Maximum time to wait for a lock, unless `--timeout` is specified. Locks are only held for a
/// short time.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// Time to wait for a lock before this is logged.
const SILENCE: Duration = Duration::from_secs(1);

/// Interval between two attempts.
const INTERVAL: Duration = Duration::from_millis(10);

/// Maximum number of characters to show for a command line.
const MAX_COMMAND: usize = 100;

/// Locks a file or directory until `file` is closed. If it has to wait for a long time, this is
/// logged to standard error.
///
/// # Errors
/// Fails with `TimedOut` if the lock is held by another process for longer than `patience`, and
/// otherwise with errors from `flock(2)`.
pub(super) fn lock(file: &File, path: &Path, patience: Duration) -> io::Result<()> {
    let begin = Instant::now();
    let mut is_said = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(TryLockError::Error(e)) => return Err(e),
        }
        let waited = begin.elapsed();
        // Log this first, because a process that was stopped for some time can exceed both limits
        // at once.
        if !is_said && waited >= SILENCE {
            is_said = true;
            let (path, holder) = (path.display(), holder(file));
            tracing::warn!("waiting for the lock of {path}, held by {holder}");
        }
        if waited >= patience {
            let what = format!("{} is locked by {}", path.display(), holder(file));
            return Err(io::Error::new(io::ErrorKind::TimedOut, what));
        }
        thread::sleep(INTERVAL);
    }
}

/// Describes the process that holds the lock on a file.
fn holder(file: &File) -> String {
    let pid = fs::read_to_string("/proc/locks")
        .ok()
        .zip(file.metadata().ok())
        .and_then(|(locks, meta)| find_holder(&locks, meta.dev(), meta.ino()));
    let Some(pid) = pid else {
        return "another process".into();
    };
    match command(pid) {
        Some(command) => format!("process {pid} ({command})"),
        None => format!("process {pid}"),
    }
}

/// Returns the process that holds a `flock(2)` lock on this file, using the contents of
/// `/proc/locks`:
///
/// ```text
/// 1: FLOCK  ADVISORY  WRITE 1234 00:19:567 0 EOF
/// 1: -> FLOCK  ADVISORY  WRITE 1235 00:19:567 0 EOF
/// ```
///
/// The second process is waiting. Device numbers are hexadecimal. Process IDs from other PID
/// namespaces are not valid here.
fn find_holder(locks: &str, dev: u64, ino: u64) -> Option<u32> {
    let file = format!("{:02x}:{:02x}:{ino}", major(dev), minor(dev));
    locks.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let is_lock = fields.next() == Some("FLOCK");
        let pid = fields.nth(2)?.parse().ok().filter(|pid| *pid > 0)?;
        (is_lock && fields.next() == Some(&file)).then_some(pid)
    })
}

/// Returns the printable command line of a process.
pub(super) fn command(pid: u32) -> Option<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let line = String::from_utf8_lossy(&line);
    let words = line.trim_end_matches('\0').replace('\0', " ");
    let shown: String = words
        .chars()
        .take(MAX_COMMAND)
        .map(|c| if c.is_control() { '?' } else { c })
        .collect();
    (!shown.is_empty()).then_some(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_holder_is_found() {
        let locks = "1: POSIX  ADVISORY  READ  5436 fd:01:1050095 1073741826 1073742335\n\
                     2: -> FLOCK  ADVISORY  WRITE 9 fd:01:77 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 0 fd:02:77 0 EOF\n\
                     4: FLOCK  ADVISORY  WRITE 1234 fd:01:77 0 EOF\n\
                     4: -> FLOCK  ADVISORY  WRITE 1235 fd:01:77 0 EOF\n\
                     5: OFDLCK ADVISORY  WRITE -1 fd:01:78 0 EOF\n";
        let at = |minor, ino| find_holder(locks, rustix::fs::makedev(0xfd, minor), ino);
        assert_eq!(at(1, 77), Some(1234));
        assert_eq!(at(2, 77), None);
        assert_eq!(at(1, 78), None);
        assert_eq!(at(1, 1_050_095), None);
    }
}
