//! The SRP target: channels as machines that do no I/O.
//!
//! A [`Channel`] is one RC connection with one initiator. It takes information units, completions,
//! results of block operations and connection events, and gives [`Action`]s: post this receive,
//! post this chain, start this block operation, disconnect. The worker carries the actions out; a
//! test or a simulator does so as well.
//!
//! # Modules
//! - `login`: whether a login is accepted, and with what limits ([`plan_login`]).
//! - `channel`: [`Channel`], its states ([`ChState`]) and its inputs; `action`: what it wants done.
//! - `command`: the way of an SRP_CMD through its states; `respond`: its transfers and its answer.
//! - `mgmt`: task management and aborts.
//! - `teardown`: logouts, disconnecting, draining.
//! - `own`: messages of our own accord.
//! - `ioctx`: the contexts of commands ([`IoctxState`]) and the rings.
//! - `credit`: the request limit and the send queue.
//! - `table`: descriptor tables.
//!
//! # Invariants
//! - A command that was taken in is answered, aborted or torn down with its channel, exactly once
//!   (see [`ioctx::CommandToken`]).
//! - Credits are conserved ([`credit::ReqLim`]).
//! - Send-queue credit is taken before a chain is posted, and comes back with its last completion.
//! - Every buffer goes back to the pool, and no earlier than the devices have released it.
//! - All memory is allocated when the channel is created ([`ChannelParams::memory`]); data buffers
//!   come from the worker's pool.
//!
//! # Not implemented
//! Bidirectional commands run as far as the logical unit has such commands, which it has not.
//! Protection information.

#![forbid(unsafe_code)]

pub mod action;
pub mod channel;
mod command;
pub mod credit;
pub mod ioctx;
pub mod login;
mod mgmt;
mod own;
mod respond;
pub mod table;
mod teardown;

#[cfg(test)]
mod fixture;
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
pub use channel::{ChState, Channel, ChannelConfig, Cx, JOIN_TIMEOUT, KEEPALIVE};
pub use ioctx::{IoctxState, RecvIdx, SendIoctx};
pub use login::{
    Admission, ChannelParams, LoginLimits, LoginOutcome, LoginRefused, LoginView, plan_login,
};
