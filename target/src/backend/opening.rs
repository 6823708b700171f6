//! Opens backends with a timeout, because a file system that is not responding, such as a network
//! share with an unavailable server, must not block the caller.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use riser_config::{Source, Spec};

use super::open_error::OpenError;
use super::query;
use super::store::Store;
use super::threads::Entry;
use super::waiting::Mark;
use crate::patience;

/// Time to collect the results for fast file systems.
const MOMENT: Duration = Duration::from_millis(100);

/// Timeout for opening a backend. This is longer than the time to wait for a lock.
const PATIENCE: Duration = Duration::from_secs(8);

/// A file or device to open.
#[derive(Clone, Debug)]
pub struct OpenRequest {
    /// Name of the backend in the configuration.
    pub backend: String,
    /// Specification of the backend.
    pub spec: Spec,
    /// Wait for a lock of another process.
    pub is_patient: bool,
    /// The file existed before, so it is not created if it is missing, because its file system may
    /// not be mounted.
    pub is_known: bool,
}

/// Open stores by backend name. If a store is not taken, it is closed and all changes are reverted.
#[derive(Debug, Default)]
pub struct OpenedStores(BTreeMap<String, (Spec, Result<Arc<Store>, OpenError>)>);

impl OpenedStores {
    /// Returns true if this backend is open.
    #[must_use]
    pub fn has(&self, backend: &str, spec: &Spec) -> bool {
        let opened = self.0.get(backend);
        opened.is_some_and(|(opened_spec, result)| opened_spec == spec && result.is_ok())
    }

    /// Returns true if there is a result or an error for this backend.
    pub(crate) fn has_result(&self, backend: &str, spec: &Spec) -> bool {
        self.0
            .get(backend)
            .is_some_and(|(opened_spec, _)| opened_spec == spec)
    }

    /// Returns the names and paths of missing backends. This excludes existing backends that cannot
    /// be served.
    pub(crate) fn missing(&self) -> Vec<(String, PathBuf)> {
        let all = self.0.iter();
        let missing = all.filter(|(_, (_, result))| {
            let error = result.as_ref().err();
            error.is_some_and(OpenError::is_missing)
        });
        missing
            .filter_map(|(name, (spec, _))| Some((name.clone(), spec.source.path()?.to_owned())))
            .collect()
    }

    /// Adds the result of opening a backend, for example of a simulation ([`Store::on_disk`]).
    pub fn insert(&mut self, backend: &str, spec: &Spec, result: Result<Arc<Store>, OpenError>) {
        let opened = (spec.clone(), result);
        self.0.insert(backend.to_owned(), opened);
    }

    /// Adds all results of `others`.
    pub(crate) fn extend(&mut self, mut others: Self) {
        self.0.append(&mut others.0);
    }

    /// Removes the result of opening a backend, if its specification is the same.
    pub fn take_result(
        &mut self,
        backend: &str,
        spec: &Spec,
    ) -> Option<Result<Arc<Store>, OpenError>> {
        let (opened_spec, _) = self.0.get(backend)?;
        if opened_spec != spec {
            return None;
        }
        self.0.remove(backend).map(|(_, result)| result)
    }
}

impl Drop for OpenedStores {
    fn drop(&mut self) {
        let results = self.0.values().map(|(_, result)| result.as_ref());
        undo_all(results.filter_map(Result::ok));
    }
}

/// Reverts the changes made on disk when opening or growing backends. Waits up to several seconds
/// for this.
pub fn undo_all<'a>(stores: impl Iterator<Item = &'a Arc<Store>>) {
    let until = query::until();
    let queries: Vec<_> = stores.filter_map(Store::start_undo).collect();
    for query in queries {
        if let Err(error) = query.and_then(|query| query.finish(until)) {
            tracing::warn!(%error, "cannot restore the size of a file yet");
        }
    }
}

/// Clears the logs of changes after all stores were flushed. Waits up to several seconds for this.
/// Otherwise, the next start checks the protection information of the last writes.
pub(crate) fn close_all<'a>(stores: impl Iterator<Item = &'a Arc<Store>>) {
    let until = query::until();
    let queries: Vec<_> = stores.filter_map(Store::start_close).collect();
    for query in queries {
        if let Err(error) = query.and_then(|query| query.finish(until)) {
            tracing::debug!(%error, "cannot clear the log of changes");
        }
    }
}

