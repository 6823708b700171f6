//! One `io_uring` per core: submission, completion, and one place to park.
//!
//! A worker of `riserd` waits for disks, sockets, descriptors of the NIC and messages of other
//! threads. All of them end in the completion queue of one [`Ring`], so a worker sleeps in exactly
//! one system call ([`Ring::park`]) and nothing can wake it that it does not see.
//!
//! # Modules
//! - `ring`: [`Ring`], [`Completion`], registration of memory and files, the park.
//! - `ops`: the operations, `submit_*`. `op`: their words. `config`: [`RingConfig`]. `error`: the
//!   errors of all of these.
//! - `kernel`: what carries them out: the host's `io_uring` (`uring`), or one in memory.
//! - [`simulated`]: that one, with its files, sockets (`objects`) and threads, driven by a test or
//!   a simulator.
//! - `handle`: [`Handle`], a file or socket that operations name.
//! - `slot`: the table of operations in flight and what each keeps alive (private).
//! - `waker`: [`Waker`], which ends a park from any thread.
//! - `mailbox`: a bounded queue into a worker, [`mailbox()`], which rings the waker.
//! - `offload`: [`Offload`], one helper thread for the few system calls the ring lacks. `threads`:
//!   where that thread comes from.
//! - `spinner`: [`Spinner`], the policy that polls while busy and sleeps when idle.
//!
//! # I/O model
//! 1. `submit_*` takes a slot, queues an operation and remembers the caller's [`Token`].
//! 2. [`Ring::submit`], [`Ring::reap`] or [`Ring::park`] hands what is queued to the kernel.
//! 3. [`Ring::reap`] returns a [`Completion`] per finished operation, with that token.
//!
//! # User data
//! A token belongs to its caller; the ring returns it untouched and never interprets it, and two
//! operations may bear the same one. What the kernel sees as `user_data` is a slot number with a
//! generation, so a completion that outlives its slot is recognised and is never mistaken for
//! another operation's.
//!
//! # Invariants
//! - Everything that the kernel may touch on behalf of an operation (memory, vectors, descriptors)
//!   is owned by the operation's slot from submission to its last completion. Dropping the caller's
//!   state, or the ring itself, never leaves the kernel with a dangling address.
//! - The number of operations in flight is fixed when the ring is made. A full ring refuses with
//!   [`SubmitError::Full`]; nothing queues behind it.
//! - A ring stays on the thread that made it (it is not `Send`): the kernel knows that and saves
//!   its locks.
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
