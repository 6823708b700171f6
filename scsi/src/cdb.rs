//! Access to the fields of a command descriptor block.
//!
//! A [`Cdb`] is only created after the length has been checked against the opcode table, so reading
//! a field cannot fail. Block commands use one of five layouts, depending on the length (SPC-4
//! 4.2.2), which are all handled in [`Cdb::extent`]. The flags of a block command are always in the
//! same byte, except for a 32-byte CDB.

use crate::data::cdb::{block_16, block_32};
use crate::data::field::{Field, Value};
use crate::sense::Sense;

/// Maximum length of a CDB in the opcode table, in bytes.
pub(crate) const CDB_MAX: usize = 32;

/// Mask for the SERVICE ACTION field in byte 1.
pub(crate) const ACTION_MASK: u8 = 0x1f;

/// Length and CDB usage bitmap of a command (SPC-4 6.35).
///
/// A bit is set in the bitmap if we evaluate it. All other bits must be zero in the CDB, which is
/// the only check needed to refuse any field that is not supported (GROUP NUMBER, ANCHOR, NACA
/// etc., and RDPROTECT for an LU without protection information). We still allow obsolete bits that
/// are set by old initiators (FUA_NV, SYNC_NV).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Usage {
    bytes: [u8; CDB_MAX],
    /// All other bits of the CDB, except for the operation code.
    reserved: [u8; CDB_MAX],
    len: usize,
}

impl Usage {
    /// Used for an unknown command, where arbitrary values are possible.
    pub(crate) const UNKNOWN: Self = Self {
        bytes: [0xff; CDB_MAX],
        reserved: [0; CDB_MAX],
        len: 0,
    };

    /// Creates the usage for an operation code. The length is based on the group code (SPC-4
    /// 4.2.5.1), and all commands with a variable length use 32 bytes. `rest` is the bitmap after
    /// the operation code, as a hex string.
    pub(crate) const fn new(code: u8, rest: &str) -> Self {
        let len = match code >> 5 {
            0 => 6,
            1 | 2 => 10,
            4 => 16,
            5 => 12,
            3 if code == block_32::VARIABLE_LENGTH => CDB_MAX,
            _ => panic!("operation code group without a fixed length"),
        };
        let mut bytes = [0; CDB_MAX];
        bytes[0] = code;
        let rest = rest.as_bytes();
        let (mut at, mut digits) = (0, 2);
        while at < rest.len() {
            if rest[at] != b' ' {
                let digit = (rest[at] as char).to_digit(16).expect("hex digit");
                bytes[digits / 2] = bytes[digits / 2] << 4 | digit as u8;
                digits += 1;
            }
            at += 1;
        }
        assert!(digits == 2 * len, "bitmap and CDB have different sizes");
        let mut reserved = [0; CDB_MAX];
        let mut at = 1;
        while at < len {
            reserved[at] = !bytes[at];
            at += 1;
        }
        Self {
            bytes,
            reserved,
            len,
        }
    }

    /// Returns the bitmap of bits that are evaluated, with the same size as the CDB.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Returns the same usage, with a field to select the checks of protection information.
    pub(crate) fn with_protect(mut self) -> Self {
        let flags = flags_byte(self.len);
        self.bytes[flags] |= PROTECT_MASK;
        self.reserved[flags] &= !PROTECT_MASK;
        self
    }
}

/// Mask of RDPROTECT, WRPROTECT, VRPROTECT or ORPROTECT in the byte with the flags.
const PROTECT_MASK: u8 = 0xe0;

/// Returns the offset of the flags in a CDB with this length.
fn flags_byte(len: usize) -> usize {
    if len == CDB_MAX { 10 } else { 1 }
}

/// Number of bytes to compare at once.
const HALF: usize = 16;

/// Returns one of the halves as a big-endian integer.
fn number(bytes: &[u8; CDB_MAX], half: usize) -> u128 {
    let bytes = bytes[half * HALF..].first_chunk();
    u128::from_be_bytes(*bytes.expect("CDB_MAX is two halves"))
}

/// A CDB with a known length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cdb {
    bytes: [u8; CDB_MAX],
    len: usize,
}

/// A range of logical blocks in a CDB. This has not been checked yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Extent {
    /// LBA of the first block.
    pub(crate) lba: u64,
    /// Number of blocks, using the block size of the LU.
    pub(crate) blocks: u64,
    /// Offset of the length field in the CDB, used for field pointers.
    pub(crate) length_byte: u16,
}

impl Cdb {
    /// Creates a CDB from the bytes received by the transport, and checks that all reserved bits
    /// are zero. Any bytes after the length of the command are ignored.
    ///
    /// If the CDB is too short, the error will point to the first missing byte, otherwise to the
    /// first reserved bit.
    pub(crate) fn parse(received: &[u8], usage: &Usage) -> Result<Self, Sense> {
        // Point to the first byte after the end if the CDB is too short.
        let cdb = Self::from_received(received, usage.len)
            .ok_or_else(|| Sense::cdb_field(received.len() as u16, None))?;
        match cdb.reserved(usage, 0) | cdb.reserved(usage, 1) {
            0 => Ok(cdb),
            _ => Err(cdb.reserved_error(usage)),
        }
    }

