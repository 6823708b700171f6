//! The commands that a block initiator sends, and what their answers say.
//!
//! - [`Command`]: a CDB with the direction and length of its data and its effect, one constructor
//!   for each command.
//! - [`Inquiry`], [`Capacity`], [`BlockLimits`], [`Provisioning`], [`Identity`], [`CachingPage`]:
//!   parameter data, read with the received length as the only authority. Strings from a target are
//!   made printable here, since they reach terminals and logs.
//!
//! Blocks are the logical unit's own; lengths are bytes unless a name says otherwise. Clauses are
//! those of SPC-4 and SBC-3.

#![forbid(unsafe_code)]

use riser_scsi::lun::{LunAddress, LunId};

use crate::request::Effect;
use crate::request::{Cdb, DataLen};

/// Standard INQUIRY data that we ask for, in bytes.
pub const INQUIRY_LEN: u16 = 96;
/// Vital product data that we ask for, in bytes.
pub const VPD_LEN: u16 = 1024;
/// READ CAPACITY (16) data, in bytes.
pub const CAPACITY_LEN: u32 = 32;
/// REPORT LUNS data that we ask for: 1024 logical units.
pub const REPORT_LUNS_LEN: u32 = 8 + 8 * 1024;
/// MODE SENSE (6) data that we ask for, in bytes.
pub const MODE_SENSE_LEN: u8 = 192;
/// UNMAP parameter list with one descriptor, in bytes.
pub const UNMAP_LIST_LEN: u16 = 24;

/// A run of logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// First logical block address.
    pub lba: u64,
    /// Number of blocks.
    pub blocks: u32,
}

impl BlockRange {
    fn effect(self) -> Effect {
        Effect::Blocks {
            start: self.lba,
            end: self.lba.saturating_add(self.blocks.into()),
        }
    }
}

/// A command to send to a logical unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Command descriptor block.
    pub cdb: Cdb,
    /// Direction and length of the data.
    pub len: DataLen,
    /// What it changes.
    pub effect: Effect,
}

impl Command {
    fn new(cdb: &[u8], len: DataLen, effect: Effect) -> Self {
        Self {
            cdb: Cdb::new(cdb).expect("a CDB of legal length"),
            len,
            effect,
        }
    }

    /// TEST UNIT READY.
    #[must_use]
    pub fn test_unit_ready() -> Self {
        Self::new(&[0; 6], DataLen::None, Effect::None)
    }

    /// INQUIRY, standard data.
    #[must_use]
    pub fn inquiry() -> Self {
        let [high, low] = INQUIRY_LEN.to_be_bytes();
        let cdb = [0x12, 0, 0, high, low, 0];
        Self::new(&cdb, DataLen::In(INQUIRY_LEN.into()), Effect::None)
    }

    /// INQUIRY, a page of vital product data.
    #[must_use]
    pub fn vpd(page: u8) -> Self {
        let [high, low] = VPD_LEN.to_be_bytes();
        let cdb = [0x12, 1, page, high, low, 0];
        Self::new(&cdb, DataLen::In(VPD_LEN.into()), Effect::None)
    }

    /// REPORT LUNS, the addressable ones.
    #[must_use]
    pub fn report_luns() -> Self {
        let mut cdb = [0; 12];
        cdb[0] = 0xa0;
        cdb[6..10].copy_from_slice(&REPORT_LUNS_LEN.to_be_bytes());
        Self::new(&cdb, DataLen::In(REPORT_LUNS_LEN), Effect::None)
    }

    /// READ CAPACITY (16).
    #[must_use]
    pub fn read_capacity() -> Self {
        let mut cdb = [0; 16];
        (cdb[0], cdb[1]) = (0x9e, 0x10);
        cdb[10..14].copy_from_slice(&CAPACITY_LEN.to_be_bytes());
        Self::new(&cdb, DataLen::In(CAPACITY_LEN), Effect::None)
    }

    /// MODE SENSE (6), the caching page without block descriptors.
    #[must_use]
    pub fn mode_sense_caching() -> Self {
        let cdb = [0x1a, 0x08, 0x08, 0, MODE_SENSE_LEN, 0];
        Self::new(&cdb, DataLen::In(MODE_SENSE_LEN.into()), Effect::None)
    }

