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
/// The Write STag means something.
const WRITE_VALID: u8 = 0x08;
/// The Read STag means something.
const READ_VALID: u8 = 0x04;
/// REJ of a HelloReply.
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

/// Hello and HelloReply: type and flags, two versions of four bits, a number of RDMA READs.
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

/// A steering tag: the remote key of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stag(pub u32);

/// A buffer of the initiator's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteBuffer {
    /// STag of the buffer.
    pub stag: Stag,
    /// Base Offset: the address of its first byte, as the initiator's device counts.
    pub base: u64,
}

/// Buffers that a control-type PDU advertises.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Buffers {
    /// Buffer of the data that a command writes, which the target reads (W, Write STag, Write Base
    /// Offset).
    pub write: Option<RemoteBuffer>,
    /// Buffer of the data that a command reads, which the target writes (R, Read STag, Read Base
    /// Offset).
    pub read: Option<RemoteBuffer>,
}

/// The first message of an initiator that declared iSERHelloRequired=Yes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Highest version that it speaks; 4 bits.
    pub max_version: u8,
    /// Lowest version that it speaks; 4 bits.
    pub min_version: u8,
    /// iSER-IRD: RDMA READs that it takes at once.
    pub ird: u16,
}

/// The answer to a [`Hello`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HelloReply {
    /// REJ: the connection will be closed.
    pub rejected: bool,
    /// Highest version that the target speaks; 4 bits.
    pub max_version: u8,
    /// The version in use; 4 bits.
    pub current_version: u8,
    /// iSER-ORD: RDMA READs that the target issues at once.
    pub ord: u16,
}

/// An iSER header (RFC 7145 9).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Header {
    /// A control-type PDU follows.
    Control(Buffers),
    /// Hello message (RFC 7145 9.3); no PDU follows.
    Hello(Hello),
    /// HelloReply message (RFC 7145 9.4); no PDU follows.
    HelloReply(HelloReply),
}

impl Header {
    /// Reads the header at the start of a message; what follows it.
    ///
    /// A buffer whose bit is not set is ignored, with all of its fields.
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
        // The two layouts have the same length, so the type can be looked at before it is known.
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

    /// Bytes on the wire.
    #[must_use]
    pub fn bytes(&self) -> [u8; HEADER_LEN] {
        match self {
            Self::Control(buffers) => {
                let mut raw = RawControl {
                    flags: CONTROL,
                    ..RawControl::default()
                };
                // A STag may be zero, so a flag says whether there is one (RFC 7145 9.2).
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
    // Without its flag a STag is not looked at, even if it is not zero (RFC 7145 9.2).
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
    /// The answer of a target that issues up to `ord` READs at once; it is refused where no version
    /// is spoken by both, or where the target issues no READ and the initiator expects some (RFC
    /// 7145 10.1.3.2).
    #[must_use]
    pub fn answer(&self, ord: u16) -> HelloReply {
        // RFC 5046 has version 1, whose messages are the same here, so an initiator that knows no
        // newer one is not refused. Versions 2 to 9 are not assigned. A range whose bounds are
        // swapped has none.
        let offered = self.min_version..=self.max_version;
        let common = [VERSION, 1]
            .into_iter()
            .find(|version| offered.contains(version));
        HelloReply {
            rejected: common.is_none() || (self.ird > 0 && ord == 0),
            max_version: VERSION,
            current_version: common.unwrap_or(VERSION),
            // The smaller of both (RFC 7145 5.1.3): more READs at once than the initiator has room
            // for would end the connection.
            ord: ord.min(self.ird),
        }
    }
}
