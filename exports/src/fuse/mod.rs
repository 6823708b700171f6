//! Exports a disk as a file via FUSE, without libfuse.
//!
//! If the mount point is a directory, it contains the disk as a file; if it's a file, that file is
//! the disk. The file works like a block device: the size can't be changed, `O_TRUNC` is ignored,
//! `ftruncate(2)` to a different size fails with `EPERM`, and a write past the end fails with
//! `ENOSPC`. Use `fallocate(2)` to punch holes or zero ranges, and `lseek(2)` to find holes. To get
//! a block device, set up a loop device on top of it.
//!
//! - [`FuseMount`]: the mount, until it is unmounted by us or by someone else.
//! - [`FuseOptions`]: mount options.
//!
//! We use `fuser` for mount and negotiation only. After this, the disk thread polls the FUSE device
//! (`queue`) and its completions send the responses (`channel`), so there is no thread switch
//! between a request and the network. If the disk has no thread, there are two queues with a thread
//! each. Requests are decoded in a sans-I/O module (`disk`).
//!
//! Data is copied between the kernel and the disk buffers in the system call which receives the
//! request or sends the response. There is an additional copy for short or unaligned writes, for
//! all writes when half of the buffers are in use, and for reads which require multiple transfers.
//!
//! Not supported:
//! - Page cache coherency with other hosts. With [`Caching::Kernel`], this host will not see writes
//!   from other hosts to cached pages, even after the file is closed.
//! - FUSE over io_uring (`FUSE_OVER_IO_URING`).

mod channel;
mod disk;
mod files;
mod mount;
mod queue;
mod requests;
mod sys;

pub use disk::Caching;
pub use mount::{FuseMount, FuseOptions, UnmountError, source, unmount};
