//! Opening backends without waiting for ever: a file system that does not answer, such as a network share
//! whose server is gone, must not stop what opens one.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::store::{OpenError, Source, Spec, Store};
use crate::patience;

/// How long opening may take; more than the time for which a lock is waited for.
const PATIENCE: Duration = Duration::from_secs(8);

/// Paths that a thread waits for, one for each at most, with the number of the thread's mark.
static WAITING: LazyLock<Mutex<HashMap<PathBuf, u64>>> = LazyLock::new(Mutex::default);

/// The number of the next mark.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A thread waits for a path.
#[derive(Clone, Debug)]
struct Mark {
    path: PathBuf,
    number: u64,
}

impl Mark {
    /// `None` if another thread waits for it.
    fn set(path: &Path) -> Option<Self> {
        let mut waiting = waiting();
        if waiting.contains_key(path) {
            return None;
        }
        let (path, number) = (path.to_owned(), NEXT.fetch_add(1, Ordering::Relaxed));
        waiting.insert(path.clone(), number);
        Some(Self { path, number })
    }

    /// It does no longer. Both the thread and the one that has its result say so; another thread may wait by then.
    fn clear(&self) {
        let mut waiting = waiting();
        if waiting.get(&self.path) == Some(&self.number) {
            waiting.remove(&self.path);
        }
    }
}

/// A file or device that is to be opened.
#[derive(Clone, Debug)]
pub struct Wish {
    /// The backend's name.
    pub backend: String,
    /// What it is.
    pub spec: Spec,
    /// Whether a lock is waited for that another process has.
    pub is_patient: bool,
    /// Whether there was a file before, so that a missing one is not created: its file system may not be mounted.
    pub is_known: bool,
}

/// What has been opened, by the names of backends. What nobody takes is closed, as if it had not been opened.
#[derive(Debug, Default)]
pub struct OpenedStores(BTreeMap<String, (Spec, Result<Arc<Store>, OpenError>)>);

impl OpenedStores {
    /// Whether a backend has been opened.
    #[must_use]
    pub fn has(&self, backend: &str, spec: &Spec) -> bool {
        let opened = self.0.get(backend);
        opened.is_some_and(|(asked, result)| asked == spec && result.is_ok())
    }

    /// What came of opening a backend, unless it was asked for otherwise.
    pub fn take(&mut self, backend: &str, spec: &Spec) -> Option<Result<Arc<Store>, OpenError>> {
        let (asked, _) = self.0.get(backend)?;
        if asked != spec {
            return None;
        }
        self.0.remove(backend).map(|(_, result)| result)
    }
}

impl Drop for OpenedStores {
    fn drop(&mut self) {
        let stores = self
            .0
            .values()
            .filter_map(|(_, result)| result.as_ref().ok());
        stores.for_each(|store| store.undo());
    }
}

/// Opens all of them at the same time, as [`Store::open`] does, for eight seconds at most. What is opened later
/// is closed again, and as long as that has not happened, further attempts at the same path fail at once.
///
/// # Errors
/// For each, those of [`Store::open`]; [`OpenError::Io`] of kind `TimedOut`; [`OpenError::Gone`].
pub fn open_all(wishes: Vec<Wish>) -> OpenedStores {
    let until = Instant::now() + PATIENCE;
    let mut all = OpenedStores::default();
    let (mut started, mut doubled) = (BTreeMap::new(), Vec::new());
    for wish in wishes {
        let Some(path) = wish.spec.source.path().map(Path::to_owned) else {
            continue;
        };
        if started.contains_key(&path) {
            doubled.push(wish);
            continue;
        }
        let opening = Opening::start(&path, {
            let wish = wish.clone();
            move || wish.grant()
        });
        started.insert(path, (wish, opening));
    }
    for (path, (wish, opening)) in started {
        let result = opening.and_then(|opening| opening.finish(&path, until));
        all.0.insert(wish.backend, (wish.spec, result));
    }
    // The first one has the lock, or the same error.
    for wish in doubled {
        let result = match wish.spec.source.path() {
            Some(path) => Opening::start(path, {
                let wish = wish.clone();
                move || wish.grant()
            })
            .and_then(|opening| opening.finish(path, until + PATIENCE)),
            None => continue,
        };
        all.0.insert(wish.backend, (wish.spec, result));
    }
    all
}

/// Opens one of them, or memory, in the same way.
///
/// # Errors
/// As [`open_all`].
pub fn open_in_time(spec: &Spec) -> Result<Arc<Store>, OpenError> {
    let wish = Wish {
        backend: String::new(),
        spec: spec.clone(),
        is_patient: true,
        is_known: false,
    };
    let opened = open_all(vec![wish]).take("", spec);
    opened.unwrap_or_else(|| Store::open(spec))
}

