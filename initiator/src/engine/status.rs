//! What anybody may know of a session at any time.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

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
                self.state.store(3, Ordering::Release);
            }
            SessionEvent::UnitEvent { .. } => {}
        }
    }
}
