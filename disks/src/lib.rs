//! Disks other than logical units: NBD exports, local files and block devices.
//!
//! - [`ThreadDisk`]: a disk, implements [`BlockDevice`](riser_block::BlockDevice). It has a
//!   dedicated thread to submit and complete operations, run workloads and serve clients.
//! - [`nbd`]: connects to an NBD export.
//! - [`file`](mod@file): opens a file or block device.
//! - [`BUFFERS`]: default memory size for disk buffers.
//!
//! # I/O model
//! Operations are sent to the disk thread as messages. In each round, the thread processes all
//! messages and submits the operations to the socket or ring using a single system call, then wakes
//! the tasks for completed operations. If a task submits its next operation when it is woken up,
//! this is done in the same round, so with queue depth *n* up to *n* operations can be submitted by
//! one system call. Workloads run on the thread and don't need to send messages.
//!
//! # Invariants
//! The disk owns the buffer until its operation is complete. Buffers are allocated from a pool with
//! a fixed size. After an error, all operations on this disk return this error.
//!
//! Not supported: reconnect. If the connection is lost, or a reply is not received in time, the
//! disk fails.

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
