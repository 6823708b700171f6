//! Vital product data (SPC-4 7.8, SBC-3 6.6). Field offsets are from the start of the page.

use super::field::{Field, be16, be32, be64, bit, bits, byte};

/// Size of the header before the page body, in bytes.
pub const HEADER_LEN: usize = 4;

/// Supported VPD Pages (SPC-4 7.8).
pub const SUPPORTED_PAGES: u8 = 0x00;
/// Unit Serial Number (SPC-4 7.8).
pub const UNIT_SERIAL_NUMBER: u8 = 0x80;
/// Device Identification (SPC-4 7.8.6).
pub const DEVICE_IDENTIFICATION: u8 = 0x83;
/// Extended INQUIRY Data (SPC-4 7.8).
pub const EXTENDED_INQUIRY: u8 = 0x86;
/// Block Limits (SBC-3 6.6).
pub const BLOCK_LIMITS: u8 = 0xb0;
/// Block Device Characteristics (SBC-3 6.6).
pub const BLOCK_DEVICE_CHARACTERISTICS: u8 = 0xb1;
/// Logical Block Provisioning (SBC-3 6.6.4).
pub const LOGICAL_BLOCK_PROVISIONING: u8 = 0xb2;
/// A vendor-specific page that we have defined. It contains the generation of the volatile cache.
/// If an initiator gets a different generation after a login, any writes that it hasn't flushed may
/// have been lost.
pub const CACHE_GENERATION: u8 = 0xc0;

/// Magic at the start of the Cache Generation page, because other vendors use this code for
/// different pages.
const GENERATION_MARK: &[u8; 8] = b"RISERGEN";

/// PAGE CODE for this page.
const PAGE_CODE: Field<u8> = byte(1);
/// PAGE LENGTH: number of bytes after this field.
const PAGE_LENGTH: Field<u16> = be16(2);

/// Creates a new page for a direct-access block device, with the given body.
///
/// # Panics
/// If the body is longer than 65535 bytes.
#[must_use]
pub fn with_body(code: u8, body: &[u8]) -> Vec<u8> {
    let mut page = with_len(code, HEADER_LEN + body.len());
    page[HEADER_LEN..].copy_from_slice(body);
    page
}

/// Creates a new page for a direct-access block device, with a total size of `len` bytes. All
/// fields are set to zero.
pub(crate) fn with_len(code: u8, len: usize) -> Vec<u8> {
    let mut page = vec![0; len];
    let body = u16::try_from(len - HEADER_LEN).expect("page length fits into its field");
    PAGE_CODE.set(&mut page, code);
    PAGE_LENGTH.set(&mut page, body);
    page
}

/// Returns the code of a received page, or `None` if the header is incomplete.
#[must_use]
pub fn code(data: &[u8]) -> Option<u8> {
    PAGE_CODE.get(data.get(..HEADER_LEN)?)
}

/// Returns a received page up to the PAGE LENGTH, or `None` if this is a different page or the
/// header is incomplete.
#[must_use]
pub fn received(data: &[u8], code: u8) -> Option<&[u8]> {
    // If a target doesn't support this page, it may return standard INQUIRY data, where the second
    // byte is different.
    (self::code(data)? == code).then_some(())?;
    let declared = HEADER_LEN + usize::from(PAGE_LENGTH.get(data)?);
    Some(&data[..declared.min(data.len())])
}

/// Returns the body of a received page. See [`received`].
#[must_use]
pub fn body(data: &[u8], code: u8) -> Option<&[u8]> {
    received(data, code)?.get(HEADER_LEN..)
}

/// Creates the Cache Generation page.
pub(crate) fn cache_generation_page(generation: [u8; 16]) -> Vec<u8> {
    with_body(
        CACHE_GENERATION,
        &[&GENERATION_MARK[..], &generation].concat(),
    )
}

/// Returns the generation in the body of a Cache Generation page, or `None` if this is a page from
/// some other vendor.
#[must_use]
pub fn cache_generation(body: &[u8]) -> Option<[u8; 16]> {
    body.strip_prefix(GENERATION_MARK)?.first_chunk().copied()
}

/// Extended INQUIRY Data page (SPC-4 7.8).
pub mod extended_inquiry {
    use super::{Field, be16, bit, bits, byte};

    pub(crate) const LEN: usize = 64;

