//! Measures the free space of backends on a separate thread, so that a hung file system does not
//! block metrics.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

/// Interval between measurements.
const EVERY: Duration = Duration::from_secs(10);

/// Runs until it is dropped. After that, the thread exits once it is not blocked by a file system.
#[derive(Debug)]
pub(super) struct Room(#[expect(dead_code, reason = "its end is the message")] Sender<()>);

impl Room {
    /// `measure` should measure all backends once, and return false to stop.
    pub(super) fn start(measure: impl Fn() -> bool + Send + 'static) -> Option<Self> {
        let (stop, stopped) = channel();
        let run = move || {
            while measure() && stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {}
        };
        match thread::Builder::new().name("riser-room".into()).spawn(run) {
            Ok(_) => Some(Self(stop)),
            Err(error) => {
                tracing::warn!(%error, "cannot start a thread to measure the space of backends");
                None
            }
        }
    }
}
