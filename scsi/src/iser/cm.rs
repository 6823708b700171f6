//! The iSER header in the private data of CM messages (IBTA annex A12).

/// Size of the header in the private data, in bytes.
pub const CM_HEADER_LEN: usize = 4;

/// Zero-based addresses are not supported.
const NO_ZERO_BASE: u8 = 0x80;
/// SEND with invalidate is not supported.
const NO_INVALIDATE: u8 = 0x40;

/// Features supported by one side. Note that these are inverted on the wire: a bit is set if a
/// feature is not supported.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CmHeader {
    /// Buffers can use zero-based addresses, with a shorter iSER header.
    pub zero_based: bool,
    /// The target can invalidate a remote key with the response.
    pub remote_invalidate: bool,
}

impl CmHeader {
    /// Parses the private data. The CM pads this with zeros. Early implementations don't send any
    /// private data, which means that no features are supported.
    #[must_use]
    pub fn parse(private_data: &[u8]) -> Self {
        // If the private data is only padding, this byte will be zero, so both features are set.
        // The caller must only use the features that it has also set.
        match private_data.first() {
            Some(flags) => Self {
                zero_based: flags & NO_ZERO_BASE == 0,
                remote_invalidate: flags & NO_INVALIDATE == 0,
            },
            None => Self::default(),
        }
    }

    /// Returns the wire format.
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

    /// Returns the features that are supported by both sides.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            zero_based: self.zero_based && other.zero_based,
            remote_invalidate: self.remote_invalidate && other.remote_invalidate,
        }
    }
}
