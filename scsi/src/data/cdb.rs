//! CDB fields, used by the initiator to set them and by the target to read them.

use super::field::{Field, be16, be32, be64, bit, bits, byte};

/// 16-byte CDB of a block command, e.g. READ (16) (SBC-3 5.11).
pub mod block_16 {
    use super::{Field, be32, be64, bit, bits};

    /// FUA, also used in a 10-byte or 12-byte CDB.
    pub const FUA: Field<bool> = bit(1, 3);
    /// RDPROTECT, WRPROTECT, VRPROTECT or ORPROTECT, also used in a 10-byte or 12-byte CDB.
    pub const PROTECT: Field<u8> = bits(1, 7, 5);
    /// LOGICAL BLOCK ADDRESS, 8 bytes.
    pub const LOGICAL_BLOCK_ADDRESS: Field<u64> = be64(2);
    /// TRANSFER LENGTH or NUMBER OF LOGICAL BLOCKS.
    pub const TRANSFER_LENGTH: Field<u32> = be32(10);
}

/// 32-byte CDB of a block command, e.g. READ (32) (SBC-4 5.19).
pub mod block_32 {
    use super::{Field, be16, be32, be64, bit, bits, byte};

    /// OPERATION CODE of all commands with a variable length.
    pub const VARIABLE_LENGTH: u8 = 0x7f;
    /// Value of ADDITIONAL CDB LENGTH: number of bytes after byte 7.
    pub const ADDITIONAL_LEN: u8 = 0x18;

    /// ADDITIONAL CDB LENGTH.
    pub const ADDITIONAL_LENGTH: Field<u8> = byte(7);
    /// SERVICE ACTION.
    pub const SERVICE_ACTION: Field<u16> = be16(8);
    /// RDPROTECT, WRPROTECT or VRPROTECT.
    pub const PROTECT: Field<u8> = bits(10, 7, 5);
    /// FUA: access the medium instead of a volatile cache.
    pub const FUA: Field<bool> = bit(10, 3);
    /// LOGICAL BLOCK ADDRESS, 8 bytes.
    pub const LOGICAL_BLOCK_ADDRESS: Field<u64> = be64(12);
    /// EXPECTED INITIAL LOGICAL BLOCK REFERENCE TAG of the first block.
    pub const EXPECTED_REFERENCE_TAG: Field<u32> = be32(20);
    /// EXPECTED LOGICAL BLOCK APPLICATION TAG.
    pub const EXPECTED_APPLICATION_TAG: Field<u16> = be16(24);
    /// LOGICAL BLOCK APPLICATION TAG MASK: the bits of the application tag to check.
    pub const APPLICATION_TAG_MASK: Field<u16> = be16(26);
    /// TRANSFER LENGTH or NUMBER OF LOGICAL BLOCKS.
    pub const TRANSFER_LENGTH: Field<u32> = be32(28);
}

/// 10-byte CDB of a block command, e.g. READ (10) (SBC-3 5.8).
pub mod block_10 {
    use super::{Field, be16, be32};

    /// LOGICAL BLOCK ADDRESS, 4 bytes.
    pub const LOGICAL_BLOCK_ADDRESS: Field<u32> = be32(2);
    /// TRANSFER LENGTH or NUMBER OF LOGICAL BLOCKS.
    pub const TRANSFER_LENGTH: Field<u16> = be16(7);
}

/// REQUEST SENSE (SPC-4 6.39).
pub mod request_sense {
    use super::{Field, bit, byte};

    /// DESC: return sense data in descriptor format.
    pub const DESC: Field<bool> = bit(1, 0);
    /// ALLOCATION LENGTH in bytes.
    pub const ALLOCATION_LENGTH: Field<u8> = byte(4);
}

/// INQUIRY, with a 6-byte CDB (SPC-4 6.6.1).
pub mod inquiry {
    use super::{Field, be16, bit, byte};

    /// EVPD: return a VPD page.
    pub const EVPD: Field<bool> = bit(1, 0);
    /// PAGE CODE of the VPD page, if EVPD is set.
    pub const PAGE_CODE: Field<u8> = byte(2);
    /// ALLOCATION LENGTH in bytes.
    pub const ALLOCATION_LENGTH: Field<u16> = be16(3);
}

/// MODE SENSE (6) (SPC-4 6.13).
pub mod mode_sense_6 {
    use super::{Field, bit, bits, byte};

