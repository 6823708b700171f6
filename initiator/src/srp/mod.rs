//! The initiator for SRP, without I/O.
//!
//! - [`channel`]: a single channel: login, request limit, tags, information units.
//! - [`discovery`]: discovers the ports of an address.
//! - [`session`]: channels and requests: distribution, timeouts, task management, reconnection.
//! - [`descriptor`]: memory descriptors and their layout.

#![forbid(unsafe_code)]

pub mod channel;
pub mod descriptor;
pub mod discovery;
pub mod session;
