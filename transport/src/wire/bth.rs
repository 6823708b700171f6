//! Base transport header (IBTA 9.2), the first 12 bytes of every packet.

use zerocopy::byteorder::big_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::ids::{Psn, Qpn, U24};
use super::opcode::Opcode;

const SOLICITED: u8 = 0x80;
const MIGRATED: u8 = 0x40;
/// Offset of the byte holding the migration bit.
const FLAGS_OFFSET: usize = 1;
const PAD_MASK: u8 = 0x30;
const PAD_SHIFT: u32 = 4;
const VERSION_MASK: u8 = 0x0f;
const FECN: u8 = 0x80;
const BECN: u8 = 0x40;
const ACK_REQUEST: u8 = 0x80;

/// P_Key of the default partition with full membership. RoCE uses only this key unless configured
/// otherwise.
pub const DEFAULT_PKEY: u16 = 0xffff;

/// Base transport header in wire format.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Bth {
    opcode: u8,
    /// Solicited event, migration state, pad count and header version.
    flags: u8,
    pkey: U16,
    /// FECN and BECN. The ICRC treats this byte as all ones because routers can change it.
    congestion: u8,
    dest_qpn: U24,
    /// Acknowledge request in the top bit, followed by seven reserved bits.
    ack: u8,
    psn: U24,
}

const _: () = assert!(size_of::<Bth>() == Bth::LEN);

impl Bth {
    /// Header length in bytes.
    pub const LEN: usize = 12;

    /// Creates a header for the default partition with all flags clear.
    #[must_use]
    pub fn new(opcode: Opcode, dest_qpn: Qpn, psn: Psn) -> Self {
        Self {
            opcode: opcode as u8,
            // Linux and all NICs send "migrated" because there is no alternate path.
            flags: MIGRATED,
            pkey: U16::new(DEFAULT_PKEY),
            congestion: 0,
            dest_qpn: dest_qpn.into(),
            ack: 0,
            psn: psn.into(),
        }
    }

    /// Creates the header of a congestion notification packet (annex A17.9.3). This has the BECN
    /// bit set, uses the P_Key of the marked packet, and carries no sequence number.
    #[must_use]
    pub fn cnp(dest_qpn: Qpn, pkey: u16) -> Self {
        Self {
            congestion: BECN,
            ..Self::new(Opcode::Cnp, dest_qpn, Psn::default())
                .with_migrated(false)
                .with_pkey(pkey)
        }
    }

    /// Sets the opcode.
    #[must_use]
    pub fn with_opcode(mut self, opcode: Opcode) -> Self {
        self.opcode = opcode as u8;
        self
    }

    /// Sets or clears the solicited-event bit.
    #[must_use]
    pub fn with_solicited(mut self, on: bool) -> Self {
        self.flags = if on {
            self.flags | SOLICITED
        } else {
            self.flags & !SOLICITED
        };
        self
    }

    /// Sets or clears the migration bit.
    #[must_use]
    pub fn with_migrated(mut self, on: bool) -> Self {
        self.flags = if on {
            self.flags | MIGRATED
        } else {
            self.flags & !MIGRATED
        };
        self
    }

    /// Clears the migration bit of a packet, given its headers starting with the BTH.
    pub fn clear_migrated(headers: &mut [u8]) {
        if let Some(flags) = headers.get_mut(FLAGS_OFFSET) {
            *flags &= !MIGRATED;
        }
    }

    /// Sets or clears the acknowledge-request bit.
    #[must_use]
    pub fn with_ack_request(mut self, on: bool) -> Self {
        self.ack = if on { ACK_REQUEST } else { 0 };
        self
    }

    /// Sets a P_Key other than the default.
    #[must_use]
    pub fn with_pkey(mut self, pkey: u16) -> Self {
        self.pkey = U16::new(pkey);
        self
    }

    /// Sets the pad count required for `payload_len` bytes of payload.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "a pad count is at most 3")]
    pub fn with_pad_for(mut self, payload_len: usize) -> Self {
        self.flags = (self.flags & !PAD_MASK) | ((pad_len(payload_len) as u8) << PAD_SHIFT);
        self
    }

    /// Returns the opcode as received, even if unknown.
    #[must_use]
    pub fn raw_opcode(&self) -> u8 {
        self.opcode
    }

    /// Returns the opcode if it is in the [table](super::opcode).
    #[must_use]
    pub fn opcode(&self) -> Option<Opcode> {
        Opcode::from_u8(self.opcode)
    }

    /// Returns whether the receiver should be notified when this message completes.
    #[must_use]
    pub fn is_solicited(&self) -> bool {
        self.flags & SOLICITED != 0
    }

    /// Returns true if the sender's path is in the migrated state.
    #[must_use]
    pub fn is_migrated(&self) -> bool {
        self.flags & MIGRATED != 0
    }

    /// Number of pad bytes between payload and ICRC, `0..=3`.
    #[must_use]
    pub fn pad(&self) -> usize {
        usize::from((self.flags & PAD_MASK) >> PAD_SHIFT)
    }

    /// Transport header version. Only version 0 exists.
    #[must_use]
    pub fn version(&self) -> u8 {
        self.flags & VERSION_MASK
    }

    /// Partition key, 16 bits.
    #[must_use]
    pub fn pkey(&self) -> u16 {
        self.pkey.get()
    }

    /// FECN: forward congestion notification.
    #[must_use]
    pub fn is_fecn(&self) -> bool {
        self.congestion & FECN != 0
    }

    /// BECN: backward congestion notification.
    #[must_use]
    pub fn is_becn(&self) -> bool {
        self.congestion & BECN != 0
    }

    /// Destination queue pair number.
    #[must_use]
    pub fn dest_qpn(&self) -> Qpn {
        self.dest_qpn.into()
    }

    /// Returns whether the sender requests an acknowledgement for this packet.
    #[must_use]
    pub fn is_ack_requested(&self) -> bool {
        self.ack & ACK_REQUEST != 0
    }

    /// Packet sequence number, 24 bits.
    #[must_use]
    pub fn psn(&self) -> Psn {
        self.psn.into()
    }
}

/// Returns the number of pad bytes, `0..=3`, required to align `payload_len` to four bytes.
#[must_use]
pub const fn pad_len(payload_len: usize) -> usize {
    payload_len.wrapping_neg() & 3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bth_matches_specification_bytes() {
        let bth = Bth::new(
            Opcode::RcSendOnlyImm,
            Qpn::new(0x12_3456),
            Psn::new(0xab_cdef),
        )
        .with_solicited(true)
        .with_ack_request(true)
        .with_pad_for(5);
        assert_eq!(
            bth.as_bytes(),
            [
                0x05, 0xf0, 0xff, 0xff, 0x00, 0x12, 0x34, 0x56, 0x80, 0xab, 0xcd, 0xef
            ]
        );
        assert_eq!(bth.pad(), 3);
        assert!(bth.is_solicited() && bth.is_migrated() && bth.is_ack_requested());
        let plain = bth
            .with_solicited(false)
            .with_migrated(false)
            .with_ack_request(false)
            .with_pkey(0x8001);
        assert_eq!(
            plain.as_bytes(),
            [
                0x05, 0x30, 0x80, 0x01, 0x00, 0x12, 0x34, 0x56, 0x00, 0xab, 0xcd, 0xef
            ]
        );
    }

    #[test]
    fn padding_aligns_payload_to_word() {
        assert_eq!([0, 1, 2, 3, 4, 5].map(pad_len), [0, 3, 2, 1, 0, 3]);
    }
}