    /// READ (16).
    #[must_use]
    pub fn read(range: BlockRange, len: u32) -> Self {
        let cdb = block_cdb(0x88, 0, range);
        Self::new(&cdb, DataLen::In(len), Effect::None)
    }

    /// WRITE (16); with `fua` the data are on the medium when it is answered.
    #[must_use]
    pub fn write(range: BlockRange, len: u32, fua: bool) -> Self {
        let cdb = block_cdb(0x8a, u8::from(fua) << 3, range);
        Self::new(&cdb, DataLen::Out(len), range.effect())
    }

    /// SYNCHRONIZE CACHE (16) of the whole medium.
    #[must_use]
    pub fn synchronize_cache() -> Self {
        let mut cdb = [0; 16];
        cdb[0] = 0x91;
        Self::new(&cdb, DataLen::None, Effect::Medium)
    }

    /// UNMAP with one descriptor; the parameter list is [`unmap_list`]'s.
    #[must_use]
    pub fn unmap(range: BlockRange) -> Self {
        let mut cdb = [0; 10];
        cdb[0] = 0x42;
        cdb[7..9].copy_from_slice(&UNMAP_LIST_LEN.to_be_bytes());
        Self::new(&cdb, DataLen::Out(UNMAP_LIST_LEN.into()), range.effect())
    }

    /// WRITE SAME (16) of one block of `block_size` bytes; with `unmap` the target may deallocate.
    #[must_use]
    pub fn write_same(range: BlockRange, block_size: u32, unmap: bool) -> Self {
        let cdb = block_cdb(0x93, u8::from(unmap) << 3, range);
        Self::new(&cdb, DataLen::Out(block_size), range.effect())
    }

    /// GET LBA STATUS from a block on, with an allocation length in bytes.
    #[must_use]
    pub fn lba_status(lba: u64, len: u32) -> Self {
        let mut cdb = [0; 16];
        (cdb[0], cdb[1]) = (0x9e, 0x12);
        cdb[2..10].copy_from_slice(&lba.to_be_bytes());
        cdb[10..14].copy_from_slice(&len.to_be_bytes());
        Self::new(&cdb, DataLen::In(len), Effect::None)
    }

    /// Any other command. What it changes is taken from its operation code: a command that is not
    /// known to change nothing is never sent twice.
    #[must_use]
    pub fn raw(cdb: Cdb, len: DataLen) -> Self {
        let service_action = cdb.as_bytes().get(1).map_or(0, |b| b & 0x1f);
        let effect = match (cdb.opcode(), service_action) {
            (
                0x00 | 0x03 | 0x08 | 0x12 | 0x1a | 0x25 | 0x28 | 0x34 | 0x5a | 0x88 | 0xa0 | 0xa8,
                _,
            )
            | (0x9e, 0x10 | 0x12)
            | (0xa3, 0x05 | 0x0a | 0x0c | 0x0d) => Effect::None,
            _ => Effect::Other,
        };
        Self { cdb, len, effect }
    }
}

/// A CDB of sixteen bytes: operation code, flags, LBA in bytes 2-9, blocks in bytes 10-13.
fn block_cdb(opcode: u8, flags: u8, range: BlockRange) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (opcode, flags);
    cdb[2..10].copy_from_slice(&range.lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&range.blocks.to_be_bytes());
    cdb
}

/// UNMAP parameter list of one descriptor (SBC-3 clause 5.28).
#[must_use]
pub fn unmap_list(range: BlockRange) -> [u8; UNMAP_LIST_LEN as usize] {
    let mut list = [0; UNMAP_LIST_LEN as usize];
    list[0..2].copy_from_slice(&(UNMAP_LIST_LEN - 2).to_be_bytes());
    list[2..4].copy_from_slice(&(UNMAP_LIST_LEN - 8).to_be_bytes());
    list[8..16].copy_from_slice(&range.lba.to_be_bytes());
    list[16..20].copy_from_slice(&range.blocks.to_be_bytes());
    list
}

fn be16(data: &[u8], at: usize) -> Option<u16> {
    let bytes = data.get(at..at.checked_add(2)?)?;
    Some(u16::from_be_bytes(bytes.try_into().ok()?))
}

