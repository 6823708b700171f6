//! An initiator library for SRP, iSER and iSCSI.
//!
//! - [`engine`]: thread which owns a device and its sessions, with the async API.
//! - [`lun`]: disks: identifying, reading and writing them.
//! - [`scsi`]: commands and response parsing.
//! - [`srp`], [`iscsi`]: sans-I/O protocol logic. [`session`], [`request`]: shared by both
//!   protocols.
//!   [`paths`]: multiple paths to the same unit. [`mod@unit`]: detects a replaced unit or lost
//!   writes. [`url`]: addresses.

pub mod engine;
pub mod iscsi;
pub mod lun;
pub mod paths;
pub mod request;
pub mod scsi;
pub mod session;
pub mod srp;
pub mod unit;
pub mod url;
