//! Backends: storage for logical units.
//!
//! A logical unit requests block operations ([`riser_scsi::step::BlockOp`]). This module executes
//! them on a file, a block device, memory, or a null device, using the worker's
//! [`Ring`](riser_reactor::Ring).
//!
//! # Modules
//! - `store`: [`Store`], an open backend shared by all workers: size, lock, alignment.
//! - `driver`: [`Driver`], executes requests for a worker: receives requests, submits ring
//!   operations, and returns results.
//! - `request`: an active request (`RequestState`), the results of its operations, and
//!   its windows on the command's memory. `requests`: all requests of a driver.
//! - `execute`: operations on media that are not files.
//! - `plan`: ring operations for a request, step by step, without I/O.
//! - `flush`: failed flushes, shared by all workers and saved. The protocol is in [`riser_block`].
//! - `turns`: prevents concurrent reads and changes of the same blocks.
//! - `ram`: sparse memory of a RAM disk.
//! - `file_id`: file identifiers that do not depend on the path.
//! - `health`: counts failures and measures available space. `inspection`: checks the medium of an
//!   open backend. `cause`: reasons why a backend requires an operator.
//! - `hints`: advice if a file cannot be opened, and notes about an open backend.
//! - `medium`: opens, locks and measures files and devices. `made`: reverts the changes made on
//!   disk when doing so.
//! - `look`: queries size and space on file systems that may not respond.
//! - `open_error`: [`OpenError`], reasons why a backend cannot be opened.
//! - `opening`: opens backends on file systems that may not respond. `waiting`: threads waiting for
//!   a file system.
//! - `errno`: maps host errors to errors of a logical unit.
//! - `unit`: configuration of a logical unit for an open backend.
//! - `sys`: system calls not available in the standard library.
//!
//! # Guarantees
//! - **Durability.** With `write_cache: off`, every write, zeroing and discard is on stable storage
//!   before it completes. With `write_cache: on`, this only applies to operations with FUA and to
//!   operations that completed before a successful flush. A FUA read flushes the unit's cached data
//!   first. After a failed flush, all flushes fail until an administrator clears this, because data
//!   acknowledged before may be lost.
//! - **No partial results.** A short read or write is resumed until the range is complete. If a
//!   file was truncated by another program, reading past its end is a medium error, and we never
//!   make up data.
//! - **Whole blocks.** A read never returns a block with parts of two writes.
//! - **Exclusive access.** A file or device that is served for writing is locked against all other
//!   `riserd` processes, and against other backends of this process.
//! - **Limits.** The number of requests in flight, their scatter lists and the bounce memory are
//!   limited when a driver is created.
//!
//! # Direct I/O and small blocks
//! `O_DIRECT` transfers whole device blocks. If a unit has 512-byte blocks but the file system
//! requires 4096, a small write would be a read-modify-write. This is not atomic, so two workers
//! could overwrite each other's data. Therefore such a unit uses the page cache: `direct: auto`
//! falls back, and `direct: on` is rejected with the reason. Insufficiently aligned memory is not a
//! problem, because we can use a bounce buffer.
//!
//! # Discard
//! We always discard by punching holes, even on block devices, because the kernel guarantees zeroes
//! afterwards, as we do to the initiator. `BLKDISCARD` does not guarantee this. If the medium does
//! not support holes, UNMAP does not change any blocks, and a unit on a device without holes does
//! not support UNMAP. If the logical blocks of a device are larger than the unit's blocks, only
//! whole device blocks are discarded and the remaining blocks are unchanged. If zeroes are
//! required, they are written to the remaining blocks.

mod cause;
mod driver;
mod errno;
mod execute;
mod file_id;
mod flush;
mod health;
mod hints;
mod inspection;
pub(crate) mod look;
mod made;
mod medium;
mod medium_faults;
mod open_error;
mod opening;
mod plan;
mod ram;
mod request;
mod requests;
mod store;
mod sys;
mod turns;
mod unit;
mod waiting;

pub use cause::Cause;
pub use driver::{Done, Driver, DriverFull};
pub use file_id::FileId;
pub(crate) use flush::FlushFailures;
pub use flush::{FlushFailure, FlushKeeper};
pub use health::{Failing, Space};
#[cfg(test)]
pub(crate) use made::HANGING_UNDO;
pub use medium::Geometry;
pub use open_error::OpenError;
pub use opening::{OpenRequest, OpenedStores, open_all, open_each, open_in_time, undo_all};
pub use ram::Ram;
pub(crate) use ram::random_generation;
pub use request::{DriverConfig, StoreId};
pub use riser_config::{Direct, Fault, FaultOn, Faults, Source, Spec};
pub use store::{Resized, Store};
pub use unit::unit_config;

#[cfg(test)]
mod tests;
