//! Drains a server before a handover. This can be undone.
//!
//! ```text
//! logins rejected, listeners paused → commands in flight complete, sessions log out, block
//!   operations of removed backends complete
//!   → all workers drained → flush of every backend → ready for the shutdown
//!   any failure or timeout: listeners resumed, logins accepted
//! ```
//!
//! A shutdown has to wait for block operations, because their buffers belong to the process. If a
//! disk hangs, it would wait for minutes without service, and then fail. Therefore, an upgrade
//! checks for such operations first ([`Server::check_block_operations`]). If an operation hangs
//! later, sessions are lost and have to log in again, but the server continues, and the contents of
//! RAM disks are kept.

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::hanging::{BlockCheck, POLL, REPLY};
use super::{LAST_IO, PATIENCE, Server, ServerError};
use crate::worker::Report;
use crate::worker::mail::Mail;

/// Additional time for block operations after the sessions' patience.
const DRAINING: Duration = Duration::from_secs(10);

/// A drain in progress.
#[derive(Debug)]
pub struct Drain {
    phase: Phase,
    /// Deadline for the phase.
    until: Instant,
}

#[derive(Debug)]
enum Phase {
    /// Sessions complete their commands and log out. These workers do not have any sessions or block
    /// operations left.
    Sessions(BTreeSet<u16>),
    /// A worker flushes all backends. This is the flush number.
    Flushing(u64),
    /// The deadline has passed, possibly because of a block operation.
    Diagnosing(BlockCheck),
    /// Workers resume because of this error.
    Resuming(ServerError, Vec<Receiver<()>>),
    /// The drain is complete, or was undone because of an error.
    Over(Result<(), ServerError>),
}

impl Drain {
    /// Returns the time at which the phase ends without a report.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        self.until
    }
}

impl Server {
    /// Logs out all sessions and flushes every backend, so that a shutdown does not have to wait.
    ///
    /// # Errors
    /// Returns a [`ServerError`]. The server has resumed in this case.
    pub fn drain(&mut self) -> Result<(), ServerError> {
        let mut drain = self.begin_drain(Instant::now());
        loop {
            if let Some(result) = self.poll_drain(&mut drain, Instant::now()) {
                return result;
            }
            thread::sleep(POLL);
        }
    }

    /// Starts a drain. The caller has to poll it.
    pub fn begin_drain(&mut self, now: Instant) -> Drain {
        self.workers.poll_reports();
        // Do this first, so that no new session can start and miss the logout below.
        self.shared.registry.stop();
        let until = now + PATIENCE;
        for sender in &self.workers.senders {
            let _ = sender.send_blocking(Mail::Drain { until });
        }
        Drain {
            phase: Phase::Sessions(BTreeSet::new()),
            until: until + DRAINING,
        }
    }

    /// Handles the reports of workers. Returns the result when the drain is over.
    pub fn poll_drain(
        &mut self,
        drain: &mut Drain,
        now: Instant,
    ) -> Option<Result<(), ServerError>> {
        loop {
            self.advance_drain(drain, now);
            if let Phase::Over(result) = &mut drain.phase {
                return Some(std::mem::replace(result, Ok(())));
            }
            match self.workers.reports.try_recv() {
                Ok(report) => self.handle_drain_report(drain, report, now),
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) => {
                    self.undo_drain(drain, ServerError::Timeout("a worker"), now);
                }
            }
        }
    }

    fn handle_drain_report(&mut self, drain: &mut Drain, report: Report, now: Instant) {
        self.workers.note(&report);
        match (&mut drain.phase, report) {
            // If a worker sends a report before it resumes, it must not count for a later drain.
            (Phase::Resuming(..) | Phase::Over(_), _) => {}
            (_, Report::Ended(index, message)) => {
                self.undo_drain(drain, super::workers::ended(index, message), now);
            }
            (Phase::Sessions(drained), Report::Quiet(worker)) => _ = drained.insert(worker),
            (Phase::Flushing(number), Report::Flushed(of, result)) if of == *number => match result
            {
                Ok(()) => drain.phase = Phase::Over(Ok(())),
                Err(error) => self.undo_drain(drain, ServerError::Flush(error), now),
            },
            _ => {}
        }
    }

    /// Enters the next phase if the current phase has completed.
    fn advance_drain(&mut self, drain: &mut Drain, now: Instant) {
        match &mut drain.phase {
            Phase::Sessions(drained) if drained.len() == self.workers.senders.len() => {
                let number = self.workers.next_flush();
                // Any worker can flush for all: the backends are shared.
                if let Some(sender) = self.workers.senders.first() {
                    let _ = sender.send_blocking(Mail::Flush(number));
                }
                drain.phase = Phase::Flushing(number);
                drain.until = now + LAST_IO;
            }
            Phase::Sessions(_) | Phase::Flushing(_) if now >= drain.until => {
                let check = self.begin_block_check(now);
                drain.until = check.deadline();
                drain.phase = Phase::Diagnosing(check);
            }
            Phase::Diagnosing(check) => {
                if let Some(result) = check.poll(now) {
                    let timeout = ServerError::Timeout("all sessions to close");
                    let error = result.err().unwrap_or(timeout);
                    self.undo_drain(drain, error, now);
                }
            }
            Phase::Resuming(_, replies) => {
                let is_due = |reply: &mut Receiver<()>| {
                    now < drain.until && matches!(reply.try_recv(), Err(TryRecvError::Empty))
                };
                replies.retain_mut(is_due);
                if replies.is_empty() {
                    self.workers.poll_reports();
                    let over = Phase::Over(Ok(()));
                    if let Phase::Resuming(error, _) = std::mem::replace(&mut drain.phase, over) {
                        drain.phase = Phase::Over(Err(error));
                    }
                }
            }
            Phase::Sessions(_) | Phase::Flushing(_) | Phase::Over(_) => {}
        }
    }

    /// Resumes the server.
    fn undo_drain(&mut self, drain: &mut Drain, error: ServerError, now: Instant) {
        self.shared.registry.resume();
        let replies = self.workers.senders.iter().map(|sender| {
            let (tx, rx) = channel();
            let _ = sender.send_blocking(Mail::Resume(tx));
            rx
        });
        let replies = replies.collect();
        drain.phase = Phase::Resuming(error, replies);
        drain.until = now + REPLY;
    }
}
