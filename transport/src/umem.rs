//! Memory of a region as a device with a page table sees it: which page size fits a scatter list,
//! and which pages those are.
//!
//! The software NIC needs none of it, since it finds memory by segments ([`crate::mr`]). A device
//! whose fast registrations have no gaps ([`DeviceAttr::sg_gaps`](crate::verbs::DeviceAttr)) and
//! programs that prepare lists for one do. The functions are those of Linux (`ib_umem_*`,
//! `rdma_umem_for_each_dma_block`, `ib_sg_to_pages`), on values.
//!
//! No user yet.

use riser_memory::MemSlice;

/// A piece of memory by its address for devices. Pieces of no bytes are passed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Address of the first byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
}

impl From<&MemSlice> for Piece {
    fn from(slice: &MemSlice) -> Self {
        Self {
            addr: slice.addr(),
            len: slice.len() as u64,
        }
    }
}

/// A scatter list that a region covers from an address on. Neither the addresses of the region nor
/// those of a piece wrap.
#[derive(Clone, Copy, Debug)]
pub struct Umem<'a> {
    pieces: &'a [Piece],
    iova: u64,
}

impl<'a> Umem<'a> {
    /// The list of `pieces` for a region whose addresses count from `iova`.
    #[must_use]
    pub fn new(pieces: &'a [Piece], iova: u64) -> Self {
        Self { pieces, iova }
    }

    /// Sum of the lengths, in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len).sum()
    }

    /// Whether the list has no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Distance of the first byte from the beginning of its page.
    ///
    /// # Panics
    /// If `page_size` is no power of two.
    #[must_use]
    pub fn offset(&self, page_size: u64) -> u64 {
        assert!(page_size.is_power_of_two(), "a page size");
        self.iova & (page_size - 1)
    }

    /// Number of pages of a size that the region takes in a page table.
    ///
    /// # Panics
    /// If `page_size` is no power of two.
    #[must_use]
    pub fn num_blocks(&self, page_size: u64) -> u64 {
        match self.len() {
            0 => 0,
            len => (self.offset(page_size) + len).div_ceil(page_size),
        }
    }

    /// The page size of a device that suits the list best: the largest by which each piece can be
    /// mapped, but none larger than one page needs. Bit *n* of `sizes` stands for pages of 2^n
    /// bytes. `None` if none fits, or the list is empty.
    #[must_use]
    pub fn find_best_page_size(&self, sizes: u64) -> Option<u64> {
        if self.is_empty() {
            return None;
        }
        // A page maps addresses to memory by their upper bits, so in the lower ones they are the
        // same; and where memory does not go on with the piece before, a page must begin.
        let mut differing = 0;
        let mut at = self.iova;
        let mut behind = None;
        for piece in self.pieces.iter().filter(|piece| piece.len > 0) {
            differing |= piece.addr ^ at;
            if behind.is_some_and(|end| end != piece.addr) {
                differing |= at;
            }
            at += piece.len;
            behind = Some(piece.addr + piece.len);
        }
        let largest = differing.trailing_zeros();
        let fitting = (0..u64::BITS)
            .take_while(|&bit| bit <= largest)
            .map(|bit| 1u64 << bit)
            .filter(|size| sizes & size != 0);
        let mut best = None;
        for size in fitting {
            best = Some(size);
            if self.num_blocks(size) == 1 {
                break;
            }
        }
        best
    }

    /// Addresses of the pages, in the order of the region: what a page table holds.
    ///
    /// # Panics
    /// If `page_size` is no power of two, or does not fit the list ([`Umem::find_best_page_size`]).
    pub fn blocks(&self, page_size: u64) -> impl Iterator<Item = u64> + 'a {
        let mut next = self.iova - self.offset(page_size);
        let mut at = self.iova;
        self.pieces
            .iter()
            .filter(|piece| piece.len > 0)
            .flat_map(move |piece| {
                let shift = piece.addr.wrapping_sub(at);
                assert_eq!(shift & (page_size - 1), 0, "a page size that fits");
                at += piece.len;
                // The page that the piece before ends in has been given already.
                let first = next;
                let count = at.saturating_sub(first).div_ceil(page_size);
                next += count * page_size;
                (0..count).map(move |n| (first + n * page_size).wrapping_add(shift))
            })
    }
}

/// The longest beginning of a scatter list that a region without gaps can cover, as pages: the
/// first piece may begin and the last one end anywhere; all others begin where the one before
/// ended, or both at pages (`ib_map_mr_sg`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageList {
    /// Addresses of the pages.
    pub pages: Vec<u64>,
    /// Address of the first byte: its offset in the first page is part of the registration.
    pub first: u64,
    /// Bytes that the pages cover from there on.
    pub len: u64,
    /// Pieces that are covered as a whole.
    pub pieces: usize,
}

impl PageList {
    /// The beginning of `pieces`, less `skip` bytes of the first one, in at most `max` pages.
    ///
    /// # Panics
    /// If `page_size` is no power of two, or `skip` is longer than the first piece.
    #[must_use]
    pub fn new(pieces: &[Piece], skip: u64, page_size: u64, max: usize) -> Self {
        assert!(page_size.is_power_of_two(), "a page size");
        let mask = page_size - 1;
        let mut list = Self::default();
        let mut end = None;
        for (index, piece) in pieces.iter().enumerate() {
            let skip = if index == 0 { skip } else { 0 };
            let addr = piece.addr + skip;
            let len = piece
                .len
                .checked_sub(skip)
                .expect("a part of the first piece");
            if len == 0 {
                list.pieces = index + 1;
                continue;
            }
            let goes_on = match end {
                None => {
                    list.first = addr;
                    false
                }
                Some(end) if end == addr => end & mask != 0,
                // Memory between two pieces would be covered as well.
                Some(end) if end & mask != 0 || addr & mask != 0 => break,
                Some(_) => false,
            };
            // The page that the piece before ended in is in the list.
            let mut page = (addr & !mask) + if goes_on { page_size } else { 0 };
            while page < addr + len && list.pages.len() < max {
                list.pages.push(page);
                page += page_size;
            }
            let covered = len.min(page.saturating_sub(addr));
            list.len += covered;
            if covered < len {
                break;
            }
            list.pieces = index + 1;
            end = Some(addr + len);
        }
        list
    }
}

