//! Queries open backends with a timeout, because a file system might not respond.
//!
//! Each query of a file or device uses a separate thread. A backend has at most one thread each to
//! wait for the control plane, to measure its space, and to revert changes. While a thread is
//! waiting, other queries of the same kind fail immediately.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use riser_config::Spec;
use riser_file::OpenFile;

use super::open_error::OpenError;
use super::store::{Resized, Store};
use super::sys;
use super::threads::Entry;
use super::waiting::{Mark, Marked, Purpose};

/// Timeout for querying a file system about an open file.
const PATIENCE: Duration = Duration::from_secs(3);

/// Timeout for growing the files of a configuration, for all of them together, because this flushes
/// the data written by initiators.
const GROWTH: Duration = Duration::from_secs(20);

const _: () = assert!(PATIENCE.as_secs() < GROWTH.as_secs());

/// Maximum time for all queries about the files of a configuration.
pub(crate) const LONGEST: Duration = GROWTH.saturating_add(PATIENCE);

/// Blocks both kinds of queries until the sender is dropped.
#[cfg(test)]
pub(crate) fn hang(store: &Arc<Store>) -> std::sync::mpsc::Sender<()> {
    let (release, hangs) = channel::<()>();
    let hangs = Arc::new(Mutex::new(hangs));
    for purpose in [Purpose::Control, Purpose::Room] {
        let hangs = Arc::clone(&hangs);
        let wait = move |_: &Store| {
            let _ = hangs.lock().unwrap().recv();
        };
        Query::start(store, purpose, wait, |_| ()).unwrap();
    }
    release
}

/// A pending query.
#[derive(Debug)]
pub(crate) struct Query<T> {
    result: Receiver<T>,
    is_late: Arc<Mutex<bool>>,
}

/// Returns the deadline for queries started now.
pub(crate) fn until() -> Instant {
    Instant::now() + PATIENCE
}

/// Returns the deadline for growing files, starting now.
pub(crate) fn growth_until() -> Instant {
    Instant::now() + GROWTH
}

fn silent() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the file system does not respond")
}

impl<T: Send + 'static> Query<T> {
    /// Starts a query that calls `work`. After a timeout, `undo` reverts its changes.
    fn start(
        store: &Arc<Store>,
        purpose: Purpose,
        work: impl FnOnce(&Store) -> T + Send + 'static,
        undo: impl FnOnce(&Store) + Send + 'static,
    ) -> io::Result<Self> {
        let is_undone = store.waiting.of(Purpose::Undo).load(Ordering::Acquire);
        if matches!(purpose, Purpose::Control) && is_undone {
            return Err(silent());
        }
        if store.waiting.of(purpose).swap(true, Ordering::AcqRel) {
            return Err(silent());
        }
        let (sender, result) = channel();
        let is_late = Arc::new(Mutex::new(false));
        // A disk in memory responds immediately, and simulations don't wait for threads.
        if !store.may_hang() {
            let _ = sender.send(work(store));
            store.waiting.of(purpose).store(false, Ordering::Release);
            return Ok(Self { result, is_late });
        }
        let spawned = thread::Builder::new().name("look".into()).spawn({
            let entry = Entry::new(store.label().to_owned());
            let (store, is_late) = (Arc::clone(store), Arc::clone(&is_late));
            move || {
                let response = work(&store);
                let is_late = is_late.lock().unwrap_or_else(PoisonError::into_inner);
                if *is_late {
                    undo(&store);
                }
                // Do this before sending the result, because its receiver may start another query or
                // an upgrade.
                store.waiting.of(purpose).store(false, Ordering::Release);
                // This may close the file of a removed backend.
                drop(store);
                drop(entry);
                let _ = sender.send(response);
            }
        });
        match spawned {
            Ok(_) => Ok(Self { result, is_late }),
            Err(error) => {
                store.waiting.of(purpose).store(false, Ordering::Release);
                Err(error)
            }
        }
    }

    /// Returns the result.
    ///
    /// # Errors
    /// Returns an error with kind `TimedOut` if there is no result until this time.
    pub(crate) fn finish(self, until: Instant) -> io::Result<T> {
        let left = until.saturating_duration_since(Instant::now());
        match self.result.recv_timeout(left) {
            Ok(result) => Ok(result),
            Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("the query panicked")),
            Err(RecvTimeoutError::Timeout) => {
                let mut is_late = self.is_late.lock().unwrap_or_else(PoisonError::into_inner);
                // Check again, because the result may just have arrived.
                self.result.try_recv().map_err(|_| {
                    *is_late = true;
                    silent()
                })
            }
        }
    }
}

