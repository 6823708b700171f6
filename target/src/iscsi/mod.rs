//! The iSCSI target: connections as machines that do no I/O.
//!
//! A [`Channel`] is one connection of a session (RFC 7143), over a [`Datamover`] (RFC 5047) that
//! knows how data travel. Over TCP a [`TcpChannel`] puts the framing around both: it takes bytes
//! and gives batches of bytes to send. What the channel wants done otherwise it says with
//! [`Action`]s.
//!
//! ```text
//! bytes ──→ TcpChannel ── frames ──→ Channel ── Action ─→ worker: block operations, other channels
//!               ↑                       │ control PDUs, Put_Data, Get_Data
//! bytes ←── Batch ←──── Tcp (Datamover) ←┘
//! ```
//!
//! # Modules
//! - `channel`: [`Channel`]: its state and its inputs. `login`, `full_feature`, `logout`: what it
//!   does in each phase of its life. `report`: what it reports. `counters`, `pending`,
//!   `reassigned`: what it has.
//! - `command`: the way of a SCSI command; `data`: its data; `ending`: its end; `task`: its context
//!   ([`TaskState`]).
//! - `window`: the command numbers that a session's connections share; `order`: requests whose turn
//!   has not come.
//! - `recovery`: what is kept to be sent once more. `allegiance`: commands that go from a
//!   connection that is lost to another one.
//! - `mgmt`: task management and aborts. `text`: text requests.
//! - `datamover`: what a channel asks of the layer below. `tcp`: that layer on TCP.
//!   [`iser`](crate::iser) has it on RDMA.
//!
//! # Invariants
//! - Nothing but login is looked at before full-feature phase.
//! - A command that was taken in is answered, aborted or torn down with its channel.
//! - Every buffer goes back to the pool, and no earlier than devices and sockets have released it.
//! - Memory is bounded: contexts by the command window, what waits to be sent by [`MAX_QUEUED`] and
//!   [`MAX_QUEUED_BYTES`] (beyond them nothing more is read), unsolicited data without a buffer by
//!   FirstBurstLength each, and by `MAX_STAGED` in all for commands that wait for limits.
//! - A connection that has not logged in has no contexts, and takes no place of another.
//!
//! # Not implemented
//! TARGET COLD RESET, which would end the sessions of all initiators: it is answered as not
//! supported.

#![deny(unsafe_code)]

mod allegiance;
mod channel;
mod command;
mod counters;
mod data;
mod datamover;
mod ending;
mod full_feature;
mod login;
mod logout;
mod mgmt;
mod order;
mod pending;
mod reassigned;
mod recovery;
mod report;
mod task;
mod tcp;
mod text;
mod window;

#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_allegiance;
#[cfg(test)]
mod tests_limits;
#[cfg(test)]
mod tests_states;
#[cfg(test)]
mod tests_stream;

pub use allegiance::TIME2RETAIN;
pub use channel::{
    Action, Channel, ChannelConfig, Cx, Ending, Gate, LoginGrant, MAX_QUEUED, MAX_QUEUED_BYTES,
    Phase, TaskBuffers,
};
pub use counters::Counters;
pub use datamover::{Control, Datamover, GetData, PutData, SolicitedData};
pub use reassigned::{ReassignRequest, ReassignedTask};
pub use report::SessionInfo;
pub use task::{SpareTasks, TaskState};
pub use tcp::{Batch, Chunk, Tcp, TcpChannel};
pub use window::Window;
