//! Configuration of a logical unit.

use crate::data::designator::Naa;

/// Size of the protection information of a block, in bytes.
pub(crate) const TUPLE_LEN: u32 = 8;

/// The size of a logical block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockSize {
    /// 512 bytes.
    B512,
    /// 4096 bytes.
    B4096,
}

impl BlockSize {
    /// Returns the size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::B512 => 512,
            Self::B4096 => 4096,
        }
    }

    /// Returns the block size for a number of bytes, if this is supported.
    #[must_use]
    pub const fn from_bytes(bytes: u32) -> Option<Self> {
        match bytes {
            512 => Some(Self::B512),
            4096 => Some(Self::B4096),
            _ => None,
        }
    }
}

/// Provisioning: either full or thin, which allows the backend to deallocate blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Provisioning {
    /// Fully provisioned, without support for UNMAP and GET LBA STATUS.
    Thick,
    /// Thin provisioned, with support for UNMAP and WRITE SAME with UNMAP. Unmapped blocks are read
    /// as zeros.
    Thin {
        /// OPTIMAL UNMAP GRANULARITY in blocks, must be at least 1.
        granularity: u32,
    },
}

/// Type of protection information (SBC-4 4.21.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ProtectionType {
    /// The reference tag contains the least significant 32 bits of the LBA.
    Type1,
    /// The application client provides the expected tags with every command, using a 32-byte CDB.
    Type2,
    /// The reference tag is not defined, and is owned by the application client together with the
    /// application tag.
    Type3,
}

impl ProtectionType {
    /// Returns the number of the type, from 1 to 3.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Type1 => 1,
            Self::Type2 => 2,
            Self::Type3 => 3,
        }
    }

    /// Returns the type with the given number, or `None` for type 0 (no protection) and unknown
    /// types.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Type1),
            2 => Some(Self::Type2),
            3 => Some(Self::Type3),
            _ => None,
        }
    }
}

/// Format of a medium that can store protection information.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ProtectionFormat {
    /// The blocks always have the configured protection.
    #[default]
    Fixed,
    /// FORMAT UNIT can change the type. The medium is currently formatted with this type, or
    /// without protection (type 0).
    Changeable(Option<ProtectionType>),
}

/// Protection information, which is metadata that is stored for every logical block. The protection
/// interval is always a logical block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Protection {
    /// Type of the protection information.
    pub protection_type: ProtectionType,
    /// The application tag is owned by the application client (ATO bit in the Control mode page).
    ///
    /// If this is set, a block written without protection information gets an application tag of
    /// FFFFh, so a read won't verify it. Otherwise the tag is zero, and every read will verify the
    /// guard of this block, but ignore the expected application tag in a CDB.
    pub client_owns_tag: bool,
}

impl Protection {
    /// Creates protection of the given type, with an application tag that is owned by the
    /// application client.
    #[must_use]
    pub const fn new(protection_type: ProtectionType) -> Self {
        Self {
            protection_type,
            client_owns_tag: true,
        }
    }

    /// Returns whether this is type 2, which requires 32-byte CDBs to transfer protection
    /// information.
    #[must_use]
    pub const fn is_type_2(self) -> bool {
        matches!(self.protection_type, ProtectionType::Type2)
    }
}

/// Default T10 VENDOR IDENTIFICATION, if not set in the configuration. Also used for LUNs without a
/// logical unit.
pub const DEFAULT_VENDOR: &str = "RISER";

/// Default PRODUCT IDENTIFICATION.
pub const DEFAULT_PRODUCT: &str = "VIRTUAL DISK";

/// Default PRODUCT REVISION LEVEL.
pub const DEFAULT_REVISION: &str = "0001";

/// Names and identifiers of a logical unit.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Identity {
    /// T10 VENDOR IDENTIFICATION, up to 8 printable ASCII characters.
    pub vendor: String,
    /// PRODUCT IDENTIFICATION, up to 16 printable ASCII characters.
    pub product: String,
    /// PRODUCT REVISION LEVEL, up to 4 printable ASCII characters.
    pub revision: String,
    /// Unit serial number, from 1 to 64 printable ASCII characters.
    pub serial: String,
    /// World-wide name for VPD page 83h.
    pub naa: Naa,
}

