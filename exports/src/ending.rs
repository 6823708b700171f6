//! Signals when a set of services is closed, from the services to the owner.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

#[derive(Debug, Default)]
struct State {
    is_over: bool,
    is_complete: bool,
    /// First error returned by a service.
    error: Option<io::Error>,
}

/// State of a set of services, used by the owner.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    state: Mutex<State>,
    over: Condvar,
}

impl Outcome {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the services are closed.
    pub(crate) fn is_over(&self) -> bool {
        self.state().is_over
    }

    /// Returns whether it was closed by the kernel.
    pub(crate) fn is_complete(&self) -> bool {
        self.state().is_complete
    }

    /// Waits until the services are closed.
    ///
    /// # Errors
    /// Returns the first service error, or `Other` if the services stopped before the kernel closed
    /// it.
    pub(crate) fn wait(&self) -> io::Result<()> {
        let state = self.over.wait_while(self.state(), |state| !state.is_over);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        match state.error.take() {
            Some(error) => Err(error),
            None if state.is_complete => Ok(()),
            None => Err(io::Error::other(
                "the serving thread terminated unexpectedly",
            )),
        }
    }
}

/// Held by the services. When the last reference is dropped, the owner is notified.
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

    /// Must be called when the kernel has closed it.
    pub(crate) fn note_complete(&self) {
        self.outcome.state().is_complete = true;
    }

    /// Must be called when a service can't continue.
    pub(crate) fn note_error(&self, error: io::Error) {
        tracing::error!(%error, "cannot serve kernel requests");
        self.outcome.state().error.get_or_insert(error);
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if thread::panicking() {
            self.note_error(io::Error::other("the serving thread panicked"));
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
    fn outcome_ends_with_last_service() {
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
    fn early_exit_or_panic_is_error() {
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
