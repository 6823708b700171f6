//! Backends: the bytes of logical units.
//!
//! A logical unit asks for block operations ([`riser_scsi::step::BlockOp`]); this module carries
//! them out on a file, a block device, memory, or nothing at all, through the worker's own
//! [`Ring`](riser_reactor::Ring).
//!
//! # Modules
//! - `store`: [`Store`], one opened backend, shared by all workers: size, lock, alignment.
//! - `driver`: [`Driver`], a worker's engine: requests in, ring operations out, results back.
//! - `request`: a request under way, and its windows on the command's memory.
//! - `plan`: what the ring does for a request, step by step; pure.
//! - `flush`: what a failed flush means.
//! - `turns`: keeps reads and changes of the same blocks apart.
//! - `ram`: the sparse memory of a RAM disk.
//! - `file_id`: names of files that outlive a rename.
//! - `health`: counts failures, and measures room. `inspection`: checks the medium of an open
//!   backend. `cause`: causes for which a backend needs an operator.
//! - `hints`: what may help where a file cannot be opened, and notes about one that can.
//! - `medium`: opens, locks and measures files and devices. `made`: takes back what that has
//!   changed on disk.
//! - `look`: asks for their size and room on file systems that may not answer.
//! - `open_error`: [`OpenError`], why a backend is not opened.
//! - `opening`: opens backends on file systems that may not answer. `waiting`: threads that wait
//!   for one.
//! - `errno`: what a host error means to a logical unit.
//! - `unit`: what a logical unit is made of on an opened backend.
//! - `sys`: the system calls the standard library lacks.
//!
//! # Promises
//! - **Durability.** With `write_cache: off`, every write, zeroing and discard is on stable storage
//!   before it completes. With `write_cache: on`, only those with FUA and those before a completed
//!   flush are. A FUA read makes the cached data of the unit durable first. After a flush that
//!   failed every flush fails, until an administrator clears it: what was acknowledged before may
//!   be lost.
//! - **All or an error.** A short read or write is resumed until the range is done. The end of a
//!   file that shrank under us is a medium error, never made-up data.
//! - **Whole blocks.** A read never returns parts of two writes within one block.
//! - **Exclusive.** A file or device that is served for writing is locked against every other
//!   `riserd`, and every second backend of this one.
//! - **Bounds.** Requests in flight, their scatter lists and the bounce memory are bounded when the
//!   driver is made.
//!
//! # Direct I/O and small blocks
//! `O_DIRECT` moves whole device blocks. A unit with 512-byte blocks on a file system that wants
//! 4096 would need a read, a change and a write for a small write, which two workers could
//! interleave and so lose one another's data. Such a unit is therefore served through the page
//! cache: `direct: auto` falls back, `direct: on` is refused with the reason. Memory that is not
//! aligned well enough is no such problem and goes through a bounce buffer.
//!
//! # Discard
//! Always by punching holes, on block devices too: that is the discard after which the kernel
//! promises zeroes, which the logical unit has promised the initiator. The device's bare
//! `BLKDISCARD` promises nothing. A medium without holes keeps the blocks of an UNMAP as they are, and
//! a unit on a device without them does not offer UNMAP. A device with larger logical blocks than the unit frees whole
//! ones of its own and leaves the rest as it was; where zeroes are asked for, the rest is written.

mod cause;
mod driver;
mod errno;
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
mod store;
mod sys;
mod turns;
mod unit;
mod waiting;

pub use cause::Cause;
pub use driver::{Done, Driver, DriverFull};
pub use file_id::FileId;
pub use flush::{FlushFailure, FlushKeeper};
pub use health::{Failing, Space};
#[cfg(test)]
pub(crate) use made::HANGING_UNDO;
pub use medium::Geometry;
pub use open_error::OpenError;
pub use opening::{OpenedStores, Wish, open_all, open_each, open_in_time, undo_all};
pub use ram::Ram;
pub(crate) use ram::random_generation;
pub use request::{DriverConfig, StoreId};
pub use riser_config::{Direct, Fault, FaultOn, Faults, Source, Spec};
pub use store::{Resized, Store};
pub use unit::unit_config;

#[cfg(test)]
mod tests;
