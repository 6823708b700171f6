//! An in-memory kernel for tests and simulators: files, sockets and threads that only act when a
//! simulator tells them to.
//!
//! [`Ring::simulated`](crate::Ring::simulated) creates a regular ring, with the same tokens, slots,
//! checks and bounds as in production, but its operations wait in a [`Kernel`] until the driver
//! completes them: in any order, wholly or in part, or with an error. There are no clocks, random
//! numbers, descriptors or threads here, so a schedule always yields the same trace.
//!
//! ```text
//! worker ─ submit ─▶ Ring ─ enter ─▶ Kernel::operations ─ Kernel::complete ─▶ Ring ─ reap → worker
//!                                           │ acts on
//!                                           ▼
//!                             Disk        Socket ◀─ Peer ─▶ the simulator's network
//! ```
//!
//! - [`Kernel`]: the pending operations of a ring, and their completion. `io_wq`: the kernel
//!   threads that some of them need.
//! - [`Disk`]: a file or block device, with its written data, its stable data, and the effects of a
//!   crash.
//! - [`Listener`], [`Peer`]: sockets, as seen by the network.
//! - [`Threads`]: helper threads, whose jobs are steps of the schedule.
//!
//! Objects are reference-counted and can be shared between rings: a disk outlives the ring, and the
//! process, that used it.

mod io_wq;
mod kernel;
mod threads;

pub use crate::objects::{Disk, File, Listener, Object, Peer, SECTOR, Socket};
pub(crate) use kernel::Queue;
pub use kernel::{Kernel, Operation, OperationId, Outcome};
pub use threads::{ThreadId, Threads};

#[cfg(test)]
mod tests;
