//! Encapsulation of a frame: the 16-byte OPA header (L2), a 4-byte L4 header, the frame.
//!
//! ```text
//!  word  bits 31 ───────────────────────────────────────────────────────────── 0
//!   0    BECN:1  length:11                     SLID, low:20
//!   1    LT:1=1  L2:2=2  FECN:1  RC:3  SC:5    DLID, low:20
//!   2    P_Key:16                DLID, high:4  SLID, high:4         L4 type:8
//!   3    reserved:8  age:8       entropy:16
//!   4    VESW id:16 (12 of them)               reserved:16
//!   5    ident:32                                      only of a fragment (ours)
//!   6    length of the frame:16                offset:16
//! ```
//!
//! The words are little-endian. The length is in units of 8 bytes: both headers, the frame, padding
//! and a tail of 5 bytes (ICRC and one more), as sent by hardware. In a datagram, the frame is not
//! followed by a tail, because the datagram's own ICRC covers it.
//!
//! A frame that is longer than the path MTU is sent in fragments, which have a separate L4 type,
//! [`L4Type::EthernetFragment`], and two additional words. This is an extension: Omni-Path does not
//! need fragments, because its links carry 10 KiB. A sender sends the fragments of a frame in
//! order.

use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::Lid;

const LID_LOW: u32 = 0xf_ffff;
const LENGTH_SHIFT: u32 = 20;
const LENGTH_MASK: u32 = 0x7ff;
const BECN: u32 = 1 << 31;
const SC_SHIFT: u32 = 20;
const SC_MASK: u32 = 0x1f;
const RC_SHIFT: u32 = 25;
const RC_MASK: u32 = 7;
const FECN: u32 = 1 << 28;
/// Link type 1 and L2 type 2: the 16-byte header.
const FORMAT: u32 = 0b110 << 29;
const FORMAT_MASK: u32 = 0b111 << 29;
const SLID_HIGH_SHIFT: u32 = 8;
const DLID_HIGH_SHIFT: u32 = 12;
const PKEY_SHIFT: u32 = 16;
const AGE_SHIFT: u32 = 16;
const VESW_SHIFT: u32 = 16;
const VESW_MASK: u32 = 0xfff;
/// ICRC and tail byte after a frame.
const TAIL: usize = 5;

/// Length of both headers, in bytes.
pub const HEADER: usize = 20;
/// Header length of a fragment, in bytes.
pub const FRAGMENT_HEADER: usize = 28;

/// Type of the header after L2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum L4Type {
    /// A frame (`OPA_VNIC_L4_ETHR`).
    Ethernet = 0x78,
    /// A fragment of a frame. Extension, not defined by Omni-Path.
    EthernetFragment = 0x79,
}

/// Position of a fragment in its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Frame number, counted by the sender.
    pub ident: u32,
    /// Offset of the fragment, in bytes.
    pub offset: u16,
    /// Length of the whole frame, in bytes.
    pub frame_len: u16,
}

/// Headers of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// LID of the sending port, 24 bits.
    pub slid: Lid,
    /// LID of the receiving port, 24 bits.
    pub dlid: Lid,
    /// Partition key.
    pub pkey: u16,
    /// Flow entropy, equal for all packets of a flow.
    pub entropy: u16,
    /// Service class, 5 bits.
    pub sc: u8,
    /// Routing control, 3 bits.
    pub rc: u8,
    /// The packet has experienced congestion.
    pub fecn: bool,
    /// Packets of the receiver have experienced congestion.
    pub becn: bool,
    /// Age, 8 bits; 0 if it is not measured.
    pub age: u8,
    /// Virtual Ethernet switch, 12 bits.
    pub vesw_id: u16,
    /// Position in a frame, or `None` if the packet contains the whole frame.
    pub fragment: Option<Fragment>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    words: [U32; 5],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawFragment {
    ident: U32,
    offset: U16,
    frame_len: U16,
}

/// Reason why a packet is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// The packet is shorter than its headers.
    #[error("packet is shorter than its headers")]
    Short,
    /// The link type or L2 type is unknown.
    #[error("invalid packet: no 16-byte header")]
    Format,
    /// The L4 type is unknown.
    #[error("unsupported L4 type {0:#x}: not Ethernet")]
    L4Type(u8),
    /// The length in the header does not match the packet.
    #[error("packet length does not match its header")]
    Length,
}

/// Returns the packet length in units of 8 bytes, including padding and tail.
const fn wire_length(headers_and_data: usize) -> u32 {
    (headers_and_data + TAIL).div_ceil(8) as u32
}

