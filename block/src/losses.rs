//! Tracks lost writes reported to each client of a device.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of losses that have been reported to a client; see also `errseq_t` in Linux.
#[derive(Debug)]
pub struct LossCursor(AtomicU64);

impl LossCursor {
    /// Creates a cursor for a client that already knows about this number of losses.
    pub(super) fn new(known: u64) -> Self {
        Self(AtomicU64::new(known))
    }

    /// Returns whether there are losses that have not been reported to this client yet.
    pub(super) fn is_behind(&self, losses: u64) -> bool {
        self.0.load(Ordering::Acquire) < losses
    }

    /// Updates the number of reported losses.
    pub(super) fn advance(&self, losses: u64) {
        self.0.fetch_max(losses, Ordering::AcqRel);
    }
}

/// Counts the writes of all clients, to check whether a flush covers all acknowledged writes.
#[derive(Debug, Default)]
pub(super) struct Writes {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Writes {
    /// Starts a write. It is complete when the returned value is dropped.
    pub(super) fn start_write(&self) -> WriteInFlight<'_> {
        self.begun.fetch_add(1, Ordering::AcqRel);
        WriteInFlight(self)
    }

    /// Number of writes started.
    pub(super) fn started_writes(&self) -> u64 {
        self.begun.load(Ordering::Acquire)
    }

    /// Number of writes completed.
    pub(super) fn completed_writes(&self) -> u64 {
        self.ended.load(Ordering::Acquire)
    }
}

/// Write in flight.
#[derive(Debug)]
pub(super) struct WriteInFlight<'a>(&'a Writes);

impl Drop for WriteInFlight<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::AcqRel);
    }
}
