//! The initiator's side of SRP, with no I/O in it.
//!
//! - [`channel`]: one channel: login, request limit, tags, information units.
//! - [`discovery`]: finding the ports of an address.
//! - [`session`]: channels and requests: distribution, timeouts, task management, reconnection.
//! - [`descriptor`]: memory descriptors and where they go.

#![forbid(unsafe_code)]

pub mod channel;
pub mod descriptor;
pub mod discovery;
pub mod session;
