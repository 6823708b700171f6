//! Commands sent by a block initiator, and response parsing.
//!
//! - [`Command`]: a CDB with transfer direction, data length and effect. There is a constructor for
//!   each command.
//! - [`Inquiry`], [`Capacity`], [`BlockLimits`], [`Provisioning`], [`Identity`], [`CachingPage`]:
//!   parsed parameter data, based on the layouts in [`riser_scsi::data`]. Strings from the target
//!   are made printable here, because they are used in terminals and logs.
//!
//! Block counts use the logical block size; lengths are in bytes unless the name indicates
//! otherwise. See SPC-4 and SBC-3 for the clauses.

#![forbid(unsafe_code)]

use riser_scsi::data::capacity::{capacity_10, capacity_16};
use riser_scsi::data::cdb::{
    block_10, block_16, get_lba_status, inquiry, mode_sense_6, read_capacity_16, report_luns,
    report_target_port_groups, unmap, write_same_16,
};
use riser_scsi::data::designator::{self, EUI_64, LOGICAL_UNIT, NAA, SCSI_NAME_STRING, T10_VENDOR};
use riser_scsi::data::field::Field;
use riser_scsi::data::vpd::{block_limits, provisioning};
use riser_scsi::data::{inquiry as standard, luns, mode, unmap as list};
use riser_scsi::opcode::{Kind, Opcode};

use crate::request::Effect;
use crate::request::{Cdb, DataLen};

/// Allocation length for standard INQUIRY data, in bytes.
pub const INQUIRY_LEN: u16 = standard::LEN as u16;
/// Allocation length for vital product data, in bytes.
pub const VPD_LEN: u16 = 1024;
/// READ CAPACITY (16) data length, in bytes.
pub const CAPACITY_LEN: u32 = capacity_16::LEN as u32;
/// Allocation length for REPORT LUNS: 1024 logical units.
pub const REPORT_LUNS_LEN: u32 = (luns::HEADER_LEN + luns::LUN_LEN * 1024) as u32;
/// Allocation length for MODE SENSE (6) data, in bytes.
pub const MODE_SENSE_LEN: u8 = 192;
/// UNMAP parameter list length with one descriptor, in bytes.
pub const UNMAP_LIST_LEN: u16 = (list::HEADER_LEN + list::DESCRIPTOR_LEN) as u16;

/// Range of logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// First logical block address.
    pub lba: u64,
    /// Length in logical blocks.
    pub blocks: u32,
}

/// CDB length for READ and WRITE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CdbSize {
    /// READ (10) and WRITE (10), for units without (16) support: 2^32 blocks, max 65535 per
    /// command.
    Ten,
    /// READ (16) and WRITE (16).
    #[default]
    Sixteen,
}

impl BlockRange {
    /// Creates a CDB with the requested length for these blocks, using the opcode table.
    ///
    /// # Panics
    /// If the range doesn't fit into a 10-byte CDB.
    fn cdb_of(self, size: CdbSize, ten: &Opcode, sixteen: &Opcode) -> riser_scsi::cdb::Cdb {
        match size {
            CdbSize::Sixteen => self.cdb(sixteen),
            CdbSize::Ten => {
                let lba = u32::try_from(self.lba).expect("an address of 32 bits");
                let blocks = u16::try_from(self.blocks).expect("65535 blocks at most");
                ten.cdb()
                    .with(block_10::LOGICAL_BLOCK_ADDRESS, lba)
                    .with(block_10::TRANSFER_LENGTH, blocks)
            }
        }
    }

    /// Creates a 16-byte CDB for these blocks.
    fn cdb(self, row: &Opcode) -> riser_scsi::cdb::Cdb {
        row.cdb()
            .with(block_16::LOGICAL_BLOCK_ADDRESS, self.lba)
            .with(block_16::TRANSFER_LENGTH, self.blocks)
    }

    fn effect(self) -> Effect {
        Effect::Blocks {
            start: self.lba,
            end: self.end_lba(),
        }
    }

    /// First block after the range.
    fn end_lba(self) -> u64 {
        self.lba.saturating_add(self.blocks.into())
    }
}

/// Command for a logical unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Command descriptor block to send.
    pub cdb: Cdb,
    /// Data direction and length.
    pub len: DataLen,
    /// Changes made to the unit.
    pub effect: Effect,
}

