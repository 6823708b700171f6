//! Environment of a worker: either the operating system or a simulation.

use std::sync::Arc;

use crate::host::{Host, SystemHost};

/// Environment used by a worker. Devices and the ring are passed to the constructor, and the
/// current time is passed to each call of [`Worker::step`](super::Worker::step).
pub trait Env {
    /// Fills `out` with cryptographically secure random bytes, used for CHAP challenges and session
    /// identifiers.
    fn fill_random(&mut self, out: &mut [u8]);

    /// Returns the host, used to start threads for blocking calls and to get the date.
    fn host(&self) -> Arc<dyn Host>;
}

/// Operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct System;

impl Env for System {
    /// # Panics
    /// Panics if there is no random number generator, because a predictable challenge would be
    /// worse.
    fn fill_random(&mut self, out: &mut [u8]) {
        getrandom::fill(out).expect("the system has random numbers");
    }

    fn host(&self) -> Arc<dyn Host> {
        Arc::new(SystemHost)
    }
}
