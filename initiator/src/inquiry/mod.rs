//! INQUIRY data for people and programs: standard data and vital product data pages, decoded into
//! named fields.
//!
//! - [`standard`]: standard INQUIRY data (SPC-4 6.6.2).
//! - [`page`]: a VPD page (SPC-4 7.8, SBC-3 6.6). Pages that are not known, and the parts of known
//!   ones that are cut short, come out as bytes.
//! - [`Fields`]: what comes out; it serializes as a map, and prints as lines.
//!
//! The received length is the only authority: what is beyond it is not there.

mod fields;
mod pages;

pub use fields::{Fields, Value};
pub use pages::{InquiryError, page, page_name, standard, supported_pages};
