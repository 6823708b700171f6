//! [`Shutdown`]: the end of a server, in steps. See the [server's](super) header.

use std::collections::BTreeSet;
use std::sync::mpsc::TryRecvError;
use std::time::Instant;

use super::{LAST_EXIT, LAST_IO, PATIENCE, Server, ServerError};
use crate::worker::Report;
use crate::worker::mail::Mail;

/// A shutdown under way.
#[derive(Debug)]
pub struct Shutdown {
    phase: Phase,
    /// Time limit of the phase.
    until: Instant,
}

#[derive(Debug)]
enum Phase {
    /// Sessions finish and log out; these workers have none any more, and run.
    Stopping(BTreeSet<u16>),
    /// A worker makes durable what was written, in the flush with this number.
    Flushing(u64),
    /// Nothing is waited for.
    Over(Result<(), ServerError>),
}

impl Shutdown {
    /// The time at which nothing is waited for any longer.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.until
    }
}

impl Server {
    /// Shuts down: see the module's header. Returns when nothing runs any more.
    ///
    /// # Errors
    /// [`ServerError`] for a worker that failed and for data that could not be made durable.
    pub fn shutdown(mut self) -> Result<(), ServerError> {
        let mut shutdown = self.begin_shutdown(Instant::now());
        while !self.poll_shutdown(&mut shutdown, Instant::now()) {
            let left = shutdown.until.saturating_duration_since(Instant::now());
            // Without a report, the next poll finds the reason.
            if let Ok(report) = self.reports.recv_timeout(left) {
                self.handle_report(&mut shutdown, &report);
            }
        }
        self.finish_shutdown(shutdown)
    }

    /// Begins a shutdown; for callers that give it its turns by [`Server::poll_shutdown`].
    pub fn begin_shutdown(&mut self, now: Instant) -> Shutdown {
        self.poll_reports();
        // First, so that no session can begin that is not logged out below.
        self.shared.registry.stop();
        let until = now + PATIENCE;
        for sender in &self.senders {
            let _ = sender.send_blocking(Mail::Shutdown { until });
        }
        Shutdown {
            phase: Phase::Stopping(BTreeSet::new()),
            until: until + LAST_IO,
        }
    }

    /// Takes the reports that have come; returns whether nothing is waited for any longer.
    pub fn poll_shutdown(&mut self, shutdown: &mut Shutdown, now: Instant) -> bool {
        loop {
            self.advance(shutdown, now);
            if let Phase::Over(_) = shutdown.phase {
                return true;
            }
            let error = match self.reports.try_recv() {
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
        self.note(report);
        let is_last = self.gone == self.senders.len();
        match (&mut shutdown.phase, report) {
            (Phase::Stopping(quiet), Report::Quiet(worker)) => _ = quiet.insert(*worker),
            // It counts among those that are gone.
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

    /// Has a worker flush, once all are quiet or gone: the flush would not cover a write that is
    /// still under way.
    fn advance(&mut self, shutdown: &mut Shutdown, now: Instant) {
        let Phase::Stopping(quiet) = &shutdown.phase else {
            return;
        };
        if quiet.len() + self.gone < self.senders.len() {
            return;
        }
        // Any worker can flush for all: the backends are shared.
        let number = self.next_flush();
        let mut senders = self.senders.iter();
        let flusher = senders.find(|sender| sender.send_blocking(Mail::Flush(number)).is_ok());
        shutdown.until = now + LAST_IO;
        shutdown.phase = match flusher {
            Some(_) => Phase::Flushing(number),
            None => Phase::Over(Err(nobody_flushes())),
        };
    }

    /// Returns the number of the next flush, which its report carries.
    pub(super) fn next_flush(&mut self) -> u64 {
        self.flushes += 1;
        self.flushes
    }

    /// Ends the workers. A server whose workers the caller drives has sent them the order to exit.
    ///
    /// # Errors
    /// As [`Server::shutdown`].
    ///
    /// # Panics
    /// If the shutdown still waits for something.
    pub fn finish_shutdown(mut self, shutdown: Shutdown) -> Result<(), ServerError> {
        let Phase::Over(result) = shutdown.phase else {
            panic!("a shutdown is polled to its end");
        };
        let until = result.is_err().then(|| Instant::now() + LAST_EXIT);
        self.abandon(until);
        let catalog = self.shared.registry.catalog();
        // The thread that saves a failure would end with the process, and the next start would
        // trust the disk.
        let stores = catalog.stores.iter().flatten();
        stores.for_each(|store| store.wait_flush_failure_saved());
        self.failed.take().map_or(result, Err)
    }
}

fn nobody_flushes() -> ServerError {
    ServerError::Flush("no worker is left".into())
}
