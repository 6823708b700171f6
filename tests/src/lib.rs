//! Tests that need more than one crate; they are in `tests/tests/`.
//!
//! - `golden_*`: bytes from specifications and captures of other implementations.
//! - `fuzz_*`: fuzz targets, which plain `cargo test` runs on their seeds and on random inputs.
//!
//! `tests/vm/` holds the cases in which a stock Linux kernel is the peer; `cargo xtask interop` runs
//! them.
//!
//! This library is what the tests of whole programs share: [`programs`], those of what the daemon tells
//! of itself ([`metered`]), those that look at pages ([`browser`]), those that read captures ([`capture`]), and those that judge what a disk answers
//! ([`history`]).

pub mod browser;
pub mod capture;
pub mod dissect;
pub mod history;
pub mod metered;
pub mod programs;
pub mod skip;
