//! Configuration of a logical unit.

use crate::data::designator::Naa;

/// Size of a logical block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockSize {
    /// Blocks of 512 bytes.
    B512,
    /// Blocks of 4096 bytes.
    B4096,
}

impl BlockSize {
    /// Bytes in a block.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::B512 => 512,
            Self::B4096 => 4096,
        }
    }

    /// The block size of a number of bytes, if it is one we offer.
    #[must_use]
    pub const fn from_bytes(bytes: u32) -> Option<Self> {
        match bytes {
            512 => Some(Self::B512),
            4096 => Some(Self::B4096),
            _ => None,
        }
    }
}

/// Provisioning: full, or thin, with blocks that can be given back to the backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Provisioning {
    /// Fully provisioned: no UNMAP, no GET LBA STATUS.
    Thick,
    /// Thin: UNMAP and WRITE SAME with UNMAP work, unmapped blocks read zeroes.
    Thin {
        /// OPTIMAL UNMAP GRANULARITY in blocks, at least 1.
        granularity: u32,
    },
}

/// Names a logical unit shows to the world.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// T10 VENDOR IDENTIFICATION, at most 8 printable ASCII characters.
    pub vendor: String,
    /// PRODUCT IDENTIFICATION, at most 16 printable ASCII characters.
    pub product: String,
    /// PRODUCT REVISION LEVEL, at most 4 printable ASCII characters.
    pub revision: String,
    /// Unit serial number, 1 to 64 printable ASCII characters.
    pub serial: String,
    /// World-wide name, for VPD page 83h.
    pub naa: Naa,
}

/// Limits announced in the Block Limits page and enforced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// MAXIMUM TRANSFER LENGTH in bytes; a multiple of the block size.
    pub max_transfer: u32,
    /// Bytes of a transfer that are in a command's buffer at a time; a multiple of the block size.
    /// A longer READ, WRITE, WRITE AND VERIFY, VERIFY or ORWRITE goes in pieces of this length.
    pub window: u32,
    /// OPTIMAL TRANSFER LENGTH in bytes, reported up to the maximum; 0 says
    /// nothing.
    pub optimal_transfer: u32,
    /// MAXIMUM UNMAP LBA COUNT in blocks, for one UNMAP command.
    pub max_unmap_blocks: u32,
    /// MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT.
    pub max_unmap_descriptors: u32,
    /// MAXIMUM WRITE SAME LENGTH in blocks.
    pub max_write_same_blocks: u32,
    /// MAXIMUM COMPARE AND WRITE LENGTH in blocks, at least 1; less where two of
    /// them do not fit a window.
    pub max_compare_write_blocks: u8,
    /// Scratch a VERIFY or WRITE SAME works through at a time, in bytes; a
    /// multiple of 4096.
    pub segment: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_transfer: 32 << 20,
            window: 1 << 20,
            optimal_transfer: 1 << 20,
            max_unmap_blocks: 1 << 20,
            max_unmap_descriptors: 256,
            max_write_same_blocks: 1 << 20,
            max_compare_write_blocks: u8::MAX,
            segment: 256 << 10,
        }
    }
}

/// Everything a logical unit needs to know at creation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Capacity in logical blocks, at least 1.
    pub blocks: u64,
    /// Length of a logical block, in bytes.
    pub block_size: BlockSize,
    /// LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT: 3 for 512 bytes on 4096.
    pub physical_exponent: u8,
    /// Writes are refused with WRITE PROTECTED.
    pub read_only: bool,
    /// Thin or thick provisioning (SBC-3 4.7).
    pub provisioning: Provisioning,
    /// The share of the unit's space, in percent from 1 to 99, that is in use when the soft
    /// threshold is reached: see [`LogicalUnit::note_space`](crate::lu::LogicalUnit::note_space).
    /// Of thin units only.
    pub threshold: Option<u8>,
    /// Writes may stay in a volatile cache until flushed (WCE).
    pub write_cache: bool,
    /// START STOP UNIT stops the unit, for all initiators.
    pub stoppable: bool,
    /// The medium rotates; otherwise it is reported as solid state.
    pub rotational: bool,
    /// Names of the unit for INQUIRY data.
    pub identity: Identity,
    /// Limits of transfers, for VPD page B0h.
    pub limits: Limits,
    /// Names what data live in that are in the volatile cache: another one means that they may be
    /// lost. Offered in page C0h.
    pub cache_generation: Option<[u8; 16]>,
}

