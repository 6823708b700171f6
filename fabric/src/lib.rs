//! Services of a fabric, as machines without I/O and the programs that run them.

pub mod iwpm;
pub mod netlink;
pub mod vnic;