impl Command {
    fn new(cdb: riser_scsi::cdb::Cdb, len: DataLen, effect: Effect) -> Self {
        Self {
            cdb: Cdb::new(cdb.as_bytes()).expect("a CDB of legal length"),
            len,
            effect,
        }
    }

    fn data_in(cdb: riser_scsi::cdb::Cdb, len: impl Into<u32>) -> Self {
        Self::new(cdb, DataLen::In(len.into()), Effect::None)
    }

    /// TEST UNIT READY, no data.
    #[must_use]
    pub fn test_unit_ready() -> Self {
        const ROW: &Opcode = Opcode::named("TEST UNIT READY");
        Self::new(ROW.cdb(), DataLen::None, Effect::None)
    }

    /// INQUIRY for standard data.
    #[must_use]
    pub fn inquiry() -> Self {
        Self::inquiry_of(None, INQUIRY_LEN)
    }

    /// INQUIRY for a vital product data page.
    #[must_use]
    pub fn vpd(page: u8) -> Self {
        Self::inquiry_of(Some(page), VPD_LEN)
    }

    /// INQUIRY for a VPD page or standard data, with allocation length in bytes.
    #[must_use]
    pub fn inquiry_of(page: Option<u8>, len: u16) -> Self {
        const ROW: &Opcode = Opcode::named("INQUIRY");
        let cdb = ROW
            .cdb()
            .with(inquiry::EVPD, page.is_some())
            .with(inquiry::PAGE_CODE, page.unwrap_or(0))
            .with(inquiry::ALLOCATION_LENGTH, len);
        Self::data_in(cdb, len)
    }

    /// REPORT LUNS for addressable units.
    #[must_use]
    pub fn report_luns() -> Self {
        const ROW: &Opcode = Opcode::named("REPORT LUNS");
        let cdb = ROW
            .cdb()
            .with(report_luns::ALLOCATION_LENGTH, REPORT_LUNS_LEN);
        Self::data_in(cdb, REPORT_LUNS_LEN)
    }

    /// READ CAPACITY (16) with all parameter data.
    #[must_use]
    pub fn read_capacity() -> Self {
        Self::read_capacity_of(CAPACITY_LEN)
    }

    /// READ CAPACITY (16) with allocation length in bytes.
    #[must_use]
    pub fn read_capacity_of(len: u32) -> Self {
        const ROW: &Opcode = Opcode::named("READ CAPACITY (16)");
        Self::data_in(
            ROW.cdb().with(read_capacity_16::ALLOCATION_LENGTH, len),
            len,
        )
    }

    /// READ CAPACITY (10), for units which don't support (16).
    #[must_use]
    pub fn read_capacity_10() -> Self {
        const ROW: &Opcode = Opcode::named("READ CAPACITY (10)");
        Self::data_in(ROW.cdb(), capacity_10::LEN as u32)
    }

    /// REPORT TARGET PORT GROUPS with allocation length in bytes.
    #[must_use]
    pub fn report_target_port_groups(len: u32) -> Self {
        const ROW: &Opcode = Opcode::named("REPORT TARGET PORT GROUPS");
        let cdb = ROW
            .cdb()
            .with(report_target_port_groups::ALLOCATION_LENGTH, len);
        Self::data_in(cdb, len)
    }

    /// MODE SENSE (6) for the caching page, block descriptors disabled.
    #[must_use]
    pub fn mode_sense_caching() -> Self {
        const ROW: &Opcode = Opcode::named("MODE SENSE (6)");
        let cdb = ROW
            .cdb()
            .with(mode_sense_6::DBD, true)
            .with(mode_sense_6::PAGE_CODE, mode::CACHING)
            .with(mode_sense_6::ALLOCATION_LENGTH, MODE_SENSE_LEN);
        Self::data_in(cdb, MODE_SENSE_LEN)
    }

    /// READ (16) for `len` bytes.
    #[must_use]
    pub fn read(range: BlockRange, len: u32) -> Self {
        Self::read_by(CdbSize::Sixteen, range, len)
    }

    /// READ for `len` bytes, using this CDB size.
    ///
    /// # Panics
    /// If the range doesn't fit into the CDB.
    #[must_use]
    pub fn read_by(size: CdbSize, range: BlockRange, len: u32) -> Self {
        const TEN: &Opcode = Opcode::named("READ (10)");
        const SIXTEEN: &Opcode = Opcode::named("READ (16)");
        let effect = Effect::Read {
            start: range.lba,
            end: range.end_lba(),
        };
        let cdb = range.cdb_of(size, TEN, SIXTEEN);
        Self::new(cdb, DataLen::In(len), effect)
    }

