//! Faults of a medium detected by inspections.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use super::cause::Cause;
use super::health::Failing;

/// Results of the last inspection: at most one fault each for the path and for the size.
#[derive(Debug, Default)]
pub(super) struct MediumFaults(Mutex<Vec<Failing>>);

impl MediumFaults {
    /// Returns the faults, starting with the most serious one.
    pub(super) fn faults(&self) -> Vec<Failing> {
        self.lock().clone()
    }

    /// Replaces the faults. A persistent fault keeps its date. A size fault persists until
    /// [`MediumFaults::accept_size`], because a write past the end extends the file again, but the
    /// data in between is still lost.
    pub(super) fn set(&self, faults: Vec<(Cause, String)>, now: SystemTime) {
        let mut known = self.lock();
        let date = |cause| {
            let before = known.iter().find(|fault| fault.cause == cause);
            before.map_or(now, |fault| fault.since)
        };
        let dated = faults.into_iter().map(|(cause, why)| Failing {
            since: date(cause),
            why,
            cause,
        });
        let mut dated: Vec<_> = dated.collect();
        let is_truncated = |fault: &Failing| fault.cause == Cause::Truncated;
        if !dated.iter().any(is_truncated) {
            dated.extend(known.iter().find(|fault| is_truncated(fault)).cloned());
        }
        *known = dated;
    }

    /// Clears the size fault, after a rescan by an administrator.
    pub(super) fn accept_size(&self) {
        self.lock().retain(|fault| fault.cause != Cause::Truncated);
    }

    /// The list is replaced as a whole, so ignore poisoning.
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Failing>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Describes a file or device that is too small.
pub(super) fn too_small(path: &Path, found: u64, wanted: u64) -> String {
    let path = path.display();
    format!(
        "{path}: has {found} bytes instead of {wanted}; data beyond its end are lost. Restore it, \
         or use `riserd rescan` to serve its current size"
    )
}
