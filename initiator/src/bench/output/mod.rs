//! Output of the benchmark: files and tables made of [`Outcome`]s.
//!
//! - [`fio`]: JSON in fio's layout, and a reader of it.
//! - [`csv`]: time series.
//! - [`hdr`]: interval logs of HdrHistogram.
//! - [`html`]: a page for a browser.
//! - [`text`]: for a terminal.
//! - [`compare`]: differences between two JSON files, and which of them are beyond noise.
//! - [`machine`]: the machine that a run was on.
//!
//! Nothing here measures or opens a file. Writers take a [`std::io::Write`] and produce the same
//! bytes for the same outcomes. Names and addresses come from job files and command lines, so each
//! writer escapes them for its format.
//!
//! [`Outcome`]: super::outcome::Outcome

pub mod compare;
pub mod csv;
mod figures;
pub mod fio;
pub mod hdr;
pub mod html;
pub mod machine;
mod show;
pub mod text;

#[cfg(test)]
mod sample;

pub use machine::Machine;
