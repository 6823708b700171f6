//! The benchmark: many operations in flight on a block device, timed one by one.
//!
//! - [`Job`]: what is done, with fio's words.
//! - [`fio`]: fio's job files.
//! - [`check`]: whether that is possible.
//! - [`run`]: does it, for jobs side by side.
//! - [`outcome`]: what came of it.
//! - [`output`]: that for people and programs.
//! - [`wire`]: what the machine or network carries.
//!
//! ```text
//!   Job ─ setup ─▶ shares ─ prepare ─▶ workers (one for each clone) ─▶ the device's thread
//!                                       │  plan: kinds, offsets, sizes, planned times
//!                                       │  verify: content, ledger of what was written
//!   Outcome ◀─ collector ◀─ figures ────┘  stats: once in an interval
//! ```
//!
//! A worker is a [`crate::block::Workload`]: it runs where the operations complete, so no switch
//! between threads is in the figures, and an operation takes no lock. Its time runs from the call
//! that starts it to the one that completes it. With a rate the times of operations are planned
//! (open loop): an operation that is late, because those before it were slow, is counted from its
//! planned time.
//!
//! Not here: think time, recorded workloads, devices with zones.

mod checks;
mod content;
mod error;
pub mod fio;
mod holes;
pub mod job;
mod ledger;
pub mod outcome;
pub mod output;
mod plan;
mod prepare;
mod reports;
mod run;
mod scan;
mod setup;
mod source;
mod state;
mod stats;
mod task;
#[cfg(test)]
mod tests;
mod usage;
mod verify;
pub mod wire;
mod worker;

pub use checks::check;
pub use error::{BenchError, Difference, Mismatch};
pub use job::Job;
pub use run::{Progress, run};
pub use setup::buffer_bytes;
pub use task::{RunOptions, Task};
