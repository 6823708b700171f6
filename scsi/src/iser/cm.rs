//! What both sides say of iSER in the private data of the connection's CM messages (IBTA annex
//! A12).

/// Length of the header in the private data, in bytes.
pub const CM_HEADER_LEN: usize = 4;

/// Zero-based addresses are not used.
const NO_ZERO_BASE: u8 = 0x80;
/// SEND with invalidate is not used.
const NO_INVALIDATE: u8 = 0x40;

/// Features that a side offers. On the wire these are exceptions: a set bit says that it does not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CmHeader {
    /// Buffers are addressed from zero, in a shorter iSER header.
    pub zero_based: bool,
    /// The target may invalidate a buffer's key with its answer.
    pub remote_invalidate: bool,
}

impl CmHeader {
    /// Reads it from private data, which the CM fills up with zeros. Nothing at all is what the
    /// first implementations said; it means that nothing is offered.
    #[must_use]
    pub fn parse(private_data: &[u8]) -> Self {
        // Padding of the CM reads as a byte of zero here, which offers both. The caller takes of
        // that only what it offers itself.
        match private_data.first() {
            Some(flags) => Self {
                zero_based: flags & NO_ZERO_BASE == 0,
                remote_invalidate: flags & NO_INVALIDATE == 0,
            },
            None => Self::default(),
        }
    }

    /// Bytes on the wire.
    #[must_use]
    pub fn bytes(self) -> [u8; CM_HEADER_LEN] {
        let zero_base = if self.zero_based { 0 } else { NO_ZERO_BASE };
        let invalidate = if self.remote_invalidate {
            0
        } else {
            NO_INVALIDATE
        };
        [zero_base | invalidate, 0, 0, 0]
    }

    /// The features that both offer.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            zero_based: self.zero_based && other.zero_based,
            remote_invalidate: self.remote_invalidate && other.remote_invalidate,
        }
    }
}
