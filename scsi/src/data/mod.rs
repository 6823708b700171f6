//! Layouts of parameter data and CDBs, each at one place for both ends: the unit writes what the
//! initiator reads, and the other way round.
//!
//! A structure of fixed layout is a module of [fields](field). What has a variable length is a
//! function that writes it and one that parses it. What was received is the only authority:
//! a length in the data never reaches behind its end.

pub mod capacity;
pub mod cdb;
pub mod designator;
pub mod field;
pub mod inquiry;
pub mod lba_status;
pub mod luns;
pub mod mode;
pub(crate) mod persistent_reserve;
pub mod unmap;
pub mod vpd;
