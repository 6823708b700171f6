//! The iSER header (RFC 7145 9.1 to 9.4).

use std::mem::size_of;

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{HEADER_LEN, IserError};

/// The version of iSER that RFC 7145 defines (9.3).
pub const VERSION: u8 = 10;

const CONTROL: u8 = 0x10;
const HELLO: u8 = 0x20;
const HELLO_REPLY: u8 = 0x30;
/// The Write STag is valid.
const WRITE_VALID: u8 = 0x08;
/// The Read STag is valid.
const READ_VALID: u8 = 0x04;
/// REJ bit in a HelloReply.
const REJECT: u8 = 0x01;

/// Header of a control-type PDU.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawControl {
    flags: u8,
    reserved: [u8; 3],
    write_stag: U32,
    write_base: U64,
    read_stag: U32,
    read_base: U64,
}

/// Hello and HelloReply: type and flags, two 4-bit versions, and the number of RDMA READs.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawHello {
    flags: u8,
    versions: u8,
    reads: U16,
    reserved: [u8; 24],
}

const _: () = assert!(size_of::<RawControl>() == HEADER_LEN);
const _: () = assert!(size_of::<RawHello>() == HEADER_LEN);

/// A steering tag, which is the remote key of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stag(pub u32);

/// A buffer at the initiator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteBuffer {
    /// STag of the buffer.
    pub stag: Stag,
    /// Base Offset: address of the first byte, used by the initiator's device.
    pub base: u64,
}

/// Buffers in the header of a control-type PDU.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Buffers {
    /// Buffer with the data to write, which will be read by the target (W, Write STag, Write Base
    /// Offset).
    pub write: Option<RemoteBuffer>,
    /// Buffer for the data to read, which will be written by the target (R, Read STag, Read Base
    /// Offset).
    pub read: Option<RemoteBuffer>,
}

/// The first message sent by an initiator if it has declared iSERHelloRequired=Yes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Highest version supported by the initiator, 4 bits.
    pub max_version: u8,
    /// Lowest version supported by the initiator, 4 bits.
    pub min_version: u8,
    /// iSER-IRD: number of RDMA READs that the initiator can handle at once.
    pub ird: u16,
}

/// The response to a [`Hello`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HelloReply {
    /// REJ: set if the connection will be closed.
    pub rejected: bool,
    /// Highest version supported by the target, 4 bits.
    pub max_version: u8,
    /// The version to use, 4 bits.
    pub current_version: u8,
    /// iSER-ORD: number of RDMA READs that the target will send at once.
    pub ord: u16,
}

/// An iSER header (RFC 7145 9).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Header {
    /// Followed by a control-type PDU.
    Control(Buffers),
    /// Hello message (RFC 7145 9.3), not followed by a PDU.
    Hello(Hello),
    /// HelloReply message (RFC 7145 9.4), not followed by a PDU.
    HelloReply(HelloReply),
}

impl Header {
    /// Parses the header of a message. Returns the header and the remaining bytes.
    ///
    /// A buffer is ignored if the corresponding bit is not set.
    ///
    /// # Errors
    /// [`IserError::Truncated`] or [`IserError::Opcode`].
    pub fn parse(message: &[u8]) -> Result<(Self, &[u8]), IserError> {
        let (bytes, rest) =
            message
                .split_first_chunk::<HEADER_LEN>()
                .ok_or(IserError::Truncated {
                    field: "the iSER header",
                    need: HEADER_LEN,
                    have: message.len(),
                })?;
        // Both formats have the same length, so we can read the type from either of them.
        let header = match bytes[0] & 0xf0 {
            CONTROL => Self::Control(control(zerocopy::transmute_ref!(bytes))),
            HELLO => {
                let raw: &RawHello = zerocopy::transmute_ref!(bytes);
                Self::Hello(Hello {
                    max_version: raw.versions >> 4,
                    min_version: raw.versions & 0x0f,
                    ird: raw.reads.get(),
                })
            }
            HELLO_REPLY => {
                let raw: &RawHello = zerocopy::transmute_ref!(bytes);
                Self::HelloReply(HelloReply {
                    rejected: raw.flags & REJECT != 0,
                    max_version: raw.versions >> 4,
                    current_version: raw.versions & 0x0f,
                    ord: raw.reads.get(),
                })
            }
            other => return Err(IserError::Opcode(other >> 4)),
        };
        Ok((header, rest))
    }

    /// Returns the wire format.
    #[must_use]
    pub fn bytes(&self) -> [u8; HEADER_LEN] {
        match self {
            Self::Control(buffers) => {
                let mut raw = RawControl {
                    flags: CONTROL,
                    ..RawControl::default()
                };
                // An STag can be zero, so we need a flag to indicate that it's valid (RFC 7145
                // 9.2).
                if let Some(write) = buffers.write {
                    raw.flags |= WRITE_VALID;
                    raw.write_stag = write.stag.0.into();
                    raw.write_base = write.base.into();
                }
                if let Some(read) = buffers.read {
                    raw.flags |= READ_VALID;
                    raw.read_stag = read.stag.0.into();
                    raw.read_base = read.base.into();
                }
                zerocopy::transmute!(raw)
            }
            Self::Hello(hello) => zerocopy::transmute!(RawHello {
                flags: HELLO,
                versions: hello.max_version << 4 | hello.min_version & 0x0f,
                reads: hello.ird.into(),
                reserved: [0; 24],
            }),
            Self::HelloReply(reply) => zerocopy::transmute!(RawHello {
                flags: HELLO_REPLY | u8::from(reply.rejected),
                versions: reply.max_version << 4 | reply.current_version & 0x0f,
                reads: reply.ord.into(),
                reserved: [0; 24],
            }),
        }
    }
}

fn control(raw: &RawControl) -> Buffers {
    // If the flag is not set, we must ignore the STag, even if it's not zero (RFC 7145 9.2).
    let buffer = |bit, stag: U32, base: U64| {
        (raw.flags & bit != 0).then(|| RemoteBuffer {
            stag: Stag(stag.get()),
            base: base.get(),
        })
    };
    Buffers {
        write: buffer(WRITE_VALID, raw.write_stag, raw.write_base),
        read: buffer(READ_VALID, raw.read_stag, raw.read_base),
    }
}

impl Hello {
    /// Returns the response from a target which can send up to `ord` READs at once. This is a
    /// reject if there is no common version, or if the target doesn't send any READs but the
    /// initiator expects some (RFC 7145 10.1.3.2).
    #[must_use]
    pub fn build_reply(&self, ord: u16) -> HelloReply {
        // Version 1 is RFC 5046. We also accept an initiator that only supports this version,
        // because these messages are the same. Versions 2 to 9 are not assigned. If min and max are
        // swapped, there is no common version.
        let offered = self.min_version..=self.max_version;
        let common = [VERSION, 1]
            .into_iter()
            .find(|version| offered.contains(version));
        HelloReply {
            rejected: common.is_none() || (self.ird > 0 && ord == 0),
            max_version: VERSION,
            current_version: common.unwrap_or(VERSION),
            // Use the smaller value (RFC 7145 5.1.3). If we sent more READs than the initiator has
            // resources for, the connection would fail.
            ord: ord.min(self.ird),
        }
    }
}
