//! Local files and block devices, using `io_uring`.
//!
//! - [`open`]: opens a file or block device.
//! - [`FileConfig`]: options for opening a disk.
//! - [`FileError`]: error when opening a disk.
//!
//! We use `fdatasync(2)` to flush, `RWF_DSYNC` for writes to stable storage, punch a hole to
//! discard (`BLKDISCARD` for devices), zero a range to write zeroes, and `SEEK_HOLE` to get the
//! allocation status.
//!
//! # Invariants
//! The size is fixed when the disk is opened. If the file is truncated later, reads past its end
//! will fail. If a device is opened for writing, we use exclusive mode (`O_EXCL`): this will fail
//! if it is mounted, used as swap, or part of another device. For a regular file we can't check if
//! it is in use.

mod driver;
mod open;
mod sys;
#[cfg(test)]
mod tests;

pub use open::{FileConfig, FileError, open};
