//! Output of benchmark results as files and tables, based on [`Outcome`]s.
//!
//! - [`fio`]: JSON in fio's format, including a parser.
//! - [`csv`]: time series.
//! - [`hdr`]: HdrHistogram interval logs.
//! - [`html`]: HTML pages.
//! - [`text`]: terminal output.
//! - [`compare`]: compares two JSON files and reports which differences are significant.
//! - [`machine`]: describes the machine used for a run.
//!
//! This module doesn't measure anything or open files. Writers use [`std::io::Write`], and their
//! output only depends on the outcomes. As names and addresses come from job files and command
//! lines, each writer has to escape them for its format.
//!
//! [`Outcome`]: super::outcome::Outcome

pub mod compare;
pub mod csv;
pub mod fio;
pub mod hdr;
pub mod html;
pub mod machine;
mod show;
mod summary;
pub mod text;

#[cfg(test)]
mod sample;

pub use machine::Machine;
