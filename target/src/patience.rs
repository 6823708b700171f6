//! Locks that may still be held by a process that has ended: the kernel takes the rings of a killed process
//! apart, and closes the files they hold, some time after its end.

use std::thread;
use std::time::{Duration, Instant};

/// How long that may take.
const PATIENCE: Duration = Duration::from_secs(3);

/// Tries until something is free, for three seconds at most. `attempt` returns `None` where something else
/// holds it, and so does this then.
pub(crate) fn until_free<T, E>(
    mut attempt: impl FnMut() -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let free = attempt()?;
        if free.is_some() || Instant::now() > deadline {
            return Ok(free);
        }
        thread::sleep(PATIENCE / 200);
    }
}
