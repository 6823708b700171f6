//! A disk as one file, through FUSE and without libfuse.
//!
//! Mounted over a directory, the disk is a file in it; mounted over a file, it is that file. The
//! file behaves as a block device does: its size is fixed, truncating it changes nothing, writing
//! beyond its end fails with `ENOSPC`. Holes are punched and ranges zeroed with `fallocate(2)`, and
//! found with `lseek(2)`. A loop device on it gives the kernel a disk.
//!
//! - [`FuseMount`]: the mount, until it is unmounted by us or by others.
//! - [`FuseOptions`]: where and how.
//!
//! Requests of the kernel run on [`crate::block::task`]; the session's threads only take them out
//! of the FUSE device. A large reply is copied to the kernel by a thread of its own, so that it
//! does not hold up the transport that completed it.
//!
//! Not here: sharing the disk's page cache with other hosts. With [`Caching::Kernel`] this host
//! does not see what others write while the file is open.

mod disk;
mod mount;
mod transfer;

pub use disk::Caching;
pub use mount::{FuseMount, FuseOptions, UnmountError, unmount};
