//! Commands: [`Command`].

use riser_scsi::data::capacity::{capacity_10, capacity_16};
use riser_scsi::data::cdb::{
    block_10, block_16, block_32, get_lba_status, inquiry, mode_sense_6, read_capacity_16,
    report_luns, report_target_port_groups, unmap, write_same_16,
};
use riser_scsi::data::{inquiry as standard, luns, mode, unmap as list};
use riser_scsi::opcode::{Kind, Opcode};

use crate::request::{Cdb, DataLen, Effect};

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
    /// READ (32) and WRITE (32), with the LBA as the expected reference tag and no expected
    /// application tag. Required to transfer protection information of type 2.
    ThirtyTwo,
}

/// Fields of READ and WRITE apart from the range.
#[derive(Clone, Copy, Debug, Default)]
struct TransferFlags {
    fua: bool,
    /// Value of RDPROTECT or WRPROTECT.
    protect: u8,
}

/// RDPROTECT or WRPROTECT: protection information is transferred and checked (SBC-4 4.21).
const PROTECT: u8 = 1;

impl BlockRange {
    /// Creates a CDB with the requested length for these blocks, using the opcode table. `rows` are
    /// the commands by increasing length.
    ///
    /// # Panics
    /// If the range doesn't fit into a 10-byte CDB.
    fn cdb_of(
        self,
        size: CdbSize,
        [ten, sixteen, thirty_two]: [&Opcode; 3],
        flags: TransferFlags,
    ) -> riser_scsi::cdb::Cdb {
        let short = match size {
            CdbSize::ThirtyTwo => return self.cdb_32(thirty_two, flags),
            CdbSize::Sixteen => self.cdb(sixteen),
            CdbSize::Ten => {
                let lba = u32::try_from(self.lba).expect("an address of 32 bits");
                let blocks = u16::try_from(self.blocks).expect("65535 blocks at most");
                ten.cdb()
                    .with(block_10::LOGICAL_BLOCK_ADDRESS, lba)
                    .with(block_10::TRANSFER_LENGTH, blocks)
            }
        };
        // The bit positions are the same in both.
        short
            .with(block_16::FUA, flags.fua)
            .with(block_16::PROTECT, flags.protect)
    }

    /// Creates a 32-byte CDB for these blocks. The mask of the application tag is 0.
    fn cdb_32(self, row: &Opcode, flags: TransferFlags) -> riser_scsi::cdb::Cdb {
        row.cdb()
            .with(block_32::FUA, flags.fua)
            .with(block_32::PROTECT, flags.protect)
            .with(block_32::LOGICAL_BLOCK_ADDRESS, self.lba)
            .with(block_32::EXPECTED_REFERENCE_TAG, self.lba as u32)
            .with(block_32::TRANSFER_LENGTH, self.blocks)
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
        Self::mode_sense(mode::CACHING)
    }

    /// MODE SENSE (6) for a page, block descriptors disabled.
    #[must_use]
    pub fn mode_sense(page: u8) -> Self {
        const ROW: &Opcode = Opcode::named("MODE SENSE (6)");
        let cdb = ROW
            .cdb()
            .with(mode_sense_6::DBD, true)
            .with(mode_sense_6::PAGE_CODE, page)
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
        Self::read_with(size, range, len, TransferFlags::default())
    }

    /// READ with protection information: `len` bytes are blocks with their tuples, which the target
    /// also checks.
    ///
    /// # Panics
    /// If the range doesn't fit into the CDB.
    #[must_use]
    pub fn read_protected(size: CdbSize, range: BlockRange, len: u32) -> Self {
        let flags = TransferFlags {
            fua: false,
            protect: PROTECT,
        };
        Self::read_with(size, range, len, flags)
    }

    fn read_with(size: CdbSize, range: BlockRange, len: u32, flags: TransferFlags) -> Self {
        const ROWS: [&Opcode; 3] = [
            Opcode::named("READ (10)"),
            Opcode::named("READ (16)"),
            Opcode::named("READ (32)"),
        ];
        let effect = Effect::Read {
            start: range.lba,
            end: range.end_lba(),
        };
        Self::new(range.cdb_of(size, ROWS, flags), DataLen::In(len), effect)
    }

    /// READ with protection information for zero blocks, used to check if the unit supports it.
    #[must_use]
    pub fn read_nothing_protected(size: CdbSize) -> Self {
        let nothing = BlockRange { lba: 0, blocks: 0 };
        Self {
            len: DataLen::None,
            effect: Effect::None,
            ..Self::read_protected(size, nothing, 0)
        }
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
        Self::write_with(size, range, len, TransferFlags { fua, protect: 0 })
    }

    /// WRITE with protection information: `len` bytes are blocks with their tuples, which the target
    /// also checks.
    ///
    /// # Panics
    /// If the range doesn't fit into the CDB.
    #[must_use]
    pub fn write_protected(size: CdbSize, range: BlockRange, len: u32, fua: bool) -> Self {
        let flags = TransferFlags {
            fua,
            protect: PROTECT,
        };
        Self::write_with(size, range, len, flags)
    }

    fn write_with(size: CdbSize, range: BlockRange, len: u32, flags: TransferFlags) -> Self {
        const ROWS: [&Opcode; 3] = [
            Opcode::named("WRITE (10)"),
            Opcode::named("WRITE (16)"),
            Opcode::named("WRITE (32)"),
        ];
        let cdb = range.cdb_of(size, ROWS, flags);
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
