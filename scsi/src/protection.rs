//! Protection information of logical blocks (SBC-4 4.21), also known as T10 DIF.
//!
//! On a protected medium, every logical block has eight bytes of metadata: its protection
//! information. It's transferred after the block, and stored by the backend.
//!
//! ```text
//!   | logical block, 512 or 4096 bytes | guard 2 | application tag 2 | reference tag 4 |
//! ```
//!
//! The guard is a CRC of the block. The reference tag detects a block stored at, or read from, a
//! different LBA. The application tag is not used by the device server, except that some
//! values [disable](Tuple::is_unchecked) all checks of a block.
//!
//! All numbers are big-endian.

use crc_fast::{CrcAlgorithm, checksum};

use crate::config::{Protection, ProtectionType, TUPLE_LEN};
use crate::nexus::NexusId;
use crate::sense::AdditionalSense;

/// Application tag of a block that is not checked.
const UNCHECKED_APPLICATION_TAG: u16 = u16::MAX;
/// Reference tag of a block that is not checked with type 3 protection.
const UNCHECKED_REFERENCE_TAG: u32 = u32::MAX;

/// Protection information of a logical block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tuple {
    /// LOGICAL BLOCK GUARD.
    pub guard: u16,
    /// LOGICAL BLOCK APPLICATION TAG.
    pub application_tag: u16,
    /// LOGICAL BLOCK REFERENCE TAG.
    pub reference_tag: u32,
}

/// The field of the protection information for which a check has failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum ProtectionError {
    /// The guard is not the CRC of the block.
    #[error("logical block guard check failed")]
    Guard,
    /// The application tag is not the expected one.
    #[error("logical block application tag check failed")]
    ApplicationTag,
    /// The reference tag is not the expected one.
    #[error("logical block reference tag check failed")]
    ReferenceTag,
}

impl ProtectionError {
    /// Returns the failed check reported by an additional sense code, if any.
    #[must_use]
    pub fn from_additional_sense(sense: AdditionalSense) -> Option<Self> {
        [Self::Guard, Self::ApplicationTag, Self::ReferenceTag]
            .into_iter()
            .find(|error| error.additional_sense() == sense)
    }

    /// Returns the additional sense code.
    #[must_use]
    pub fn additional_sense(self) -> AdditionalSense {
        match self {
            Self::Guard => AdditionalSense::GUARD_CHECK_FAILED,
            Self::ApplicationTag => AdditionalSense::APPLICATION_TAG_CHECK_FAILED,
            Self::ReferenceTag => AdditionalSense::REFERENCE_TAG_CHECK_FAILED,
        }
    }
}

/// A change of the protection type, after all blocks were erased.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProtectionChange {
    /// The new type, or `None` for a medium without protection (type 0).
    pub protection_type: Option<ProtectionType>,
    /// The nexus that has sent the FORMAT UNIT.
    pub nexus: NexusId,
}

/// Expected values. A field is not checked if it is `None`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ExpectedTuple {
    /// The CRC of the block.
    pub guard: Option<u16>,
    /// The application tag.
    pub application_tag: Option<MaskedTag>,
    /// The reference tag.
    pub reference_tag: Option<u32>,
}

/// Part of an application tag, selected via a mask.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct MaskedTag {
    /// The raw value, which may contain bits that are not present in the mask.
    pub value: u16,
    /// The bits to compare.
    pub mask: u16,
}

impl Tuple {
    /// Size in bytes.
    pub const LEN: usize = TUPLE_LEN as usize;

    /// Protection information of a block that has never been written, or is deallocated.
    pub const DEALLOCATED: Self = Self {
        guard: u16::MAX,
        application_tag: UNCHECKED_APPLICATION_TAG,
        reference_tag: UNCHECKED_REFERENCE_TAG,
    };

    /// Parses the eight bytes.
    #[must_use]
    pub const fn parse(bytes: [u8; Self::LEN]) -> Self {
        let [g0, g1, a0, a1, r0, r1, r2, r3] = bytes;
        Self {
            guard: u16::from_be_bytes([g0, g1]),
            application_tag: u16::from_be_bytes([a0, a1]),
            reference_tag: u32::from_be_bytes([r0, r1, r2, r3]),
        }
    }

    /// Encodes the eight bytes.
    #[must_use]
    pub const fn encode(self) -> [u8; Self::LEN] {
        let [g0, g1] = self.guard.to_be_bytes();
        let [a0, a1] = self.application_tag.to_be_bytes();
        let [r0, r1, r2, r3] = self.reference_tag.to_be_bytes();
        [g0, g1, a0, a1, r0, r1, r2, r3]
    }