    /// READ (16) for zero blocks, used to check if the unit supports this command.
    #[must_use]
    pub fn read_nothing() -> Self {
        const ROW: &Opcode = Opcode::named("READ (16)");
        Self::new(ROW.cdb(), DataLen::None, Effect::None)
    }

    /// WRITE (16). If `fua` is set, data must be on the medium before the response.
    #[must_use]
    pub fn write(range: BlockRange, len: u32, fua: bool) -> Self {
        Self::write_by(CdbSize::Sixteen, range, len, fua)
    }

    /// WRITE using this CDB size. If `fua` is set, data must be on the medium before the response.
    ///
    /// # Panics
    /// If the range doesn't fit into the CDB.
    #[must_use]
    pub fn write_by(size: CdbSize, range: BlockRange, len: u32, fua: bool) -> Self {
        const TEN: &Opcode = Opcode::named("WRITE (10)");
        const SIXTEEN: &Opcode = Opcode::named("WRITE (16)");
        // The bit position is the same in both.
        let cdb = range.cdb_of(size, TEN, SIXTEEN).with(block_16::FUA, fua);
        Self::new(cdb, DataLen::Out(len), range.effect())
    }

    /// SYNCHRONIZE CACHE (10) for the whole medium, regardless of size. Linux and QEMU send this
    /// form, so targets are more likely to support it than the (16) form.
    #[must_use]
    pub fn synchronize_cache() -> Self {
        const ROW: &Opcode = Opcode::named("SYNCHRONIZE CACHE (10)");
        Self::new(ROW.cdb(), DataLen::None, Effect::Medium)
    }

    /// UNMAP with one descriptor; see [`unmap_list`] for the parameter list.
    #[must_use]
    pub fn unmap(range: BlockRange) -> Self {
        const ROW: &Opcode = Opcode::named("UNMAP");
        let cdb = ROW.cdb().with(unmap::PARAMETER_LIST_LENGTH, UNMAP_LIST_LEN);
        Self::new(cdb, DataLen::Out(UNMAP_LIST_LEN.into()), range.effect())
    }

    /// WRITE SAME (16) with a single block of `block_size` bytes. If `unmap` is set, the target may
    /// deallocate.
    #[must_use]
    pub fn write_same(range: BlockRange, block_size: u32, unmap: bool) -> Self {
        const ROW: &Opcode = Opcode::named("WRITE SAME (16)");
        let cdb = range.cdb(ROW).with(write_same_16::UNMAP, unmap);
        Self::new(cdb, DataLen::Out(block_size), range.effect())
    }

    /// GET LBA STATUS starting at `lba`, with allocation length in bytes.
    #[must_use]
    pub fn lba_status(lba: u64, len: u32) -> Self {
        const ROW: &Opcode = Opcode::named("GET LBA STATUS");
        let cdb = ROW
            .cdb()
            .with(get_lba_status::STARTING_LBA, lba)
            .with(get_lba_status::ALLOCATION_LENGTH, len);
        Self {
            effect: Effect::Read {
                start: lba,
                end: u64::MAX,
            },
            ..Self::data_in(cdb, len)
        }
    }

    /// Any other command. The effect is based on the opcode table: we never retry a command unless
    /// we know it doesn't change anything, and a command which reads blocks might read any block.
    #[must_use]
    pub fn raw(cdb: Cdb, len: DataLen) -> Self {
        const LBA_STATUS: &Opcode = Opcode::named("GET LBA STATUS");
        let row = Opcode::sent(cdb.as_bytes());
        let reads = matches!(row.kind, Kind::Read | Kind::Compare) || row.is(LBA_STATUS);
        let effect = match row.changes_nothing() {
            true if reads => Effect::Read {
                start: 0,
                end: u64::MAX,
            },
            true => Effect::None,
            false => Effect::Other,
        };
        Self { cdb, len, effect }
    }
}

/// UNMAP parameter list with one descriptor (SBC-3 clause 5.28).
#[must_use]
pub fn unmap_list(range: BlockRange) -> [u8; UNMAP_LIST_LEN as usize] {
    list::encode_one(range.lba, range.blocks)
}

