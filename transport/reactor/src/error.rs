//! Ring errors. Errors of individual operations are reported as negative results in a
//! [`Completion`](crate::Completion), using the kernel's error numbers.

use std::io;

/// Error returned if a ring cannot be created or entered.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The kernel has no `io_uring` (`ENOSYS`): it is older than 5.11, was built without it, or a
    /// seccomp filter, such as a container's default profile, hides it.
    #[error(
        "io_uring is not available (ENOSYS): the kernel lacks it, or a seccomp filter hides it; \
         a container needs a profile that allows io_uring_setup, io_uring_enter and io_uring_register"
    )]
    Missing,
    /// The kernel denies `io_uring` to this process (`EPERM`, `EACCES`).
    #[error(
        "io_uring is forbidden to this process (EPERM): sysctl kernel.io_uring_disabled is {}; \
         0 allows it to everyone, 1 to the group in kernel.io_uring_group and to CAP_SYS_ADMIN, \
         2 to no process. A seccomp filter can have the same effect", 
        .sysctl.as_deref().unwrap_or("unreadable")
    )]
    Forbidden {
        /// The value of `kernel.io_uring_disabled`, if `/proc` shows it.
        sysctl: Option<String>,
    },
    /// There is no memory for the rings. The kernel charges rings and registered memory to the
    /// user's `RLIMIT_MEMLOCK`, so all rings should be created before much memory is registered
    /// with any ring.
    #[error(
        "cannot allocate an io_uring of {capacity} operations (raise ulimit -l, LimitMEMLOCK= in a systemd unit): {source}"
    )]
    Memory {
        /// The requested capacity.
        capacity: u32,
        /// The error returned by the kernel.
        source: io::Error,
    },
    /// Any other failure to set up the ring.
    #[error("cannot set up an io_uring: {0}")]
    Setup(#[source] io::Error),
    /// The requested capacity is zero or larger than the kernel's limit.
    #[error("invalid io_uring capacity {requested}: must be between 1 and {max}")]
    Capacity {
        /// The requested capacity.
        requested: u32,
        /// The kernel's limit.
        max: u32,
    },
    /// The ring failed while submitting or waiting, and can no longer be used.
    #[error("io_uring_enter failed: {0}")]
    Enter(#[source] io::Error),
}

impl RingError {
    /// Classifies an error returned by `io_uring_setup`.
    pub(crate) fn from_setup(error: io::Error, capacity: u32) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOSYS) => Self::Missing,
            Some(libc::EPERM | libc::EACCES) => Self::Forbidden {
                sysctl: std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled")
                    .ok()
                    .map(|s| s.trim().to_owned()),
            },
            Some(libc::ENOMEM) => Self::Memory {
                capacity,
                source: error,
            },
            _ => Self::Setup(error),
        }
    }
}

/// Error returned if an operation was not accepted. No operation was queued, and the caller still
/// owns all resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// All slots are in use. Completions must be reaped first.
    #[error("too many operations in flight: every slot of the ring is in use")]
    Full,
    /// The scatter list has more pieces, after merging adjacent pieces, than the ring supports.
    #[error("too many scatter-gather entries: the limit is {max}")]
    TooManySlices {
        /// The limit, in pieces.
        max: usize,
    },
    /// The scatter list is empty, or longer than the maximum length of an operation (2 GiB minus
    /// one page).
    #[error("transfer too long for one operation: {len} bytes")]
    Length {
        /// Total length in bytes.
        len: usize,
    },
    /// The kernel did not accept the queue and returned this error number.
    #[error("io_uring_enter failed with error {0}")]
    Enter(i32),
}

/// Error returned if memory or a file was not registered. It can still be used without
/// registration, but with more overhead.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The ring's table has no free entry, or the kernel is too old for such tables.
    #[error("the registration table of the ring is full")]
    NoRoom,
    /// The kernel rejected the registration. `ENOMEM` means that `RLIMIT_MEMLOCK` was exceeded.
    #[error("the kernel rejected the registration (ulimit -l limits it): {0}")]
    Kernel(#[source] io::Error),
}
