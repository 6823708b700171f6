//! RoCEv2 packet: the payload of a UDP datagram sent to port 4791.
//!
//! [`Packet::parse`] only verifies the structure: lengths, version, opcode and padding. The ICRC,
//! P_Key, sequence number and access rights must be checked by the code handling the flow and the
//! queue pair. To send a packet, [`emit_headers`] writes the headers, and the caller must gather
//! headers, payload, [padding](super::bth::pad_len) and ICRC.

use std::net::SocketAddr;

use arrayvec::ArrayVec;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::bth::Bth;
use super::ext::{Aeth, AtomicAckEth, AtomicEth, Deth, GSI_QKEY, Ieth, ImmDt, Reth, XrcEth};
use super::icrc::{ICRC_LEN, IcrcFlow};
use super::ids::{Psn, Qpn};
use super::mad::Mad;
use super::opcode::{ExtHeader, MAX_EXT_LEN, Opcode, OpcodeInfo, PayloadRule, RESERVED_LEN};

/// UDP destination port for RoCEv2 (IBTA annex A17).
pub const ROCE_PORT: u16 = 4791;

/// Error returned for a datagram that is not a valid RoCEv2 packet. These datagrams are silently
/// dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PacketError {
    /// The datagram is too short for a BTH and an ICRC.
    #[error("packet too short for BTH and ICRC: {len} bytes")]
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
    /// The transport header version is not 0.
    #[error("unsupported transport header version {version}")]
    Version {
        /// TVer received.
        version: u8,
    },
    /// The opcode is unknown.
    #[error("unknown opcode {opcode:#04x}")]
    Opcode {
        /// Opcode received.
        opcode: u8,
    },
    /// The datagram is too short for an ICRC and the extended headers required by the opcode.
    #[error("packet too short for headers and ICRC: {len} of {need} bytes")]
    ShortHeaders {
        /// Number of bytes required for headers and ICRC.
        need: usize,
        /// Number of bytes received.
        len: usize,
    },
    /// The pad count exceeds the available data.
    #[error("pad count {pad} exceeds the {available} bytes between headers and ICRC")]
    Pad {
        /// PadCnt received.
        pad: usize,
        /// Number of bytes available.
        available: usize,
    },
    /// Unexpected payload for this opcode.
    #[error("unexpected payload of {len} bytes for opcode {opcode:#04x}")]
    Payload {
        /// Opcode received.
        opcode: u8,
        /// Payload size in bytes.
        len: usize,
    },
}

/// Extended headers in a packet, as determined by the opcode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExtHeaders {
    /// DETH, only used for datagrams.
    pub deth: Option<Deth>,
    /// RETH, used for RDMA requests.
    pub reth: Option<Reth>,
    /// AtomicETH, used for atomic requests.
    pub atomic_eth: Option<AtomicEth>,
    /// AETH, used for acknowledgements and responses.
    pub aeth: Option<Aeth>,
    /// AtomicAckETH, used for atomic responses.
    pub atomic_ack: Option<AtomicAckEth>,
    /// ImmDt, if the packet contains immediate data.
    pub imm: Option<ImmDt>,
    /// IETH, used for SEND with invalidate.
    pub ieth: Option<Ieth>,
    /// XRCETH, used for XRC requests.
    pub xrc: Option<XrcEth>,
}

/// Parsed packet. The payload is borrowed from the datagram.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Base transport header.
    pub bth: Bth,
    /// Opcode table row.
    pub op: &'static OpcodeInfo,
    /// Extended headers. Only headers required by the opcode are set.
    pub ext: ExtHeaders,
    /// Payload, without padding and ICRC.
    pub payload: &'a [u8],
    /// ICRC as received, not yet verified. Note that it uses little-endian byte order.
    pub icrc: u32,
}

fn read_header<T: FromBytes + Immutable + KnownLayout>(rest: &mut &[u8]) -> Option<T> {
    let (value, after) = T::read_from_prefix(rest).ok()?;
    *rest = after;
    Some(value)
}

