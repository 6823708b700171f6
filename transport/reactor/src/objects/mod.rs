//! In-memory files and sockets, used by handles.

mod disk;
mod socket;

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use disk::Writing;
pub use disk::{Disk, File, SECTOR};
pub use socket::{Listener, Peer, Socket};

/// An in-memory file or socket behind a [`Handle`](crate::Handle).
#[derive(Debug, Clone)]
pub enum Object {
    /// An open file.
    File(File),
    /// A connected socket.
    Socket(Socket),
    /// A listening socket.
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

/// Locks a mutex that is never contended. Poisoning is ignored, so that a panic in a test doesn't
/// hide an earlier panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
