//! Local files and block devices as disks, by `io_uring`.
//!
//! - [`open`]: opens one.
//! - [`FileConfig`]: options of opening one.
//! - [`FileError`]: reasons why it failed.
//!
//! A flush is `fdatasync(2)`, a write to stable storage one with `RWF_DSYNC`, a discard a punched
//! hole (`BLKDISCARD` on a device), zeroes a zeroed range; allocation is found by `SEEK_HOLE`.
//!
//! # Invariants
//! The size is that at the time of opening; reads beyond the end of a file that has become shorter
//! fail. A device that is written is opened exclusively (`O_EXCL`): not while it is mounted, swap
//! space, or part of another device. Whether a regular file is in use cannot be known.

mod driver;
mod open;
mod sys;
#[cfg(test)]
mod tests;

pub use open::{FileConfig, FileError, open};
