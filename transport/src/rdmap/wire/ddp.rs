//! Headers of DDP segments and of the RDMAP messages in them.
//!
//! ```text
//! tagged:    |T L  rsvd DV|RV rsv opcode| STag (4) | tagged offset (8) |
//! untagged:  |T L  rsvd DV|RV rsv opcode| invalidate STag (4) | QN (4) | MSN (4) | MO (4) |
//! ```

use num_enum::TryFromPrimitive;
use thiserror::Error;

use super::at;

/// Length of the header of a tagged segment, in bytes.
pub const TAGGED_LEN: usize = 14;
/// Length of the header of an untagged segment, in bytes.
pub const UNTAGGED_LEN: usize = 18;

/// Length of what an RDMA READ request says, in bytes.
pub const READ_REQUEST_LEN: usize = 28;
/// Length of what an atomic request says, in bytes.
pub const ATOMIC_REQUEST_LEN: usize = 52;
/// Length of what an atomic response says, in bytes.
pub const ATOMIC_RESPONSE_LEN: usize = 12;
/// Length of the data of an immediate message, in bytes.
pub const IMMEDIATE_LEN: usize = 8;

const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const DDP_VERSION_MASK: u8 = 0x03;
const DDP_VERSION: u8 = 1;
const RDMAP_VERSION_MASK: u8 = 0xc0;
const RDMAP_VERSION: u8 = 0x40;
const OPCODE_MASK: u8 = 0x0f;

/// Operation of an RDMAP message (RFC 5040 4.3, RFC 7306 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromPrimitive)]
#[repr(u8)]
pub enum Opcode {
    /// RDMA WRITE.
    Write = 0,
    /// Request of an RDMA READ.
    ReadRequest = 1,
    /// Answer to an RDMA READ.
    ReadResponse = 2,
    /// Message for a receive.
    Send = 3,
    /// Message for a receive, which invalidates a key of the receiver's.
    SendInvalidate = 4,
    /// Message for a receive, whose completion is solicited.
    SendSolicited = 5,
    /// Message for a receive, which does both.
    SendSolicitedInvalidate = 6,
    /// End of the connection, with the reason.
    Terminate = 7,
    /// Eight bytes for a receive (RFC 7306 6).
    Immediate = 8,
    /// Eight bytes for a receive, whose completion is solicited.
    ImmediateSolicited = 9,
    /// Request of an atomic.
    AtomicRequest = 10,
    /// Answer to an atomic.
    AtomicResponse = 11,
}

/// Queue of an untagged message (RFC 5040 5.2, RFC 7306 5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromPrimitive)]
#[repr(u32)]
pub enum Queue {
    /// Messages for receives.
    Send = 0,
    /// Requests of RDMA READs and atomics.
    ReadRequest = 1,
    /// The message that ends the connection.
    Terminate = 2,
    /// Answers to atomics.
    AtomicResponse = 3,
}

impl Opcode {
    /// Whether its messages are tagged.
    #[must_use]
    pub fn is_tagged(self) -> bool {
        matches!(self, Self::Write | Self::ReadResponse)
    }

    /// Queue of its messages; `None` for tagged ones.
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

    /// Whether the completion of its receive is solicited.
    #[must_use]
    pub fn is_solicited(self) -> bool {
        matches!(
            self,
            Self::SendSolicited | Self::SendSolicitedInvalidate | Self::ImmediateSolicited
        )
    }
}

/// Buffer model of a segment, with its place in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a buffer that the receiver has named.
    Tagged {
        /// Key of the buffer.
        stag: u32,
        /// Address of the segment's first byte.
        to: u64,
    },
    /// In the next buffer of a queue.
    Untagged {
        /// Key that the message invalidates, with the opcodes that do.
        invalidate: u32,
        /// Number of the queue.
        qn: u32,
        /// Number of the message in its queue, from 1.
        msn: u32,
        /// Offset of the segment's first byte in its message.
        mo: u32,
    },
}

/// Header of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Operation of the message.
    pub opcode: Opcode,
    /// It is the message's last segment.
    pub last: bool,
    /// Place of the segment.
    pub place: Place,
}

/// Reason why bytes are no segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HeaderError {
    /// Shorter than its header.
    #[error("{len} bytes are no DDP segment")]
    Length {
        /// Number of bytes that there are.
        len: usize,
    },
    /// Another version of DDP.
    #[error("DDP version {version}")]
    DdpVersion {
        /// Version that was received.
        version: u8,
        /// The segment is tagged.
        tagged: bool,
    },
    /// Another version of RDMAP.
    #[error("RDMAP version {version}")]
    RdmapVersion {
        /// Version that was received.
        version: u8,
    },
    /// No operation, or one of the other buffer model.
    #[error("unexpected opcode {opcode}")]
    Opcode {
        /// Operation code that was received.
        opcode: u8,
    },
}

impl Header {
    /// Length of the header, in bytes.
    #[must_use]
    pub const fn len(place: Place) -> usize {
        match place {
            Place::Tagged { .. } => TAGGED_LEN,
            Place::Untagged { .. } => UNTAGGED_LEN,
        }
    }