    /// ACTIVATE MICROCODE: when new microcode is activated.
    pub const ACTIVATE_MICROCODE: Field<u8> = bits(4, 7, 6);
    /// SPT: supported protection types.
    pub const SPT: Field<u8> = bits(4, 5, 3);
    /// GRD_CHK: checks the LOGICAL BLOCK GUARD.
    pub const GRD_CHK: Field<bool> = bit(4, 2);
    /// APP_CHK: checks the LOGICAL BLOCK APPLICATION TAG.
    pub const APP_CHK: Field<bool> = bit(4, 1);
    /// REF_CHK: checks the LOGICAL BLOCK REFERENCE TAG.
    pub const REF_CHK: Field<bool> = bit(4, 0);
    /// UASK_SUP: unit attentions can contain sense key specific data.
    pub const UASK_SUP: Field<bool> = bit(5, 5);
    /// GROUP_SUP: supports GROUP NUMBER in CDBs.
    pub const GROUP_SUP: Field<bool> = bit(5, 4);
    /// PRIOR_SUP: supports command priorities.
    pub const PRIOR_SUP: Field<bool> = bit(5, 3);
    /// HEADSUP: supports HEAD OF QUEUE.
    pub const HEADSUP: Field<bool> = bit(5, 2);
    /// ORDSUP: supports the ORDERED attribute.
    pub const ORDSUP: Field<bool> = bit(5, 1);
    /// SIMPSUP: supports the SIMPLE attribute.
    pub const SIMPSUP: Field<bool> = bit(5, 0);
    /// WU_SUP: WRITE LONG can mark a block as uncorrectable.
    pub const WU_SUP: Field<bool> = bit(6, 3);
    /// CRD_SUP: error correction can be disabled.
    pub const CRD_SUP: Field<bool> = bit(6, 2);
    /// NV_SUP: there is a non-volatile cache.
    pub const NV_SUP: Field<bool> = bit(6, 1);
    /// V_SUP: supports a volatile cache.
    pub const V_SUP: Field<bool> = bit(6, 0);
    /// P_I_I_SUP: supports protection information intervals.
    pub const P_I_I_SUP: Field<bool> = bit(7, 4);
    /// LUICLR: for an I_T nexus loss, unit attentions are kept per logical unit.
    pub const LUICLR: Field<bool> = bit(7, 0);
    /// R_SUP: supports referrals.
    pub const R_SUP: Field<bool> = bit(8, 4);
    /// CBCS: supports capability-based command security.
    pub const CBCS: Field<bool> = bit(8, 0);
    /// MULTI I_T NEXUS MICROCODE DOWNLOAD.
    pub const MULTI_NEXUS_MICROCODE: Field<u8> = bits(9, 3, 0);
    /// EXTENDED SELF-TEST COMPLETION MINUTES.
    pub const EXTENDED_SELF_TEST_MINUTES: Field<u16> = be16(10);
    /// POA_SUP: microcode can be activated at power on.
    pub const POA_SUP: Field<bool> = bit(12, 7);
    /// HRA_SUP: microcode can be activated with a hard reset.
    pub const HRA_SUP: Field<bool> = bit(12, 6);
    /// VSA_SUP: microcode can be activated with a vendor-specific event.
    pub const VSA_SUP: Field<bool> = bit(12, 5);
    /// MAXIMUM SUPPORTED SENSE DATA LENGTH.
    pub const MAXIMUM_SENSE_LENGTH: Field<u8> = byte(13);
}

/// Block Limits page (SBC-3 6.6). If a value is zero, either there is no limit or the operation is
/// not supported, as defined for each field in the standard.
pub mod block_limits {
    use super::{Field, be16, be32, be64, bit, byte};

    pub(crate) const LEN: usize = 64;

    /// WSNZ: WRITE SAME requires a non-zero number of blocks.
    pub const WSNZ: Field<bool> = bit(4, 0);
    /// MAXIMUM COMPARE AND WRITE LENGTH in blocks.
    pub const MAXIMUM_COMPARE_AND_WRITE_LENGTH: Field<u8> = byte(5);
    /// OPTIMAL TRANSFER LENGTH GRANULARITY in blocks.
    pub const OPTIMAL_TRANSFER_LENGTH_GRANULARITY: Field<u16> = be16(6);
    /// MAXIMUM TRANSFER LENGTH in blocks.
    pub const MAXIMUM_TRANSFER_LENGTH: Field<u32> = be32(8);
    /// OPTIMAL TRANSFER LENGTH in blocks.
    pub const OPTIMAL_TRANSFER_LENGTH: Field<u32> = be32(12);
    /// MAXIMUM PREFETCH LENGTH in blocks.
    pub const MAXIMUM_PREFETCH_LENGTH: Field<u32> = be32(16);
    /// MAXIMUM UNMAP LBA COUNT.
    pub const MAXIMUM_UNMAP_LBA_COUNT: Field<u32> = be32(20);
    /// MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT.
    pub const MAXIMUM_UNMAP_BLOCK_DESCRIPTOR_COUNT: Field<u32> = be32(24);
    /// OPTIMAL UNMAP GRANULARITY in blocks.
    pub const OPTIMAL_UNMAP_GRANULARITY: Field<u32> = be32(28);
    /// UGAVALID: the alignment is valid.
    pub const UGAVALID: Field<bool> = bit(32, 7);
    /// UNMAP GRANULARITY ALIGNMENT in blocks. The most significant bit is UGAVALID.
    pub const UNMAP_GRANULARITY_ALIGNMENT: Field<u32> = be32(32);
    /// MAXIMUM WRITE SAME LENGTH in blocks.
    pub const MAXIMUM_WRITE_SAME_LENGTH: Field<u64> = be64(36);
    /// MAXIMUM ATOMIC TRANSFER LENGTH in blocks (SBC-4).
    pub const MAXIMUM_ATOMIC_TRANSFER_LENGTH: Field<u32> = be32(44);
    /// ATOMIC ALIGNMENT in blocks (SBC-4).
    pub const ATOMIC_ALIGNMENT: Field<u32> = be32(48);
    /// ATOMIC TRANSFER LENGTH GRANULARITY in blocks (SBC-4).
    pub const ATOMIC_TRANSFER_LENGTH_GRANULARITY: Field<u32> = be32(52);
}

