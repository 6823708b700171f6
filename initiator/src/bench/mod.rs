//! The benchmark: many operations in flight on a block device, timed one by one.
//!
//! - [`BenchConfig`]: what is done. - [`run`]: does it. - [`Report`]: what came of it.
//! - [`wire`]: what the machine or network carries.
//!
//! Every operation in flight is a task of [`crate::block::task`]: the thread that completes an
//! operation (the transport's) takes its time and starts the next one, so no switch between threads
//! is in the figures. A latency runs from the call that starts an operation to the poll that finds
//! it done.
//!
//! Not here: rate limits, think time, several devices at once.

mod config;
pub mod outcome;
pub mod output;
mod report;
pub mod wire;
mod worker;

pub use config::{BenchConfig, BenchError, Mix, Pattern, Until};
pub use report::{Direction, Latency, Report, Verified};
pub use worker::{Progress, run};