/// Opens all backends concurrently with [`Store::open`], for up to eight seconds. If opening a
/// backend takes longer, it is closed again afterwards, and until then any other attempt for the
/// same path fails immediately.
///
/// # Errors
/// For each backend, returns the errors of [`Store::open`], [`OpenError::Io`] with kind `TimedOut`,
/// or [`OpenError::Gone`].
pub fn open_all(open_requests: Vec<OpenRequest>) -> OpenedStores {
    let mut round = Round::start(open_requests);
    let mut all = OpenedStores::default();
    while !round.is_over() {
        round.gather(PATIENCE, &mut all);
    }
    all
}

/// Same as [`open_all`], but does not wait for a file system that is not responding. `take` is
/// called with the results available after a short time, which may be empty, and again for any
/// later results.
pub fn open_each(open_requests: Vec<OpenRequest>, take: impl FnMut(OpenedStores)) {
    Round::start(open_requests).for_each(take);
}

/// Backends being opened.
struct Round {
    /// Pending operations by path, with their deadlines.
    openings: BTreeMap<PathBuf, (OpenRequest, Opening, Instant)>,
    /// Requests waiting for another pending operation with the same path.
    doubled: Vec<OpenRequest>,
    /// Requests that could not be started.
    failed: Vec<(OpenRequest, OpenError)>,
    wake: Sender<()>,
    woken: Receiver<()>,
}

impl Round {
    fn start(open_requests: Vec<OpenRequest>) -> Self {
        let (wake, woken) = channel();
        let mut round = Self {
            openings: BTreeMap::new(),
            doubled: open_requests,
            failed: Vec::new(),
            wake,
            woken,
        };
        round.start_more();
        round
    }

    /// Starts all requests without another pending operation for the same path. Afterwards the
    /// first one has the lock, or both fail with the same error.
    fn start_more(&mut self) {
        for wish in std::mem::take(&mut self.doubled) {
            let Some(path) = wish.spec.source.path().map(Path::to_owned) else {
                continue;
            };
            // If both are started, they compete for the lock, and each might fail because of the
            // other one.
            if self.openings.contains_key(&path) {
                self.doubled.push(wish);
                continue;
            }
            let open = {
                let wish = wish.clone();
                move || wish.grant()
            };
            match Opening::start(&path, self.wake.clone(), open) {
                Ok(opening) => {
                    // Each request has a separate deadline, because it may have waited for another
                    // operation with the same path.
                    let until = Instant::now() + PATIENCE;
                    self.openings.insert(path, (wish, opening, until));
                }
                Err(error) => self.failed.push((wish, error)),
            }
        }
    }

    fn for_each(mut self, mut take: impl FnMut(OpenedStores)) {
        let mut is_first = true;
        while is_first || !self.is_over() {
            let mut opened = OpenedStores::default();
            self.gather(MOMENT, &mut opened);
            if is_first || !opened.0.is_empty() {
                take(opened);
            }
            is_first = false;
        }
    }

    fn is_over(&self) -> bool {
        self.openings.is_empty() && self.failed.is_empty()
    }

    /// Collects the results available until `time` has elapsed. Returns early if nothing is
    /// pending.
    fn gather(&mut self, time: Duration, all: &mut OpenedStores) {
        let end = Instant::now() + time;
        loop {
            self.take_finished(all);
            let now = Instant::now();
            if self.is_over() || now >= end {
                return;
            }
            let late = self.openings.values().map(|(.., until)| *until);
            // Also wake up for timeouts, which aren't reported by a thread.
            let next = late.fold(end, Instant::min);
            // Woken when any operation completes.
            let _ = self.woken.recv_timeout(next.saturating_duration_since(now));
        }
    }

    fn take_finished(&mut self, all: &mut OpenedStores) {
        let now = Instant::now();
        let finished = self.openings.iter_mut().filter_map(|(path, one)| {
            let (_, opening, until) = one;
            (opening.has_arrived() || now >= *until).then(|| path.clone())
        });
        for path in finished.collect::<Vec<_>>() {
            if let Some((wish, opening, until)) = self.openings.remove(&path) {
                let result = opening.finish(&path, until);
                all.0.insert(wish.backend, (wish.spec, result));
            }
        }
        // These paths are available now, so start the requests waiting for them.
        self.start_more();
        for (wish, error) in self.failed.drain(..) {
            all.0.insert(wish.backend, (wish.spec, Err(error)));
        }
    }
}

/// Opens a single backend in the same way, including RAM disks and null devices. A missing file
/// with `is_known` is not created.
///
/// # Errors
/// Same as [`open_all`].
pub fn open_in_time(spec: &Spec, is_known: bool) -> Result<Arc<Store>, OpenError> {
    let wish = OpenRequest {
        backend: String::new(),
        spec: spec.clone(),
        is_patient: true,
        is_known,
    };
    let opened = open_all(vec![wish]).take_result("", spec);
    opened.unwrap_or_else(|| Store::open(spec))
}

