//! iSCSI target: connection state machines without I/O.
//!
//! A [`Channel`] is a connection of a session (RFC 7143). It uses a [`Datamover`] (RFC 5047) to
//! transfer data. For TCP, a [`TcpChannel`] adds framing: it processes received bytes and returns
//! batches of bytes to send. The channel uses [`Action`]s for all other requests to the worker.
//!
//! ```text
//! bytes ──→ TcpChannel ── frames ──→ Channel ── Action ─→ worker: block operations, other channels
//!               ↑                       │ control PDUs, Put_Data, Get_Data
//! bytes ←── Batch ←──── Tcp (Datamover) ←┘
//! ```
//!
//! # Modules
//! - `channel`: [`Channel`] state and inputs. `login`, `full_feature` and `logout` implement its
//!   phases ([`Phase`]). `context`: worker context; `action`: requests to the worker. `report`: log
//!   messages. `config`, `counters`, `pending`, `reassigned`: data structures.
//! - `executor`: [`Executor`], session and requests. `command`: SCSI commands; `data`: command
//!   data; `ending`: completion; `task`: context ([`TaskState`]). `tasks`: all contexts; `timers`:
//!   deadlines, pings and data timeouts.
//! - `window`: command window shared by all connections of a session; `order`: requests received
//!   out of order.
//! - `recovery`: PDUs kept for retransmission. `allegiance`: keeps the commands of a lost
//!   connection. `reassign`: moves them to another connection.
//! - `mgmt`: task management and aborts. `text`: text requests.
//! - `datamover`: interface to the data transfer layer. `tcp`: implementation for TCP. See
//!   [`iser`](crate::iser) for RDMA.
//!
//! # Invariants
//! - Before full-feature phase, only login PDUs are processed.
//! - Each command with a context is completed, aborted, or torn down with its channel.
//! - Each buffer is returned to the pool, but not before devices and sockets have released it.
//! - Memory usage is limited: contexts by the command window, the send queue by [`MAX_QUEUED`] and
//!   [`MAX_QUEUED_BYTES`] (if exceeded, we stop reading), unsolicited data without a buffer by
//!   FirstBurstLength for each command. For commands waiting for rate limits, this data is limited
//!   to `MAX_STAGED` per connection. For commands waiting for pool memory, it's limited to the pool
//!   size per worker, plus `MAX_STAGED` per connection; beyond that, commands are rejected with
//!   TASK SET FULL.
//! - A connection before login has no contexts and can't replace another connection.
//!
//! # Not implemented
//! TARGET COLD RESET, which would terminate the sessions of all initiators. The response is
//! "function not supported".

#![deny(unsafe_code)]

mod action;
mod allegiance;
mod channel;
mod command;
mod config;
mod context;
mod counters;
mod data;
mod datamover;
mod ending;
mod executor;
mod full_feature;
mod login;
mod logout;
mod mgmt;
mod order;
mod pending;
mod phase;
mod reassign;
mod reassigned;
mod recovery;
mod report;
mod task;
mod tasks;
mod tcp;
mod text;
mod timers;
mod window;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_allegiance;
#[cfg(test)]
mod tests_limits;
#[cfg(test)]
mod tests_random;
#[cfg(test)]
mod tests_recovery;
#[cfg(test)]
mod tests_states;
#[cfg(test)]
mod tests_stream;

pub use action::{Action, Ending};
pub use allegiance::TIME2RETAIN;
pub use channel::{Channel, MAX_QUEUED, MAX_QUEUED_BYTES, TaskBuffers};
pub use config::ChannelConfig;
pub use context::{Cx, Gate, LoginGrant};
pub use counters::Counters;
pub use datamover::{Control, Datamover, GetData, PutData, SolicitedData};
pub use executor::Executor;
pub use phase::Phase;
pub use reassigned::{ReassignRequest, ReassignedTask};
pub use report::SessionInfo;
pub(crate) use report::port_name;
pub use task::{SpareTasks, TaskState};
pub use tcp::{Batch, Chunk, Tcp, TcpChannel};
pub use window::Window;
