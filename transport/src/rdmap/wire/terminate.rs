//! Terminate message: contains the layer, the error and the segment that caused it.

use super::at;
use super::ddp::{Header, Opcode, Placement, READ_REQUEST_LEN, TAGGED_LEN, UNTAGGED_LEN};

/// The message contains the segment length.
const HAS_LENGTH: u8 = 0x80;
/// The message contains the DDP header of the segment.
const HAS_DDP: u8 = 0x40;
/// The message contains the RDMAP header of the segment, used for an RDMA READ request.
const HAS_RDMAP: u8 = 0x20;

/// Reserved bits following the flags.
const RESERVED: u8 = 0x1f;
/// The flags in little-endian order.
const SWAPPED: u8 = 0x07;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $layer:literal $etype:literal $code:literal;)*) => {
        /// Reason for closing a connection (RFC 5040 4.8, RFC 5041 8.2, RFC 5044 8, RFC 6581 10).
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Reason {
            $($(#[$doc])* $name,)*
            /// Unknown reason: layer, error type and error code.
            Other(u8, u8, u8),
        }

        impl Reason {
            /// Returns the layer, error type and error code.
            #[must_use]
            pub fn codes(self) -> (u8, u8, u8) {
                match self {
                    $(Self::$name => ($layer, $etype, $code),)*
                    Self::Other(layer, etype, code) => (layer, etype, code),
                }
            }

            /// Returns the reason for a layer, error type and error code.
            #[must_use]
            pub fn of(layer: u8, etype: u8, code: u8) -> Self {
                match (layer, etype, code) {
                    $(($layer, $etype, $code) => Self::$name,)*
                    _ => Self::Other(layer, etype, code),
                }
            }
        }
    };
}

reasons! {
    /// RDMAP: local error at the sender.
    RdmapCatastrophic = 0 0 0;
    /// RDMAP: invalid key.
    RdmapInvalidStag = 0 1 0;
    /// RDMAP: the range exceeds the buffer.
    RdmapBounds = 0 1 1;
    /// RDMAP: the key does not grant the required access.
    RdmapAccess = 0 1 2;
    /// RDMAP: the key is not valid for this connection.
    RdmapNotAssociated = 0 1 3;
    /// RDMAP: the end of the range wraps.
    RdmapWrap = 0 1 4;
    /// RDMAP: the key cannot be invalidated.
    CannotInvalidate = 0 1 9;
    /// RDMAP: unsupported version.
    RdmapVersion = 0 2 5;
    /// RDMAP: unknown or unexpected opcode.
    UnexpectedOpcode = 0 2 6;
    /// RDMAP: error specific to this connection.
    RdmapStream = 0 2 7;
    /// DDP: local error at the sender.
    DdpCatastrophic = 1 0 0;
    /// DDP: invalid key.
    DdpInvalidStag = 1 1 0;
    /// DDP: the range exceeds the buffer.
    DdpBounds = 1 1 1;
    /// DDP: the key is not valid for this connection.
    DdpNotAssociated = 1 1 2;
    /// DDP: the end of the range wraps.
    DdpWrap = 1 1 3;
    /// DDP: tagged segment with an unsupported version.
    DdpTaggedVersion = 1 1 4;
    /// DDP: invalid queue number.
    InvalidQueue = 1 2 1;
    /// DDP: no buffer available.
    NoBuffer = 1 2 2;
    /// DDP: unexpected message number.
    InvalidMsn = 1 2 3;
    /// DDP: unexpected message offset.
    InvalidMo = 1 2 4;
    /// DDP: the message exceeds the buffer.
    TooLong = 1 2 5;
    /// DDP: untagged segment with an unsupported version.
    DdpUntaggedVersion = 1 2 6;
    /// MPA: invalid CRC.
    Crc = 2 0 2;
    /// MPA: marker and length don't match, or the segment doesn't match its length.
    Framing = 2 0 3;
    /// MPA: invalid request or reply frame.
    InvalidStart = 2 0 4;
    /// MPA: the peer supports fewer RDMA READs than required.
    InsufficientIrd = 2 0 6;
    /// MPA: the reply does not select a first message supported by the initiator.
    NoMatchingRtr = 2 0 7;
}

/// Terminate message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terminate {
    /// Reason.
    pub reason: Reason,
    /// Size of the failed segment in bytes, and its headers.
    pub segment: Option<(u16, Vec<u8>)>,
}

impl Terminate {
    /// Creates a message for a segment, using the received part.
    #[must_use]
    pub fn about(reason: Reason, ulpdu: &[u8]) -> Self {
        let headers = match Header::parse(ulpdu) {
            // Only a READ request has an RDMAP header.
            Ok((header, payload)) => {
                let more = match header.opcode {
                    Opcode::ReadRequest => payload.len().min(READ_REQUEST_LEN),
                    _ => 0,
                };
                &ulpdu[..Header::len(header.place) + more]
            }
            Err(_) => &[],
        };
        let len = u16::try_from(ulpdu.len()).unwrap_or(u16::MAX);
        Self {
            reason,
            segment: (!headers.is_empty()).then(|| (len, headers.to_vec())),
        }
    }

