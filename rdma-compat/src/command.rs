//! Command descriptors of contexts (`cmd_fd`), which are used to import a device.
//!
//! In a kernel device, this descriptor is used for commands. Our device has no kernel driver, so it
//! is a memory file that identifies the context. Its inode number identifies a group of contexts
//! that were imported using duplicates of the same descriptor, and that share handles of protection
//! domains, regions and device memory. The objects belong to a NIC in this process and can't be
//! accessed by other processes: there, importing the device fails with `EOPNOTSUPP`.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::Mutex;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::errno::Errno;
use crate::lock::shielded;

/// Magic number at the start of the file.
const MAGIC: [u8; 8] = *b"riserctx";

/// Size of the file in bytes. The magic number is followed by the process ID and the index of the
/// device.
const LEN: usize = 16;

/// Identifies contexts that were imported from the same context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Family(u64);

/// A command descriptor.
pub(crate) struct Command {
    number: c_int,
    pub(crate) family: Family,
    /// `None` after the context was closed.
    fd: Mutex<Option<OwnedFd>>,
}

impl Command {
    /// Creates the first descriptor of a family, for a device index.
    ///
    /// # Errors
    /// Returns errors of `memfd_create(2)` and `write(2)`.
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

/// A descriptor of the program that will be used by a context.
pub(crate) struct Duplicate {
    fd: c_int,
    family: Family,
    /// Index of the device.
    pub(crate) device: usize,
}

impl Duplicate {
    /// Checks a descriptor.
    ///
    /// # Errors
    /// Returns `EINVAL` if it does not belong to a context, or `EOPNOTSUPP` if it belongs to
    /// another process.
    pub(crate) fn get(fd: c_int) -> Result<Self, Errno> {
        if fd < 0 {
            return Err(Errno::INVALID);
        }
        // SAFETY: only used for this call, which fails if the descriptor is not open.
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

    /// Takes ownership of the descriptor.
    ///
    /// # Safety
    /// It must not be closed by anything else.
    pub(crate) unsafe fn into_command(self) -> Command {
        // SAFETY: it was open when it was checked, and is owned by the caller.
        Command::of(unsafe { OwnedFd::from_raw_fd(self.fd) }, self.family)
    }
}

fn inode(fd: c_int) -> Result<u64, Errno> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: on success, the call initializes the structure.
    unsafe {
        match libc::fstat(fd, stat.as_mut_ptr()) {
            0 => Ok(stat.assume_init().st_ino),
            _ => Err(Errno::last()),
        }
    }
}
