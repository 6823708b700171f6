//! Command descriptors of contexts (`cmd_fd`), by which a device is imported.
//!
//! A kernel's device takes commands there. This one has no kernel behind it, so the descriptor is a
//! file in memory that says whose context it is. Its inode is the number of what contexts share that
//! were imported by duplicates of one descriptor: handles of protection domains, regions and device
//! memory. They are those of a NIC in this process, and no other process reaches its objects: there,
//! importing the device is refused with `EOPNOTSUPP`.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::Mutex;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::errno::Errno;
use crate::lock::shielded;

/// Beginning of the file.
const MAGIC: [u8; 8] = *b"riserctx";

/// Bytes of the file: then the number of the process and the index of the device.
const LEN: usize = 16;

/// What contexts share that were imported from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Family(u64);

/// A command descriptor.
pub(crate) struct Command {
    number: c_int,
    pub(crate) family: Family,
    /// None once the context is closed.
    fd: Mutex<Option<OwnedFd>>,
}

impl Command {
    /// The first one of a family, for a device by its index.
    ///
    /// # Errors
    /// Those of `memfd_create(2)` and `write(2)`.
    pub(crate) fn new(device: usize) -> Result<Self, Errno> {
        let fd = memfd_create("riser-context", MemfdFlags::CLOEXEC)?;
        let mut label = [0; LEN];
        label[..8].copy_from_slice(&MAGIC);
        label[8..12].copy_from_slice(&std::process::id().to_ne_bytes());
        label[12..].copy_from_slice(&(device as u32).to_ne_bytes());
        if rustix::io::write(&fd, &label)? < LEN {
            return Err(Errno(libc::EIO));
        }
        let family = Family(inode(fd.as_raw_fd())?);
        Ok(Self::of(fd, family))
    }

    fn of(fd: OwnedFd, family: Family) -> Self {
        let number = fd.as_raw_fd();
        let fd = Mutex::new(Some(fd));
        Self { number, family, fd }
    }

    pub(crate) fn raw_fd(&self) -> c_int {
        self.number
    }

    pub(crate) fn close(&self) {
        shielded(&self.fd).take();
    }
}

/// A descriptor of a program's that is to become that of a context.
pub(crate) struct Duplicate {
    fd: c_int,
    family: Family,
    /// Index of the device.
    pub(crate) device: usize,
}

impl Duplicate {
    /// Looks at a descriptor.
    ///
    /// # Errors
    /// `EINVAL` for one that is of no context, `EOPNOTSUPP` for one of another process's.
    pub(crate) fn get(fd: c_int) -> Result<Self, Errno> {
        if fd < 0 {
            return Err(Errno::INVALID);
        }
        // SAFETY: used for the call only, which fails for a number that is no descriptor.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let mut label = [0; LEN];
        let read = rustix::io::pread(file, &mut label, 0);
        if read != Ok(LEN) || label[..8] != MAGIC {
            return Err(Errno::INVALID);
        }
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|i| label[at + i]));
        if word(8) != std::process::id() {
            return Err(Errno::UNSUPPORTED);
        }
        Ok(Self {
            fd,
            family: Family(inode(fd)?),
            device: word(12) as usize,
        })
    }

    /// Takes the descriptor.
    ///
    /// # Safety
    /// Nothing else closes it from now on.
    pub(crate) unsafe fn take(self) -> Command {
        // SAFETY: it was open when it was looked at, and is the caller's to give away.
        Command::of(unsafe { OwnedFd::from_raw_fd(self.fd) }, self.family)
    }
}

fn inode(fd: c_int) -> Result<u64, Errno> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the call fills the structure where it succeeds.
    unsafe {
        match libc::fstat(fd, stat.as_mut_ptr()) {
            0 => Ok(stat.assume_init().st_ino),
            _ => Err(Errno::last()),
        }
    }
}
