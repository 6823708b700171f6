//! Files and sockets in memory, below the handles that name them.

mod disk;
mod socket;

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use disk::Writing;
pub use disk::{Disk, File, SECTOR};
pub use socket::{Listener, Peer, Socket};

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
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
