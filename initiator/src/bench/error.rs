//! Reasons why a run has no result.

use std::fmt;

use thiserror::Error;

use super::job::{COMMAND_LINE, Job};
use crate::block::BlockError;

/// Reason why there is no result.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BenchError {
    /// The job is not possible, or not on this device.
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
        /// Error of the device.
        error: BlockError,
    },
    /// Data read differ from those written.
    #[error("{0}")]
    Mismatch(Box<Mismatch>),
    /// The state file cannot be used.
    #[error("state file {path}: {reason}")]
    State {
        /// Path of the file.
        path: String,
        /// Text of the failure.
        reason: String,
    },
    /// The device's thread ended in the middle of the run.
    #[error("the device was closed before the run was over")]
    Closed,
}

impl BenchError {
    /// The same with the name of the job that is not possible, if it was given one.
    pub(super) fn of_job(self, job: &Job) -> Self {
        match self {
            Self::Config(what) if job.name != COMMAND_LINE => {
                Self::Config(format!("job `{}`: {what}", job.name))
            }
            other => other,
        }
    }
}

/// A block whose content is not what was written there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The first wrong byte, as far as it is known; otherwise the first byte of the block.
    pub offset: u64,
    /// First byte of the block.
    pub block: u64,
    /// Difference from what was expected.
    pub what: Difference,
}

/// Difference between a block and what was expected there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// There is no header.
    NoHeader,
    /// The block there has another length.
    Length {
        /// Length in the header, in bytes.
        found: u32,
    },
    /// Another run has written it.
    Seed {
        /// Seed in the header.
        found: u64,
        /// Seed of the blocks of this run.
        expected: u64,
    },
    /// The checksum is not that of the block, and what was written is not known.
    Checksum,
    /// The block belongs to another place.
    Offset {
        /// Offset in the header, in bytes.
        found: u64,
    },
    /// A write is missing, or one that was never acknowledged came back.
    Generation {
        /// Generation in the header.
        found: u32,
        /// Oldest generation that may be there.
        oldest: u32,
        /// Newest generation that may be there.
        newest: u32,
    },
    /// A byte is wrong.
    Byte {
        /// Value that was read.
        found: u8,
        /// Value that was written.
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
                write!(
                    f,
                    "byte {block}: the block has no header of a verified write"
                )
            }
            Difference::Length { found } => write!(
                f,
                "byte {block}: a block of {found} bytes was written there, and the block size of \
                 this job is another one"
            ),
            Difference::Seed { found, expected } => write!(
                f,
                "byte {block}: another run has written the block (its seed is {found:#x}, that of \
                 this run {expected:#x})"
            ),
            Difference::Checksum => write!(
                f,
                "byte {block}: the checksum of the block is wrong, or of another kind"
            ),
            Difference::Offset { found } => write!(
                f,
                "byte {block}: the block there was written to byte {found}"
            ),
            Difference::Generation {
                found,
                oldest,
                newest,
            } if oldest == newest => write!(
                f,
                "byte {block}: the block is of generation {found}, but {newest} was acknowledged"
            ),
            Difference::Generation {
                found,
                oldest,
                newest,
            } => write!(
                f,
                "byte {block}: the block is of generation {found}, not one from {oldest} to {newest}"
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
    fn a_job_is_named_where_it_has_a_name() {
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
