//! The service manager's watchdog: it hears of the daemon as long as every worker gets round to its
//! mailbox. If one does not, the manager restarts the daemon.
//!
//! It has a thread of its own. The control plane opens and measures files, and may wait as long as
//! a file system hangs; what is served meanwhile must not be ended for that.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use sd_notify::NotifyState;

/// A running watchdog; dropping it ends it.
#[derive(Debug)]
pub(super) struct Watchdog(Option<(Sender<()>, JoinHandle<()>)>);

impl Watchdog {
    /// Looks as often as the service manager wants: at half of `$WATCHDOG_USEC`, as
    /// sd_watchdog_enabled(3) recommends. `ping` asks every worker to answer; a receiver without a
    /// sender is of one that could not be asked.
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
        let mut asked = Asked::default();
        while stopped.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
            if asked.check(&mut ping) {
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
            tracing::error!(%error, "the watchdog cannot be started");
            None
        }
    }
}

/// Answers to the last question that the workers were asked.
#[derive(Debug, Default)]
struct Asked(Vec<Receiver<()>>);

impl Asked {
    /// Returns whether all workers have answered since the last look; asks them once more if so.
    fn check(&mut self, ping: impl FnOnce() -> Vec<Receiver<()>>) -> bool {
        let mut was_full = false;
        self.0.retain(|answer| match answer.try_recv() {
            Ok(()) => false,
            Err(TryRecvError::Empty) => true,
            // Its mailbox was full when it was asked: that may be load, so it is asked once more,
            // but not counted as life.
            Err(TryRecvError::Disconnected) => {
                was_full = true;
                false
            }
        });
        if !self.0.is_empty() || was_full {
            tracing::warn!("not all workers answer");
        }
        // All must have answered before they are asked again: mailboxes would fill with questions
        // to a worker that hangs.
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
    fn one_silent_worker_silences_it_until_it_answers() {
        let mut asked = Asked::default();
        let (first, rx1) = channel();
        let (second, rx2) = channel();
        assert!(asked.check(|| vec![rx1, rx2]));
        first.send(()).unwrap();
        assert!(!asked.check(|| unreachable!("it is not asked twice")));
        assert!(!asked.check(|| unreachable!("it is not asked twice")));
        second.send(()).unwrap();
        assert!(asked.check(Vec::new));
    }

    #[test]
    fn a_worker_that_could_not_be_asked_is_asked_again() {
        let mut asked = Asked::default();
        let (_, full) = channel();
        assert!(asked.check(|| vec![full]));
        let (worker, rx) = channel();
        assert!(!asked.check(|| vec![rx]));
        worker.send(()).unwrap();
        assert!(asked.check(Vec::new));
    }

    #[test]
    fn it_goes_on_while_the_control_plane_waits_for_a_file_system() {
        let (seen, alive) = channel();
        let running = run(Duration::from_millis(1), Vec::new, move || {
            let _ = seen.send(());
        });
        // This thread does nothing but wait, as the control plane does in a system call.
        for _ in 0..3 {
            alive.recv().unwrap();
        }
        drop(Watchdog(running));
        // Nothing comes after its end.
        while alive.recv().is_ok() {}
    }
}
