//! The admin API of `riserd` from the client's point of view: data types, and a client.
//!
//! The API uses HTTP/1.1 and JSON over a Unix socket. Names are in snake case, sizes in bytes, and
//! times in seconds. New fields can be added without a new version, so clients should ignore
//! unknown fields. The server with its routes is `control::api` in `riser-target`. This crate does
//! not depend on the server.
//!
//! # Modules
//! - [`view`]: the daemon, its sessions, targets and configurations. [`live`]: counters.
//! - [`rates`]: rates between two points in time. [`recent`]: history of the last minutes.
//! - [`trace`]: traces of commands. [`upgrade`]: upgrades within the daemon's process.
//! - [`client`]: sends requests to the daemon, and waits for responses. [`socket`]: default socket
//!   path.

pub mod client;
pub mod live;
pub mod rates;
pub mod recent;
pub mod socket;
pub mod trace;
pub mod upgrade;
pub mod view;
