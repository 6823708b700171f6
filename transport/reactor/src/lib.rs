//! One `io_uring` per core: submission, completion, and a single place to park.
//!
//! A worker of `riserd` waits for disks, sockets, descriptors of the NIC and messages from other
//! threads. All of these events are delivered to the completion queue of one [`Ring`], so a worker
//! sleeps in exactly one system call ([`Ring::park`]) and sees the reason for each wake-up.
//!
//! # Modules
//! - `ring`: [`Ring`], [`Completion`], registration of memory and files, parking.
//! - `ops`: the operations, `submit_*`. `op`: their types. `config`: [`RingConfig`]. `error`: the
//!   errors of all these modules.
//! - `kernel`: the backend that executes operations: `io_uring` of the host (`uring`), or an
//!   in-memory implementation.
//! - [`simulated`]: the in-memory implementation, with its files, sockets (`objects`) and threads.
//!   It is driven by a test or a simulator.
//! - `handle`: [`Handle`], a reference to a file or socket that operations can use.
//! - `slot`: the table of operations in flight and the resources that each operation keeps alive
//!   (private).
//! - `waker`: [`Waker`], which interrupts a park from any thread.
//! - `mailbox`: a bounded queue to a worker, [`mailbox()`], which uses the waker.
//! - `offload`: [`Offload`], a helper thread for the few system calls that the ring does not
//!   support. `threads`: the source of that thread.
//! - `spinner`: [`Spinner`], the policy that polls while busy and sleeps when idle.
//!
//! # I/O model
//! 1. `submit_*` allocates a slot, queues an operation and stores the caller's [`Token`].
//! 2. [`Ring::submit`], [`Ring::reap`] or [`Ring::park`] submits queued operations to the kernel.
//! 3. [`Ring::reap`] returns a [`Completion`] with that token for each completed operation.
//!
//! # User data
//! A token belongs to its caller. The ring returns it unchanged and never interprets it, so several
//! operations can use the same token. The kernel's `user_data` is a slot number with a generation,
//! so a completion that arrives after its slot was released is detected and is never attributed to
//! a different operation.
//!
//! # Invariants
//! - Everything that the kernel may access on behalf of an operation (memory, vectors, descriptors)
//!   is owned by the operation's slot from submission to its last completion. Dropping the caller's
//!   state, or the ring itself, never leaves the kernel with a dangling address.
//! - The number of operations in flight is fixed when the ring is created. A full ring returns
//!   [`SubmitError::Full`] instead of queueing.
//! - A ring stays on the thread that created it (it is not `Send`). The kernel relies on that and
//!   avoids locking.
//!
//! # Not implemented
//! Kernel-side polling (`SQPOLL`, `IOPOLL`), linked operations and provided buffers.

mod config;
mod error;
mod handle;
mod kernel;
mod mailbox;
mod objects;
mod offload;
mod op;
mod ops;
mod ring;
pub mod simulated;
mod slot;
mod spinner;
mod threads;
mod uring;
mod waker;

pub use config::RingConfig;
pub use error::{RegisterError, RingError, SubmitError};
pub use handle::Handle;
pub use mailbox::{MailReceiver, MailSender, SendError, mailbox};
pub use offload::{Offload, OffloadFull};
pub use op::{Durability, Fallocate, Op, Receive, SyncKind};
pub use ring::{Completion, Reaped, Ring};
pub use slot::Token;
pub use spinner::{Next, Spinner};
pub use threads::{Helper, Job, Spawned, SystemThreads, Threads};
pub use waker::Waker;
