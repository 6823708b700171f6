//! SCSI with no transport in it, and the wire formats of the SCSI transports.
//!
//! The heart is a direct-access logical unit after SAM-5, SPC-4 and SBC-3 that
//! does no input or output of its own. A transport hands it a [`Request`]; the
//! resulting [`Command`] says step by step what it wants done with a data
//! buffer and a backend, and ends in a [`Response`].
//!
//! ```text
//!   transport                     this crate                     backend
//!   ---------                     ----------                     -------
//!   CDB, nexus, lengths ---> LogicalUnit::start
//!                                     |
//!   Data-Out into buffer <--- Step::ReceiveData
//!                                     |
//!                            Step::Block(BlockOp) ---> read, write, flush, ...
//!                                     |
//!   status, sense, data  <--- Step::Respond(Response)
//! ```
//!
//! # Modules
//!
//! From the bottom up; a module uses only what stands above it here, its own children apart.
//!
//! | module | role |
//! | --- | --- |
//! | [`lun`], [`nexus`], [`sense`] | addresses, ports and errors |
//! | [`data`] | layouts of parameter data, for both ends |
//! | [`config`], [`attention`], [`reservation`] | what a unit is made of, and what it keeps per nexus |
//! | [`access`], [`step`] | the words between command, transport and backend |
//! | [`lu`] | the logical unit: the state that its commands share |
//! | `commands` | a module for each family of commands, which plans them and decides their steps |
//! | [`opcode`] | the table that drives parsing and reporting |
//! | [`device_server`] | requests, checks, and the [`Command`] in flight |
//!
//! Beside these:
//!
//! | module | role |
//! | --- | --- |
//! | [`task`] | task sets, ordering, task management |
//! | [`srp`] | information units of the SCSI RDMA protocol |
//! | [`iscsi`] | PDUs, text keys and login of iSCSI |
//! | [`iser`] | headers and private data of iSCSI over RDMA |
//!
//! # Invariants
//!
//! - No byte of a CDB or parameter list makes this crate panic; a failure is
//!   always a status with sense data.
//! - Every block operation lies inside the capacity at the time of planning
//!   and is a multiple of the block size.
//! - No command needs a larger buffer than MAXIMUM TRANSFER LENGTH plus one
//!   segment, or 64 KiB for a parameter list, and it says how large before its
//!   first step.
//! - READ and WRITE allocate nothing, and take no lock unless a unit attention
//!   is pending.
//!
//! # Not implemented
//!
//! Asymmetric access commands, third-party copy,
//! protection information, auto contingent allegiance, removable media,
//! power conditions other than active, saved mode pages. The commands are
//! refused as SPC-4 says.
//!
//! [`Request`]: device_server::Request
//! [`Response`]: step::Response
//! [`Command`]: device_server::Command
//! [`LogicalUnit::start`]: lu::LogicalUnit::start

#![forbid(unsafe_code)]

pub mod access;
pub mod attention;
pub mod cdb;
mod commands;
pub mod config;
pub mod data;
pub mod device_server;
mod flags;
pub mod iscsi;
pub mod iser;
pub mod lu;
pub mod lun;
pub mod nexus;
pub mod opcode;
pub mod reservation;
pub mod sense;
pub mod srp;
pub mod step;
pub mod task;

#[cfg(test)]
mod tests;
