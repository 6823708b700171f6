//! The end of a mount, as its queues bring it about and its owner sees it.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

#[derive(Debug, Default)]
struct State {
    is_over: bool,
    is_unmounted: bool,
    /// The first failure of a queue.
    error: Option<io::Error>,
}

/// How far a mount has come to its end.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    state: Mutex<State>,
    over: Condvar,
}

impl Outcome {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether no queue is served any longer.
    pub(super) fn is_over(&self) -> bool {
        self.state().is_over
    }

    /// Returns whether the kernel has ended the connection: the path is free then, perhaps for
    /// another mount.
    pub(super) fn is_unmounted(&self) -> bool {
        self.state().is_unmounted
    }

    /// Waits until no queue is served any longer.
    ///
    /// # Errors
    /// That of a queue; `Other` where the mount was still there.
    pub(super) fn wait(&self) -> io::Result<()> {
        let state = self.over.wait_while(self.state(), |state| !state.is_over);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        match state.error.take() {
            Some(error) => Err(error),
            None if state.is_unmounted => Ok(()),
            None => Err(io::Error::other(
                "the thread that serves the mount has ended before it was unmounted",
            )),
        }
    }
}

/// Held by the queues of a mount. The last one to drop it ends the mount.
pub(super) struct Ending {
    outcome: Arc<Outcome>,
    on_end: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Ending {
    pub(super) fn new(outcome: Arc<Outcome>, on_end: impl FnOnce() + Send + 'static) -> Self {
        Self {
            outcome,
            on_end: Mutex::new(Some(Box::new(on_end))),
        }
    }

    /// The kernel has ended the connection.
    pub(super) fn note_unmounted(&self) {
        self.outcome.state().is_unmounted = true;
    }

    /// A queue cannot be served any longer.
    pub(super) fn note_error(&self, error: io::Error) {
        tracing::error!(%error, "a FUSE queue cannot be served");
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