    /// Returns the reserved bits that are set in one of the halves.
    fn reserved(&self, usage: &Usage, half: usize) -> u128 {
        number(&self.bytes, half) & number(&usage.reserved, half)
    }

    /// Returns the error for a CDB with a reserved bit that is set.
    #[cold]
    fn reserved_error(&self, usage: &Usage) -> Sense {
        // These are big-endian values, so the number of leading zeros is the position of the first
        // reserved bit that is set.
        let position = match self.reserved(usage, 0) {
            0 => u128::BITS + self.reserved(usage, 1).leading_zeros(),
            first => first.leading_zeros(),
        };
        Sense::cdb_field((position / 8) as u16, Some(7 - (position % 8) as u8))
    }

    /// Returns the CDB with all reserved bits cleared, which is used before the CDB is checked.
    /// Returns `None` if it's too short.
    pub(crate) fn masked(received: &[u8], usage: &Usage) -> Option<Self> {
        let mut cdb = Self::from_received(received, usage.len)?;
        for (byte, used) in cdb.bytes.iter_mut().zip(&usage.bytes) {
            *byte &= used;
        }
        Some(cdb)
    }

    /// Creates a CDB to be sent, using zero for all other fields.
    pub(crate) fn new(code: u8, service_action: Option<u8>, usage: &Usage) -> Self {
        let mut bytes = [0; CDB_MAX];
        bytes[0] = code;
        let action = service_action.unwrap_or(0);
        if code == block_32::VARIABLE_LENGTH {
            block_32::ADDITIONAL_LENGTH.set(&mut bytes, block_32::ADDITIONAL_LEN);
            block_32::SERVICE_ACTION.set(&mut bytes, action.into());
        } else {
            bytes[1] = action;
        }
        Self {
            bytes,
            len: usage.len,
        }
    }

    /// Sets the value of a field.
    ///
    /// # Panics
    /// If the value is too large for the field.
    #[must_use]
    pub fn with<T: Value>(mut self, field: Field<T>, value: T) -> Self {
        field.set(&mut self.bytes[..self.len], value);
        self
    }

    /// Returns the CDB as bytes, without padding.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Returns the value of a field.
    pub(crate) fn get<T: Value>(&self, field: Field<T>) -> T {
        field.get(&self.bytes).expect("field is within the CDB")
    }

    /// Returns a CDB with `len` bytes, possibly followed by padding.
    fn from_received(received: &[u8], len: usize) -> Option<Self> {
        let mut bytes = [0; CDB_MAX];
        // Transports provide at least 16 bytes for every CDB. Copying a fixed number of bytes is
        // much cheaper than calling memcpy.
        match received.first_chunk::<HALF>() {
            Some(first) if len <= HALF => bytes[..HALF].copy_from_slice(first),
            _ => bytes[..len].copy_from_slice(received.get(..len)?),
        }
        Some(Self { bytes, len })
    }

    /// Returns whether this is a 32-byte CDB, which contains the expected tags of the first block.
    pub(crate) fn has_expected_tags(&self) -> bool {
        self.len == CDB_MAX
    }

    /// Returns the offset of the flags of a block command.
    pub(crate) fn flags_byte(&self) -> usize {
        flags_byte(self.len)
    }

    /// Returns a flag of a block command. `field` specifies its location in CDBs that are shorter
    /// than 32 bytes.
    pub(crate) fn flag(&self, field: Field<bool>) -> bool {
        debug_assert_eq!(field.at(), flags_byte(0));
        self.bit(self.flags_byte(), field.highest_bit())
    }

    /// Returns the FUA bit of a READ or WRITE. For a 6-byte CDB, this bit is part of the LBA.
    pub(crate) fn fua(&self) -> bool {
        self.len != 6 && self.flag(block_16::FUA)
    }

    /// Returns the BYTCHK field of a VERIFY or WRITE AND VERIFY.
    pub(crate) fn byte_check(&self) -> u8 {
        (self.byte(self.flags_byte()) >> 1) & 0x3
    }

    /// Returns the RDPROTECT, WRPROTECT, VRPROTECT or ORPROTECT field. This field isn't present in
    /// a 6-byte CDB, so we return zero.
    pub(crate) fn protect(&self) -> u8 {
        match self.len {
            6 => 0,
            _ => (self.byte(self.flags_byte()) & PROTECT_MASK) >> 5,
        }
    }

    pub(crate) fn byte(&self, index: usize) -> u8 {
        self.bytes[index]
    }

    pub(crate) fn bit(&self, index: usize, bit: u8) -> bool {
        self.bytes[index] & (1 << bit) != 0
    }

