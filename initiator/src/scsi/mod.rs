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

mod command;

use riser_scsi::data::capacity::{capacity_10, capacity_16};
use riser_scsi::data::designator::{self, EUI_64, LOGICAL_UNIT, NAA, SCSI_NAME_STRING, T10_VENDOR};
use riser_scsi::data::field::Field;
use riser_scsi::data::vpd::{block_limits, provisioning};
use riser_scsi::data::{inquiry as standard, mode};

pub use self::command::{
    BlockRange, CAPACITY_LEN, CdbSize, Command, INQUIRY_LEN, MODE_SENSE_LEN, REPORT_LUNS_LEN,
    UNMAP_LIST_LEN, VPD_LEN, unmap_list,
};

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
    /// PROTECT: protection information is supported.
    pub protect: bool,
}

impl Inquiry {
    /// Parses received data; returns `None` if there are less than 36 bytes.
    #[must_use]
    pub fn parse(data: &[u8]) -> Option<Self> {
        use standard::{
            PERIPHERAL_DEVICE_TYPE, PERIPHERAL_QUALIFIER, PRODUCT, PROTECT, REVISION, VENDOR,
        };
        Some(Self {
            qualifier: PERIPHERAL_QUALIFIER.get(data)?,
            device_type: PERIPHERAL_DEVICE_TYPE.get(data)?,
            vendor: text(VENDOR.get(data)?),
            product: text(PRODUCT.get(data)?),
            revision: text(REVISION.get(data)?),
            protect: PROTECT.get(data)?,
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
    /// P_TYPE: type of protection, starting at 0 for type 1; `None` without protection (PROT_EN).
    pub p_type: Option<u8>,
    /// P_I_EXPONENT: protection information intervals per block, as a power of two.
    pub p_i_exponent: u8,
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
        use capacity_16::{
            BLOCK_LENGTH, LAST_LBA, LBPME, LBPRZ, P_I_EXPONENT, P_TYPE, PHYSICAL_EXPONENT, PROT_EN,
        };
        let sizes = LAST_LBA.get(data).zip(BLOCK_LENGTH.get(data));
        let (last_lba, block_size) = sizes.ok_or(CapacityError::Short(data.len()))?;
        Ok(Self {
            physical_exponent: PHYSICAL_EXPONENT.get(data).unwrap_or(0),
            provisioning: LBPME.get(data) == Some(true),
            reads_zeroes: LBPRZ.get(data) == Some(true),
            p_type: P_TYPE.get(data).filter(|_| PROT_EN.get(data) == Some(true)),
            p_i_exponent: P_I_EXPONENT.get(data).unwrap_or(0),
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
            p_type: None,
            p_i_exponent: 0,
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
        mode::header_6::BLOCK_DESCRIPTOR_LENGTH.get(data)?;
        let caching = mode_page(data, mode::CACHING);
        Some(Self {
            write_cache: caching.and_then(|page| mode::caching::WCE.get(page)) == Some(true),
            has_fua: mode::header_6::DPOFUA.get(data) == Some(true),
            write_protected,
        })
    }
}

/// Returns a page from MODE SENSE (6) data with only this page; `None` if it is missing.
pub(crate) fn mode_page(data: &[u8], code: u8) -> Option<&[u8]> {
    let descriptors = mode::header_6::BLOCK_DESCRIPTOR_LENGTH.get(data)?;
    let page = data.get(mode::header_6::LEN + usize::from(descriptors)..)?;
    (mode::PAGE_CODE.get(page) == Some(code)).then_some(page)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::request::{Cdb, DataLen, Effect};

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
        let cases: [(Command, &[u8]); 19] = [
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
            (Command::mode_sense(0x0a), &[0x1a, 8, 0x0a, 0, 192, 0]),
            (Command::read_protected(CdbSize::Ten, SHORT, 520), &[0x28, 0x20, 1, 2, 3, 4, 0, 5, 6, 0]),
            (Command::write_protected(CdbSize::Sixteen, RANGE, 520, true), &[0x8a, 0x28, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0]),
            (
                Command::read_protected(CdbSize::ThirtyTwo, RANGE, 520),
                &[
                    0x7f, 0, 0, 0, 0, 0, 0, 0x18, 0, 0x09, 0x20, 0, 1, 2, 3, 4,
                    5, 6, 7, 8, 5, 6, 7, 8, 0, 0, 0, 0, 9, 10, 11, 12,
                ],
            ),
            (
                Command::write_protected(CdbSize::ThirtyTwo, RANGE, 520, true),
                &[
                    0x7f, 0, 0, 0, 0, 0, 0, 0x18, 0, 0x0b, 0x28, 0, 1, 2, 3, 4,
                    5, 6, 7, 8, 5, 6, 7, 8, 0, 0, 0, 0, 9, 10, 11, 12,
                ],
            ),
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
            let _ = riser_scsi::data::luns::parse(&data);
            let _ = riser_scsi::data::lba_status::parse(&data);
            let _ = riser_scsi::data::vpd::body(&data, 0x83);
        }
    }
}
