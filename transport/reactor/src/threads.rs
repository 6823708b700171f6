//! [`Threads`]: where helper threads come from: the system, or a simulation's schedule.

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

/// Source of threads for system calls that may block.
pub trait Threads: Debug + Send + Sync {
    /// Starts a thread that does one job after another, and holds `capacity` of them that wait.
    ///
    /// # Errors
    /// The error of starting it.
    fn helper(&self, capacity: usize) -> io::Result<Box<dyn Helper>>;

    /// Starts a thread for one job, which goes on when what this returns is dropped.
    ///
    /// # Errors
    /// The error of starting it; the job is dropped.
    fn spawn(&self, name: &str, job: Job) -> io::Result<Box<dyn Spawned>>;
}

/// A thread that does one job after another. Dropping it finishes the jobs that it has; but a
/// system call may never return, and dropping a helper does not wait for that for long.
pub trait Helper: Debug + Send {
    /// Queues a job.
    ///
    /// # Errors
    /// Gives the job back where as many wait as the helper holds.
    ///
    /// # Panics
    /// If the helper died, which only a panicking job can cause.
    fn run(&mut self, job: Job) -> Result<(), Job>;
}

/// A thread with one job.
pub trait Spawned: Debug + Send {
    /// Returns when the job has ended, or panicked.
    fn join(self: Box<Self>);
}

/// The threads of the system.
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

/// A thread and the queue into it. When it is dropped and does not end within two seconds, the
/// thread is left alone with the job that it has: it begins no other, and ends with that or with
/// the process.
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
                    // A helper that was left alone begins no further job, whose owner is gone.
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
            TrySendError::Disconnected(_) => panic!("the helper thread died"),
        })
    }
}

impl Drop for SystemHelper {
    fn drop(&mut self) {
        // Closing the queue ends the thread once it has done what is in it.
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
            // A panic of a job has been reported on its own thread; there is no caller to report
            // to.
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
