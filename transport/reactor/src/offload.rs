//! [`Offload`]: a helper thread for the few blocking system calls that the ring cannot make.
//!
//! The ring has no operation for `BLKDISCARD` on every kernel we serve, nor for finding the holes
//! of a file. A worker hands such a call here and gets its result through its own ring, so it
//! never blocks and still has one park point.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::slot::Token;
use crate::threads::{Helper, Threads};
use crate::waker::Waker;

/// A helper thread, the queue into it and the results out of it.
///
/// The queue holds a fixed number of jobs. Results are bounded by the jobs accepted and not yet
/// collected. Dropping it drops the [`Helper`], which finishes the jobs already queued, if it can
/// do so soon.
#[derive(Debug)]
pub struct Offload<R> {
    /// First, since it is dropped first: its jobs send their results while there is a receiver.
    helper: Box<dyn Helper>,
    results: Receiver<(Token, R)>,
    outbox: Sender<(Token, R)>,
    waker: Waker,
    outstanding: usize,
    capacity: usize,
}

/// The helper has as many jobs as it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the helper thread's queue is full")]
pub struct OffloadFull;

impl<R: Send + 'static> Offload<R> {
    /// Starts a helper that holds at most `capacity` jobs whose results are not collected, and
    /// rings `waker` after each.
    ///
    /// # Errors
    /// The error of starting the thread.
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

    /// Queues a job. Its result comes out of [`Offload::poll_result`] with the same token.
    ///
    /// # Errors
    /// [`OffloadFull`] at the bound; the job is dropped.
    ///
    /// # Panics
    /// If the helper died, which only a panicking job can cause.
    pub fn submit(
        &mut self,
        token: Token,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> Result<(), OffloadFull> {
        // Counted until the result is collected, which bounds the results as well.
        if self.outstanding >= self.capacity {
            return Err(OffloadFull);
        }
        let (outbox, waker) = (self.outbox.clone(), self.waker.clone());
        let job = Box::new(move || {
            // After the result is in the queue. If its receiver is gone, no worker sleeps.
            if outbox.send((token, job())).is_ok() {
                waker.wake();
            }
        });
        self.helper.run(job).map_err(|_| OffloadFull)?;
        self.outstanding += 1;
        Ok(())
    }

    /// The next finished job, if there is one.
    pub fn poll_result(&mut self) -> Option<(Token, R)> {
        let done = self.results.try_recv().ok()?;
        self.outstanding -= 1;
        Some(done)
    }

    /// Jobs whose results have not been collected.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }
}
