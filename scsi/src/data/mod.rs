//! Layouts of parameter data and CDBs. These are used on both sides: data written by the target is
//! read by the initiator, and the other way around.
//!
//! A structure with a fixed layout is implemented as a module with [fields](field). If the length
//! is variable, there is a function to write it and a function to parse it. When parsing, a length
//! in the data must never be used to read past the end of the received data.

pub mod capacity;
pub mod cdb;
pub mod designator;
pub mod field;
pub(crate) mod format_unit;
pub mod inquiry;
pub mod lba_status;
pub mod luns;
pub mod mode;
pub(crate) mod persistent_reserve;
pub mod unmap;
pub mod vpd;
