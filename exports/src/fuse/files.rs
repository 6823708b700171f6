//! Open files on a mount. As with page cache errors in Linux, each open file tracks which lost
//! writes have already been reported by `fsync(2)`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_block::LossCursor;
use slab::Slab;

/// Open files by handle.
#[derive(Debug, Default)]
pub(super) struct OpenFiles(Mutex<Slab<Arc<LossCursor>>>);

impl OpenFiles {
    fn lock(&self) -> MutexGuard<'_, Slab<Arc<LossCursor>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a file and returns the handle.
    pub(super) fn open(&self, cursor: LossCursor) -> u64 {
        self.lock().insert(Arc::new(cursor)) as u64
    }

    /// Returns losses which were already reported; `None` if the handle is unknown.
    pub(super) fn cursor(&self, handle: u64) -> Option<Arc<LossCursor>> {
        let index = usize::try_from(handle).ok()?;
        self.lock().get(index).cloned()
    }

    /// Removes a file.
    pub(super) fn close(&self, handle: u64) {
        let index = usize::try_from(handle).ok();
        drop(index.and_then(|index| self.lock().try_remove(index)));
    }
}
