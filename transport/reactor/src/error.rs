//! Errors of the ring. Errors of single operations are not here: they are negative results in a
//! [`Completion`](crate::Completion), in the kernel's own numbers.

use std::io;

/// Reason why a ring could not be made or entered.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The kernel has no `io_uring` (`ENOSYS`): it is older than 5.11, was built without it, or a
    /// system-call filter, such as a container's default profile, hides it.
    #[error(
        "io_uring is not available (ENOSYS): the kernel lacks it, or a seccomp filter hides it; \
         a container needs a profile that allows io_uring_setup, io_uring_enter and io_uring_register"
    )]
    Missing,
    /// The kernel refuses `io_uring` to this process (`EPERM`, `EACCES`).
    #[error(
        "io_uring is forbidden to this process (EPERM): sysctl kernel.io_uring_disabled is {}; \
         0 allows it to everyone, 1 to the group in kernel.io_uring_group and to CAP_SYS_ADMIN, \
         2 to no process. A seccomp filter can have the same effect", 
        .sysctl.as_deref().unwrap_or("not readable")
    )]
    Forbidden {
        /// The value of `kernel.io_uring_disabled`, where `/proc` shows it.
        sysctl: Option<String>,
    },
    /// No memory for the rings, which the kernel charges to the user's `RLIMIT_MEMLOCK`, together
    /// with registered memory: make every ring before registering much with any.
    #[error(
        "no memory for an io_uring of {capacity} operations (raise ulimit -l, LimitMEMLOCK= in a systemd unit): {source}"
    )]
    Memory {
        /// The capacity asked for.
        capacity: u32,
        /// The error as the kernel gave it.
        source: io::Error,
    },
    /// Any other failure to set up the ring.
    #[error("cannot set up an io_uring: {0}")]
    Setup(#[source] io::Error),
    /// The capacity asked for is zero or larger than the kernel's limit.
    #[error("an io_uring capacity must be between 1 and {max}, not {asked}")]
    Capacity {
        /// The length that was asked for.
        asked: u32,
        /// The most the kernel takes.
        max: u32,
    },
    /// The ring failed while handing over or waiting. The ring is of no further use.
    #[error("io_uring_enter failed: {0}")]
    Enter(#[source] io::Error),
}

impl RingError {
    /// Names what `io_uring_setup` answered.
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

/// Reason why an operation was not accepted. Nothing was queued; the caller still owns everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Every slot is in use: reap first.
    #[error("every slot of the ring is in use")]
    Full,
    /// The scatter list has more pieces, after joining neighbours, than the ring accepts.
    #[error("a scatter list of more than {max} pieces")]
    TooManySlices {
        /// The limit, in pieces.
        max: usize,
    },
    /// The scatter list is empty, or longer than one operation may move (2 GiB less a page).
    #[error("a transfer of {len} bytes cannot be one operation")]
    Length {
        /// Total length in bytes.
        len: usize,
    },
    /// The kernel would not take the queue, with this error number.
    #[error("io_uring_enter failed with error {0}")]
    Enter(i32),
}

/// Reason why memory or a file was not registered. It remains usable without registration, more
/// slowly.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The ring's table has no free entry, or the kernel is too old for such tables.
    #[error("the ring has no room to register this")]
    NoRoom,
    /// The kernel refused; `ENOMEM` means `RLIMIT_MEMLOCK`.
    #[error("the kernel did not register this (ulimit -l limits it): {0}")]
    Kernel(#[source] io::Error),
}
