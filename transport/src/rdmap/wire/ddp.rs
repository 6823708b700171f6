//! Headers of DDP segments and the RDMAP messages they contain.
//!
//! ```text
//! tagged:    |T L  rsvd DV|RV rsv opcode| STag (4) | tagged offset (8) |
//! untagged:  |T L  rsvd DV|RV rsv opcode| invalidate STag (4) | QN (4) | MSN (4) | MO (4) |
//! ```

use num_enum::TryFromPrimitive;
use thiserror::Error;

use super::at;

/// Size of a tagged segment header in bytes.
pub const TAGGED_LEN: usize = 14;
/// Size of an untagged segment header in bytes.
pub const UNTAGGED_LEN: usize = 18;

/// Size of the RDMA READ request data in bytes.
pub const READ_REQUEST_LEN: usize = 28;
/// Size of the atomic request data in bytes.
pub const ATOMIC_REQUEST_LEN: usize = 52;
/// Size of the atomic response data in bytes.
pub const ATOMIC_RESPONSE_LEN: usize = 12;
/// Size of the data in an immediate message in bytes.
pub const IMMEDIATE_LEN: usize = 8;

const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const DDP_VERSION_MASK: u8 = 0x03;
const DDP_VERSION: u8 = 1;
const RDMAP_VERSION_MASK: u8 = 0xc0;
const RDMAP_VERSION: u8 = 0x40;
const OPCODE_MASK: u8 = 0x0f;

/// RDMAP opcode (RFC 5040 4.3, RFC 7306 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromPrimitive)]
#[repr(u8)]
pub enum Opcode {
    /// RDMA WRITE.
    Write = 0,
    /// RDMA READ request.
    ReadRequest = 1,
    /// RDMA READ response.
    ReadResponse = 2,
    /// Send.
    Send = 3,
    /// Send, and invalidate a key of the receiver.
    SendInvalidate = 4,
    /// Send with a solicited completion.
    SendSolicited = 5,
    /// Send with a solicited completion, and invalidate a key of the receiver.
    SendSolicitedInvalidate = 6,
    /// Closes the connection with a reason.
    Terminate = 7,
    /// Eight bytes of immediate data for a receive (RFC 7306 6).
    Immediate = 8,
    /// Eight bytes of immediate data for a receive, with a solicited completion.
    ImmediateSolicited = 9,
    /// Atomic request.
    AtomicRequest = 10,
    /// Atomic response.
    AtomicResponse = 11,
}

/// Queue for an untagged message (RFC 5040 5.2, RFC 7306 5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromPrimitive)]
#[repr(u32)]
pub enum Queue {
    /// Messages that consume a receive.
    Send = 0,
    /// RDMA READ and atomic requests.
    ReadRequest = 1,
    /// Terminate message.
    Terminate = 2,
    /// Atomic responses.
    AtomicResponse = 3,
}

impl Opcode {
    /// Returns true for a tagged message.
    #[must_use]
    pub fn is_tagged(self) -> bool {
        matches!(self, Self::Write | Self::ReadResponse)
    }

    /// Returns the queue for an untagged message, or `None` if it is tagged.
    #[must_use]
    pub fn queue(self) -> Option<Queue> {
        Some(match self {
            Self::Write | Self::ReadResponse => return None,
            Self::ReadRequest | Self::AtomicRequest => Queue::ReadRequest,
            Self::Terminate => Queue::Terminate,
            Self::AtomicResponse => Queue::AtomicResponse,
            Self::Send
            | Self::SendInvalidate
            | Self::SendSolicited
            | Self::SendSolicitedInvalidate
            | Self::Immediate
            | Self::ImmediateSolicited => Queue::Send,
        })
    }

    /// Returns true if the completion of the receive is solicited.
    #[must_use]
    pub fn is_solicited(self) -> bool {
        matches!(
            self,
            Self::SendSolicited | Self::SendSolicitedInvalidate | Self::ImmediateSolicited
        )
    }
}

/// Buffer model of a segment, and the position in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Buffer specified by the receiver.
    Tagged {
        /// Buffer key.
        stag: u32,
        /// Start address in this segment.
        to: u64,
    },
    /// Next buffer in a queue.
    Untagged {
        /// Key to invalidate, if supported by the opcode.
        invalidate: u32,
        /// Queue number.
        qn: u32,
        /// Message number in the queue, starting at 1.
        msn: u32,
        /// Start offset in the message.
        mo: u32,
    },
}

/// Segment header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Operation.
    pub opcode: Opcode,
    /// Set if this is the last segment of a message.
    pub last: bool,
    /// Segment position.
    pub place: Placement,
}

