//! The driver of a NIC: the engine's thread or a waiting call.

use std::time::Duration;

use riser_state::{State, become_state};

/// Interval at which the thread checks whether calls still drive the NIC.
pub(crate) const TICK: Duration = Duration::from_millis(1);

/// State of the driver.
///
/// ```text
///   Thread ── a call begins to wait ──> Call <─┐
///     ^                                  │     │ (the next call)
///     │<─────── the call returns ────────┤     │
///     │                                  │ the thread checks
///     │                                  v     │
///     │<─────── the call returns ─── CallNoticed
///     │                                  │ the thread checks again
///     │                                  v
///     └─ the call returns, and wakes ─ CallAlone
///        the thread
/// ```
///
/// Calls might wait repeatedly and only for a short time. To avoid waking the thread each time one
/// of them returns, it checks after a [`TICK`]. Only if the same call is still waiting then, the
/// thread sleeps until it is woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DriverState {
    /// The engine's thread.
    Thread,
    /// A call that has begun to wait since the thread last checked.
    Call,
    /// A call that was waiting when the thread last checked. The thread checks again after a tick.
    CallNoticed,
    /// A call that must wake the thread when it returns.
    CallAlone,
}

impl State for DriverState {
    fn may_become(&self, next: &Self) -> bool {
        use DriverState::{Call, CallAlone, CallNoticed, Thread};
        matches!(
            (self, next),
            (Thread, Call)
                | (Call, Thread | CallNoticed)
                | (CallNoticed, Thread | CallAlone)
                | (CallAlone, Thread)
        )
    }
}

/// Calls since the driver last checked, in increasing order of what they do for the NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Activity {
    /// None, or only calls that do not use the network.
    Idle,
    /// Calls that send packets.
    Sent,
    /// Calls that poll, and therefore also receive packets.
    Polled,
}

/// The driver of a NIC, with the calls that it has to know about.
#[derive(Debug)]
pub(crate) struct Driver {
    state: DriverState,
    /// Set if the driver may sleep for longer than a tick, so that it must be woken.
    is_asleep: bool,
    activity: Activity,
}

impl Driver {
    pub(crate) fn new() -> Self {
        Self {
            state: DriverState::Thread,
            is_asleep: false,
            activity: Activity::Idle,
        }
    }

    /// Makes a waiting call the driver. Returns `None` if another call already is, and otherwise
    /// whether the thread must be woken, because it no longer has to handle incoming packets.
    pub(crate) fn begin_call(&mut self) -> Option<bool> {
        if self.is_call() {
            return None;
        }
        become_state(&mut self.state, DriverState::Call);
        Some(std::mem::take(&mut self.is_asleep))
    }

    /// Makes the thread the driver again when a call returns. Returns whether it must be woken.
    pub(crate) fn end_call(&mut self) -> bool {
        let is_alone = self.state == DriverState::CallAlone;
        become_state(&mut self.state, DriverState::Thread);
        self.is_asleep = false;
        is_alone
    }

    /// Returns how long the thread should sleep (`Some(None)` for no timeout) if a call is the
    /// driver, or `None` if the thread is.
    pub(crate) fn check_call(&mut self) -> Option<Option<Duration>> {
        match self.state {
            DriverState::Thread => None,
            DriverState::Call => {
                become_state(&mut self.state, DriverState::CallNoticed);
                Some(Some(TICK))
            }
            DriverState::CallNoticed => {
                become_state(&mut self.state, DriverState::CallAlone);
                Some(None)
            }
            DriverState::CallAlone => Some(None),
        }
    }

    /// Returns whether a waiting call is the driver.
    pub(crate) fn is_call(&self) -> bool {
        self.state != DriverState::Thread
    }

    /// Returns whether the driver may sleep for longer than a tick.
    pub(crate) fn is_asleep(&self) -> bool {
        self.is_asleep
    }

    /// Sets whether the driver may sleep for longer than a tick.
    pub(crate) fn set_asleep(&mut self, is_asleep: bool) {
        self.is_asleep = is_asleep;
    }

    /// Records a call.
    pub(crate) fn note(&mut self, activity: Activity) {
        self.activity = self.activity.max(activity);
    }

    /// Returns the calls since the driver last checked.
    pub(crate) fn activity(&self) -> Activity {
        self.activity
    }

    /// Same as [`Driver::activity`], when the driver checks.
    pub(crate) fn take_activity(&mut self) -> Activity {
        std::mem::replace(&mut self.activity, Activity::Idle)
    }
}

#[cfg(test)]
mod tests {
    use riser_state::testing;

    use super::*;

    const ALL: [DriverState; 4] = [
        DriverState::Thread,
        DriverState::Call,
        DriverState::CallNoticed,
        DriverState::CallAlone,
    ];

    #[test]
    fn transition_table_matches_diagram() {
        let expected = "Thread: Call\nCall: Thread CallNoticed\nCallNoticed: Thread CallAlone\n\
                        CallAlone: Thread\n";
        assert_eq!(testing::table(&ALL), expected);
    }

    #[test]
    fn transition_coverage_is_complete() {
        testing::assert_all_taken(&ALL, || {
            short_calls_do_not_wake_thread();
            long_call_wakes_thread_at_end();
        });
    }

    #[test]
    fn short_calls_do_not_wake_thread() {
        let mut driver = Driver::new();
        assert_eq!(driver.check_call(), None);
        driver.set_asleep(true);
        // The first call wakes the thread, whose sleep may be too long.
        for wakes in [true, false] {
            assert_eq!(driver.begin_call(), Some(wakes));
            assert_eq!(driver.begin_call(), None);
            assert!(!driver.end_call());
        }
        for _ in 0..3 {
            assert_eq!(driver.begin_call(), Some(false));
            assert_eq!(driver.check_call(), Some(Some(TICK)));
            assert!(!driver.end_call());
        }
        assert_eq!(driver.check_call(), None);
    }

    #[test]
    fn long_call_wakes_thread_at_end() {
        let mut driver = Driver::new();
        assert_eq!(driver.begin_call(), Some(false));
        assert_eq!(driver.check_call(), Some(Some(TICK)));
        for _ in 0..2 {
            assert_eq!(driver.check_call(), Some(None));
        }
        driver.set_asleep(true);
        assert!(driver.is_call() && driver.end_call());
        assert!(!driver.is_call() && !driver.is_asleep());
    }

    #[test]
    fn most_useful_activity_is_kept() {
        let mut driver = Driver::new();
        for activity in [Activity::Sent, Activity::Polled, Activity::Sent] {
            driver.note(activity);
        }
        assert_eq!(driver.activity(), Activity::Polled);
        assert_eq!(driver.take_activity(), Activity::Polled);
        assert_eq!(driver.take_activity(), Activity::Idle);
    }
}