/// ASCII string from a target, padding removed; non-printable characters are replaced by `?`.
fn text(bytes: &[u8]) -> String {
    let printable = |&b: &u8| {
        if (0x20..0x7f).contains(&b) {
            b as char
        } else {
            '?'
        }
    };
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    let text: String = bytes[..end].iter().map(printable).collect();
    text.trim().to_owned()
}

/// Standard INQUIRY data (SPC-4 clause 6.6.2).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inquiry {
    /// PERIPHERAL QUALIFIER: 0 if a unit is connected.
    pub qualifier: u8,
    /// PERIPHERAL DEVICE TYPE: 0 for a direct-access block device.
    pub device_type: u8,
    /// T10 VENDOR IDENTIFICATION, padding removed.
    pub vendor: String,
    /// PRODUCT IDENTIFICATION, padding removed.
    pub product: String,
    /// PRODUCT REVISION LEVEL, padding removed.
    pub revision: String,
}

impl Inquiry {
    /// Parses received data; returns `None` if there are less than 36 bytes.
    #[must_use]
    pub fn parse(data: &[u8]) -> Option<Self> {
        use standard::{PERIPHERAL_DEVICE_TYPE, PERIPHERAL_QUALIFIER, PRODUCT, REVISION, VENDOR};
        Some(Self {
            qualifier: PERIPHERAL_QUALIFIER.get(data)?,
            device_type: PERIPHERAL_DEVICE_TYPE.get(data)?,
            vendor: text(VENDOR.get(data)?),
            product: text(PRODUCT.get(data)?),
            revision: text(REVISION.get(data)?),
        })
    }

    /// Returns whether this is a connected direct-access block device.
    #[must_use]
    pub fn is_disk(&self) -> bool {
        self.qualifier == 0 && self.device_type == standard::TYPE_DISK
    }
}

/// Capacity (SBC-3 clause 5.16.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Number of logical blocks.
    pub blocks: u64,
    /// Logical block size in bytes: a power of two from 512 to 64 KiB.
    pub block_size: u32,
    /// Logical blocks per physical block, as a power of two.
    pub physical_exponent: u8,
    /// LBPME: logical blocks can be deallocated.
    pub provisioning: bool,
    /// LBPRZ: deallocated blocks are read as zeroes.
    pub reads_zeroes: bool,
}

/// Error for an unusable capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CapacityError {
    /// READ CAPACITY data is truncated before the block length.
    #[error("READ CAPACITY data of {0} bytes")]
    Short(usize),
    /// Not a power of two from 512 to 65536.
    #[error("block length of {0} bytes")]
    BlockSize(u32),
    /// File and NBD export offsets are limited to 63 bits.
    #[error(
        "capacity of {last_lba:#x} + 1 blocks of {block_size} bytes: the limit is 2^63 - 1 bytes"
    )]
    TooLarge {
        /// Last block address.
        last_lba: u64,
        /// Block size in bytes.
        block_size: u32,
    },
}

impl Capacity {
    /// Parses READ CAPACITY (16) data.
    ///
    /// # Errors
    /// Returns [`CapacityError`] if the capacity is not usable.
    pub fn parse(data: &[u8]) -> Result<Self, CapacityError> {
        use capacity_16::{BLOCK_LENGTH, LAST_LBA, LBPME, LBPRZ, PHYSICAL_EXPONENT};
        let sizes = LAST_LBA.get(data).zip(BLOCK_LENGTH.get(data));
        let (last_lba, block_size) = sizes.ok_or(CapacityError::Short(data.len()))?;
        Ok(Self {
            physical_exponent: PHYSICAL_EXPONENT.get(data).unwrap_or(0),
            provisioning: LBPME.get(data) == Some(true),
            reads_zeroes: LBPRZ.get(data) == Some(true),
            ..Self::new(last_lba, block_size)?
        })
    }

    /// Parses READ CAPACITY (10) data. FFFFFFFFh indicates that READ CAPACITY (16) must be used
    /// instead.
    ///
    /// # Errors
    /// Returns [`CapacityError`] if the capacity is not usable.
    pub fn parse_10(data: &[u8]) -> Result<Self, CapacityError> {
        use capacity_10::{BLOCK_LENGTH, LAST_LBA};
        let sizes = LAST_LBA.get(data).zip(BLOCK_LENGTH.get(data));
        let (last_lba, block_size) = sizes.ok_or(CapacityError::Short(data.len()))?;
        match last_lba {
            u32::MAX => Err(CapacityError::TooLarge {
                last_lba: last_lba.into(),
                block_size,
            }),
            _ => Self::new(last_lba.into(), block_size),
        }
    }

