//! Jobs to run and options for runs.

use std::sync::Arc;
use std::time::Duration;

use super::job::Job;

/// A job and its device.
#[derive(Debug)]
pub struct Task<D> {
    /// The job.
    pub job: Job,
    /// Address of the device, included in the result.
    pub address: String,
    /// Name of the RDMA device used for the connection, included in the result.
    pub rdma_device: Option<String>,
    /// Type of the protection information that is transferred with the data, included in the result.
    pub protection: Option<u8>,
    /// Name of the device for state files. This is the same for all its addresses, if possible.
    pub identity: String,
    /// The device, with at least one connection. Clones are distributed over the connections.
    pub devices: Vec<Arc<D>>,
}

/// Options of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunOptions {
    /// Length of the intervals for results.
    pub interval: Duration,
    /// Process that serves the device, if its CPU usage should be measured.
    pub server_pid: Option<u32>,
    /// Index of the run for this command. Each run uses different operations and contents, even
    /// with the same seed. Otherwise the storage could cache or deduplicate data from previous
    /// runs.
    pub run: u64,
    /// Maximum memory size in bytes for the results of a job over time. Beyond this, intervals
    /// become longer.
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