/// Error returned for an invalid segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HeaderError {
    /// The data is shorter than the header.
    #[error("invalid DDP segment length {len}")]
    Length {
        /// Number of bytes available.
        len: usize,
    },
    /// The DDP version is not supported.
    #[error("unsupported DDP version {version}")]
    DdpVersion {
        /// Version received.
        version: u8,
        /// Set for a tagged segment.
        tagged: bool,
    },
    /// The RDMAP version is not supported.
    #[error("unsupported RDMAP version {version}")]
    RdmapVersion {
        /// Version received.
        version: u8,
    },
    /// The opcode is unknown or doesn't match the buffer model.
    #[error("unexpected opcode {opcode}")]
    Opcode {
        /// Opcode received.
        opcode: u8,
    },
}

impl Header {
    /// Returns the header size in bytes.
    #[must_use]
    pub const fn len(place: Placement) -> usize {
        match place {
            Placement::Tagged { .. } => TAGGED_LEN,
            Placement::Untagged { .. } => UNTAGGED_LEN,
        }
    }

    /// Splits a ULPDU into header and payload.
    ///
    /// # Errors
    /// Returns [`HeaderError`] if the header is invalid.
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), HeaderError> {
        let length = Err(HeaderError::Length { len: bytes.len() });
        let (Some(&ddp), Some(&rdmap)) = (bytes.first(), bytes.get(1)) else {
            return length;
        };
        let tagged = ddp & TAGGED != 0;
        let version = ddp & DDP_VERSION_MASK;
        if version != DDP_VERSION {
            return Err(HeaderError::DdpVersion { version, tagged });
        }
        if rdmap & RDMAP_VERSION_MASK != RDMAP_VERSION {
            let version = rdmap >> 6;
            return Err(HeaderError::RdmapVersion { version });
        }
        let code = rdmap & OPCODE_MASK;
        let opcode = Opcode::try_from(code)
            .ok()
            .filter(|opcode| opcode.is_tagged() == tagged)
            .ok_or(HeaderError::Opcode { opcode: code })?;
        let word = |offset| u32::from_be_bytes(at(bytes, offset));
        let place = match tagged {
            true if bytes.len() >= TAGGED_LEN => Placement::Tagged {
                stag: word(2),
                to: u64::from_be_bytes(at(bytes, 6)),
            },
            false if bytes.len() >= UNTAGGED_LEN => Placement::Untagged {
                invalidate: word(2),
                qn: word(6),
                msn: word(10),
                mo: word(14),
            },
            _ => return length,
        };
        let header = Self {
            opcode,
            last: ddp & LAST != 0,
            place,
        };
        Ok((header, &bytes[Self::len(place)..]))
    }

    /// Appends the header to `out`.
    pub fn emit(&self, out: &mut Vec<u8>) {
        let tagged = matches!(self.place, Placement::Tagged { .. });
        let last = if self.last { LAST } else { 0 };
        out.push(if tagged { TAGGED } else { 0 } | last | DDP_VERSION);
        out.push(RDMAP_VERSION | self.opcode as u8);
        match self.place {
            Placement::Tagged { stag, to } => {
                out.extend_from_slice(&stag.to_be_bytes());
                out.extend_from_slice(&to.to_be_bytes());
            }
            Placement::Untagged {
                invalidate,
                qn,
                msn,
                mo,
            } => {
                for word in [invalidate, qn, msn, mo] {
                    out.extend_from_slice(&word.to_be_bytes());
                }
            }
        }
    }
}

/// RDMA READ request data (RFC 5040 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// Key of the sink buffer.
    pub sink_stag: u32,
    /// Address in the sink buffer.
    pub sink_to: u64,
    /// Number of bytes to read.
    pub size: u32,
    /// Key of the source buffer.
    pub source_stag: u32,
    /// Address in the source buffer.
    pub source_to: u64,
}

impl ReadRequest {
    /// Parses the payload of a request. Returns `None` if the size is invalid.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        (bytes.len() == READ_REQUEST_LEN).then(|| Self {
            sink_stag: u32::from_be_bytes(at(bytes, 0)),
            sink_to: u64::from_be_bytes(at(bytes, 4)),
            size: u32::from_be_bytes(at(bytes, 12)),
            source_stag: u32::from_be_bytes(at(bytes, 16)),
            source_to: u64::from_be_bytes(at(bytes, 20)),
        })
    }

    /// Appends the request payload to `out`.
    pub fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.sink_stag.to_be_bytes());
        out.extend_from_slice(&self.sink_to.to_be_bytes());
        out.extend_from_slice(&self.size.to_be_bytes());
        out.extend_from_slice(&self.source_stag.to_be_bytes());
        out.extend_from_slice(&self.source_to.to_be_bytes());
    }
}

