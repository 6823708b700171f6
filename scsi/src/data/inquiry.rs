//! Standard INQUIRY data (SPC-4 6.6.2).

use super::field::{Field, Text, be16, bit, bits, byte};

/// Minimum number of bytes, must be sent by all devices.
pub const MIN_LEN: usize = 36;
/// Number of bytes up to the last version descriptor, with the reserved bytes after it.
pub const LEN: usize = 96;

/// PERIPHERAL QUALIFIER: 000b if a logical unit is connected.
pub const PERIPHERAL_QUALIFIER: Field<u8> = bits(0, 7, 5);
/// There cannot be a logical unit for this LUN.
pub const QUALIFIER_INCAPABLE: u8 = 0b011;
/// PERIPHERAL DEVICE TYPE, zero for a disk.
pub const PERIPHERAL_DEVICE_TYPE: Field<u8> = bits(0, 4, 0);
/// A direct-access block device.
pub const TYPE_DISK: u8 = 0x00;
/// Unknown type, or no device.
pub const TYPE_NONE: u8 = 0x1f;
/// RMB: the medium can be removed.
pub const RMB: Field<bool> = bit(1, 7);
/// VERSION of the SPC standard, 6 for SPC-4.
pub const VERSION: Field<u8> = byte(2);
/// HISUP: LUNs have the same format as in REPORT LUNS.
pub const HISUP: Field<bool> = bit(3, 4);
/// RESPONSE DATA FORMAT, always 2.
pub const RESPONSE_DATA_FORMAT: Field<u8> = bits(3, 3, 0);
/// ADDITIONAL LENGTH: number of bytes after this field.
pub const ADDITIONAL_LENGTH: Field<u8> = byte(4);
/// TPGS: supported types of asymmetric access.
pub const TPGS: Field<u8> = bits(5, 5, 4);
/// 3PC: third-party copy commands are supported.
pub const THIRD_PARTY_COPY: Field<bool> = bit(5, 3);
/// PROTECT: protection information is supported.
pub const PROTECT: Field<bool> = bit(5, 0);
/// MULTIP: there can be multiple target ports.
pub const MULTIP: Field<bool> = bit(6, 4);
/// CMDQUE: command queueing is supported.
pub const CMDQUE: Field<bool> = bit(7, 1);
/// T10 VENDOR IDENTIFICATION, left-aligned ASCII.
pub const VENDOR: Text = Text::new(8, 8);
/// PRODUCT IDENTIFICATION, left-aligned ASCII.
pub const PRODUCT: Text = Text::new(16, 16);
/// PRODUCT REVISION LEVEL, left-aligned ASCII.
pub const REVISION: Text = Text::new(32, 4);
/// The 8 VERSION DESCRIPTOR fields.
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

/// Returns the received data up to the ADDITIONAL LENGTH, or `None` if it's shorter than required
/// for any device.
#[must_use]
pub fn received(data: &[u8]) -> Option<&[u8]> {
    let additional = ADDITIONAL_LENGTH.get(data.get(..MIN_LEN)?)?;
    // We have received the fixed part, so return this even if the length field is too small.
    let declared = ADDITIONAL_LENGTH.at() + 1 + usize::from(additional);
    Some(&data[..declared.max(MIN_LEN).min(data.len())])
}
