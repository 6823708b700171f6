//! INQUIRY data for users and programs: standard data and vital product data pages, decoded into
//! named fields.
//!
//! - [`standard`]: standard INQUIRY data (SPC-4 6.6.2).
//! - [`page`]: a VPD page (SPC-4 7.8, SBC-3 6.6). Unknown pages, and truncated parts of known
//!   pages, are returned as bytes.
//! - [`Fields`]: the result; it serializes as a map and prints as lines.
//!
//! The received length is decisive: fields beyond it are treated as missing.

mod fields;
mod pages;

pub use fields::{Fields, Value};
pub use pages::{InquiryError, page, page_name, standard, supported_pages};
