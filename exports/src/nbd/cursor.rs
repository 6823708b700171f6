//! Parsing numbers and strings received from a peer.

use super::proto::MAX_STRING;

/// Remaining data of an option, option reply or chunk. Only the slice length is trusted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor<'a>(pub(super) &'a [u8]);

impl<'a> Cursor<'a> {
    pub(super) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(u16::from_be_bytes(*head))
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(u32::from_be_bytes(*head))
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(u64::from_be_bytes(*head))
    }

    /// Reads a length-prefixed string, limited to the max size allowed by the protocol.
    pub(super) fn string(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()? as usize;
        if len > MAX_STRING {
            return None;
        }
        self.bytes(len)
    }

    pub(super) fn finish(self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}
