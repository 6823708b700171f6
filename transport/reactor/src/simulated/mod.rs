//! A kernel in memory, for tests and simulators: files, sockets and threads that act only when a
//! simulator says so.
//!
//! [`Ring::simulated`](crate::Ring::simulated) makes a ring that is the one that ships, with its
//! tokens, slots, checks and bounds, but whose operations wait in a [`Kernel`] until its driver
//! completes them: in the order that it chooses, wholly or in part, or with an error. Nothing here
//! has a clock, a random number, a descriptor or a thread, so one schedule gives one trace.
//!
//! ```text
//! worker ─ submit ─▶ Ring ─ enter ─▶ Kernel::operations ─ Kernel::complete ─▶ Ring ─ reap → worker
//!                                           │ acts on
//!                                           ▼
//!                             Disk        Socket ◀─ Peer ─▶ the simulator's network
//! ```
//!
//! - [`Kernel`]: the operations under way on one ring, and their completion. `io_wq`: the threads of
//!   the kernel that some of them need.
//! - [`Disk`]: a file or block device: what was written, what is stable, and what a crash leaves of
//!   it.
//! - [`Listener`], [`Peer`]: sockets, from the network's side.
//! - [`Threads`]: helper threads, whose jobs are steps of the schedule.
//!
//! Objects are shared by count and between rings: a disk outlives the ring, and the process, that
//! used it.

mod io_wq;
mod kernel;
mod threads;

pub use crate::objects::{Disk, File, Listener, Object, Peer, SECTOR, Socket};
pub(crate) use kernel::Queue;
pub use kernel::{Kernel, Operation, OperationId, Outcome};
pub use threads::{ThreadId, Threads};

#[cfg(test)]
mod tests;
