//! Failed flushes of recoveries that no unit has recorded yet.
//!
//! The kernel reports a failed write-back once. A recovery may receive this error for a store that is
//! dropped, because opening it has timed out or a change was reverted. The next store of the file
//! must report the error, because its flushes succeed. There is at most one entry for each file. If
//! the process is killed before a unit has recorded the failure, it is lost.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::file_id::FileId;

/// Error numbers by file.
static LOST: Mutex<Vec<(FileId, i32)>> = Mutex::new(Vec::new());

/// Updates cannot be partial, so ignore poisoning.
fn lost() -> MutexGuard<'static, Vec<(FileId, i32)>> {
    LOST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds the failed flush of a recovery, if any. Returns the error number of the first failure that
/// was not recorded.
pub(super) fn add(file: FileId, failed: Option<i32>) -> Option<i32> {
    #[cfg(test)]
    let failed = injection::take(file).or(failed);
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

/// Failures of recoveries for tests.
#[cfg(test)]
pub(super) mod injection {
    use std::fs::File;
    use std::path::Path;
    use std::sync::Mutex;

    use super::FileId;

    static FAILING: Mutex<Vec<FileId>> = Mutex::new(Vec::new());

    /// The flush of the file's next recovery fails.
    pub(in crate::backend) fn fail_next_recovery(path: &Path) {
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
