//! Sources for the operations of a worker.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::BenchError;
use super::outcome::OpKind;
use super::plan::{Op, Plan};
use super::verify::{Verifier, next_known};

/// Number of random offsets to try before a write has to wait for its blocks.
const TRIES: usize = 8;

/// Source of operations.
pub(super) enum Source {
    /// Operations planned for the job.
    Plan(Plan),
    /// Reads of all known blocks. The position is shared by all workers.
    Scan {
        /// Offset of the next read.
        next: Arc<AtomicU64>,
        /// Length of each read in bytes.
        piece: u64,
    },
}

/// Position when reading all known blocks.
pub(super) struct ScanPosition {
    next: Arc<AtomicU64>,
    region: Range<u64>,
}

impl ScanPosition {
    /// Returns the progress from 0 to 1.
    pub(super) fn done(&self) -> f64 {
        let Range { start, end } = self.region;
        let at = self.next.load(Ordering::Relaxed).min(end);
        (at - start) as f64 / (end - start).max(1) as f64
    }
}

impl Source {
    /// Returns the position if this reads all known blocks.
    pub(super) fn scan_place(&self, region: &Range<u64>) -> Option<ScanPosition> {
        match self {
            Self::Plan(_) => None,
            Self::Scan { next, .. } => Some(ScanPosition {
                next: next.clone(),
                region: region.clone(),
            }),
        }
    }

    /// Returns the next operation. This has the given `kind` if it was already planned together
    /// with its arrival.
    pub(super) fn next(&mut self, verifier: &Verifier, kind: Option<OpKind>) -> Option<Op> {
        match self {
            Self::Plan(plan) => Some(plan.next(kind)),
            Self::Scan { next, piece } => {
                let range = next_known(verifier.ledger()?, next, *piece)?;
                Some(Op {
                    kind: OpKind::Read,
                    range,
                })
            }
        }
    }

    /// Records the start of a write or trim in the ledger. If another operation is in flight for
    /// the same blocks, tries other random offsets if `may_move` is set. Returns false if all of
    /// them are busy.
    ///
    /// # Errors
    /// Fails if the state file can't be written.
    pub(super) fn record_start(
        &mut self,
        verifier: &Verifier,
        op: &mut Op,
        may_move: bool,
    ) -> Result<bool, BenchError> {
        let Some(ledger) = verifier.ledger() else {
            return Ok(true);
        };
        if !matches!(op.kind, OpKind::Write | OpKind::Trim) {
            return Ok(true);
        }
        let mut plan = match self {
            Self::Plan(plan) if may_move => Some(plan),
            _ => None,
        };
        for _ in 0..TRIES {
            if ledger.start_change(&op.range, op.kind == OpKind::Trim)? {
                return Ok(true);
            }
            match plan.as_mut().and_then(|plan| plan.another_place(op)) {
                Some(range) => op.range = range,
                None => break,
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scan_reports_progress() {
        let next = Arc::new(AtomicU64::new(4096));
        let scan = Source::Scan {
            next: next.clone(),
            piece: 1024,
        };
        let place = scan.scan_place(&(4096..8192)).unwrap();
        assert_eq!(place.done(), 0.0);
        next.store(5120, Ordering::Relaxed);
        assert_eq!(place.done(), 0.25);
        // After the end, each worker still increments the offset once.
        next.store(10_240, Ordering::Relaxed);
        assert_eq!(place.done(), 1.0);
    }
}
