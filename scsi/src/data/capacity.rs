//! READ CAPACITY data (SBC-3 5.15.2, 5.16.2).

/// READ CAPACITY (10) parameter data (SBC-3 5.15.2).
pub mod capacity_10 {
    use crate::data::field::{Field, be32};

    /// Size of the data, in bytes.
    pub const LEN: usize = 8;

    /// RETURNED LOGICAL BLOCK ADDRESS of the last block, or FFFFFFFFh if this is too large for 32
    /// bits.
    pub const LAST_LBA: Field<u32> = be32(0);
    /// LOGICAL BLOCK LENGTH IN BYTES.
    pub const BLOCK_LENGTH: Field<u32> = be32(4);
}

/// READ CAPACITY (16) parameter data (SBC-3 5.16.2).
pub mod capacity_16 {
    use crate::data::field::{Field, be32, be64, bit, bits};

    /// Size of the data, in bytes.
    pub const LEN: usize = 32;

    /// RETURNED LOGICAL BLOCK ADDRESS of the last block.
    pub const LAST_LBA: Field<u64> = be64(0);
    /// LOGICAL BLOCK LENGTH IN BYTES.
    pub const BLOCK_LENGTH: Field<u32> = be32(8);
    /// P_TYPE: type of protection, starting at 0 for type 1.
    pub const P_TYPE: Field<u8> = bits(12, 3, 1);
    /// PROT_EN: protection information is enabled.
    pub const PROT_EN: Field<bool> = bit(12, 0);
    /// P_I_EXPONENT: number of protection intervals per block, as a power of two.
    pub const P_I_EXPONENT: Field<u8> = bits(13, 7, 4);
    /// LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT.
    pub const PHYSICAL_EXPONENT: Field<u8> = bits(13, 3, 0);
    /// LBPME: logical blocks can be deallocated.
    pub const LBPME: Field<bool> = bit(14, 7);
    /// LBPRZ: deallocated blocks are read as zeros.
    pub const LBPRZ: Field<bool> = bit(14, 6);
}
