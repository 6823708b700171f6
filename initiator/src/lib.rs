//! An initiator library for SRP, iSER and iSCSI: attaches logical units as block devices.
//!
//! A [`Client`](engine::Client) is a thread with an RDMA device (by default the software NIC), or
//! only with TCP sockets. It connects to the targets, keeps their sessions alive and retries
//! commands after an outage. A [`Lun`](lun::Lun) is a logical unit on a session. It implements
//! [`BlockDevice`](riser_block::BlockDevice), so `riser-exports` can export it and `riser-bench` can
//! measure it. All calls return futures for any executor, such as the simple
//! [`block_on`](riser_block::task::block_on).
//!
//! ```no_run
//! use riser_block::BlockDevice;
//! use riser_block::task::block_on;
//! use riser_initiator::engine::Client;
//! use riser_initiator::url::TargetUrl;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::builder().open("192.0.2.1".parse()?)?;
//! let url: TargetUrl = "srp://192.0.2.7/0".parse()?;
//! block_on(async {
//!     let session = client.connect(url).await?;
//!     let disk = session.lun(0).await?;
//!     let buffer = session.buffer(disk.geometry().block_size as usize).await?;
//!     let block = disk.read(0, buffer).await?;
//!     println!("the first byte is {:#x}", block.slice().to_vec()[0]);
//!     session.close().await;
//!     Ok(())
//! })
//! # }
//! ```
//!
//! `examples/read_block.rs` is a program that does the same at any address.
//!
//! # Modules
//! - [`engine`]: thread which owns a device and its sessions, with the async API.
//! - [`lun`]: disks: identifying, reading and writing them.
//! - [`scsi`]: commands and response parsing.
//! - [`srp`], [`iscsi`]: sans-I/O implementation of the protocols. [`session`], [`request`]: shared
//!   by both protocols.
//! - [`protection`]: protection information of blocks (T10 DIF).
//! - [`paths`]: multiple paths to the same unit. [`mod@unit`]: detects a replaced unit or lost
//!   writes.
//! - [`url`]: parses target addresses.

pub mod engine;
pub mod iscsi;
pub mod lun;
pub mod paths;
pub mod protection;
pub mod request;
pub mod scsi;
pub mod session;
pub mod srp;
pub mod unit;
pub mod url;
