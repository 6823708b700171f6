//! FORMAT UNIT parameter list (SBC-4 5.4.2).

use super::field::{Field, be16, be32, bit, bits};

/// PROTECTION FIELD USAGE, in both headers.
pub(crate) const PROTECTION_FIELD_USAGE: Field<u8> = bits(0, 2, 0);
/// FOV: the other bits of this byte are valid.
pub(crate) const FOV: Field<bool> = bit(1, 7);
/// DPRY: don't use the primary defect list.
pub(crate) const DPRY: Field<bool> = bit(1, 6);
/// DCRT: don't certify the medium.
pub(crate) const DCRT: Field<bool> = bit(1, 5);
/// STPF: stop if a defect list cannot be accessed.
pub(crate) const STPF: Field<bool> = bit(1, 4);
/// IP: the header is followed by an initialization pattern descriptor.
pub(crate) const IP: Field<bool> = bit(1, 3);

/// Header if LONGLIST is zero.
pub(crate) mod short_header {
    use super::{Field, be16};

    /// Size in bytes.
    pub(crate) const LEN: usize = 4;
    /// DEFECT LIST LENGTH in bytes.
    pub(crate) const DEFECT_LIST_LENGTH: Field<u16> = be16(2);
}

/// Header if LONGLIST is set.
pub(crate) mod long_header {
    use super::{Field, be32, bits};

    /// Size in bytes.
    pub(crate) const LEN: usize = 8;
    /// P_I_INFORMATION.
    pub(crate) const PROTECTION_INFORMATION: Field<u8> = bits(3, 7, 4);
    /// PROTECTION INTERVAL EXPONENT: number of protection intervals in a block, as a power of two.
    pub(crate) const PROTECTION_INTERVAL_EXPONENT: Field<u8> = bits(3, 3, 0);
    /// DEFECT LIST LENGTH in bytes.
    pub(crate) const DEFECT_LIST_LENGTH: Field<u32> = be32(4);
}
