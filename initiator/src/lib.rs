//! riser: the initiator's library and tool.
//!
//! - [`srp`]: SRP's protocol logic, with no I/O in it.

pub mod block;
pub mod fuse;
pub mod nbd;
pub mod srp;
