//! Opening backends without waiting for ever: a file system that does not answer, such as a network share
//! whose server is gone, must not stop what opens one.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::ram::Ram;
use super::store::{OpenError, Source, Spec, Store};

/// How long opening may take; more than the time for which a lock is waited for.
const PATIENCE: Duration = Duration::from_secs(8);

/// Paths that a thread waits for, one for each at most.
static WAITING: LazyLock<Mutex<HashSet<PathBuf>>> = LazyLock::new(Mutex::default);

/// As [`Store::open_with`], for eight seconds at most. What is opened later is closed again, and as long as
/// that has not happened, further attempts at the same path fail at once.
///
/// # Errors
/// Those of [`Store::open_with`]; [`OpenError::Io`] of kind `TimedOut`.
pub fn open_in_time(spec: &Spec, ram: Arc<Ram>) -> Result<Arc<Store>, OpenError> {
    let (Source::File { path, .. } | Source::Device { path }) = &spec.source else {
        return Store::open_with(spec, ram);
    };
    let path = path.clone();
    open_within(PATIENCE, &path, {
        let spec = spec.clone();
        move || Store::open_with(&spec, ram)
    })
}

fn open_within(
    patience: Duration,
    path: &Path,
    open: impl FnOnce() -> Result<Arc<Store>, OpenError> + Send + 'static,
) -> Result<Arc<Store>, OpenError> {
    let failed = |action, source| OpenError::Io {
        path: path.to_owned(),
        action,
        source,
    };
    let late = || {
        let why = "the file system does not answer";
        failed("open it", io::Error::new(io::ErrorKind::TimedOut, why))
    };
    if !waiting().insert(path.to_owned()) {
        return Err(late());
    }
    let (sender, opened) = channel();
    let is_late = Arc::new(Mutex::new(false));
    let spawned = thread::Builder::new().name("open".into()).spawn({
        let (path, is_late) = (path.to_owned(), Arc::clone(&is_late));
        move || {
            let result = open();
            let is_late = is_late.lock().unwrap_or_else(PoisonError::into_inner);
            match (*is_late, result) {
                (false, result) => drop(sender.send(result)),
                // As if it had not been opened.
                (true, Ok(store)) => store.undo(),
                (true, Err(_)) => {}
            }
            waiting().remove(&path);
        }
    });
    if let Err(error) = spawned {
        waiting().remove(path);
        return Err(failed("start a thread for it", error));
    }
    match opened.recv_timeout(patience) {
        Ok(result) => {
            // The thread is about to do so.
            waiting().remove(path);
            result
        }
        Err(RecvTimeoutError::Timeout) => {
            let mut is_late = is_late.lock().unwrap_or_else(PoisonError::into_inner);
            // It may have come in this very moment.
            opened.try_recv().unwrap_or_else(|_| {
                *is_late = true;
                Err(late())
            })
        }
        Err(RecvTimeoutError::Disconnected) => {
            waiting().remove(path);
            Err(failed("open it", io::Error::other("opening it panicked")))
        }
    }
}

/// Every change of the set is whole, so poison is ignored.
fn waiting() -> std::sync::MutexGuard<'static, HashSet<PathBuf>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Direct;

    #[test]
    fn a_file_system_that_does_not_answer_is_given_up_and_tried_again() {
        let name = format!("riserd-opening-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let spec = Spec {
            source: Source::File {
                path: path.clone(),
                size: Some(1 << 20),
                create: true,
            },
            block_size: 512,
            direct: Direct::Off,
            write_cache: true,
            read_only: false,
            faults: None,
        };
        let (release, hangs) = channel::<()>();
        let open = {
            let spec = spec.clone();
            move || {
                let _ = hangs.recv();
                Store::open_with(&spec, Arc::default())
            }
        };
        let error = open_within(Duration::from_millis(50), &path, open).unwrap_err();
        assert!(error.to_string().contains("does not answer"), "{error}");
        // Another thread for the same path would hang as well.
        let again = || panic!("a second thread");
        let error = open_within(PATIENCE, &path, again).unwrap_err();
        assert!(error.to_string().contains("does not answer"), "{error}");
        release.send(()).unwrap();
        while waiting().contains(&path) {
            thread::sleep(Duration::from_millis(1));
        }
        // What the late one has created is gone, its lock as well, and it can be opened.
        let store = open_in_time(&spec, Arc::default()).unwrap();
        assert_eq!(store.capacity(), 1 << 20);
        store.undo();
        assert!(!path.exists());
    }
}
