//! Errors of a run.

use std::fmt;

use riser_block::BlockError;
use thiserror::Error;

use super::job::{COMMAND_LINE, Job};

/// Error of a run.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BenchError {
    /// The job is invalid, or not supported by this device.
    #[error("{0}")]
    Config(String),
    /// An operation of the device failed.
    #[error("{operation} of {len} bytes at byte {offset} failed: {error}")]
    Operation {
        /// Kind of operation.
        operation: &'static str,
        /// Offset on the device, in bytes.
        offset: u64,
        /// Length of the operation, in bytes.
        len: u64,
        /// Error returned by the device.
        error: BlockError,
    },
    /// The data read differs from the data written.
    #[error("{0}")]
    Mismatch(Box<Mismatch>),
    /// The state file cannot be used.
    #[error("state file {path}: {reason}")]
    State {
        /// Path of the file.
        path: String,
        /// Description of the error.
        reason: String,
    },
    /// The thread of the device exited during the run.
    #[error("the device was closed during the run")]
    Closed,
}

impl BenchError {
    /// Adds the name of the invalid job, if the user has assigned one.
    pub(super) fn of_job(self, job: &Job) -> Self {
        match self {
            Self::Config(what) if job.name != COMMAND_LINE => {
                Self::Config(format!("job `{}`: {what}", job.name))
            }
            other => other,
        }
    }
}

/// A block with unexpected contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Offset of the first wrong byte if known, otherwise of the block.
    pub offset: u64,
    /// Offset of the block.
    pub block: u64,
    /// Difference from the expected contents.
    pub what: Difference,
}

/// Difference between a block and its expected contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// The block has no header.
    NoHeader,
    /// The block has another length.
    Length {
        /// Length in the header, in bytes.
        found: u32,
    },
    /// The block was written by another run.
    Seed {
        /// Seed in the header.
        found: u64,
        /// Seed of this run.
        expected: u64,
    },
    /// The checksum doesn't match the block, and we don't know what was written.
    Checksum,
    /// The block was written to another offset.
    Offset {
        /// Offset in the header, in bytes.
        found: u64,
    },
    /// A write was lost, or the block of an unacknowledged write reappeared.
    Generation {
        /// Generation in the header.
        found: u32,
        /// Oldest generation expected.
        oldest: u32,
        /// Newest generation expected.
        newest: u32,
    },
    /// A byte differs.
    Byte {
        /// Value read.
        found: u8,
        /// Value written.
        expected: u8,
        /// Generation in the header.
        generation: u32,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            offset,
            block,
            what,
        } = self;
        match what {
            Difference::NoHeader => {
                write!(f, "byte {block}: the block has no verification header")
            }
            Difference::Length { found } => write!(
                f,
                "byte {block}: the block was written with a block size of {found} bytes, which \
                 differs from this job"
            ),
            Difference::Seed { found, expected } => write!(
                f,
                "byte {block}: the block was written by another run (seed {found:#x}, expected \
                 {expected:#x})"
            ),
            Difference::Checksum => write!(
                f,
                "byte {block}: invalid checksum, or another checksum algorithm"
            ),
            Difference::Offset { found } => {
                write!(f, "byte {block}: the block was written to byte {found}")
            }
            Difference::Generation {
                found,
                oldest,
                newest,
            } if oldest == newest => write!(
                f,
                "byte {block}: the block has generation {found}, but {newest} was acknowledged"
            ),
            Difference::Generation {
                found,
                oldest,
                newest,
            } => write!(
                f,
                "byte {block}: the block has generation {found}, expected {oldest} to {newest}"
            ),
            Difference::Byte {
                found,
                expected,
                generation,
            } => write!(
                f,
                "byte {offset} is {found:#04x}, but {expected:#04x} was written there (block at byte \
                 {block}, generation {generation})"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_error_includes_job_name() {
        let error = |name: &str| {
            let job = Job {
                name: name.into(),
                ..Job::default()
            };
            let error = BenchError::Config("it is wrong".into());
            error.of_job(&job).to_string()
        };
        assert_eq!(error("a"), "job `a`: it is wrong");
        assert_eq!(error(COMMAND_LINE), "it is wrong");
    }
}