/// Whether a thread waits for a path. As long as it does, this program cannot be replaced by another one.
pub(super) fn is_waiting(path: &Path) -> bool {
    waiting().contains_key(path)
}

impl Wish {
    fn grant(&self) -> Result<Arc<Store>, OpenError> {
        if let (true, Source::File { path, .. }) = (self.is_known, &self.spec.source)
            && let Err(error) = std::fs::metadata(path)
            && error.kind() == io::ErrorKind::NotFound
        {
            return Err(OpenError::Gone { path: path.clone() });
        }
        match self.is_patient {
            true => Store::open(&self.spec),
            false => patience::at_once(|| Store::open(&self.spec)),
        }
    }
}

/// A thread that opens something.
struct Opening {
    mark: Mark,
    result: Receiver<Result<Arc<Store>, OpenError>>,
    is_late: Arc<Mutex<bool>>,
}

fn failed(path: &Path, action: &'static str, source: io::Error) -> OpenError {
    OpenError::Io {
        path: path.to_owned(),
        action,
        source,
    }
}

fn late(path: &Path) -> OpenError {
    let why = "the file system does not answer";
    failed(
        path,
        "open it",
        io::Error::new(io::ErrorKind::TimedOut, why),
    )
}

impl Opening {
    fn start(
        path: &Path,
        open: impl FnOnce() -> Result<Arc<Store>, OpenError> + Send + 'static,
    ) -> Result<Self, OpenError> {
        let Some(mark) = Mark::set(path) else {
            return Err(late(path));
        };
        let (sender, result) = channel();
        let is_late = Arc::new(Mutex::new(false));
        let spawned = thread::Builder::new().name("open".into()).spawn({
            let (mark, is_late) = (mark.clone(), Arc::clone(&is_late));
            move || {
                let result = open();
                let is_late = is_late.lock().unwrap_or_else(PoisonError::into_inner);
                match (*is_late, result) {
                    (false, result) => drop(sender.send(result)),
                    // As if it had not been opened.
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
                is_late,
            }),
            Err(error) => {
                mark.clear();
                Err(failed(path, "start a thread for it", error))
            }
        }
    }

    fn finish(self, path: &Path, until: Instant) -> Result<Arc<Store>, OpenError> {
        let left = until.saturating_duration_since(Instant::now());
        match self.result.recv_timeout(left) {
            Ok(result) => {
                // The thread is about to do so.
                self.mark.clear();
                result
            }
            Err(RecvTimeoutError::Timeout) => {
                let mut is_late = self.is_late.lock().unwrap_or_else(PoisonError::into_inner);
                // It may have come in this very moment.
                self.result.try_recv().unwrap_or_else(|_| {
                    *is_late = true;
                    Err(late(path))
                })
            }
            Err(RecvTimeoutError::Disconnected) => {
                self.mark.clear();
                let why = io::Error::other("opening it panicked");
                Err(failed(path, "open it", why))
            }
        }
    }
}

/// Every change of the set is whole, so poison is ignored.
fn waiting() -> std::sync::MutexGuard<'static, HashMap<PathBuf, u64>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Direct;

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
        let soon = || Instant::now() + Duration::from_millis(50);
        let opening = Opening::start(&path, open).unwrap();
        let error = opening.finish(&path, soon()).unwrap_err();
        assert!(error.to_string().contains("does not answer"), "{error}");
        // Another thread for the same path would hang as well.
        let error = Opening::start(&path, || panic!("a second thread"));
        let error = error.err().unwrap();
        assert!(error.to_string().contains("does not answer"), "{error}");
        release.send(()).unwrap();
        while is_waiting(&path) {
            thread::sleep(Duration::from_millis(1));
        }
        // What the late one has created is gone, its lock as well, and it can be opened.
        let wish = |backend: &str, is_known| Wish {
            backend: backend.into(),
            spec: spec.clone(),
            is_patient: false,
            is_known,
        };
        let mut all = open_all(vec![wish("a", false), wish("b", false)]);
        let store = all.take("a", &spec).unwrap().unwrap();
        assert_eq!(store.capacity(), 1 << 20);
        let error = all.take("b", &spec).unwrap().unwrap_err();
        assert!(matches!(error, OpenError::Locked { .. }), "{error}");
        drop(store);
        // What is not taken is undone, and what was there before is not created.
        std::fs::remove_file(&path).unwrap();
        drop(open_all(vec![wish("a", false)]));
        assert!(!path.exists());
        let error = open_all(vec![wish("a", true)]).take("a", &spec);
        let error = error.unwrap().unwrap_err();
        assert!(matches!(error, OpenError::Gone { .. }), "{error}");
        assert!(!path.exists());
    }
}
