//! Services of a fabric, as machines without I/O and the programs that run them.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`sa`] | subnet administration: its records, a client, and an administrator for fabrics that have none |
//! | [`ls`] | the kernel's questions for paths, over netlink |
//! | [`acm`] | the socket by which programs ask for paths |
//! | [`iwpm`] | the iWARP port mapper |
//! | [`vnic`] | a virtual Ethernet |
//! | [`netlink`] | messages and socket of the kernel's RDMA subsystem |
//! | [`program`] | log and manual pages of the programs |

pub mod acm;
pub mod iwpm;
pub mod ls;
pub mod netlink;
pub mod program;
pub mod sa;
pub mod vnic;
