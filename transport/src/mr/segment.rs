//! Memory of a region: an ordered list of segments.

use riser_memory::MemSlice;

/// Segment of a region, which is not empty.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) slice: MemSlice,
    /// Offset in the region of the first byte after this segment.
    pub(super) end: u64,
}

/// Replaces a list. Returns the size of all segments in bytes.
pub(super) fn assign(list: &mut Vec<Segment>, slices: impl Iterator<Item = MemSlice>) -> u64 {
    list.clear();
    let mut end = 0;
    for slice in slices {
        end += slice.len() as u64;
        list.push(Segment { slice, end });
    }
    end
}

/// Calls `f` for each piece of `len` bytes at offset `at` of the region, with the segment, the
/// offset in the segment, and the offset and size in the requested data. The range must be within
/// the region.
pub(super) fn pieces(
    segments: &[Segment],
    mut at: u64,
    len: usize,
    mut f: impl FnMut(&MemSlice, usize, usize, usize),
) {
    let mut done = 0;
    // Use a binary search to find the first segment.
    let mut index = segments.partition_point(|s| s.end <= at);
    while done < len {
        let segment = &segments[index];
        let begin = segment.end - segment.slice.len() as u64;
        let within = (at - begin) as usize;
        let take = (segment.slice.len() - within).min(len - done);
        f(&segment.slice, within, done, take);
        done += take;
        at += take as u64;
        index += 1;
    }
}

/// Copies `out.len()` bytes from a range.
pub(super) fn read(segments: &[Segment], at: u64, out: &mut [u8]) {
    pieces(segments, at, out.len(), |slice, within, done, take| {
        slice.read(within, &mut out[done..done + take]);
    });
}

/// Copies `data` to a range.
pub(super) fn write(segments: &[Segment], at: u64, data: &[u8]) {
    pieces(segments, at, data.len(), |slice, within, done, take| {
        slice.write(within, &data[done..done + take]);
    });
}
