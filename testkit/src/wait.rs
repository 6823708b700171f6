//! Waiting for what another thread, process or peer does.

use std::fmt::Debug;
use std::thread;
use std::time::{Duration, Instant};

/// The time between two looks.
const INTERVAL: Duration = Duration::from_millis(2);

/// Waits until something holds.
///
/// # Panics
///
/// If it does not hold by the deadline; the message says `what` did not happen.
#[track_caller]
pub fn eventually(what: &str, deadline: Duration, mut holds: impl FnMut() -> bool) {
    eventually_ok(what, deadline, || {
        holds().then_some(()).ok_or("it does not hold")
    });
}

/// Waits until there is a value, and returns it.
///
/// # Panics
///
/// If there is none by the deadline.
#[track_caller]
pub fn eventually_some<T>(what: &str, deadline: Duration, mut get: impl FnMut() -> Option<T>) -> T {
    eventually_ok(what, deadline, || get().ok_or("it is not there"))
}

/// Repeats an attempt until it succeeds, and returns its result.
///
/// # Panics
///
/// If none has succeeded by the deadline; the message has the last error.
#[track_caller]
pub fn eventually_ok<T, E: Debug>(
    what: &str,
    deadline: Duration,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> T {
    let until = Instant::now() + deadline;
    loop {
        // A thread may have waited for a core beyond the deadline, so an attempt comes after it,
        // too.
        let is_late = Instant::now() >= until;
        match attempt() {
            Ok(value) => return value,
            Err(error) => assert!(!is_late, "not within {deadline:?}: {what}: {error:?}"),
        }
        thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_holds_at_last_is_enough() {
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
    fn the_last_error_is_reported() {
        let attempt = || Err::<(), _>("refused");
        eventually_ok("a login", Duration::ZERO, attempt);
    }

    #[test]
    #[should_panic(expected = "not within 1ms: the end of the world")]
    fn what_never_holds_fails_with_its_name() {
        eventually("the end of the world", Duration::from_millis(1), || false);
    }
}
