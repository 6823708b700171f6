//! riser: initiator library and tool.
//!
//! - [`engine`]: thread which owns a device and its sessions, with the async API.
//! - [`lun`]: disks: identifying, reading and writing them.
//! - [`scsi`]: commands and response parsing. [`inquiry`]: human-readable INQUIRY data.
//! - [`rping`]: the first check to run on a new network.
//! - [`srp`], [`iscsi`]: sans-I/O protocol logic. [`session`], [`request`]: shared by both
//!   protocols.
//!   [`paths`]: multiple paths to the same unit. [`mod@unit`]: detects a replaced unit or lost
//!   writes. [`url`]: addresses.
//! - [`vnic`]: virtual Ethernet member.
//! - [`cli`]: the command line.

pub mod cli;
pub mod engine;
pub mod inquiry;
pub mod iscsi;
pub mod lun;
pub mod paths;
pub mod request;
pub mod rping;
pub mod scsi;
pub mod session;
pub mod srp;
pub mod unit;
pub mod url;
pub mod vnic;
