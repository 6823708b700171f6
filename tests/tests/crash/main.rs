//! What is left when the daemon or its machine dies in the middle: everything that was
//! acknowledged, and on stable storage what was flushed.
//!
//! - [`kills`]: SIGKILL at any moment under verified load, over all protocols and through an NBD
//!   export.
//! - [`kernel`]: SIGKILL under verified load of a kernel's initiators, in the rig of `cargo xtask
//!   interop`.
//! - [`power`]: the disk at each moment of a load, as a loss of power could have left it, and the
//!   daemon started on such images ([`images`]).
//! - [`errors`]: system calls that fail, one in each run ([`inject`]).
//! - [`state`]: SIGKILL before each system call that changes the state directory.
//! - [`cuts`]: the state directory at each moment of its changes, as a loss of power could have left
//!   it.
//!
//! `cargo xtask crash` runs all of them for longer.

#![allow(missing_docs, reason = "a test")]
#![allow(clippy::print_stdout, reason = "prints seeds and figures")]

mod cuts;
mod daemon;
mod errors;
mod images;
mod inject;
mod kernel;
mod kills;
mod power;
mod state;