impl Store {
    fn unresponsive(&self, source: io::Error) -> OpenError {
        OpenError::Io {
            path: PathBuf::from(self.label()),
            action: "examine it",
            source,
        }
    }

    /// Measures the space and inspects the medium. If the space cannot be measured, the previous
    /// measurement is discarded. In this case, faults of the medium do not change.
    ///
    /// # Errors
    /// Returns file system errors, or an error with kind `TimedOut` if the file system is not
    /// responding.
    pub fn examine(self: &Arc<Self>) -> io::Result<()> {
        if self.open_file().is_none() {
            return Ok(());
        }
        let examine = |store: &Self| {
            let measured = store.measure_space();
            measured.and(store.inspect())
        };
        let query = Query::start(self, Purpose::Room, examine, |_| ());
        let result = query.and_then(|query| query.finish(until()));
        let is_silent = matches!(&result, Err(error) if error.kind() == io::ErrorKind::TimedOut);
        let mut silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        *silent = is_silent.then(|| silent.unwrap_or_else(Instant::now));
        drop(silent);
        result.inspect_err(|_| self.space.clear()).flatten()
    }

    /// Returns the time since when its file system has not responded to [`Store::examine`].
    #[must_use]
    pub fn silent_since(&self) -> Option<Instant> {
        *self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Measures the space of a file, or discards the last measurement if this fails.
    pub(super) fn measure_space(&self) -> io::Result<()> {
        match self.open_file() {
            Some(file) if file.device.is_none() => sys::space(&file.handle)
                .map(|space| self.space.set(space))
                .inspect_err(|_| self.space.clear()),
            _ => Ok(()),
        }
    }

    /// Same as [`Store::inspect_after_rescan`], on a separate thread.
    pub(crate) fn start_inspect(self: &Arc<Self>) -> io::Result<Query<io::Result<()>>> {
        Query::start(self, Purpose::Control, Self::inspect_after_rescan, |_| ())
    }

    /// Same as [`Store::measure`], on a separate thread.
    pub(crate) fn start_measure(
        self: &Arc<Self>,
    ) -> io::Result<Query<io::Result<Option<Resized>>>> {
        Query::start(self, Purpose::Control, Self::measure, |_| ())
    }

    /// Same as [`Store::check_reopen`], on a separate thread.
    pub(crate) fn start_reopen(
        self: &Arc<Self>,
        spec: &Spec,
    ) -> io::Result<Query<Result<(), OpenError>>> {
        let spec = spec.clone();
        let check = move |store: &Self| {
            // execve(2) waits for all threads to exit.
            let until = until();
            while store.waiting.of(Purpose::Room).load(Ordering::Acquire) {
                if Instant::now() >= until {
                    return Err(store.unresponsive(silent()));
                }
                thread::sleep(Duration::from_millis(5));
            }
            store.check_reopen(&spec)
        };
        Query::start(self, Purpose::Control, check, |_| ())
    }

    /// Opens the file and closes it again, on separate threads. After a flush failure is cleared,
    /// workers open the file for their flushes, and must not wait for a file system that does not
    /// respond.
    pub(crate) fn start_open_check(self: &Arc<Self>) -> io::Result<Query<()>> {
        let open = |store: &Self| {
            // An error of open(2) is returned by the next flush.
            if let Some(Ok(descriptor)) = store.open_file().map(OpenFile::reopen) {
                store.close_descriptor(descriptor);
            }
        };
        Query::start(self, Purpose::Control, open, |_| ())
    }

    /// Clears the log of changes after the last flush, on a separate thread. Returns `None` if the
    /// store has no log.
    pub(super) fn start_close(self: &Arc<Self>) -> Option<io::Result<Query<()>>> {
        let close = |store: &Self| store.close_intents(Instant::now());
        let has_log = self.intents.is_some();
        has_log.then(|| Query::start(self, Purpose::Control, close, |_| ()))
    }

    /// Same as [`Store::grow`], with a timeout. Changes made after `until` are reverted.
    ///
    /// # Errors
    /// Same as [`Store::grow`], or [`OpenError::Io`] with kind `TimedOut`.
    pub fn grow_in_time(
        self: &Arc<Self>,
        spec: &Spec,
        until: Instant,
    ) -> Result<Option<u64>, OpenError> {
        if self.open_file().is_none() {
            return self.grow(spec);
        }
        let spec = spec.clone();
        let grow = move |store: &Self| store.grow(&spec);
        Query::start(self, Purpose::Control, grow, Self::undo)
            .and_then(|query| query.finish(until))
            .map_err(|error| self.unresponsive(error))?
    }

    /// Same as [`Store::undo`], if there are any changes. The path cannot be opened again until
    /// this is done.
    pub(super) fn start_undo(self: &Arc<Self>) -> Option<io::Result<Query<()>>> {
        let marked = Mark::set(&self.changed_file()?).map(Marked);
        let undo = move |store: &Self| {
            store.undo();
            drop(marked);
        };
        Some(Query::start(self, Purpose::Undo, undo, |_| ()))
    }

    /// Returns the result of [`Store::start_reopen`].
    pub(crate) fn reopens(
        &self,
        query: io::Result<Query<Result<(), OpenError>>>,
        until: Instant,
    ) -> Result<(), OpenError> {
        query
            .and_then(|query| query.finish(until))
            .map_err(|error| self.unresponsive(error))?
    }
}

#[cfg(test)]
mod tests {
    use riser_testkit::{eventually, eventually_ok};

