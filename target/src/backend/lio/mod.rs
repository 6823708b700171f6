//! Converts disks between LIO's files and protected files, while they are not served.
//!
//! LIO's `fileio` stores the blocks of a disk in an image, and their tuples in a separate file with
//! eight bytes for each block. A crash can therefore preserve a block without its tuple, so disks
//! are not served from such files, but [imported](import) and [exported](export).
//!
//! Both directions verify each block, read each file once from start to end, and need a fixed amount
//! of memory. New files have a temporary name until all blocks were verified and are durable.
//!
//! # Modules
//! - `files`: [`LioFiles`], [`Source`](files::Source) and [`NewFile`](files::NewFile).
//! - `verify`: [`Verifier`](verify::Verifier) counts the results of checks.
//! - `error`: [`ConversionError`].

mod error;
mod export;
mod files;
mod import;
mod verify;

pub use error::{ConversionError, Defects};
pub use export::export;
pub use files::LioFiles;
pub use import::import;
pub use verify::{Conversion, Progress};

#[cfg(test)]
mod tests;
