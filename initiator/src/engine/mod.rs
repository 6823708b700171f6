//! The engine: a thread that owns a device and any number of sessions, with an asynchronous API.
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
//! - [`Client`]: starts and stops the thread, creates sessions, owns the buffer pool.
//! - [`Session`]: executes commands for logical units of a target; see [`crate::lun`] for disks.
//! - [`ScsiIo`], [`IoCompletion`], [`IoFuture`]: a command, its completion, and the future for it.
//! - [`Workload`]: submits commands from the engine's thread, for benchmarks at high queue depth.
//!
//! # Invariants
//! - The engine owns the buffers of a command from submission to completion, even if its future was
//!   dropped. Dropping a future abandons the wait, but never releases the memory.
//! - The target can access a buffer only while its command is outstanding: the buffer is registered
//!   for the command and invalidated before the completion is reported. The exception is a session
//!   with `register_always=0`: its target can access the whole pool for the lifetime of the
//!   session.
//! - Wakers are called on the engine's thread without holding a lock. They must not block.
mod builder;
mod client;
mod connect;
mod driver;
mod env;
mod hostname;
mod io;
mod iser;
mod portals;
mod rdma;
mod session;
mod srp;
mod start;
mod status;
mod system;
mod tcp;
mod timer;
mod wakeup;

use std::time::Duration;

pub use builder::ClientBuilder;
pub use client::Client;
pub use env::Env;
pub use io::{IoCompletion, IoData, ScsiIo, WorkQueue, Workload};
pub use session::{IoFuture, Session};
pub use start::Engine;
pub use status::{
    LinkReport, LinkState, PathReport, Pending, ProtectionErrors, SessionReport, SessionStatus,
};
pub use timer::{Elapsed, Timeout};
pub(crate) use wakeup::Wakeup;

use crate::session::Down;
use crate::srp::discovery::DiscoveryError;
use crate::url::SecretError;

/// Default timeout for a call of a session.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Error of the engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device or the operating system returned an error during startup.
    #[error("cannot open the device: {0}")]
    Device(#[from] std::io::Error),
    /// The host name has no address, or none in the device's address family.
    #[error("host `{0}` has no usable address")]
    NoAddress(String),
    /// The session could not be established.
    #[error("cannot log in: {0}")]
    Login(#[from] Down),
    /// The device does not have this partition key.
    #[error("device has no partition key {0:04x}")]
    NoPartition(u16),
    /// The target has several ports, and the address does not name one.
    #[error("target has several ports; select one with id_ext and ioc_guid")]
    Ambiguous,
    /// The address does not name a target port, and the device does not support querying the ports.
    #[error(
        "this device cannot query the ports of a target; select one with id_ext and ioc_guid in the address"
    )]
    Unnamed,
    /// Two portals of an address are identical.
    #[error("duplicate portal {0}; each path requires a separate portal")]
    SamePortal(std::net::SocketAddr),
    /// The address does not name an iSCSI target.
    #[error("missing target in the address; use `riser discover` to list the targets")]
    NoTarget,
    /// The passwords for the address are not available.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// Discovery for the address failed.
    #[error(transparent)]
    Discovery(#[from] DiscoveryError),
    /// The engine has been shut down.
    #[error("engine is shut down")]
    Gone,
}

#[cfg(test)]
mod fake_target;
#[cfg(test)]
pub(crate) mod tests;
