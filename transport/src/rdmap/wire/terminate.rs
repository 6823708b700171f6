//! The Terminate message: which layer found what wrong, and with which segment.

use super::at;
use super::ddp::{Header, Opcode, Place, READ_REQUEST_LEN, TAGGED_LEN, UNTAGGED_LEN};

/// The segment has its length in the message.
const HAS_LENGTH: u8 = 0x80;
/// The segment has its DDP header in the message.
const HAS_DDP: u8 = 0x40;
/// The segment has its RDMAP header in the message: that of an RDMA READ request.
const HAS_RDMAP: u8 = 0x20;

/// Bits behind the flags.
const RESERVED: u8 = 0x1f;
/// The flags in the order of a little-endian host.
const SWAPPED: u8 = 0x07;

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $layer:literal $etype:literal $code:literal;)*) => {
        /// Reason why a connection ends (RFC 5040 4.8, RFC 5041 8.2, RFC 5044 8, RFC 6581 10).
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Reason {
            $($(#[$doc])* $name,)*
            /// One that is not known here: layer, type of the error and its code.
            Other(u8, u8, u8),
        }

        impl Reason {
            /// Layer, type of the error and its code, as the message has them.
            #[must_use]
            pub fn codes(self) -> (u8, u8, u8) {
                match self {
                    $(Self::$name => ($layer, $etype, $code),)*
                    Self::Other(layer, etype, code) => (layer, etype, code),
                }
            }

            /// The reason of layer, type and code.
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
    /// RDMAP: something of the sender's own.
    RdmapCatastrophic = 0 0 0;
    /// RDMAP: no buffer has the key.
    RdmapInvalidStag = 0 1 0;
    /// RDMAP: the range is not within the buffer.
    RdmapBounds = 0 1 1;
    /// RDMAP: the key does not give the right.
    RdmapAccess = 0 1 2;
    /// RDMAP: the key is for other connections.
    RdmapNotAssociated = 0 1 3;
    /// RDMAP: the end of the range has no address.
    RdmapWrap = 0 1 4;
    /// RDMAP: the key cannot be invalidated.
    CannotInvalidate = 0 1 9;
    /// RDMAP: another version.
    RdmapVersion = 0 2 5;
    /// RDMAP: an operation that is none, or not expected.
    UnexpectedOpcode = 0 2 6;
    /// RDMAP: something that concerns the connection only.
    RdmapStream = 0 2 7;
    /// DDP: something of the sender's own.
    DdpCatastrophic = 1 0 0;
    /// DDP: no buffer has the key.
    DdpInvalidStag = 1 1 0;
    /// DDP: the range is not within the buffer.
    DdpBounds = 1 1 1;
    /// DDP: the key is for other connections.
    DdpNotAssociated = 1 1 2;
    /// DDP: the end of the range has no address.
    DdpWrap = 1 1 3;
    /// DDP: a tagged segment of another version.
    DdpTaggedVersion = 1 1 4;
    /// DDP: no such queue.
    InvalidQueue = 1 2 1;
    /// DDP: no buffer is posted.
    NoBuffer = 1 2 2;
    /// DDP: the number of the message is not the next one.
    InvalidMsn = 1 2 3;
    /// DDP: the offset in the message is not the next one.
    InvalidMo = 1 2 4;
    /// DDP: the message is longer than its buffer.
    TooLong = 1 2 5;
    /// DDP: an untagged segment of another version.
    DdpUntaggedVersion = 1 2 6;
    /// MPA: the CRC is wrong.
    Crc = 2 0 2;
    /// MPA: marker and length do not fit each other, or a segment does not fit its length.
    Framing = 2 0 3;
    /// MPA: a request or reply frame is wrong.
    InvalidStart = 2 0 4;
    /// MPA: the peer holds fewer RDMA READs than are needed.
    InsufficientIrd = 2 0 6;
    /// MPA: the reply names no message that was offered as the first one.
    NoMatchingRtr = 2 0 7;
}

/// A Terminate message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terminate {
    /// Reason of the end.
    pub reason: Reason,
    /// Length of the segment that was wrong, in bytes, and its headers.
    pub segment: Option<(u16, Vec<u8>)>,
}

impl Terminate {
    /// A message about a segment, by what was received of it.
    #[must_use]
    pub fn about(reason: Reason, ulpdu: &[u8]) -> Self {
        let headers = match Header::parse(ulpdu) {
            // Only the request of a READ has a header of RDMAP's own.
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

    /// A message about no segment.
    #[must_use]
    pub fn new(reason: Reason) -> Self {
        Self {
            reason,
            segment: None,
        }
    }

    /// Number of the READ or atomic that was wrong, if it was one.
    #[must_use]
    pub fn request(&self) -> Option<u32> {
        let (_, headers) = self.segment.as_ref()?;
        let (header, _) = Header::parse(headers).ok()?;
        match (header.opcode, header.place) {
            (Opcode::ReadRequest | Opcode::AtomicRequest, Place::Untagged { msn, .. }) => Some(msn),
            _ => None,
        }
    }

    /// Parses the payload of the message; `None` where it is too short. Headers that are announced
    /// and missing are left out.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut control: [u8; 4] = bytes.get(..4).map(|bytes| at(bytes, 0))?;
        // Linux's `siw` (6.12) has layer and type, and the flags, in the order of a little-endian
        // host. What it takes for flags are bits that are reserved.
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

    /// Appends the payload of the message to `out`.
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
    fn a_message_names_reason_and_segment() {
        // A WRITE of 100 bytes with a key that there is not.
        let mut ulpdu = b"\xc1\x40\0\0\0\x05\0\0\0\0\0\0\0\x06".to_vec();
        ulpdu.resize(114, 7);
        let terminate = Terminate::about(Reason::DdpInvalidStag, &ulpdu);
        let mut out = Vec::new();
        terminate.emit(&mut out);
        let bytes = b"\x11\0\xc0\0\0\x72\xc1\x40\0\0\0\x05\0\0\0\0\0\0\0\x06";
        assert_eq!(out, bytes);
        assert_eq!(Terminate::parse(bytes), Some(terminate.clone()));
        assert_eq!(terminate.request(), None);
        // A READ that may not be, with its own header.
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
    fn messages_may_be_short_or_strange() {
        assert_eq!(Terminate::parse(b"\x20\x02\0"), None);
        let plain = Terminate::parse(b"\x20\x02\0\0").unwrap();
        assert_eq!(plain, Terminate::new(Reason::Crc));
        // What `siw` sends about an RDMA READ with a wrong key.
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
