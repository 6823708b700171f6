//! [`Handle`]: a file or socket as operations name it, and the ring's table of registered files.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use io_uring::types;

use crate::objects::{self, File, Listener, Socket};

/// A file or socket that operations work on, shared by count. An operation in flight holds a clone,
/// so a descriptor cannot be closed and its number reused under it.
///
/// A handle from [`Ring::register_file`](crate::Ring::register_file) names the ring's own reference
/// to the file, which saves the kernel a look-up per operation; on any other ring, and when made
/// with [`Handle::new`], it works by descriptor.
///
/// One of [`simulated`](crate::simulated) has no descriptor. It works on simulated rings alone, as
/// descriptors work on those of the host; on the others, operations end with `EBADF`.
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
    /// A handle that works by descriptor. For socket operations the descriptor must be in blocking
    /// mode, since the ring answers `EAGAIN` at once for others; polling works with either.
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

    /// Descriptor that the handle shares; none of a simulated file or socket.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &*self.object {
            Object::Fd(fd) => Some(fd.as_fd()),
            Object::Simulated(_) => None,
        }
    }

    /// The file or socket in memory, if it is one.
    #[must_use]
    pub fn simulated(&self) -> Option<&objects::Object> {
        match &*self.object {
            Object::Fd(_) => None,
            Object::Simulated(object) => Some(object),
        }
    }

    /// Whether operations use a ring's registered reference.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.fixed.is_some()
    }

    /// Address of the peer of a connected socket of IP.
    ///
    /// # Errors
    /// Those of `getpeername(2)`; `Unsupported` for other families.
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

    /// Has a TCP socket send at once what it is given, instead of collecting.
    ///
    /// # Errors
    /// Those of `setsockopt(2)`.
    pub fn set_nodelay(&self) -> io::Result<()> {
        match &*self.object {
            Object::Fd(fd) => Ok(rustix::net::sockopt::set_tcp_nodelay(fd, true)?),
            Object::Simulated(object) => object.stream().map(drop),
        }
    }

    /// Ends both directions of a connection. What the ring has of it ends with that.
    ///
    /// # Errors
    /// Those of `shutdown(2)`, as where the peer has ended it.
    pub fn shut_down(&self) -> io::Result<()> {
        match &*self.object {
            Object::Fd(fd) => Ok(rustix::net::shutdown(fd, rustix::net::Shutdown::Both)?),
            Object::Simulated(object) => object.stream().map(Socket::shut_down),
        }
    }

    /// The file's name in operations on the ring with this table.
    pub(crate) fn target(&self, table: &Arc<FileTable>) -> Target {
        match (&self.fixed, &*self.object) {
            (Some(slot), _) if Arc::ptr_eq(&slot.table, table) => {
                Target::Fixed(types::Fixed(slot.index))
            }
            (_, Object::Fd(fd)) => Target::Fd(types::Fd(fd.as_raw_fd())),
            // The kernel's answer is EBADF.
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

/// An entry of a ring's table, returned to it when the last handle that names it is gone.
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

/// Entries of a ring's table and their use. `free` entries hold no file; `stale` ones hold a file
/// without a name, which the ring takes out when it next looks.
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
        // A poisoned list of numbers is still a list of numbers.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn take(&self) -> Option<u32> {
        self.lock().free.pop()
    }

    pub(crate) fn give_back(&self, index: u32) {
        self.lock().free.push(index);
    }

    pub(crate) fn take_stale(&self) -> Option<u32> {
        self.lock().stale.pop()
    }
}
