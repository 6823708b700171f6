//! Parameter data of PERSISTENT RESERVE IN and OUT (SPC-4 6.15, 6.16).

use super::field::{Field, be16, be32, be64, bit, bits};

/// Header for READ KEYS, READ RESERVATION and READ FULL STATUS (SPC-4 6.15.2).
pub(crate) mod list {
    use super::{Field, be32};

    pub(crate) const LEN: usize = 8;

    pub(crate) const PRGENERATION: Field<u32> = be32(0);
    /// ADDITIONAL LENGTH: number of bytes after this field.
    pub(crate) const ADDITIONAL_LENGTH: Field<u32> = be32(4);
}

/// Reservation descriptor for READ RESERVATION (SPC-4 6.15).
pub(crate) mod reservation {
    use super::{Field, be64, bits};

    pub(crate) const LEN: usize = 16;

    pub(crate) const RESERVATION_KEY: Field<u64> = be64(0);
    pub(crate) const TYPE: Field<u8> = bits(13, 3, 0);
}

/// REPORT CAPABILITIES (SPC-4 6.15).
pub(crate) mod capabilities {
    use super::{Field, be16, bit};

    pub(crate) const LEN: usize = 8;

    /// LENGTH: size of the data, in bytes.
    pub(crate) const LENGTH: Field<u16> = be16(0);
    /// PTPL_C: reservations can persist through power loss.
    pub(crate) const PTPL_C: Field<bool> = bit(2, 0);
    /// TMV: the type mask is valid.
    pub(crate) const TMV: Field<bool> = bit(3, 7);
    /// PTPL_A: persistence through power loss is currently active.
    pub(crate) const PTPL_A: Field<bool> = bit(3, 0);
    /// PERSISTENT RESERVATION TYPE MASK, using bits 8 to 15 for types 0 to 7, and bit 0 for type 8.
    pub(crate) const TYPE_MASK: Field<u16> = be16(4);
}

/// Full status descriptor for READ FULL STATUS (SPC-4 6.15).
pub(crate) mod full_status {
    use super::{Field, be16, be32, be64, bit, bits};

    /// Size before the TransportID, in bytes.
    pub(crate) const LEN: usize = 24;

    pub(crate) const RESERVATION_KEY: Field<u64> = be64(0);
    /// R_HOLDER: this is a reservation holder.
    pub(crate) const R_HOLDER: Field<bool> = bit(12, 0);
    /// TYPE, only set for a holder.
    pub(crate) const TYPE: Field<u8> = bits(13, 3, 0);
    /// RELATIVE TARGET PORT IDENTIFIER.
    pub(crate) const RELATIVE_TARGET_PORT: Field<u16> = be16(18);
    /// ADDITIONAL DESCRIPTOR LENGTH: size of the TransportID, in bytes.
    pub(crate) const ADDITIONAL_LENGTH: Field<u32> = be32(20);
}

/// Parameter list for PERSISTENT RESERVE OUT, except for REGISTER AND MOVE (SPC-4 6.16).
pub(crate) mod out {
    use super::{Field, be64, bit};

    pub(crate) const LEN: usize = 24;

    pub(crate) const RESERVATION_KEY: Field<u64> = be64(0);
    /// SERVICE ACTION RESERVATION KEY.
    pub(crate) const SERVICE_ACTION_KEY: Field<u64> = be64(8);
    /// SPEC_I_PT: followed by a list of initiator ports.
    pub(crate) const SPEC_I_PT: Field<bool> = bit(20, 3);
    /// ALL_TG_PT: apply this to all target ports.
    pub(crate) const ALL_TG_PT: Field<bool> = bit(20, 2);
    /// APTPL: persist through power loss.
    pub(crate) const APTPL: Field<bool> = bit(20, 0);
}

/// TransportID of an initiator port (SPC-4 7.6.4).
pub(crate) mod transport_id {
    use super::{Field, be16, bits};

    /// Size of a TransportID with a fixed length, in bytes.
    pub(crate) const LEN: usize = 24;

    pub(crate) const FORMAT_CODE: Field<u8> = bits(0, 7, 6);
    /// FORMAT CODE for an iSCSI port, with the name and session identifier.
    pub(crate) const PORT: u8 = 0b01;
    pub(crate) const PROTOCOL_IDENTIFIER: Field<u8> = bits(0, 3, 0);
    /// Offset of an SRP port identifier.
    pub(crate) const SRP_PORT_AT: usize = 8;
    /// ADDITIONAL LENGTH for an iSCSI port: size of the name in bytes.
    pub(crate) const ADDITIONAL_LENGTH: Field<u16> = be16(2);
    /// Offset of an iSCSI port name.
    pub(crate) const ISCSI_NAME_AT: usize = 4;
}
