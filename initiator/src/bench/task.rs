//! What is run, and how.

use std::sync::Arc;
use std::time::Duration;

use super::job::Job;

/// A job with the device that it runs on.
#[derive(Debug)]
pub struct Task<D> {
    /// The job.
    pub job: Job,
    /// Address of the device, for the result.
    pub address: String,
    /// Name of the RDMA device that it is reached over, for the result.
    pub rdma_device: Option<String>,
    /// Name of the device by which a state file knows it: the same at each address that leads to it,
    /// as far as that can be.
    pub identity: String,
    /// The device, opened at least once: the clones are distributed over the connections.
    pub devices: Vec<Arc<D>>,
}

/// Options of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunOptions {
    /// Length of the intervals of the figures.
    pub interval: Duration,
    /// Process that serves the device, if its use of the processor is to be measured.
    pub server_pid: Option<u32>,
    /// Number of the run among those of a command: with the same seed, each does other operations
    /// with other content, so that storage does not know them from an earlier one.
    pub run: u64,
    /// Most memory of the figures over time of a job, in bytes; beyond, intervals become longer.
    pub memory: usize,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(1),
            server_pid: None,
            run: 0,
            memory: 512 << 20,
        }
    }
}
