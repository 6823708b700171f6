//! Waits for another thread, process or peer.

use std::fmt::Debug;
use std::thread;
use std::time::{Duration, Instant};

/// Polling interval.
const INTERVAL: Duration = Duration::from_millis(2);

/// Waits until a condition is true.
///
/// # Panics
///
/// Panics if this doesn't happen before the deadline. The message contains `what` we were waiting
/// for.
#[track_caller]
pub fn eventually(what: &str, deadline: Duration, mut holds: impl FnMut() -> bool) {
    eventually_ok(what, deadline, || {
        holds().then_some(()).ok_or("condition is false")
    });
}

/// Waits until a value is available and returns it.
///
/// # Panics
///
/// Panics if there is no value before the deadline.
#[track_caller]
pub fn eventually_some<T>(what: &str, deadline: Duration, mut get: impl FnMut() -> Option<T>) -> T {
    eventually_ok(what, deadline, || get().ok_or("missing value"))
}

/// Retries an operation until it succeeds and returns its result.
///
/// # Panics
///
/// Panics if the operation has not succeeded before the deadline. The message contains the last
/// error.
#[track_caller]
pub fn eventually_ok<T, E: Debug>(
    what: &str,
    deadline: Duration,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> T {
    let until = Instant::now() + deadline;
    loop {
        // We need to check the deadline first: if this thread was delayed by a busy CPU, there
        // should still be an attempt after the deadline.
        let is_late = Instant::now() >= until;
        match attempt() {
            Ok(value) => return value,
            Err(error) => assert!(!is_late, "timed out after {deadline:?}: {what}: {error:?}"),
        }
        thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eventually_polls_condition_repeatedly() {
        let mut looks = 0;
        eventually("three looks", Duration::from_secs(60), || {
            looks += 1;
            looks == 3
        });
        assert_eq!(looks, 3);
        let value = eventually_some("a value", Duration::ZERO, || Some(7));
        assert_eq!(value, 7, "one look is made in any case");
    }

    #[test]
    #[should_panic(expected = "a login: \"refused\"")]
    fn last_error_is_reported() {
        let attempt = || Err::<(), _>("refused");
        eventually_ok("a login", Duration::ZERO, attempt);
    }

    #[test]
    #[should_panic(expected = "timed out after 1ms: the end of the world")]
    fn timeout_panics_with_name() {
        eventually("the end of the world", Duration::from_millis(1), || false);
    }
}
