//! Tests that require more than one crate. They are in `tests/tests/`.
//!
//! - `golden_*`: use data from specifications and captures of other implementations.
//! - `fuzz_*`: fuzz targets. When run with `cargo test`, they use their seeds and random inputs.
//!
//! `tests/vm/` contains the cases that use a stock Linux kernel as the peer, which are run by
//! `cargo xtask interop`.
//!
//! This library contains code that is shared by several tests:
//!
//! | module | purpose |
//! | --- | --- |
//! | [`rig`] | the initiator library with a target in the same process, using any protocol |
//! | [`load`], [`history`] | verified reads and writes, and a checker for the data returned by a disk |
//! | [`contest`] | initiators of all protocols that write to the same blocks |
//! | [`capture`], [`dissect`] | captures, both as bytes and as parsed by Wireshark's dissectors |
//! | [`seeds`], [`mutator`] | fuzz target corpora, and almost valid messages |
//! | [`browser`] | pages in a browser |
//!
//! See `riser-testkit` and `riser-test-peers` for code that is also used in the tests of other
//! crates.

#![allow(missing_docs, reason = "for tests, which panic when something fails")]

pub mod browser;
pub mod capture;
pub mod contest;
pub mod dissect;
pub mod history;
pub mod load;
pub mod mutator;
pub mod rig;
pub mod seeds;
