//! A SCSI implementation that is independent of the transport, and the wire formats of SCSI
//! transports.
//!
//! The main type is a direct-access logical unit according to SAM-5, SPC-4 and SBC-3, with optional
//! [protection information](protection) according to SBC-4. It does not perform any I/O. A
//! transport creates a [`Request`], and the resulting [`Command`] returns the steps to be executed
//! with a data buffer and a backend. The last step is a [`Response`].
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
//! `examples/unit.rs` executes commands on a unit whose medium is a byte array.
//!
//! # Modules
//!
//! Sorted from bottom to top. A module should only use the modules above it in this table, and its
//! own children.
//!
//! | module | role |
//! | --- | --- |
//! | [`lun`], [`nexus`], [`sense`] | addresses, ports and errors |
//! | [`data`] | layouts of parameter data, used by initiators and targets |
//! | [`config`], [`attention`], [`reservation`] | configuration of a unit, and state per nexus |
//! | [`access`], [`step`] | interface between command, transport and backend |
//! | [`protection`] | protection information of logical blocks |
//! | [`lu`] | the logical unit: state shared between commands |
//! | `commands` | planning and execution of commands, with a module for each family |
//! | [`opcode`] | the table used for parsing and reporting |
//! | [`device_server`] | requests, checks, and the [`Command`] in flight |
//!
//! Other modules:
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
//! - This crate must not panic for any CDB or parameter list. All errors result in a status with
//!   sense data.
//! - Each block operation is within the capacity when it is planned, and a multiple of the block
//!   size.
//! - The buffer size of a command is never more than MAXIMUM TRANSFER LENGTH plus a segment, or 64
//!   KiB for a parameter list, and is known before the first step.
//! - READ and WRITE only need a lock if a unit attention is pending, and don't allocate any memory
//!   unless the LU has protection information.
//! - With protection information, a READ never sends a block for which a check has failed.
//!
//! # Not implemented
//!
//! Asymmetric access commands, third-party copy, auto contingent allegiance, removable media, power
//! conditions other than active, and saved mode pages. FORMAT UNIT, which could change the type of
//! protection information, and the Application Tag mode page. These commands are refused as
//! specified in SPC-4.
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
pub mod protection;
pub mod reservation;
pub mod sense;
pub mod srp;
pub mod step;
pub mod task;

#[cfg(test)]
mod tests;
