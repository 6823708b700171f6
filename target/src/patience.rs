//! Locks that may still be held by a process that has ended: the kernel takes the rings of a killed
//! process apart, and closes the files they hold, some time after its end.

use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

/// Longest time that it may take.
const PATIENCE: Duration = Duration::from_secs(3);

thread_local! {
    static IS_HASTY: Cell<bool> = const { Cell::new(false) };
}

/// Runs something in which [`until_free`] tries once.
pub(crate) fn at_once<T>(run: impl FnOnce() -> T) -> T {
    let before = IS_HASTY.replace(true);
    let result = run();
    IS_HASTY.set(before);
    result
}

/// Tries until something is free, for three seconds at most. `attempt` returns `None` where
/// something else holds it, and so does this then.
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
        // After the attempt, so that there is one even without patience.
        if free.is_some() || Instant::now() >= deadline {
            return Ok(free);
        }
        thread::sleep(PATIENCE / 200);
    }
}
