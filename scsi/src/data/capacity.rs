//! READ CAPACITY data (SBC-3 5.15.2, 5.16.2).

/// READ CAPACITY (10) parameter data (SBC-3 5.15.2).
pub(crate) mod capacity_10 {
    use crate::data::field::{Field, be32};

    pub(crate) const LEN: usize = 8;

    /// RETURNED LOGICAL BLOCK ADDRESS of the last block; FFFFFFFFh where it needs more bits.
    pub(crate) const LAST_LBA: Field<u32> = be32(0);
    /// LOGICAL BLOCK LENGTH IN BYTES.
    pub(crate) const BLOCK_LENGTH: Field<u32> = be32(4);
}

/// READ CAPACITY (16) parameter data (SBC-3 5.16.2).
pub mod capacity_16 {
    use crate::data::field::{Field, be32, be64, bit, bits};

    /// Bytes of the data.
    pub const LEN: usize = 32;

    /// RETURNED LOGICAL BLOCK ADDRESS of the last block.
    pub const LAST_LBA: Field<u64> = be64(0);
    /// LOGICAL BLOCK LENGTH IN BYTES.
    pub const BLOCK_LENGTH: Field<u32> = be32(8);
    /// LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT.
    pub const PHYSICAL_EXPONENT: Field<u8> = bits(13, 3, 0);
    /// LBPME: logical blocks can be deallocated.
    pub const LBPME: Field<bool> = bit(14, 7);
    /// LBPRZ: deallocated blocks read as zeroes.
    pub const LBPRZ: Field<bool> = bit(14, 6);
}
