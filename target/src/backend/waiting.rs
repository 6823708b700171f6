//! Threads that wait for a file system, which may never answer: at which paths, and at which open
//! files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

/// Paths that a thread waits for, one for each at most, with the number of the thread's mark.
static WAITING: LazyLock<Mutex<HashMap<PathBuf, u64>>> = LazyLock::new(Mutex::default);

/// The number of the next mark.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A thread waits for a path.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    path: PathBuf,
    number: u64,
}

impl Mark {
    /// `None` if another thread waits for it.
    pub(super) fn set(path: &Path) -> Option<Self> {
        let mut waiting = waiting();
        if waiting.contains_key(path) {
            return None;
        }
        let (path, number) = (path.to_owned(), NEXT.fetch_add(1, Ordering::Relaxed));
        waiting.insert(path.clone(), number);
        Some(Self { path, number })
    }

    /// It does no longer. Both the thread and the one that has its result say so; another thread
    /// may wait by then.
    pub(super) fn clear(&self) {
        let mut waiting = waiting();
        if waiting.get(&self.path) == Some(&self.number) {
            waiting.remove(&self.path);
        }
    }
}

/// Clears a mark in the end.
#[derive(Debug)]
pub(super) struct Marked(pub(super) Mark);

impl Drop for Marked {
    fn drop(&mut self) {
        self.0.clear();
    }
}

/// Returns true if a thread waits for a path. As long as it does, this program cannot be replaced
/// by another one.
pub(super) fn is_waiting(path: &Path) -> bool {
    waiting().contains_key(path)
}

/// Every change of the set is whole, so poison is ignored.
fn waiting() -> std::sync::MutexGuard<'static, HashMap<PathBuf, u64>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads that wait for a file system.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    control: AtomicBool,
    room: AtomicBool,
    undo: AtomicBool,
}

/// For what a thread waits.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    Control,
    Room,
    /// To take back what others have done.
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
    fn a_thread_that_ends_clears_no_mark_but_its_own() {
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