fn be32(data: &[u8], at: usize) -> Option<u32> {
    let bytes = data.get(at..at.checked_add(4)?)?;
    Some(u32::from_be_bytes(bytes.try_into().ok()?))
}

fn be64(data: &[u8], at: usize) -> Option<u64> {
    let bytes = data.get(at..at.checked_add(8)?)?;
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}

/// ASCII of a target, without padding; what is not printable becomes `?`.
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
    /// PERIPHERAL QUALIFIER: 0 where a unit is connected.
    pub qualifier: u8,
    /// PERIPHERAL DEVICE TYPE: 0 is a direct-access block device.
    pub device_type: u8,
    /// T10 VENDOR IDENTIFICATION.
    pub vendor: String,
    /// PRODUCT IDENTIFICATION.
    pub product: String,
    /// PRODUCT REVISION LEVEL.
    pub revision: String,
}

impl Inquiry {
    /// Reads what was received; `None` if that is less than 36 bytes.
    #[must_use]
    pub fn parse(data: &[u8]) -> Option<Self> {
        let data = data.get(..36)?;
        Some(Self {
            qualifier: data[0] >> 5,
            device_type: data[0] & 0x1f,
            vendor: text(&data[8..16]),
            product: text(&data[16..32]),
            revision: text(&data[32..36]),
        })
    }

    /// Whether it is a direct-access block device that is there.
    #[must_use]
    pub fn is_disk(&self) -> bool {
        self.qualifier == 0 && self.device_type == 0
    }
}

/// The body of a vital product data page, cut to its declared length; `None` if it is another page
/// or too short.
#[must_use]
pub fn vpd_body(data: &[u8], page: u8) -> Option<&[u8]> {
    (*data.get(1)? == page).then_some(())?;
    let declared = usize::from(be16(data, 2)?);
    let body = data.get(4..)?;
    Some(&body[..declared.min(body.len())])
}

/// Capacity (SBC-3 clause 5.16.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Number of logical blocks.
    pub blocks: u64,
    /// Length of a logical block, in bytes: a power of two from 512 to 64 KiB.
    pub block_size: u32,
    /// Logical blocks per physical block, as a power of two.
    pub physical_exponent: u8,
    /// LBPME: logical blocks can be deallocated.
    pub provisioning: bool,
    /// LBPRZ: deallocated blocks read as zeroes.
    pub reads_zeroes: bool,
}

impl Capacity {
    /// Reads READ CAPACITY (16) data; `None` where it is short, or its sizes cannot be worked with.
    #[must_use]
    pub fn parse(data: &[u8]) -> Option<Self> {
        let blocks = be64(data, 0)?.checked_add(1)?;
        let block_size = be32(data, 8)?;
        let legal = block_size.is_power_of_two() && (512..=65536).contains(&block_size);
        // The size in bytes must be a number that 64 bits hold.
        blocks.checked_mul(block_size.into())?;
        legal.then_some(())?;
        let flags = data.get(14).copied().unwrap_or(0);
        Some(Self {
            blocks,
            block_size,
            physical_exponent: data.get(13).copied().unwrap_or(0) & 0x0f,
            provisioning: flags & 0x80 != 0,
            reads_zeroes: flags & 0x40 != 0,
        })
    }
}

/// Block Limits page, B0h (SBC-3 clause 6.5.3). Zero means that no limit is reported, or that the
/// operation is not supported, as the standard says for each field.
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
    /// Reads the page's body; fields that were not received are zero.
    #[must_use]
    pub fn parse(body: &[u8]) -> Self {
        Self {
            max_transfer: be32(body, 4).unwrap_or(0),
            optimal_transfer: be32(body, 8).unwrap_or(0),
            max_unmap: be32(body, 16).unwrap_or(0),
            unmap_granularity: be32(body, 24).unwrap_or(0),
            max_write_same: be64(body, 32).unwrap_or(0),
        }
    }
}

/// Logical Block Provisioning page, B2h (SBC-3 clause 6.5.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Provisioning {
    /// LBPU: UNMAP is supported.
    pub unmap: bool,
    /// LBPWS: WRITE SAME (16) with UNMAP is supported.
    pub write_same: bool,
}

