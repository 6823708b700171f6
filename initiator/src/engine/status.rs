//! State of a session, readable on any thread at any time.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use riser_scsi::protection::ProtectionError;
use serde::{Deserialize, Serialize};

use crate::paths::{PathState, PathView};
use crate::session::{Down, SessionEvent};

/// State of the link between a session and its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkState {
    /// First login.
    Connecting = 0,
    /// Logged in and ready for commands.
    Live = 1,
    /// The connection broke, and a new one is being established.
    Reconnecting = 2,
    /// The session is closed.
    Closed = 3,
}

/// State of a session, written by the engine and read by any thread.
#[derive(Debug, Default)]
pub struct SessionStatus {
    state: AtomicU8,
    reconnects: AtomicU64,
    stale: AtomicU64,
    protection: [AtomicU64; 3],
    details: Mutex<Details>,
    /// The state or the details changed.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Details {
    /// Time of the last state change, in seconds since 1970.
    since: u64,
    last: Option<Down>,
    pending: Pending,
    paths: Vec<PathReport>,
    cache: Option<[u8; 16]>,
    is_redirected: bool,
    grown: Option<u64>,
}

/// Potential losses if the session is closed while it is down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    /// Operations waiting for the target.
    pub operations: usize,
    /// Acknowledged writes may only be in the target's volatile cache.
    pub unflushed: bool,
}

/// Snapshot of a session's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionReport {
    /// The session as a whole.
    pub link: LinkReport,
    /// State of each path. Empty for a session with a single path, unless this leads to a different
    /// unit than before.
    pub paths: Vec<PathReport>,
    /// Generation of the unit's volatile cache, if the unit reports one. A process that takes over
    /// compares it.
    pub cache: Option<[u8; 16]>,
    /// A login of this session, or of the killed process before it, was redirected to another port.
    /// A process that takes over must wait for the commands of that port.
    pub is_redirected: bool,
}

/// State of a session as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkReport {
    /// State of the link to the target.
    pub state: LinkState,
    /// Time of the last state change, in seconds since 1970.
    pub since: u64,
    /// Reason for the last outage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// While the link is down: potential losses if the session is closed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<Pending>,
    /// Capacity in bytes of a logical unit that has grown since it was attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grown: Option<u64>,
    /// Failed checks of protection information.
    #[serde(default, skip_serializing_if = "ProtectionErrors::is_empty")]
    pub protection_errors: ProtectionErrors,
}

/// Numbers of failed checks of protection information, by the target or the session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtectionErrors {
    /// Damaged blocks.
    pub guard: u64,
    /// Blocks with an unexpected application tag.
    pub application_tag: u64,
    /// Blocks of a different address.
    pub reference_tag: u64,
}

impl ProtectionErrors {
    /// Returns whether no check has failed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the sum.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.guard + self.application_tag + self.reference_tag
    }
}