    pub(crate) fn be16(&self, index: usize) -> u16 {
        u16::from_be_bytes([self.bytes[index], self.bytes[index + 1]])
    }

    pub(crate) fn be32(&self, index: usize) -> u32 {
        u32::from(self.be16(index)) << 16 | u32::from(self.be16(index + 2))
    }

    /// Returns the LOGICAL BLOCK ADDRESS and TRANSFER LENGTH of a block command.
    ///
    /// For a 6-byte CDB, a length of zero is handled as 256 blocks (SBC-3 5.7).
    #[inline]
    pub(crate) fn extent(&self) -> Extent {
        match self.len {
            6 => Extent {
                lba: u64::from(self.be32(0) & 0x001f_ffff),
                blocks: match self.byte(4) {
                    0 => 256,
                    blocks => u64::from(blocks),
                },
                length_byte: 4,
            },
            10 => Extent {
                lba: u64::from(self.be32(2)),
                blocks: u64::from(self.be16(7)),
                length_byte: 7,
            },
            12 => Extent {
                lba: u64::from(self.be32(2)),
                blocks: u64::from(self.be32(6)),
                length_byte: 6,
            },
            CDB_MAX => Extent {
                lba: self.get(block_32::LOGICAL_BLOCK_ADDRESS),
                blocks: u64::from(self.get(block_32::TRANSFER_LENGTH)),
                length_byte: block_32::TRANSFER_LENGTH.at() as u16,
            },
            _ => Extent {
                lba: self.get(block_16::LOGICAL_BLOCK_ADDRESS),
                blocks: u64::from(self.get(block_16::TRANSFER_LENGTH)),
                length_byte: block_16::TRANSFER_LENGTH.at() as u16,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_for_all_cdb_lengths() {
        let extent = |bytes: &[u8]| {
            let e = Cdb::from_received(bytes, bytes.len()).unwrap().extent();
            (e.lba, e.blocks, e.length_byte)
        };
        // READ(6), LBA 1f0203h, 4 blocks, then a length of zero.
        assert_eq!(
            extent(&[0x08, 0x1f, 0x02, 0x03, 0x04, 0]),
            (0x1f_0203, 4, 4)
        );
        assert_eq!(extent(&[0x08, 0, 0, 1, 0, 0]), (1, 256, 4));
        // READ(10), LBA 01020304h, 0506h blocks.
        assert_eq!(
            extent(&[0x28, 0, 1, 2, 3, 4, 0, 5, 6, 0]),
            (0x0102_0304, 0x0506, 7)
        );
        // READ(12), LBA 01020304h, 05060708h blocks.
        assert_eq!(
            extent(&[0xa8, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0]),
            (0x0102_0304, 0x0506_0708, 6)
        );
        // READ(16), LBA 0102030405060708h, 090a0b0ch blocks.
        assert_eq!(
            extent(&[0x88, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0]),
            (0x0102_0304_0506_0708, 0x090a_0b0c, 10)
        );
        // READ(32), LBA 0102030405060708h, 090a0b0ch blocks.
        let mut long = [0; 32];
        long[0] = 0x7f;
        long[12..20].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        long[28..].copy_from_slice(&[9, 10, 11, 12]);
        assert_eq!(extent(&long), (0x0102_0304_0506_0708, 0x090a_0b0c, 28));
    }

    #[test]
    fn reserved_bits_set_field_pointer() {
        let usage = Usage::new(0x28, "1a ffffffff 00 ffff 00");
        let cdb = [0x28, 0x20, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(Cdb::parse(&cdb, &usage), Err(Sense::cdb_field(1, Some(5))));
        assert_eq!(
            Cdb::parse(&[0x28, 0], &usage),
            Err(Sense::cdb_field(2, None))
        );
        // Padding is ignored.
        let mut padded = [0xff; 16];
        padded[..10].copy_from_slice(&[0x28, 0x08, 0, 0, 0, 1, 0, 0, 2, 0]);
        assert!(Cdb::parse(&padded, &usage).is_ok_and(|cdb| cdb.fua()));
        let protected = usage.with_protect();
        assert_eq!(Cdb::parse(&cdb, &protected).map(|cdb| cdb.protect()), Ok(1));
        // READ (32): bits in both halves.
        let usage = Usage::new(
            0x7f,
            "00 00000000 00 18 ffff 1a 00 ffffffffffffffff ffffffff ffff ffff fffffff0",
        );
        let mut cdb = [0; 32];
        cdb[31] = 0x08;
        assert_eq!(Cdb::parse(&cdb, &usage), Err(Sense::cdb_field(31, Some(3))));
        cdb[10] = 0x40;
        assert_eq!(Cdb::parse(&cdb, &usage), Err(Sense::cdb_field(10, Some(6))));
        (cdb[10], cdb[31]) = (0x08, 0x10);
        assert!(Cdb::parse(&cdb, &usage).is_ok_and(|cdb| cdb.fua()));
    }
}
