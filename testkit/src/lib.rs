//! Fixtures shared by the tests of several crates.
//!
//! - [`eventually`] waits for a condition; tests should use this instead of writing their own loop.
//! - [`skip`](mod@skip) reports that a test can't run on this machine, so that it's counted as
//!   skipped.
//! - [`programs`] starts `riserd` and `riser`, and the tools used to check them. [`daemon`] runs a
//!   `riserd` in a temporary directory, and [`metered`] runs a `riserd` that provides metrics over
//!   TCP.
//! - [`hung_mount`] mounts a file on a file system that can stop responding.
//! - [`alloc`] tracks allocations and the memory in use; [`allocations`] finds the code that
//!   allocates on the data path.
//! - [`captures`] checks packet captures.
//! - [`fuzz`] uses the fuzzer's input to select the values of a property test, instead of choosing
//!   them at random.
//!
//! This crate must not depend on any of our other crates, so that it can be used in all tests,
//! including unit tests, without building a crate twice. See `riser-test-peers` for peers that use
//! our protocols.

#![allow(
    missing_docs,
    clippy::print_stderr,
    reason = "for tests, which say what they skip"
)]

pub mod alloc;
pub mod allocations;
pub mod captures;
pub mod daemon;
pub mod fuzz;
pub mod hung_mount;
pub mod metered;
pub mod programs;
pub mod skip;
mod wait;

pub use wait::{eventually, eventually_ok, eventually_some};
