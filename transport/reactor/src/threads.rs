//! [`Threads`]: the source of helper threads, either the system or a simulation's schedule.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time that a helper has to finish when it is dropped.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// Work for a thread.
pub type Job = Box<dyn FnOnce() + Send>;

/// Source of threads for blocking system calls.
pub trait Threads: Debug + Send + Sync {
    /// Starts a thread that runs jobs in order and has a queue of `capacity` jobs.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started.
    fn helper(&self, capacity: usize) -> io::Result<Box<dyn Helper>>;

    /// Starts a thread for a single job. It keeps running if the return value is dropped.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started. The job is dropped.
    fn spawn(&self, name: &str, job: Job) -> io::Result<Box<dyn Spawned>>;
}

/// A thread that runs jobs in order. Dropping it waits for its queued jobs, but only for a short
/// time, because a system call may never return.
pub trait Helper: Debug + Send {
    /// Queues a job.
    ///
    /// # Errors
    /// Returns the job if the queue is full.
    ///
    /// # Panics
    /// Panics if the helper has died, which can only be caused by a panicking job.
    fn run(&mut self, job: Job) -> Result<(), Job>;
}

/// A thread with one job.
pub trait Spawned: Debug + Send {
    /// Returns when the job has completed or panicked.
    fn join(self: Box<Self>);
}

/// Threads of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemThreads;

impl Threads for SystemThreads {
    fn helper(&self, capacity: usize) -> io::Result<Box<dyn Helper>> {
        Ok(Box::new(SystemHelper::start(capacity)?))
    }

    fn spawn(&self, name: &str, job: Job) -> io::Result<Box<dyn Spawned>> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(job)?;
        Ok(Box::new(SystemSpawned(thread)))
    }
}

/// A thread and its job queue. If the thread doesn't exit within two seconds after this is dropped,
/// it is detached with its current job. It won't start another job, and exits after the current job
/// or with the process.
#[derive(Debug)]
struct SystemHelper {
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
    is_left: Arc<AtomicBool>,
}

impl SystemHelper {
    fn start(capacity: usize) -> io::Result<Self> {
        let (jobs, inbox): (_, Receiver<Job>) = sync_channel(capacity.max(1));
        let is_left = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&is_left);
        let thread = std::thread::Builder::new()
            .name("riser-offload".into())
            .spawn(move || {
                while let Ok(job) = inbox.recv() {
                    // A detached helper must not start another job, because the job's owner no
                    // longer exists.
                    if is_over.load(Ordering::Acquire) {
                        break;
                    }
                    job();
                }
            })?;
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
            is_left,
        })
    }
}

impl Helper for SystemHelper {
    fn run(&mut self, job: Job) -> Result<(), Job> {
        let jobs = self.jobs.as_ref().expect("present until drop");
        jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(job) => job,
            TrySendError::Disconnected(_) => panic!("the helper thread panicked"),
        })
    }
}

impl Drop for SystemHelper {
    fn drop(&mut self) {
        // Closing the queue makes the thread exit when it has completed all queued jobs.
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let until = Instant::now() + END_PATIENCE;
            while !thread.is_finished() {
                if Instant::now() >= until {
                    self.is_left.store(true, Ordering::Release);
                    return;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            // A panic of a job was already reported on its own thread, and there is no caller to
            // report it to.
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct SystemSpawned(JoinHandle<()>);

impl Spawned for SystemSpawned {
    fn join(self: Box<Self>) {
        // As above.
        let _ = self.0.join();
    }
}