    use super::*;
    use crate::backend::threads::has_thread;
    use crate::backend::{Direct, Source, check_threads};

    /// Maximum time for a thread to exit after it was released.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn spec(path: PathBuf, size: u64) -> Spec {
        Spec {
            name: "disk".into(),
            source: Source::File {
                path,
                size: Some(size),
                create: true,
            },
            block_size: 512,
            direct: Direct::Off,
            write_cache: true,
            read_only: false,
            protection: None,
            faults: None,
        }
    }

    #[test]
    fn late_grow_blocks_one_thread_and_reverts() {
        let path = std::env::temp_dir().join(format!("riserd-look-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let store = Store::open(&spec(path.clone(), 1 << 20)).unwrap();
        store.keep();
        let larger = spec(path.clone(), 2 << 20);
        let (release, hangs) = channel::<()>();
        let grow = {
            let larger = larger.clone();
            move |store: &Store| {
                let _ = hangs.recv();
                store.grow(&larger).map(|_| ())
            }
        };
        let query = Query::start(&store, Purpose::Control, grow, Store::undo).unwrap();
        let soon = || Instant::now() + Duration::from_millis(20);
        let error = query.finish(soon()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // Another thread would also be blocked.
        assert!(store.start_measure().is_err() && store.start_reopen(&larger).is_err());
        let error = store.grow_in_time(&larger, growth_until()).unwrap_err();
        assert!(error.to_string().contains("does not respond"), "{error}");
        drop(release);
        eventually("the late one ends", PATIENCE, || {
            !store.waiting.of(Purpose::Control).load(Ordering::Acquire)
        });
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20, "undone");
        assert_eq!(
            store.grow_in_time(&larger, growth_until()).unwrap(),
            Some(2 << 20)
        );
        std::fs::remove_file(&path).unwrap();
    }

    /// `execve(2)` waits for the thread, also if the backend was removed.
    #[test]
    fn query_of_dropped_store_is_listed() {
        let path = std::env::temp_dir().join(format!("riserd-removed-{}", std::process::id()));
        let store = Store::open(&spec(path.clone(), 1 << 20)).unwrap();
        store.keep();
        let label = store.label().to_owned();
        let release = hang(&store);
        drop(store);
        assert!(has_thread(&label) && check_threads(Duration::ZERO).is_err());
        drop(release);
        eventually("the threads exit", PATIENCE, || !has_thread(&label));
        // Its file was closed before.
        drop(Store::open(&spec(path.clone(), 1 << 20)).unwrap());
        std::fs::remove_file(&path).unwrap();
    }

    /// An upgrade can start as soon as the result is received.
    #[test]
    fn thread_is_unlisted_before_result() {
        let path = std::env::temp_dir().join(format!("riserd-listed-{}", std::process::id()));
        let store = Store::open(&spec(path, 1 << 20)).unwrap();
        for _ in 0..200 {
            let query = store.start_measure().unwrap();
            query.finish(Instant::now() + PATIENCE).unwrap().unwrap();
            assert!(!has_thread(store.label()));
        }
        store.undo();
    }

    #[test]
    fn failed_measurement_discards_space() {
        let path = std::env::temp_dir().join(format!("riserd-room-{}", std::process::id()));
        let store = Store::open(&spec(path.clone(), 1 << 20)).unwrap();
        store.examine().unwrap();
        assert!(store.space().is_some());
        let release = hang(&store);
        assert!(store.examine().is_err());
        assert_eq!(store.space(), None);
        drop(release);
        eventually_ok("the room is measured", PATIENCE, || store.examine());
        assert!(store.space().is_some());
        store.undo();
    }
}
