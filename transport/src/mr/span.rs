//! Ranges of regions: the way from a checked key to memory.

use std::io;
use std::ops::Range;
use std::sync::OnceLock;

use riser_memory::{MemSlice, Memory, PAGE};

use crate::verbs::VerbsError;

/// Zeros that null regions are read from. Nothing writes them.
static ZEROS: OnceLock<MemSlice> = OnceLock::new();

/// Makes the zeros of null regions, before there is one.
pub(super) fn prepare_zeros() -> Result<(), VerbsError> {
    if ZEROS.get().is_none() {
        let zeros = Memory::new(PAGE).map_err(|_| VerbsError::InsufficientResources("memory"))?;
        // Another thread may have been first, and then its zeros are as good.
        let _ = ZEROS.set(zeros.whole());
    }
    Ok(())
}

/// A piece of a region.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) slice: MemSlice,
    /// Offset within the region of the first byte after this segment.
    pub(super) end: u64,
}

/// A checked range of a region. Offsets in its methods count from the range's start. One without
/// segments is of a null region, unless it is empty.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    pub(super) segments: &'a [Segment],
    /// Offset of the range within the region.
    pub(super) start: u64,
    pub(super) len: usize,
}

impl Span<'_> {
    pub(super) const EMPTY: Self = Span {
        segments: &[],
        start: 0,
        len: 0,
    };

    /// Length of all pieces in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the range holds no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Calls `f` with each piece of `len` bytes from `offset` on: the segment, the piece's offset
    /// in it, and the piece's range within the requested bytes.
    fn pieces(&self, offset: usize, len: usize, mut f: impl FnMut(&MemSlice, usize, usize, usize)) {
        // The range was checked before there was a span, so this is a mistake of ours.
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "range {offset}+{len} beyond {}",
            self.len
        );
        let mut at = self.start + offset as u64;
        // Nearly all regions have one segment.
        if let [only] = self.segments {
            if len > 0 {
                f(&only.slice, at as usize, 0, len);
            }
            return;
        }
        if self.segments.is_empty() {
            return;
        }
        let mut done = 0;
        // In others the first one is searched for, not walked to.
        let mut index = self.segments.partition_point(|s| s.end <= at);
        while done < len {
            let segment = &self.segments[index];
            let begin = segment.end - segment.slice.len() as u64;
            let within = (at - begin) as usize;
            let take = (segment.slice.len() - within).min(len - done);
            f(&segment.slice, within, done, take);
            done += take;
            at += take as u64;
            index += 1;
        }
    }

    /// Copies `data` into the range. Panics beyond its end.
    pub fn write(&self, offset: usize, data: &[u8]) {
        self.pieces(offset, data.len(), |slice, within, done, take| {
            slice.write(within, &data[done..done + take]);
        });
    }

    /// Whether it is of a null region: without memory, but not without bytes.
    fn is_null(&self) -> bool {
        self.segments.is_empty() && self.len > 0
    }

    /// Copies `out.len()` bytes out of the range. Panics beyond its end.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        if self.is_null() {
            out.fill(0);
        }
        self.pieces(offset, out.len(), |slice, within, done, take| {
            slice.read(within, &mut out[done..done + take]);
        });
    }

    /// Appends a copy of `len` bytes of the range to `out`. Panics beyond the range's end.
    pub fn append_to(&self, offset: usize, len: usize, out: &mut Vec<u8>) {
        let at = out.len();
        out.resize(at + len, 0);
        self.read(offset, &mut out[at..]);
    }

    /// Appends the memory of `len` bytes of the range to `out`. Panics beyond the range's end.
    pub fn push_slices(&self, offset: usize, len: usize, out: &mut Vec<MemSlice>) {
        if self.is_null() {
            push_zeros(len, out);
        }
        self.pieces(offset, len, |slice, within, _, take| {
            out.push(slice.slice(within..within + take).expect("a part of it"));
        });
    }

    /// A part of it. Panics beyond its end.
    #[must_use]
    pub(super) fn part(&self, part: Range<usize>) -> Self {
        assert!(part.start <= part.end && part.end <= self.len, "within it");
        Self {
            segments: self.segments,
            start: self.start + part.start as u64,
            len: part.len(),
        }
    }

    /// Sees to it that the range is mapped and has its pages, to be written as well with `write`.
    ///
    /// # Errors
    /// That of [`MemSlice::populate`] where it is not.
    pub fn populate(&self, write: bool) -> io::Result<()> {
        let mut result = Ok(());
        self.pieces(0, self.len, |slice, within, _, take| {
            let part = slice.slice(within..within + take).expect("a part of it");
            if result.is_ok() {
                result = part.populate(write);
            }
        });
        result
    }
}

fn push_zeros(mut len: usize, out: &mut Vec<MemSlice>) {
    let zeros = ZEROS.get().expect("they were made before the region");
    while len > 0 {
        let take = len.min(zeros.len());
        out.push(zeros.slice(0..take).expect("a part of it"));
        len -= take;
    }
}
