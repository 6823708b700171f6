//! Tests the state after the daemon or machine has crashed: all acknowledged data must be present,
//! and all flushed data must be on stable storage.
//!
//! - [`kills`]: SIGKILL at a random time while there is a verified load, using all protocols and an
//!   NBD export.
//! - [`kernel`]: SIGKILL while there is a verified load on kernel initiators, in the `cargo xtask
//!   interop` rig.
//! - [`power`]: the possible states of a disk after a power failure at each point of a load, and a
//!   daemon started with these images ([`images`]), also with protection information
//!   ([`frames`]).
//! - [`errors`]: failed system calls, one in each run ([`inject`]).
//! - [`state`]: SIGKILL before each system call that changes the state directory.
//! - [`cuts`]: the possible states of the state directory after a power failure at each point of an
//!   update.
//!
//! Use `cargo xtask crash` for longer runs.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints seeds and results")]

mod cuts;
mod daemon;
mod errors;
mod frames;
mod images;
mod inject;
mod kernel;
mod kills;
mod power;
mod state;
