//! Files and block devices as block storage, using the [`Ring`](riser_reactor::Ring) of a thread.
//!
//! - [`Driver`]: executes operations for a thread: receives requests, submits ring operations, and
//!   returns results. It serves any number of stores.
//! - [`Storage`]: a store, implemented by the user of the driver: a file, or another medium that
//!   executes its operations itself. It defines the types of operations and results, and records
//!   failures.
//! - [`OpenFile`]: a file or device, shared by the drivers of all threads. [`Device`]: properties of
//!   a device. [`enable_direct`], [`can_punch`], [`extent`]: calls on an open file.
//!
//! - Modules: `request` is an active request, its operations and its windows on the caller's memory,
//!   `requests` all requests of a driver. `plan` determines the ring operations of a request without
//!   I/O, and `turns` prevents concurrent reads and changes of the same blocks. `sys` are system
//!   calls. The protocol for failed flushes is in [`riser_block`].
//!
//! # Guarantees
//! - **No partial results.** A short read or write is resumed until the range is complete. If a
//!   file was truncated by another program, reading past its end fails, and we never make up data.
//! - **Whole blocks.** A read never returns a block with parts of two writes.
//! - **Limits.** The number of requests in flight, their scatter lists and the bounce memory are
//!   limited when a driver is created.
//!
//! # Direct I/O and small blocks
//! `O_DIRECT` transfers whole device blocks. If a user has 512-byte blocks but the file system
//! requires 4096, a small write would be a read-modify-write. This is not atomic, so two threads
//! could overwrite each other's data. Therefore such a user needs the page cache. Insufficiently
//! aligned memory is not a problem, because we can use a bounce buffer.
//!
//! # Discard
//! A discard with zeroes always punches holes, even on block devices, because the kernel guarantees
//! zeroes afterwards. `BLKDISCARD` does not guarantee this. If the medium does not support holes,
//! such a discard does not change any blocks. If the logical blocks of a device are larger than the
//! user's blocks, only whole device blocks are discarded and the remaining blocks are unchanged. If
//! zeroes are required, they are written to the remaining blocks.

mod driver;
mod open_file;
mod plan;
mod request;
mod requests;
mod storage;
mod sys;
#[cfg(test)]
mod tests;
mod turns;

pub use driver::{Done, Driver, DriverFull};
pub use open_file::{Device, OpenFile};
pub use plan::cut_buffer;
pub use request::{DriverConfig, StoreId};
pub use storage::{Failure, Fault, Storage};
pub use sys::{Align, can_punch, direct_alignment, enable_direct, extent};
pub use turns::{ShortTurn, Turn, Turns};