impl<'a> Packet<'a> {
    /// Parses a UDP payload. All lengths are validated against the received size.
    #[inline]
    pub fn parse(datagram: &'a [u8]) -> Result<Self, PacketError> {
        let len = datagram.len();
        let Some((body, icrc)) = datagram.split_last_chunk::<ICRC_LEN>() else {
            return Err(PacketError::ShortBth { len });
        };
        // We remove the ICRC first, so that no header can overlap it.
        let mut rest = body;
        let Some(bth) = read_header::<Bth>(&mut rest) else {
            return Err(PacketError::ShortBth { len });
        };
        // Because of the padding, the size of a valid packet is always a multiple of four.
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

        // The pad count is provided by the sender and can exceed the available data.
        let (pad, available) = (bth.pad(), rest.len());
        let payload_len = available
            .checked_sub(pad)
            .ok_or(PacketError::Pad { pad, available })?;
        // This includes padding: if there is no payload, there must be no padding.
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
                ExtHeader::Deth => ext.deth = Some(read_header(rest)?),
                ExtHeader::Reth => ext.reth = Some(read_header(rest)?),
                ExtHeader::AtomicEth => ext.atomic_eth = Some(read_header(rest)?),
                ExtHeader::Aeth => ext.aeth = Some(read_header(rest)?),
                ExtHeader::AtomicAckEth => ext.atomic_ack = Some(read_header(rest)?),
                ExtHeader::ImmDt => ext.imm = Some(read_header(rest)?),
                ExtHeader::Ieth => ext.ieth = Some(read_header(rest)?),
                ExtHeader::XrcEth => ext.xrc = Some(read_header(rest)?),
                ExtHeader::Reserved => drop(read_header::<[u8; RESERVED_LEN]>(rest)?),
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

/// Maximum size of the packet headers in bytes.
pub const MAX_HEADER_LEN: usize = Bth::LEN + MAX_EXT_LEN;

/// Buffer for the headers of a packet.
pub type HeaderBuf = ArrayVec<u8, MAX_HEADER_LEN>;

/// Appends a header to the buffer.
///
/// # Panics
///
/// Panics if the buffer is full, which is not possible for valid packets.
pub fn push_header<T: IntoBytes + Immutable>(out: &mut HeaderBuf, header: &T) {
    out.try_extend_from_slice(header.as_bytes())
        .expect("the longest header fits");
}

/// Returns the headers of a packet, to be followed by payload, padding and ICRC. The pad count in
/// `bth` must already be set.
///
/// # Panics
///
/// Panics if the opcode in `bth` is unknown or if a required header is not set in `ext`, as both
/// would be bugs in the caller.
#[must_use]
pub fn emit_headers(bth: &Bth, ext: &ExtHeaders) -> HeaderBuf {
    let op = OpcodeInfo::lookup(bth.raw_opcode()).expect("known opcode");
    let mut out = HeaderBuf::new();
    push_header(&mut out, bth);
    for &header in op.headers {
        let bytes = ext.bytes(header);
        let bytes = bytes.unwrap_or_else(|| panic!("{:?} requires {header:?}", op.opcode));
        out.try_extend_from_slice(bytes)
            .expect("the longest header fits");
    }
    debug_assert_eq!(out.len(), Bth::LEN + op.ext_len);
    out
}

/// Returns a datagram with a MAD from queue pair 1 to queue pair 1, or `None` if the address
/// families differ.
#[must_use]
pub fn gsi_datagram(src: SocketAddr, dst: SocketAddr, mad: &Mad) -> Option<Vec<u8>> {
    let flow = IcrcFlow::new(src, dst)?;
    let bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
    let ext = ExtHeaders {
        deth: Some(Deth::new(GSI_QKEY, Qpn::GSI)),
        ..ExtHeaders::default()
    };
    let mut bytes = emit_headers(&bth, &ext).to_vec();
    bytes.extend_from_slice(mad);
    let icrc = flow.compute(&bytes, 0);
    bytes.extend_from_slice(&icrc.to_le_bytes());
    Some(bytes)
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
    fn opcodes_round_trip() {
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
    fn cnp_matches_specification_bytes() {
        // Example packet including ICRC from Mellanox's "RoCEv2 CNP Packet Format Example".
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
    fn cve_2026_46043_padding_cannot_overlap_headers() {
        // CVE-2026-46043: pad count and ICRC exceed the received data.
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
    #[should_panic(expected = "requires Reth")]
    fn missing_header_panics() {
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
                // Reserved bytes are ignored when parsing and set to zero when sending.
                let is_cnp = packet.op.opcode == Opcode::Cnp;
                let compared = if is_cnp { Bth::LEN } else { header_len };
                prop_assert_eq!(&headers[..compared], &bytes[..compared]);
            }
        }
    }
}
