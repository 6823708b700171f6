//! riser: the initiator's library and tool.
//!
//! - [`rping`]: the first thing to run on a new network.
//! - [`srp`]: SRP's protocol logic, with no I/O in it.

pub mod block;
pub mod fuse;
pub mod nbd;
pub mod poll_fds;
pub mod rping;
pub mod srp;
