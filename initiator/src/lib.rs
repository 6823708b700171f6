//! riser: the initiator's library and tool.
//!
//! - [`engine`]: one thread that owns a device and its sessions, and the asynchronous API.
//! - [`lun`]: disks: what they are, reading and writing them.
//! - [`scsi`]: commands and what their answers say. [`inquiry`]: INQUIRY data for people.
//! - [`rping`]: the first thing to run on a new network.
//! - [`srp`], [`iscsi`]: the protocols' logic, with no I/O in it. [`session`], [`request`]: what
//!   they have in common. [`paths`]: several of them to one unit. [`mod@unit`]: whether it is still
//!   the same, and has what it acknowledged. [`url`]: addresses.
//! - [`block`]: what every export needs of a disk. [`nbd`], [`fuse`], [`ublk`]: the exports.
//! - [`disks`]: disks that are no logical units: NBD exports, files, block devices.
//! - [`vnic`]: a member of a virtual Ethernet.
//! - [`mod@bench`]: the benchmark. [`cli`]: the command line.

pub mod bench;
pub mod block;
pub mod cli;
pub mod disks;
pub mod engine;
pub mod fuse;
pub mod inquiry;
pub mod iscsi;
pub mod lun;
mod mounts;
pub mod nbd;
pub mod paths;
pub mod poll_fds;
pub mod request;
pub mod rping;
pub mod scsi;
pub mod session;
pub mod srp;
pub mod ublk;
pub mod unit;
pub mod url;
pub mod vnic;