    fn new(last_lba: u64, block_size: u32) -> Result<Self, CapacityError> {
        if !block_size.is_power_of_two() || !(512..=65536).contains(&block_size) {
            return Err(CapacityError::BlockSize(block_size));
        }
        let too_large = CapacityError::TooLarge {
            last_lba,
            block_size,
        };
        let blocks = last_lba.checked_add(1).ok_or(too_large)?;
        let bytes = blocks.checked_mul(block_size.into());
        if bytes.is_none_or(|bytes| i64::try_from(bytes).is_err()) {
            return Err(too_large);
        }
        Ok(Self {
            blocks,
            block_size,
            physical_exponent: 0,
            provisioning: false,
            reads_zeroes: false,
        })
    }
}

/// Block Limits page, B0h (SBC-3 clause 6.6). Zero means that there is no reported limit, or that
/// the operation is not supported, depending on the field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockLimits {
    /// MAXIMUM TRANSFER LENGTH, in blocks.
    pub max_transfer: u32,
    /// OPTIMAL TRANSFER LENGTH, in blocks.
    pub optimal_transfer: u32,
    /// MAXIMUM UNMAP LBA COUNT.
    pub max_unmap: u32,
    /// OPTIMAL UNMAP GRANULARITY, in blocks.
    pub unmap_granularity: u32,
    /// MAXIMUM WRITE SAME LENGTH, in blocks.
    pub max_write_same: u64,
}

impl BlockLimits {
    /// Parses the page; fields which were not received are set to zero.
    #[must_use]
    pub fn parse(page: &[u8]) -> Self {
        use block_limits as field;
        let blocks = |field: Field<u32>| field.get(page).unwrap_or(0);
        Self {
            max_transfer: blocks(field::MAXIMUM_TRANSFER_LENGTH),
            optimal_transfer: blocks(field::OPTIMAL_TRANSFER_LENGTH),
            max_unmap: blocks(field::MAXIMUM_UNMAP_LBA_COUNT),
            unmap_granularity: blocks(field::OPTIMAL_UNMAP_GRANULARITY),
            max_write_same: field::MAXIMUM_WRITE_SAME_LENGTH.get(page).unwrap_or(0),
        }
    }
}

/// Logical Block Provisioning page, B2h (SBC-3 clause 6.6.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Provisioning {
    /// LBPU: UNMAP is supported.
    pub unmap: bool,
    /// LBPWS: WRITE SAME (16) with UNMAP is supported.
    pub write_same: bool,
}

impl Provisioning {
    /// Parses the Logical Block Provisioning page.
    #[must_use]
    pub fn parse(page: &[u8]) -> Self {
        Self {
            unmap: provisioning::LBPU.get(page) == Some(true),
            write_same: provisioning::LBPWS.get(page) == Some(true),
        }
    }
}

/// Logical unit identity (pages 80h and 83h, SPC-4 clause 7.8).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Unit serial number (page 80h).
    pub serial: Option<String>,
    /// NAA designator, in hex.
    pub naa: Option<String>,
    /// EUI-64 designator, in hex.
    pub eui: Option<String>,
    /// T10 vendor identification designator.
    pub t10: Option<String>,
    /// SCSI name string (page 83h).
    pub name: Option<String>,
}

impl Identity {
    fn names(&self) -> [&Option<String>; 5] {
        [&self.serial, &self.naa, &self.eui, &self.t10, &self.name]
    }

    /// Returns whether all names in `self` match `whole`; names may be missing.
    #[must_use]
    pub fn is_part_of(&self, whole: &Self) -> bool {
        let mut pairs = self.names().into_iter().zip(whole.names());
        self != whole && pairs.all(|(own, other)| own.is_none() || own == other)
    }

    /// Parses the page 80h and 83h bodies, if available.
    #[must_use]
    pub fn parse(serial: Option<&[u8]>, designators: Option<&[u8]>) -> Self {
        let mut identity = Self {
            serial: serial.map(text).filter(|s| !s.is_empty()),
            ..Self::default()
        };
        for one in designator::parse(designators.unwrap_or(&[])) {
            // Only use designators for the logical unit itself.
            if one.association == LOGICAL_UNIT && one.is_whole {
                identity.add_designator(one.kind, one.id);
            }
        }
        identity
    }

