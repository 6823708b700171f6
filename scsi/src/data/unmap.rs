//! UNMAP parameter list (SBC-3 5.28.2).

use super::field::{Field, be16, be32, be64};

/// Size of the header before the first descriptor, in bytes.
pub const HEADER_LEN: usize = 8;
/// Size of a block descriptor, in bytes.
pub const DESCRIPTOR_LEN: usize = 16;

/// UNMAP DATA LENGTH: number of bytes after this field.
const DATA_LENGTH: Field<u16> = be16(0);
/// UNMAP BLOCK DESCRIPTOR DATA LENGTH in bytes.
pub(crate) const DESCRIPTORS_LENGTH: Field<u16> = be16(2);
/// UNMAP LOGICAL BLOCK ADDRESS in a descriptor.
pub(crate) const LBA: Field<u64> = be64(0);
/// NUMBER OF LOGICAL BLOCKS in a descriptor.
pub(crate) const BLOCKS: Field<u32> = be32(8);

/// Creates a new list with a single descriptor.
#[must_use]
pub fn encode_one(lba: u64, blocks: u32) -> [u8; HEADER_LEN + DESCRIPTOR_LEN] {
    let mut list = [0; HEADER_LEN + DESCRIPTOR_LEN];
    DATA_LENGTH.set(&mut list, (HEADER_LEN + DESCRIPTOR_LEN - 2) as u16);
    DESCRIPTORS_LENGTH.set(&mut list, DESCRIPTOR_LEN as u16);
    LBA.set(&mut list[HEADER_LEN..], lba);
    BLOCKS.set(&mut list[HEADER_LEN..], blocks);
    list
}

/// Returns the first block and the number of blocks in a descriptor, or `None` if this is
/// incomplete.
pub(crate) fn parse_descriptor(bytes: &[u8]) -> Option<(u64, u32)> {
    let bytes = bytes.get(..DESCRIPTOR_LEN)?;
    Some((LBA.get(bytes)?, BLOCKS.get(bytes)?))
}
