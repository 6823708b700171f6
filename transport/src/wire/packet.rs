//! A whole RoCEv2 packet: the payload of one UDP datagram to port 4791.
//!
//! [`Packet::parse`] checks structure only: lengths, version, opcode, padding.
//! The ICRC, the P_Key, sequence and access rights are judged by the code that knows
//! the flow and the queue pair. Sending is the mirror image with the payload
//! left out: [`emit_headers`] writes the headers, and the caller gathers
//! headers, payload, [padding](super::bth::pad_len) and ICRC.

use arrayvec::ArrayVec;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::bth::Bth;
use super::ext::{Aeth, AtomicAckEth, AtomicEth, Deth, Ieth, ImmDt, Reth, XrcEth};
use super::icrc::ICRC_LEN;
use super::opcode::{ExtHeader, MAX_EXT_LEN, OpcodeInfo, PayloadRule, RESERVED_LEN};

/// UDP destination port of RoCEv2 (IBTA annex A17).
pub const ROCE_PORT: u16 = 4791;

/// Reason why a datagram is not a RoCEv2 packet; such datagrams are dropped silently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PacketError {
    /// Shorter than a BTH and an ICRC.
    #[error("packet of {len} bytes has no room for BTH and ICRC")]
    ShortBth {
        /// Number of bytes received.
        len: usize,
    },
    /// The length is not a multiple of four.
    #[error("packet length {len} is not a multiple of four")]
    Unaligned {
        /// Number of bytes received.
        len: usize,
    },
    /// BTH: transport header version other than 0.
    #[error("transport header version {version}")]
    Version {
        /// TVer that was received.
        version: u8,
    },
    /// BTH: the opcode is not in the table.
    #[error("unknown opcode {opcode:#04x}")]
    Opcode {
        /// Opcode that was received.
        opcode: u8,
    },
    /// Shorter than the extended headers of its opcode and an ICRC.
    #[error("packet of {len} bytes cannot hold {need} bytes of headers and ICRC")]
    ShortHeaders {
        /// Bytes of headers and ICRC that the opcode demands.
        need: usize,
        /// Number of bytes received.
        len: usize,
    },
    /// BTH: the pad count reaches back into the headers.
    #[error("pad count {pad} exceeds the {available} bytes between headers and ICRC")]
    Pad {
        /// PadCnt that was received.
        pad: usize,
        /// Number of bytes that there are.
        available: usize,
    },
    /// Payload where the opcode has none.
    #[error("{len} bytes of payload after opcode {opcode:#04x}, which has none")]
    Payload {
        /// Opcode that was received.
        opcode: u8,
        /// Length of the payload in bytes.
        len: usize,
    },
}

/// The extended headers of a packet. Which are present follows from the
/// opcode alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExtHeaders {
    /// DETH, of datagrams only.
    pub deth: Option<Deth>,
    /// RETH, of RDMA requests.
    pub reth: Option<Reth>,
    /// AtomicETH, of atomic requests.
    pub atomic_eth: Option<AtomicEth>,
    /// AETH, of acknowledgements and responses.
    pub aeth: Option<Aeth>,
    /// AtomicAckETH, of atomic responses.
    pub atomic_ack: Option<AtomicAckEth>,
    /// ImmDt, where there are immediate data.
    pub imm: Option<ImmDt>,
    /// IETH, of SEND with invalidate.
    pub ieth: Option<Ieth>,
    /// XRCETH, of XRC requests.
    pub xrc: Option<XrcEth>,
}

/// A parsed packet that borrows its payload from the datagram.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// BTH: base transport header.
    pub bth: Bth,
    /// The row of its opcode.
    pub op: &'static OpcodeInfo,
    /// The extended headers the opcode demands; the others are `None`.
    pub ext: ExtHeaders,
    /// Payload without padding and ICRC.
    pub payload: &'a [u8],
    /// ICRC as received, not yet checked; wire bytes are little-endian.
    pub icrc: u32,
}

