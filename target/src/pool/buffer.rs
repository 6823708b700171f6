//! Buffers: the data of one command.

use std::ops::Range;

use riser_memory::{MemSlice, Memory};
use riser_scsi::access::DataAccess;
use smallvec::SmallVec;

use super::MIN_BLOCK;
use super::shares::Charge;

/// A part of a buffer, contiguous in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Byte offset within the pool's mapping.
    pub(super) offset: usize,
    /// Bytes of the block that the buffer uses.
    pub(super) len: u32,
    /// The block is `MIN_BLOCK << order` bytes long.
    pub(super) order: u8,
}

/// Data of one command: blocks of a pool, in order.
#[derive(Debug)]
pub struct Buffer {
    pub(super) memory: Memory,
    /// At most [`MAX_PIECES`]; nearly all buffers are of one or two, and are moved a lot.
    pub(super) pieces: SmallVec<[Piece; 2]>,
    pub(super) len: u32,
    /// Account that it is charged to, if any.
    pub(super) charge: Option<Charge>,
}

impl Buffer {
    /// Requested length in bytes.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether it holds no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of its blocks.
    pub(super) fn held(&self) -> usize {
        self.pieces.iter().map(|p| MIN_BLOCK << p.order).sum()
    }

    /// The ranges of the mapping that hold bytes `range` of the buffer, in order. What lies beyond
    /// the end is left out.
    #[must_use]
    pub fn ranges(&self, range: Range<u32>) -> Ranges<'_> {
        Ranges {
            pieces: self.pieces.iter(),
            at: 0,
            range,
        }
    }

    /// The bytes of a part that lie in its first `pieces` pieces. The part begins within the
    /// buffer.
    pub(crate) fn len_of_pieces(&self, part: Range<u32>, pieces: usize) -> u32 {
        // Nearly all buffers are of one piece, and no part has more pieces than its buffer.
        if self.pieces.len() <= pieces {
            return part.end.min(self.len) - part.start;
        }
        let ranges = self.ranges(part).take(pieces);
        ranges.map(|range| range.len() as u32).sum()
    }

    /// Appends all of its pieces to a list, as slices that keep the mapping alive.
    pub(crate) fn put_slices(&self, out: &mut Vec<MemSlice>) {
        for range in self.ranges(0..self.len) {
            out.push(self.memory.slice(range).expect("pieces lie in the mapping"));
        }
    }

    /// The same ranges as slices that keep the mapping alive.
    pub fn slices(&self, range: Range<u32>) -> impl Iterator<Item = MemSlice> + '_ {
        self.ranges(range)
            .map(|r| self.memory.slice(r).expect("pieces lie in the mapping"))
    }

    /// The mapping that its ranges lie in.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Copies `bytes` in, at `offset`.
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

    /// The part of `len` bytes that begins at `offset`.
    fn part(&self, offset: u32, len: usize) -> Range<u32> {
        let end = u32::try_from(len)
            .ok()
            .and_then(|len| offset.checked_add(len))
            .filter(|&end| end <= self.len);
        offset..end.expect("the bytes fit the buffer")
    }

    /// Calls `f` with the bytes of a part, piece by piece and in order, where they lie: for a digest,
    /// which is to cost no copy.
    ///
    /// # Safety
    /// No operation of the ring or of a device writes the part until this returns.
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
            // SAFETY: the caller's promise; the run belongs to this buffer alone.
            unsafe { self.memory.with_bytes(run.start, run.len(), &mut f) };
        }
    }
}

/// Ranges of a pool's mapping that hold a part of a buffer, in order: see [`Buffer::ranges`].
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
