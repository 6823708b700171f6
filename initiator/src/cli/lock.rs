//! Locks between the processes of this host. A wait for one is logged, and has a time limit.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{major, minor};

/// Longest wait for a lock, unless `--timeout` is given. Work under one takes no time.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// Wait for a lock after which it is logged.
const SILENCE: Duration = Duration::from_secs(1);

/// Interval between two attempts.
const INTERVAL: Duration = Duration::from_millis(10);

/// Longest part of a command line that is shown, in characters.
const MAX_COMMAND: usize = 100;

/// Locks a file or directory that is open as `file`, until that is closed. Says on standard error
/// what it waits for, where that takes long.
///
/// # Errors
/// `TimedOut` if another process has it for as long as `patience`; otherwise those of `flock(2)`.
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
        // First the notice: a process that was stopped for a while has passed both times at once.
        if !is_said && waited >= SILENCE {
            is_said = true;
            let (path, holder) = (path.display(), holder(file));
            tracing::warn!("waiting for the lock of {path}, which {holder} holds");
        }
        if waited >= patience {
            let what = format!("{} is locked by {}", path.display(), holder(file));
            return Err(io::Error::new(io::ErrorKind::TimedOut, what));
        }
        thread::sleep(INTERVAL);
    }
}

/// The process that has locked a file, in words.
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

/// The process that a lock of `flock(2)` on this file belongs to, from the text of `/proc/locks`:
///
/// ```text
/// 1: FLOCK  ADVISORY  WRITE 1234 00:19:567 0 EOF
/// 1: -> FLOCK  ADVISORY  WRITE 1235 00:19:567 0 EOF
/// ```
///
/// The second one waits. The device's numbers are hexadecimal. A process of another PID namespace
/// has no number here that means anything.
fn find_holder(locks: &str, dev: u64, ino: u64) -> Option<u32> {
    let file = format!("{:02x}:{:02x}:{ino}", major(dev), minor(dev));
    locks.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let is_lock = fields.next() == Some("FLOCK");
        let pid = fields.nth(2)?.parse().ok().filter(|pid| *pid > 0)?;
        (is_lock && fields.next() == Some(&file)).then_some(pid)
    })
}

/// The command line of a process, printable.
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
    fn the_holder_of_a_lock_is_found() {
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