impl Provisioning {
    /// Reads the page's body.
    #[must_use]
    pub fn parse(body: &[u8]) -> Self {
        let flags = body.get(1).copied().unwrap_or(0);
        Self {
            unmap: flags & 0x80 != 0,
            write_same: flags & 0x40 != 0,
        }
    }
}

/// What identifies a logical unit (pages 80h and 83h, SPC-4 clauses 7.8.5 and 7.8.15).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Unit serial number.
    pub serial: Option<String>,
    /// NAA designator, in hexadecimal.
    pub naa: Option<String>,
    /// EUI-64 designator, in hexadecimal.
    pub eui: Option<String>,
    /// T10 vendor identification designator.
    pub t10: Option<String>,
    /// SCSI name string.
    pub name: Option<String>,
}

impl Identity {
    /// Reads the bodies of pages 80h and 83h, as far as there are any.
    #[must_use]
    pub fn parse(serial: Option<&[u8]>, designators: Option<&[u8]>) -> Self {
        let mut identity = Self {
            serial: serial.map(text).filter(|s| !s.is_empty()),
            ..Self::default()
        };
        let mut rest = designators.unwrap_or(&[]);
        while let [_, kind, _, len, tail @ ..] = rest {
            let Some(id) = tail.get(..usize::from(*len)) else {
                break;
            };
            rest = &tail[usize::from(*len)..];
            // Only designators of the logical unit itself.
            if *kind & 0x30 == 0 {
                identity.take(*kind & 0x0f, id);
            }
        }
        identity
    }

    fn take(&mut self, kind: u8, id: &[u8]) {
        let hex = || id.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let (field, value) = match kind {
            1 => (&mut self.t10, text(id)),
            2 => (&mut self.eui, hex()),
            3 => (&mut self.naa, hex()),
            8 => (&mut self.name, text(id)),
            _ => return,
        };
        field.get_or_insert(value);
    }
}

/// The generation of a unit's volatile cache: the body of the vendor specific page C0h of `riserd`,
/// which begins with a mark, since other vendors' pages of that number mean other things.
#[must_use]
pub fn cache_generation(body: &[u8]) -> Option<[u8; 16]> {
    let generation = body.strip_prefix(b"RISERGEN")?;
    generation.first_chunk().copied()
}

/// What MODE SENSE (6) tells of caching (SBC-3 clause 6.4.6) and of the medium.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachingPage {
    /// WCE: writes may be in a volatile cache when they are answered.
    pub write_cache: bool,
    /// WP: writes are refused.
    pub write_protected: bool,
}

impl CachingPage {
    /// Reads mode parameter data; `None` where it is too short. A missing page means no cache.
    #[must_use]
    pub fn parse(data: &[u8]) -> Option<Self> {
        let write_protected = data.get(2)? & 0x80 != 0;
        let page = 4 + usize::from(*data.get(3)?);
        let write_cache = match data.get(page..) {
            Some([code, _, flags, ..]) if code & 0x3f == 0x08 => flags & 0x04 != 0,
            _ => false,
        };
        Some(Self {
            write_cache,
            write_protected,
        })
    }
}

/// The logical unit numbers of REPORT LUNS data that have one of the simple forms, in order.
#[must_use]
pub fn parse_luns(data: &[u8]) -> Vec<LunId> {
    let declared = be32(data, 0).unwrap_or(0) as usize;
    let list = data.get(8..).unwrap_or(&[]);
    list[..declared.min(list.len())]
        .chunks_exact(8)
        .filter_map(
            |lun| match LunAddress::parse(lun.try_into().expect("eight bytes")) {
                Ok(LunAddress::Unit(id)) => Some(id),
                _ => None,
            },
        )
        .collect()
}

/// A run of blocks from GET LBA STATUS (SBC-3 clause 5.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbaStatus {
    /// The run.
    pub range: BlockRange,
    /// PROVISIONING STATUS: 0 mapped or unknown, 1 deallocated, 2 anchored.
    pub status: u8,
}

