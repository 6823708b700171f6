//! Life cycle of a session: its states, its outages, and the time of the next login.

use std::time::{Duration, Instant};

use riser_state::{State, become_state};

use super::{Down, SessionEvent, Timing};

/// State of a session.
///
/// ```text
///    ┌──────── Backoff ←─────┐
///    ↓            ↓          │
/// LoggingIn → TearingDown ───┤
///    ↓            ↑          ↓
///   Live ─────────┘        Closed
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionState {
    /// The first channel is being connected.
    LoggingIn,
    /// At least one channel is live.
    Live,
    /// All channels are being closed, followed by a new login or by closing the session.
    TearingDown {
        /// Reason to report when all channels are closed.
        why: Down,
        /// Close the session afterwards, without a new login.
        last: bool,
    },
    /// Between two login attempts.
    Backoff {
        /// Time of the next attempt.
        until: Instant,
    },
    /// Closed permanently, with all requests completed.
    Closed,
}

impl State for SessionState {
    fn may_become(&self, next: &Self) -> bool {
        use SessionState::{Backoff, Closed, Live, LoggingIn, TearingDown};
        match self {
            LoggingIn => matches!(next, Live | TearingDown { .. }),
            Live => matches!(next, TearingDown { .. }),
            TearingDown { .. } => matches!(next, Backoff { .. } | Closed),
            Backoff { .. } => matches!(next, LoggingIn | TearingDown { .. }),
            Closed => false,
        }
    }
}

/// State of a session, and times of its outages. The session moves bytes and requests, and performs
/// the actions required by the state.
#[derive(Debug)]
pub(crate) struct Lifecycle {
    state: SessionState,
    timing: Timing,
    /// Reconnect a broken connection.
    reconnect: bool,
    ever_live: bool,
    /// Delay before the next login, if needed.
    backoff: Duration,
    /// Minimum delay before the next login, as requested by the target (Time2Wait of iSCSI).
    time2wait: Duration,
    login_patience: Duration,
}

impl Lifecycle {
    /// Creates a session that starts to log in.
    pub(crate) fn new(timing: Timing, reconnect: bool) -> Self {
        Self {
            state: SessionState::LoggingIn,
            timing,
            reconnect,
            ever_live: false,
            backoff: timing.backoff_min,
            time2wait: Duration::ZERO,
            login_patience: timing.login,
        }
    }

    /// Sets the delay requested by the target between the end of the connection and the next login.
    pub(crate) fn set_time2wait(&mut self, time2wait: Duration) {
        self.time2wait = time2wait;
    }

    /// Returns the delay requested by the target before the next login.
    pub(crate) fn time2wait(&self) -> Duration {
        self.time2wait
    }

    pub(crate) fn state(&self) -> SessionState {
        self.state
    }

    /// Returns whether the session is closed, or will be as soon as its connections are closed.
    pub(crate) fn is_ending(&self) -> bool {
        matches!(
            self.state,
            SessionState::Closed | SessionState::TearingDown { last: true, .. }
        )
    }

    /// Returns the timeout of the current login.
    pub(crate) fn login_patience(&self) -> Duration {
        self.login_patience
    }

    /// Called when the login timed out.
    pub(crate) fn on_login_timeout(&mut self) {
        self.login_patience = (self.login_patience * 2).min(self.timing.login_max);
    }

    /// Called when logged in. This resets the back-off, unless the unit must still be checked
    /// (`is_guarded`): a missing unit terminates this login immediately, which counts as a failure.
    pub(crate) fn on_live(&mut self, is_guarded: bool) {
        become_state(&mut self.state, SessionState::Live);
        self.ever_live = true;
        self.login_patience = self.timing.login;
        if !is_guarded {
            self.on_usable();
        }
    }

    /// Called when the session is usable, so that its next outage starts with the minimum back-off.
    pub(crate) fn on_usable(&mut self) {
        self.backoff = self.timing.backoff_min;
    }

    /// Starts tearing down; returns false if the session is closed. A tear-down in progress keeps
    /// its own reason, and becomes the last one if `last` is set.
    ///
    /// If a session was never live, it doesn't retry, because its user waits for the result.
    pub(crate) fn tear_down(&mut self, why: Down, last: bool) -> bool {
        let last = last || !self.reconnect || !self.ever_live;
        match &mut self.state {
            SessionState::Closed => return false,
            SessionState::TearingDown { last: is_last, .. } => *is_last |= last,
            state => become_state(state, SessionState::TearingDown { why, last }),
        }
        true
    }

