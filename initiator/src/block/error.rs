//! Failures of block operations.

use thiserror::Error;

/// Reason why a block operation failed. Exports turn it into their own codes with
/// [`BlockError::errno`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BlockError {
    /// The device failed the operation.
    #[error("I/O error: {0}")]
    Io(String),
    /// The medium cannot be read or written there.
    #[error("medium error: {0}")]
    Medium(String),
    /// The device has no space left for the write.
    #[error("no space left on the device")]
    NoSpace,
    /// The device refuses writes.
    #[error("the device is write-protected")]
    ReadOnly,
    /// Another initiator reserves the device.
    #[error("another initiator reserves the device")]
    ReservationConflict,
    /// The device does not know the operation.
    #[error("the device does not support this operation")]
    Unsupported,
    /// The request was not within the device or its limits.
    #[error("the request is not within the device's bounds")]
    OutOfRange,
    /// No answer in time.
    #[error("the operation timed out")]
    TimedOut,
    /// The connection to the device is gone.
    #[error("the connection to the device is gone: {0}")]
    Disconnected(String),
}

impl BlockError {
    /// The Linux error number that says it best.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Io(_) | Self::Medium(_) => libc::EIO,
            Self::NoSpace => libc::ENOSPC,
            Self::ReadOnly => libc::EPERM,
            Self::ReservationConflict => libc::EBADE,
            Self::Unsupported => libc::EOPNOTSUPP,
            Self::OutOfRange => libc::EINVAL,
            Self::TimedOut => libc::ETIMEDOUT,
            Self::Disconnected(_) => libc::ENOTCONN,
        }
    }
}
