//! Flushes required when the write cache is disabled.
//!
//! If an initiator has disabled the cache (WCE = 0), it doesn't send SYNCHRONIZE CACHE, so GOOD
//! status for the MODE SELECT must mean that the cache is empty. After such a change, we need to
//! flush the entire medium. This is required until a flush started after the change has been
//! successful.

use riser_sync::atomic::{AtomicU64, Ordering};

/// The number of times the write cache has been disabled, at some point in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CacheEpoch(u64);

/// State of the required flushes.
#[derive(Debug, Default)]
pub(crate) struct CacheFlushes {
    /// Number of times the cache has been disabled.
    disabled: AtomicU64,
    /// Value of `disabled` at the start of the last successful flush of the entire medium.
    flushed: AtomicU64,
}

impl CacheFlushes {
    /// Called when the cache is disabled, after which a flush is required.
    pub(crate) fn disable(&self) {
        self.disabled.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns the current epoch if a flush is required. It should be passed to `complete` after
    /// the flush.
    pub(crate) fn owed(&self) -> Option<CacheEpoch> {
        let disabled = self.disabled.load(Ordering::Acquire);
        (self.flushed.load(Ordering::Acquire) < disabled).then_some(CacheEpoch(disabled))
    }

    /// Called when a flush of the entire medium that was started in this epoch has been successful.
    pub(crate) fn complete(&self, epoch: CacheEpoch) {
        self.flushed.fetch_max(epoch.0, Ordering::AcqRel);
    }
}
