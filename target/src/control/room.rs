//! The room that backends have, measured by a thread of its own: a file system that hangs must not
//! stop those who ask for metrics.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// Interval of the measurements.
const EVERY: Duration = Duration::from_secs(10);

/// Goes on measuring until it is dropped. The thread then ends by itself, as soon as no file system
/// holds it up.
#[derive(Debug)]
pub(super) struct Room(#[expect(dead_code, reason = "its end is the message")] Sender<()>);

impl Room {
    /// `measure` measures everything once; `false` ends it.
    pub(super) fn start(measure: impl Fn() -> bool + Send + 'static) -> Option<Self> {
        let (stop, stopped) = channel();
        let run = move || {
            while measure() && stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {}
        };
        match thread::Builder::new().name("riser-room".into()).spawn(run) {
            Ok(_) => Some(Self(stop)),
            Err(error) => {
                tracing::warn!(%error, "the room of backends is not measured");
                None
            }
        }
    }
}
