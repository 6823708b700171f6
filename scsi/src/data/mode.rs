//! Mode parameters (SPC-4 7.5, SBC-3 6.5).

use super::field::{Field, be16, be24, be32, be64, bit, bits, byte};

/// PS: the page can be saved. Reserved in MODE SELECT.
pub(crate) const PS: Field<bool> = bit(0, 7);
/// SPF: the page header contains a subpage code.
pub(crate) const SPF: Field<bool> = bit(0, 6);
/// PAGE CODE of a page.
pub const PAGE_CODE: Field<u8> = bits(0, 5, 0);
/// PAGE LENGTH of a page without subpage code: number of bytes after this field.
pub const PAGE_LENGTH: Field<u8> = byte(1);
/// Size of a page header without subpage code, in bytes.
pub const PAGE_HEADER_LEN: usize = 2;

/// PAGE CODE: Read-Write Error Recovery (SBC-3 6.5).
pub const READ_WRITE_ERROR_RECOVERY: u8 = 0x01;
/// PAGE CODE: Caching (SBC-3 6.5).
pub const CACHING: u8 = 0x08;
/// PAGE CODE: Control (SPC-4 7.5.8).
pub const CONTROL: u8 = 0x0a;
/// PAGE CODE: Informational Exceptions Control (SBC-3 6.5).
pub const INFORMATIONAL_EXCEPTIONS: u8 = 0x1c;
/// PAGE CODE in MODE SENSE, to request all pages.
pub const ALL_PAGES: u8 = 0x3f;

/// Mode parameter header of MODE SENSE (6) and MODE SELECT (6) (SPC-4 7.5).
pub mod header_6 {
    use super::{Field, bit, byte};

    /// Size of the header, in bytes.
    pub const LEN: usize = 4;

    /// MODE DATA LENGTH: number of bytes after this field.
    pub const DATA_LENGTH: Field<u8> = byte(0);
    /// WP: the medium is write protected.
    pub const WP: Field<bool> = bit(2, 7);
    /// DPOFUA: DPO and FUA are supported.
    pub const DPOFUA: Field<bool> = bit(2, 4);
    /// BLOCK DESCRIPTOR LENGTH in bytes.
    pub const BLOCK_DESCRIPTOR_LENGTH: Field<u8> = byte(3);
}

/// Mode parameter header of MODE SENSE (10) and MODE SELECT (10) (SPC-4 7.5).
pub(crate) mod header_10 {
    use super::{Field, be16, bit};

    pub(crate) const LEN: usize = 8;

    /// MODE DATA LENGTH: number of bytes after this field.
    pub(crate) const DATA_LENGTH: Field<u16> = be16(0);
    /// WP: the medium is write protected.
    pub(crate) const WP: Field<bool> = bit(3, 7);
    /// DPOFUA: DPO and FUA are supported.
    pub(crate) const DPOFUA: Field<bool> = bit(3, 4);
    /// LONGLBA: the block descriptor uses the long format.
    pub(crate) const LONGLBA: Field<bool> = bit(4, 0);
    pub(crate) const BLOCK_DESCRIPTOR_LENGTH: Field<u16> = be16(6);
}

/// Short LBA mode parameter block descriptor (SBC-3 6.5).
pub(crate) mod short_descriptor {
    use super::{Field, be24, be32};

    pub(crate) const LEN: usize = 8;

    /// NUMBER OF LOGICAL BLOCKS.
    pub(crate) const BLOCKS: Field<u32> = be32(0);
    /// LOGICAL BLOCK LENGTH in bytes.
    pub(crate) const BLOCK_LENGTH: Field<u32> = be24(5);
}

/// Long LBA mode parameter block descriptor (SBC-3 6.5).
pub(crate) mod long_descriptor {
    use super::{Field, be32, be64};

    pub(crate) const LEN: usize = 16;

    /// NUMBER OF LOGICAL BLOCKS.
    pub(crate) const BLOCKS: Field<u64> = be64(0);
    /// LOGICAL BLOCK LENGTH in bytes.
    pub(crate) const BLOCK_LENGTH: Field<u32> = be32(12);
}

/// Caching mode page (SBC-3 6.5).
pub mod caching {
    use super::{Field, bit};

    pub(crate) const LEN: usize = 20;

    /// WCE: when a write completes, the data may still be in a volatile cache.
    pub const WCE: Field<bool> = bit(2, 2);
}

/// Control mode page (SPC-4 7.5.8).
pub mod control {
    use super::{Field, be16, bit, bits};

    /// DPICZ: don't check protection information if the field in the CDB is zero.
    pub const DPICZ: Field<bool> = bit(2, 3);
    /// D_SENSE: use the descriptor format for sense data.
    pub(crate) const D_SENSE: Field<bool> = bit(2, 2);
    /// GLTSD: don't save log parameters automatically.
    pub(crate) const GLTSD: Field<bool> = bit(2, 1);
    pub(crate) const QUEUE_ALGORITHM_MODIFIER: Field<u8> = bits(3, 7, 4);
    /// SWP: the medium is write protected.
    pub(crate) const SWP: Field<bool> = bit(4, 3);
    /// ATO: the application tag is owned by the application client.
    pub const ATO: Field<bool> = bit(5, 7);
    /// TAS: if a command is aborted by another nexus, it's completed with TASK ABORTED.
    pub(crate) const TAS: Field<bool> = bit(5, 6);
    /// BUSY TIMEOUT PERIOD in units of 100 ms.
    pub(crate) const BUSY_TIMEOUT_PERIOD: Field<u16> = be16(8);
}

/// Informational Exceptions Control mode page (SBC-3 6.5).
pub(crate) mod exceptions {
    use super::{Field, bit};

    /// DEXCPT: don't report any exceptions.
    pub(crate) const DEXCPT: Field<bool> = bit(2, 3);
}

/// Logical Block Provisioning mode page (SBC-3 6.5.9). This is a subpage with a single threshold
/// descriptor.
pub(crate) mod provisioning {
    use super::{Field, be16, be32, bit, bits, byte};

    /// SUBPAGE CODE, used with the page code of Informational Exceptions Control.
    pub(crate) const SUBPAGE: u8 = 0x02;
    /// Size of the page with a single descriptor, in bytes.
    pub(crate) const LEN: usize = 24;

    pub(crate) const SUBPAGE_CODE: Field<u8> = byte(1);
    /// PAGE LENGTH: number of bytes after this field.
    pub(crate) const PAGE_LENGTH: Field<u16> = be16(2);
    /// Offset of the threshold descriptor. This is used to identify the threshold in sense data
    /// (SBC-3 4.7.3.8).
    pub(crate) const DESCRIPTOR: usize = 16;
    pub(crate) const ENABLED: Field<bool> = bit(16, 7);
    pub(crate) const THRESHOLD_ARMING: Field<u8> = bits(16, 2, 0);
    /// The threshold is armed for an increasing value.
    pub(crate) const INCREASING: u8 = 0b001;
    pub(crate) const THRESHOLD_RESOURCE: Field<u8> = byte(17);
    /// Used LBA mapping resources.
    pub(crate) const USED: u8 = 0x02;
    /// THRESHOLD COUNT, as a number of threshold sets.
    pub(crate) const THRESHOLD_COUNT: Field<u32> = be32(20);
}