    /// Generates the protection information of a block written without any (SBC-4, WRITE (10)
    /// with a WRPROTECT of zero). The reference tag is `None` if it is not known.
    #[must_use]
    pub fn generate(protection: Protection, block: &[u8], reference_tag: Option<u32>) -> Self {
        Self {
            guard: guard(block),
            // With type 2, the client might use any reference tag to read this, so let it read
            // without checks.
            application_tag: match protection.client_owns_tag || protection.is_type_2() {
                true => UNCHECKED_APPLICATION_TAG,
                false => 0,
            },
            reference_tag: reference_tag.unwrap_or(UNCHECKED_REFERENCE_TAG),
        }
    }

    /// Returns whether the tags disable all checks of a block when it is read. However, the
    /// protection information provided with a write is always checked.
    #[must_use]
    pub fn is_unchecked(self, protection_type: ProtectionType) -> bool {
        self.application_tag == UNCHECKED_APPLICATION_TAG
            && (protection_type != ProtectionType::Type3
                || self.reference_tag == UNCHECKED_REFERENCE_TAG)
    }

    /// Compares the fields with the expected values. If multiple fields don't match, returns the
    /// first of those.
    ///
    /// # Errors
    /// The field that is different.
    pub fn check(self, expected: &ExpectedTuple) -> Result<(), ProtectionError> {
        if expected.guard.is_some_and(|guard| guard != self.guard) {
            return Err(ProtectionError::Guard);
        }
        if expected
            .application_tag
            .is_some_and(|tag| (tag.value ^ self.application_tag) & tag.mask != 0)
        {
            return Err(ProtectionError::ApplicationTag);
        }
        if expected
            .reference_tag
            .is_some_and(|tag| tag != self.reference_tag)
        {
            return Err(ProtectionError::ReferenceTag);
        }
        Ok(())
    }

    /// Verifies a block on the medium without a command, for example when all blocks are verified
    /// in the background.
    ///
    /// # Errors
    /// The field for which the check has failed.
    pub fn check_stored(
        self,
        protection_type: ProtectionType,
        lba: u64,
        block: &[u8],
    ) -> Result<(), ProtectionError> {
        if self.is_unchecked(protection_type) {
            return Ok(());
        }
        self.check(&ExpectedTuple {
            guard: Some(guard(block)),
            application_tag: None,
            reference_tag: lba_tag(protection_type, lba),
        })
    }
}

/// Returns the LOGICAL BLOCK GUARD of a block: a CRC with the polynomial 8BB7h, neither reflected
/// nor inverted.
#[must_use]
pub fn guard(block: &[u8]) -> u16 {
    // The upper bits are zero.
    checksum(CrcAlgorithm::Crc16T10Dif, block) as u16
}

