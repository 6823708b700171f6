//! [`Shutdown`]: stops a server step by step. See the documentation of the [server](super).

use std::collections::BTreeSet;
use std::sync::mpsc::TryRecvError;
use std::time::Instant;

use super::{LAST_EXIT, LAST_IO, LAST_THREADS, PATIENCE, Server, ServerError};
use crate::backend::{check_threads, close_all};
use crate::worker::Report;
use crate::worker::mail::Mail;

/// A shutdown in progress.
#[derive(Debug)]
pub struct Shutdown {
    phase: Phase,
    /// Deadline for the phase.
    until: Instant,
}

#[derive(Debug)]
enum Phase {
    /// Sessions complete their commands and log out. These workers do not have any sessions left,
    /// and are running.
    Stopping(BTreeSet<u16>),
    /// A worker flushes all backends. This is the flush number.
    Flushing(u64),
    /// Complete.
    Over(Result<(), ServerError>),
}

impl Shutdown {
    /// Returns the time at which we stop waiting.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.until
    }
}

impl Server {
    /// Shuts down the server: see the module documentation. Returns when it is stopped.
    ///
    /// # Errors
    /// Returns a [`ServerError`] if a worker has failed, or if data could not be flushed.
    pub fn shutdown(mut self) -> Result<(), ServerError> {
        let mut shutdown = self.begin_shutdown(Instant::now());
        while !self.poll_shutdown(&mut shutdown, Instant::now()) {
            let left = shutdown.until.saturating_duration_since(Instant::now());
            // Without a report, the next poll detects the reason.
            if let Ok(report) = self.workers.reports.recv_timeout(left) {
                self.handle_report(&mut shutdown, &report);
            }
        }
        self.finish_shutdown(shutdown)
    }

    /// Starts a shutdown. The caller has to call [`Server::poll_shutdown`].
    pub fn begin_shutdown(&mut self, now: Instant) -> Shutdown {
        self.workers.poll_reports();
        // Do this first, so that no new session can start and miss the logout below.
        self.shared.registry.stop();
        let until = now + PATIENCE;
        for sender in &self.workers.senders {
            let _ = sender.send_blocking(Mail::Shutdown { until });
        }
        Shutdown {
            phase: Phase::Stopping(BTreeSet::new()),
            until: until + LAST_IO,
        }
    }

    /// Handles pending reports. Returns whether the shutdown is complete.
    pub fn poll_shutdown(&mut self, shutdown: &mut Shutdown, now: Instant) -> bool {
        loop {
            self.advance(shutdown, now);
            if let Phase::Over(_) = shutdown.phase {
                return true;
            }
            let error = match self.workers.reports.try_recv() {
                Ok(report) => {
                    self.handle_report(shutdown, &report);
                    continue;
                }
                Err(TryRecvError::Empty) if now < shutdown.until => return false,
                Err(TryRecvError::Empty) => match self.check_block_operations() {
                    Err(error @ ServerError::Hanging { .. }) => error,
                    _ => ServerError::Timeout("the shutdown"),
                },
                Err(TryRecvError::Disconnected) => ServerError::Timeout("a worker"),
            };
            shutdown.phase = Phase::Over(Err(error));
        }
    }

    fn handle_report(&mut self, shutdown: &mut Shutdown, report: &Report) {
        self.workers.note(report);
        let is_last = self.workers.gone == self.workers.senders.len();
        match (&mut shutdown.phase, report) {
            (Phase::Stopping(quiet), Report::Quiet(worker)) => _ = quiet.insert(*worker),
            // It is counted as exited.
            (Phase::Stopping(quiet), Report::Ended(worker, _)) => _ = quiet.remove(worker),
            (Phase::Flushing(number), Report::Flushed(of, result)) if of == number => {
                let result = result.clone().map_err(ServerError::Flush);
                shutdown.phase = Phase::Over(result);
            }
            (Phase::Flushing(_), Report::Ended(..)) if is_last => {
                shutdown.phase = Phase::Over(Err(nobody_flushes()));
            }
            _ => {}
        }
    }

    /// Requests a flush when all workers are quiet or have exited. A flush would not include a
    /// write that is still in flight.
    fn advance(&mut self, shutdown: &mut Shutdown, now: Instant) {
        let Phase::Stopping(quiet) = &shutdown.phase else {
            return;
        };
        if quiet.len() + self.workers.gone < self.workers.senders.len() {
            return;
        }
        // Any worker can flush for all: the backends are shared.
        let number = self.workers.next_flush();
        let mut senders = self.workers.senders.iter();
        let flusher = senders.find(|sender| sender.send_blocking(Mail::Flush(number)).is_ok());
        shutdown.until = now + LAST_IO;
        shutdown.phase = match flusher {
            Some(_) => Phase::Flushing(number),
            None => Phase::Over(Err(nobody_flushes())),
        };
    }

    /// Stops the workers. If they are run by the caller, this only sends them the order to exit.
    ///
    /// # Errors
    /// Same as [`Server::shutdown`].
    ///
    /// # Panics
    /// If the shutdown is not complete.
    pub fn finish_shutdown(mut self, shutdown: Shutdown) -> Result<(), ServerError> {
        let Phase::Over(result) = shutdown.phase else {
            panic!("a shutdown is polled to its end");
        };
        let until = result.is_err().then(|| Instant::now() + LAST_EXIT);
        self.workers.abandon(until);
        // A thread of a removed backend may receive the error of a failed flush.
        if let Err(error) = check_threads(LAST_THREADS) {
            tracing::warn!(%error, "a backend is still in use at exit: a failed flush may be lost");
        }
        self.builder.save_lost_flushes(&self.config);
        // If the process exits before a flush failure is stored, the next start would trust the
        // disk.
        self.builder.wait_flush_failures_saved();
        if result.is_ok() {
            close_all(self.shared.registry.catalog().stores.iter().flatten());
        }
        self.workers.failed.take().map_or(result, Err)
    }
}

fn nobody_flushes() -> ServerError {
    ServerError::Flush("no worker is left".into())
}
