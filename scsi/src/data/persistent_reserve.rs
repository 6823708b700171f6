//! Parameter data of PERSISTENT RESERVE IN and OUT (SPC-4 6.15, 6.16).

use super::field::{Field, be16, be32, be64, bit, bits};

/// Header of READ KEYS, READ RESERVATION and READ FULL STATUS (SPC-4 6.15.2).
pub(crate) mod list {
    use super::{Field, be32};

    pub(crate) const LEN: usize = 8;

    pub(crate) const PRGENERATION: Field<u32> = be32(0);
    /// ADDITIONAL LENGTH: bytes after this field.
    pub(crate) const ADDITIONAL_LENGTH: Field<u32> = be32(4);
}

/// Reservation descriptor of READ RESERVATION (SPC-4 6.15).
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

    /// LENGTH: bytes of the data.
    pub(crate) const LENGTH: Field<u16> = be16(0);
    /// PTPL_C: reservations can persist through power loss.
    pub(crate) const PTPL_C: Field<bool> = bit(2, 0);
    /// TMV: the type mask is valid.
    pub(crate) const TMV: Field<bool> = bit(3, 7);
    /// PTPL_A: reservations persist through power loss now.
    pub(crate) const PTPL_A: Field<bool> = bit(3, 0);
    /// PERSISTENT RESERVATION TYPE MASK; bits 8 to 15 are types 0 to 7, bit 0 is type 8.
    pub(crate) const TYPE_MASK: Field<u16> = be16(4);
}

/// Full status descriptor of READ FULL STATUS (SPC-4 6.15).
pub(crate) mod full_status {
    use super::{Field, be16, be32, be64, bit, bits};

    /// Bytes before the TransportID.
    pub(crate) const LEN: usize = 24;

    pub(crate) const RESERVATION_KEY: Field<u64> = be64(0);
    /// R_HOLDER: holds the reservation.
    pub(crate) const R_HOLDER: Field<bool> = bit(12, 0);
    /// TYPE, of a holder.
    pub(crate) const TYPE: Field<u8> = bits(13, 3, 0);
    /// RELATIVE TARGET PORT IDENTIFIER.
    pub(crate) const RELATIVE_TARGET_PORT: Field<u16> = be16(18);
    /// ADDITIONAL DESCRIPTOR LENGTH: bytes of the TransportID.
    pub(crate) const ADDITIONAL_LENGTH: Field<u32> = be32(20);
}

/// Parameter list of PERSISTENT RESERVE OUT, but for REGISTER AND MOVE (SPC-4 6.16).
pub(crate) mod out {
    use super::{Field, be64, bit};

    pub(crate) const LEN: usize = 24;

    pub(crate) const RESERVATION_KEY: Field<u64> = be64(0);
    /// SERVICE ACTION RESERVATION KEY.
    pub(crate) const SERVICE_ACTION_KEY: Field<u64> = be64(8);
    /// SPEC_I_PT: a list of initiator ports follows.
    pub(crate) const SPEC_I_PT: Field<bool> = bit(20, 3);
    /// ALL_TG_PT: for all target ports.
    pub(crate) const ALL_TG_PT: Field<bool> = bit(20, 2);
    /// APTPL: persist through power loss.
    pub(crate) const APTPL: Field<bool> = bit(20, 0);
}

/// TransportID of an initiator port (SPC-4 7.6.4).
pub(crate) mod transport_id {
    use super::{Field, be16, bits};

    /// Bytes of a TransportID of fixed length.
    pub(crate) const LEN: usize = 24;

    pub(crate) const FORMAT_CODE: Field<u8> = bits(0, 7, 6);
    /// FORMAT CODE of an iSCSI port: its name and the session identifier.
    pub(crate) const PORT: u8 = 0b01;
    pub(crate) const PROTOCOL_IDENTIFIER: Field<u8> = bits(0, 3, 0);
    /// First byte of an SRP port's identifier.
    pub(crate) const SRP_PORT_AT: usize = 8;
    /// ADDITIONAL LENGTH of an iSCSI port: bytes of the name that follows.
    pub(crate) const ADDITIONAL_LENGTH: Field<u16> = be16(2);
    /// First byte of an iSCSI port's name.
    pub(crate) const ISCSI_NAME_AT: usize = 4;
}