/// The runs of GET LBA STATUS data, in order.
pub fn parse_lba_status(data: &[u8]) -> impl Iterator<Item = LbaStatus> {
    let declared = be32(data, 0).unwrap_or(0).saturating_sub(4) as usize;
    let list = data.get(8..).unwrap_or(&[]);
    list[..declared.min(list.len())]
        .chunks_exact(16)
        .filter_map(|run| {
            Some(LbaStatus {
                range: BlockRange {
                    lba: be64(run, 0)?,
                    blocks: be32(run, 8)?,
                },
                status: run[12] & 0x0f,
            })
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RANGE: BlockRange = BlockRange {
        lba: 0x0102_0304_0506_0708,
        blocks: 0x090a_0b0c,
    };

    #[test]
    fn cdbs_are_those_of_the_standard() {
        #[rustfmt::skip]
        let cases: [(Command, &[u8]); 10] = [
            (Command::test_unit_ready(), &[0, 0, 0, 0, 0, 0]),
            (Command::inquiry(), &[0x12, 0, 0, 0, 96, 0]),
            (Command::vpd(0xb0), &[0x12, 1, 0xb0, 4, 0, 0]),
            (Command::report_luns(), &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0x20, 8, 0, 0]),
            (Command::read(RANGE, 512), &[0x88, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0]),
            (Command::write(RANGE, 512, true), &[0x8a, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0]),
            (Command::write_same(RANGE, 512, true), &[0x93, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0]),
            (Command::unmap(RANGE), &[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0]),
            (Command::read_capacity(), &[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0]),
            (Command::synchronize_cache(), &[0x91, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
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
    fn effects_tell_what_may_be_repeated() {
        assert!(Command::read(RANGE, 512).effect == Effect::None);
        let write = |lba, blocks| Command::write(BlockRange { lba, blocks }, 512, false).effect;
        assert!(write(0, 8).conflicts(write(7, 1)));
        assert!(!write(0, 8).conflicts(write(8, 1)));
        assert!(write(0, 8).conflicts(Command::synchronize_cache().effect));
        let raw = |bytes: &[u8]| Command::raw(Cdb::new(bytes).unwrap(), DataLen::None).effect;
        assert_eq!(raw(&[0x12, 0, 0, 0, 0, 0]), Effect::None);
        assert_eq!(raw(&[0x9e, 0x10]), Effect::None);
        assert_eq!(raw(&[0x5f, 0]), Effect::Other, "PERSISTENT RESERVE OUT");
        assert_eq!(raw(&[0x89, 0]), Effect::Other, "COMPARE AND WRITE");
        assert_eq!(raw(&[0x2a, 0]), Effect::Other);
    }

    #[test]
    fn strings_of_a_target_are_made_printable() {
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
    fn capacities_that_cannot_be_are_refused() {
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
        assert_eq!(Capacity::parse(&data(u64::MAX, 512)), None);
        assert_eq!(Capacity::parse(&data(u64::MAX - 1, 512)), None);
        assert_eq!(Capacity::parse(&data(0xff, 0)), None);
        assert_eq!(Capacity::parse(&data(0xff, 513)), None);
        assert_eq!(Capacity::parse(&data(0xff, 1 << 31)), None);
    }

    #[test]
    fn identities_are_the_units_own() {
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
    fn pages_are_cut_to_what_they_declare_and_what_came() {
        let data = [0, 0xb0, 0, 2, 1, 2, 3];
        assert_eq!(vpd_body(&data, 0xb0), Some(&[1, 2][..]));
        assert_eq!(vpd_body(&data, 0x80), None);
        assert_eq!(vpd_body(&[0, 0xb0, 0xff, 0xff, 1], 0xb0), Some(&[1][..]));
        assert_eq!(vpd_body(&[0, 0xb0, 0], 0xb0), None);
        let caching = CachingPage::parse(&[20, 0, 0x80, 0, 8, 18, 4, 0]).unwrap();
        assert!(caching.write_cache && caching.write_protected);
    }

    proptest! {
        #[test]
        fn nothing_a_target_tells_panics(data: Vec<u8>) {
            let _ = Inquiry::parse(&data);
            let _ = Capacity::parse(&data);
            let _ = BlockLimits::parse(&data);
            let _ = Provisioning::parse(&data);
            let _ = Identity::parse(Some(&data), Some(&data));
            let _ = CachingPage::parse(&data);
            let _ = parse_luns(&data);
            let _ = parse_lba_status(&data).count();
            let _ = vpd_body(&data, 0x83);
        }
    }
}
