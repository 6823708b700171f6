//! Reassembly of fragmented frames.
//!
//! A sender transmits fragments in order, so at most one frame is in reassembly per source and type
//! of destination (multicast uses a separate socket and may overtake unicast). An out-of-order
//! fragment discards the frame: the network has lost or reordered fragments, as it may lose entire
//! frames.

use rustc_hash::FxHashMap;

use super::wire::Lid;
use super::wire::packet::Fragment;

/// Maximum number of frames in reassembly: two per source.
const MAX_PARTIAL: usize = 512;

/// Frames in reassembly at a port. Memory is bounded by the number of known sources.
#[derive(Clone, Debug, Default)]
pub(super) struct Reassembly {
    partial: FxHashMap<(Lid, bool), Partial>,
    /// Most recently completed frame.
    complete: Vec<u8>,
}

#[derive(Clone, Debug, Default)]
struct Partial {
    ident: u32,
    frame_len: u16,
    data: Vec<u8>,
}

/// A fragment and the preceding fragments of its frame were dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OutOfOrder;

impl Reassembly {
    /// Adds a fragment; returns the frame if it is complete.
    pub(super) fn add_fragment(
        &mut self,
        source: Lid,
        is_multicast: bool,
        fragment: Fragment,
        data: &[u8],
    ) -> Result<Option<&[u8]>, OutOfOrder> {
        let key = (source, is_multicast);
        if self.partial.len() >= MAX_PARTIAL && !self.partial.contains_key(&key) {
            return Err(OutOfOrder);
        }
        let partial = self.partial.entry(key).or_default();
        if fragment.offset == 0 {
            partial.ident = fragment.ident;
            partial.frame_len = fragment.frame_len;
            partial.data.clear();
        }
        let is_next = partial.ident == fragment.ident
            && partial.frame_len == fragment.frame_len
            && partial.data.len() == usize::from(fragment.offset);
        let end = usize::from(fragment.offset) + data.len();
        let len = usize::from(fragment.frame_len);
        if !is_next || data.is_empty() || end > len || len > super::MAX_FRAME {
            // No fragment can continue a frame of length 0.
            partial.frame_len = 0;
            partial.data.clear();
            return Err(OutOfOrder);
        }
        partial.data.extend_from_slice(data);
        if end < len {
            return Ok(None);
        }
        std::mem::swap(&mut partial.data, &mut self.complete);
        partial.frame_len = 0;
        partial.data.clear();
        Ok(Some(&self.complete))
    }

    /// Discards frames of sources that are not `known`.
    pub(super) fn retain(&mut self, known: impl Fn(Lid) -> bool) {
        self.partial.retain(|(source, _), _| known(*source));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fragment(ident: u32, offset: u16, frame_len: u16) -> Fragment {
        Fragment {
            ident,
            offset,
            frame_len,
        }
    }

    #[test]
    fn ordered_fragments_form_frame() {
        let mut frames = Reassembly::default();
        let mut take = |source, group, f, data: &[u8]| {
            let taken = frames.add_fragment(Lid(source), group, f, data);
            taken.map(|frame| frame.map(<[u8]>::to_vec))
        };
        assert_eq!(take(1, false, fragment(1, 0, 5), b"abc"), Ok(None));
        // Another source and multicast are independent.
        assert_eq!(take(2, false, fragment(1, 0, 4), b"xy"), Ok(None));
        assert_eq!(take(1, true, fragment(2, 0, 4), b"mn"), Ok(None));
        assert_eq!(
            take(1, false, fragment(1, 3, 5), b"de"),
            Ok(Some(b"abcde".to_vec()))
        );
        assert_eq!(
            take(1, true, fragment(2, 2, 4), b"op"),
            Ok(Some(b"mnop".to_vec()))
        );
        assert_eq!(
            take(2, false, fragment(1, 2, 4), b"zz"),
            Ok(Some(b"xyzz".to_vec()))
        );
        // A duplicate fragment does not complete the frame.
        assert_eq!(take(1, false, fragment(1, 3, 5), b"de"), Err(OutOfOrder));
    }

    #[test]
    fn non_consecutive_fragment_discards_frame() {
        let refused = [
            (fragment(7, 3, 9), &b"def"[..]),
            (fragment(6, 4, 9), b"def"),
            (fragment(6, 3, 8), b"def"),
            (fragment(6, 3, 9), b"defghij"),
            (fragment(6, 3, 9), b""),
        ];
        for (wrong, data) in refused {
            let mut frames = Reassembly::default();
            let mut take = |f, data: &[u8]| {
                frames
                    .add_fragment(Lid(1), false, f, data)
                    .map(|f| f.is_some())
            };
            assert_eq!(take(fragment(6, 0, 9), b"abc"), Ok(false));
            assert_eq!(take(wrong, data), Err(OutOfOrder), "{wrong:?}");
            assert_eq!(take(fragment(6, 3, 9), b"defghi"), Err(OutOfOrder));
            assert_eq!(take(fragment(8, 0, 2), b"ok"), Ok(true));
        }
    }

    #[test]
    fn memory_is_bounded() {
        let mut frames = Reassembly::default();
        assert_eq!(
            frames.add_fragment(Lid(1), false, fragment(1, 0, u16::MAX), b"a"),
            Err(OutOfOrder)
        );
        for source in 0..2000 {
            let _ = frames.add_fragment(Lid(source), false, fragment(1, 0, 9000), b"a");
        }
        assert_eq!(frames.partial.len(), MAX_PARTIAL);
        frames.retain(|lid| lid == Lid(3));
        assert_eq!(frames.partial.len(), 1);
    }
}
