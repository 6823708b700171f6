//! The parts of `riserd`, the target daemon.
//!
//! # Modules
//! - [`backend`]: where the bytes of a logical unit live: files, devices, memory.
//! - [`config`]: the YAML configuration, checked before anything is opened.

pub mod backend;
pub mod config;