/// Limits that are reported in the Block Limits page. Commands that exceed these are refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// MAXIMUM TRANSFER LENGTH in bytes, must be a multiple of the block size.
    pub max_transfer: u32,
    /// Maximum number of bytes of a transfer to store in the command buffer at once, must be a
    /// multiple of the block size. A larger READ, WRITE, WRITE AND VERIFY, VERIFY or ORWRITE is
    /// split into pieces of this size.
    pub window: u32,
    /// OPTIMAL TRANSFER LENGTH in bytes, limited to the maximum. Not reported if this is zero.
    pub optimal_transfer: u32,
    /// MAXIMUM UNMAP LBA COUNT in blocks, per UNMAP command.
    pub max_unmap_blocks: u32,
    /// MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT.
    pub max_unmap_descriptors: u32,
    /// MAXIMUM WRITE SAME LENGTH in blocks.
    pub max_write_same_blocks: u32,
    /// MAXIMUM COMPARE AND WRITE LENGTH in blocks, must be at least 1. The actual value is smaller
    /// if the data to compare and the data to write don't fit into a window.
    pub max_compare_write_blocks: u8,
    /// Size of the scratch space used for VERIFY or WRITE SAME, in bytes. Must be a multiple of
    /// 4096.
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

/// Configuration used to create a logical unit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Capacity in logical blocks, must be at least 1.
    pub blocks: u64,
    /// Size of a logical block.
    pub block_size: BlockSize,
    /// Protection information stored with every block, or `None` if this is not supported.
    pub protection: Option<Protection>,
    /// Whether FORMAT UNIT can change the type of the protection information. Not used without
    /// [`Self::protection`].
    pub protection_format: ProtectionFormat,
    /// LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT, e.g. 3 for 512-byte blocks on a disk with
    /// 4096-byte sectors.
    pub physical_exponent: u8,
    /// If set, all writes will fail with WRITE PROTECTED.
    pub read_only: bool,
    /// Thin or thick provisioning (SBC-3 4.7).
    pub provisioning: Provisioning,
    /// Percentage of space used when the soft threshold is reached, from 1 to 99. See
    /// [`LogicalUnit::note_space`](crate::lu::LogicalUnit::note_space). Only supported for thin
    /// provisioning.
    pub threshold: Option<u8>,
    /// If set, written data may be stored in a volatile cache until the next flush (WCE).
    pub write_cache: bool,
    /// If set, START STOP UNIT will stop the LU for all initiators.
    pub stoppable: bool,
    /// If set, report a rotating medium instead of a solid state device.
    pub rotational: bool,
    /// Names to return in INQUIRY data.
    pub identity: Identity,
    /// Transfer limits for VPD page B0h.
    pub limits: Limits,
    /// Identifies the contents of the volatile cache, for page C0h. If this changes, cached data
    /// may have been lost.
    pub cache_generation: Option<[u8; 16]>,
}