impl OpenRequest {
    fn grant(&self) -> Result<Arc<Store>, OpenError> {
        if let (true, Source::File { path, .. }) = (self.is_known, &self.spec.source)
            && let Err(error) = std::fs::metadata(path)
            && error.kind() == io::ErrorKind::NotFound
        {
            return Err(OpenError::Gone { path: path.clone() });
        }
        match self.is_patient {
            // Only when starting or changing the configuration, because a previous daemon may still
            // have the lock. Otherwise this will be retried anyway.
            true => Store::open(&self.spec),
            false => patience::at_once(|| Store::open(&self.spec)),
        }
    }
}

/// A thread that opens a backend.
struct Opening {
    mark: Mark,
    result: Receiver<Result<Arc<Store>, OpenError>>,
    /// The result, if it was already received.
    arrived: Option<Result<Arc<Store>, OpenError>>,
    is_late: Arc<Mutex<bool>>,
}

/// Sends a message when a thread exits.
struct Waker(Sender<()>);

impl Drop for Waker {
    fn drop(&mut self) {
        // The receiver may have timed out.
        let _ = self.0.send(());
    }
}

fn failed(path: &Path, action: &'static str, source: io::Error) -> OpenError {
    OpenError::Io {
        path: path.to_owned(),
        action,
        source,
    }
}

fn late(path: &Path) -> OpenError {
    let why = "the file system does not respond";
    failed(
        path,
        "open it",
        io::Error::new(io::ErrorKind::TimedOut, why),
    )
}

impl Opening {
    /// Starts a thread, which sends a message to `wake` when it exits.
    fn start(
        path: &Path,
        wake: Sender<()>,
        open: impl FnOnce() -> Result<Arc<Store>, OpenError> + Send + 'static,
    ) -> Result<Self, OpenError> {
        // Use a single thread per path. Otherwise each attempt would add another thread if the file
        // system isn't responding.
        let Some(mark) = Mark::set(path) else {
            return Err(late(path));
        };
        let (sender, result) = channel();
        let is_late = Arc::new(Mutex::new(false));
        let spawned = thread::Builder::new().name("open".into()).spawn({
            let entry = Entry::opening(path.display().to_string());
            let (mark, is_late) = (mark.clone(), Arc::clone(&is_late));
            move || {
                let _waker = Waker(wake);
                // Don't lock `is_late` yet, because `finish` locks it while this may be blocked.
                let result = open();
                let is_late = is_late.lock().unwrap_or_else(PoisonError::into_inner);
                match (*is_late, result) {
                    (false, result) => {
                        // The receiver may start an upgrade.
                        drop(entry);
                        drop(sender.send(result));
                    }
                    // Revert all changes, as if it wasn't opened.
                    (true, Ok(store)) => store.undo(),
                    (true, Err(_)) => {}
                }
                mark.clear();
            }
        });
        match spawned {
            Ok(_) => Ok(Self {
                mark,
                result,
                arrived: None,
                is_late,
            }),
            Err(error) => {
                mark.clear();
                Err(failed(path, "start a thread for it", error))
            }
        }
    }

    fn has_arrived(&mut self) -> bool {
        if self.arrived.is_none() {
            self.arrived = self.result.try_recv().ok();
        }
        self.arrived.is_some()
    }

