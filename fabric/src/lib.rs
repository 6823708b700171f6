//! Fabric services, as state machines without I/O and the programs that run them.
//!
//! | module | service |
//! | --- | --- |
//! | [`sa`] | subnet administration: records, a client, and an administrator for fabrics without one |
//! | [`ls`] | path requests from the kernel over netlink |
//! | [`acm`] | path requests from programs over a Unix socket |
//! | [`iwpm`] | iWARP port mapper |
//! | [`vnic`] | virtual Ethernet |
//! | [`netlink`] | messages and socket of the kernel's RDMA subsystem |
//! | [`program`] | logging and manual pages of the programs |

pub mod acm;
pub mod iwpm;
pub mod ls;
pub mod netlink;
pub mod program;
pub mod sa;
pub mod vnic;
