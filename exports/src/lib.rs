//! Exports of block devices to programs and the kernel of this host.
//!
//! - [`nbd`]: Network Block Device, server and client protocol.
//! - [`fuse`]: a file.
//! - [`ublk`]: a block device `/dev/ublkbN`.
//! - [`mounts`]: mounts visible to this process.
//!
//! An export serves a [`BlockDevice`](riser_block::BlockDevice), on its thread if it has one.

mod bell;
mod ending;
pub mod fuse;
mod looks;
pub mod mounts;
pub mod nbd;
pub mod ublk;
