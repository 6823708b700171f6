//! Local files and block devices, using `io_uring`.
//!
//! - [`open`]: opens a file or block device.
//! - [`FileConfig`]: options for opening a disk.
//! - [`FileError`]: error when opening a disk.
//!
//! The operations are executed by a [`riser_file::Driver`]. A device is discarded using
//! `BLKDISCARD`, because we don't need zeroes afterwards.
//!
//! # Invariants
//! The size is fixed when the disk is opened. If the file is truncated later, reads past its end
//! will fail. If a device is opened for writing, we use exclusive mode (`O_EXCL`): this will fail
//! if it is mounted, used as swap, or part of another device. For a regular file we can't check if
//! it is in use.

mod driver;
mod local;
mod open;
#[cfg(test)]
mod tests;

pub use open::{FileConfig, FileError, open};