/// Returns the reference tag of a block if it is based on the LBA.
#[must_use]
pub fn lba_tag(protection_type: ProtectionType, lba: u64) -> Option<u32> {
    // Only the least significant 32 bits are used.
    (protection_type == ProtectionType::Type1).then_some(lba as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test cases of SBC-4, and the check value of CRC-16/T10-DIF.
    #[test]
    fn guard_matches_known_values() {
        assert_eq!(guard(&[0; 32]), 0x0000);
        assert_eq!(guard(&[0xff; 32]), 0xa293);
        let up: Vec<u8> = (0..32).collect();
        assert_eq!(guard(&up), 0x0224);
        let down: Vec<u8> = (0xe0..=0xff).rev().collect();
        assert_eq!(guard(&down), 0xa0b7);
        let mut start = [0; 32];
        start[..2].fill(0xff);
        assert_eq!(guard(&start), 0x21b8);
        assert_eq!(guard(b"123456789"), 0xd0db);
        assert_eq!(guard(&[0; 4096]), 0x0000);
        assert_eq!(guard(&[]), 0x0000);
    }

    /// Known answers of `crct10dif` in Linux (`crypto/testmgr.h`).
    #[test]
    fn guard_matches_linux() {
        let digits = b"1234567890".repeat(32);
        assert_eq!(guard(b"abc"), 0x443b);
        assert_eq!(guard(&digits[..79]), 0x4b70);
        assert_eq!(guard(&[b"abc".as_slice(), &[b'd'; 53]].concat()), 0x9ce3);
        assert_eq!(guard(&digits[..319]), 0x44c6);
    }

    /// Calculates the CRC bit by bit.
    #[test]
    fn guard_matches_polynomial_division() {
        for len in [1, 7, 16, 511, 512, 4096] {
            let block: Vec<u8> = (0..len).map(|at| (at * 37 + at / 9) as u8).collect();
            let mut crc = 0_u16;
            for byte in &block {
                crc ^= u16::from(*byte) << 8;
                for _ in 0..8 {
                    crc = match crc & 0x8000 {
                        0 => crc << 1,
                        _ => crc << 1 ^ 0x8bb7,
                    };
                }
            }
            assert_eq!(guard(&block), crc, "{len}");
        }
    }

    #[test]
    fn tuple_is_big_endian() {
        let bytes = [0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08];
        let tuple = Tuple {
            guard: 0x0102,
            application_tag: 0x0304,
            reference_tag: 0x0506_0708,
        };
        assert_eq!(Tuple::parse(bytes), tuple);
        assert_eq!(tuple.encode(), bytes);
        assert_eq!(Tuple::DEALLOCATED.encode(), [0xff; 8]);
    }

    #[test]
    fn escapes_depend_on_type() {
        use ProtectionType::{Type1, Type2, Type3};
        let tuple = |application_tag, reference_tag| Tuple {
            guard: 0,
            application_tag,
            reference_tag,
        };
        for (tags, escapes) in [
            (tuple(0xffff, 7), [true, true, false]),
            (tuple(0xffff, u32::MAX), [true, true, true]),
            (tuple(0xfffe, u32::MAX), [false, false, false]),
        ] {
            let is_unchecked = [Type1, Type2, Type3].map(|kind| tags.is_unchecked(kind));
            assert_eq!(is_unchecked, escapes);
        }
    }

    #[test]
    fn generated_tags_depend_on_owner() {
        let mut protection = Protection::new(ProtectionType::Type1);
        let block = [7; 512];
        let tuple = Tuple::generate(protection, &block, Some(9));
        assert_eq!((tuple.guard, tuple.reference_tag), (guard(&block), 9));
        assert_eq!(tuple.application_tag, 0xffff);
        protection.client_owns_tag = false;
        let tuple = Tuple::generate(protection, &block, None);
        assert_eq!((tuple.application_tag, tuple.reference_tag), (0, u32::MAX));
        protection.protection_type = ProtectionType::Type2;
        let tuple = Tuple::generate(protection, &block, None);
        assert!(tuple.is_unchecked(ProtectionType::Type2));
    }

    #[test]
    fn fields_are_checked_in_order() {
        let expected = ExpectedTuple {
            guard: Some(1),
            application_tag: Some(MaskedTag {
                value: 0x1234,
                mask: 0x0ff0,
            }),
            reference_tag: Some(3),
        };
        let check = |guard, application_tag, reference_tag| {
            let tuple = Tuple {
                guard,
                application_tag,
                reference_tag,
            };
            tuple.check(&expected)
        };
        assert_eq!(check(1, 0xf23f, 3), Ok(()));
        assert_eq!(check(0, 0, 0), Err(ProtectionError::Guard));
        assert_eq!(check(1, 0x1244, 0), Err(ProtectionError::ApplicationTag));
        assert_eq!(check(1, 0x1234, 0), Err(ProtectionError::ReferenceTag));
        let any = Tuple::parse([9; 8]);
        assert_eq!(any.check(&ExpectedTuple::default()), Ok(()));
    }

    #[test]
    fn stored_block_is_checked_without_command() {
        let (block, lba) = ([3; 512], 0x1_0000_0005);
        let protection = Protection {
            protection_type: ProtectionType::Type1,
            client_owns_tag: false,
        };
        let tuple = Tuple::generate(protection, &block, lba_tag(ProtectionType::Type1, lba));
        let check = |tuple: Tuple, kind, block| tuple.check_stored(kind, lba, block);
        let wrong = Tuple {
            reference_tag: 4,
            ..tuple
        };
        assert_eq!(check(tuple, ProtectionType::Type1, &block), Ok(()));
        let error = check(wrong, ProtectionType::Type1, &block);
        assert_eq!(error, Err(ProtectionError::ReferenceTag));
        assert_eq!(check(wrong, ProtectionType::Type2, &block), Ok(()));
        for kind in [ProtectionType::Type1, ProtectionType::Type3] {
            assert_eq!(check(tuple, kind, &[2; 512]), Err(ProtectionError::Guard));
            assert_eq!(check(Tuple::DEALLOCATED, kind, &[2; 512]), Ok(()));
        }
    }
}
