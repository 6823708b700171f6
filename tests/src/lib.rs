//! Tests that need more than one crate; they are in `tests/tests/`.
//!
//! - `golden_*`: bytes from specifications and captures of other implementations.
//! - `fuzz_*`: fuzz targets, which plain `cargo test` runs on their seeds and on random inputs.
//!
//! `tests/vm/` holds the cases in which a stock Linux kernel is the peer; `cargo xtask interop`
//! runs them.
//!
//! This library is what several of them share:
//!
//! | module | what it is for |
//! | --- | --- |
//! | [`iscsi_rig`] | the initiator's library before a target in the same process, over iSCSI and iSER |
//! | [`load`], [`history`] | verified reads and writes, and a checker of what a disk answers |
//! | [`contest`] | initiators of all protocols that write the same blocks |
//! | [`capture`], [`dissect`] | captures, as bytes and as Wireshark's dissectors see them |
//! | [`seeds`], [`mutator`] | the corpora of the fuzz targets, and messages that are almost right |
//! | [`browser`] | pages in a browser |
//!
//! What the tests of other crates need as well is in `riser-testkit` and `riser-test-peers`.

#![allow(missing_docs, reason = "for tests, which panic when something fails")]

pub mod browser;
pub mod capture;
pub mod contest;
pub mod dissect;
pub mod history;
pub mod iscsi_rig;
pub mod load;
pub mod mutator;
pub mod seeds;
