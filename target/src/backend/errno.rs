//! Maps errors of the host to those that a logical unit reports.

use riser_scsi::step::BackendError;

/// Translates an error number of an operation whose first unfinished byte is at `offset`.
///
/// What may pass (`EAGAIN`, no memory, a cancellation) may be retried by the initiator; what says
/// that the data is bad names the place; what says that the device is gone is not ready.
pub(super) fn from_errno(errno: i32, offset: u64) -> BackendError {
    match errno {
        // Lost or damaged data. EUCLEAN and EBADMSG are what XFS and ext4 say of metadata that
        // fail their checks.
        libc::EIO
        | libc::EILSEQ
        | libc::ENODATA
        | libc::EREMOTEIO
        | libc::EBADMSG
        | libc::EUCLEAN => BackendError::Medium {
            offset: Some(offset),
        },
        // The initiator can end these by freeing blocks, so they are not reported as errors of the
        // medium.
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => BackendError::NoSpace,
        // The file was opened for what the unit allows, so a refusal now means that its file
        // system was remounted read-only, as ext4 may do after an error.
        libc::EROFS | libc::EPERM | libc::EACCES | libc::EBADF => BackendError::ReadOnly,
        // A device that was pulled, or a network file system, or one in user space, that has lost
        // its server: the data may come back.
        libc::ENODEV
        | libc::ENXIO
        | libc::ENOMEDIUM
        | libc::ESHUTDOWN
        | libc::ENOLINK
        | libc::ESTALE
        | libc::ENOTCONN
        | libc::ECONNABORTED
        | libc::ETIMEDOUT => BackendError::NotReady,
        libc::ECANCELED | libc::EINTR | libc::EAGAIN | libc::ENOMEM | libc::EBUSY => {
            BackendError::Aborted
        }
        // EINVAL or EFAULT, for instance, would be our own mistakes, and must not be blamed on the
        // medium.
        _ => BackendError::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_their_meaning() {
        for (errno, expected) in [
            (5, BackendError::Medium { offset: Some(512) }),
            (28, BackendError::NoSpace),
            (30, BackendError::ReadOnly),
            (19, BackendError::NotReady),
            (103, BackendError::NotReady),
            (107, BackendError::NotReady),
            (125, BackendError::Aborted),
            (14, BackendError::Internal),
        ] {
            assert_eq!(from_errno(errno, 512), expected);
        }
    }
}