/// Copies bytes of a list out, from `offset` on; returns how many there were, `out.len()` at most
/// (`ib_umem_copy_from`).
pub fn copy_from(segments: &[MemSlice], mut offset: usize, out: &mut [u8]) -> usize {
    let mut done = 0;
    for slice in segments {
        let Some(left) = slice.len().checked_sub(offset) else {
            offset -= slice.len();
            continue;
        };
        let take = left.min(out.len() - done);
        slice.read(offset, &mut out[done..done + take]);
        done += take;
        offset = 0;
    }
    done
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use riser_memory::Memory;

    use super::*;

    const ALL: u64 = u64::MAX;

    fn piece(addr: u64, len: u64) -> Piece {
        Piece { addr, len }
    }

    #[test]
    fn the_page_size_is_the_largest_that_fits_and_none_too_large() {
        let best =
            |pieces: &[Piece], iova, sizes| Umem::new(pieces, iova).find_best_page_size(sizes);
        let whole = [piece(0x20_0000, 0x20_0000)];
        assert_eq!(best(&whole, 0x20_0000, ALL), Some(0x20_0000));
        assert_eq!(best(&whole, 0x10_0000, ALL), Some(0x10_0000));
        assert_eq!(best(&whole, 0x20_0000, 0x1000 | 0x40_0000), Some(0x40_0000));
        assert_eq!(best(&whole, 0x20_0001, 0x1000), None);
        assert_eq!(best(&[piece(0x1234, 1)], 0x1234, !0xfff), Some(0x1000));
        // The second piece begins in the middle of 8 KiB.
        let two = [piece(0x2000, 0x1000), piece(0x9000, 0x1000)];
        assert_eq!(best(&two, 0x2000, !0xfff), Some(0x1000));
        let joined = [piece(0x2000, 0x1800), piece(0x3800, 0x800)];
        assert_eq!(best(&joined, 0x2000, !0xfff), Some(0x2000));
        assert_eq!(best(&[], 0, ALL), None);
    }

    #[test]
    fn a_list_of_pages_ends_at_the_first_gap() {
        let pieces = [
            piece(0x1f00, 0x100),
            piece(0x8000, 0x1800),
            piece(0x9800, 0x900),
            piece(0x1_0000, 0x10),
        ];
        let list = PageList::new(&pieces, 0x10, 0x1000, 9);
        let expected = PageList {
            pages: vec![0x1000, 0x8000, 0x9000, 0xa000],
            first: 0x1f10,
            len: 0xf0 + 0x1800 + 0x900,
            pieces: 3,
        };
        assert_eq!(list, expected);
        let short = PageList::new(&pieces, 0, 0x1000, 2);
        assert_eq!((short.pages.len(), short.len, short.pieces), (2, 0x1100, 1));
        assert_eq!(PageList::new(&[], 0, 0x1000, 2), PageList::default());
    }

    #[test]
    fn bytes_are_copied_from_all_pieces() {
        let memory = Memory::new(4096).unwrap();
        memory.write(0, b"abcdefgh");
        let list = [(0..3), (3..3), (5..8)].map(|range| memory.slice(range).unwrap());
        let mut out = [0; 4];
        assert_eq!(copy_from(&list, 1, &mut out), 4);
        assert_eq!(&out, b"bcfg");
        assert_eq!(copy_from(&list, 4, &mut out), 2);
        assert_eq!(&out[..2], b"gh");
        assert_eq!(copy_from(&list, 7, &mut out), 0);
    }

    proptest! {
        /// A page table of the size that was found leads to the bytes of the list.
        #[test]
        fn pages_lead_to_the_bytes(
            cuts in proptest::collection::vec((0u64..64, 0u64..20, any::<bool>()), 1..6),
            first in 0u64..0x4000,
            page in 0u64..64,
        ) {
            let mut pieces = Vec::new();
            let mut end = 0;
            for (n, (at, len, joins)) in cuts.into_iter().enumerate() {
                let addr = match (n, joins) {
                    (0, _) => at * 0x1000 + first,
                    (_, true) => end,
                    (_, false) => at * 0x1000,
                };
                let len = len * 0x400;
                pieces.push(piece(addr, len));
                end = addr + len;
            }
            let iova = page * 0x1000 + first;
            let umem = Umem::new(&pieces, iova);
            let Some(size) = umem.find_best_page_size(ALL) else {
                prop_assert!(umem.is_empty());
                return Ok(());
            };
            let blocks: Vec<u64> = umem.blocks(size).collect();
            prop_assert_eq!(blocks.len() as u64, umem.num_blocks(size));
            let mut at = iova;
            for piece in &pieces {
                for n in (0..piece.len).step_by(0x100) {
                    let index = (at + n - (iova - umem.offset(size))) / size;
                    let found = blocks[index as usize] + ((at + n) & (size - 1));
                    prop_assert_eq!(found, piece.addr + n);
                }
                at += piece.len;
            }
        }
    }
}
