//! [`Offload`]: one helper thread for the few blocking system calls that the ring cannot make.
//!
//! The ring has no operation for `BLKDISCARD` on every kernel we serve, nor for finding the holes
//! of a file. A worker hands such a call here and gets its result through its own ring, so it
//! never blocks and still has one park point.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::slot::Token;
use crate::waker::Waker;

type Job<R> = (Token, Box<dyn FnOnce() -> R + Send>);

/// Time that a helper has to finish when it is dropped.
const FAREWELL: Duration = Duration::from_secs(2);

/// A helper thread, the queue into it and the results out of it.
///
/// The queue holds a fixed number of jobs. Results are bounded by the jobs accepted and not yet
/// collected. Dropping it finishes the jobs already queued and joins the thread; but a system call
/// may never return, and dropping a helper must not wait for that. So after two seconds the thread
/// is left alone with the job that it has: it begins no other, and ends with that or with the
/// process.
#[derive(Debug)]
pub struct Offload<R> {
    jobs: Option<SyncSender<Job<R>>>,
    results: Receiver<(Token, R)>,
    thread: Option<JoinHandle<()>>,
    is_left: Arc<AtomicBool>,
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
    pub fn new(capacity: usize, waker: Waker) -> io::Result<Self> {
        let (jobs, inbox) = sync_channel::<Job<R>>(capacity.max(1));
        let (outbox, results) = channel();
        let is_left = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&is_left);
        let thread = std::thread::Builder::new()
            .name("riser-offload".into())
            .spawn(move || {
                while let Ok((token, job)) = inbox.recv() {
                    // A helper that was left alone begins no further job, whose owner is gone.
                    if is_over.load(Ordering::Acquire) || outbox.send((token, job())).is_err() {
                        break;
                    }
                    waker.wake();
                }
            })?;
        Ok(Self {
            jobs: Some(jobs),
            results,
            thread: Some(thread),
            is_left,
            outstanding: 0,
            capacity: capacity.max(1),
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
        let jobs = self.jobs.as_ref().expect("present until drop");
        match jobs.try_send((token, Box::new(job))) {
            Ok(()) => {
                self.outstanding += 1;
                Ok(())
            }
            Err(TrySendError::Full(_)) => Err(OffloadFull),
            Err(TrySendError::Disconnected(_)) => panic!("the helper thread died"),
        }
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

impl<R> Drop for Offload<R> {
    fn drop(&mut self) {
        // Closing the queue ends the thread once it has done what is in it.
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let until = Instant::now() + FAREWELL;
            while !thread.is_finished() {
                if Instant::now() >= until {
                    self.is_left.store(true, Ordering::Release);
                    return;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            // A panic of a job has been reported on its own thread; there is no caller to report
            // to.
            let _ = thread.join();
        }
    }
}
