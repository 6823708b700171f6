//! Failed flushes of recoveries that no unit has recorded yet.
//!
//! The kernel reports a failed write-back once. A recovery may receive this error for a store that is
//! dropped, because opening it has timed out or a change was reverted. The next store of the file
//! must report the error, because its flushes succeed. There is at most one entry for each file. If
//! the process is killed before a unit has recorded the failure, it is lost.

#[cfg(test)]
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::file_id::FileId;

/// Error numbers by file.
static LOST: Mutex<Vec<(FileId, i32)>> = Mutex::new(Vec::new());

/// Files for which the flush of the next recovery fails.
#[cfg(test)]
pub(super) static FAILING_RECOVERIES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Updates cannot be partial, so ignore poisoning.
fn lost() -> MutexGuard<'static, Vec<(FileId, i32)>> {
    LOST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds the failed flush of a recovery, if any. Returns the error number of the first failure that
/// was not recorded.
pub(super) fn add(file: FileId, failed: Option<i32>) -> Option<i32> {
    let mut lost = lost();
    if let Some((_, errno)) = lost.iter().find(|(of, _)| *of == file) {
        return Some(*errno);
    }
    lost.extend(failed.map(|errno| (file, errno)));
    failed
}

/// Called when the failure was recorded for a unit.
pub(super) fn remove(file: FileId) {
    lost().retain(|(of, _)| *of != file);
}
