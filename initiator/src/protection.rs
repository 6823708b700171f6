//! Protection information between `riser` and the medium of a logical unit (SBC-4 4.21), also known
//! as T10 DIF.
//!
//! For a protected unit, a session generates the tuples when data enters it, and verifies them when
//! data leaves it. Both the target and the session check what they receive:
//!
//! ```text
//!   write: blocks ── generate ─► blocks and tuples ─► target, WRPROTECT = 1 ─► medium
//!   read:  blocks ◄─── verify ── blocks and tuples ◄─ target, RDPROTECT = 1 ◄─ medium
//! ```
//!
//! On all transports, each block is followed by its tuple, as for the kernel's initiators without an
//! adapter that inserts and strips tuples. A transfer therefore has a second buffer, in a separate
//! part of the client's pool, and data is copied between the two. Its checks read the copy of the
//! user, so they include the copying.
//!
//! - [`ProtectionMode`]: selects whether protection information is transferred.
//! - [`PiSupport`]: protection reported by a unit. [`PiFormat`]: a supported kind of it.
//! - [`PiError`]: a failed check.
//! - [`ReadMarker`]: detects a read that was completed without its data.
//!
//! # Tags
//! - The guard is generated, and always checked.
//! - The reference tag is the LBA for types 1 and 2, and is not checked for type 3. With type 2,
//!   each command contains the expected tag of its first block, so it has a 32-byte CDB.
//! - The application tag is 0, and is not checked.
//! - The escapes disable all checks of a block: it was never written, was deallocated, or was
//!   written without protection information ([`Tuple::is_unchecked`]).

#![forbid(unsafe_code)]

use std::fmt;

use riser_block::Buffer;
use riser_memory::MemSlice;
use riser_scsi::config::ProtectionType;
use riser_scsi::data::mode;
use riser_scsi::data::vpd::extended_inquiry;
use riser_scsi::protection::{ExpectedTuple, ProtectionError, Tuple, guard};
use serde::Serialize;

use crate::scsi::{Capacity, Inquiry, mode_page};

/// Largest supported block of a protected unit in bytes.
const MAX_BLOCK: usize = 4096;

/// Selects whether a session transfers protection information.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProtectionMode {
    /// If the unit is protected in a supported way.
    #[default]
    Auto,
    /// Never. The target may still check its medium.
    Off,
    /// Always. A unit without supported protection cannot be opened.
    Require,
}

/// Protection information reported by a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PiSupport {
    /// Type of protection, usually 1 to 3 (P_TYPE + 1).
    pub protection_type: u8,
    /// Number of protection information intervals per block, as a power of two (P_I_EXPONENT).
    pub interval_exponent: u8,
    /// The unit checks guards (GRD_CHK).
    pub guard_check: bool,
    /// The unit checks application tags (APP_CHK).
    pub application_tag_check: bool,
    /// The unit checks reference tags (REF_CHK).
    pub reference_tag_check: bool,
    /// Initiators own the application tags (ATO).
    pub application_tag_owner: bool,
    /// The unit does not check its medium for a RDPROTECT of 0 (DPICZ).
    pub disables_zero_check: bool,
}

impl PiSupport {
    /// Parses the Extended INQUIRY Data page and MODE SENSE (6) data with the control page of a
    /// unit; each is empty if not reported. Returns `None` if the medium is not protected.
    #[must_use]
    pub fn parse(
        inquiry: &Inquiry,
        capacity: &Capacity,
        extended: &[u8],
        control: &[u8],
    ) -> Option<Self> {
        use extended_inquiry::{APP_CHK, GRD_CHK, REF_CHK};
        use mode::control::{ATO, DPICZ};
        let p_type = capacity.p_type.filter(|_| inquiry.protect)?;
        let page = mode_page(control, mode::CONTROL).unwrap_or_default();
        Some(Self {
            protection_type: p_type + 1,
            interval_exponent: capacity.p_i_exponent,
            guard_check: GRD_CHK.get(extended) == Some(true),
            application_tag_check: APP_CHK.get(extended) == Some(true),
            reference_tag_check: REF_CHK.get(extended) == Some(true),
            application_tag_owner: ATO.get(page) == Some(true),
            disables_zero_check: DPICZ.get(page) == Some(true),
        })
    }

