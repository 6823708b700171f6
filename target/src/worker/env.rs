//! The surroundings of a worker: the machine that it runs on, or a simulation of one.

use std::sync::Arc;

use crate::host::{Host, SystemHost};

/// The source of what a worker does not compute itself, but for devices and the ring, which it is
/// made with, and for the time, which comes with each round
/// ([`Worker::step`](super::Worker::step)).
pub trait Env {
    /// Fills `out` with random bytes that no peer can foresee: challenges of CHAP, and names of
    /// sessions.
    fn fill_random(&mut self, out: &mut [u8]);

    /// Threads for calls that may block, and dates.
    fn host(&self) -> Arc<dyn Host>;
}

/// The machine that we run on.
#[derive(Clone, Copy, Debug, Default)]
pub struct System;

impl Env for System {
    /// # Panics
    /// If the system has no random numbers: a guessable challenge would be worse.
    fn fill_random(&mut self, out: &mut [u8]) {
        getrandom::fill(out).expect("the system has random numbers");
    }

    fn host(&self) -> Arc<dyn Host> {
        Arc::new(SystemHost)
    }
}
