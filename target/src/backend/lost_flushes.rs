//! Failed flushes of recoveries that no unit has recorded yet.
//!
//! The kernel reports a failed write-back once. A recovery may receive this error for a store that is
//! dropped, because opening it has timed out or a change was reverted. The next store of the file
//! must report the error, because its flushes succeed. There is at most one entry for each file. A
//! shutdown saves the failure for the unit of the file. If the process is killed before a unit has
//! recorded the failure, or if its start fails, the failure is lost.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::file_id::FileId;

/// A failed flush that no unit has recorded.
#[derive(Clone, Debug)]
pub(crate) struct LostFlush {
    file: FileId,
    /// Path of the file when it was opened.
    pub(crate) path: PathBuf,
    pub(crate) errno: i32,
}

static LOST: Mutex<Vec<LostFlush>> = Mutex::new(Vec::new());

/// Updates cannot be partial, so ignore poisoning.
fn lost() -> MutexGuard<'static, Vec<LostFlush>> {
    LOST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds the failed flush of a recovery, if any. Returns the error number of the first failure that
/// was not recorded.
pub(super) fn add(file: FileId, path: &Path, failed: Option<i32>) -> Option<i32> {
    #[cfg(test)]
    let failed = injection::take(file).or(failed);
    let mut lost = lost();
    if let Some(found) = lost.iter().find(|found| found.file == file) {
        return Some(found.errno);
    }
    lost.extend(failed.map(|errno| LostFlush {
        file,
        path: path.to_owned(),
        errno,
    }));
    failed
}

/// Called when the failure was recorded for a unit.
pub(super) fn remove(file: FileId) {
    lost().retain(|found| found.file != file);
}

/// Returns all failed flushes that no unit has recorded.
pub(crate) fn lost_flushes() -> Vec<LostFlush> {
    lost().clone()
}

/// Failures of recoveries for tests.
#[cfg(test)]
pub(crate) mod injection {
    use std::fs::File;
    use std::path::Path;
    use std::sync::Mutex;

    use super::FileId;

    static FAILING: Mutex<Vec<FileId>> = Mutex::new(Vec::new());

    /// The flush of the file's next recovery fails.
    pub(crate) fn fail_next_recovery(path: &Path) {
        let file = FileId::of(&File::open(path).unwrap()).unwrap();
        FAILING.lock().unwrap().push(file);
    }

    pub(super) fn take(file: FileId) -> Option<i32> {
        let mut failing = FAILING.lock().unwrap();
        let at = failing.iter().position(|failing| *failing == file)?;
        failing.swap_remove(at);
        Some(libc::EIO)
    }
}
