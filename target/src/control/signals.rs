//! The signals that the daemon looks at.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::interval;

/// Signals, each with what it asks for.
#[derive(Debug)]
pub(super) struct Signals {
    pub(super) hangup: Caught,
    pub(super) end: EndSignals,
}

/// Signals that end the daemon.
#[derive(Debug)]
pub(super) struct EndSignals {
    terminate: Caught,
    interrupt: Caught,
}

impl Signals {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            hangup: Caught::new(SignalKind::hangup())?,
            end: EndSignals {
                terminate: Caught::new(SignalKind::terminate())?,
                interrupt: Caught::new(SignalKind::interrupt())?,
            },
        })
    }
}

/// A signal, and a flag that its handler sets.
#[derive(Debug)]
pub(super) struct Caught {
    signal: Signal,
    flag: Arc<AtomicBool>,
}

/// Interval at which flags of signals are looked at.
const LOOK: Duration = Duration::from_secs(1);

impl Caught {
    fn new(kind: SignalKind) -> io::Result<Self> {
        let flag = Arc::default();
        // First, so that the flag is set before the runtime wakes.
        signal_hook::flag::register(kind.as_raw_value(), Arc::clone(&flag))?;
        let signal = signal(kind)?;
        Ok(Self { signal, flag })
    }

    fn has_come(&self) -> bool {
        self.flag.load(Ordering::Acquire)
    }

    /// Returns once the signal has come. The runtime wakes by a byte that the handler sends, and the
    /// kernel may have no memory for it; a daemon that missed its end for that would not end.
    pub(super) async fn recv(&mut self) {
        let mut look = interval(LOOK);
        while !self.flag.swap(false, Ordering::AcqRel) {
            tokio::select! {
                _ = self.signal.recv() => {}
                _ = look.tick() => {}
            }
        }
    }
}

impl EndSignals {
    /// Returns which of them has come, once one has.
    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            () = self.terminate.recv() => "SIGTERM",
            () = self.interrupt.recv() => "SIGINT",
        }
    }

    /// Whether one of them has come that [`next`](Self::next) has not returned.
    pub(super) fn has_come(&self) -> bool {
        [&self.terminate, &self.interrupt].map(Caught::has_come) != [false; 2]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_signal_comes_once_and_by_its_flag_alone() {
        let mut caught = Caught::new(SignalKind::user_defined2()).unwrap();
        signal_hook::low_level::raise(signal_hook::consts::SIGUSR2).unwrap();
        caught.recv().await;
        assert!(!caught.flag.load(Ordering::Acquire));
        // As a handler leaves it whose byte was lost.
        caught.flag.store(true, Ordering::Release);
        caught.recv().await;
        let again = tokio::time::timeout(2 * LOOK, caught.recv()).await;
        assert!(again.is_err(), "it came twice");
    }
}