    /// Returns the format of a unit with this block size.
    ///
    /// # Errors
    /// Returns the reason if it is not supported.
    pub fn format(&self, block_size: u32) -> Result<PiFormat, &'static str> {
        let protection_type = match self.protection_type {
            1 => ProtectionType::Type1,
            2 => ProtectionType::Type2,
            3 => ProtectionType::Type3,
            _ => return Err("unknown protection type"),
        };
        if self.interval_exponent > 0 {
            return Err("unsupported protection information interval");
        }
        if block_size as usize > MAX_BLOCK {
            return Err("unsupported block size for protection information");
        }
        Ok(PiFormat {
            protection_type,
            block_size,
        })
    }
}

/// A check of protection information that has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PiError {
    /// Field of the tuple.
    pub check: ProtectionError,
    /// Address of the block, if reported.
    pub lba: Option<u64>,
    /// The target has performed the check; otherwise the session.
    pub is_by_target: bool,
}

impl fmt::Display for PiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.check)?;
        if let Some(lba) = self.lba {
            write!(f, " at LBA {lba}")?;
        }
        f.write_str(match self.is_by_target {
            true => " (detected by the target)",
            false => " (detected by the initiator)",
        })
    }
}

impl std::error::Error for PiError {}

/// Format of blocks with their tuples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PiFormat {
    /// Type of protection.
    pub protection_type: ProtectionType,
    /// Block size without the tuple, in bytes.
    pub block_size: u32,
}

impl PiFormat {
    fn block_len(self) -> usize {
        self.block_size as usize
    }

    /// Length of a block with its tuple in bytes.
    fn interleaved_block_len(self) -> usize {
        self.block_len() + Tuple::LEN
    }

    /// Returns the number of the type, from 1 to 3.
    #[must_use]
    pub fn type_number(self) -> u8 {
        match self.protection_type {
            ProtectionType::Type1 => 1,
            ProtectionType::Type2 => 2,
            ProtectionType::Type3 => 3,
        }
    }

    /// Returns the length of whole blocks of `len` bytes with their tuples.
    #[must_use]
    pub fn interleaved_len(self, len: usize) -> usize {
        len / self.block_len() * self.interleaved_block_len()
    }

    /// Returns the length of the blocks that fit into `len` bytes with their tuples.
    #[must_use]
    pub fn fitting_len(self, len: usize) -> usize {
        len / self.interleaved_block_len() * self.block_len()
    }

    /// Returns the reference tag of a block; `None` if the type does not define it.
    fn reference_tag(self, lba: u64) -> Option<u32> {
        match self.protection_type {
            ProtectionType::Type1 | ProtectionType::Type2 => Some(lba as u32),
            ProtectionType::Type3 => None,
        }
    }

    /// Copies blocks starting at `lba`, and adds their tuples.
    fn generate(self, lba: u64, blocks: &MemSlice, interleaved: &MemSlice) {
        let (len, whole) = (self.block_len(), self.interleaved_block_len());
        let mut block = [0; MAX_BLOCK + Tuple::LEN];
        for (index, lba) in (0..blocks.len() / len).zip(lba..) {
            blocks.read(index * len, &mut block[..len]);
            let tuple = Tuple {
                guard: guard(&block[..len]),
                application_tag: 0,
                reference_tag: self.reference_tag(lba).unwrap_or(0),
            };
            block[len..whole].copy_from_slice(&tuple.encode());
            interleaved.write(index * whole, &block[..whole]);
        }
    }

