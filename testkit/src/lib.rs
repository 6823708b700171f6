//! Fixtures that the tests of several crates share.
//!
//! - [`eventually`] waits for what happens by itself; no test has a wait loop of its own.
//! - [`skip`](mod@skip) reports that a test cannot run on this machine, so that it is counted.
//! - [`programs`] starts `riserd` and `riser` as processes, and tools that judge them; [`daemon`]
//!   runs a `riserd` in a folder of its own, and [`metered`] one that reports its metrics over TCP.
//! - [`alloc`] counts allocations, and what is allocated and not freed; [`allocations`] names the
//!   places where the data path allocates.
//! - [`fuzz`] lets a fuzzer's bytes choose what a strategy of a property test would choose by chance.
//!
//! No crate of ours is beneath this one, so every crate's tests can use it, unit tests included,
//! without building that crate twice. Peers that speak our protocols are in `riser-test-peers`.

#![allow(
    missing_docs,
    clippy::print_stderr,
    reason = "for tests, which say what they skip"
)]

pub mod alloc;
pub mod allocations;
pub mod daemon;
pub mod fuzz;
pub mod metered;
pub mod programs;
pub mod skip;
mod wait;

pub use wait::{eventually, eventually_ok, eventually_some};
