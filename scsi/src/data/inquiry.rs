//! Standard INQUIRY data (SPC-4 6.6.2).

use super::field::{Field, Text, be16, bit, bits, byte};

/// Bytes that every device sends at least.
pub const MIN_LEN: usize = 36;
/// Bytes up to the last version descriptor and what is reserved behind it.
pub const LEN: usize = 96;

/// PERIPHERAL QUALIFIER: 000b where a unit is connected.
pub const PERIPHERAL_QUALIFIER: Field<u8> = bits(0, 7, 5);
/// No unit can be connected.
pub const QUALIFIER_INCAPABLE: u8 = 0b011;
/// PERIPHERAL DEVICE TYPE; 0 is a disk.
pub const PERIPHERAL_DEVICE_TYPE: Field<u8> = bits(0, 4, 0);
/// A direct-access block device.
pub const TYPE_DISK: u8 = 0x00;
/// Unknown, or no device.
pub const TYPE_NONE: u8 = 0x1f;
/// RMB: the medium is removable.
pub const RMB: Field<bool> = bit(1, 7);
/// VERSION of SPC that is claimed; 6 is SPC-4.
pub const VERSION: Field<u8> = byte(2);
/// HISUP: LUNs as in REPORT LUNS.
pub const HISUP: Field<bool> = bit(3, 4);
/// RESPONSE DATA FORMAT, always 2.
pub const RESPONSE_DATA_FORMAT: Field<u8> = bits(3, 3, 0);
/// ADDITIONAL LENGTH: bytes after this field.
pub const ADDITIONAL_LENGTH: Field<u8> = byte(4);
/// TPGS: kinds of asymmetric access.
pub const TPGS: Field<u8> = bits(5, 5, 4);
/// 3PC: the unit takes third-party copy commands.
pub const THIRD_PARTY_COPY: Field<bool> = bit(5, 3);
/// PROTECT: the unit supports protection information.
pub const PROTECT: Field<bool> = bit(5, 0);
/// MULTIP: several target ports.
pub const MULTIP: Field<bool> = bit(6, 4);
/// CMDQUE: the unit queues commands.
pub const CMDQUE: Field<bool> = bit(7, 1);
/// T10 VENDOR IDENTIFICATION, left-aligned ASCII.
pub const VENDOR: Text = Text::new(8, 8);
/// PRODUCT IDENTIFICATION, left-aligned ASCII.
pub const PRODUCT: Text = Text::new(16, 16);
/// PRODUCT REVISION LEVEL, left-aligned ASCII.
pub const REVISION: Text = Text::new(32, 4);
/// VERSION DESCRIPTOR, up to the eighth.
pub const VERSION_DESCRIPTORS: [Field<u16>; 8] = [
    be16(58),
    be16(60),
    be16(62),
    be16(64),
    be16(66),
    be16(68),
    be16(70),
    be16(72),
];

/// The data that were received, without what is behind their ADDITIONAL LENGTH; `None` if they are
/// shorter than every device's.
#[must_use]
pub fn received(data: &[u8]) -> Option<&[u8]> {
    let additional = ADDITIONAL_LENGTH.get(data.get(..MIN_LEN)?)?;
    // The fixed part was received, so it counts even where the length field says less.
    let declared = ADDITIONAL_LENGTH.at() + 1 + usize::from(additional);
    Some(&data[..declared.max(MIN_LEN).min(data.len())])
}
