//! The admin API of `riserd`, as its clients see it: what the daemon says, and a client that asks.
//!
//! The API is HTTP/1.1 and JSON on a Unix socket: names in snake case, sizes in bytes, times in
//! seconds. Fields may be added within a version; a reader skips those that it does not know. The
//! daemon's side, with its routes, is `control::api` of `riser-target`; this crate knows neither
//! the server nor what it serves.
//!
//! # Modules
//! - [`view`]: the daemon, its sessions, targets and configurations. [`live`]: what it has
//!   counted.
//! - [`rates`]: what happened between two moments. [`recent`]: the last minutes.
//! - [`trace`]: the ways of single commands. [`upgrade`]: upgrades of the daemon in its process.
//! - [`client`]: asks a daemon, and waits for its answer. [`socket`]: where it is to be found.

pub mod client;
pub mod live;
pub mod rates;
pub mod recent;
pub mod socket;
pub mod trace;
pub mod upgrade;
pub mod view;