fn take<T: FromBytes + Immutable + KnownLayout>(rest: &mut &[u8]) -> Option<T> {
    let (value, after) = T::read_from_prefix(rest).ok()?;
    *rest = after;
    Some(value)
}

impl<'a> Packet<'a> {
    /// Parse the payload of a UDP datagram. The received length is the only
    /// authority on where things end.
    #[inline]
    pub fn parse(datagram: &'a [u8]) -> Result<Self, PacketError> {
        let len = datagram.len();
        let Some((body, icrc)) = datagram.split_last_chunk::<ICRC_LEN>() else {
            return Err(PacketError::ShortBth { len });
        };
        // The ICRC is cut off first, so that no header can reach into it.
        let mut rest = body;
        let Some(bth) = take::<Bth>(&mut rest) else {
            return Err(PacketError::ShortBth { len });
        };
        // Padding makes every packet a multiple of four bytes.
        if !len.is_multiple_of(4) {
            return Err(PacketError::Unaligned { len });
        }
        if bth.version() != 0 {
            return Err(PacketError::Version {
                version: bth.version(),
            });
        }
        let opcode = bth.raw_opcode();
        let op = OpcodeInfo::lookup(opcode).ok_or(PacketError::Opcode { opcode })?;
        let short = PacketError::ShortHeaders {
            need: Bth::LEN + op.ext_len + ICRC_LEN,
            len,
        };
        let ext = ExtHeaders::parse(op, &mut rest).ok_or(short)?;

        // The pad count is the sender's, and may reach back into the headers.
        let (pad, available) = (bth.pad(), rest.len());
        let payload_len = available
            .checked_sub(pad)
            .ok_or(PacketError::Pad { pad, available })?;
        // Padding counts too: an opcode without payload has none.
        if op.payload == PayloadRule::Empty && available != 0 {
            return Err(PacketError::Payload {
                opcode,
                len: available,
            });
        }
        Ok(Self {
            bth,
            op,
            ext,
            payload: &rest[..payload_len],
            icrc: u32::from_le_bytes(*icrc),
        })
    }
}

impl ExtHeaders {
    #[inline]
    fn parse(op: &OpcodeInfo, rest: &mut &[u8]) -> Option<Self> {
        let mut ext = Self::default();
        for header in op.headers {
            match header {
                ExtHeader::Deth => ext.deth = Some(take(rest)?),
                ExtHeader::Reth => ext.reth = Some(take(rest)?),
                ExtHeader::AtomicEth => ext.atomic_eth = Some(take(rest)?),
                ExtHeader::Aeth => ext.aeth = Some(take(rest)?),
                ExtHeader::AtomicAckEth => ext.atomic_ack = Some(take(rest)?),
                ExtHeader::ImmDt => ext.imm = Some(take(rest)?),
                ExtHeader::Ieth => ext.ieth = Some(take(rest)?),
                ExtHeader::XrcEth => ext.xrc = Some(take(rest)?),
                ExtHeader::Reserved => drop(take::<[u8; RESERVED_LEN]>(rest)?),
            }
        }
        Some(ext)
    }

    fn bytes(&self, header: ExtHeader) -> Option<&[u8]> {
        match header {
            ExtHeader::Deth => self.deth.as_ref().map(IntoBytes::as_bytes),
            ExtHeader::Reth => self.reth.as_ref().map(IntoBytes::as_bytes),
            ExtHeader::AtomicEth => self.atomic_eth.as_ref().map(IntoBytes::as_bytes),
            ExtHeader::Aeth => self.aeth.as_ref().map(IntoBytes::as_bytes),
            ExtHeader::AtomicAckEth => self.atomic_ack.as_ref().map(IntoBytes::as_bytes),
            ExtHeader::ImmDt => self.imm.as_ref().map(IntoBytes::as_bytes),
            ExtHeader::Ieth => self.ieth.as_ref().map(IntoBytes::as_bytes),
            ExtHeader::XrcEth => self.xrc.as_ref().map(IntoBytes::as_bytes),
            ExtHeader::Reserved => Some(&[0; RESERVED_LEN]),
        }
    }
}

