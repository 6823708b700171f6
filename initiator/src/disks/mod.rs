//! Disks that are no logical units of a target: exports of NBD servers, and local files and block
//! devices.
//!
//! - [`ThreadDisk`]: such a disk, a [`BlockDevice`](crate::block::BlockDevice). It has a thread of
//!   its own, which carries out and completes operations, runs workloads and serves clients.
//! - [`nbd`]: connects to an export.
//! - [`file`](mod@file): opens a file or block device.
//! - [`BUFFERS`]: memory for the buffers of a disk, if no other amount is asked for.
//!
//! # I/O model
//! An operation is a message to the disk's thread. The thread collects the messages of a round,
//! hands them to the socket or the ring in one system call, and wakes the tasks whose operations
//! have ended. A task that is woken submits its next operation in the same round, so at depth *n*
//! up to *n* operations share a system call. Those of a workload need no message.
//!
//! # Invariants
//! A buffer belongs to the disk until its operation has ended. Buffers come from a pool of fixed
//! length. A disk that fails answers every operation with the reason.
//!
//! Not here: reconnection. A connection that is lost, or late with an answer, ends the disk.

mod backend;
mod disk;
pub mod file;
mod limits;
pub mod nbd;
mod operation;
#[cfg(test)]
mod testing;
mod thread;
mod workload;

pub use disk::{BUFFERS, ThreadDisk};
