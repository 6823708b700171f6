//! The end of what services serve, as they bring it about and its owner sees it.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

#[derive(Debug, Default)]
struct State {
    is_over: bool,
    is_complete: bool,
    /// The first failure of a service.
    error: Option<io::Error>,
}

/// How far something that is served has come to its end.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    state: Mutex<State>,
    over: Condvar,
}

impl Outcome {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether it is served no longer.
    pub(crate) fn is_over(&self) -> bool {
        self.state().is_over
    }

    /// Returns whether the kernel has ended it.
    pub(crate) fn is_complete(&self) -> bool {
        self.state().is_complete
    }

    /// Waits until it is served no longer.
    ///
    /// # Errors
    /// That of a service; `Other` where the services ended before the kernel did.
    pub(crate) fn wait(&self) -> io::Result<()> {
        let state = self.over.wait_while(self.state(), |state| !state.is_over);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        match state.error.take() {
            Some(error) => Err(error),
            None if state.is_complete => Ok(()),
            None => Err(io::Error::other(
                "the thread that served it ended too early",
            )),
        }
    }
}

/// Held by the services. The last one to drop it brings the end about.
pub(crate) struct Ending {
    outcome: Arc<Outcome>,
    on_end: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Ending {
    pub(crate) fn new(outcome: Arc<Outcome>, on_end: impl FnOnce() + Send + 'static) -> Self {
        Self {
            outcome,
            on_end: Mutex::new(Some(Box::new(on_end))),
        }
    }

    /// The kernel has ended it.
    pub(crate) fn note_complete(&self) {
        self.outcome.state().is_complete = true;
    }

    /// A service cannot go on.
    pub(crate) fn note_error(&self, error: io::Error) {
        tracing::error!(%error, "requests of the kernel cannot be served");
        self.outcome.state().error.get_or_insert(error);
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if thread::panicking() {
            self.note_error(io::Error::other("the thread that serves it panicked"));
        }
        self.outcome.state().is_over = true;
        self.outcome.over.notify_all();
        let on_end = self.on_end.get_mut();
        if let Some(on_end) = on_end.unwrap_or_else(PoisonError::into_inner).take() {
            on_end();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn the_last_service_brings_the_end() {
        let outcome = Arc::new(Outcome::default());
        let (ended, on_end) = mpsc::channel();
        let ending = Ending::new(outcome.clone(), move || ended.send(()).unwrap());
        let first = Arc::new(ending);
        let last = first.clone();
        first.note_complete();
        drop(first);
        assert!(outcome.is_complete() && !outcome.is_over());
        assert!(on_end.try_recv().is_err());
        drop(last);
        on_end.recv().unwrap();
        outcome.wait().unwrap();
    }

    #[test]
    fn a_service_that_goes_too_early_or_panics_is_an_error() {
        let outcome = Arc::new(Outcome::default());
        drop(Ending::new(outcome.clone(), || {}));
        assert!(outcome.wait().is_err());
        let outcome = Arc::new(Outcome::default());
        let ending = Ending::new(outcome.clone(), || {});
        let thread = thread::spawn(move || {
            ending.note_complete();
            panic!("a defect");
        });
        let error = outcome.wait().unwrap_err();
        assert!(error.to_string().contains("panicked"), "{error}");
        assert!(thread.join().is_err());
    }
}
