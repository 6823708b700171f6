//! A kernel in memory, for tests and simulators: files, sockets and threads that do something when they are
//! told to.
//!
//! [`Ring::simulated`](crate::Ring::simulated) makes a ring that is the one that ships, with its tokens, slots,
//! checks and bounds, but whose operations wait in a [`Kernel`] until its driver completes them: in the
//! order that it chooses, wholly or in part, or with an error. Nothing here has a clock, a random number, a
//! descriptor or a thread, so one schedule gives one trace.
//!
//! ```text
//!   worker ─ submit ─▶ Ring ─ enter ─▶ Kernel::operations ─ Kernel::complete ─▶ Ring ─ reap ─▶ worker
//!                                             │ acts on
//!                                             ▼
//!                               Disk        Socket ◀─ Peer ─▶ the simulator's network
//! ```
//!
//! - [`Kernel`]: the operations under way on one ring, and their completion.
//! - [`Disk`]: a file or block device: what was written, what is stable, and what a crash leaves of it.
//! - [`Listener`], [`Peer`]: sockets, from the network's side.
//! - [`Threads`]: helper threads, whose jobs are steps of the schedule.
//!
//! Objects are shared by count and between rings: a disk outlives the ring, and the process, that used it.

mod disk;
mod kernel;
mod socket;
mod threads;

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use disk::{Disk, File, SECTOR};
pub(crate) use kernel::Queue;
pub use kernel::{Kernel, Operation, OperationId, Outcome};
pub use socket::{Listener, Peer, Socket};
pub use threads::{ThreadId, Threads};

/// A file or socket in memory, behind a [`Handle`](crate::Handle).
#[derive(Debug, Clone)]
pub enum Object {
    /// An open file.
    File(File),
    /// A connected socket.
    Socket(Socket),
    /// A socket that listens.
    Listener(Listener),
}

impl Object {
    pub(crate) fn stream(&self) -> io::Result<&Socket> {
        match self {
            Self::Socket(socket) => Ok(socket),
            Self::File(_) | Self::Listener(_) => Err(io::Error::from_raw_os_error(libc::ENOTSOCK)),
        }
    }
}

/// Locks what one thread uses at a time; a panic of a test must not hide another.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
