//! [`Offload`]: a helper thread for the few blocking system calls that the ring does not support.
//!
//! Not all supported kernels have a ring operation for `BLKDISCARD`, and none has one for finding
//! the holes of a file. A worker submits such a call here and receives its result through its own
//! ring, so it never blocks and still has a single place to park.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::slot::Token;
use crate::threads::{Helper, Threads};
use crate::waker::Waker;

/// A helper thread, its job queue and its result queue.
///
/// The queue holds a fixed number of jobs. The number of results is bounded by the number of
/// accepted jobs that have not been collected yet. Dropping this drops the [`Helper`], which
/// finishes queued jobs if this doesn't take too long.
#[derive(Debug)]
pub struct Offload<R> {
    /// The first field, because it must be dropped first: its jobs send their results while the
    /// receiver still exists.
    helper: Box<dyn Helper>,
    results: Receiver<(Token, R)>,
    outbox: Sender<(Token, R)>,
    waker: Waker,
    outstanding: usize,
    capacity: usize,
}

/// The helper's queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the helper thread's queue is full")]
pub struct OffloadFull;

impl<R: Send + 'static> Offload<R> {
    /// Starts a helper which holds at most `capacity` jobs with uncollected results, and wakes
    /// `waker` after each job.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started.
    pub fn new(capacity: usize, waker: Waker, threads: &dyn Threads) -> io::Result<Self> {
        let capacity = capacity.max(1);
        let (outbox, results) = channel();
        Ok(Self {
            helper: threads.helper(capacity)?,
            results,
            outbox,
            waker,
            outstanding: 0,
            capacity,
        })
    }

    /// Queues a job. Its result is returned by [`Offload::poll_result`] with the same token.
    ///
    /// # Errors
    /// Returns [`OffloadFull`] if the queue is full. The job is dropped.
    ///
    /// # Panics
    /// Panics if the helper has died, which can only be caused by a panicking job.
    pub fn submit(
        &mut self,
        token: Token,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> Result<(), OffloadFull> {
        // Jobs are counted until their results are collected, so the results are bounded too.
        if self.outstanding >= self.capacity {
            return Err(OffloadFull);
        }
        let (outbox, waker) = (self.outbox.clone(), self.waker.clone());
        let job = Box::new(move || {
            // This must follow the send. If the receiver was dropped, there's no worker to wake.
            if outbox.send((token, job())).is_ok() {
                waker.wake();
            }
        });
        self.helper.run(job).map_err(|_| OffloadFull)?;
        self.outstanding += 1;
        Ok(())
    }

    /// Returns the result of the next completed job, if any.
    pub fn poll_result(&mut self) -> Option<(Token, R)> {
        let done = self.results.try_recv().ok()?;
        self.outstanding -= 1;
        Some(done)
    }

    /// Returns the number of jobs with uncollected results.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }
}