/// A configuration that no logical unit can be made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConfigError {
    /// The capacity is zero, or its byte count does not fit 63 bits.
    #[error("the capacity must be between 1 block and 2^63 bytes")]
    Capacity,
    /// A name is too long, empty where it may not be, or not printable ASCII.
    #[error("{0} is empty, too long, or not printable ASCII")]
    Text(&'static str),
    /// A limit is zero or not a multiple of what it must be.
    #[error("the limit {0} is zero, too large or misaligned")]
    Limit(&'static str),
    /// The exponent of the physical block size is above 15.
    #[error("the physical block exponent must be at most 15")]
    PhysicalExponent,
    /// The NAA identifier uses more bits than its format has.
    #[error("the NAA identifier does not fit its format")]
    Naa,
}

impl Config {
    /// Checks everything that the logical unit relies on.
    ///
    /// # Errors
    ///
    /// The first rule that is broken.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let block = self.block_size.bytes();
        self.blocks
            .checked_mul(u64::from(block))
            // Offsets of files and devices are signed numbers of 64 bits.
            .filter(|&bytes| bytes > 0 && bytes <= i64::MAX as u64)
            .ok_or(ConfigError::Capacity)?;
        text(&self.identity.vendor, 8, "vendor")?;
        text(&self.identity.product, 16, "product")?;
        text(&self.identity.revision, 4, "revision")?;
        text(&self.identity.serial, 64, "serial")?;
        if self.physical_exponent > 15 {
            return Err(ConfigError::PhysicalExponent);
        }
        let limits = &self.limits;
        limit(limits.max_transfer, block, "max_transfer")?;
        limit(limits.window, block, "window")?;
        if !limits.optimal_transfer.is_multiple_of(block) {
            return Err(ConfigError::Limit("optimal_transfer"));
        }
        limit(limits.max_unmap_blocks, 1, "max_unmap_blocks")?;
        limit(limits.max_unmap_descriptors, 1, "max_unmap_descriptors")?;
        if limits.max_unmap_descriptors > 4095 {
            // The list's length field has 16 bits.
            return Err(ConfigError::Limit("max_unmap_descriptors"));
        }
        limit(limits.max_write_same_blocks, 1, "max_write_same_blocks")?;
        limit(
            limits.max_compare_write_blocks.into(),
            1,
            "max_compare_write_blocks",
        )?;
        // A segment holds whole blocks, of either size.
        limit(limits.segment, 4096, "segment")?;
        // A VERIFY has both in one buffer, whose length has 32 bits.
        if limits.window.checked_add(limits.segment).is_none() {
            return Err(ConfigError::Limit("window"));
        }
        if let Provisioning::Thin { granularity } = self.provisioning {
            limit(granularity, 1, "granularity")?;
        }
        if self
            .threshold
            .is_some_and(|percent| !(1..100).contains(&percent))
        {
            return Err(ConfigError::Limit("threshold"));
        }
        self.identity
            .naa
            .is_valid()
            .then_some(())
            .ok_or(ConfigError::Naa)
    }

    /// MAXIMUM COMPARE AND WRITE LENGTH in blocks: the configured limit, as far as both halves of
    /// the data fit one transfer and one window, since they are compared and written as a whole.
    pub(crate) fn max_compare_write(&self) -> u8 {
        let limits = &self.limits;
        let fit = limits.max_transfer.min(limits.window) / (2 * self.block_size.bytes());
        let fit = u8::try_from(fit).unwrap_or(u8::MAX);
        limits.max_compare_write_blocks.min(fit)
    }

    /// Whether the unit is thin provisioned.
    #[must_use]
    pub fn is_thin(&self) -> bool {
        matches!(self.provisioning, Provisioning::Thin { .. })
    }
}

fn text(value: &str, max: usize, name: &'static str) -> Result<(), ConfigError> {
    let printable = value.bytes().all(|byte| (0x20..0x7f).contains(&byte));
    (printable && !value.is_empty() && value.len() <= max)
        .then_some(())
        .ok_or(ConfigError::Text(name))
}

fn limit(value: u32, unit: u32, name: &'static str) -> Result<(), ConfigError> {
    (value > 0 && value.is_multiple_of(unit))
        .then_some(())
        .ok_or(ConfigError::Limit(name))
}
