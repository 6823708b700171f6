//! Errors for block operations.

use thiserror::Error;

/// Block operation error. Exports can use [`BlockError::errno`] to convert it to a
/// protocol-specific code.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BlockError {
    /// I/O error returned by the device.
    #[error("I/O error: {0}")]
    Io(String),
    /// Medium error for this range.
    #[error("medium error: {0}")]
    Medium(String),
    /// A check of protection information failed: the data was damaged, or is from a different
    /// block. Such data is never returned.
    #[error("protection information: {0}")]
    Protection(String),
    /// The device may have lost acknowledged writes that were covered by this flush.
    #[error("I/O error: the device may have lost acknowledged writes")]
    WritesLost,
    /// Not enough space on the device.
    #[error("no space left on the device")]
    NoSpace,
    /// The device is read-only.
    #[error("the device is write-protected")]
    ReadOnly,
    /// The device is reserved by another initiator.
    #[error("the device is reserved by another initiator")]
    ReservationConflict,
    /// Operation not supported by the device.
    #[error("the device does not support this operation")]
    Unsupported,
    /// The request exceeds the device size or a limit.
    #[error("the request exceeds the device's bounds")]
    OutOfRange,
    /// Timeout while waiting for a response.
    #[error("the operation timed out")]
    TimedOut,
    /// The connection to the device was closed.
    #[error("the device is disconnected: {0}")]
    Disconnected(String),
}

impl BlockError {
    /// Best matching Linux error number.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Io(_) | Self::Medium(_) | Self::WritesLost => libc::EIO,
            Self::Protection(_) => libc::EILSEQ,
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