impl Header {
    /// Returns the length of the headers on the wire, in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self.fragment {
            None => HEADER,
            Some(_) => FRAGMENT_HEADER,
        }
    }

    /// Returns `false`, because the headers always have bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Writes the headers of a packet with `data` bytes of a frame to the start of `out`, and
    /// returns their length. Values are truncated to the width of their field.
    ///
    /// # Panics
    /// If `out` is shorter than [`FRAGMENT_HEADER`].
    pub fn emit(&self, data: usize, out: &mut [u8]) -> usize {
        let l4_type = match self.fragment {
            None => L4Type::Ethernet,
            Some(_) => L4Type::EthernetFragment,
        };
        let (slid, dlid) = (self.slid.0, self.dlid.0);
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        let length = wire_length(self.len() + data) & LENGTH_MASK;
        let words = [
            slid & LID_LOW | length << LENGTH_SHIFT | flag(self.becn, BECN),
            dlid & LID_LOW
                | (u32::from(self.sc) & SC_MASK) << SC_SHIFT
                | (u32::from(self.rc) & RC_MASK) << RC_SHIFT
                | flag(self.fecn, FECN)
                | FORMAT,
            l4_type as u32
                | (slid >> 20 & 0xf) << SLID_HIGH_SHIFT
                | (dlid >> 20 & 0xf) << DLID_HIGH_SHIFT
                | u32::from(self.pkey) << PKEY_SHIFT,
            u32::from(self.entropy) | u32::from(self.age) << AGE_SHIFT,
            (u32::from(self.vesw_id) & VESW_MASK) << VESW_SHIFT,
        ];
        let raw = Raw {
            words: words.map(U32::new),
        };
        out[..HEADER].copy_from_slice(raw.as_bytes());
        if let Some(fragment) = self.fragment {
            let raw = RawFragment {
                ident: fragment.ident.into(),
                offset: fragment.offset.into(),
                frame_len: fragment.frame_len.into(),
            };
            out[HEADER..FRAGMENT_HEADER].copy_from_slice(raw.as_bytes());
        }
        self.len()
    }

    /// Parses the headers of a packet; returns them and the remaining bytes.
    ///
    /// # Errors
    /// [`PacketError`].
    pub fn parse(packet: &[u8]) -> Result<(Self, &[u8]), PacketError> {
        let (raw, rest) = Raw::ref_from_prefix(packet).map_err(|_| PacketError::Short)?;
        let [w0, w1, w2, w3, w4] = raw.words.map(U32::get);
        if w1 & FORMAT_MASK != FORMAT {
            return Err(PacketError::Format);
        }
        let (fragment, data) = match w2 as u8 {
            l4 if l4 == L4Type::Ethernet as u8 => (None, rest),
            l4 if l4 == L4Type::EthernetFragment as u8 => {
                let (raw, data) =
                    RawFragment::ref_from_prefix(rest).map_err(|_| PacketError::Short)?;
                let fragment = Fragment {
                    ident: raw.ident.get(),
                    offset: raw.offset.get(),
                    frame_len: raw.frame_len.get(),
                };
                (Some(fragment), data)
            }
            l4 => return Err(PacketError::L4Type(l4)),
        };
        if w0 >> LENGTH_SHIFT & LENGTH_MASK != wire_length(packet.len()) {
            return Err(PacketError::Length);
        }
        let header = Self {
            slid: Lid(w0 & LID_LOW | (w2 >> SLID_HIGH_SHIFT & 0xf) << 20),
            dlid: Lid(w1 & LID_LOW | (w2 >> DLID_HIGH_SHIFT & 0xf) << 20),
            pkey: (w2 >> PKEY_SHIFT) as u16,
            entropy: w3 as u16,
            sc: (w1 >> SC_SHIFT & SC_MASK) as u8,
            rc: (w1 >> RC_SHIFT & RC_MASK) as u8,
            fecn: w1 & FECN != 0,
            becn: w0 & BECN != 0,
            age: (w3 >> AGE_SHIFT) as u8,
            vesw_id: (w4 >> VESW_SHIFT & VESW_MASK) as u16,
            fragment,
        };
        Ok((header, data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            slid: Lid(0xa1_2345),
            dlid: Lid(0xf6_789a),
            pkey: 0x8001,
            entropy: 0x5a,
            sc: 0x13,
            rc: 5,
            fecn: false,
            becn: false,
            age: 0,
            vesw_id: 0xabc,
            fragment: None,
        }
    }

    /// Bytes written by Linux' `opa_vnic_make_header` on a little-endian host, computed by hand
    /// from its shifts: h[0] = 0x00b12345, h[1] = 0xcb36789a, h[2] = 0x8001fa78, h[3] = 0x5a, h[4]
    /// = 0x0abc0000. A frame of 60 bytes and headers of 20 bytes are 11 units.
    const GOLDEN: [u8; 20] = [
        0x45, 0x23, 0xb1, 0x00, 0x9a, 0x78, 0x36, 0xcb, 0x78, 0xfa, 0x01, 0x80, 0x5a, 0x00, 0x00,
        0x00, 0x00, 0x00, 0xbc, 0x0a,
    ];

    #[test]
    fn header_matches_linux_bytes() {
        let mut out = [0xee; 88];
        assert_eq!(header().emit(60, &mut out), 20);
        assert_eq!(out[..20], GOLDEN);
        let (parsed, data) = Header::parse(&out[..80]).unwrap();
        assert_eq!((parsed, data.len()), (header(), 60));
    }

    #[test]
    fn fragment_header_has_two_extra_words() {
        let fragment = Some(Fragment {
            ident: 0x0102_0304,
            offset: 0x0506,
            frame_len: 0x2328,
        });
        let sent = Header {
            fragment,
            fecn: true,
            becn: true,
            age: 7,
            ..header()
        };
        let mut out = [0; 128];
        assert_eq!(sent.emit(100, &mut out), 28);
        assert_eq!(out[8], 0x79);
        assert_eq!(out[20..28], [4, 3, 2, 1, 6, 5, 0x28, 0x23]);
        let (parsed, data) = Header::parse(&out).unwrap();
        assert_eq!((parsed, data.len()), (sent, 100));
    }

    #[test]
    fn malformed_packets_are_rejected() {
        let mut out = [0; 80];
        header().emit(60, &mut out);
        let parse = |bytes: &[u8]| Header::parse(bytes).map(|_| ());
        assert_eq!(parse(&out[..19]), Err(PacketError::Short));
        assert_eq!(parse(&out[..70]), Err(PacketError::Length));
        let mut other = out;
        other[7] = 0x8b;
        assert_eq!(parse(&other), Err(PacketError::Format));
        other = out;
        other[8] = 0x0a;
        assert_eq!(parse(&other), Err(PacketError::L4Type(0x0a)));
        other[8] = 0x79;
        assert_eq!(parse(&other[..24]), Err(PacketError::Short));
    }
}
