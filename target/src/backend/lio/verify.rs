//! [`Verifier`]: verifies blocks, and counts the results.

use std::ops::ControlFlow;
use std::path::Path;

use riser_scsi::config::ProtectionType;
use riser_scsi::protection::Tuple;

use super::error::{ConversionError, Defects};

/// Number of bytes of blocks to convert at once.
pub(super) const PIECE: u64 = 1 << 20;

/// Maximum number of defective blocks that are listed. All of them are counted.
const LISTED: usize = 16;

/// Result of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conversion {
    /// Type of the protection information.
    pub protection_type: ProtectionType,
    /// Block size in bytes.
    pub block_size: u32,
    /// Number of blocks.
    pub blocks: u64,
    /// Number of blocks whose tags disable all checks, such as deallocated blocks.
    pub unchecked: u64,
}

/// Returns the type of the protection information if LIO supports it.
///
/// # Errors
/// Returns [`ConversionError::Type`].
pub(super) fn check_type(
    protection_type: Option<ProtectionType>,
) -> Result<ProtectionType, ConversionError> {
    match protection_type {
        Some(supported @ (ProtectionType::Type1 | ProtectionType::Type3)) => Ok(supported),
        Some(ProtectionType::Type2) => Err(ConversionError::Type(2)),
        None => Err(ConversionError::Type(0)),
    }
}

/// Progress of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of converted bytes, without tuples.
    pub done: u64,
    /// Size of the disk in bytes.
    pub total: u64,
}

/// Verifies the blocks of a disk in ascending order.
pub(super) struct Verifier<'a> {
    conversion: Conversion,
    defects: Defects,
    watch: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
}

impl<'a> Verifier<'a> {
    pub(super) fn new(
        protection_type: ProtectionType,
        block_size: u32,
        blocks: u64,
        watch: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Self {
        Self {
            conversion: Conversion {
                protection_type,
                block_size,
                blocks,
                unchecked: 0,
            },
            defects: Defects::default(),
            watch,
        }
    }

    /// Returns the number of blocks and their size.
    pub(super) fn blocks(&self) -> (u64, u32) {
        (self.conversion.blocks, self.conversion.block_size)
    }

    /// Verifies a block.
    pub(super) fn check(&mut self, lba: u64, block: &[u8], tuple: Tuple) {
        let protection_type = self.conversion.protection_type;
        if tuple.is_unchecked(protection_type) {
            self.conversion.unchecked += 1;
            return;
        }
        if let Err(check) = tuple.check_stored(protection_type, lba, block) {
            self.defects.counts.count(check);
            if self.defects.listed.len() < LISTED {
                self.defects.listed.push((lba, check));
            }
        }
    }

    /// Counts deallocated blocks.
    pub(super) fn skip(&mut self, blocks: u64) {
        self.conversion.unchecked += blocks;
    }

    /// Returns whether there is a defect, so that the new files are not required.
    pub(super) fn has_failed(&self) -> bool {
        !self.defects.listed.is_empty()
    }

    /// Reports that all blocks before this one were converted.
    ///
    /// # Errors
    /// Returns [`ConversionError::Interrupted`].
    pub(super) fn report(&mut self, lba: u64) -> Result<(), ConversionError> {
        let Conversion {
            block_size, blocks, ..
        } = self.conversion;
        let progress = Progress {
            done: lba * u64::from(block_size),
            total: blocks * u64::from(block_size),
        };
        match (self.watch)(progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(ConversionError::Interrupted),
        }
    }

    /// Returns the result after the last block of this file.
    ///
    /// # Errors
    /// Returns [`ConversionError::Defects`].
    pub(super) fn finish(self, path: &Path) -> Result<Conversion, ConversionError> {
        if self.has_failed() {
            return Err(ConversionError::Defects {
                path: path.to_owned(),
                defects: self.defects,
            });
        }
        Ok(self.conversion)
    }
}