/// Atomic operation on eight bytes (RFC 7306 5.1), using the responder's byte order. For an
/// addition, each bit set in the mask is the end of a field, which discards the carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Addition.
    FetchAdd {
        /// Value to add to each field.
        add: u64,
        /// Mask with the highest bit of each field set.
        mask: u64,
    },
    /// Swap, if the bits selected by a mask have the expected value.
    CmpSwap {
        /// Value to store.
        swap: u64,
        /// Mask for the bits to store.
        swap_mask: u64,
        /// Value to compare with.
        compare: u64,
        /// Mask for the bits to compare.
        compare_mask: u64,
    },
}

impl Atomic {
    const FETCH_ADD: u32 = 0;
    const CMP_SWAP: u32 = 2;

    /// Returns the new value when applied to `old`.
    #[must_use]
    pub fn apply(self, old: u64) -> u64 {
        match self {
            Self::FetchAdd { add, mask: 0 } => old.wrapping_add(add),
            Self::FetchAdd { add, mask } => {
                let (mut sum, mut carry) = (0, 0);
                for bit in 0..u64::BITS {
                    let ones = (old >> bit & 1) + (add >> bit & 1) + carry;
                    sum |= (ones & 1) << bit;
                    carry = if mask >> bit & 1 == 1 { 0 } else { ones >> 1 };
                }
                sum
            }
            Self::CmpSwap {
                swap,
                swap_mask,
                compare,
                compare_mask,
            } => match (old ^ compare) & compare_mask {
                0 => old & !swap_mask | swap & swap_mask,
                _ => old,
            },
        }
    }
}

/// Atomic request data (RFC 7306 5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicRequest {
    /// Request ID, returned in the response.
    pub id: u32,
    /// Buffer key.
    pub stag: u32,
    /// Address, which must be a multiple of eight.
    pub to: u64,
    /// Operation.
    pub atomic: Atomic,
}

impl AtomicRequest {
    /// Parses the payload of a request. Returns `None` if the size is invalid or the operation is
    /// unknown.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != ATOMIC_REQUEST_LEN {
            return None;
        }
        let long = |offset| u64::from_be_bytes(at(bytes, offset));
        let atomic = match u32::from_be_bytes(at(bytes, 0)) & 0xf {
            Atomic::FETCH_ADD => Atomic::FetchAdd {
                add: long(20),
                mask: long(28),
            },
            Atomic::CMP_SWAP => Atomic::CmpSwap {
                swap: long(20),
                swap_mask: long(28),
                compare: long(36),
                compare_mask: long(44),
            },
            _ => return None,
        };
        Some(Self {
            id: u32::from_be_bytes(at(bytes, 4)),
            stag: u32::from_be_bytes(at(bytes, 8)),
            to: long(12),
            atomic,
        })
    }

    /// Appends the request payload to `out`.
    pub fn emit(&self, out: &mut Vec<u8>) {
        let (code, values) = match self.atomic {
            Atomic::FetchAdd { add, mask } => (Atomic::FETCH_ADD, [add, mask, 0, 0]),
            Atomic::CmpSwap {
                swap,
                swap_mask,
                compare,
                compare_mask,
            } => (Atomic::CMP_SWAP, [swap, swap_mask, compare, compare_mask]),
        };
        for word in [code, self.id, self.stag] {
            out.extend_from_slice(&word.to_be_bytes());
        }
        out.extend_from_slice(&self.to.to_be_bytes());
        for value in values {
            out.extend_from_slice(&value.to_be_bytes());
        }
    }
}

/// Atomic response data (RFC 7306 5.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicResponse {
    /// Request ID.
    pub id: u32,
    /// Value before the operation.
    pub original: u64,
}

