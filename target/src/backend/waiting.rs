//! Threads waiting for a file system that may never respond, by path and by open file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

/// Paths with a waiting thread, at most one per path, with the number of its mark.
static WAITING: LazyLock<Mutex<HashMap<PathBuf, u64>>> = LazyLock::new(Mutex::default);

/// Number of the next mark.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Marks a path with a waiting thread.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    path: PathBuf,
    number: u64,
}

impl Mark {
    /// Marks a path. Returns `None` if another thread is waiting for it.
    pub(super) fn set(path: &Path) -> Option<Self> {
        let mut waiting = waiting();
        if waiting.contains_key(path) {
            return None;
        }
        let (path, number) = (path.to_owned(), NEXT.fetch_add(1, Ordering::Relaxed));
        waiting.insert(path.clone(), number);
        Some(Self { path, number })
    }

    /// Removes the mark. This is called by the thread as well as by the receiver of its result. By
    /// then, another thread may be waiting.
    pub(super) fn clear(&self) {
        let mut waiting = waiting();
        if waiting.get(&self.path) == Some(&self.number) {
            waiting.remove(&self.path);
        }
    }
}

/// Removes a mark on drop.
#[derive(Debug)]
pub(super) struct Marked(pub(super) Mark);

impl Drop for Marked {
    fn drop(&mut self) {
        self.0.clear();
    }
}

/// Returns true if a thread is waiting for a path.
pub(super) fn is_waiting(path: &Path) -> bool {
    waiting().contains_key(path)
}

/// Updates cannot be partial, so ignore poisoning.
fn waiting() -> std::sync::MutexGuard<'static, HashMap<PathBuf, u64>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads waiting for a file system.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    control: AtomicBool,
    room: AtomicBool,
    undo: AtomicBool,
}

/// Purpose of a waiting thread.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    Control,
    Room,
    /// Revert changes on disk.
    Undo,
}

impl Waiting {
    pub(super) const fn of(&self, purpose: Purpose) -> &AtomicBool {
        match purpose {
            Purpose::Control => &self.control,
            Purpose::Room => &self.room,
            Purpose::Undo => &self.undo,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_clears_only_its_own_mark() {
        let path = Path::new("/marked");
        let first = Mark::set(path).unwrap();
        assert!(Mark::set(path).is_none());
        first.clear();
        let second = Mark::set(path).unwrap();
        first.clear();
        assert!(is_waiting(path));
        second.clear();
        assert!(!is_waiting(path));
    }
}