    /// Creates a message without a segment.
    #[must_use]
    pub fn new(reason: Reason) -> Self {
        Self {
            reason,
            segment: None,
        }
    }

    /// Returns the number of the failed READ or atomic, if applicable.
    #[must_use]
    pub fn request(&self) -> Option<u32> {
        let (_, headers) = self.segment.as_ref()?;
        let (header, _) = Header::parse(headers).ok()?;
        match (header.opcode, header.place) {
            (Opcode::ReadRequest | Opcode::AtomicRequest, Placement::Untagged { msn, .. }) => {
                Some(msn)
            }
            _ => None,
        }
    }

    /// Parses the payload of a message. Returns `None` if it is too short. Missing headers are
    /// ignored.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut control: [u8; 4] = bytes.get(..4).map(|bytes| at(bytes, 0))?;
        // Linux `siw` (6.12) sends layer, type and flags in little-endian order. This can be
        // detected, since it sets bits that are reserved in the correct order.
        if control[2] & !RESERVED == 0 && control[2] & SWAPPED != 0 {
            control[0] = control[0].rotate_left(4);
            control[2] = control[2].reverse_bits();
        }
        let reason = Reason::of(control[0] >> 4, control[0] & 0xf, control[1]);
        let has = |flag: u8| control[2] & flag != 0;
        let segment = bytes
            .get(4..6)
            .filter(|_| has(HAS_LENGTH) && has(HAS_DDP))
            .map(|len| (u16::from_be_bytes(at(len, 0)), bytes[6..].to_vec()))
            .filter(|(_, headers)| headers.len() >= TAGGED_LEN);
        Some(Self { reason, segment })
    }

    /// Appends the message payload to `out`.
    pub fn emit(&self, out: &mut Vec<u8>) {
        let (layer, etype, code) = self.reason.codes();
        let mut flags = 0;
        if let Some((_, headers)) = &self.segment {
            flags |= HAS_LENGTH | HAS_DDP;
            if headers.len() > UNTAGGED_LEN {
                flags |= HAS_RDMAP;
            }
        }
        out.extend_from_slice(&[layer << 4 | etype, code, flags, 0]);
        if let Some((len, headers)) = &self.segment {
            out.extend_from_slice(&len.to_be_bytes());
            out.extend_from_slice(headers);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminate_contains_reason_and_segment() {
        // WRITE of 100 bytes with an invalid key.
        let mut ulpdu = b"\xc1\x40\0\0\0\x05\0\0\0\0\0\0\0\x06".to_vec();
        ulpdu.resize(114, 7);
        let terminate = Terminate::about(Reason::DdpInvalidStag, &ulpdu);
        let mut out = Vec::new();
        terminate.emit(&mut out);
        let bytes = b"\x11\0\xc0\0\0\x72\xc1\x40\0\0\0\x05\0\0\0\0\0\0\0\x06";
        assert_eq!(out, bytes);
        assert_eq!(Terminate::parse(bytes), Some(terminate.clone()));
        assert_eq!(terminate.request(), None);
        // Invalid READ with its header.
        let mut ulpdu = b"\x41\x41\0\0\0\0\0\0\0\x01\0\0\0\x02\0\0\0\0".to_vec();
        ulpdu.extend(1..29);
        let terminate = Terminate::about(Reason::RdmapAccess, &ulpdu);
        out.clear();
        terminate.emit(&mut out);
        assert_eq!(out[..6], *b"\x01\x02\xe0\0\0\x2e");
        assert_eq!(out[6..], ulpdu);
        let parsed = Terminate::parse(&out).unwrap();
        assert_eq!((parsed.request(), parsed), (Some(2), terminate));
    }

    #[test]
    fn truncated_and_unknown_terminates_are_parsed() {
        assert_eq!(Terminate::parse(b"\x20\x02\0"), None);
        let plain = Terminate::parse(b"\x20\x02\0\0").unwrap();
        assert_eq!(plain, Terminate::new(Reason::Crc));
        // Message sent by `siw` for an RDMA READ with an invalid key.
        let mut siw = b"\x10\0\x07\0\0\x2e\x41\x41\0\0\0\0\0\0\0\x01\0\0\0\x08\0\0\0\0".to_vec();
        siw.resize(6 + 46, 0);
        let parsed = Terminate::parse(&siw).unwrap();
        assert_eq!(
            (parsed.reason, parsed.request()),
            (Reason::RdmapInvalidStag, Some(8))
        );
        let strange = Terminate::parse(b"\xf5\xaa\xe0\0\0\x05\xff").unwrap();
        assert_eq!(strange, Terminate::new(Reason::Other(15, 5, 0xaa)));
        assert_eq!(strange.reason.codes(), (15, 5, 0xaa));
        assert_eq!(Terminate::about(Reason::Framing, b"\x01").segment, None);
    }
}
