//! What every fabric shares and no protocol owns.
//!
//! A *fabric* is a way in which SCSI commands reach the target: SRP, iSCSI over TCP, iSER. Each has
//! connections of its own kind, as machines that do no I/O. This module has what such a machine is
//! made of. It knows no protocol: [`srp`](crate::srp), [`iscsi`](crate::iscsi) and
//! [`iser`](crate::iser) stand above it, and it uses none of them.
//!
//! # Modules
//! - `command`: [`Execution`], a SCSI command under way.
//! - `flow`: the way of a command through a connection, the same on every fabric.
//! - `action`: [`TaskAction`], what a connection asks of its worker for them.
//! - `task_mgmt`: task-management functions.
//! - `task`: [`TaskRef`], a task's name on all workers.
//! - `unit`: [`Unit`], a logical unit and its task set, as connections share it.
//! - `lun_map`: [`LunMap`], the units that one initiator may address, and by which numbers.
//! - `transfer`: [`Transfer`], the RDMA requests that move a command's data.
//! - `accounts`: [`Accounts`], where a session's commands are counted.
//! - `throttle`: [`Throttle`], the commands of a connection that wait for limits.
//! - `pace`: [`Pace`], how long a command may wait for its initiator.
//! - `contexts`: [`Spare`], contexts that no command has.
//! - `memory`: [`ConnectionMemory`], the bytes that a connection occupies.

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

pub use accounts::{Accounts, AddressedUnit};
pub use action::TaskAction;
pub use command::{Descriptors, Entry, Execution, MAX_CDB, MAX_DATA_TIMEOUTS};
pub(crate) use contexts::Contexts;
pub use contexts::Spare;
pub(crate) use flow::{Backlog, CommandFlow, End, Hold, Lent, MAX_STAGED};
pub use lun_map::{KnownUnits, LunMap, Mapping, StaleLun};
pub use memory::{ConnectionMemory, INITIATOR_DEPTH, RESPONDER_RESOURCES};
pub use pace::{OWED, Pace, SLOWEST, SLOWEST_AWAITED, Wait};
pub use riser_config::MAX_WAIT;
pub use task::{ConnRef, TaskIdx, TaskRef};
pub use throttle::{Passage, Throttle, Toll};
pub use transfer::{
    Direction, MAX_SGE, PortionLimits, RdmaRequest, RemoteMemory, RemoteRange, Requests, Transfer,
};
pub use unit::{TaskRefused, TmfCounts, TmfOutcome, Unit, UnitIdx};
