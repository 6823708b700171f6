//! Logical unit numbers: the eight bytes of SAM-5 4.7 and what they mean.
//!
//! Single-level addresses only: peripheral device addressing (bus 0), flat
//! space, extended flat space, and the well-known logical units. Hierarchies
//! are refused, since this target device has no second level.

use zerocopy::byteorder::big_endian::U64;

/// A logical unit number in its eight-byte form (SAM-5 4.7), as the wire carries it.
pub type WireLun = [u8; 8];

/// The number of a logical unit, at most 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LunId(u32);

/// Meaning of an eight-byte LUN.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LunAddress {
    /// An ordinary logical unit.
    Unit(LunId),
    /// A well-known logical unit; 1 is REPORT LUNS (SPC-4 8.2).
    WellKnown(u8),
}

/// A LUN that names nothing here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LunError {
    /// A second level is addressed.
    #[error("the LUN addresses a second level")]
    Hierarchical,
    /// The addressing method is reserved, or is one without meaning here.
    #[error("the LUN uses address method byte {0:#04x}")]
    Method(u8),
}

impl LunId {
    /// LUN 0, which takes REPORT LUNS even without a unit.
    pub const ZERO: Self = Self(0);

    /// The highest LUN that extended flat space addressing can express.
    pub const MAX: u32 = 0x00ff_ffff;

    /// A LUN by number, if it fits 24 bits.
    #[must_use]
    pub const fn new(number: u32) -> Option<Self> {
        if number <= Self::MAX {
            Some(Self(number))
        } else {
            None
        }
    }

    /// The number of the logical unit that an eight-byte LUN addresses; none if it is another
    /// address.
    #[must_use]
    pub fn addressed(lun: WireLun) -> Option<Self> {
        match LunAddress::parse(lun) {
            Ok(LunAddress::Unit(lun)) => Some(lun),
            Ok(LunAddress::WellKnown(_)) | Err(_) => None,
        }
    }

    /// Number of the unit, without the addressing method.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }

    /// The shortest form: peripheral below 256, flat below 16384, then
    /// extended flat.
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
    /// Reads the LUN field of a command.
    ///
    /// # Errors
    ///
    /// The address has a second level or an unknown method; to the initiator
    /// such a logical unit does not exist.
    pub fn parse(lun: [u8; 8]) -> Result<Self, LunError> {
        let [method, b1, b2, b3, ..] = lun;
        let flat = |number: u32| Self::Unit(LunId(number));
        let (address, used) = match method >> 6 {
            // Peripheral device addressing: a bus identifier other than zero
            // would select the next level.
            0 if method == 0 => (flat(u32::from(b1)), 2),
            0 => return Err(LunError::Hierarchical),
            1 => (flat(u32::from_be_bytes([0, 0, method & 0x3f, b1])), 2),
            3 if method == 0xc1 => (Self::WellKnown(b1), 2),
            3 if method == 0xd2 => (flat(u32::from_be_bytes([0, b1, b2, b3])), 4),
            _ => return Err(LunError::Method(method)),
        };
        // What follows the first level must be zero: ignored, a unit would answer to many
        // addresses.
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
    fn every_method_reads_as_in_sam5() {
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
    fn encoding_reads_back() {
        for number in [0, 1, 255, 256, 16383, 16384, LunId::MAX] {
            let lun = LunId::new(number).unwrap();
            assert_eq!(LunAddress::parse(lun.encode()), Ok(LunAddress::Unit(lun)));
        }
        assert_eq!(LunId::new(LunId::MAX + 1), None);
    }
}
