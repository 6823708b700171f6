//! Scatter lists as the ranges of memory that they cover.
//!
//! A fast registration has room for a number of ranges, and memory is found sooner in few of them.
//! So segments that follow each other in memory are registered as one, as Linux's `ib_sg_to_pages`
//! does with pages. Page sizes and tables of pages, which the kernel's `ib_umem_*` work out, are of
//! no use here: the software NIC finds memory by segments ([`crate::mr`]), and an adapter's tables
//! are the kernel's.

use riser_memory::MemSlice;

/// The ranges that segments cover, in their order: each as long as the segments follow each other
/// in memory. Segments of no bytes are passed over.
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
    fn segments_that_follow_each_other_are_one_range() {
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
        // Backwards, and the same twice.
        assert_eq!(offsets(&[at(4, 8), at(0, 4)]), [(4, 4), (0, 4)]);
        assert_eq!(offsets(&[at(4, 8), at(4, 8)]), [(4, 4), (4, 4)]);
    }

    #[test]
    fn memory_of_two_owners_is_never_one_range() {
        // Their mappings may be side by side, but end at different times.
        let memories = [(); 8].map(|()| Memory::new(4096).unwrap());
        let list = memories.map(|memory| memory.whole());
        assert_eq!(offsets(&list), [(0, 4096); 8]);
    }

    proptest! {
        #[test]
        fn the_bytes_stay_as_they_are(cuts in proptest::collection::vec((0usize..200, 0usize..50), 0..20)) {
            let memory = Memory::new(4096).unwrap();
            let bytes: Vec<u8> = (0..4096).map(|n| (n % 251) as u8).collect();
            memory.write(0, &bytes);
            let mut end = 0;
            let list: Vec<_> = cuts.into_iter().map(|(at, len)| {
                // Every other one follows the one before.
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
