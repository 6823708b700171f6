//! Closes files of backends on separate threads.
//!
//! The kernel may write back all cached data when a file or device is closed. This can take minutes,
//! or forever if the device or the server of the file system does not respond.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use riser_reactor::Threads;

/// Polling interval of [`check_closed`].
const POLL: Duration = Duration::from_millis(1);

/// Active threads by number, with the label of the backend and their start time.
static CLOSING: LazyLock<Mutex<BTreeMap<u64, (String, Instant)>>> = LazyLock::new(Mutex::default);

/// Number of the next thread.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Updates cannot be partial, so ignore poisoning.
fn closing() -> MutexGuard<'static, BTreeMap<u64, (String, Instant)>> {
    CLOSING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the label of the backend whose file is being closed for the longest time, and its start
/// time. Until it is closed, this program cannot be replaced by another one.
pub(crate) fn oldest_closing() -> Option<(String, Instant)> {
    closing().first_key_value().map(|(_, entry)| entry.clone())
}

/// Waits up to `patience` until no file is being closed. Otherwise, `execve(2)` would block until
/// they are closed, no matter how long this takes.
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`] with the label of the backend that is still being closed.
pub(crate) fn check_closed(patience: Duration) -> io::Result<()> {
    let until = Instant::now() + patience;
    while let Some((label, _)) = oldest_closing() {
        if Instant::now() >= until {
            let why = format!("a file of {label} is still being closed");
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// An entry of [`CLOSING`].
struct Entry(u64);

impl Drop for Entry {
    fn drop(&mut self) {
        closing().remove(&self.0);
    }
}

/// Files to be closed. The fields are dropped in this order.
struct Closing<T> {
    _files: T,
    _entry: Entry,
}

/// Drops the files of a backend on a separate thread, or on this thread if none can be started.
pub(crate) fn close<T: Send + 'static>(threads: &dyn Threads, label: String, files: T) {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    closing().insert(number, (label.clone(), Instant::now()));
    let closing = Closing {
        _files: files,
        _entry: Entry(number),
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
        let is_listed = || closing().values().any(|(label, _)| label == "/closed");
        close(&threads, "/closed".into(), Arc::clone(&file));
        assert!(is_listed() && oldest_closing().is_some());
        assert_eq!(Arc::strong_count(&file), 2);
        let error = check_closed(Duration::ZERO).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        let [thread] = threads.runnable()[..] else {
            panic!("no thread was started");
        };
        assert!(threads.step(thread));
        assert_eq!(Arc::strong_count(&file), 1);
        assert!(!is_listed());
        // Another test may also close a file.
        check_closed(Duration::from_secs(60)).unwrap();
    }
}