    fn finish(mut self, path: &Path, until: Instant) -> Result<Arc<Store>, OpenError> {
        if let Some(result) = self.arrived.take() {
            self.mark.clear();
            return result;
        }
        let left = until.saturating_duration_since(Instant::now());
        match self.result.recv_timeout(left) {
            Ok(result) => {
                // The thread will do this as well.
                self.mark.clear();
                result
            }
            Err(RecvTimeoutError::Timeout) => {
                let mut is_late = self.is_late.lock().unwrap_or_else(PoisonError::into_inner);
                // Check again, because the result may just have arrived.
                self.result.try_recv().unwrap_or_else(|_| {
                    *is_late = true;
                    Err(late(path))
                })
            }
            Err(RecvTimeoutError::Disconnected) => {
                self.mark.clear();
                let why = io::Error::other("the thread panicked");
                Err(failed(path, "open it", why))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use riser_scsi::config::{Protection, ProtectionType};
    use riser_testkit::eventually;

    use super::*;
    use crate::backend::Direct;
    use crate::backend::lost_flushes::injection::fail_next_recovery;
    use crate::backend::waiting::is_waiting;

    #[test]
    fn hanging_open_times_out_and_is_retried() {
        let name = format!("riserd-opening-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let spec = Spec {
            name: "disk".into(),
            source: Source::File {
                path: path.clone(),
                size: Some(1 << 20),
                create: true,
            },
            block_size: 512,
            direct: Direct::Off,
            write_cache: true,
            read_only: false,
            protection: None,
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
        let soon = || Instant::now() + Duration::from_millis(50);
        let opening = Opening::start(&path, channel().0, open).unwrap();
        let error = opening.finish(&path, soon()).unwrap_err();
        assert!(error.to_string().contains("does not respond"), "{error}");
        // Another thread for the same path would also be blocked.
        let error = Opening::start(&path, channel().0, || panic!("a second thread"));
        let error = error.err().unwrap();
        assert!(error.to_string().contains("does not respond"), "{error}");
        release.send(()).unwrap();
        eventually("the late one ends", Duration::from_secs(60), || {
            !is_waiting(&path)
        });
        // The file created by the late thread was removed and its lock was released, so it can be
        // opened.
        let wish = |backend: &str, is_known| OpenRequest {
            backend: backend.into(),
            spec: spec.clone(),
            is_patient: false,
            is_known,
        };
        let mut all = open_all(vec![wish("a", false), wish("b", false)]);
        let store = all.take_result("a", &spec).unwrap().unwrap();
        assert_eq!(store.capacity(), 1 << 20);
        let error = all.take_result("b", &spec).unwrap().unwrap_err();
        assert!(matches!(error, OpenError::Locked { .. }), "{error}");
        drop(store);
        // A store that isn't taken is reverted, and a file that existed before isn't created.
        std::fs::remove_file(&path).unwrap();
        drop(open_all(vec![wish("a", false)]));
        assert!(!path.exists());
        let error = open_all(vec![wish("a", true)]).take_result("a", &spec);
        let error = error.unwrap().unwrap_err();
        assert!(matches!(error, OpenError::Gone { .. }), "{error}");
        assert!(!path.exists());
    }

    #[test]
    fn late_open_keeps_lost_flush() {
        let name = format!("riserd-opening-lost-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let spec = Spec {
            name: "disk".into(),
            source: Source::File {
                path: path.clone(),
                size: Some(1 << 20),
                create: true,
            },
            block_size: 512,
            direct: Direct::Off,
            write_cache: true,
            read_only: false,
            protection: Some(Protection::new(ProtectionType::Type1)),
            faults: None,
        };
        let created = Store::open(&spec).unwrap();
        created.keep();
        drop(created);
        let (release, hangs) = channel::<()>();
        let open = {
            let spec = spec.clone();
            move || {
                let _ = hangs.recv();
                fail_next_recovery(spec.source.path().unwrap());
                Store::open(&spec)
            }
        };
        let opening = Opening::start(&path, channel().0, open).unwrap();
        opening.finish(&path, Instant::now()).unwrap_err();
        release.send(()).unwrap();
        eventually("the late one ends", Duration::from_secs(60), || {
            !is_waiting(&path)
        });
        let store = open_in_time(&spec, true).unwrap();
        let failure = store.flush_failure();
        assert_eq!(failure.map(|failure| failure.errno), Some(libc::EIO));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn hanging_open_delays_no_other_backend() {
        let name = |what: &str| format!("riserd-opening-{what}-{}", std::process::id());
        let path = |what: &str| std::env::temp_dir().join(name(what));
        let wish = |what: &str| OpenRequest {
            backend: what.into(),
            spec: Spec {
                name: "disk".into(),
                source: Source::File {
                    path: path(what),
                    size: Some(1 << 20),
                    create: true,
                },
                block_size: 512,
                direct: Direct::Off,
                write_cache: true,
                read_only: false,
                protection: None,
                faults: None,
            },
            is_patient: false,
            is_known: false,
        };
        let mut round = Round::start(vec![wish("fast")]);
        let (release, hangs) = channel::<()>();
        let slow = wish("slow");
        let open = {
            let slow = slow.clone();
            move || {
                let _ = hangs.recv();
                slow.grant()
            }
        };
        let opening = Opening::start(&path("slow"), round.wake.clone(), open).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        round.openings.insert(path("slow"), (slow, opening, until));
        let mut release = Some(release);
        let mut taken = Vec::new();
        round.for_each(|opened| {
            let names = opened.0.iter().map(|(name, (_, result))| {
                assert!(result.is_ok(), "{name}");
                name.clone()
            });
            taken.extend(names.collect::<Vec<_>>());
            // Release the slow operation after this.
            if taken == ["fast"] {
                release.take();
            }
        });
        assert_eq!(taken, ["fast", "slow"]);
        assert!(!path("fast").exists() && !path("slow").exists(), "undone");
    }
}
