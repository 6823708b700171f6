//! Configuration of a new channel.

use std::time::Duration;

use riser_scsi::iscsi::Itt;

use super::task::Task;
use super::window::WINDOWS;
use crate::fabric::{Contexts, TaskIdx};

/// Number of contexts in addition to the command window, used for immediate commands and functions.
pub(super) const IMMEDIATE_TASKS: u16 = 16;

/// Configuration for a new channel.
#[derive(Clone, Copy, Debug)]
pub struct ChannelConfig {
    /// Worker index.
    pub worker: u16,
    /// Channel number, unique for this worker.
    pub serial: u64,
    /// Command window size.
    pub commands: u16,
    /// Timeout for data requested from the initiator.
    pub data_out_timeout: Duration,
}

impl ChannelConfig {
    /// Returns the number of contexts for commands and functions.
    #[must_use]
    pub fn contexts(&self) -> u16 {
        WINDOWS * self.commands + IMMEDIATE_TASKS
    }

    /// Returns the memory used by contexts in bytes. They are allocated at the start of
    /// full-feature phase in a normal session.
    #[must_use]
    pub fn memory(&self) -> usize {
        let contexts = usize::from(self.contexts());
        // The tag index is at least half full.
        let index = 2 * size_of::<(Itt, TaskIdx)>();
        Contexts::<Task>::memory(contexts) + contexts * index
    }
}
