//! Waits for locks held by a process that has exited: if a process was killed, the kernel takes
//! some time to tear down its rings and close their files.

use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

/// Maximum time to wait.
const PATIENCE: Duration = Duration::from_secs(3);

thread_local! {
    static IS_HASTY: Cell<bool> = const { Cell::new(false) };
}

/// Runs a function in which [`until_free`] does not wait.
pub(crate) fn at_once<T>(run: impl FnOnce() -> T) -> T {
    let before = IS_HASTY.replace(true);
    let result = run();
    IS_HASTY.set(before);
    result
}

/// Retries until a resource is free, for at most three seconds. `attempt` returns `None` if the
/// resource is in use. If it still is after this time, this function returns `None` too.
pub(crate) fn until_free<T, E>(
    mut attempt: impl FnMut() -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    let patience = if IS_HASTY.get() {
        Duration::ZERO
    } else {
        PATIENCE
    };
    let deadline = Instant::now() + patience;
    loop {
        let free = attempt()?;
        // Check this afterwards, so that there is always at least one attempt.
        if free.is_some() || Instant::now() >= deadline {
            return Ok(free);
        }
        thread::sleep(PATIENCE / 200);
    }
}
