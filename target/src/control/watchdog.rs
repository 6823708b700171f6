//! The service manager's watchdog: it is told that the daemon lives as long as every worker gets round
//! to its mailbox and this thread to its timer. One that does not, and the manager starts the daemon
//! anew.

use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::server::Server;

/// What the workers were asked last, and when to look.
#[derive(Debug)]
pub(super) struct Watchdog {
    /// Time between two looks; without one nobody wants to know.
    every: Option<Duration>,
    next: Instant,
    asked: Vec<Receiver<()>>,
}

impl Watchdog {
    /// As the service manager wants it: half of `$WATCHDOG_USEC`, as sd_watchdog_enabled(3)
    /// recommends.
    pub(super) fn of_environment() -> Self {
        Self::new(sd_notify::watchdog_enabled().map(|limit| limit / 2))
    }

    fn new(every: Option<Duration>) -> Self {
        Self {
            every,
            next: Instant::now(),
            asked: Vec::new(),
        }
    }

    /// Returns when it is time to look.
    pub(super) async fn due(&self) {
        match self.every {
            Some(_) => sleep_until(self.next).await,
            None => std::future::pending().await,
        }
    }

    /// Whether all workers have answered since the last look; asks them once more if so.
    pub(super) fn check(&mut self, server: &Server) -> bool {
        self.check_with(|| server.ping())
    }

    /// Nobody can be asked now; it is not due before its time has passed once more.
    pub(super) fn skip(&mut self) {
        if let Some(every) = self.every {
            self.next = Instant::now() + every;
        }
    }

    fn check_with(&mut self, ping: impl FnOnce() -> Vec<Receiver<()>>) -> bool {
        self.skip();
        let mut was_full = false;
        self.asked.retain(|answer| match answer.try_recv() {
            Ok(()) => false,
            Err(TryRecvError::Empty) => true,
            Err(TryRecvError::Disconnected) => {
                was_full = true;
                false
            }
        });
        if !self.asked.is_empty() || was_full {
            tracing::warn!("not all workers answer");
        }
        if self.asked.is_empty() {
            self.asked = ping();
            return !was_full;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[tokio::test]
    async fn one_silent_worker_silences_it_until_it_answers() {
        let mut watchdog = Watchdog::new(Some(Duration::from_secs(1)));
        let (first, rx1) = channel();
        let (second, rx2) = channel();
        assert!(watchdog.check_with(|| vec![rx1, rx2]));
        first.send(()).unwrap();
        assert!(!watchdog.check_with(|| unreachable!("it is not asked twice")));
        assert!(!watchdog.check_with(|| unreachable!("it is not asked twice")));
        second.send(()).unwrap();
        assert!(watchdog.check_with(Vec::new));
    }

    #[tokio::test]
    async fn a_worker_that_could_not_be_asked_is_asked_again() {
        let mut watchdog = Watchdog::new(Some(Duration::from_secs(1)));
        let (_, full) = channel();
        assert!(watchdog.check_with(|| vec![full]));
        let (worker, rx) = channel();
        assert!(!watchdog.check_with(|| vec![rx]));
        worker.send(()).unwrap();
        assert!(watchdog.check_with(Vec::new));
    }

    #[tokio::test]
    async fn without_a_manager_it_is_never_due() {
        let watchdog = Watchdog::new(None);
        let wait = tokio::time::timeout(Duration::from_millis(20), watchdog.due());
        assert!(wait.await.is_err());
    }

    #[tokio::test]
    async fn one_that_was_skipped_is_due_later() {
        let mut watchdog = Watchdog::new(Some(Duration::from_secs(60)));
        watchdog.due().await;
        watchdog.skip();
        let wait = tokio::time::timeout(Duration::from_millis(20), watchdog.due());
        assert!(wait.await.is_err());
    }
}
