//! riser: the initiator's library and tool.
pub mod block;
pub mod nbd;
