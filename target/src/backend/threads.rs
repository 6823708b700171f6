//! Threads that access or close files of backends.
//!
//! The kernel may write back all cached data when a file or device is closed. This and all other
//! system calls can take minutes, or forever if the device or the server of the file system does not
//! respond. `execve(2)` waits for all threads to exit, so we keep a list of these threads, also for
//! backends that were removed from the configuration. A store that is dropped lists the thread that
//! closes its file.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use riser_reactor::Threads;

/// Polling interval of [`check_threads`].
const POLL: Duration = Duration::from_millis(1);

/// An active thread.
#[derive(Debug)]
struct Active {
    /// Label of the backend.
    label: String,
    since: Instant,
    /// It opens the backend, which is not served yet.
    is_opening: bool,
}

/// Active threads by number.
static ACTIVE: LazyLock<Mutex<BTreeMap<u64, Active>>> = LazyLock::new(Mutex::default);

/// Number of the next thread.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Updates cannot be partial, so ignore poisoning.
fn active() -> MutexGuard<'static, BTreeMap<u64, Active>> {
    ACTIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the label of the backend with the oldest thread, and its start time. Until it exits, this
/// program cannot be replaced by another one.
pub(crate) fn oldest_thread() -> Option<(String, Instant)> {
    let active = active();
    let (_, thread) = active.first_key_value()?;
    Some((thread.label.clone(), thread.since))
}

/// Returns whether a backend with this label has a thread, except for a thread that opens it.
pub(super) fn has_thread(label: &str) -> bool {
    let active = active();
    let mut threads = active.values();
    threads.any(|thread| thread.label == label && !thread.is_opening)
}

/// Waits up to `patience` for all threads to exit. Otherwise, `execve(2)` would block until they
/// exit, no matter how long this takes.
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`] with the label of a backend that is still being accessed.
pub(crate) fn check_threads(patience: Duration) -> io::Result<()> {
    let until = Instant::now() + patience;
    while let Some((label, _)) = oldest_thread() {
        if Instant::now() >= until {
            let why = format!("a thread is still accessing {label}");
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// An entry of [`ACTIVE`].
#[derive(Debug)]
pub(crate) struct Entry(u64);

impl Entry {
    /// Adds a thread of this backend. Before it drops the entry, the thread must drop its files or
    /// pass them to another thread.
    pub(super) fn new(label: String) -> Self {
        Self::add(label, false)
    }

    /// Same as [`Self::new`], for the thread that opens the backend.
    pub(super) fn opening(label: String) -> Self {
        Self::add(label, true)
    }

    fn add(label: String, is_opening: bool) -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let thread = Active {
            label,
            since: Instant::now(),
            is_opening,
        };
        active().insert(number, thread);
        Self(number)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        active().remove(&self.0);
    }
}

/// Files to be closed. The fields are dropped in this order.
struct Closing<T> {
    _files: T,
    _entry: Entry,
}

/// Drops the files of a backend on a separate thread, or on this thread if none can be started.
pub(crate) fn close<T: Send + 'static>(threads: &dyn Threads, label: String, files: T) {
    let closing = Closing {
        _files: files,
        _entry: Entry::new(label.clone()),
    };
    if let Err(error) = threads.spawn("close", Box::new(move || drop(closing))) {
        tracing::warn!(backend = label, %error, "cannot start a thread to close a file");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use riser_reactor::simulated;

    use super::*;

    #[test]
    fn files_are_closed_by_thread() {
        let (threads, file) = (simulated::Threads::default(), Arc::new(()));
        close(&threads, "/closed".into(), Arc::clone(&file));
        assert!(has_thread("/closed") && oldest_thread().is_some());
        assert_eq!(Arc::strong_count(&file), 2);
        let error = check_threads(Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        let [thread] = threads.runnable()[..] else {
            panic!("no thread was started");
        };
        assert!(threads.step(thread));
        assert_eq!(Arc::strong_count(&file), 1);
        assert!(!has_thread("/closed"));
        // Another test may also close a file.
        check_threads(Duration::from_secs(60)).unwrap();
    }
}