/// State of a path to a unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathReport {
    /// Portal of the target for this path.
    pub portal: String,
    /// State of the path.
    pub state: PathState,
    /// Number of losses while live.
    pub losses: u64,
    /// Reason for not being live, now or most recently.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl SessionStatus {
    /// Returns the state of the link to the target.
    #[must_use]
    pub fn link(&self) -> LinkState {
        match self.state.load(Ordering::Acquire) {
            0 => LinkState::Connecting,
            1 => LinkState::Live,
            2 => LinkState::Reconnecting,
            _ => LinkState::Closed,
        }
    }

    /// Returns the number of reconnects.
    #[must_use]
    pub fn reconnects(&self) -> u64 {
        self.reconnects.load(Ordering::Relaxed)
    }

    /// Returns the number of discarded messages for completed commands: duplicate responses, or
    /// responses that crossed an abort.
    #[must_use]
    pub fn stale(&self) -> u64 {
        self.stale.load(Ordering::Relaxed)
    }

    /// Increments [`Self::stale`] and returns the new value.
    pub(super) fn count_stale(&self) -> u64 {
        self.stale.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns the number of failed checks of protection information.
    #[must_use]
    pub fn protection_errors(&self) -> ProtectionErrors {
        let [guard, application_tag, reference_tag] = &self.protection;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ProtectionErrors {
            guard: count(guard),
            application_tag: count(application_tag),
            reference_tag: count(reference_tag),
        }
    }

    /// Counts a failed check of protection information; returns the new value.
    pub(crate) fn count_protection_error(&self, check: ProtectionError) -> u64 {
        let counter = match check {
            ProtectionError::Guard => 0,
            ProtectionError::ApplicationTag => 1,
            ProtectionError::ReferenceTag => 2,
        };
        let before = self.protection[counter].fetch_add(1, Ordering::Relaxed);
        // Lock it, so that a waiter is either notified or has not compared the report yet.
        drop(self.lock());
        self.changed.notify_all();
        before + 1
    }

    /// Returns the reason for the last outage.
    #[must_use]
    pub fn last_down(&self) -> Option<Down> {
        self.lock().last
    }

    /// Returns a snapshot of the session's state.
    #[must_use]
    pub fn report(&self) -> SessionReport {
        self.report_of(&self.lock())
    }

    /// Waits until the report differs from `known` and returns it. Returns `None` if the session is
    /// closed and its last report is `known`.
    #[must_use]
    pub fn wait_for_change(&self, known: &SessionReport) -> Option<SessionReport> {
        let is_same = |details: &mut Details| {
            self.link() != LinkState::Closed && self.report_of(details) == *known
        };
        let details = self.changed.wait_while(self.lock(), is_same);
        let report = self.report_of(&details.unwrap_or_else(PoisonError::into_inner));
        (report != *known).then_some(report)
    }

    fn report_of(&self, details: &Details) -> SessionReport {
        SessionReport {
            link: LinkReport {
                state: self.link(),
                since: details.since,
                last_error: details.last.map(|why| why.to_string()),
                pending: (self.link() == LinkState::Reconnecting).then_some(details.pending),
                grown: details.grown,
                protection_errors: self.protection_errors(),
            },
            paths: details.paths.clone(),
            cache: details.cache,
            is_redirected: details.is_redirected,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Details> {
        self.details.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_portals(&self, portals: impl Iterator<Item = String>) {
        let report = |portal| PathReport {
            portal,
            state: PathState::Connecting,
            losses: 0,
            why: None,
        };
        self.lock().paths = portals.map(report).collect();
    }

    /// Records that the only portal of a session leads to a different unit than before. Call this
    /// before the session's commands fail, so that their owners can report the reason.
    pub(super) fn set_other_unit(&self, portal: String, down: Down, why: String) {
        let mut details = self.lock();
        details.last = Some(down);
        details.paths = vec![PathReport {
            portal,
            state: PathState::OtherUnit,
            losses: 1,
            why: Some(why),
        }];
        self.changed.notify_all();
    }

    pub(super) fn set_paths(&self, views: impl Iterator<Item = PathView>) {
        for (path, view) in self.lock().paths.iter_mut().zip(views) {
            path.state = view.state;
            path.losses = view.losses;
            path.why = view.why.map(|why| why.to_string());
        }
        self.changed.notify_all();
    }

    /// Enters a state at `date`. `why` is the reason for leaving the previous state. Returns the
    /// previous state.
    fn enter_state(&self, state: LinkState, why: Option<Down>, date: Duration) -> LinkState {
        // Change both under the lock, so that waiters see a consistent state.
        let mut details = self.lock();
        let before = self.link();
        self.state.store(state as u8, Ordering::Release);
        details.last = why.or(details.last);
        if before != state {
            details.since = date.as_secs();
        }
        self.changed.notify_all();
        before
    }

    /// Sets the pending work while the target is unreachable.
    pub(super) fn set_pending(&self, pending: Pending) {
        let mut details = self.lock();
        if details.pending != pending {
            details.pending = pending;
            self.changed.notify_all();
        }
    }

    /// Sets the capacity in bytes of a unit that has grown; returns whether it changed.
    pub(super) fn set_grown(&self, bytes: u64) -> bool {
        let mut details = self.lock();
        let is_new = details.grown.replace(bytes) != Some(bytes);
        if is_new {
            self.changed.notify_all();
        }
        is_new
    }

    /// Sets the generation reported by [`SessionReport::cache`].
    pub(super) fn set_cache(&self, generation: Option<[u8; 16]>) {
        let mut details = self.lock();
        if details.cache != generation {
            details.cache = generation;
            self.changed.notify_all();
        }
    }

    /// Sets [`SessionReport::is_redirected`]. This is never cleared: after a later login at the
    /// original port, the other port may still execute commands.
    pub(super) fn set_redirected(&self) {
        let mut details = self.lock();
        if !std::mem::replace(&mut details.is_redirected, true) {
            self.changed.notify_all();
        }
    }

    /// Records an event. `date` is the time since 1970.
    pub(super) fn on_event(&self, event: &SessionEvent, date: Duration) {
        match event {
            SessionEvent::Live => {
                self.enter_state(LinkState::Live, None, date);
            }
            SessionEvent::Reconnecting(why) => {
                if self.enter_state(LinkState::Reconnecting, Some(*why), date) == LinkState::Live {
                    self.reconnects.fetch_add(1, Ordering::Relaxed);
                }
            }
            SessionEvent::Closed(why) => {
                self.enter_state(LinkState::Closed, Some(*why), date);
            }
            SessionEvent::UnitEvent { .. } | SessionEvent::UnitReset(_) | SessionEvent::Stale => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::ConnectError;

    const DATE: Duration = Duration::from_secs(1_800_000_000);

    #[test]
    fn stale_messages_are_counted() {
        let status = SessionStatus::default();
        assert_eq!([status.count_stale(), status.count_stale()], [1, 2]);
        assert_eq!(status.stale(), 2);
    }

    #[test]
    fn failed_checks_change_report() {
        let status = SessionStatus::default();
        let before = status.report();
        assert!(before.link.protection_errors.is_empty());
        assert_eq!(status.count_protection_error(ProtectionError::Guard), 1);
        assert_eq!(status.count_protection_error(ProtectionError::Guard), 2);
        status.count_protection_error(ProtectionError::ApplicationTag);
        status.count_protection_error(ProtectionError::ReferenceTag);
        let found = status
            .wait_for_change(&before)
            .unwrap()
            .link
            .protection_errors;
        assert_eq!(
            (found.guard, found.application_tag, found.reference_tag),
            (2, 1, 1)
        );
        assert_eq!(found.total(), 4);
    }

    #[test]
    fn report_contains_time_and_reason() {
        let status = SessionStatus::default();
        let first = status.report();
        assert_eq!(first.link.state, LinkState::Connecting);
        status.on_event(&SessionEvent::Live, DATE);
        let live = status.wait_for_change(&first).unwrap();
        assert_eq!(
            (live.link.state, &live.link.last_error),
            (LinkState::Live, &None)
        );
        assert_eq!(live.link.since, 1_800_000_000);
        status.on_event(&SessionEvent::Reconnecting(Down::Unresponsive), DATE);
        let refused = Down::Connect(ConnectError::Tcp(111));
        status.on_event(&SessionEvent::Reconnecting(refused), DATE);
        let down = status.wait_for_change(&live).unwrap();
        assert_eq!(down.link.state, LinkState::Reconnecting);
        assert_eq!(down.link.last_error, Some(refused.to_string()));
        assert_eq!(status.reconnects(), 1, "one outage");
        status.on_event(&SessionEvent::Live, DATE);
        let again = status.wait_for_change(&down).unwrap();
        assert_eq!(again.link.state, LinkState::Live);
        assert_eq!(again.link.last_error, Some(refused.to_string()), "kept");
        status.on_event(&SessionEvent::Closed(Down::Closed), DATE);
        let closed = status.wait_for_change(&again).unwrap();
        assert_eq!(status.wait_for_change(&closed), None);
    }
}
