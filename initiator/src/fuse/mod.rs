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
//! `fuser` mounts and negotiates. From then on the requests are ours: the thread of the disk takes
//! them out of the FUSE device by turns (`queue`), and its completions answer them (`channel`), so
//! no other thread is woken between a request and the wire. A disk without a thread has two queues
//! with a thread each. The meaning of a request (`disk`) is decided without I/O.
//!
//! Data go between a request and the disk's buffers in the system call that receives or answers it.
//! They are copied once more for writes that are short or unaligned, for all writes once half of
//! the buffers are in use, and for reads of several transfers.
//!
//! Not here: sharing the disk's page cache with other hosts. With [`Caching::Kernel`] this host
//! does not see what others write to pages that its kernel keeps, also after the file is closed.
//! FUSE over io_uring (`FUSE_OVER_IO_URING`).

mod channel;
mod disk;
mod mount;
mod queue;
mod requests;
mod sys;

pub use disk::Caching;
pub(crate) use mount::source;
pub use mount::{FuseMount, FuseOptions, UnmountError, unmount};
