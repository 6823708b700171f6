//! Kernel threads of a ring (`io-wq`), as Linux uses them for files and block devices.
//!
//! An operation that neither completes at its submission nor is executed by a device without a thread
//! blocks a thread until it completes. The number of threads is bounded for each ring
//! (`IORING_REGISTER_IOWQ_MAX_WORKERS`). Operations without a thread wait in the order of their
//! submission, except that hashed ones of one file have one thread at a time.

use super::File;
use crate::op::Op;

/// Processors of the simulated host, which give the default limit.
const PROCESSORS: u32 = 2;

/// Execution of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Execution {
    /// At once, or by the device: no thread is needed.
    Inline,
    /// It waits for a thread; with `hashed`, also for the hashed operation of its file.
    Queued { hashed: bool },
    /// It blocks a thread.
    Running { hashed: bool },
}

impl Execution {
    /// Execution of an operation on a file, when it is submitted.
    pub(super) fn of(op: Op, file: &File) -> Self {
        // Without `FMODE_NOWAIT`, as on NFS or FUSE, and on a file system that is frozen.
        let blocks = file.disk().blocks_threads();
        match op {
            Op::Sync(_) | Op::Fallocate { .. } => Self::Queued { hashed: false },
            Op::Read { .. } if blocks => Self::Queued { hashed: false },
            // Writes through the page cache take turns at the lock of the inode.
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

/// Threads of a ring at most; 0 is the kernel's default.
pub(super) fn limit(threads: u32, entries: u32) -> usize {
    let most = match threads {
        0 => entries.min(4 * PROCESSORS),
        n => n,
    };
    most as usize
}
