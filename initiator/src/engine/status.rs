//! What anybody may know of a session at any time.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::paths::{PathState, PathView};
use crate::session::{Down, SessionEvent};

/// Whether a session works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// Logging in for the first time.
    Connecting,
    /// Commands flow.
    Live,
    /// The connection broke; a new one is being made.
    Reconnecting,
    /// Over.
    Closed,
}

/// A session's state, written by the engine and read by anybody.
#[derive(Debug, Default)]
pub struct SessionStatus {
    state: AtomicU8,
    reconnects: AtomicU64,
    last: Mutex<Option<Down>>,
    paths: Mutex<Vec<PathReport>>,
    /// The paths, or the state of the whole, are others than before.
    changed: Condvar,
}

/// One of several paths to a unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathReport {
    /// Where it leads through.
    pub portal: String,
    /// How it is.
    pub state: PathState,
    /// How often it was lost after it had been live.
    pub losses: u64,
    /// Why it is not live, or was not the last time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl SessionStatus {
    /// Whether it works.
    #[must_use]
    pub fn link(&self) -> LinkState {
        match self.state.load(Ordering::Acquire) {
            0 => LinkState::Connecting,
            1 => LinkState::Live,
            2 => LinkState::Reconnecting,
            _ => LinkState::Closed,
        }
    }

    /// How often it had to reconnect.
    #[must_use]
    pub fn reconnects(&self) -> u64 {
        self.reconnects.load(Ordering::Relaxed)
    }

    /// Why it was last down.
    #[must_use]
    pub fn last_down(&self) -> Option<Down> {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How each path is; nothing for a session that is the only one, unless it leads to another unit
    /// than before.
    #[must_use]
    pub fn paths(&self) -> Vec<PathReport> {
        self.lock_paths().clone()
    }

    /// Waits until the paths are others than `known`, and gives them; `None` once all is over and the
    /// last of them are known.
    #[must_use]
    pub fn wait_for_paths(&self, known: &[PathReport]) -> Option<Vec<PathReport>> {
        let is_same = |paths: &mut Vec<PathReport>| {
            self.link() != LinkState::Closed && paths.as_slice() == known
        };
        let paths = self.changed.wait_while(self.lock_paths(), is_same);
        let paths = paths.unwrap_or_else(PoisonError::into_inner);
        (paths.as_slice() != known).then(|| paths.clone())
    }

    fn lock_paths(&self) -> MutexGuard<'_, Vec<PathReport>> {
        self.paths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_portals(&self, portals: impl Iterator<Item = String>) {
        let report = |portal| PathReport {
            portal,
            state: PathState::Connecting,
            losses: 0,
            why: None,
        };
        *self.lock_paths() = portals.map(report).collect();
    }

    /// The only portal of a session leads to another unit than before. It is recorded before the
    /// session's commands fail, so that their owners find the reason.
    pub(super) fn set_other_unit(&self, portal: String, down: Down, why: String) {
        self.set_down(down);
        *self.lock_paths() = vec![PathReport {
            portal,
            state: PathState::OtherUnit,
            losses: 1,
            why: Some(why),
        }];
        self.changed.notify_all();
    }

    pub(super) fn set_paths(&self, views: impl Iterator<Item = PathView>) {
        for (path, view) in self.lock_paths().iter_mut().zip(views) {
            path.state = view.state;
            path.losses = view.losses;
            path.why = view.why.map(|why| why.to_string());
        }
        self.changed.notify_all();
    }

    fn set_down(&self, why: Down) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }

    pub(super) fn on_event(&self, event: &SessionEvent) {
        match event {
            SessionEvent::Live => self.state.store(1, Ordering::Release),
            SessionEvent::Reconnecting(why) => {
                if self.state.swap(2, Ordering::AcqRel) == 1 {
                    self.reconnects.fetch_add(1, Ordering::Relaxed);
                }
                self.set_down(*why);
            }
            SessionEvent::Closed(why) => {
                self.set_down(*why);
                // Under the lock, so that nobody begins to wait who has not seen it.
                let _paths = self.lock_paths();
                self.state.store(3, Ordering::Release);
                self.changed.notify_all();
            }
            SessionEvent::UnitEvent { .. } => {}
        }
    }
}
