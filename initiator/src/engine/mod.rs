//! The engine: one thread that owns a device and any number of sessions, and the asynchronous API
//! on top of it.
//!
//! ```text
//!  any thread, any executor          engine thread
//!  ------------------------          -------------
//!  Client::connect, Session::submit ──mailbox──▶ Driver ── srp::session, iscsi::session machines
//!  IoFuture ◀──────────── oneshot ───────────────  │
//!  Workload (runs here, without a wake-up) ───────▶ │
//!                                                Provider (verbs, connection manager), TCP sockets
//! ```
//!
//! - [`Client`]: starts and stops the thread, makes sessions, owns the buffer pool.
//! - [`Session`]: commands to logical units of one target; see [`crate::lun`] for disks.
//! - [`ScsiIo`], [`IoEnd`], [`IoFuture`]: a command, its end, and the wait for it.
//! - [`Workload`]: submissions from the engine's own thread, for benchmarks at high queue depth.
//!
//! # Invariants
//! - The engine owns a command's buffers from submission to its end, with or without the future
//!   that waits. Dropping a future abandons the wait, never the memory.
//! - A buffer is reachable for the target only while its command is outstanding: it is registered
//!   for that command and invalidated before the end is reported. The exception is a session made
//!   with `register_always=0`, whose target may reach the whole pool while the session lasts.
//! - Wakers are called on the engine's thread with no lock held. What they run must not block.
mod builder;
mod client;
mod connect;
mod driver;
mod env;
mod hostname;
mod io;
mod iser;
mod oneshot;
mod park;
mod pool;
mod portals;
mod rdma;
mod session;
mod srp;
mod start;
mod status;
mod system;
mod tcp;
mod timer;

use std::time::Duration;

pub use builder::ClientBuilder;
pub use client::Client;
pub use env::Env;
pub use io::{IoData, IoEnd, ScsiIo, WorkQueue, Workload};
pub(crate) use oneshot::{Sender, oneshot};
pub(crate) use park::Mailbox;
pub use pool::{BufferPool, TakeBuffer};
pub use session::{IoFuture, Session};
pub use start::Engine;
pub use status::{LinkReport, LinkState, PathReport, Pending, SessionReport, SessionStatus};
pub use timer::{Elapsed, Timeout};

use crate::session::Down;
use crate::srp::discovery::DiscoveryError;
use crate::url::SecretError;

/// Longest duration of a call of a session, by default.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Failure of the engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device or the operating system refused at the start.
    #[error("device cannot be opened: {0}")]
    Device(#[from] std::io::Error),
    /// The host name has no address, or none of the device's family.
    #[error("host `{0}` has no usable address")]
    NoAddress(String),
    /// The session could not be made.
    #[error("cannot log in: {0}")]
    Login(#[from] Down),
    /// The device has no such partition key.
    #[error("device has no partition key {0:04x}")]
    NoPartition(u16),
    /// The address offers several target ports, and none was named.
    #[error("target has several ports; name one with its id_ext and ioc_guid")]
    Ambiguous,
    /// The address names no target port, and the device cannot ask for them.
    #[error(
        "this device cannot ask a target for its ports; name one with id_ext and ioc_guid in the address"
    )]
    Unnamed,
    /// Two portals of an address are the same.
    #[error("{0} is named twice; every path needs a portal of its own")]
    SamePortal(std::net::SocketAddr),
    /// The address does not name the iSCSI target.
    #[error("address names no target; `riser discover` lists those that there are")]
    NoTarget,
    /// The passwords for the address are not to be had.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// Nothing could be found out about the address.
    #[error(transparent)]
    Discovery(#[from] DiscoveryError),
    /// The engine has been shut down.
    #[error("engine is shut down")]
    Gone,
}

#[cfg(test)]
mod fake_target;
#[cfg(test)]
mod tests;