/// Length in bytes of the longest headers of a packet.
pub const MAX_HEADER_LEN: usize = Bth::LEN + MAX_EXT_LEN;

/// Room for the headers of one packet.
pub type HeaderBuf = ArrayVec<u8, MAX_HEADER_LEN>;

/// Appends one header.
///
/// # Panics
///
/// If there is no room for it: no packet has that many headers.
pub fn push_header<T: IntoBytes + Immutable>(out: &mut HeaderBuf, header: &T) {
    out.try_extend_from_slice(header.as_bytes())
        .expect("the longest header fits");
}

/// The headers of one packet, ready to be followed by payload, padding and
/// ICRC. `bth` must already carry the pad count for the payload.
///
/// # Panics
///
/// If the opcode of `bth` is not in the table or `ext` lacks a header that it
/// demands: both are our own mistakes.
#[must_use]
pub fn emit_headers(bth: &Bth, ext: &ExtHeaders) -> HeaderBuf {
    let op = OpcodeInfo::lookup(bth.raw_opcode()).expect("an opcode of the table");
    let mut out = HeaderBuf::new();
    push_header(&mut out, bth);
    for &header in op.headers {
        let bytes = ext.bytes(header);
        let bytes = bytes.unwrap_or_else(|| panic!("{:?} needs its {header:?}", op.opcode));
        out.try_extend_from_slice(bytes)
            .expect("the longest header fits");
    }
    debug_assert_eq!(out.len(), Bth::LEN + op.ext_len);
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::ids::{Psn, Qpn};
    use super::super::opcode::{OPCODES, Opcode};
    use super::*;

    fn full_ext() -> ExtHeaders {
        ExtHeaders {
            deth: Some(Deth::new(0x8001_0000, Qpn::new(1))),
            reth: Some(Reth::new(0x0102_0304_0506_0708, 0x1122_3344, 0x99)),
            atomic_eth: Some(AtomicEth::compare_swap(0x8, 0x77, 1, 2)),
            aeth: Some(Aeth::new(
                super::super::ext::AethSyndrome::from_wire(0x1f),
                super::super::ids::Msn::new(7),
            )),
            atomic_ack: Some(AtomicAckEth::new(42)),
            imm: Some(ImmDt::new(0xdead_beef)),
            ieth: Some(Ieth::new(0xcafe)),
            xrc: Some(XrcEth::new(0x12_3456)),
        }
    }

    fn datagram(opcode: Opcode, payload: &[u8]) -> Vec<u8> {
        let bth = Bth::new(opcode, Qpn::new(0x11), Psn::new(0x22)).with_pad_for(payload.len());
        let mut out = emit_headers(&bth, &full_ext()).to_vec();
        out.extend_from_slice(payload);
        out.resize(out.len().next_multiple_of(4), 0);
        out.extend_from_slice(&0x0403_0201u32.to_le_bytes());
        out
    }

    #[test]
    fn every_opcode_round_trips() {
        for op in OPCODES {
            let payload: &[u8] = if op.payload == PayloadRule::Empty {
                &[]
            } else {
                &[1, 2, 3, 4, 5]
            };
            let bytes = datagram(op.opcode, payload);
            let packet = Packet::parse(&bytes).unwrap();
            assert_eq!(packet.op, op);
            assert_eq!(packet.payload, payload);
            assert_eq!(packet.icrc, 0x0403_0201);
            let headers = Bth::LEN + op.ext_len;
            assert_eq!(emit_headers(&packet.bth, &packet.ext)[..], bytes[..headers]);
            for short in 0..headers + ICRC_LEN {
                Packet::parse(&bytes[..short]).unwrap_err();
            }
        }
    }

    #[test]
    fn a_congestion_notification_has_the_bytes_of_the_specification() {
        // The example of Mellanox's "RoCEv2 CNP Packet Format Example", with its ICRC.
        let mut wire = vec![0x81, 0x00, 0xff, 0xff, 0x40, 0x00, 0x00, 0xd2];
        wire.extend_from_slice(&[0; 20]);
        wire.extend_from_slice(&[0xe4, 0x2d, 0xad, 0x81]);
        let packet = Packet::parse(&wire).unwrap();
        assert_eq!(packet.op.opcode, Opcode::Cnp);
        assert!(packet.bth.is_becn() && !packet.op.is_request() && !packet.op.is_response());
        assert_eq!(packet.bth.dest_qpn(), Qpn::new(0xd2));
        let bth = Bth::cnp(Qpn::new(0xd2), 0xffff);
        assert_eq!(emit_headers(&bth, &ExtHeaders::default())[..], wire[..28]);
    }

    #[test]
    fn cve_2026_46043_padding_cannot_reach_into_the_headers() {
        // CVE-2026-46043: pad count and ICRC longer than what was received.
        let mut bytes = datagram(Opcode::RcSendOnly, &[]);
        bytes[1] |= 0x30;
        assert_eq!(
            Packet::parse(&bytes).unwrap_err(),
            PacketError::Pad {
                pad: 3,
                available: 0
            }
        );
        let mut bytes = datagram(Opcode::RcReadResponseOnly, &[]);
        bytes[1] |= 0x10;
        assert_eq!(
            Packet::parse(&bytes).unwrap_err(),
            PacketError::Pad {
                pad: 1,
                available: 0
            }
        );
    }

    #[test]
    fn structural_errors_name_their_field() {
        let good = datagram(Opcode::RcWriteOnly, &[9; 8]);
        assert_eq!(
            Packet::parse(&good[..15]).unwrap_err(),
            PacketError::ShortBth { len: 15 }
        );
        assert_eq!(
            Packet::parse(&good[..3]).unwrap_err(),
            PacketError::ShortBth { len: 3 }
        );
        assert_eq!(
            Packet::parse(&good[..33]).unwrap_err(),
            PacketError::Unaligned { len: 33 }
        );
        assert_eq!(
            Packet::parse(&good[..28]).unwrap_err(),
            PacketError::ShortHeaders { need: 32, len: 28 }
        );
        let mut bad = good.clone();
        bad[1] |= 0x01;
        assert_eq!(
            Packet::parse(&bad).unwrap_err(),
            PacketError::Version { version: 1 }
        );
        let mut bad = good.clone();
        bad[0] = 0x15;
        assert_eq!(
            Packet::parse(&bad).unwrap_err(),
            PacketError::Opcode { opcode: 0x15 }
        );
        let mut bad = good;
        bad[0] = 0x0c;
        assert_eq!(
            Packet::parse(&bad).unwrap_err(),
            PacketError::Payload {
                opcode: 0x0c,
                len: 8
            }
        );
    }

    #[test]
    #[should_panic(expected = "needs its Reth")]
    fn a_missing_header_is_our_bug() {
        let bth = Bth::new(Opcode::RcReadRequest, Qpn::new(2), Psn::new(0));
        let _ = emit_headers(&bth, &ExtHeaders::default());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..128), known in 0usize..OPCODES.len()) {
            let _ = Packet::parse(&bytes);
            let mut bytes = bytes;
            if bytes.len() > 1 {
                bytes[0] = OPCODES[known].opcode as u8;
                bytes[1] &= 0xf0;
                bytes.truncate(bytes.len() & !3);
            }
            if let Ok(packet) = Packet::parse(&bytes) {
                let header_len = Bth::LEN + packet.op.ext_len;
                prop_assert_eq!(
                    header_len + packet.payload.len() + packet.bth.pad() + ICRC_LEN,
                    bytes.len()
                );
                let headers = emit_headers(&packet.bth, &packet.ext);
                // Reserved bytes are ignored, and sent as zeroes.
                let is_cnp = packet.op.opcode == Opcode::Cnp;
                let compared = if is_cnp { Bth::LEN } else { header_len };
                prop_assert_eq!(&headers[..compared], &bytes[..compared]);
            }
        }
    }
}