    /// Copies blocks starting at `lba` without their tuples.
    ///
    /// # Errors
    /// Returns the first failed check. A tuple that is still the marker was not transferred.
    fn verify(
        self,
        marker: ReadMarker,
        lba: u64,
        interleaved: &MemSlice,
        blocks: &MemSlice,
    ) -> Result<(), PiError> {
        let (len, whole) = (self.block_len(), self.interleaved_block_len());
        let mut block = [0; MAX_BLOCK + Tuple::LEN];
        for (index, lba) in (0..blocks.len() / len).zip(lba..) {
            interleaved.read(index * whole, &mut block[..whole]);
            let tuple = *block[len..].first_chunk().expect("a block with its tuple");
            let checked = match tuple == marker.0 {
                true => Err(ProtectionError::Guard),
                false => self.check_block(lba, &block[..len], Tuple::parse(tuple)),
            };
            checked.map_err(|check| PiError {
                check,
                lba: Some(lba),
                is_by_target: false,
            })?;
            blocks.write(index * len, &block[..len]);
        }
        Ok(())
    }

    fn check_block(self, lba: u64, block: &[u8], tuple: Tuple) -> Result<(), ProtectionError> {
        if tuple.is_unchecked(self.protection_type) {
            return Ok(());
        }
        let expected = ExpectedTuple {
            guard: Some(guard(block)),
            application_tag: None,
            reference_tag: self.reference_tag(lba),
        };
        tuple.check(&expected)
    }

    /// Sets all tuples to the marker.
    fn mark(self, marker: ReadMarker, interleaved: &MemSlice) {
        let (len, whole) = (self.block_len(), self.interleaved_block_len());
        for at in (len..interleaved.len()).step_by(whole) {
            interleaved.write(at, &marker.0);
        }
    }
}

/// Content of the tuples before a read. A target that completes a read without transferring its
/// data would otherwise leave earlier data of the buffer, with valid tuples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadMarker([u8; Tuple::LEN]);

impl ReadMarker {
    /// Creates a marker from a random number, which the target must not know.
    #[must_use]
    pub fn new(random: u64) -> Self {
        let mut tuple = random.to_be_bytes();
        // FFFFh as the application tag would disable the checks.
        tuple[2] &= 0x7f;
        Self(tuple)
    }
}

/// Memory of a transfer with protection information.
#[derive(Debug)]
pub struct ProtectedData {
    format: PiFormat,
    lba: u64,
    /// Marker of a read; `None` for a write.
    marker: Option<ReadMarker>,
    /// Blocks of the user.
    blocks: Buffer,
    /// The blocks with their tuples, as transferred.
    interleaved: Buffer,
}

impl ProtectedData {
    /// Creates the memory for reading `blocks` from `lba`, and sets the tuples to the marker.
    /// `interleaved` must have the length for them.
    #[must_use]
    pub fn read(
        format: PiFormat,
        marker: ReadMarker,
        lba: u64,
        blocks: Buffer,
        interleaved: Buffer,
    ) -> Self {
        format.mark(marker, interleaved.slice());
        Self::new(format, Some(marker), lba, blocks, interleaved)
    }

    /// Creates the memory for writing `blocks` to `lba`, and generates the tuples.
    #[must_use]
    pub fn write(format: PiFormat, lba: u64, blocks: Buffer, interleaved: Buffer) -> Self {
        format.generate(lba, blocks.slice(), interleaved.slice());
        Self::new(format, None, lba, blocks, interleaved)
    }

    fn new(
        format: PiFormat,
        marker: Option<ReadMarker>,
        lba: u64,
        blocks: Buffer,
        interleaved: Buffer,
    ) -> Self {
        assert_eq!(interleaved.len(), format.interleaved_len(blocks.len()));
        Self {
            format,
            lba,
            marker,
            blocks,
            interleaved,
        }
    }

    /// Returns the memory to transfer.
    #[must_use]
    pub fn interleaved(&self) -> &Buffer {
        &self.interleaved
    }

