//! Ranges of a region, used to access memory with a checked key.

use std::io;
use std::ops::Range;
use std::sync::OnceLock;

use riser_memory::{MemSlice, Memory, PAGE};

use super::integrity::Integrity;
use super::segment::{self, Segment};
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

/// Checked range of a region. All offsets are relative to the start of the range. If there are no
/// segments, this is either empty or belongs to a null region or an integrity region.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    pub(super) segments: &'a [Segment],
    /// Set for an integrity region, which has no segments.
    pub(super) integrity: Option<&'a Integrity>,
    /// Offset of the range in the region.
    pub(super) start: u64,
    pub(super) len: usize,
}

impl Span<'_> {
    pub(super) const EMPTY: Self = Span {
        segments: &[],
        integrity: None,
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
    /// in the segment, and the offset and size in the requested data. `WRITE` is set if the memory
    /// is written by `f`.
    fn pieces<const WRITE: bool>(
        &self,
        offset: usize,
        len: usize,
        mut f: impl FnMut(&MemSlice, usize, usize, usize),
    ) {
        // The range was checked when the span was created, so this would be a bug.
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "range {offset}+{len} beyond {}",
            self.len
        );
        if len == 0 {
            return;
        }
        let at = self.start + offset as u64;
        match self.segments {
            // Most regions have a single segment.
            [only] => f(&only.slice, at as usize, 0, len),
            [] => {
                let Some(integrity) = self.integrity else {
                    return;
                };
                if !WRITE {
                    integrity.gather(at, len);
                }
                f(integrity.wire(), at as usize, 0, len);
                if WRITE {
                    integrity.scatter(at, len);
                }
            }
            segments => segment::pieces(segments, at, len, f),
        }
    }

    /// Copies `data` to the range. Panics if the range is exceeded.
    pub fn write(&self, offset: usize, data: &[u8]) {
        self.pieces::<true>(offset, data.len(), |slice, within, done, take| {
            slice.write(within, &data[done..done + take]);
        });
    }

    /// Returns true for a null region, which has a size but no memory.
    fn is_null(&self) -> bool {
        self.segments.is_empty() && self.len > 0 && self.integrity.is_none()
    }

    /// Copies `out.len()` bytes from the range. Panics if the range is exceeded.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        if self.is_null() {
            out.fill(0);
        }
        self.pieces::<false>(offset, out.len(), |slice, within, done, take| {
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
        self.pieces::<false>(offset, len, |slice, within, _, take| {
            out.push(slice.slice(within..within + take).expect("range is valid"));
        });
    }

    /// Returns a part of this range. Panics if the range is exceeded.
    #[must_use]
    pub(super) fn part(&self, part: Range<usize>) -> Self {
        assert!(part.start <= part.end && part.end <= self.len, "within it");
        Self {
            segments: self.segments,
            integrity: self.integrity,
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
        if let Some(integrity) = self.integrity {
            return integrity.populate(self.start, self.len, write);
        }
        let mut result = Ok(());
        self.pieces::<false>(0, self.len, |slice, within, _, take| {
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