/// An error in the configuration of a logical unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConfigError {
    /// The capacity is zero, or the number of bytes is more than 63 bits.
    #[error("the capacity must be between 1 block and 2^63 bytes")]
    Capacity,
    /// A name is too long, must not be empty, or contains non-printable characters.
    #[error("{0} is empty, too long, or not printable ASCII")]
    Text(&'static str),
    /// A limit is zero or not a valid multiple.
    #[error("the limit {0} is zero, too large or misaligned")]
    Limit(&'static str),
    /// The physical block size exponent is more than 15.
    #[error("the physical block exponent must be at most 15")]
    PhysicalExponent,
    /// The NAA identifier does not fit the format.
    #[error("the NAA identifier does not fit its format")]
    Naa,
}

impl Config {
    /// Checks that the configuration is valid.
    ///
    /// # Errors
    ///
    /// The first error that was found.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let block = self.block_size.bytes();
        self.blocks
            .checked_mul(u64::from(block))
            // Both files and block devices use signed 64-bit offsets.
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
            // The list uses a 16-bit length field.
            return Err(ConfigError::Limit("max_unmap_descriptors"));
        }
        limit(limits.max_write_same_blocks, 1, "max_write_same_blocks")?;
        limit(
            limits.max_compare_write_blocks.into(),
            1,
            "max_compare_write_blocks",
        )?;
        // A segment must be a multiple of any block size.
        limit(limits.segment, 4096, "segment")?;
        // VERIFY needs space for both in a single buffer, which has a 32-bit length.
        if limits.window.checked_add(limits.segment).is_none() {
            return Err(ConfigError::Limit("window"));
        }
        if self.protection.is_some() {
            self.validate_protection()?;
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

    /// Makes sure that the limits are large enough for at least one block with its protection
    /// information.
    fn validate_protection(&self) -> Result<(), ConfigError> {
        let block = self.block_size.bytes();
        let limits = &self.limits;
        // The protection information is transferred in addition to MAXIMUM TRANSFER LENGTH.
        let blocks = limits.max_transfer / block;
        if blocks.checked_mul(block + TUPLE_LEN).is_none() {
            return Err(ConfigError::Limit("max_transfer"));
        }
        if self.window_len() < block {
            return Err(ConfigError::Limit("window"));
        }
        if self.segment_len() < block {
            return Err(ConfigError::Limit("segment"));
        }
        Ok(())
    }

    /// Returns the maximum length of the blocks of a transfer that fit into a window.
    ///
    /// With protection information, each of these blocks needs space for the information that is
    /// transferred with it, and for the same information separated from the block.
    pub(crate) fn window_len(&self) -> u32 {
        match self.protection {
            None => self.limits.window,
            Some(_) => self.protected_len(self.limits.window, 2 * TUPLE_LEN),
        }
    }

    /// Returns the maximum length of the blocks that fit into a segment, with their protection
    /// information.
    pub(crate) fn segment_len(&self) -> u32 {
        match self.protection {
            None => self.limits.segment,
            Some(_) => self.protected_len(self.limits.segment, TUPLE_LEN),
        }
    }

    /// Returns the length of the blocks that fit into `space`, if each of them needs `extra` bytes.
    ///
    /// This is rounded down to a multiple of 4096 bytes, unless it is smaller. This is for
    /// performance: if the next piece isn't aligned, the backend may have to read and write more
    /// than the blocks of a piece.
    fn protected_len(&self, space: u32, extra: u32) -> u32 {
        let block = self.block_size.bytes();
        let len = space / (block + extra) * block;
        if len < 4096 { len } else { len - len % 4096 }
    }

    /// Returns the MAXIMUM COMPARE AND WRITE LENGTH in blocks. This is the configured limit, but
    /// must be small enough for the data to compare and the data to write to fit into a single
    /// transfer and a single window, because this command is never split.
    pub(crate) fn max_compare_write(&self) -> u8 {
        let limits = &self.limits;
        let transfer = limits.max_transfer / self.block_size.bytes();
        let fit = transfer.min(self.window_len() / self.block_size.bytes()) / 2;
        let fit = u8::try_from(fit).unwrap_or(u8::MAX);
        limits.max_compare_write_blocks.min(fit)
    }

    /// Returns the type of the protection information when the LU is created, or `None` if there is
    /// no protection.
    pub(crate) fn initial_protection_type(&self) -> Option<ProtectionType> {
        let protection = self.protection?;
        match self.protection_format {
            ProtectionFormat::Fixed => Some(protection.protection_type),
            ProtectionFormat::Changeable(current) => current,
        }
    }

    /// Returns whether the medium can be formatted with this type of protection information, or
    /// without protection.
    pub(crate) fn allows_format(&self, protection_type: Option<ProtectionType>) -> bool {
        self.stores_protection_type() || self.initial_protection_type() == protection_type
    }

    /// Returns whether the type of the protection information is stored on the medium.
    pub(crate) fn stores_protection_type(&self) -> bool {
        let is_changeable = matches!(self.protection_format, ProtectionFormat::Changeable(_));
        self.protection.is_some() && is_changeable
    }

    /// Returns whether this is thin provisioned.
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
