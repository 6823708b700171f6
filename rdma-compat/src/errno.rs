//! Error numbers.

use std::ffi::c_int;
use std::io::ErrorKind;
use std::ptr;

use riser_transport::verbs::{PostReason, VerbsError};
use tracing::debug;

/// A positive error number of the operating system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) c_int);

impl Errno {
    pub(crate) const INVALID: Self = Self(libc::EINVAL);
    pub(crate) const UNSUPPORTED: Self = Self(libc::EOPNOTSUPP);
    pub(crate) const NOT_FOUND: Self = Self(libc::ENOENT);
    pub(crate) const NO_MEMORY: Self = Self(libc::ENOMEM);

    /// Returns the error of the last failed system call of this thread.
    pub(crate) fn last() -> Self {
        let error = std::io::Error::last_os_error();
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }

    /// Sets the thread's `errno`.
    pub(crate) fn set(self) {
        // SAFETY: the C library provides a location for each thread.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

impl From<VerbsError> for Errno {
    fn from(error: VerbsError) -> Self {
        // The error number is not very specific, so we log which value or attribute was rejected.
        debug!("refused: {error}");
        Self(match error {
            VerbsError::ResourceBusy(_) => libc::EBUSY,
            VerbsError::InsufficientResources(_) => libc::ENOMEM,
            VerbsError::WrongQpType(_) | VerbsError::Unsupported(_) => libc::EOPNOTSUPP,
            VerbsError::CqOverrun => libc::EOVERFLOW,
            VerbsError::DeviceGone => libc::EIO,
            VerbsError::Os(errno) => errno,
            _ => libc::EINVAL,
        })
    }
}

impl From<PostReason> for Errno {
    fn from(reason: PostReason) -> Self {
        Self(match reason {
            PostReason::QueueFull => libc::ENOMEM,
            PostReason::InvalidOpcode => libc::EOPNOTSUPP,
            PostReason::Os(errno) => errno,
            _ => libc::EINVAL,
        })
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or_else(|| match error.kind() {
            // Errors of our own libraries only have a kind.
            ErrorKind::AddrInUse => libc::EADDRINUSE,
            ErrorKind::AddrNotAvailable => libc::EADDRNOTAVAIL,
            ErrorKind::InvalidInput => libc::EINVAL,
            ErrorKind::Unsupported => libc::EOPNOTSUPP,
            ErrorKind::QuotaExceeded => libc::EUSERS,
            ErrorKind::NotFound => libc::ENOENT,
            ErrorKind::PermissionDenied => libc::EACCES,
            ErrorKind::StorageFull => libc::ENOSPC,
            _ => libc::EIO,
        }))
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(error: rustix::io::Errno) -> Self {
        Self(error.raw_os_error())
    }
}

/// Converts the result of a function that returns 0 or an error number.
pub(crate) fn number(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            errno.set();
            errno.0
        }
    }
}

/// Converts the result of a function that returns 0, or -1 with the error in `errno`.
pub(crate) fn minus(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            errno.set();
            -1
        }
    }
}

/// Converts the result of a function that returns a pointer, or null with the error in `errno`.
pub(crate) fn pointer<T>(result: Result<*mut T, Errno>) -> *mut T {
    result.unwrap_or_else(|errno| {
        errno.set();
        ptr::null_mut()
    })
}
