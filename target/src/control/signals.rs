//! Signals handled by the daemon.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::interval;

/// All handled signals.
#[derive(Debug)]
pub(super) struct Signals {
    pub(super) hangup: Caught,
    pub(super) end: EndSignals,
}

/// Signals to terminate the daemon.
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

/// A signal, and a flag that is set by its handler.
#[derive(Debug)]
pub(super) struct Caught {
    signal: Signal,
    flag: Arc<AtomicBool>,
}

/// Interval to check the flags.
const LOOK: Duration = Duration::from_secs(1);

impl Caught {
    fn new(kind: SignalKind) -> io::Result<Self> {
        let flag = Arc::default();
        // Register this first, so that the flag is set before the runtime is woken up.
        signal_hook::flag::register(kind.as_raw_value(), Arc::clone(&flag))?;
        let signal = signal(kind)?;
        Ok(Self { signal, flag })
    }

    fn has_come(&self) -> bool {
        self.flag.load(Ordering::Acquire)
    }

    /// Waits until this signal has been received. The handler wakes up the runtime by sending a
    /// byte, which can fail if the kernel is out of memory. So we also need to poll the flag, or
    /// else the daemon might never terminate.
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
    /// Waits for one of these signals, and returns its name.
    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            () = self.terminate.recv() => "SIGTERM",
            () = self.interrupt.recv() => "SIGINT",
        }
    }

    /// Returns true if one of these signals was received, but has not been returned by
    /// [`next`](Self::next) yet.
    pub(super) fn has_come(&self) -> bool {
        [&self.terminate, &self.interrupt].map(Caught::has_come) != [false; 2]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn signal_is_reported_once_by_its_flag() {
        let mut caught = Caught::new(SignalKind::user_defined2()).unwrap();
        signal_hook::low_level::raise(signal_hook::consts::SIGUSR2).unwrap();
        caught.recv().await;
        assert!(!caught.flag.load(Ordering::Acquire));
        // This simulates a handler whose byte was lost.
        caught.flag.store(true, Ordering::Release);
        caught.recv().await;
        let again = tokio::time::timeout(2 * LOOK, caught.recv()).await;
        assert!(again.is_err(), "duplicate");
    }
}
