//! Maps errors of the host to errors reported by a logical unit.

use std::io;

use riser_scsi::step::BackendError;

/// Returns whether an error only affects some blocks.
pub(super) fn is_medium_error(error: &io::Error) -> bool {
    let errno = error.raw_os_error();
    errno.is_some_and(|errno| matches!(from_errno(errno, 0), BackendError::Medium { .. }))
}

/// Maps the error number of an operation. Its first incomplete byte is at `offset`.
///
/// Temporary errors (`EAGAIN`, out of memory or descriptors, cancellation) may be retried by the
/// initiator. Errors for damaged data include the offset. Errors for a missing device are reported
/// as not ready.
pub(super) fn from_errno(errno: i32, offset: u64) -> BackendError {
    match errno {
        // Lost or damaged data. XFS and ext4 return EUCLEAN or EBADMSG if metadata verification
        // fails.
        libc::EIO
        | libc::EILSEQ
        | libc::ENODATA
        | libc::EREMOTEIO
        | libc::EBADMSG
        | libc::EUCLEAN => BackendError::Medium {
            offset: Some(offset),
        },
        // The initiator can resolve this by freeing blocks, so these aren't reported as medium
        // errors.
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => BackendError::NoSpace,
        // The file was opened with the access required by the unit, so this means that its file
        // system was remounted read-only, for example by ext4 after an error.
        libc::EROFS | libc::EPERM | libc::EACCES | libc::EBADF => BackendError::ReadOnly,
        // A device was removed, or a network or user-space file system has lost its server. The
        // data may become available again.
        libc::ENODEV
        | libc::ENXIO
        | libc::ENOMEDIUM
        | libc::ESHUTDOWN
        | libc::ENOLINK
        | libc::ESTALE
        | libc::ENOTCONN
        | libc::ECONNABORTED
        | libc::ETIMEDOUT => BackendError::NotReady,
        libc::ECANCELED
        | libc::EINTR
        | libc::EAGAIN
        | libc::ENOMEM
        | libc::EBUSY
        | libc::EMFILE
        | libc::ENFILE => BackendError::Aborted,
        // For example, EINVAL or EFAULT would be a bug in this program and must not be reported as
        // a medium error.
        _ => BackendError::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_maps_to_backend_error() {
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
