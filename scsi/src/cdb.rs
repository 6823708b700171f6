//! The fields of a command descriptor block.
//!
//! A [`Cdb`] exists only after the opcode table has fixed its length, so its accessors cannot miss.
//! The layouts of block commands differ by length only (SPC-4 4.2.2): [`Cdb::extent`] knows all
//! four.

use crate::data::cdb::block_16;
use crate::data::field::{Field, Value};
use crate::sense::Sense;

/// The longest CDB in the opcode table, in bytes.
pub(crate) const CDB_MAX: usize = 16;

/// The SERVICE ACTION field in byte 1.
pub(crate) const ACTION_MASK: u8 = 0x1f;

/// Length and CDB usage bitmap of a command (SPC-4 6.35).
///
/// A bit of the bitmap is one if it is evaluated. A bit that is zero in the bitmap must be zero in
/// the CDB: fields that are not supported (RDPROTECT, GROUP NUMBER, ANCHOR, NACA and the like) are
/// refused by that rule alone. Obsolete bits that old initiators still set (FUA_NV, SYNC_NV) are
/// allowed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Usage {
    bytes: [u8; CDB_MAX],
    len: usize,
}

impl Usage {
    /// Of a command that is not known, whose CDB can mean anything.
    pub(crate) const UNKNOWN: Self = Self {
        bytes: [0xff; CDB_MAX],
        len: 0,
    };

    /// The usage of an operation code, whose group gives the length (SPC-4 4.2.5.1). `rest` is the
    /// bitmap after the operation code in hexadecimal.
    pub(crate) const fn new(code: u8, rest: &str) -> Self {
        let len = match code >> 5 {
            0 => 6,
            1 | 2 => 10,
            4 => 16,
            5 => 12,
            _ => panic!("the group has no fixed length"),
        };
        let mut bytes = [0; CDB_MAX];
        bytes[0] = code;
        let rest = rest.as_bytes();
        let (mut at, mut digits) = (0, 2);
        while at < rest.len() {
            if rest[at] != b' ' {
                let digit = (rest[at] as char)
                    .to_digit(16)
                    .expect("a hexadecimal digit");
                bytes[digits / 2] = bytes[digits / 2] << 4 | digit as u8;
                digits += 1;
            }
            at += 1;
        }
        assert!(digits == 2 * len, "the bitmap is as long as the CDB");
        Self { bytes, len }
    }

    /// Bitmap of the bits that the device server evaluates, one byte for each of the CDB.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// A CDB of known length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cdb {
    bytes: [u8; CDB_MAX],
    len: usize,
}

/// A run of logical blocks named by a CDB, before any check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Extent {
    /// LBA of the first block.
    pub(crate) lba: u64,
    /// Number of blocks, of the unit's length.
    pub(crate) blocks: u64,
    /// Byte of the CDB where the length field starts, for field pointers.
    pub(crate) length_byte: u16,
}

impl Cdb {
    /// Takes as many bytes of what the transport delivered as the command has, and checks that no
    /// reserved bit is set.
    ///
    /// Fails with a pointer behind the end where bytes are missing, or at the first reserved bit.
    pub(crate) fn parse(received: &[u8], usage: &Usage) -> Result<Self, Sense> {
        // Missing bytes are pointed at behind the end, where the initiator would have to go on.
        let cdb =
            Self::take(received, usage.len).ok_or(Sense::cdb_field(received.len() as u16, None))?;
        // One comparison for all bytes but the operation code.
        let reserved =
            u128::from_be_bytes(cdb.bytes) & !u128::from_be_bytes(usage.bytes) & (u128::MAX >> 8);
        if reserved == 0 {
            return Ok(cdb);
        }
        // Big-endian, so the leading zeroes count from the first bit of the CDB to the first wrong
        // one.
        let position = reserved.leading_zeros();
        Err(Sense::cdb_field(
            (position / 8) as u16,
            Some(7 - (position % 8) as u8),
        ))
    }

    /// The CDB without its reserved bits, for those who look at it before it is checked; `None`
    /// where bytes are missing.
    pub(crate) fn masked(received: &[u8], usage: &Usage) -> Option<Self> {
        let mut cdb = Self::take(received, usage.len)?;
        let used = u128::from_be_bytes(cdb.bytes) & u128::from_be_bytes(usage.bytes);
        cdb.bytes = used.to_be_bytes();
        Some(cdb)
    }

    /// The CDB of a command to send: OPERATION CODE, SERVICE ACTION and zeroes.
    pub(crate) fn new(code: u8, service_action: Option<u8>, usage: &Usage) -> Self {
        let mut bytes = [0; CDB_MAX];
        bytes[0] = code;
        bytes[1] = service_action.unwrap_or(0);
        Self {
            bytes,
            len: usage.len,
        }
    }

    /// The CDB with another value of a field.
    ///
    /// # Panics
    /// The field has no room for the value.
    #[must_use]
    pub fn with<T: Value>(mut self, field: Field<T>, value: T) -> Self {
        field.set(&mut self.bytes[..self.len], value);
        self
    }

    /// Bytes of the CDB, without padding.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// The value of a field.
    pub(crate) fn get<T: Value>(&self, field: Field<T>) -> T {
        field
            .get(&self.bytes)
            .expect("the opcode table has fixed the length of the CDB")
    }

    fn take(received: &[u8], len: usize) -> Option<Self> {
        let mut bytes = [0; CDB_MAX];
        bytes[..len].copy_from_slice(received.get(..len)?);
        Some(Self { bytes, len })
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

    /// LOGICAL BLOCK ADDRESS and TRANSFER LENGTH of a block command.
    ///
    /// In the 6-byte form a length of zero means 256 blocks (SBC-3 5.7).
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
    fn extents_of_the_four_lengths() {
        let extent = |bytes: &[u8]| {
            let e = Cdb::take(bytes, bytes.len()).unwrap().extent();
            (e.lba, e.blocks, e.length_byte)
        };
        // READ(6), LBA 1f0203h, 4 blocks; then length 0.
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
    }

    #[test]
    fn reserved_bits_are_pointed_at() {
        let usage = Usage::new(0x28, "1a ffffffff 00 ffff 00");
        let cdb = [0x28, 0x20, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(Cdb::parse(&cdb, &usage), Err(Sense::cdb_field(1, Some(5))));
        assert_eq!(
            Cdb::parse(&[0x28, 0], &usage),
            Err(Sense::cdb_field(2, None))
        );
    }
}