    /// Returns the user's blocks after a successful transfer. Blocks that were read are verified
    /// first.
    ///
    /// # Errors
    /// Returns the first failed check, in the order of the blocks.
    pub fn check_protection(self) -> Result<Buffer, PiError> {
        if let Some(marker) = self.marker {
            let (from, to) = (self.interleaved.slice(), self.blocks.slice());
            self.format.verify(marker, self.lba, from, to)?;
        }
        Ok(self.blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(bytes: &[u8]) -> Buffer {
        let buffer = Buffer::anonymous(bytes.len()).unwrap();
        buffer.slice().write(0, bytes);
        buffer
    }

    fn format(protection_type: ProtectionType, block_size: u32) -> PiFormat {
        PiFormat {
            protection_type,
            block_size,
        }
    }

    /// Returns the interleaved data of a write.
    fn written(format: PiFormat, lba: u64, blocks: &[u8]) -> Vec<u8> {
        let interleaved = Buffer::anonymous(format.interleaved_len(blocks.len())).unwrap();
        let data = ProtectedData::write(format, lba, buffer(blocks), interleaved);
        data.interleaved().slice().to_vec()
    }

    /// Returns the blocks of a read.
    fn read(format: PiFormat, lba: u64, interleaved: &[u8]) -> Result<Vec<u8>, PiError> {
        let data = start_read(format, lba, interleaved);
        // The transfer replaces the marker.
        data.interleaved().slice().write(0, interleaved);
        data.check_protection()
            .map(|blocks| blocks.slice().to_vec())
    }

    /// Starts a read into a buffer with this content.
    fn start_read(format: PiFormat, lba: u64, content: &[u8]) -> ProtectedData {
        let blocks = Buffer::anonymous(format.fitting_len(content.len())).unwrap();
        ProtectedData::read(format, ReadMarker::new(!0), lba, blocks, buffer(content))
    }

    /// Two blocks: one of zeroes, and one with the bytes of the CRC's check value.
    fn blocks(block: usize) -> Vec<u8> {
        let mut blocks = vec![0; 2 * block];
        blocks[2 * block - 9..].copy_from_slice(b"123456789");
        blocks
    }

    #[test]
    fn tuples_follow_their_blocks() {
        use ProtectionType::{Type1, Type2, Type3};
        for block in [512, 4096] {
            for (kind, first, second) in [
                (Type1, [1, 2, 3, 4], [1, 2, 3, 5]),
                (Type2, [1, 2, 3, 4], [1, 2, 3, 5]),
                (Type3, [0; 4], [0; 4]),
            ] {
                let format = format(kind, block as u32);
                let found = written(format, 0xff_0102_0304, &blocks(block));
                assert_eq!(found.len(), 2 * (block + 8));
                assert_eq!(found[block..block + 4], [0, 0, 0, 0]);
                assert_eq!(found[block + 4..block + 8], first);
                assert_eq!(&found[2 * block + 8 - 9..2 * block + 8], b"123456789");
                // Leading zeroes do not change the CRC.
                assert_eq!(found[2 * block + 8..2 * block + 12], [0xd0, 0xdb, 0, 0]);
                assert_eq!(found[2 * block + 12..], second);
                assert_eq!(read(format, 0xff_0102_0304, &found), Ok(blocks(block)));
            }
        }
    }

    #[test]
    fn damaged_block_fails_with_its_lba() {
        for (kind, checks_tags) in [
            (ProtectionType::Type1, true),
            (ProtectionType::Type2, true),
            (ProtectionType::Type3, false),
        ] {
            let format = format(kind, 512);
            let good = written(format, 70, &blocks(512));
            let failed = |at: usize| {
                let mut bad = good.clone();
                bad[at] ^= 0x10;
                read(format, 70, &bad)
                    .err()
                    .map(|error| (error.check, error.lba))
            };
            let guard = |lba| Some((ProtectionError::Guard, Some(lba)));
            assert_eq!(failed(0), guard(70));
            assert_eq!(failed(511), guard(70));
            assert_eq!(failed(512), guard(70), "the guard itself");
            assert_eq!(failed(520), guard(71));
            assert_eq!(failed(514), None, "application tags are not checked");
            let reference = checks_tags.then_some((ProtectionError::ReferenceTag, Some(71)));
            assert_eq!(failed(520 + 519), reference);
            let elsewhere = read(format, 71, &good).err().map(|error| error.lba);
            assert_eq!(elsewhere, checks_tags.then_some(Some(71)));
        }
    }

    #[test]
    fn escaped_block_is_not_verified() {
        let mut data = written(format(ProtectionType::Type1, 512), 9, &[1; 512]);
        data[0] = 2;
        data[514..516].fill(0xff);
        assert!(read(format(ProtectionType::Type1, 512), 9, &data).is_ok());
        assert!(read(format(ProtectionType::Type2, 512), 9, &data).is_ok());
        assert!(read(format(ProtectionType::Type3, 512), 9, &data).is_err());
        data[512..].fill(0xff);
        assert!(read(format(ProtectionType::Type3, 512), 9, &data).is_ok());
    }

    #[test]
    fn read_without_transfer_fails() {
        for kind in [ProtectionType::Type1, ProtectionType::Type3] {
            let format = format(kind, 512);
            let earlier = written(format, 0, &blocks(512));
            let guard = |lba| {
                Err(PiError {
                    check: ProtectionError::Guard,
                    lba: Some(lba),
                    is_by_target: false,
                })
            };
            let data = start_read(format, 0, &earlier);
            assert_eq!(data.check_protection().map(drop), guard(0));
            let data = start_read(format, 0, &earlier);
            data.interleaved().slice().write(0, &earlier[..520]);
            assert_eq!(data.check_protection().map(drop), guard(1));
        }
    }

    #[test]
    fn failed_check_reports_detector() {
        let mut error = PiError {
            check: ProtectionError::ReferenceTag,
            lba: Some(7),
            is_by_target: true,
        };
        let text = "logical block reference tag check failed at LBA 7 (detected by the target)";
        assert_eq!(error.to_string(), text);
        (error.lba, error.is_by_target) = (None, false);
        let text = "logical block reference tag check failed (detected by the initiator)";
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn support_is_parsed_from_reports() {
        let mut data = [0; 32];
        // Eight blocks of 512 bytes, type 3.
        (data[7], data[10], data[12]) = (7, 2, 0x05);
        let capacity = |data: &[u8]| Capacity::parse(data).unwrap();
        let inquiry = Inquiry {
            protect: true,
            ..Inquiry::default()
        };
        let extended = [0, 0x86, 0, 60, 0x05, 0, 0, 0];
        // No block descriptors.
        let control = [15, 0, 0, 0, 0x0a, 10, 0x0a, 0, 0, 0x80, 0, 0, 0, 0, 0, 0];
        let parsed = PiSupport::parse(&inquiry, &capacity(&data), &extended, &control).unwrap();
        let want = PiSupport {
            protection_type: 3,
            interval_exponent: 0,
            guard_check: true,
            application_tag_check: false,
            reference_tag_check: true,
            application_tag_owner: true,
            disables_zero_check: true,
        };
        assert_eq!(parsed, want);
        let format = |found: &PiSupport, block| found.format(block).map(|f| f.protection_type);
        assert_eq!(format(&parsed, 512), Ok(ProtectionType::Type3));
        assert!(format(&parsed, 8192).is_err());
        let none = PiSupport::parse(&Inquiry::default(), &capacity(&data), &[], &[]);
        assert_eq!(none, None, "PROTECT is 0");
        data[13] = 0x30;
        let parsed = PiSupport::parse(&inquiry, &capacity(&data), &[], &[]).unwrap();
        assert_eq!((parsed.interval_exponent, parsed.guard_check), (3, false));
        assert!(format(&parsed, 4096).is_err());
        (data[12], data[13]) = (0x09, 0);
        let parsed = PiSupport::parse(&inquiry, &capacity(&data), &[], &[]).unwrap();
        assert!(
            format(&parsed, 512).is_err(),
            "type {}",
            parsed.protection_type
        );
        data[12] = 0x04;
        assert_eq!(PiSupport::parse(&inquiry, &capacity(&data), &[], &[]), None);
    }
}
