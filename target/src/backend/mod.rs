//! Backends: storage for logical units.
//!
//! A logical unit requests block operations ([`riser_scsi::step::BlockOp`]). A worker executes them
//! on a file, a block device, memory, or a null device, using a [`Driver`] of [`riser_file`].
//!
//! # Modules
//! - `store`: [`Store`], an open backend shared by all workers: size, lock, alignment.
//! - `served`: [`Served`], a store as used by the driver of a worker: its operations, errors, log
//!   and injected faults.
//! - `block_access`: the protection information of blocks, for the control plane.
//! - `execute`: operations on media that are not files.
//! - `flush`: failed flushes, shared by all workers and saved. The protocol is in [`riser_block`].
//! - `ram`: sparse memory of a RAM disk.
//! - `file_id`: file identifiers that do not depend on the path.
//! - `health`: counts failures and measures available space. `inspection`: checks the medium of an
//!   open backend. `cause`: reasons why a backend requires an operator.
//! - `hints`: advice if a file cannot be opened, and notes about an open backend.
//! - `intents`: the thread that writes the intent log of a protected file.
//! - [`lio`]: converts disks with protection information between LIO's files and ours.
//! - `lost_flushes`: failed flushes of recoveries that no unit has recorded yet.
//! - `medium`: opens, locks and measures files and devices. `made`: reverts the changes made on
//!   disk when doing so.
//! - `query`: queries size and space on file systems that may not respond.
//! - `open_error`: [`OpenError`], reasons why a backend cannot be opened.
//! - `opening`: opens backends on file systems that may not respond. `waiting`: threads waiting for
//!   a file system.
//! - `errno`: maps host errors to errors of a logical unit.
//! - `protected`: files that store protection information with each block.
//! - `scrub`: [`Scrub`], verifies the protection information of all blocks in the background.
//! - `unit`: configuration of a logical unit for an open backend.
//! - `sys`: system calls not available in the standard library.
//! - `threads`: list of all threads that a file system may block, and threads that close files.
//!
//! # Guarantees
//! - **Durability.** With `write_cache: off`, every write, zeroing and discard is on stable storage
//!   before it completes. With `write_cache: on`, this only applies to operations with FUA and to
//!   operations that completed before a successful flush. A FUA read flushes the unit's cached data
//!   first. After a failed flush, all flushes fail until an administrator clears this, because data
//!   acknowledged before may be lost.
//! - **Exclusive access.** A file or device that is served for writing is locked against all other
//!   `riserd` processes, and against other backends of this process.
//!
//! [`riser_file`] adds guarantees about blocks and limits. If direct I/O requires larger blocks than
//! the unit has, `direct: auto` uses the page cache, and `direct: on` is rejected with the
//! reason. We guarantee zeroes after a discard, so a device without holes does not support UNMAP.

mod block_access;
mod cause;
mod errno;
mod execute;
mod file_id;
mod flush;
mod health;
mod hints;
mod inspection;
mod intents;
pub mod lio;
mod lost_flushes;
mod made;
mod medium;
mod medium_faults;
mod open_error;
mod opening;
mod protected;
pub(crate) mod query;
mod ram;
mod scrub;
mod served;
mod store;
mod sys;
mod threads;
mod unit;
mod waiting;

pub use cause::Cause;
pub use file_id::FileId;
pub(crate) use flush::FlushFailures;
pub use flush::{FlushFailure, FlushKeeper};
pub use health::{Failing, Space};
#[cfg(test)]
pub(crate) use lost_flushes::injection::fail_next_recovery;
pub(crate) use lost_flushes::lost_flushes;
#[cfg(test)]
pub(crate) use made::HANGING_UNDO;
pub use medium::Geometry;
pub use open_error::OpenError;
pub(crate) use opening::close_all;
pub use opening::{OpenRequest, OpenedStores, open_all, open_each, open_in_time, undo_all};
pub use protected::{Header, HeaderError, Layout};
pub use ram::Ram;
pub(crate) use ram::random_generation;
pub use riser_config::{Direct, Fault, FaultOn, Faults, Source, Spec};
pub use riser_file::{DriverConfig, DriverFull, StoreId};
pub use scrub::{Defect, Scrub, ScrubProgress, ScrubState};
pub use served::Served;
#[cfg(test)]
pub(crate) use served::command;
pub use store::{Resized, Store};
#[cfg(test)]
pub(crate) use threads::close;
pub(crate) use threads::{check_threads, oldest_thread};
pub use unit::unit_config;

/// Executes block operations for a worker.
pub type Driver = riser_file::Driver<Served>;

/// A completed block operation, so that the worker can respond to its command.
pub type Done = riser_file::Done<riser_scsi::step::StepResult>;

#[cfg(test)]
mod tests;
