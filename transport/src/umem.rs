//! Converts scatter lists to memory ranges.
//!
//! A fast registration has a limited number of ranges, and looking up an address is faster if there
//! are only a few of them. Adjacent segments are therefore merged, like Linux `ib_sg_to_pages` does
//! for pages. We don't need page sizes and page tables as in the kernel's `ib_umem_*` functions:
//! the software NIC looks up memory by segment ([`crate::mr`]), and for an adapter these tables are
//! created by the kernel.

use riser_memory::MemSlice;

/// Returns the memory ranges for `segments`, in order. Adjacent segments are merged and empty
/// segments are skipped.
pub fn ranges(segments: &[MemSlice]) -> impl Iterator<Item = MemSlice> {
    let mut rest = segments.iter().filter(|s| !s.is_empty()).peekable();
    std::iter::from_fn(move || {
        let mut range = rest.next()?.clone();
        while let Some(longer) = rest.peek().and_then(|next| range.join(next)) {
            range = longer;
            rest.next();
        }
        Some(range)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use riser_memory::Memory;

    use super::*;

    fn offsets(segments: &[MemSlice]) -> Vec<(usize, usize)> {
        ranges(segments).map(|r| (r.offset(), r.len())).collect()
    }

    #[test]
    fn adjacent_segments_are_merged() {
        let memory = Memory::new(4096).unwrap();
        let at = |from, to| memory.slice(from..to).unwrap();
        let list = [
            at(0, 3),
            at(3, 3),
            at(3, 8),
            at(9, 10),
            at(10, 20),
            at(0, 4),
        ];
        assert_eq!(offsets(&list), [(0, 8), (9, 11), (0, 4)]);
        assert_eq!(offsets(&[at(5, 5)]), []);
        // Reverse order, and the same segment twice.
        assert_eq!(offsets(&[at(4, 8), at(0, 4)]), [(4, 4), (0, 4)]);
        assert_eq!(offsets(&[at(4, 8), at(4, 8)]), [(4, 4), (4, 4)]);
    }

    #[test]
    fn memory_with_different_owners_is_not_merged() {
        // The mappings can be adjacent but have different lifetimes.
        let memories = [(); 8].map(|()| Memory::new(4096).unwrap());
        let list = memories.map(|memory| memory.whole());
        assert_eq!(offsets(&list), [(0, 4096); 8]);
    }

    proptest! {
        #[test]
        fn ranges_preserve_bytes(cuts in proptest::collection::vec((0usize..200, 0usize..50), 0..20)) {
            let memory = Memory::new(4096).unwrap();
            let bytes: Vec<u8> = (0..4096).map(|n| (n % 251) as u8).collect();
            memory.write(0, &bytes);
            let mut end = 0;
            let list: Vec<_> = cuts.into_iter().map(|(at, len)| {
                // Every second segment is adjacent to the previous one.
                let from = if at % 2 == 0 { end } else { at };
                end = from + len;
                memory.slice(from..end).unwrap()
            }).collect();
            let all = |list: &mut dyn Iterator<Item = MemSlice>| -> Vec<u8> {
                list.flat_map(|s| s.to_vec()).collect()
            };
            prop_assert_eq!(all(&mut ranges(&list)), all(&mut list.iter().cloned()));
            let joined: Vec<_> = ranges(&list).collect();
            prop_assert!(joined.windows(2).all(|w| w[0].join(&w[1]).is_none()));
        }
    }
}
