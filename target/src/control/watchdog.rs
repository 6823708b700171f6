//! Service manager watchdog: notifies the service manager as long as all workers process their
//! mailboxes. If a worker hangs, the service manager will restart the daemon.
//!
//! We use a separate thread for this, because the control plane accesses files and can block on a
//! hung file system. In this case, we don't want to stop active sessions.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use sd_notify::NotifyState;

/// A running watchdog, which is stopped on drop.
#[derive(Debug)]
pub(super) struct Watchdog(Option<(Sender<()>, JoinHandle<()>)>);

impl Watchdog {
    /// Starts the watchdog with the interval requested by the service manager: half of
    /// `$WATCHDOG_USEC`, as recommended by sd_watchdog_enabled(3). `ping` should send a request to
    /// all workers. If a request cannot be sent, it should return a receiver without a sender.
    pub(super) fn start(ping: impl FnMut() -> Vec<Receiver<()>> + Send + 'static) -> Self {
        let every = sd_notify::watchdog_enabled().map(|limit| limit / 2);
        let alive = || super::notify(&[NotifyState::Watchdog]);
        Self(every.and_then(|every| run(every, ping, alive)))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.0.take() {
            drop(stop);
            if thread.join().is_err() {
                tracing::error!("the watchdog panicked; this is a bug");
            }
        }
    }
}

fn run(
    every: Duration,
    mut ping: impl FnMut() -> Vec<Receiver<()>> + Send + 'static,
    mut alive: impl FnMut() + Send + 'static,
) -> Option<(Sender<()>, JoinHandle<()>)> {
    let (stop, stopped) = channel();
    let watch = move || {
        let mut pings = PendingPings::default();
        while stopped.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
            if pings.check(&mut ping) {
                alive();
            }
        }
    };
    let thread = thread::Builder::new()
        .name("riser-watchdog".into())
        .spawn(watch);
    match thread {
        Ok(thread) => Some((stop, thread)),
        Err(error) => {
            tracing::error!(%error, "cannot start the watchdog");
            None
        }
    }
}

/// Pending responses from workers.
#[derive(Debug, Default)]
struct PendingPings(Vec<Receiver<()>>);

impl PendingPings {
    /// Returns true if all workers have responded since the last check, and then sends a new
    /// request to them.
    fn check(&mut self, ping: impl FnOnce() -> Vec<Receiver<()>>) -> bool {
        let mut was_full = false;
        self.0.retain(|pending| match pending.try_recv() {
            Ok(()) => false,
            Err(TryRecvError::Empty) => true,
            // The mailbox was full when we sent the request. This can be caused by high load, so we
            // try again, but we don't treat it as a response.
            Err(TryRecvError::Disconnected) => {
                was_full = true;
                false
            }
        });
        if !self.0.is_empty() || was_full {
            tracing::warn!("not all workers respond");
        }
        // All workers must have responded before we send the next request, because otherwise the
        // mailbox of a hung worker would fill up.
        if self.0.is_empty() {
            self.0 = ping();
            return !was_full;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_worker_stops_watchdog_until_reply() {
        let mut pings = PendingPings::default();
        let (first, rx1) = channel();
        let (second, rx2) = channel();
        assert!(pings.check(|| vec![rx1, rx2]));
        first.send(()).unwrap();
        assert!(!pings.check(|| unreachable!("no second query")));
        assert!(!pings.check(|| unreachable!("no second query")));
        second.send(()).unwrap();
        assert!(pings.check(Vec::new));
    }

    #[test]
    fn unqueried_worker_is_queried_again() {
        let mut pings = PendingPings::default();
        let (_, full) = channel();
        assert!(pings.check(|| vec![full]));
        let (worker, rx) = channel();
        assert!(!pings.check(|| vec![rx]));
        worker.send(()).unwrap();
        assert!(pings.check(Vec::new));
    }

    #[test]
    fn watchdog_continues_while_file_system_hangs() {
        let (seen, alive) = channel();
        let running = run(Duration::from_millis(1), Vec::new, move || {
            let _ = seen.send(());
        });
        // This thread only waits, like the control plane in a blocking system call.
        for _ in 0..3 {
            alive.recv().unwrap();
        }
        drop(Watchdog(running));
        // Nothing should be sent after it was stopped.
        while alive.recv().is_ok() {}
    }
}