    /// DBD: don't return any block descriptors. Also used in the 10-byte CDB.
    pub const DBD: Field<bool> = bit(1, 3);
    /// PC: the type of values to return. Also used in the 10-byte CDB.
    pub const PC: Field<u8> = bits(2, 7, 6);
    /// PAGE CODE. Also used in the 10-byte CDB.
    pub const PAGE_CODE: Field<u8> = bits(2, 5, 0);
    /// SUBPAGE CODE. Also used in the 10-byte CDB.
    pub const SUBPAGE_CODE: Field<u8> = byte(3);
    /// ALLOCATION LENGTH in bytes.
    pub const ALLOCATION_LENGTH: Field<u8> = byte(4);
}

/// MODE SENSE (10) (SPC-4 6.14).
pub(crate) mod mode_sense_10 {
    use super::{Field, be16, bit};

    /// LLBAA: allow long block descriptors.
    pub(crate) const LLBAA: Field<bool> = bit(1, 4);
    pub(crate) const ALLOCATION_LENGTH: Field<u16> = be16(7);
}

/// FORMAT UNIT (SBC-4 5.4.1).
pub mod format_unit {
    use super::{Field, bit, bits};

    /// FMTPINFO: format protection information. Selects the type together with PROTECTION FIELD
    /// USAGE in the parameter list.
    pub const FMTPINFO: Field<u8> = bits(1, 7, 6);
    /// LONGLIST: the parameter list has a long header.
    pub const LONGLIST: Field<bool> = bit(1, 5);
    /// FMTDATA: there is a parameter list.
    pub const FMTDATA: Field<bool> = bit(1, 4);
    /// CMPLST: the defect list is complete.
    pub const CMPLST: Field<bool> = bit(1, 3);
    /// DEFECT LIST FORMAT.
    pub const DEFECT_LIST_FORMAT: Field<u8> = bits(1, 2, 0);
}

/// UNMAP, with a 10-byte CDB (SBC-3 5.28.1).
pub mod unmap {
    use super::{Field, be16};

    /// PARAMETER LIST LENGTH, in bytes.
    pub const PARAMETER_LIST_LENGTH: Field<u16> = be16(7);
}

/// WRITE SAME (16) (SBC-3 5.49).
pub mod write_same_16 {
    use super::{Field, bit};

    /// UNMAP. Also used in the 10-byte CDB.
    pub const UNMAP: Field<bool> = bit(1, 3);
    /// NDOB: write zeros without any Data-Out.
    pub const NDOB: Field<bool> = bit(1, 0);
}

/// PERSISTENT RESERVE IN and OUT (SPC-4 6.15.1, 6.16.1).
pub(crate) mod persistent_reserve {
    use super::{Field, be16, be32, bits};

    pub(crate) const SERVICE_ACTION: Field<u8> = bits(1, 4, 0);
    /// SCOPE for PERSISTENT RESERVE OUT, 4 bits.
    pub(crate) const SCOPE: Field<u8> = bits(2, 7, 4);
    /// TYPE for PERSISTENT RESERVE OUT, 4 bits.
    pub(crate) const TYPE: Field<u8> = bits(2, 3, 0);
    /// PARAMETER LIST LENGTH for PERSISTENT RESERVE OUT.
    pub(crate) const PARAMETER_LIST_LENGTH: Field<u32> = be32(5);
    /// ALLOCATION LENGTH for PERSISTENT RESERVE IN.
    pub(crate) const ALLOCATION_LENGTH: Field<u16> = be16(7);
}

/// READ CAPACITY (16) (SBC-3 5.16.1).
pub mod read_capacity_16 {
    use super::{Field, be32};

    /// ALLOCATION LENGTH in bytes.
    pub const ALLOCATION_LENGTH: Field<u32> = be32(10);
}

/// GET LBA STATUS (SBC-3 5.6.1).
pub mod get_lba_status {
    use super::{Field, be32, be64};

    /// STARTING LOGICAL BLOCK ADDRESS.
    pub const STARTING_LBA: Field<u64> = be64(2);
    /// ALLOCATION LENGTH in bytes.
    pub const ALLOCATION_LENGTH: Field<u32> = be32(10);
}

/// REPORT LUNS (SPC-4 6.33).
pub mod report_luns {
    use super::{Field, be32, byte};

    /// SELECT REPORT: which logical units to return (SPC-4 6.33).
    pub const SELECT_REPORT: Field<u8> = byte(2);
    /// ALLOCATION LENGTH in bytes.
    pub const ALLOCATION_LENGTH: Field<u32> = be32(6);
}

/// REPORT TARGET PORT GROUPS (SPC-4 6.37).
pub mod report_target_port_groups {
    use super::{Field, be32};

    /// ALLOCATION LENGTH in bytes.
    pub const ALLOCATION_LENGTH: Field<u32> = be32(6);
}
