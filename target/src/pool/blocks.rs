//! Blocks in a part of the mapping: a buddy allocator.

use riser_memory::Memory;
use smallvec::SmallVec;

use super::buffer::{Buffer, Piece};
use super::{MAX_BLOCK, MAX_ORDER, MAX_PIECES, MIN_BLOCK};

/// Used as a link if there is no other block in a free list.
const NIL: u32 = u32::MAX;

/// State of a page with [`MIN_BLOCK`] bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Page {
    /// Not the start of a block.
    Inner,
    /// A free block of this order starts here.
    Free { order: u8, prev: u32, next: u32 },
    /// A block in use of this order starts here.
    Used { order: u8 },
}

/// A part of the mapping, divided into blocks.
#[derive(Debug)]
pub(super) struct Blocks {
    /// Offset in the mapping.
    pub(super) base: usize,
    pub(super) len: usize,
    /// Order of the smallest block that can be allocated.
    least: usize,
    pages: Vec<Page>,
    heads: [u32; MAX_ORDER + 1],
    pub(super) free: usize,
}

impl Blocks {
    /// Creates an allocator for blocks of any order.
    pub(super) fn new(base: usize, len: usize) -> Self {
        Self::with_least(base, len, 0)
    }

    /// Creates an allocator for blocks of the highest order only, which cannot be fragmented by
    /// small buffers.
    pub(super) fn undivided(base: usize, len: usize) -> Self {
        Self::with_least(base, len, MAX_ORDER)
    }

    fn with_least(base: usize, len: usize, least: usize) -> Self {
        let mut blocks = Self {
            base,
            len,
            least,
            pages: vec![Page::Inner; len / MIN_BLOCK],
            heads: [NIL; MAX_ORDER + 1],
            free: len,
        };
        // Use reverse order, because a free list returns the last block first. This way, memory is
        // used from the start.
        for block in (0..len / MAX_BLOCK).rev() {
            blocks.push((block << MAX_ORDER) as u32, MAX_ORDER);
        }
        blocks
    }

    pub(super) fn is_whole(&self) -> bool {
        self.free == self.len
    }

    pub(super) fn allocate(&mut self, memory: &Memory, len: u32) -> Option<Buffer> {
        let mut buffer = Buffer {
            memory: memory.clone(),
            pieces: SmallVec::new(),
            len,
            charge: None,
        };
        let mut left = len as usize;
        while left > 0 {
            let want = left.min(MAX_BLOCK).next_multiple_of(MIN_BLOCK);
            let taken = if buffer.pieces.len() == MAX_PIECES {
                None
            } else {
                self.take_block(order_of(want).max(self.least))
            };
            // Either allocate all of the memory or none of it. If two commands could wait with a
            // part of their memory, they might wait for each other.
            let Some((page, order)) = taken else {
                for piece in buffer.pieces.drain(..) {
                    self.release(piece.offset);
                }
                return None;
            };
            let used = left.min(MIN_BLOCK << order);
            buffer.pieces.push(Piece {
                offset: self.base + page as usize * MIN_BLOCK,
                len: used as u32,
                order: order as u8,
            });
            left -= used;
        }
        Some(buffer)
    }

    pub(super) fn release(&mut self, offset: usize) {
        self.put_block(((offset - self.base) / MIN_BLOCK) as u32);
    }

    /// Allocates a block of `order`, or the largest available block if all of them are smaller.
    fn take_block(&mut self, order: usize) -> Option<(u32, usize)> {
        // Prefer the smallest block that is large enough, to keep large blocks intact. Only use a
        // smaller block if the memory is fragmented. The buffer then has more pieces.
        let from = match self.heads[order] {
            NIL => (order + 1..=MAX_ORDER)
                .chain((0..order).rev())
                .find(|&o| self.heads[o] != NIL)?,
            _ => order,
        };
        let page = self.heads[from];
        self.unlink(page);
        let order = order.min(from);
        for o in (order..from).rev() {
            self.push(page + (1 << o), o);
        }
        self.pages[page as usize] = Page::Used { order: order as u8 };
        self.free -= MIN_BLOCK << order;
        Some((page, order))
    }

    fn put_block(&mut self, mut page: u32) {
        let Page::Used { order } = self.pages[page as usize] else {
            panic!("returned a block that is not in use");
        };
        let mut order = usize::from(order);
        self.free += MIN_BLOCK << order;
        self.pages[page as usize] = Page::Inner;
        while order < MAX_ORDER {
            // Each block is aligned to its size, so the two halves of a larger block only differ in
            // a single bit of their index.
            let buddy = page ^ (1 << order);
            match self.pages.get(buddy as usize) {
                Some(Page::Free { order: o, .. }) if usize::from(*o) == order => {
                    self.unlink(buddy);
                    page = page.min(buddy);
                    order += 1;
                }
                _ => break,
            }
        }
        self.push(page, order);
    }

    fn push(&mut self, page: u32, order: usize) {
        let next = self.heads[order];
        if next != NIL {
            let Page::Free { prev, .. } = &mut self.pages[next as usize] else {
                unreachable!("free lists hold free blocks");
            };
            *prev = page;
        }
        self.heads[order] = page;
        self.pages[page as usize] = Page::Free {
            order: order as u8,
            prev: NIL,
            next,
        };
    }

    fn unlink(&mut self, page: u32) {
        let Page::Free { order, prev, next } = self.pages[page as usize] else {
            unreachable!("free lists hold free blocks");
        };
        if let Some(Page::Free { prev: p, .. }) = self.pages.get_mut(next as usize) {
            *p = prev;
        }
        match self.pages.get_mut(prev as usize) {
            Some(Page::Free { next: n, .. }) => *n = next,
            _ => self.heads[usize::from(order)] = next,
        }
        self.pages[page as usize] = Page::Inner;
    }
}

/// Returns the order of the smallest block for `len` bytes, up to [`MAX_ORDER`].
fn order_of(len: usize) -> usize {
    let blocks = len.div_ceil(MIN_BLOCK).next_power_of_two();
    (blocks.trailing_zeros() as usize).min(MAX_ORDER)
}
