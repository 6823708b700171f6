//! Parameter data: the layouts that the logical unit writes and the initiator reads.

pub mod designator;
pub mod mode;
