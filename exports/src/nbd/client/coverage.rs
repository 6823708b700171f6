//! Ranges received for a read.

use std::ops::Range;

/// Disjoint byte ranges, sorted; adjacent ranges are merged.
#[derive(Clone, Debug, Default)]
pub(super) struct Coverage(Vec<Range<u32>>);

impl Coverage {
    /// Adds a non-empty range. Returns false if it overlaps with a previous range.
    pub(super) fn add(&mut self, new: Range<u32>) -> bool {
        let at = self.0.partition_point(|old| old.end < new.start);
        // All ranges starting here have an end which is at or after the start of the new range.
        let joins = |old: Option<&Range<u32>>, place: u32, is_end: bool| {
            old.is_some_and(|old| place == if is_end { old.end } else { old.start })
        };
        let joins_last = joins(self.0.get(at), new.start, true);
        let next = at + usize::from(joins_last);
        if self.0.get(next).is_some_and(|old| old.start < new.end) {
            return false;
        }
        let joins_next = joins(self.0.get(next), new.end, false);
        match (joins_last, joins_next) {
            (true, true) => {
                self.0[at].end = self.0[next].end;
                self.0.remove(next);
            }
            (true, false) => self.0[at].end = new.end,
            (false, true) => self.0[at].start = new.start,
            (false, false) => self.0.insert(at, new),
        }
        true
    }

    /// Number of separate ranges.
    pub(super) fn pieces(&self) -> usize {
        self.0.len()
    }

    /// Returns whether all bytes up to `len` were received.
    pub(super) fn is_whole(&self, len: u32) -> bool {
        self.0.len() == 1 && self.0[0] == (0..len)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn coverage_matches_added_bytes(ranges in proptest::collection::vec((0u32..60, 1u32..9), 1..40)) {
            let mut coverage = Coverage::default();
            let mut bytes = [false; 70];
            for (start, len) in ranges {
                let range = start..start + len;
                let span = start as usize..(start + len) as usize;
                let is_new = !bytes[span.clone()].iter().any(|b| *b);
                prop_assert_eq!(coverage.add(range), is_new);
                if is_new {
                    bytes[span].fill(true);
                }
                let pieces = bytes.chunk_by(|a, b| a == b).filter(|run| run[0]).count();
                prop_assert_eq!(coverage.pieces(), pieces);
                for len in 1..70 {
                    let whole = bytes[..len].iter().all(|b| *b) && !bytes[len..].iter().any(|b| *b);
                    prop_assert_eq!(coverage.is_whole(len as u32), whole);
                }
            }
        }
    }
}