    /// Called when all connections are closed: closes the session, or waits for the next login.
    /// Returns the event to report after its consequences were handled, or `None` if no tear-down
    /// is in progress.
    pub(crate) fn on_disconnected(&mut self, now: Instant) -> Option<SessionEvent> {
        let SessionState::TearingDown { why, last } = self.state else {
            return None;
        };
        if last {
            become_state(&mut self.state, SessionState::Closed);
            return Some(SessionEvent::Closed(why));
        }
        // The wait applies to a single reconnect: the next login sets it again.
        let until = now + self.backoff.max(std::mem::take(&mut self.time2wait));
        self.backoff = (self.backoff * 2).min(self.timing.backoff_max);
        become_state(&mut self.state, SessionState::Backoff { until });
        Some(SessionEvent::Reconnecting(why))
    }

    /// Returns the time of the next login, between two logins.
    pub(crate) fn next_login(&self) -> Option<Instant> {
        match self.state {
            SessionState::Backoff { until } => Some(until),
            _ => None,
        }
    }

    /// Starts the next login.
    pub(crate) fn log_in_again(&mut self) {
        become_state(&mut self.state, SessionState::LoggingIn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use riser_state::testing::{assert_all_taken, table};

    const WHY: Down = Down::ConnectionLost;

    fn states() -> [SessionState; 5] {
        let (why, last) = (WHY, false);
        let until = Instant::now();
        [
            SessionState::LoggingIn,
            SessionState::Live,
            SessionState::TearingDown { why, last },
            SessionState::Backoff { until },
            SessionState::Closed,
        ]
    }

    #[test]
    fn session_transitions_match_diagram() {
        let expected = "LoggingIn: Live TearingDown\n\
                        Live: TearingDown\n\
                        TearingDown: Backoff Closed\n\
                        Backoff: LoggingIn TearingDown\n\
                        Closed: \n";
        assert_eq!(table(&states()), expected);
    }

    fn live() -> Lifecycle {
        let mut life = Lifecycle::new(Timing::of_tests(), true);
        life.on_live(false);
        life
    }

    #[test]
    fn session_transition_coverage_is_complete() {
        assert_all_taken(&states(), || {
            let now = Instant::now();
            let mut life = live();
            assert!(life.tear_down(WHY, false));
            let event = life.on_disconnected(now);
            assert_eq!(event, Some(SessionEvent::Reconnecting(WHY)));
            life.log_in_again();
            life.tear_down(WHY, false);
            life.on_disconnected(now);
            life.tear_down(Down::Closed, true);
            let event = life.on_disconnected(now);
            assert_eq!(event, Some(SessionEvent::Closed(Down::Closed)));
            assert!(!life.tear_down(WHY, false), "it is over");
        });
    }

    #[test]
    #[should_panic(expected = "Closed became LoggingIn")]
    fn closed_session_stays_closed() {
        let mut life = live();
        life.tear_down(WHY, true);
        life.on_disconnected(Instant::now());
        life.log_in_again();
    }

    #[test]
    fn tear_down_keeps_reason_and_may_close() {
        let mut life = live();
        life.tear_down(WHY, false);
        assert!(!life.is_ending());
        life.tear_down(Down::Closed, true);
        assert!(life.is_ending());
        let event = life.on_disconnected(Instant::now());
        assert_eq!(event, Some(SessionEvent::Closed(WHY)));
    }

    #[test]
    fn session_without_first_login_is_closed() {
        let mut life = Lifecycle::new(Timing::of_tests(), true);
        life.tear_down(WHY, false);
        let event = life.on_disconnected(Instant::now());
        assert_eq!(event, Some(SessionEvent::Closed(WHY)));
    }

    #[test]
    fn backoff_doubles_until_session_is_usable() {
        let timing = Timing::of_tests();
        let now = Instant::now();
        let mut life = live();
        let fail = |life: &mut Lifecycle| {
            life.tear_down(WHY, false);
            life.on_disconnected(now);
            let wait = life.next_login().expect("it waits") - now;
            life.log_in_again();
            wait
        };
        let waits: Vec<Duration> = (0..4).map(|_| fail(&mut life)).collect();
        let (min, max) = (timing.backoff_min, timing.backoff_max);
        assert_eq!(waits, [min, min * 2, max, max]);
        life.on_live(true);
        assert_eq!(fail(&mut life), max, "its unit was not checked");
        life.on_live(true);
        life.on_usable();
        assert_eq!(fail(&mut life), min);
    }
}
