//! Buffers for the data of a command.

use std::ops::Range;

use riser_memory::{MemSlice, Memory};
use riser_scsi::access::DataAccess;
use smallvec::SmallVec;

use super::MIN_BLOCK;
use super::shares::Charge;

/// A contiguous part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Offset in the mapping of the pool, in bytes.
    pub(super) offset: usize,
    /// Number of bytes used by the buffer.
    pub(super) len: u32,
    /// The size of the block is `MIN_BLOCK << order` bytes.
    pub(super) order: u8,
}

/// Buffer for the data of a command: an ordered list of blocks in a pool.
#[derive(Debug)]
pub struct Buffer {
    pub(super) memory: Memory,
    /// At most [`MAX_PIECES`]. Almost all buffers have one or two pieces, and they are moved
    /// frequently.
    pub(super) pieces: SmallVec<[Piece; 2]>,
    pub(super) len: u32,
    /// The account that it is charged to, if any.
    pub(super) charge: Option<Charge>,
}

impl Buffer {
    /// Returns the requested length in bytes.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Returns whether the length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the total size of its blocks in bytes.
    pub(super) fn held(&self) -> usize {
        self.pieces.iter().map(|p| MIN_BLOCK << p.order).sum()
    }

    /// Returns the ranges of the mapping for a range of bytes in this buffer, in order. Anything
    /// after the end is ignored.
    #[must_use]
    pub fn ranges(&self, range: Range<u32>) -> Ranges<'_> {
        Ranges {
            pieces: self.pieces.iter(),
            at: 0,
            range,
        }
    }

    /// Returns the number of bytes of a part which are in its first `pieces` pieces. The part must
    /// start in the buffer.
    pub(crate) fn len_of_pieces(&self, part: Range<u32>, pieces: usize) -> u32 {
        // Almost all buffers have a single piece, and a part can't have more pieces than its
        // buffer.
        if self.pieces.len() <= pieces {
            return part.end.min(self.len) - part.start;
        }
        let ranges = self.ranges(part).take(pieces);
        ranges.map(|range| range.len() as u32).sum()
    }

    /// Appends all pieces to a list, as slices that keep the mapping alive.
    pub(crate) fn put_slices(&self, out: &mut Vec<MemSlice>) {
        for range in self.ranges(0..self.len) {
            out.push(self.memory.slice(range).expect("pieces lie in the mapping"));
        }
    }

    /// Returns the same ranges as slices that keep the mapping alive.
    pub fn slices(&self, range: Range<u32>) -> impl Iterator<Item = MemSlice> + '_ {
        self.ranges(range)
            .map(|r| self.memory.slice(r).expect("pieces lie in the mapping"))
    }

    /// Returns the mapping that contains the ranges.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Copies `bytes` to the given offset.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&self, offset: u32, bytes: &[u8]) {
        let mut done = 0;
        for range in self.ranges(self.part(offset, bytes.len())) {
            let len = range.len();
            self.memory.write(range.start, &bytes[done..done + len]);
            done += len;
        }
    }

    /// Returns the part with `len` bytes starting at `offset`.
    fn part(&self, offset: u32, len: usize) -> Range<u32> {
        let end = u32::try_from(len)
            .ok()
            .and_then(|len| offset.checked_add(len))
            .filter(|&end| end <= self.len);
        offset..end.expect("the bytes fit the buffer")
    }

    /// Calls `f` with the bytes of a part in order, piece by piece. They are accessed in place, to
    /// compute a digest without copying.
    ///
    /// # Safety
    /// The part must not be written by any operation of the ring or of a device until this returns.
    ///
    /// # Panics
    /// If the part is not within the buffer.
    #[allow(
        unsafe_code,
        reason = "looks at a buffer in place, between operations of devices"
    )]
    pub unsafe fn for_each_piece(&self, part: Range<u32>, mut f: impl FnMut(&[u8])) {
        assert!(part.end <= self.len, "part {part:?} beyond {}", self.len);
        for run in self.ranges(part) {
            // SAFETY: this is ensured by the caller, and the run belongs only to this buffer.
            unsafe { self.memory.with_bytes(run.start, run.len(), &mut f) };
        }
    }
}

/// Ranges of the mapping for a part of a buffer, in order: see [`Buffer::ranges`].
#[derive(Clone, Debug)]
pub struct Ranges<'a> {
    pieces: std::slice::Iter<'a, Piece>,
    /// Offset of the next piece in the buffer.
    at: u32,
    range: Range<u32>,
}

impl Iterator for Ranges<'_> {
    type Item = Range<usize>;

    #[inline]
    fn next(&mut self) -> Option<Range<usize>> {
        while self.at < self.range.end {
            let piece = self.pieces.next()?;
            let at = self.at;
            self.at += piece.len;
            let from = self.range.start.max(at);
            let to = self.range.end.min(self.at);
            if from < to {
                let base = piece.offset;
                return Some(base + (from - at) as usize..base + (to - at) as usize);
            }
        }
        None
    }
}

impl DataAccess for Buffer {
    fn len(&self) -> u32 {
        self.len
    }

    fn read(&self, offset: u32, into: &mut [u8]) {
        let mut done = 0;
        for range in self.ranges(self.part(offset, into.len())) {
            let len = range.len();
            self.memory.read(range.start, &mut into[done..done + len]);
            done += len;
        }
    }

    fn write(&mut self, offset: u32, from: &[u8]) {
        Buffer::write(self, offset, from);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            debug_assert!(
                self.pieces.is_empty(),
                "a buffer was dropped instead of released"
            );
        }
    }
}
