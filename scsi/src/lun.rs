//! Logical unit numbers: parsing and encoding of the 8-byte format (SAM-5 4.7).
//!
//! We only support single-level addresses: peripheral device addressing (bus 0), flat space,
//! extended flat space, and well-known logical units. Hierarchical addresses are refused, because a
//! target doesn't have a second level.

use zerocopy::byteorder::big_endian::U64;

/// A logical unit number in the 8-byte wire format (SAM-5 4.7).
pub type WireLun = [u8; 8];

/// A logical unit number, up to 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LunId(u32);

/// The address in an 8-byte LUN.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LunAddress {
    /// A normal logical unit.
    Unit(LunId),
    /// A well-known logical unit, e.g. 1 for REPORT LUNS (SPC-4 8.2).
    WellKnown(u8),
}

/// An invalid LUN.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LunError {
    /// The address uses a second level.
    #[error("unsupported hierarchical LUN")]
    Hierarchical,
    /// The addressing method is either reserved or not supported.
    #[error("unsupported LUN address method {0:#04x}")]
    Method(u8),
}

impl LunId {
    /// LUN 0, which must support REPORT LUNS even if there is no logical unit.
    pub const ZERO: Self = Self(0);

    /// Maximum LUN that can be encoded with extended flat space addressing.
    pub const MAX: u32 = 0x00ff_ffff;

    /// Creates a LUN from a number, if this is at most 24 bits.
    #[must_use]
    pub const fn new(number: u32) -> Option<Self> {
        if number <= Self::MAX {
            Some(Self(number))
        } else {
            None
        }
    }

    /// Returns the number of the logical unit for an 8-byte LUN, or `None` for any other type of
    /// address.
    #[must_use]
    pub fn addressed(lun: WireLun) -> Option<Self> {
        match LunAddress::parse(lun) {
            Ok(LunAddress::Unit(lun)) => Some(lun),
            Ok(LunAddress::WellKnown(_)) | Err(_) => None,
        }
    }

    /// Returns the number of the logical unit, without the addressing method.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }

    /// Encodes this using the shortest format: peripheral below 256, flat below 16384, extended
    /// flat otherwise.
    #[must_use]
    pub const fn encode(self) -> [u8; 8] {
        let [_, high, middle, low] = self.0.to_be_bytes();
        match self.0 {
            0..=0xff => [0, low, 0, 0, 0, 0, 0, 0],
            0x100..=0x3fff => [0x40 | middle, low, 0, 0, 0, 0, 0, 0],
            _ => [0xd2, high, middle, low, 0, 0, 0, 0],
        }
    }
}

impl std::fmt::Display for LunId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl LunAddress {
    /// Parses the LUN field of a command.
    ///
    /// # Errors
    ///
    /// If the address has a second level or the method is unknown. For the initiator, this LUN does
    /// not exist.
    pub fn parse(lun: [u8; 8]) -> Result<Self, LunError> {
        let [method, b1, b2, b3, ..] = lun;
        let flat = |number: u32| Self::Unit(LunId(number));
        let (address, used) = match method >> 6 {
            // Peripheral device addressing. If the bus identifier is not zero, this would select
            // the next level.
            0 if method == 0 => (flat(u32::from(b1)), 2),
            0 => return Err(LunError::Hierarchical),
            1 => (flat(u32::from_be_bytes([0, 0, method & 0x3f, b1])), 2),
            3 if method == 0xc1 => (Self::WellKnown(b1), 2),
            3 if method == 0xd2 => (flat(u32::from_be_bytes([0, b1, b2, b3])), 4),
            _ => return Err(LunError::Method(method)),
        };
        // All bytes after the first level must be zero. If we ignored these, there would be
        // multiple addresses for the same logical unit.
        if U64::from_bytes(lun).get() << (8 * used) != 0 {
            return Err(LunError::Hierarchical);
        }
        Ok(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addressing_methods_match_sam5() {
        let unit = |n| Ok(LunAddress::Unit(LunId(n)));
        let cases = [
            ([0, 0, 0, 0, 0, 0, 0, 0], unit(0)),
            ([0, 7, 0, 0, 0, 0, 0, 0], unit(7)),
            ([0x40, 7, 0, 0, 0, 0, 0, 0], unit(7)),
            ([0x41, 0x02, 0, 0, 0, 0, 0, 0], unit(0x102)),
            ([0xd2, 0x01, 0x02, 0x03, 0, 0, 0, 0], unit(0x1_0203)),
            ([0xc1, 0x01, 0, 0, 0, 0, 0, 0], Ok(LunAddress::WellKnown(1))),
            ([0x01, 0, 0, 0, 0, 0, 0, 0], Err(LunError::Hierarchical)),
            ([0, 7, 0, 1, 0, 0, 0, 0], Err(LunError::Hierarchical)),
            ([0xd2, 0, 0, 1, 0, 0, 0, 1], Err(LunError::Hierarchical)),
            ([0x80, 0, 0, 0, 0, 0, 0, 0], Err(LunError::Method(0x80))),
            ([0xff; 8], Err(LunError::Method(0xff))),
        ];
        for (bytes, expected) in cases {
            assert_eq!(LunAddress::parse(bytes), expected, "{bytes:02x?}");
        }
    }

    #[test]
    fn encoded_luns_roundtrip() {
        for number in [0, 1, 255, 256, 16383, 16384, LunId::MAX] {
            let lun = LunId::new(number).unwrap();
            assert_eq!(LunAddress::parse(lun.encode()), Ok(LunAddress::Unit(lun)));
        }
        assert_eq!(LunId::new(LunId::MAX + 1), None);
    }
}
