//! The parts of `riserd`, the target daemon.
//!
//! # Modules
//! - [`backend`]: where the bytes of a logical unit live: files, devices, memory.

pub mod backend;
