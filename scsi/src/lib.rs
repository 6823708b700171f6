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
//! | module | what |
//! | --- | --- |
//! | [`lu`] | the logical unit: shared state, checks, [`LogicalUnit::start`] |
//! | [`command`] | a command in flight and its state diagram |
//! | [`step`] | the words between command, transport and backend |
//! | [`opcode`] | the table that drives parsing and reporting |
//! | [`config`] | what a unit is made of |
//! | [`legacy`] | what a unit leaves to the one that takes its place |
//! | [`nexus`], [`lun`], [`device`] | who asks, and for what |
//! | [`sense`], [`attention`] | errors and unit attentions |
//! | [`access`] | how a command sees its data buffer |
//! | [`task`] | task sets, ordering, task management |
//! | [`vpd`] | vital product data and identifiers |
//! | [`srp`] | information units of the SCSI RDMA protocol |
//! | [`iscsi`] | PDUs, text keys and login of iSCSI |
//! | [`iser`] | headers and private data of iSCSI over RDMA |
//!
//! Behind these, one module per command family plans commands from CDBs:
//! `inquiry`, `capacity`, `mode`, `mode_select`, `report`, `rw`, `atomic`,
//! `verify`, `provisioning`, `threshold`, `reserve` and `unit`; [`reservation`] is what the last
//! but one changes.
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
//! refused as SPC-4 tells.
//!
//! [`Request`]: step::Request
//! [`Response`]: step::Response
//! [`Command`]: command::Command
//! [`LogicalUnit::start`]: lu::LogicalUnit::start

#![forbid(unsafe_code)]

pub mod access;
mod atomic;
pub mod attention;
mod capacity;
mod cdb;
pub mod command;
pub mod config;
pub mod device;
mod flags;
mod inquiry;
pub mod iscsi;
pub mod iser;
pub mod legacy;
pub mod lu;
pub mod lun;
mod mode;
mod mode_select;
pub mod nexus;
pub mod opcode;
mod plan;
mod provisioning;
pub mod reservation;
mod reserve;
mod rw;
pub mod sense;
pub mod srp;
pub mod step;
pub mod task;
mod threshold;
mod unit;
mod verify;
pub mod vpd;

#[cfg(test)]
mod tests;
