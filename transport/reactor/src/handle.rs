//! [`Handle`]: a reference to a file or socket, and the ring's table of registered files.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use io_uring::types;

use crate::objects::{self, Disk, File, Listener, Socket};

/// A reference-counted file or socket that operations can use. Operations in flight hold a clone,
/// so a descriptor cannot be closed, and its number reused, while it is in use.
///
/// A handle returned by [`Ring::register_file`](crate::Ring::register_file) refers to the ring's
/// own reference to the file, which saves the kernel a lookup per operation. On any other ring, and
/// if created with [`Handle::new`], the descriptor is used.
///
/// A handle of [`simulated`](crate::simulated) has no descriptor. It only works on simulated rings,
/// just as descriptors only work on rings of the host. On a ring of the wrong kind, operations fail
/// with `EBADF`.
#[derive(Debug, Clone)]
pub struct Handle {
    object: Arc<Object>,
    fixed: Option<Arc<FixedSlot>>,
}

#[derive(Debug)]
enum Object {
    Fd(OwnedFd),
    Simulated(objects::Object),
}

impl Handle {
    /// Creates a handle that uses a descriptor. For socket operations the descriptor must be in
    /// blocking mode, because the ring fails with `EAGAIN` instead of waiting on a non-blocking
    /// descriptor. Polling works in both modes.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        Self {
            object: Arc::new(Object::Fd(fd)),
            fixed: None,
        }
    }

    fn of_simulated(object: objects::Object) -> Self {
        Self {
            object: Arc::new(Object::Simulated(object)),
            fixed: None,
        }
    }

    pub(crate) fn fixed(&self, table: Arc<FileTable>, index: u32) -> Self {
        Self {
            object: self.object.clone(),
            fixed: Some(Arc::new(FixedSlot { table, index })),
        }
    }

    /// Returns the descriptor, or `None` for a simulated file or socket.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &*self.object {
            Object::Fd(fd) => Some(fd.as_fd()),
            Object::Simulated(_) => None,
        }
    }

    /// Returns the simulated file or socket, if it is simulated.
    #[must_use]
    pub fn simulated(&self) -> Option<&objects::Object> {
        match &*self.object {
            Object::Fd(_) => None,
            Object::Simulated(object) => Some(object),
        }
    }

    /// Returns the disk of a simulated file.
    ///
    /// # Panics
    /// Panics if this is not a simulated file.
    #[must_use]
    pub fn disk(&self) -> &Disk {
        match self.simulated() {
            Some(objects::Object::File(file)) => file.disk(),
            _ => panic!("{self:?} is not a simulated file"),
        }
    }

    /// Returns whether operations use a ring's registered reference.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.fixed.is_some()
    }

    /// Returns the address of the peer of a connected IP socket.
    ///
    /// # Errors
    /// Returns errors of `getpeername(2)`, or `Unsupported` for other address families.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        match &*self.object {
            Object::Fd(fd) => {
                let peer = rustix::net::getpeername(fd)?;
                let peer = peer.ok_or(io::ErrorKind::NotConnected)?;
                SocketAddr::try_from(peer).map_err(|_| io::ErrorKind::Unsupported.into())
            }
            Object::Simulated(object) => object.stream().map(Socket::peer),
        }
    }

    /// Disables Nagle's algorithm, so that a TCP socket sends data immediately.
    ///
    /// # Errors
    /// Returns errors of `setsockopt(2)`.
    pub fn set_nodelay(&self) -> io::Result<()> {
        match &*self.object {
            Object::Fd(fd) => Ok(rustix::net::sockopt::set_tcp_nodelay(fd, true)?),
            Object::Simulated(object) => object.stream().map(drop),
        }
    }

    /// Shuts down both directions of a connection, which completes all of its operations on the
    /// ring.
    ///
    /// # Errors
    /// Returns errors of `shutdown(2)`, for example if the peer has already closed the connection.
    pub fn shut_down(&self) -> io::Result<()> {
        match &*self.object {
            Object::Fd(fd) => Ok(rustix::net::shutdown(fd, rustix::net::Shutdown::Both)?),
            Object::Simulated(object) => object.stream().map(Socket::shut_down),
        }
    }

    /// Returns how operations refer to the file on the ring with this table.
    pub(crate) fn target(&self, table: &Arc<FileTable>) -> Target {
        match (&self.fixed, &*self.object) {
            (Some(slot), _) if Arc::ptr_eq(&slot.table, table) => {
                Target::Fixed(types::Fixed(slot.index))
            }
            (_, Object::Fd(fd)) => Target::Fd(types::Fd(fd.as_raw_fd())),
            // The kernel will return EBADF.
            (_, Object::Simulated(_)) => Target::Fd(types::Fd(-1)),
        }
    }
}

impl From<File> for Handle {
    fn from(file: File) -> Self {
        Self::of_simulated(objects::Object::File(file))
    }
}

impl From<Socket> for Handle {
    fn from(socket: Socket) -> Self {
        Self::of_simulated(objects::Object::Socket(socket))
    }
}

impl From<Listener> for Handle {
    fn from(listener: Listener) -> Self {
        Self::of_simulated(objects::Object::Listener(listener))
    }
}

impl From<OwnedFd> for Handle {
    fn from(fd: OwnedFd) -> Self {
        Self::new(fd)
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Target {
    Fd(types::Fd),
    Fixed(types::Fixed),
}

/// An entry of a ring's table. It is returned to the table when the last handle that refers to it
/// is dropped.
#[derive(Debug)]
struct FixedSlot {
    table: Arc<FileTable>,
    index: u32,
}

impl Drop for FixedSlot {
    fn drop(&mut self) {
        self.table.lock().stale.push(self.index);
    }
}

/// Free and unused entries of a ring's table. `free` entries hold no file. `stale` entries hold a
/// file without a handle, which the ring removes when it next checks.
#[derive(Debug, Default)]
pub(crate) struct FileTable(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    free: Vec<u32>,
    stale: Vec<u32>,
}

impl FileTable {
    pub(crate) fn new(entries: u32) -> Self {
        Self(Mutex::new(Entries {
            free: (0..entries).rev().collect(),
            stale: Vec::new(),
        }))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Entries> {
        // The lists are always consistent, so poisoning can be ignored.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn allocate_index(&self) -> Option<u32> {
        self.lock().free.pop()
    }

    pub(crate) fn release_index(&self, index: u32) {
        self.lock().free.push(index);
    }

    pub(crate) fn take_stale(&self) -> Option<u32> {
        self.lock().stale.pop()
    }
}