/// Block Device Characteristics page (SBC-3 6.6).
pub mod characteristics {
    use super::{Field, be16, bit, bits, byte};

    pub(crate) const LEN: usize = 64;
    /// The medium does not rotate.
    pub(crate) const NON_ROTATING: u16 = 1;

    /// MEDIUM ROTATION RATE in rotations per minute, or 1 if the medium does not rotate.
    pub const MEDIUM_ROTATION_RATE: Field<u16> = be16(4);
    /// PRODUCT TYPE of a removable medium.
    pub const PRODUCT_TYPE: Field<u8> = byte(6);
    /// WABEREQ: the result of reads after a block erase.
    pub const WABEREQ: Field<u8> = bits(7, 7, 6);
    /// WACEREQ: the result of reads after a cryptographic erase.
    pub const WACEREQ: Field<u8> = bits(7, 5, 4);
    /// NOMINAL FORM FACTOR, a 4-bit enum.
    pub const NOMINAL_FORM_FACTOR: Field<u8> = bits(7, 3, 0);
    /// ZONED: type of a zoned block device (SBC-4).
    pub const ZONED: Field<u8> = bits(8, 5, 4);
    /// FUAB: SYNCHRONIZE CACHE only flushes writes before it.
    pub const FUAB: Field<bool> = bit(8, 1);
    /// VBULS: VERIFY can be used for unmapped blocks.
    pub const VBULS: Field<bool> = bit(8, 0);
}

/// Logical Block Provisioning page (SBC-3 6.6.4).
pub mod provisioning {
    use super::{Field, bit, bits, byte};

    pub(crate) const LEN: usize = 8;
    /// Deallocated blocks are read as zeros (LBPRZ).
    pub(crate) const READS_ZEROES: u8 = 0b001;
    /// PROVISIONING TYPE: thin provisioned.
    pub(crate) const THIN: u8 = 2;

    /// THRESHOLD EXPONENT: number of blocks in a threshold set, as a power of two.
    pub const THRESHOLD_EXPONENT: Field<u8> = byte(4);
    /// LBPU: supports UNMAP.
    pub const LBPU: Field<bool> = bit(5, 7);
    /// LBPWS: supports WRITE SAME (16) with UNMAP.
    pub const LBPWS: Field<bool> = bit(5, 6);
    /// LBPWS10: supports WRITE SAME (10) with UNMAP.
    pub const LBPWS10: Field<bool> = bit(5, 5);
    /// LBPRZ: the result of reading deallocated blocks. This is a single bit in SBC-3.
    pub const LBPRZ: Field<u8> = bits(5, 4, 2);
    /// ANC_SUP: supports anchored blocks.
    pub const ANC_SUP: Field<bool> = bit(5, 1);
    /// DP: followed by a descriptor.
    pub const DP: Field<bool> = bit(5, 0);
    /// PROVISIONING TYPE: 1 for resource provisioning, 2 for thin provisioning.
    pub const PROVISIONING_TYPE: Field<u8> = bits(6, 2, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_end_at_declared_or_received_length() {
        let data = [0, 0xb0, 0, 2, 1, 2, 3];
        assert_eq!(received(&data, BLOCK_LIMITS), Some(&data[..6]));
        assert_eq!(body(&data, BLOCK_LIMITS), Some(&[1, 2][..]));
        assert_eq!(received(&data, UNIT_SERIAL_NUMBER), None);
        let lies = [0, 0xb0, 0xff, 0xff, 1];
        assert_eq!(received(&lies, BLOCK_LIMITS), Some(&lies[..]));
        assert_eq!(received(&[0, 0xb0, 0], BLOCK_LIMITS), None);
        assert_eq!(received(&with_body(0xb0, &[7]), 0xb0).unwrap()[4..], [7]);
    }
}
