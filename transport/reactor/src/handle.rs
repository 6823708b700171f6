//! [`Handle`]: a descriptor as operations name it, and the ring's table of registered files.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use io_uring::types;

/// A file or socket that operations work on, shared by count. An operation in flight holds a clone,
/// so the descriptor cannot be closed and its number reused under it.
///
/// A handle from [`Ring::register_file`](crate::Ring::register_file) names the ring's own reference
/// to the file, which saves the kernel a look-up per operation; on any other ring, and when made
/// with [`Handle::new`], it works by descriptor.
#[derive(Debug, Clone)]
pub struct Handle {
    fd: Arc<OwnedFd>,
    fixed: Option<Arc<FixedSlot>>,
}

impl Handle {
    /// A handle that works by descriptor. For socket operations the descriptor must be in blocking
    /// mode, since the ring answers `EAGAIN` at once for others; polling works with either.
    #[must_use]
    pub fn new(fd: Arc<OwnedFd>) -> Self {
        Self { fd, fixed: None }
    }

    pub(crate) fn fixed(fd: Arc<OwnedFd>, table: Arc<FileTable>, index: u32) -> Self {
        Self {
            fd,
            fixed: Some(Arc::new(FixedSlot { table, index })),
        }
    }

    /// Descriptor that the handle shares.
    #[must_use]
    pub fn fd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    /// Whether operations use a ring's registered reference.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        self.fixed.is_some()
    }

    /// The file's name in operations on the ring with this table.
    pub(crate) fn target(&self, table: &Arc<FileTable>) -> Target {
        match &self.fixed {
            Some(slot) if Arc::ptr_eq(&slot.table, table) => {
                Target::Fixed(types::Fixed(slot.index))
            }
            _ => Target::Fd(types::Fd(self.fd.as_raw_fd())),
        }
    }
}

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<OwnedFd> for Handle {
    fn from(fd: OwnedFd) -> Self {
        Self::new(Arc::new(fd))
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
