//! Transmit descriptors: slots of the send ring.
//!
//! Nearly every message fits a small slot: headers, and sense data at most. Login and discovery
//! text go through a few large ones.

use riser_memory::MemSlice;
use riser_scsi::iser::HEADERS_LEN;

/// Bytes of a small slot.
pub(super) const SMALL: usize = 256;

/// Longest data segment sent, in bytes: that of login and discovery.
pub(super) const LARGE_SEGMENT: u32 = 8192;

/// Bytes of a large slot.
pub(super) const LARGE: usize = (HEADERS_LEN + LARGE_SEGMENT as usize).next_multiple_of(64);

/// Large slots: login and text have one answer under way each.
pub(super) const LARGE_SLOTS: usize = 2;

/// Number of a transmit descriptor; the large ones come after the small ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TxIdx(u16);

/// The slots, and those that are free.
#[derive(Debug)]
pub(super) struct TxRing {
    ring: MemSlice,
    small: u16,
    free_small: Vec<TxIdx>,
    free_large: Vec<TxIdx>,
}

impl TxRing {
    /// `small` small slots and the large ones, in `ring`.
    ///
    /// # Panics
    /// If the ring is too short.
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

    /// A slot for a message of `len` bytes; `None` while there is none.
    pub(super) fn take(&mut self, len: usize) -> Option<TxIdx> {
        assert!(len <= LARGE, "no message is so long");
        if len <= SMALL {
            self.free_small.pop()
        } else {
            self.free_large.pop()
        }
    }

    /// Gives a slot back.
    pub(super) fn put(&mut self, idx: TxIdx) {
        if idx.0 < self.small {
            self.free_small.push(idx);
        } else {
            self.free_large.push(idx);
        }
    }

    /// The first `len` bytes of a slot.
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
