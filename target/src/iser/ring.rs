//! Transmit descriptors: slots in the send ring.
//!
//! Most messages fit in a small slot, because they only have headers and optional sense data. There
//! are a few large slots for login and discovery text.

use riser_memory::MemSlice;
use riser_scsi::iser::HEADERS_LEN;

/// Size of a small slot in bytes.
pub(super) const SMALL: usize = 256;

/// Maximum data segment length to send, in bytes. Used for login and discovery.
pub(super) const LARGE_SEGMENT: u32 = 8192;

/// Size of a large slot in bytes.
pub(super) const LARGE: usize = (HEADERS_LEN + LARGE_SEGMENT as usize).next_multiple_of(64);

/// Number of large slots: login and text requests have a single response in flight each.
pub(super) const LARGE_SLOTS: usize = 2;

/// Index of a transmit descriptor. Large slots follow the small slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TxIdx(u16);

/// All slots, with lists of free slots.
#[derive(Debug)]
pub(super) struct TxRing {
    ring: MemSlice,
    small: u16,
    free_small: Vec<TxIdx>,
    free_large: Vec<TxIdx>,
}

impl TxRing {
    /// Creates a ring in `ring` with `small` small slots and all large slots.
    ///
    /// # Panics
    /// Panics if the ring is too short.
    pub(super) fn new(ring: MemSlice, small: u16) -> Self {
        assert!(ring.len() >= usize::from(small) * SMALL + LARGE_SLOTS * LARGE);
        let large = small..small + LARGE_SLOTS as u16;
        Self {
            ring,
            small,
            free_small: (0..small).rev().map(TxIdx).collect(),
            free_large: large.map(TxIdx).collect(),
        }
    }

    /// Allocates a slot for a message of `len` bytes. Returns `None` if no slot is available.
    pub(super) fn take_slot(&mut self, len: usize) -> Option<TxIdx> {
        assert!(len <= LARGE, "no message is so long");
        if len <= SMALL {
            self.free_small.pop()
        } else {
            self.free_large.pop()
        }
    }

    /// Releases a slot.
    pub(super) fn release_slot(&mut self, idx: TxIdx) {
        if idx.0 < self.small {
            self.free_small.push(idx);
        } else {
            self.free_large.push(idx);
        }
    }

    /// Returns the first `len` bytes of a slot.
    pub(super) fn slot(&self, idx: TxIdx, len: usize) -> MemSlice {
        let small = usize::from(self.small);
        let at = match usize::from(idx.0).checked_sub(small) {
            None => usize::from(idx.0) * SMALL,
            Some(large) => small * SMALL + large * LARGE,
        };
        self.ring
            .slice(at..at + len)
            .expect("slots lie in the ring")
    }
}
