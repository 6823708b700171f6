//! Ranges of a region, used to access memory with a checked key.

use std::io;
use std::ops::Range;
use std::sync::OnceLock;

use riser_memory::{MemSlice, Memory, PAGE};

use crate::verbs::VerbsError;

/// Zeros returned when reading from a null region. These are never written.
static ZEROS: OnceLock<MemSlice> = OnceLock::new();

/// Allocates the zeros for null regions, which must be called before creating a null region.
pub(super) fn prepare_zeros() -> Result<(), VerbsError> {
    if ZEROS.get().is_none() {
        let zeros = Memory::new(PAGE).map_err(|_| VerbsError::InsufficientResources("memory"))?;
        // If this was already set by a different thread, we can use that value.
        let _ = ZEROS.set(zeros.whole());
    }
    Ok(())
}

/// Segment of a region.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) slice: MemSlice,
    /// Offset in the region of the first byte after this segment.
    pub(super) end: u64,
}

/// Checked range of a region. All offsets are relative to the start of the range. If there are no
/// segments, this is either empty or belongs to a null region.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    pub(super) segments: &'a [Segment],
    /// Offset of the range in the region.
    pub(super) start: u64,
    pub(super) len: usize,
}

impl Span<'_> {
    pub(super) const EMPTY: Self = Span {
        segments: &[],
        start: 0,
        len: 0,
    };

    /// Returns the size of the range in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the range is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Calls `f` for each piece of `len` bytes starting at `offset`, with the segment, the offset
    /// in the segment, and the range in the requested data.
    fn pieces(&self, offset: usize, len: usize, mut f: impl FnMut(&MemSlice, usize, usize, usize)) {
        // The range was checked when the span was created, so this would be a bug.
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "range {offset}+{len} beyond {}",
            self.len
        );
        let mut at = self.start + offset as u64;
        // Most regions have a single segment.
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
        // Use a binary search to find the first segment.
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

    /// Copies `data` to the range. Panics if the range is exceeded.
    pub fn write(&self, offset: usize, data: &[u8]) {
        self.pieces(offset, data.len(), |slice, within, done, take| {
            slice.write(within, &data[done..done + take]);
        });
    }

    /// Returns true for a null region, which has a size but no memory.
    fn is_null(&self) -> bool {
        self.segments.is_empty() && self.len > 0
    }

    /// Copies `out.len()` bytes from the range. Panics if the range is exceeded.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        if self.is_null() {
            out.fill(0);
        }
        self.pieces(offset, out.len(), |slice, within, done, take| {
            slice.read(within, &mut out[done..done + take]);
        });
    }

    /// Appends a copy of `len` bytes from the range to `out`. Panics if the range is exceeded.
    pub fn append_to(&self, offset: usize, len: usize, out: &mut Vec<u8>) {
        let at = out.len();
        out.resize(at + len, 0);
        self.read(offset, &mut out[at..]);
    }

    /// Appends the memory of `len` bytes from the range to `out`. Panics if the range is exceeded.
    pub fn push_slices(&self, offset: usize, len: usize, out: &mut Vec<MemSlice>) {
        if self.is_null() {
            push_zeros(len, out);
        }
        self.pieces(offset, len, |slice, within, _, take| {
            out.push(slice.slice(within..within + take).expect("range is valid"));
        });
    }

    /// Returns a part of this range. Panics if the range is exceeded.
    #[must_use]
    pub(super) fn part(&self, part: Range<usize>) -> Self {
        assert!(part.start <= part.end && part.end <= self.len, "within it");
        Self {
            segments: self.segments,
            start: self.start + part.start as u64,
            len: part.len(),
        }
    }

    /// Ensures that the range is mapped and its pages are allocated, and that it can be written if
    /// `write` is set.
    ///
    /// # Errors
    /// Returns the error of [`MemSlice::populate`].
    pub fn populate(&self, write: bool) -> io::Result<()> {
        let mut result = Ok(());
        self.pieces(0, self.len, |slice, within, _, take| {
            let part = slice.slice(within..within + take).expect("range is valid");
            if result.is_ok() {
                result = part.populate(write);
            }
        });
        result
    }
}

fn push_zeros(mut len: usize, out: &mut Vec<MemSlice>) {
    let zeros = ZEROS.get().expect("zeros are allocated before the region");
    while len > 0 {
        let take = len.min(zeros.len());
        out.push(zeros.slice(0..take).expect("range is valid"));
        len -= take;
    }
}
