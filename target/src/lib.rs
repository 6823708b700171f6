//! The parts of `riserd`, the target daemon.
//!
//! # Modules
//! - [`audit`]: logs logins, logouts and configuration changes.
//! - [`backend`]: the storage of logical units: files, devices, memory.
//! - [`config`]: the crate `riser-config`: the YAML configuration, which is checked before any
//!   resource is opened.
//! - [`control`]: signals, the admin API, and the main loop of the daemon.
//! - [`fabric`]: code shared by the connections of all protocols: units, commands, statistics.
//! - [`srp`], [`iscsi`], [`iser`]: connections of each protocol, implemented as state machines
//!   without I/O.
//! - [`server`]: starts workers for a configuration, and shuts them down.
//! - [`sessions`]: sessions and the catalog, shared by all workers.
//! - [`worker`]: a thread with its devices, its ring and its channels.
//! - [`pool`]: the data buffers of a worker.
//! - [`qos`]: rate limits for units and initiators.
//! - [`stats`]: command counters and latencies.
//! - [`host`]: threads and dates.
//! - [`holder`]: finds the process that uses a file or an address. `patience`: waits for locks that
//!   are released soon.
//! - [`sandbox`]: drops privileges on startup.
//! - [`log`]: rate limits for log messages caused by a peer.
//! - [`cli`]: the command line of `riserd`, and its exit codes.

pub mod audit;
pub mod backend;
pub mod cli;
pub mod control;
pub mod fabric;
#[cfg(test)]
mod fixture;
pub mod holder;
pub mod host;
pub mod iscsi;
pub mod iser;
pub mod log;
mod patience;
pub mod pool;
pub mod qos;
pub mod sandbox;
pub mod server;
pub mod sessions;
pub mod srp;
pub mod stats;
#[cfg(test)]
mod tests;
pub mod units;
pub mod worker;

pub use riser_config as config;
