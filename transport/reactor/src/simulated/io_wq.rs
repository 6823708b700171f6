//! Kernel threads of a ring (`io-wq`), as used by Linux for files and block devices.
//!
//! An operation that neither completes at submission nor is executed asynchronously by a device
//! blocks a thread until it completes. The number of threads per ring is bounded
//! (`IORING_REGISTER_IOWQ_MAX_WORKERS`). Operations without a thread are queued in submission
//! order, except that hashed operations of the same file use one thread at a time.

use super::File;
use crate::op::Op;

/// Processors of the simulated host, used for the default limit.
const PROCESSORS: u32 = 2;

/// Execution of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Execution {
    /// Immediately, or by the device. No thread is needed.
    Inline,
    /// Waiting for a thread and, if `hashed`, for the hashed operation of the same file.
    Queued { hashed: bool },
    /// Blocking a thread.
    Running { hashed: bool },
}

impl Execution {
    /// Returns the initial state for an operation on a file.
    pub(super) fn of(op: Op, file: &File) -> Self {
        // True for files without `FMODE_NOWAIT`, such as on NFS or FUSE, and on a frozen file
        // system.
        let blocks = file.disk().blocks_threads();
        match op {
            Op::Sync(_) | Op::Fallocate { .. } => Self::Queued { hashed: false },
            Op::Read { .. } if blocks => Self::Queued { hashed: false },
            // Writes through the page cache are serialized by the inode lock.
            Op::Write { .. } if file.is_buffered() => Self::Queued { hashed: true },
            Op::Write { .. } if blocks => Self::Queued { hashed: false },
            // Direct writes run in parallel, but allocations wait for the journal.
            Op::Write { offset, .. } if !file.disk().extent(offset, 1).0 => {
                Self::Queued { hashed: false }
            }
            _ => Self::Inline,
        }
    }
}

/// Returns the maximum number of threads of a ring. 0 selects the kernel's default.
pub(super) fn limit(threads: u32, entries: u32) -> usize {
    let most = match threads {
        0 => entries.min(4 * PROCESSORS),
        n => n,
    };
    most as usize
}
