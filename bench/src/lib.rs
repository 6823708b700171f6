//! Benchmark with many operations in flight on a block device, which measures each operation.
//!
//! - [`Job`]: the operations to run, using fio's terminology.
//! - [`fio`]: fio's job files.
//! - [`check`]: checks whether jobs can run.
//! - [`run`]: runs jobs concurrently.
//! - [`outcome`]: results of a run.
//! - [`output`]: output of results for users and programs.
//! - [`wire`]: measures the limits of the machine or network.
//!
//! ```text
//!   Job ─ setup ─▶ shares ─ prepare ─▶ workers (one for each clone) ─▶ the device's thread
//!                                       │  plan: kinds, offsets, sizes, planned times
//!                                       │  verify: content, ledger of what was written
//!   Outcome ◀─ collector ◀─ figures ────┘  stats: once in an interval
//! ```
//!
//! A worker is a [`riser_block::Workload`] that runs on the thread where operations complete, so
//! the results don't include context switches, and no locks are required. We measure the time
//! between the calls that start and complete an operation. If there is a rate, operations are
//! started at planned times (open loop). If an operation is delayed by previous ones, we measure
//! from its planned time.
//!
//! Think time, recorded workloads and zoned devices are not supported.

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