    fn add_designator(&mut self, kind: u8, id: &[u8]) {
        let hex = || id.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let (field, value) = match kind {
            T10_VENDOR => (&mut self.t10, text(id)),
            EUI_64 => (&mut self.eui, hex()),
            NAA => (&mut self.naa, hex()),
            SCSI_NAME_STRING => (&mut self.name, text(id)),
            _ => return,
        };
        field.get_or_insert(value);
    }
}

/// MODE SENSE (6) response for caching (SBC-3 6.5) and medium state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachingPage {
    /// WCE: completed writes may still be in a volatile cache.
    pub write_cache: bool,
    /// DPOFUA: writes can use the FUA bit. If not set, the unit rejects or ignores the bit.
    pub has_fua: bool,
    /// WP: writes will be rejected.
    pub write_protected: bool,
}

impl CachingPage {
    /// Parses mode parameter data; returns `None` if it is too short. If the page is missing, there
    /// is no cache.
    #[must_use]
    pub fn parse(data: &[u8]) -> Option<Self> {
        let write_protected = mode::header_6::WP.get(data)?;
        let descriptors = mode::header_6::BLOCK_DESCRIPTOR_LENGTH.get(data)?;
        let page = data.get(mode::header_6::LEN + usize::from(descriptors)..);
        let caching = page.filter(|page| mode::PAGE_CODE.get(page) == Some(mode::CACHING));
        Some(Self {
            write_cache: caching.and_then(|page| mode::caching::WCE.get(page)) == Some(true),
            has_fua: mode::header_6::DPOFUA.get(data) == Some(true),
            write_protected,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RANGE: BlockRange = BlockRange {
        lba: 0x0102_0304_0506_0708,
        blocks: 0x090a_0b0c,
    };

    const SHORT: BlockRange = BlockRange {
        lba: 0x0102_0304,
        blocks: 0x0506,
    };

    #[test]
    fn cdbs_match_standard() {
        #[rustfmt::skip]
        let cases: [(Command, &[u8]); 14] = [
            (Command::test_unit_ready(), &[0, 0, 0, 0, 0, 0]),
            (Command::inquiry(), &[0x12, 0, 0, 0, 96, 0]),
            (Command::vpd(0xb0), &[0x12, 1, 0xb0, 4, 0, 0]),
            (Command::report_luns(), &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0x20, 8, 0, 0]),
            (Command::read(RANGE, 512), &[0x88, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0]),
            (Command::write(RANGE, 512, true), &[0x8a, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0]),
            (Command::write_same(RANGE, 512, true), &[0x93, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0]),
            (Command::unmap(RANGE), &[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0]),
            (Command::read_capacity(), &[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0]),
            (Command::synchronize_cache(), &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            (Command::read_capacity_10(), &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            (Command::read_nothing(), &[0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            (Command::read_by(CdbSize::Ten, SHORT, 512), &[0x28, 0, 1, 2, 3, 4, 0, 5, 6, 0]),
            (Command::write_by(CdbSize::Ten, SHORT, 512, true), &[0x2a, 8, 1, 2, 3, 4, 0, 5, 6, 0]),
        ];
        for (command, cdb) in cases {
            assert_eq!(command.cdb.as_bytes(), cdb);
        }
        assert_eq!(
            unmap_list(RANGE),
            [
                0, 22, 0, 16, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0, 0, 0
            ]
        );
    }

    #[test]
    fn effects_determine_replayable_commands() {
        assert!(!Command::read(RANGE, 512).effect.is_change());
        let write = |lba, blocks| Command::write(BlockRange { lba, blocks }, 512, false).effect;
        assert!(write(0, 8).conflicts(write(7, 1)));
        assert!(!write(0, 8).conflicts(write(8, 1)));
        assert!(write(0, 8).conflicts(Command::synchronize_cache().effect));
        let raw = |bytes: &[u8]| Command::raw(Cdb::new(bytes).unwrap(), DataLen::None).effect;
        assert_eq!(raw(&[0x12, 0, 0, 0, 0, 0]), Effect::None);
        let status = Command::lba_status(0, 24);
        for reading in [raw(&[0x28, 0]), raw(status.cdb.as_bytes()), status.effect] {
            assert!(Effect::Other.is_seen_by(reading), "{reading:?}");
        }
        assert_eq!(raw(&[0x9e, 0x10]), Effect::None);
        assert_eq!(raw(&[0x5f, 0]), Effect::Other, "PERSISTENT RESERVE OUT");
        assert_eq!(raw(&[0x89, 0]), Effect::Other, "COMPARE AND WRITE");
        assert_eq!(raw(&[0x2a, 0]), Effect::Other);
    }

    #[test]
    fn target_strings_are_made_printable() {
        let mut data = [b' '; 36];
        data[0] = 0;
        data[8..16].copy_from_slice(b"RI\x1b[31m\0");
        data[16..21].copy_from_slice(b"disk\x7f");
        let inquiry = Inquiry::parse(&data).unwrap();
        assert_eq!(
            (inquiry.vendor.as_str(), inquiry.product.as_str()),
            ("RI?[31m", "disk?")
        );
        assert!(inquiry.is_disk());
        assert!(Inquiry::parse(&data[..35]).is_none());
    }

    #[test]
    fn impossible_capacities_are_rejected() {
        let data = |last: u64, size: u32| {
            let mut data = [0; 32];
            data[..8].copy_from_slice(&last.to_be_bytes());
            data[8..12].copy_from_slice(&size.to_be_bytes());
            (data[13], data[14]) = (3, 0xc0);
            data
        };
        let capacity = Capacity::parse(&data(0xff, 512)).unwrap();
        assert_eq!((capacity.blocks, capacity.block_size), (256, 512));
        assert!(capacity.provisioning && capacity.reads_zeroes);
        assert_eq!(capacity.physical_exponent, 3);
        // 2^63 bytes.
        for last_lba in [(1 << 54) - 1, u64::MAX - 1, u64::MAX] {
            let refused = Capacity::parse(&data(last_lba, 512)).unwrap_err();
            assert!(matches!(refused, CapacityError::TooLarge { .. }));
        }
        assert!(Capacity::parse(&data((1 << 54) - 2, 512)).is_ok());
        for size in [0, 513, 1 << 31] {
            let refused = Capacity::parse(&data(0xff, size));
            assert_eq!(refused, Err(CapacityError::BlockSize(size)));
        }
        assert_eq!(Capacity::parse(&[0; 11]), Err(CapacityError::Short(11)));
        let short = |last: u32| [last.to_be_bytes(), [0, 0, 2, 0]].concat();
        assert_eq!(Capacity::parse_10(&short(0xff)).unwrap().blocks, 256);
        let refused = Capacity::parse_10(&short(u32::MAX)).unwrap_err();
        assert!(matches!(refused, CapacityError::TooLarge { .. }));
    }

    #[test]
    fn identity_only_uses_unit_designators() {
        #[rustfmt::skip]
        let page = [
            1, 0x13, 0, 2, 9, 9,             // NAA of the target port
            1, 0x03, 0, 4, 0x60, 1, 2, 0xff, // NAA of the logical unit
            2, 0x01, 0, 5, b'R', b'i', b's', 0, 0,
            1, 0x02, 0, 200, 1,              // beyond the end
        ];
        let identity = Identity::parse(Some(b"  S1  "), Some(&page));
        assert_eq!(identity.naa.as_deref(), Some("600102ff"));
        assert_eq!(identity.t10.as_deref(), Some("Ris"));
        assert_eq!(
            (identity.serial.as_deref(), identity.eui),
            (Some("S1"), None)
        );
    }

    #[test]
    fn mode_data_contains_cache_and_protection() {
        let caching = CachingPage::parse(&[20, 0, 0x80, 0, 8, 18, 4, 0]).unwrap();
        assert!(caching.write_cache && caching.write_protected && !caching.has_fua);
        let without_cache = CachingPage::parse(&[3, 0, 0x10, 0]).unwrap();
        assert!(without_cache.has_fua && !without_cache.write_cache);
    }

    proptest! {
        #[test]
        fn arbitrary_target_data_never_panics(data: Vec<u8>) {
            let _ = Inquiry::parse(&data);
            let _ = Capacity::parse(&data);
            let _ = Capacity::parse_10(&data);
            let _ = BlockLimits::parse(&data);
            let _ = Provisioning::parse(&data);
            let _ = Identity::parse(Some(&data), Some(&data));
            let _ = CachingPage::parse(&data);
            let _ = luns::parse(&data);
            let _ = riser_scsi::data::lba_status::parse(&data);
            let _ = riser_scsi::data::vpd::body(&data, 0x83);
        }
    }
}