impl AtomicResponse {
    /// Parses the payload of a response. Returns `None` if the size is invalid.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        (bytes.len() == ATOMIC_RESPONSE_LEN).then(|| Self {
            id: u32::from_be_bytes(at(bytes, 0)),
            original: u64::from_be_bytes(at(bytes, 4)),
        })
    }

    /// Appends the response payload to `out`.
    pub fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.id.to_be_bytes());
        out.extend_from_slice(&self.original.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn emitted(header: &Header) -> Vec<u8> {
        let mut out = Vec::new();
        header.emit(&mut out);
        out
    }

    #[test]
    fn headers_match_rfc_figures() {
        // Last segment of an RDMA WRITE.
        let write = Header {
            opcode: Opcode::Write,
            last: true,
            place: Placement::Tagged {
                stag: 0x0102_0304,
                to: 0x1112_1314_1516_1718,
            },
        };
        let bytes = b"\xc1\x40\x01\x02\x03\x04\x11\x12\x13\x14\x15\x16\x17\x18";
        assert_eq!(emitted(&write), bytes);
        assert_eq!(Header::parse(bytes), Ok((write, &[][..])));
        // Segment of a Send with Solicited Event and Invalidate, which is not the last segment.
        let send = Header {
            opcode: Opcode::SendSolicitedInvalidate,
            last: false,
            place: Placement::Untagged {
                invalidate: 0x2122_2324,
                qn: 0,
                msn: 7,
                mo: 0x1000,
            },
        };
        let bytes = b"\x01\x46\x21\x22\x23\x24\0\0\0\0\0\0\0\x07\0\0\x10\0data";
        assert_eq!(emitted(&send), bytes[..18]);
        assert_eq!(Header::parse(bytes), Ok((send, &b"data"[..])));
    }

    #[test]
    fn request_and_response_payloads_round_trip() {
        let read = ReadRequest {
            sink_stag: 1,
            sink_to: 2,
            size: 3,
            source_stag: 4,
            source_to: 5,
        };
        let bytes = b"\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\x03\0\0\0\x04\0\0\0\0\0\0\0\x05";
        let mut out = Vec::new();
        read.emit(&mut out);
        assert_eq!(out, bytes);
        assert_eq!(ReadRequest::parse(bytes), Some(read));
        assert_eq!(ReadRequest::parse(&bytes[1..]), None);
        let atomic = AtomicRequest {
            id: 9,
            stag: 8,
            to: 16,
            atomic: Atomic::CmpSwap {
                swap: 1,
                swap_mask: 2,
                compare: 3,
                compare_mask: 4,
            },
        };
        let bytes = b"\0\0\0\x02\0\0\0\x09\0\0\0\x08\0\0\0\0\0\0\0\x10\
            \0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\x04";
        out.clear();
        atomic.emit(&mut out);
        assert_eq!(out, bytes);
        assert_eq!(AtomicRequest::parse(bytes), Some(atomic));
        let mut unknown = *bytes;
        unknown[3] = 1;
        assert_eq!(AtomicRequest::parse(&unknown), None);
        let response = AtomicResponse {
            id: 9,
            original: 0x0a0b,
        };
        let bytes = b"\0\0\0\x09\0\0\0\0\0\0\x0a\x0b";
        out.clear();
        response.emit(&mut out);
        assert_eq!(out, bytes);
        assert_eq!(AtomicResponse::parse(bytes), Some(response));
    }

    #[test]
    fn unknown_versions_and_opcodes_are_rejected() {
        let header = *b"\x41\x43\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0";
        let with = |at: usize, byte: u8| {
            let mut bytes = header;
            bytes[at] = byte;
            Header::parse(&bytes).map(|(header, _)| header).unwrap_err()
        };
        let tagged = false;
        assert_eq!(
            with(0, 0x42),
            HeaderError::DdpVersion { version: 2, tagged }
        );
        assert_eq!(with(1, 0x83), HeaderError::RdmapVersion { version: 2 });
        assert_eq!(with(1, 0x4c), HeaderError::Opcode { opcode: 12 });
        // A WRITE is tagged, but a Send is not.
        assert_eq!(with(1, 0x40), HeaderError::Opcode { opcode: 0 });
        assert_eq!(with(0, 0xc1), HeaderError::Opcode { opcode: 3 });
        for len in 0..UNTAGGED_LEN {
            let short = Header::parse(&header[..len]);
            assert_eq!(short, Err(HeaderError::Length { len }));
        }
    }

    #[test]
    fn atomics_respect_masks() {
        let add = |old, add, mask| Atomic::FetchAdd { add, mask }.apply(old);
        assert_eq!(add(u64::MAX, 2, 0), 1);
        // Two 32-bit fields: there must be no carry from the lower field.
        let fields = 0x8000_0000_8000_0000;
        assert_eq!(
            add(0x0000_0001_ffff_ffff, 0x0000_0002_0000_0003, fields),
            0x0000_0003_0000_0002
        );
        let swap = |old| {
            Atomic::CmpSwap {
                swap: 0x1111,
                swap_mask: 0x00ff,
                compare: 0x0a00,
                compare_mask: 0xff00,
            }
            .apply(old)
        };
        assert_eq!((swap(0x0a22), swap(0x0b22)), (0x0a11, 0x0b22));
    }
}
