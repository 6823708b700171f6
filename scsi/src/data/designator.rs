//! Names of logical units and ports, as page 83h carries them (SPC-4 7.8.6).

/// An NAA identifier of the logical unit (SPC-4 7.8.6.6).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Naa {
    /// NAA 6h, IEEE Registered Extended: 16 bytes on the wire.
    RegisteredExtended {
        /// IEEE company identifier, 24 bits.
        company: u32,
        /// Vendor specific identifier, 36 bits.
        vendor_specific: u64,
        /// Vendor specific identifier extension.
        extension: u64,
    },
    /// NAA 3h, Locally Assigned: 8 bytes on the wire.
    LocallyAssigned(
        /// The administrator's 60 bits.
        u64,
    ),
}

impl Naa {
    pub(crate) fn is_valid(self) -> bool {
        match self {
            Self::RegisteredExtended {
                company,
                vendor_specific,
                ..
            } => company < 1 << 24 && vendor_specific < 1 << 36,
            Self::LocallyAssigned(value) => value < 1 << 60,
        }
    }

    /// The designator's bytes.
    #[must_use]
    pub fn bytes(self) -> Vec<u8> {
        match self {
            Self::RegisteredExtended {
                company,
                vendor_specific,
                extension,
            } => {
                let first = 6 << 60 | u64::from(company) << 36 | vendor_specific;
                [first.to_be_bytes(), extension.to_be_bytes()].concat()
            }
            Self::LocallyAssigned(value) => (3 << 60 | value).to_be_bytes().to_vec(),
        }
    }
}
