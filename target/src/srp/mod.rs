//! The SRP target: channels implemented as state machines without I/O.
//!
//! A [`Channel`] is an RC connection with an initiator. Its inputs are received information units,
//! completions, results of block operations and connection events. Its outputs are [`Action`]s:
//! post this receive, post this chain, start this block operation, disconnect. These are executed
//! by the worker, or by a test or simulation.
//!
//! # Modules
//! - `login`: decides whether to accept a login, and with which limits ([`plan_login`]).
//! - `config`: [`ChannelConfig`].
//! - `channel`: [`Channel`], its states ([`ChState`]) and its inputs; `action`: its requests to the
//!   worker.
//!   `requests`: requests in flight; `timers`: deadlines and keepalive.
//! - `command`: executes SRP_CMD; `respond`: completion of its transfers.
//! - `sender`: credits, and chains of transfers and responses; `rings`: memory for messages.
//! - `mgmt`: task management and aborts.
//! - `teardown`: logout, disconnect and drain.
//! - `own`: messages initiated by the target.
//! - `ioctx`: command contexts ([`IoctxState`]).
//! - `credit`: the request limit and the send queue.
//! - `table`: descriptor tables.
//!
//! # Invariants
//! - Each received command is completed, aborted or torn down with its channel, exactly once (see
//!   [`ioctx::CommandToken`]).
//! - Credits are conserved ([`credit::ReqLim`]).
//! - Send-queue credit is reserved before a chain is posted, and returned when its last request
//!   completes.
//! - Each buffer is returned to the pool, but only when it is no longer used by a device.
//! - All memory is allocated when the channel is created ([`ChannelParams::memory`]). Data buffers
//!   are allocated from the worker's pool.
//!
//! # Not implemented
//! - Bidirectional commands, which are not supported by the logical unit.
//! - Protection information.

#![forbid(unsafe_code)]

pub mod action;
pub mod channel;
mod command;
mod config;
pub mod credit;
pub mod ioctx;
pub mod login;
mod mgmt;
mod own;
mod requests;
mod respond;
mod rings;
mod sender;
pub mod table;
mod teardown;
mod timers;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_ioctx;
#[cfg(test)]
mod tests_limits;
#[cfg(test)]
mod tests_random;
#[cfg(test)]
mod tests_stream;

pub use action::{Action, Counters, SendIu};
pub use channel::{ChState, Channel, Cx};
pub use config::ChannelConfig;
pub use ioctx::{IoctxState, RecvIdx, SendIoctx};
pub use login::{
    Admission, ChannelParams, LoginLimits, LoginOutcome, LoginRefused, LoginView, plan_login,
};
pub use timers::{JOIN_TIMEOUT, KEEPALIVE};
