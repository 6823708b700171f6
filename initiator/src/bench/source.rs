//! Where the operations of a worker come from.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::BenchError;
use super::outcome::OpKind;
use super::plan::{Op, Plan};
use super::verify::{Verifier, next_known};

/// Random places that are tried before a write waits for its blocks.
const TRIES: usize = 8;

/// Source of operations.
pub(super) enum Source {
    /// Those of the job.
    Plan(Plan),
    /// Reads of every block that is known, in pieces of some bytes. Workers share the place.
    Scan {
        /// Offset of the next piece.
        next: Arc<AtomicU64>,
        /// Length of a piece, in bytes.
        piece: u64,
    },
}

/// Place of the reads of every block that is known.
pub(super) struct ScanPlace {
    next: Arc<AtomicU64>,
    region: Range<u64>,
}

impl ScanPlace {
    /// Part of the region that was read, from 0 to 1.
    pub(super) fn done(&self) -> f64 {
        let Range { start, end } = self.region;
        let at = self.next.load(Ordering::Relaxed).min(end);
        (at - start) as f64 / (end - start).max(1) as f64
    }
}

impl Source {
    /// Its place in the region, if it reads what is known.
    pub(super) fn scan_place(&self, region: &Range<u64>) -> Option<ScanPlace> {
        match self {
            Self::Plan(_) => None,
            Self::Scan { next, .. } => Some(ScanPlace {
                next: next.clone(),
                region: region.clone(),
            }),
        }
    }

    /// The next operation; of `kind` where its time was planned before.
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

    /// Enters a write or trim into the ledger; where its blocks are in flight, at another random
    /// place if it `may_move`. Returns false if they stay so.
    ///
    /// # Errors
    /// The state file cannot be written.
    pub(super) fn enter(
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
            if ledger.begin(&op.range, op.kind == OpKind::Trim)? {
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
    fn a_scan_shows_how_far_it_is() {
        let next = Arc::new(AtomicU64::new(4096));
        let scan = Source::Scan {
            next: next.clone(),
            piece: 1024,
        };
        let place = scan.scan_place(&(4096..8192)).unwrap();
        assert_eq!(place.done(), 0.0);
        next.store(5120, Ordering::Relaxed);
        assert_eq!(place.done(), 0.25);
        // Every worker takes a piece beyond the end.
        next.store(10_240, Ordering::Relaxed);
        assert_eq!(place.done(), 1.0);
    }
}
