//! Common code for all fabrics, independent of protocols.
//!
//! A *fabric* is a way to send SCSI commands to the target: SRP, iSCSI over TCP, or iSER. Each
//! fabric implements its connections as state machines without I/O. This module contains building
//! blocks for these. It does not depend on any protocol: [`srp`](crate::srp),
//! [`iscsi`](crate::iscsi) and [`iser`](crate::iser) are based on it.
//!
//! # Modules
//! - `command`: [`Execution`], an active SCSI command.
//! - `flow`: command processing in a connection, the same for all fabrics.
//! - `action`: [`TaskAction`], requests from a connection to its worker.
//! - `task_mgmt`: task management functions.
//! - `task`: [`TaskRef`], identifies a task on any worker.
//! - `unit`: [`Unit`], a logical unit and its task set, shared by connections.
//! - `lun_map`: [`LunMap`], the units available to an initiator by LUN.
//! - `transfer`: [`Transfer`], RDMA requests to transfer the data of a command.
//! - `accounts`: [`Accounts`], command statistics of a session.
//! - `throttle`: [`Throttle`], commands of a connection delayed by limits.
//! - `pace`: [`Pace`], limits the time a command can wait for its initiator.
//! - `contexts`: [`Spare`], unused contexts.
//! - `memory`: [`ConnectionMemory`], memory usage of a connection in bytes.

#![forbid(unsafe_code)]

mod accounts;
mod action;
mod command;
mod contexts;
mod flow;
#[cfg(test)]
mod interleavings;
mod lun_map;
mod memory;
mod pace;
mod task;
pub mod task_mgmt;
mod throttle;
mod transfer;
mod unit;

pub use accounts::{Accounts, AddressedUnit, Statistics};
pub use action::TaskAction;
pub use command::{Descriptors, Entry, Execution, MAX_CDB, MAX_DATA_TIMEOUTS};
pub(crate) use contexts::Contexts;
pub use contexts::Spare;
pub(crate) use flow::{Backlog, CallContext, CommandFlow, End, Hold, MAX_STAGED};
pub use lun_map::{ExpectedUnit, KnownUnits, LunMap, Mapping};
pub use memory::{ConnectionMemory, INITIATOR_DEPTH, RESPONDER_RESOURCES};
pub use pace::{ORDER_CHECK_INTERVAL, OWED, Pace, SLOWEST, SLOWEST_AWAITED, Wait};
pub use riser_config::MAX_WAIT;
pub use task::{ConnRef, TaskIdx, TaskRef};
pub use throttle::{Passage, Throttle, Toll};
pub use transfer::{
    Direction, MAX_SGE, PortionLimits, RdmaRequest, RemoteMemory, RemoteRange, Requests, Transfer,
};
pub use unit::{TaskRefused, TmfCounts, TmfOutcome, Unit, UnitIdx};
