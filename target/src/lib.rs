//! The parts of `riserd`, the target daemon.
//!
//! # Modules
//! - [`audit`]: who logged in and out, and who changed the configuration, for the log.
//! - [`backend`]: where the bytes of a logical unit live: files, devices, memory.
//! - [`config`]: the crate `riser-config`: the YAML configuration, checked before anything is
//!   opened.
//! - [`control`]: signals, the admin API, and the daemon's life between them.
//! - [`fabric`]: what the connections of all protocols share: units, commands, accounts.
//! - [`srp`], [`iscsi`], [`iser`]: connections of each protocol, as machines that do no I/O.
//! - [`server`]: from a configuration to running workers, and the shutdown.
//! - [`sessions`]: sessions and what is served to them, shared by all workers.
//! - [`worker`]: one thread with its devices, its ring and its channels.
//! - [`pool`]: the data buffers of a worker.
//! - [`qos`]: how fast units and initiators may be.
//! - [`stats`]: what commands are counted by, and how long they take.
//! - [`host`]: where threads and dates come from.
//! - [`holder`]: the process that has a file or an address that we want. `patience`: the wait for
//!   what may be free in a moment.
//! - [`sandbox`]: what the daemon gives up before it serves.
//! - [`log`]: rate limits for what a peer can make us log.
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
pub mod units;
pub mod worker;

pub use riser_config as config;
