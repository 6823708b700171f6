//! Helper threads whose jobs are steps of a schedule.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex};

use crate::objects::lock;
use crate::threads::{Helper, Job, Spawned};

/// Number of a simulated thread, assigned in start order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ThreadId(u64);

/// Threads that only run when their driver tells them to. Clones refer to the same threads.
#[derive(Debug, Clone, Default)]
pub struct Threads(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    started: u64,
    threads: Vec<Thread>,
}

struct Thread {
    id: ThreadId,
    jobs: VecDeque<Job>,
    capacity: usize,
    /// Set if the owner was dropped. The thread exits after its remaining jobs.
    is_ending: bool,
}

impl std::fmt::Debug for Thread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Thread({}, {} jobs)", self.id.0, self.jobs.len())
    }
}

impl Threads {
    /// Returns the threads that have jobs, ordered by number.
    #[must_use]
    pub fn runnable(&self) -> Vec<ThreadId> {
        let state = lock(&self.0);
        let busy = state.threads.iter().filter(|t| !t.jobs.is_empty());
        busy.map(|t| t.id).collect()
    }

    /// Runs the next job of a thread. Returns `false` if it has none.
    pub fn step(&self, id: ThreadId) -> bool {
        let job = self.take_job(id);
        let is_done = job.is_some();
        // The lock is released first, because a job may start another thread.
        if let Some(job) = job {
            job();
        }
        is_done
    }

    fn take_job(&self, id: ThreadId) -> Option<Job> {
        let mut state = lock(&self.0);
        let at = state.threads.iter().position(|t| t.id == id)?;
        let thread = &mut state.threads[at];
        let job = thread.jobs.pop_front();
        if thread.is_ending && thread.jobs.is_empty() {
            state.threads.remove(at);
        }
        job
    }

    fn start(&self, capacity: usize, first: Option<Job>) -> ThreadId {
        let mut state = lock(&self.0);
        state.started += 1;
        let id = ThreadId(state.started);
        let is_ending = first.is_some();
        state.threads.push(Thread {
            id,
            jobs: first.into_iter().collect(),
            capacity,
            is_ending,
        });
        id
    }
}

impl crate::Threads for Threads {
    fn helper(&self, capacity: usize) -> io::Result<Box<dyn Helper>> {
        Ok(Box::new(SimulatedHelper {
            id: self.start(capacity, None),
            threads: self.clone(),
        }))
    }

    fn spawn(&self, _name: &str, job: Job) -> io::Result<Box<dyn Spawned>> {
        Ok(Box::new(SimulatedSpawned {
            id: self.start(1, Some(job)),
            threads: self.clone(),
        }))
    }
}

#[derive(Debug)]
struct SimulatedHelper {
    id: ThreadId,
    threads: Threads,
}

impl Helper for SimulatedHelper {
    fn run(&mut self, job: Job) -> Result<(), Job> {
        let mut state = lock(&self.threads.0);
        let thread = state.threads.iter_mut().find(|t| t.id == self.id);
        let thread = thread.expect("it ends with its owner");
        if thread.jobs.len() >= thread.capacity {
            return Err(job);
        }
        thread.jobs.push_back(job);
        Ok(())
    }
}

impl Drop for SimulatedHelper {
    fn drop(&mut self) {
        // Remaining jobs will still run when scheduled, like in a detached thread.
        let mut state = lock(&self.threads.0);
        if let Some(thread) = state.threads.iter_mut().find(|t| t.id == self.id) {
            thread.is_ending = true;
        }
        state.threads.retain(|t| !t.is_ending || !t.jobs.is_empty());
    }
}

#[derive(Debug)]
struct SimulatedSpawned {
    id: ThreadId,
    threads: Threads,
}

impl Spawned for SimulatedSpawned {
    fn join(self: Box<Self>) {
        while self.threads.step(self.id) {}
    }
}