    /// Parses a ULPDU into header and payload.
    ///
    /// # Errors
    /// [`HeaderError`].
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
            true if bytes.len() >= TAGGED_LEN => Place::Tagged {
                stag: word(2),
                to: u64::from_be_bytes(at(bytes, 6)),
            },
            false if bytes.len() >= UNTAGGED_LEN => Place::Untagged {
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
        let tagged = matches!(self.place, Place::Tagged { .. });
        let last = if self.last { LAST } else { 0 };
        out.push(if tagged { TAGGED } else { 0 } | last | DDP_VERSION);
        out.push(RDMAP_VERSION | self.opcode as u8);
        match self.place {
            Place::Tagged { stag, to } => {
                out.extend_from_slice(&stag.to_be_bytes());
                out.extend_from_slice(&to.to_be_bytes());
            }
            Place::Untagged {
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

/// What an RDMA READ request says (RFC 5040 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// Key of the buffer that the answer goes to.
    pub sink_stag: u32,
    /// Address in this buffer.
    pub sink_to: u64,
    /// Bytes to read.
    pub size: u32,
    /// Key of the buffer to read.
    pub source_stag: u32,
    /// Address in this buffer.
    pub source_to: u64,
}

impl ReadRequest {
    /// Parses the payload of a request; `None` where it has another length.
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

    /// Appends the payload of the request to `out`.
    pub fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.sink_stag.to_be_bytes());
        out.extend_from_slice(&self.sink_to.to_be_bytes());
        out.extend_from_slice(&self.size.to_be_bytes());
        out.extend_from_slice(&self.source_stag.to_be_bytes());
        out.extend_from_slice(&self.source_to.to_be_bytes());
    }
}

/// Atomic operation on eight bytes (RFC 7306 5.1), as numbers of the responder's host. A bit of a
/// mask that is set in an addition ends a field there: no carry leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Addition.
    FetchAdd {
        /// Addend of each field.
        add: u64,
        /// Highest bits of the fields.
        mask: u64,
    },
    /// Exchange, where the bits of a mask are as expected.
    CmpSwap {
        /// Bits to store.
        swap: u64,
        /// Bits that are stored.
        swap_mask: u64,
        /// Bits that are expected.
        compare: u64,
        /// Bits that are compared.
        compare_mask: u64,
    },
}

impl Atomic {
    const FETCH_ADD: u32 = 0;
    const CMP_SWAP: u32 = 2;

    /// The value that the operation leaves in the place of `old`.
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

/// What an atomic request says (RFC 7306 5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicRequest {
    /// Number that comes back in the answer.
    pub id: u32,
    /// Key of the buffer with the eight bytes.
    pub stag: u32,
    /// Their address, a multiple of eight.
    pub to: u64,
    /// Operation on them.
    pub atomic: Atomic,
}

impl AtomicRequest {
    /// Parses the payload of a request; `None` where it has another length, or an operation that is
    /// not known.
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

    /// Appends the payload of the request to `out`.
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

/// What an atomic response says (RFC 7306 5.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicResponse {
    /// Number of the request.
    pub id: u32,
    /// Value of the eight bytes before the operation.
    pub original: u64,
}

impl AtomicResponse {
    /// Parses the payload of a response; `None` where it has another length.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        (bytes.len() == ATOMIC_RESPONSE_LEN).then(|| Self {
            id: u32::from_be_bytes(at(bytes, 0)),
            original: u64::from_be_bytes(at(bytes, 4)),
        })
    }

    /// Appends the payload of the response to `out`.
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
    fn headers_as_the_figures_have_them() {
        // The last segment of an RDMA WRITE.
        let write = Header {
            opcode: Opcode::Write,
            last: true,
            place: Place::Tagged {
                stag: 0x0102_0304,
                to: 0x1112_1314_1516_1718,
            },
        };
        let bytes = b"\xc1\x40\x01\x02\x03\x04\x11\x12\x13\x14\x15\x16\x17\x18";
        assert_eq!(emitted(&write), bytes);
        assert_eq!(Header::parse(bytes), Ok((write, &[][..])));
        // A segment of a Send with Solicited Event and Invalidate, which is not its last.
        let send = Header {
            opcode: Opcode::SendSolicitedInvalidate,
            last: false,
            place: Place::Untagged {
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
    fn what_requests_and_answers_say() {
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
    fn versions_and_operations_that_there_are_not() {
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
        // A WRITE is tagged, and a Send is not.
        assert_eq!(with(1, 0x40), HeaderError::Opcode { opcode: 0 });
        assert_eq!(with(0, 0xc1), HeaderError::Opcode { opcode: 3 });
        for len in 0..UNTAGGED_LEN {
            let short = Header::parse(&header[..len]);
            assert_eq!(short, Err(HeaderError::Length { len }));
        }
    }

    #[test]
    fn atomics_stay_within_their_masks() {
        let add = |old, add, mask| Atomic::FetchAdd { add, mask }.apply(old);
        assert_eq!(add(u64::MAX, 2, 0), 1);
        // Two fields of 32 bits: no carry from the lower one.
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
